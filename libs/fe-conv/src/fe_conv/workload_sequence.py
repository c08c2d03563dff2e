"""The workloads of ``causal_conv1d`` and its gradient, with the channels innermost."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from fe_runtime.arrays import is_jax_array
from fe_runtime.bench.accuracy import allowed_in_dtype
from fe_runtime.bench.workload import Arrays, Case, Expected, Operands, Peer, Source, Workload, load_target
from fe_runtime.tuple_dict import TupleDict

__all__ = ["CAUSAL_CONV1D", "CAUSAL_CONV1D_BACKWARD"]

MEMBERS = 8
"""Sequences of a packed case; their lengths grow, and one is empty."""

SUM_ROUNDINGS = 64
"""Bound on the roundings of a gradient in fp32, in units of 2^-24 of the sum of its absolute terms.

Sums over all tokens are made in parts, so that their error stays near this too."""

INITIAL, OFFSETS = "initial_states", "cu_seqlens"


# --- cases and their arrays ------------------------------------------------------------------------------------------


def _operands(case: Case) -> Operands:
    batch, length, channels, width = case.dims.values()
    optional = {
        "bias": ((channels,), case.dtype),
        OFFSETS: ((MEMBERS + 1,), "int32"),
        INITIAL: ((MEMBERS if OFFSETS in case.optional else batch, channels, width - 1), case.dtype),
    }
    return {
        "x": ((batch, length, channels), case.dtype),
        "weight": ((channels, width), case.dtype),
        **{name: optional[name] for name in case.optional},
    }


def _backward_operands(case: Case) -> Operands:
    forward = _operands(case)
    return {"dy": forward["x"], **forward}


def _inputs(case: Case, source: Source) -> Arrays:
    operands = _operands(case)
    arrays = {name: source.activations(*operands[name]) for name in ("x", INITIAL) if name in operands}
    arrays |= {name: source.normal(*operands[name], scale=0.5) for name in ("weight", "bias") if name in operands}
    if OFFSETS in operands:
        arrays[OFFSETS] = source.array(_offsets(case))
    return arrays


def _backward_inputs(case: Case, source: Source) -> Arrays:
    return {"dy": source.normal(*_backward_operands(case)["dy"]), **_inputs(case, source)}


def _offsets(case: Case) -> Any:
    share = np.linspace(0, 1, MEMBERS + 1) ** 2
    offsets = np.round(share * case.dims["T"]).astype(np.int32)
    offsets[3] = offsets[2]
    return offsets


def _spans(case: Case) -> list[tuple[int, slice, int]]:
    """Return for each sequence its batch row, its tokens, and its row of the states."""
    if OFFSETS not in case.optional:
        return [(row, slice(0, case.dims["T"]), row) for row in range(case.dims["B"])]
    return [(0, slice(start, stop), n) for n, (start, stop) in enumerate(pairwise(_offsets(case).tolist()))]


# --- the formulas in float64 -----------------------------------------------------------------------------------------


def _expected(case: Case, inputs: Arrays) -> Expected:
    """Evaluate the definition sequence by sequence, and what fp32 arithmetic and one rounding may change.

    An error ``e`` of ``z`` moves ``y = z*s``, ``s`` the sigmoid of ``z``, by ``e*|s*(1 + z*(1-s))|``.
    """
    wide = _wide(inputs)
    y, allowed = np.zeros(wide["x"].shape), np.zeros(wide["x"].shape)
    for row, tokens, sequence in _spans(case):
        h = _history(wide, row, tokens, sequence)
        z, scale = _correlate(h, wide), _correlate(np.abs(h), {n: np.abs(a) for n, a in wide.items()})
        act, slope = _activate(case, z)
        y[row, tokens] = act
        allowed[row, tokens] = _roundings(case) * 2.0**-24 * (np.abs(act) + scale * np.abs(slope))
        allowed[row, tokens] += scale * 2.0**-126  # the exponential may underflow
    return Expected(y, allowed_in_dtype(y, case.dtype, allowed))


def _expected_backward(case: Case, inputs: Arrays) -> Expected:
    """Evaluate the gradients of x, weight and bias, one after the other in one vector."""
    wide = _wide(inputs)
    values, sizes = _gradients(case, wide, lambda a: a), _gradients(case, wide, np.abs)
    return Expected(values, allowed_in_dtype(values, case.dtype, SUM_ROUNDINGS * 2.0**-24 * sizes))


def _roundings(case: Case) -> int:
    """Return a bound on the roundings to fp32 of one result: products, sums, and what the exponential costs."""
    return 2 * case.dims["W"] + 1 + (16 if "activation" in case.options else 0)


def _gradients(case: Case, wide: Mapping[str, Any], size: Callable[[Any], Any]) -> Any:
    """Return the gradients with ``size`` applied to every term of their sums."""
    width = case.dims["W"]
    dx, dweight = np.zeros(wide["x"].shape), np.zeros(wide["weight"].shape)
    dbias = np.zeros(wide["x"].shape[2])
    for row, tokens, sequence in _spans(case):
        h = _history(wide, row, tokens, sequence)
        dz = wide["dy"][row, tokens] * _activate(case, _correlate(h, wide))[1]
        dh = np.zeros(h.shape)
        for j in range(width):
            dh[j : j + len(dz)] += size(dz * wide["weight"][:, j])
            dweight[:, j] += size(dz * h[j : j + len(dz)]).sum(axis=0)
        dx[row, tokens] = dh[width - 1 :]
        dbias += size(dz).sum(axis=0)
    parts = [dx, dweight, dbias] if "bias" in wide else [dx, dweight]
    return np.concatenate([part.ravel() for part in parts])


def _wide(inputs: Arrays) -> dict[str, Any]:
    return {name: np.asarray(array, np.float64) for name, array in inputs.items() if name != OFFSETS}


def _history(wide: Mapping[str, Any], row: int, tokens: slice, sequence: int) -> Any:
    channels, width = wide["weight"].shape
    before = wide[INITIAL][sequence].T if INITIAL in wide else np.zeros((width - 1, channels))
    return np.concatenate([before, wide["x"][row, tokens]])


def _correlate(h: Any, wide: Mapping[str, Any]) -> Any:
    weight = wide["weight"]
    width = weight.shape[1]
    z = sum(weight[:, j] * h[j : len(h) - width + 1 + j] for j in range(width))
    return z + wide["bias"] if "bias" in wide else z


def _activate(case: Case, z: Any) -> tuple[Any, Any]:
    """Return the activation and its derivative."""
    if case.options.get("activation", "identity") == "identity":
        return z, np.ones(z.shape)
    s = np.exp(-np.logaddexp(0, -z))
    return z * s, s * (1 + z * (1 - s))


def _decode(case: Case, outputs: Arrays) -> Any:
    return outputs["y"].astype(np.float64)


def _decode_backward(case: Case, outputs: Arrays) -> Any:
    names = ["dx", "dweight", "dbias"] if "bias" in case.optional else ["dx", "dweight"]
    return np.concatenate([outputs[name].astype(np.float64).ravel() for name in names])


# --- what a user would write -----------------------------------------------------------------------------------------


def _plain_numpy(case: Case, inputs: Arrays) -> Any:
    x, weight = inputs["x"].astype(np.float32), inputs["weight"].astype(np.float32)
    width, y = case.dims["W"], np.zeros(inputs["x"].shape, np.float32)
    for row, tokens, sequence in _spans(case):
        before = np.zeros((width - 1, x.shape[2]), np.float32)
        if INITIAL in inputs:
            before = inputs[INITIAL][sequence].T.astype(np.float32)
        h = np.concatenate([before, x[row, tokens]])
        count = tokens.stop - tokens.start
        y[row, tokens] = sum(weight[:, j] * h[j : j + count] for j in range(width))
    if "bias" in inputs:
        y += inputs["bias"].astype(np.float32)
    if case.options.get("activation") == "silu":
        with np.errstate(over="ignore"):
            y = y / (1 + np.exp(-y))
    return y.astype(inputs["x"].dtype)


def _plain_torch(case: Case, inputs: Arrays) -> Any:
    """Evaluate torch's own depthwise convolution on each sequence, in the layout that it takes."""
    torch: Any = importlib.import_module("torch")
    width, parts = case.dims["W"], []
    weight = inputs["weight"].unsqueeze(1)
    groups = _sequence_groups(case, inputs["x"])
    for number, x in enumerate(groups):
        x = x.transpose(1, 2)
        if INITIAL in inputs:
            states = inputs[INITIAL] if OFFSETS not in inputs else inputs[INITIAL][number : number + 1]
            x = torch.cat([states, x], dim=2)
        else:
            x = torch.nn.functional.pad(x, (width - 1, 0))
        if x.shape[2] >= width:
            parts.append(torch.nn.functional.conv1d(x, weight, inputs.get("bias"), groups=weight.shape[0]))
    y = torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]
    y = torch.nn.functional.silu(y) if case.options.get("activation") == "silu" else y
    return y.transpose(1, 2)


