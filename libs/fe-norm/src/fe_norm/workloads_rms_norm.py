"""What the ``fe`` command runs of ``rms_norm`` and of the gradients of the row operations."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from fe_runtime.bench.accuracy import allowed_in_dtype
from fe_runtime.bench.peers import torch_compiled
from fe_runtime.bench.workload import Arrays, Case, Expected, Operands, Peer, Source, Workload

__all__ = ["RMSNORM_SILU_BACKWARD", "RMS_NORM", "RMS_NORM_BACKWARD"]

EPS = 1e-5
ROUNDOFF = 2.0**-24
ROUNDINGS = 32
"""Bound on the roundings of the fp32 arithmetic of an element, sums over a row in a tree included."""

DIMS = ("M", "N")
SHAPES = ((16384, 4096), (16384, 8192))
TRAINING = (2048, 2880, 4096, 5120, 7168, 8192, 16384)


# ---- forward


def _operands(case: Case) -> Operands:
    rows = ((case.dims["M"], case.dims["N"]), case.dtype)
    columns = ((case.dims["N"],), case.dtype)
    return {"x": rows, "weight": columns} | {name: rows if name == "residual" else columns for name in case.optional}


def _inputs(case: Case, source: Source) -> Arrays:
    makers = {"x": source.activations, "weight": source.weights, "bias": source.normal, "residual": source.normal}
    return {name: makers[name](*known) for name, known in _operands(case).items()}


def _expected(case: Case, inputs: Arrays) -> Expected:
    """Evaluate the definition in float64, on the sum as it is stored."""
    wide = _wide(_with_sum(case, inputs))
    _, xh = _normalised(wide["x"])
    scaled = xh * wide["weight"]
    out = scaled + wide.get("bias", 0.0)
    arithmetic = ROUNDINGS * ROUNDOFF * (np.abs(scaled) + np.abs(out))
    return Expected(out, allowed_in_dtype(out, case.dtype, arithmetic))


def _with_sum(case: Case, inputs: Arrays) -> dict[str, Any]:
    if "residual" not in inputs:
        return dict(inputs)
    total = np.asarray(inputs["x"], np.float32) + np.asarray(inputs["residual"], np.float32)
    return {**inputs, "x": total.astype(inputs["x"].dtype)}


def _plain_numpy(case: Case, inputs: Arrays) -> Any:
    given = {name: array.astype(np.float32) for name, array in _with_sum(case, inputs).items()}
    x = given["x"]
    out = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(EPS)) * given["weight"]
    return (out + given.get("bias", np.float32(0))).astype(inputs["x"].dtype)


def _plain_torch(case: Case, inputs: Arrays) -> Any:
    functional: Any = importlib.import_module("torch").nn.functional
    h = inputs["x"] + inputs["residual"] if "residual" in inputs else inputs["x"]
    out = functional.rms_norm(h, (case.dims["N"],), inputs["weight"], EPS)
    out = out + inputs["bias"] if "bias" in inputs else out
    return (out, h) if "residual" in inputs else out


def _plain_jax(case: Case, inputs: Arrays) -> Any:
    return _jitted()(*(inputs.get(name) for name in ("x", "weight", "bias", "residual")))


@functools.cache
def _jitted() -> Callable[..., Any]:
    jax: Any = importlib.import_module("jax")
    jnp = jax.numpy

    def plain(x: Any, weight: Any, bias: Any, residual: Any) -> Any:
        h = x if residual is None else x + residual
        v = h.astype(jnp.float32)
        out = v / jnp.sqrt(jnp.mean(v * v, axis=-1, keepdims=True) + EPS) * weight.astype(jnp.float32)
        out = (out if bias is None else out + bias.astype(jnp.float32)).astype(x.dtype)
        return out if residual is None else (out, h)

    compiled: Callable[..., Any] = jax.jit(plain)
    return compiled


def _by_name(rms_norm: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Return the function with its results by name."""

    def call(**arguments: Any) -> dict[str, Any]:
        result = rms_norm(**arguments)
        return dict(zip(("out", "residual_out"), result if isinstance(result, tuple) else (result,), strict=False))

    return call


