"""The workload of ``causal_conv1d_update``: one token of each row."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from fe_runtime.arrays import is_jax_array
from fe_runtime.bench.accuracy import allowed_in_dtype
from fe_runtime.bench.peers import torch_compiled
from fe_runtime.bench.workload import Arrays, Case, Expected, Operands, Peer, Source, Workload, load_target
from fe_runtime.tuple_dict import TupleDict

__all__ = ["CAUSAL_CONV1D_UPDATE"]

INDICES, RING = "conv_state_indices", "cache_seqlens"


# --- cases and their arrays ------------------------------------------------------------------------------------------


def _operands(case: Case) -> Operands:
    rows, channels, length, width = case.dims.values()
    optional = {"bias": ((channels,), case.dtype), INDICES: ((rows,), "int32"), RING: ((rows,), "int32")}
    return {
        "x": ((rows, channels), case.dtype),
        "conv_state": ((rows, channels, length), case.dtype),
        "weight": ((channels, width), case.dtype),
        **{name: optional[name] for name in case.optional},
    }


def _inputs(case: Case, source: Source) -> Arrays:
    operands, rows = _operands(case), case.dims["N"]
    arrays = {name: source.activations(*operands[name]) for name in ("x", "conv_state")}
    arrays |= {name: source.normal(*operands[name], scale=0.5) for name in ("weight", "bias") if name in operands}
    integers = {INDICES: np.arange(rows)[::-1], RING: 7 * np.arange(rows) + 2}
    return arrays | {name: source.array(integers[name].astype(np.int32)) for name in integers if name in operands}


def _history(case: Case, inputs: Arrays, xp: Any) -> Any:
    """Return the last W tokens of each row, the new one included."""
    state, width = inputs["conv_state"], case.dims["W"]
    if INDICES in inputs:
        state = state[inputs[INDICES]]
    if RING in inputs:
        places = (inputs[RING][:, None] + xp.arange(case.dims["L"])) % case.dims["L"]  # oldest first
        state = xp.take_along_axis(state, places[:, None, :], axis=2)
    return xp.concatenate([state, inputs["x"][:, :, None]], axis=2)[:, :, -width:]


# --- the formula in float64 ------------------------------------------------------------------------------------------


def _expected(case: Case, inputs: Arrays) -> Expected:
    """Evaluate the definition, and what fp32 arithmetic and one rounding may change.

    An error ``e`` of ``z`` moves ``y = z*s``, ``s`` the sigmoid of ``z``, by ``e*|s*(1 + z*(1-s))|``.
    """
    terms = _history(case, inputs, np).astype(np.float64) * inputs["weight"].astype(np.float64)
    bias = inputs["bias"].astype(np.float64) if "bias" in inputs else np.zeros(terms.shape[1])
    z, scale = terms.sum(-1) + bias, np.abs(terms).sum(-1) + np.abs(bias)
    y, slope, roundings = z, np.ones(z.shape), 2 * case.dims["W"] + 1
    if "activation" in case.options:
        s = np.exp(-np.logaddexp(0, -z))
        y, slope, roundings = z * s, s * (1 + z * (1 - s)), roundings + 16
    arithmetic = roundings * 2.0**-24 * (np.abs(y) + scale * np.abs(slope)) + scale * 2.0**-126
    return Expected(y, allowed_in_dtype(y, case.dtype, arithmetic))


def _decode(case: Case, outputs: Arrays) -> Any:
    return outputs["out"].astype(np.float64)


# --- what a user would write -----------------------------------------------------------------------------------------


def _plain_numpy(case: Case, inputs: Arrays) -> Any:
    z = (_history(case, inputs, np).astype(np.float32) * inputs["weight"].astype(np.float32)).sum(-1)
    z = z + inputs["bias"].astype(np.float32) if "bias" in inputs else z
    with np.errstate(over="ignore"):
        y = z / (1 + np.exp(-z)) if "activation" in case.options else z
    _move(case, inputs, np)
    return y.astype(inputs["x"].dtype)


def _move(case: Case, inputs: Arrays, xp: Any) -> None:
    """Write the tokens into the state of numpy arrays or torch tensors, in place."""
    state, x = inputs["conv_state"], inputs["x"]
    rows = inputs.get(INDICES, xp.arange(case.dims["N"]))
    if RING in inputs:
        state[rows, :, inputs[RING] % case.dims["L"]] = x
    else:
        state[rows] = xp.concatenate([state[rows, :, 1:], x[:, :, None]], 2)


def _plain_torch(case: Case, inputs: Arrays) -> Any:
    torch: Any = importlib.import_module("torch")
    state, x = inputs["conv_state"], inputs["x"]
    device = x.device
    rows = inputs.get(INDICES, torch.arange(case.dims["N"], device=device)).long()
    history = state[rows]
    if RING in inputs:
        places = (inputs[RING].long()[:, None] + torch.arange(case.dims["L"], device=device)) % case.dims["L"]
        history = history.gather(2, places[:, None, :].expand_as(history))
    history = torch.cat([history, x[:, :, None]], dim=2)
    z = (history[:, :, -case.dims["W"] :].float() * inputs["weight"].float()).sum(-1)
    z = z + inputs["bias"].float() if "bias" in inputs else z
    y = (torch.nn.functional.silu(z) if "activation" in case.options else z).to(x.dtype)
    if RING in inputs:
        state[rows, :, inputs[RING].long() % case.dims["L"]] = x
    else:
        state[rows] = history[:, :, 1:]
    return y


def _plain_jax(case: Case, inputs: Arrays) -> Any:
    return _jitted(tuple(case.dims.items()), "activation" in case.options)(dict(inputs))


@functools.cache
def _jitted(dims: tuple[tuple[str, int], ...], silu: bool) -> Callable[[Arrays], Any]:
    jax: Any = importlib.import_module("jax")
    jnp, case = jax.numpy, Case(dict(dims), "")

    def plain(inputs: Arrays) -> Any:
        history = _history(case, inputs, jnp)
        z = (history.astype(jnp.float32) * inputs["weight"].astype(jnp.float32)).sum(-1)
        z = z + inputs["bias"].astype(jnp.float32) if "bias" in inputs else z
        return (jax.nn.silu(z) if silu else z).astype(inputs["x"].dtype)

    compiled: Callable[[Arrays], Any] = jax.jit(plain)
    return compiled


# --- peers -----------------------------------------------------------------------------------------------------------


def _fla(case: Case) -> Callable[[Arrays], Any]:
    if set(case.optional) - {"bias"} or case.dims["L"] != case.dims["W"]:
        raise NotImplementedError("it has no such state")
    function: Any = importlib.import_module("fla.modules.conv.triton.ops").causal_conv1d_update
    activation = case.options.get("activation")
    return lambda arrays: function(
        arrays["x"], arrays["conv_state"], None, arrays["weight"], arrays.get("bias"), activation
    )[0]


def _dao(case: Case) -> Callable[[Arrays], Any]:
    return _same_signature(case, importlib.import_module("causal_conv1d").causal_conv1d_update)


def _frontend(case: Case) -> Callable[[Arrays], Any]:
    return _same_signature(case, importlib.import_module("cudnn").ops.causal_conv1d_update)


def _same_signature(case: Case, function: Callable[..., Any]) -> Callable[[Arrays], Any]:
    activation = case.options.get("activation")

    def call(arrays: Arrays) -> Any:
        extra = {name: arrays[name] for name in (INDICES, RING) if name in arrays}
        operands = (arrays["x"], arrays["conv_state"], arrays["weight"], arrays.get("bias"))
        return function(*operands, activation, **extra)

    return call


PEERS = (
    Peer("torch.compile", "the plain expression", torch_compiled(_plain_torch)),
    Peer("flash-linear-attention", "causal_conv1d_update", _fla),
    Peer("causal-conv1d", "causal_conv1d_update", _dao),
    Peer("nvidia-cudnn-frontend", "ops.causal_conv1d_update", _frontend),
)


# --- the workload ----------------------------------------------------------------------------------------------------


def _by_name(function: Callable[..., Any]) -> Callable[..., TupleDict]:
    """Return the public function of the arrays' framework, its result by name."""

    def call(**arguments: Any) -> TupleDict:
        if is_jax_array(arguments["x"]):
            out, _ = load_target("fe_conv:causal_conv1d_update_jax")(**arguments)
            return TupleDict(out=out)
        return TupleDict(out=function(**arguments))

    return call