def _sequence_groups(case: Case, x: Any) -> list[Any]:
    return [x[:, tokens] for _, tokens, _ in _spans(case)] if OFFSETS in case.optional else [x]


def _plain_jax(case: Case, inputs: Arrays) -> Any:
    jax: Any = importlib.import_module("jax")
    jnp, width, parts = jax.numpy, case.dims["W"], []
    weight = inputs["weight"].astype(jnp.float32)
    for number, x in enumerate(_sequence_groups(case, inputs["x"])):
        before = jnp.zeros((x.shape[0], width - 1, x.shape[2]), x.dtype)
        if INITIAL in inputs:
            states = inputs[INITIAL] if OFFSETS not in inputs else inputs[INITIAL][number : number + 1]
            before = states.swapaxes(1, 2)
        h = jnp.concatenate([before, x], axis=1).astype(jnp.float32)
        parts.append(sum(weight[:, j] * h[:, j : j + x.shape[1]] for j in range(width)))
    y = jnp.concatenate(parts, axis=1)
    y = y + inputs["bias"].astype(jnp.float32) if "bias" in inputs else y
    y = jax.nn.silu(y) if case.options.get("activation") == "silu" else y
    return y.astype(inputs["x"].dtype)


def _plain_backward_numpy(case: Case, inputs: Arrays) -> Any:
    """Evaluate the formulas in float32; return what :func:`_decode_backward` takes."""
    wide = {name: a.astype(np.float32) for name, a in inputs.items() if name != OFFSETS}
    flat = _gradients(case, wide, lambda a: a)
    outputs, at = {}, 0
    for name, like in (("dx", "x"), ("dweight", "weight"), ("dbias", "bias")):
        if like in wide:
            part = flat[at : at + wide[like].size].reshape(wide[like].shape)
            outputs[name], at = part.astype(inputs[like].dtype), at + part.size
    return outputs