# ---- gradients


def _backward_operands(case: Case) -> Operands:
    rows = ((case.dims["M"], case.dims["N"]), case.dtype)
    columns = ((case.dims["N"],), case.dtype)
    found = {"dout": rows, "x": rows, "weight": columns, "rstd": (rows[0][:1], "float32")}
    return found | {name: rows if name == "dresidual_out" else columns for name in case.optional}


def _silu_operands(case: Case) -> Operands:
    given = _backward_operands(case)
    return {_SILU_NAMES[name]: known for name, known in given.items() if name in _SILU_NAMES}


_SILU_NAMES = {"dout": "do_tensor", "x": "x_tensor", "weight": "w_tensor", "bias": "bias_tensor"}


def _backward_inputs(case: Case, source: Source) -> Arrays:
    operands = _backward_operands(case)
    makers = {"x": source.activations, "weight": source.weights}
    found = {name: makers.get(name, source.normal)(*known) for name, known in operands.items() if name != "rstd"}
    x = found["x"]
    if hasattr(x, "rsqrt"):  # torch, perhaps on a GPU
        return {**found, "rstd": x.float().square().mean(-1).add(EPS).rsqrt()}
    rstd, _ = _normalised(np.asarray(x, np.float64))
    return {**found, "rstd": source.array(rstd[:, 0].astype(np.float32))}


def _silu_inputs(case: Case, source: Source) -> Arrays:
    return {_SILU_NAMES[name]: array for name, array in _backward_inputs(case, source).items() if name in _SILU_NAMES}


def _backward_expected(case: Case, inputs: Arrays) -> Expected:
    wide = _wide(inputs)
    terms = np.abs(wide["dout"])
    return _gradients(case, wide, wide["dout"], terms)


def _silu_expected(case: Case, inputs: Arrays) -> Expected:
    names = {ours: name for name, ours in _SILU_NAMES.items()}
    wide = _wide({names[name]: array for name, array in inputs.items()})
    _, xh = _normalised(wide["x"])
    scaled = xh * wide["weight"]
    z = scaled + wide.get("bias", 0.0)
    s = np.exp(-np.logaddexp(0, -z))
    slope = s * (1 + z * (1 - s))
    # An error of z moves the slope by its derivative, s*(1-s)*(2 + z*(1-2s)), of at most 1/2.
    terms = np.abs(wide["dout"]) * (np.abs(slope) + s * (1 + np.abs(z)) + np.abs(scaled) + np.abs(z))
    return _gradients(case, wide, wide["dout"] * slope, terms)


def _gradients(case: Case, wide: dict[str, Any], dz: Any, terms: Any) -> Expected:
    """Evaluate the gradients in float64; ``terms`` bounds, but for the unit, the error of ``dz``."""
    rstd, xh = _normalised(wide["x"])
    u, du = dz * wide["weight"], terms * np.abs(wide["weight"])
    mean = (u * xh).mean(axis=-1, keepdims=True)
    dx = rstd * (u - xh * mean) + wide.get("dresidual_out", 0.0)
    unit = ROUNDINGS * ROUNDOFF
    off = rstd * (du + np.abs(xh) * (du * np.abs(xh)).mean(axis=-1, keepdims=True)) + np.abs(dx)
    found = [(dx, unit * (off + np.abs(wide.get("dresidual_out", 0.0))))]
    rows = (ROUNDINGS + case.dims["M"]) * ROUNDOFF  # whatever the order of the sum over rows
    found.append(((dz * xh).sum(axis=0), rows * (terms * np.abs(xh)).sum(axis=0)))
    if "bias" in wide:
        found.append((dz.sum(axis=0), rows * terms.sum(axis=0)))
    allowed = [allowed_in_dtype(values, case.dtype, arithmetic).ravel() for values, arithmetic in found]
    return Expected(np.concatenate([values.ravel() for values, _ in found]), np.concatenate(allowed))


