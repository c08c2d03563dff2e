"""What the ``fe`` command runs, checks, times and compiles of LMSD and its gradient."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fe_runtime.bench.accuracy import allowed_in_dtype
from fe_runtime.bench.peers import torch_compiled
from fe_runtime.bench.workload import Arrays, Case, Expected, Operands, Peer, Source, Workload

__all__ = ["HSTU_LMSD_BACKWARD", "HSTU_LMSD_FORWARD"]

EPS, RATIO = 1e-6, 0.1
ROUNDINGS = 32
"""Bound on the roundings of the fp32 arithmetic of an element, sums over a row in a tree included."""
PARTS = 3
NORM, X, U = range(PARTS)
ROWS, COLUMNS = ("x_tensor", "u_tensor"), ("weight_tensor", "bias_tensor")


def _ratio(case: Case) -> float:
    return float(case.options.get("dropout_ratio", RATIO))  # type: ignore[arg-type]


# ---- forward


def _operands(case: Case) -> Operands:
    rows, columns = (case.dims["N"], case.dims["D"]), (case.dims["D"],)
    return {name: (rows if name in ROWS else columns, case.dtype) for name in (*ROWS, *COLUMNS)}


def _inputs(case: Case, source: Source) -> Arrays:
    operands = _operands(case)
    makers = {"x_tensor": source.activations, "weight_tensor": source.weights}
    return {name: makers.get(name, source.normal)(*known) for name, known in operands.items()}


def _kept(case: Case) -> list[Any]:
    """Return for each plane what is kept under seed 0: Philox4x32-10 on numpy's 64-bit integers."""
    rows, columns = case.dims["N"], case.dims["D"]
    p = np.float32(_ratio(case))
    if p == 0:
        return [np.ones((rows, columns), bool)] * PARTS
    found = []
    for plane in range(PARTS):
        c = [np.zeros((rows, -(-columns // 4)), np.uint64) for _ in range(4)]
        c[0] += np.arange(rows, dtype=np.uint64)[:, None]
        c[1] += np.arange(c[1].shape[1], dtype=np.uint64)
        c[2] += np.uint64(plane)
        for n in range(10):
            k0, k1 = (np.uint64(n * step % 2**32) for step in (0x9E3779B9, 0xBB67AE85))
            p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
            high, low = np.uint64(32), np.uint64(2**32 - 1)
            c = [p1 >> high ^ c[1] ^ k0, p1 & low, p0 >> high ^ c[3] ^ k1, p0 & low]
        words = np.stack(c, -1).reshape(rows, -1)[:, :columns]
        found.append(words.astype(np.float32) * np.float32(2.0**-32) > p)
    return found


def _mask(kept: list[Any]) -> Any:
    return sum(plane.astype(np.int8) << np.int8(number) for number, plane in enumerate(kept))


def _normalised(x: Any) -> tuple[Any, Any, Any]:
    """Return mean, reciprocal deviation and normalised rows."""
    mean = x.mean(axis=-1, keepdims=True)
    rstd = 1 / np.sqrt(x.var(axis=-1, keepdims=True) + EPS)
    return mean, rstd, (x - mean) * rstd


def _expected(case: Case, inputs: Arrays) -> Expected:
    """Evaluate the definition in float64, and what fp32 arithmetic and one rounding may change.

    The variance is the difference of two means, so its error is relative to the mean square.
    """
    x, u, w, b = (np.asarray(inputs[name], np.float64) for name in (*ROWS, *COLUMNS))
    kept, factor = _kept(case), 1 / (1 - np.float64(np.float32(_ratio(case))))
    mean, rstd, xh = _normalised(x)
    a = u / (1 + np.exp(-u))
    unit = ROUNDINGS * 2.0**-24
    loss = (x * x).mean(axis=-1, keepdims=True) * rstd**2  # by which the variance is less exact than its terms
    shaky = (np.abs(x) + np.abs(mean)) * rstd + np.abs(xh) * loss
    values = [a, x, (xh * w + b) * a]
    terms = [np.abs(a), np.abs(x), (shaky * np.abs(w) + np.abs(b)) * np.abs(a) + np.abs(values[2])]
    planes = [kept[plane] for plane in (U, X, NORM)]
    y = np.concatenate([v * factor * k for v, k in zip(values, planes, strict=True)], -1)
    off = np.concatenate([unit * t * factor * k for t, k in zip(terms, planes, strict=True)], -1)
    found = [(y, allowed_in_dtype(y, case.dtype, off))]
    found.append((mean, allowed_in_dtype(mean, "float32", unit * np.abs(x).mean(axis=-1, keepdims=True))))
    found.append((rstd, allowed_in_dtype(rstd, "float32", unit * rstd * loss)))
    if _ratio(case) > 0:
        found.append((_mask(kept), np.zeros(x.shape)))
    return _joined(found)


def _joined(found: list[tuple[Any, Any]]) -> Expected:
    values, allowed = ([np.ravel(pair[n]) for pair in found] for n in range(2))
    return Expected(np.concatenate(values), np.concatenate(allowed))


def _decode(case: Case, outputs: Arrays) -> Any:
    del case
    return np.concatenate([array.astype(np.float64).ravel() for array in outputs.values() if array is not None])


def _plain_numpy(case: Case, inputs: Arrays) -> Any:
    x, u, w, b = (inputs[name].astype(np.float32) for name in (*ROWS, *COLUMNS))
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    a = u / (1 + np.exp(-u))
    y = np.concatenate([a, x, ((x - mean) / np.sqrt(variance + np.float32(EPS)) * w + b) * a], -1)
    if _ratio(case) > 0:
        y *= (np.random.default_rng(0).random(y.shape, np.float32) >= _ratio(case)) / np.float32(1 - _ratio(case))
    return (y.astype(inputs["x_tensor"].dtype),)


def _plain_torch(case: Case, inputs: Arrays) -> Any:
    torch: Any = importlib.import_module("torch")
    functional = torch.nn.functional
    x, u, w, b = (inputs[name] for name in (*ROWS, *COLUMNS))
    a = functional.silu(u)
    y = torch.cat([a, x, functional.layer_norm(x, (case.dims["D"],), w, b, EPS) * a], -1)
    return (functional.dropout(y, _ratio(case)),)


def _plain_jax(case: Case, inputs: Arrays) -> Any:
    return _jitted(_ratio(case))(*(inputs[name] for name in (*ROWS, *COLUMNS)))


@functools.cache
def _jitted(ratio: float) -> Callable[..., Any]:
    jax: Any = importlib.import_module("jax")
    jnp = jax.numpy

    def plain(x: Any, u: Any, w: Any, b: Any) -> Any:
        v, a = x.astype(jnp.float32), jax.nn.silu(u.astype(jnp.float32))
        xh = (v - v.mean(-1, keepdims=True)) / jnp.sqrt(v.var(-1, keepdims=True) + EPS)
        y = jnp.concatenate([a, v, (xh * w.astype(jnp.float32) + b.astype(jnp.float32)) * a], -1)
        if ratio > 0:
            y = jnp.where(jax.random.bernoulli(jax.random.key(0), 1 - ratio, y.shape), y / (1 - ratio), 0)
        return (y.astype(x.dtype),)

    compiled: Callable[..., Any] = jax.jit(plain)
    return compiled


def _make_class(inputs: Arrays, outputs: Arrays, options: Mapping[str, object]) -> Any:
    api: Any = importlib.import_module("fe_attention").HSTULMSDFwd
    return _WithMore(api(*inputs.values(), *outputs.values(), **options), {"seed": 0})


class _WithMore:
    """A class form whose ``execute`` takes more than the contract knows: that is filled in."""

    def __init__(self, made: Any, more: Mapping[str, Any]) -> None:
        self._made, self._more = made, more
        self.compile = made.compile

    def execute(self, **operands: Any) -> None:
        """Run on operands by the contract's names."""
        self._made.execute(**{**self._more, **operands})


# ---- gradient


def _backward_operands(case: Case) -> Operands:
    rows, columns = case.dims["N"], case.dims["D"]
    found: dict[str, tuple[tuple[int, ...], str]] = {"dy_tensor": ((rows, PARTS * columns), case.dtype)}
    found |= _operands(case)
    found |= dict.fromkeys(("mean_tensor", "rstd_tensor"), ((rows,), "float32"))
    return found | ({"mask_tensor": ((rows, columns), "int8")} if _ratio(case) > 0 else {})


def _backward_inputs(case: Case, source: Source) -> Arrays:
    dy = source.normal(*_backward_operands(case)["dy_tensor"])
    given = _inputs(case, source)
    x = given["x_tensor"]
    saved: dict[str, Any]
    if hasattr(x, "rsqrt"):  # torch, perhaps on a GPU
        torch: Any = importlib.import_module("torch")
        wide = x.float()
        saved = {"mean_tensor": wide.mean(-1), "rstd_tensor": (wide.var(-1, correction=0) + EPS).rsqrt()}
        if _ratio(case) > 0:
            saved["mask_tensor"] = torch.zeros_like(x, dtype=torch.int8)
            for plane in range(PARTS):
                saved["mask_tensor"] |= (torch.rand_like(wide) >= _ratio(case)).to(torch.int8) << plane
        return {"dy_tensor": dy, **given, **saved}
    mean, rstd, _ = _normalised(np.asarray(x, np.float64))
    saved = {
        "mean_tensor": source.array(mean[:, 0].astype(np.float32)),
        "rstd_tensor": source.array(rstd[:, 0].astype(np.float32)),
    }
    if _ratio(case) > 0:
        saved["mask_tensor"] = source.array(_mask(_kept(case)))
    return {"dy_tensor": dy, **given, **saved}


def _backward_expected(case: Case, inputs: Arrays) -> Expected:
    """Evaluate the gradients in float64 from the saved mean, deviation and mask, and what fp32 may change."""
    wide = {name: np.asarray(array, np.float64) for name, array in inputs.items()}
    x, u, w, b = (wide[name] for name in (*ROWS, *COLUMNS))
    parts = dict(zip((U, X, NORM), np.split(wide["dy_tensor"], PARTS, -1), strict=True))
    if "mask_tensor" in inputs:
        bits, factor = np.asarray(inputs["mask_tensor"]), 1 / (1 - np.float64(np.float32(_ratio(case))))
        parts = {plane: part * factor * (bits >> plane & 1) for plane, part in parts.items()}
    mean, rstd = wide["mean_tensor"][:, None], wide["rstd_tensor"][:, None]
    xh, shaky = (x - mean) * rstd, (np.abs(x) + np.abs(mean)) * rstd
    s = 1 / (1 + np.exp(-u))
    a, slope = u * s, s + u * s * (1 - s)
    gln = parts[NORM] * a
    wd, size = w * gln, np.abs(w * gln)
    dot = (xh * wd).mean(-1, keepdims=True)
    dx = parts[X] + (wd - xh * dot - wd.mean(-1, keepdims=True)) * rstd
    du = (parts[NORM] * (xh * w + b) + parts[U]) * slope
    unit = ROUNDINGS * 2.0**-24
    off_dx = (size + shaky * ((shaky * size).mean(-1, keepdims=True)) + size.mean(-1, keepdims=True)) * rstd
    sure = np.abs(s) * (1 + np.abs(u))
    off_du = (np.abs(parts[NORM]) * (shaky * np.abs(w) + np.abs(b)) + np.abs(parts[U])) * sure
    sums = (ROUNDINGS + case.dims["N"]) * 2.0**-24  # whatever the order of the sum over rows
    found = [(dx, unit * (off_dx + np.abs(parts[X]))), (du, unit * off_du)]
    found += [((gln * xh).sum(0), sums * (np.abs(gln) * shaky).sum(0)), (gln.sum(0), sums * np.abs(gln).sum(0))]
    return _joined([(values, allowed_in_dtype(values, case.dtype, off)) for values, off in found])


def _gradient_of_plain(case: Case) -> Callable[[Arrays], Any]:
    """Return calls that run torch's backward through the compiled plain expression, whose forward ran before."""
    torch: Any = importlib.import_module("torch")
    settings: Any = importlib.import_module("torch._functorch.config")
    settings.donated_buffer = False  # the graphs are kept
    forward = torch_compiled(_plain_torch)(case)
    graphs: dict[int, tuple[Any, ...]] = {}

    def call(arrays: Arrays) -> Any:
        if id(arrays) not in graphs:
            leaves = {name: arrays[name].detach().requires_grad_() for name in (*ROWS, *COLUMNS)}
            with torch.enable_grad():
                (y,) = forward(leaves)
            graphs[id(arrays)] = y, tuple(leaves.values()), arrays
        y, leaves, _ = graphs[id(arrays)]
        return torch.autograd.grad(y, leaves, arrays["dy_tensor"], retain_graph=True)

    return call


def _backward_with_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with the forward's defaults for the options that it must be given."""

    def call(**arguments: Any) -> Any:
        flags = dict.fromkeys(("apply_u_silu", "concat_u", "concat_x"), True)
        known = {"dropout_ratio": RATIO, "mask_tensor": None, **flags, **arguments}
        return function(**known)

    return call


def _make_backward_class(inputs: Arrays, outputs: Arrays, options: Mapping[str, object]) -> Any:
    api: Any = importlib.import_module("fe_attention").HSTULMSDBwd
    given = [*inputs.values(), *([] if "mask_tensor" in inputs else [None]), *outputs.values()]
    dbias = outputs["dbias_tensor"]
    rows, columns = 132 * 64, dbias.shape[0]  # at least what any GPU needs
    if hasattr(dbias, "new_zeros"):
        held = [dbias.new_zeros((rows, columns), dtype=importlib.import_module("torch").float32) for _ in range(2)]
    else:
        held = [np.zeros((rows, columns), np.float32) for _ in range(2)]
    more = {"mask_tensor": None, "dweight_workspace": held[0], "dbias_workspace": held[1]}
    return _WithMore(api(*given, *held, **options), more)


# ---- both


def _case(rows: int, columns: int, ratio: float = RATIO) -> Case:
    return Case({"N": rows, "D": columns}, "bfloat16", {} if ratio == RATIO else {"dropout_ratio": ratio})


BENCH = (
    _case(256_000, 512),
    _case(8192, 512),
    _case(256_000, 512, 0.0),
    _case(256_000, 256),
    _case(131_072, 1016),
    _case(16_384, 8192),
    _case(257, 512),
)
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
PRESETS = {"default": tuple(_case(8192, columns, ratio) for columns in LENGTHS for ratio in (RATIO, 0.0))}

HSTU_LMSD_FORWARD = Workload(
    operation="fe_attention.hstu.lmsd:OPERATION",
    wrapper="fe_attention:hstu_lmsd_forward",
    title="hstu_lmsd_forward",
    summary="dropout of [silu(u) | x | LayerNorm(x) * silu(u)]",
    dims=("N", "D"),
    operands=_operands,
    inputs=_inputs,
    expected=_expected,
    decode=_decode,
    plain={"numpy": _plain_numpy, "torch": _plain_torch, "jax": _plain_jax},
    make_class=_make_class,
    demo=(_case(257, 512), _case(257, 512, 0.0), _case(128, 1016)),
    bench=BENCH,
    host=_case(32, 512),
    presets=PRESETS,
    peers=(Peer("torch.compile", "the plain expression, no mask", torch_compiled(_plain_torch)),),
)

HSTU_LMSD_BACKWARD = Workload(
    operation="fe_attention.hstu.lmsd_backward:BACKWARD",
    wrapper="fe_attention:hstu_lmsd_backward",
    title="hstu_lmsd_backward",
    adapt=_backward_with_flags,
    summary="gradients of hstu_lmsd_forward",
    dims=("N", "D"),
    operands=_backward_operands,
    inputs=_backward_inputs,
    expected=_backward_expected,
    decode=_decode,
    plain={},
    make_class=_make_backward_class,
    demo=(_case(257, 512), _case(257, 512, 0.0), _case(128, 1016)),
    bench=BENCH,
    host=_case(32, 512),
    presets=PRESETS,
    peers=(Peer("torch.compile", "autograd of the plain expression", _gradient_of_plain),),
)