# --- peers -----------------------------------------------------------------------------------------------------------


def _compiled(case: Case) -> Callable[[Arrays], Any]:
    """Return the sum of shifted products under torch.compile: it has no kernel for the convolution itself."""
    _require_dense(case)
    torch: Any = importlib.import_module("torch")
    config: Any = importlib.import_module("torch._functorch.config")
    config.donated_buffer = False  # a graph is run backward many times
    torch.compiler.reset()  # else the eighth case of a run would not be compiled any more
    width, silu = case.dims["W"], case.options.get("activation") == "silu"

    def expression(x: Any, weight: Any, bias: Any) -> Any:
        h, taps = torch.nn.functional.pad(x, (0, 0, width - 1, 0)), weight.float()
        z = sum(h[:, j : j + x.shape[1]].float() * taps[:, j] for j in range(width))
        z = z if bias is None else z + bias.float()
        return (torch.nn.functional.silu(z) if silu else z).to(x.dtype)

    compiled = torch.compile(expression, dynamic=False)
    return lambda arrays: compiled(arrays["x"], arrays["weight"], arrays.get("bias"))


def _fla(case: Case) -> Callable[[Arrays], Any]:
    _require_dense(case)
    function: Any = importlib.import_module("fla.modules.convolution").causal_conv1d
    activation = "silu" if case.options.get("activation") == "silu" else None
    return lambda arrays: function(arrays["x"], arrays["weight"], arrays.get("bias"), activation=activation)[0]