def _case(
    rows: int,
    channels: int,
    length: int = 4,
    width: int = 4,
    dtype: str = "bfloat16",
    *optional: str,
    act: str = "silu",
) -> Case:
    options = {"activation": act} if act != "identity" else {}
    return Case({"N": rows, "D": channels, "L": length, "W": width}, dtype, options, optional)


TARGET = _case(512, 8192)

CAUSAL_CONV1D_UPDATE = Workload(
    title="causal_conv1d_update",
    adapt=_by_name,
    operation="fe_conv.update:OPERATION",
    wrapper="fe_conv:causal_conv1d_update",
    summary="act(sum_j weight[j] * hist[L+1-W+j] + bias), and the history one token on",
    dims=("N", "D", "L", "W"),
    operands=_operands,
    inputs=_inputs,
    expected=_expected,
    decode=_decode,
    plain={"numpy": _plain_numpy, "torch": _plain_torch, "jax": _plain_jax},
    demo=(
        _case(64, 2048),
        _case(64, 2048, 3, 4, "bfloat16", "bias", INDICES),
        _case(64, 2048, 8, 4, "bfloat16", RING),
        _case(64, 2048, 4, 4, "float16"),
        _case(64, 2048, 2, 3, "float32", "bias", act="identity"),
    ),
    bench=(
        TARGET,
        *(_case(rows, channels) for rows in (1, 8, 64, 256) for channels in (2048, 8192)),
        _case(512, 8192, 4, 4, "bfloat16", "bias", INDICES),
        _case(512, 8192, 3),
        _case(512, 8192, 8, 4, "bfloat16", RING),
    ),
    host=_case(8, 2048),
    presets={
        "default": tuple(
            _case(8, 8192, length, 4, dtype, *optional)
            for length in (3, 4)
            for dtype in ("bfloat16", "float16")
            for optional in ((), ("bias",), (INDICES,), ("bias", INDICES))
        ),
        "rings": tuple(
            _case(8, 8192, 4, 4, dtype, *optional, RING)
            for dtype in ("bfloat16", "float16")
            for optional in ((), ("bias",), (INDICES,), ("bias", INDICES))
        ),
    },
    peers=PEERS,
)