def _decode_gradients(case: Case, outputs: Arrays) -> Any:
    del case
    return np.concatenate([array.astype(np.float64).ravel() for array in outputs.values()])


# ---- both


def _wide(inputs: Arrays) -> dict[str, Any]:
    return {name: np.asarray(array, np.float64) for name, array in inputs.items()}


def _normalised(x: Any) -> tuple[Any, Any]:
    rstd = 1 / np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPS)
    return rstd, rstd * x


# ---- peers: the forward, or torch's autograd through it on a graph that is kept


def _liger(case: Case) -> Callable[[Arrays], Any]:
    if case.optional:
        raise NotImplementedError("its norm takes neither bias nor residual")
    function: Any = importlib.import_module("liger_kernel.ops").LigerRMSNormFunction
    return lambda arrays: function.apply(arrays["x"], arrays["weight"], EPS, 0.0, "llama", False)


def _quack(case: Case) -> Callable[[Arrays], Any]:
    rmsnorm: Any = importlib.import_module("quack").rmsnorm
    if "residual" not in case.optional:
        return lambda arrays: rmsnorm(arrays["x"], arrays["weight"], bias=arrays.get("bias"), eps=EPS)
    return lambda arrays: rmsnorm(
        arrays["x"], arrays["weight"], bias=arrays.get("bias"), residual=arrays["residual"], eps=EPS, prenorm=True
    )


Make = Callable[[Case], Callable[[Arrays], Any]]


def _gradient_of(make_forward: Make, then: Callable[[Any], Any] = lambda out: out) -> Make:
    """Return a maker of calls that run backward through a forward which ran before.

    The gradient of the sum enters like that of another use of it: through a second result.
    """

    def make(case: Case) -> Callable[[Arrays], Any]:
        torch: Any = importlib.import_module("torch")
        settings: Any = importlib.import_module("torch._functorch.config")
        settings.donated_buffer = False  # the graphs are kept
        residual = ("residual",) if "dresidual_out" in case.optional else ()
        others = tuple(name for name in case.optional if name != "dresidual_out")
        forward = make_forward(Case(case.dims, case.dtype, case.options, (*others, *residual)))
        graphs: dict[int, tuple[Any, ...]] = {}

        def graph(arrays: Arrays) -> tuple[Any, ...]:
            given = {_FORWARD_NAMES[name]: array for name, array in arrays.items() if name in _FORWARD_NAMES}
            leaves = {name: array.detach().requires_grad_() for name, array in given.items()}
            if residual:
                leaves["residual"] = torch.zeros_like(leaves["x"]).requires_grad_()
            with torch.enable_grad():
                results = forward(leaves)
                results = results if isinstance(results, tuple) else (results,)
                results = (then(results[0]), *results[1:])
            incoming = [arrays.get("dout", arrays.get("do_tensor")), arrays.get("dresidual_out")]
            return results, tuple(leaves.values()), [grad for grad in incoming if grad is not None], arrays

        def call(arrays: Arrays) -> Any:
            if id(arrays) not in graphs:
                graphs[id(arrays)] = graph(arrays)
            results, leaves, incoming, _ = graphs[id(arrays)]
            return torch.autograd.grad(results, leaves, incoming, retain_graph=True)

        return call

    return make


_FORWARD_NAMES = {"x": "x", "weight": "weight", "bias": "bias"} | {
    ours: name for name, ours in _SILU_NAMES.items() if name != "dout"
}


def _plain_torch_silu(case: Case, inputs: Arrays) -> Any:
    return _silu(_plain_torch(case, inputs))


def _silu(values: Any) -> Any:
    return importlib.import_module("torch").nn.functional.silu(values)


def _case(rows: int, columns: int, dtype: str = "bfloat16", *optional: str) -> Case:
    return Case({"M": rows, "N": columns}, dtype, {}, optional)