def _channel_first(load: Callable[[], Callable[..., Any]]) -> Callable[[Case], Callable[[Arrays], Any]]:
    """Return the maker of a peer that takes (B, D, T), here as a view, and has our argument names."""

    def make(case: Case) -> Callable[[Arrays], Any]:
        _require_dense(case)
        function = load()
        activation = "silu" if case.options.get("activation") == "silu" else None

        def call(arrays: Arrays) -> Any:
            x = arrays["x"].transpose(1, 2)
            return function(x, arrays["weight"], arrays.get("bias"), activation=activation).transpose(1, 2)

        return call

    return make


def _dao() -> Callable[..., Any]:
    return importlib.import_module("causal_conv1d").causal_conv1d_fn  # type: ignore[no-any-return]


def _frontend() -> Callable[..., Any]:
    return importlib.import_module("cudnn").ops.causal_conv1d  # type: ignore[no-any-return]


def _require_dense(case: Case) -> None:
    if {OFFSETS, INITIAL} & set(case.optional):
        raise NotImplementedError("it is timed on plain rows only")


def _gradient_of(make: Callable[[Case], Callable[[Arrays], Any]]) -> Callable[[Case], Callable[[Arrays], Any]]:
    """Return the maker of a call that runs another one's gradient only: the graph of each set of arrays is kept."""

    def make_gradient(case: Case) -> Callable[[Arrays], Any]:
        torch: Any = importlib.import_module("torch")
        forward, graphs = make(case), {}

        def call(arrays: Arrays) -> Any:
            if id(arrays) not in graphs:
                names = ("x", "weight", "bias") if "bias" in arrays else ("x", "weight")
                leaves = {name: arrays[name].detach().requires_grad_() for name in names}
                graphs[id(arrays)] = forward({**arrays, **leaves}), list(leaves.values())
            y, wanted = graphs[id(arrays)]
            return torch.autograd.grad(y, wanted, arrays["dy"], retain_graph=True)

        return call

    return make_gradient


def _eager(case: Case) -> Callable[[Arrays], Any]:
    _require_dense(case)
    return lambda arrays: _plain_torch(case, arrays)


PEERS = (
    Peer("torch.compile", "sum of shifted products", _compiled),
    Peer("flash-linear-attention", "causal_conv1d", _fla),
    Peer("causal-conv1d", "causal_conv1d_fn", _channel_first(_dao)),
    Peer("nvidia-cudnn-frontend", "ops.causal_conv1d", _channel_first(_frontend)),
)

BACKWARD_PEERS = (
    Peer("torch", "conv1d, gradient only", _gradient_of(_eager)),
    Peer("torch.compile", "sum of shifted products, gradient only", _gradient_of(_compiled)),
    *(Peer(peer.name, f"{peer.does}, gradient only", _gradient_of(peer.make)) for peer in PEERS[1:]),
)


# --- the workloads ---------------------------------------------------------------------------------------------------