def _presets(*optional: str) -> dict[str, tuple[Case, ...]]:
    plain = tuple(_case(4096, columns) for columns in TRAINING)
    return {"default": (*plain, *(_case(4096, columns, "bfloat16", *optional) for columns in TRAINING if optional))}


RMS_NORM = Workload(
    operation="fe_norm.rms_norm:OPERATION",
    wrapper="fe_norm:rms_norm",
    adapt=_by_name,
    summary="RMSNorm(x + residual) * weight + bias",
    dims=DIMS,
    operands=_operands,
    inputs=_inputs,
    expected=_expected,
    decode=lambda _case, outputs: outputs["out"].astype(np.float64),
    plain={"numpy": _plain_numpy, "torch": _plain_torch, "jax": _plain_jax},
    demo=(
        _case(2048, 1024),
        _case(1000, 2880, "float16"),
        _case(16384, 128, "float32"),
        _case(2048, 1024, "bfloat16", "bias"),
        _case(2048, 1024, "bfloat16", "residual"),
    ),
    bench=(
        *(_case(*shape) for shape in SHAPES),
        *(_case(*shape, "bfloat16", "residual") for shape in SHAPES),
        _case(1048576, 128),
        _case(32768, 2880),
    ),
    host=_case(32, 1024),
    presets=_presets("residual"),
    peers=(
        Peer("torch.compile", "the plain expression", torch_compiled(_plain_torch)),
        Peer("liger-kernel", "rms norm", _liger),
        Peer("quack-kernels", "rms norm", _quack),
    ),
)

RMS_NORM_BACKWARD = Workload(
    operation="fe_norm.rms_norm:BACKWARD",
    wrapper="fe_norm:rms_norm_backward",
    title="rms_norm_backward",
    summary="gradients of rms_norm",
    dims=DIMS,
    operands=_backward_operands,
    inputs=_backward_inputs,
    expected=_backward_expected,
    decode=_decode_gradients,
    plain={},
    demo=(
        _case(512, 1024),
        _case(512, 2880, "float16"),
        _case(1024, 128, "float32"),
        _case(512, 1024, "bfloat16", "bias", "dresidual_out"),
    ),
    bench=(
        *(_case(*shape) for shape in SHAPES),
        *(_case(*shape, "bfloat16", "dresidual_out") for shape in SHAPES),
        _case(1048576, 128),
        _case(32768, 2880),
    ),
    host=_case(32, 1024),
    presets=_presets("dresidual_out"),
    peers=(
        Peer("torch.compile", "autograd of the plain expression", _gradient_of(torch_compiled(_plain_torch))),
        Peer("liger-kernel", "autograd of its rms norm", _gradient_of(_liger)),
        Peer("quack-kernels", "autograd of its rms norm", _gradient_of(_quack)),
    ),
)

RMSNORM_SILU_BACKWARD = Workload(
    operation="fe_norm.rmsnorm_silu:BACKWARD",
    wrapper="fe_norm:rmsnorm_silu_backward",
    title="rmsnorm_silu_backward",
    summary="gradients of rmsnorm_silu",
    dims=DIMS,
    operands=_silu_operands,
    inputs=_silu_inputs,
    expected=_silu_expected,
    decode=_decode_gradients,
    plain={},
    demo=(_case(512, 1024), _case(1024, 128, "float16", "bias"), _case(512, 320, "float32")),
    bench=(_case(16384, 8192), _case(399360, 1024), _case(399360, 128)),
    host=_case(32, 1024),
    presets={"default": tuple(_case(4096, columns) for columns in (64, 128, 320, 1024, 4096, 8192))},
    peers=(
        Peer("torch.compile", "autograd of the plain expression", _gradient_of(torch_compiled(_plain_torch_silu))),
        Peer("quack-kernels", "autograd of its rms norm and torch's silu", _gradient_of(_quack, _silu)),
    ),
)