def _with_channels_last(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the public function for arguments of the operation with the channels last."""

    def call(x: Any, weight: Any, bias: Any = None, **rest: Any) -> TupleDict:
        if is_jax_array(x):
            jax_entry = load_target("fe_conv:causal_conv1d_jax")
            return TupleDict(y=jax_entry(x, weight, bias, **rest, channel_last=True))
        return TupleDict(y=function(x.swapaxes(1, 2), weight, bias, **rest).swapaxes(1, 2))

    return call


def causal_conv1d_backward(**arguments: Any) -> TupleDict:
    """Return the gradients of ``causal_conv1d`` with the channels last: what torch and JAX run in a backward pass.

    The arguments are those of ``torch.ops.fe_conv.causal_conv1d_channel_last_backward``.
    """
    operation = load_target("fe_conv.sequence:CHANNEL_LAST_BACKWARD")
    arrays = [arguments.pop(name, None) for name in operation.contract.input_names]
    result: TupleDict = operation(arrays, arguments)
    return result


def _case(
    batch: int, length: int, channels: int, width: int = 4, dtype: str = "bfloat16", *optional: str, act: str = "silu"
) -> Case:
    options = {"activation": act} if act != "identity" else {}
    return Case({"B": batch, "T": length, "D": channels, "W": width}, dtype, options, optional)


TARGET = _case(8, 8192, 4096)
MODELS = (
    _case(1, 32768, 8192),  # fused q, k, v of gated-delta blocks
    _case(4, 8192, 10240, 4, "bfloat16", "bias"),  # Mamba-2
    _case(1, 16384, 4096, 4, "bfloat16", OFFSETS),  # Kimi Linear, packed
)
WITH_STATES = (
    _case(2, 2048, 8192, 4, "bfloat16", INITIAL),
    _case(1, 16384, 4096, 4, "bfloat16", OFFSETS, INITIAL),
)
PRESETS = {
    "default": tuple(
        _case(1, 4096, channels, 4, "bfloat16", *optional)
        for channels in (2048, 4096, 5376, 8192, 10240, 24576)
        for optional in ((), ("bias",), (OFFSETS,), (OFFSETS, INITIAL), (INITIAL,))
    ),
    "widths": tuple(
        _case(1, 4096, 4096, width, dtype, act=act)
        for width in (2, 3, 4, 7, 128)
        for dtype in ("bfloat16", "float16", "float32")
        for act in ("identity", "silu")
    ),
}
DEMO = (
    _case(2, 256, 512),
    _case(2, 256, 512, 4, "bfloat16", "bias"),
    _case(1, 512, 512, 4, "bfloat16", OFFSETS, INITIAL),
    _case(2, 256, 512, 4, "float16"),
    _case(2, 256, 512, 3, "float32", "bias", act="identity"),
)

CAUSAL_CONV1D = Workload(
    title="causal_conv1d",
    operation="fe_conv.sequence:CHANNEL_LAST",
    wrapper="fe_conv:causal_conv1d",
    adapt=_with_channels_last,
    summary="act(sum_j weight[j] * x[t-W+1+j] + bias)",
    dims=("B", "T", "D", "W"),
    operands=_operands,
    inputs=_inputs,
    expected=_expected,
    decode=_decode,
    plain={"numpy": _plain_numpy, "torch": _plain_torch, "jax": _plain_jax},
    demo=DEMO,
    bench=(TARGET, *MODELS, *WITH_STATES, _case(2, 8192, 4096, 64, "float16", act="identity")),
    host=_case(1, 32, 1024),
    presets=PRESETS,
    peers=PEERS,
)

CAUSAL_CONV1D_BACKWARD = Workload(
    title="causal_conv1d_backward",
    operation="fe_conv.sequence:CHANNEL_LAST_BACKWARD",
    wrapper="fe_conv.workload_sequence:causal_conv1d_backward",
    summary="gradients of causal_conv1d",
    dims=("B", "T", "D", "W"),
    operands=_backward_operands,
    inputs=_backward_inputs,
    expected=_expected_backward,
    decode=_decode_backward,
    plain={"numpy": _plain_backward_numpy},
    demo=(DEMO[1], DEMO[2]),
    bench=(TARGET, *MODELS),
    host=_case(1, 32, 1024),
    presets=PRESETS,
    peers=BACKWARD_PEERS,
    is_public=False,
)
