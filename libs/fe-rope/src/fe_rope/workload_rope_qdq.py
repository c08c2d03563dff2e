"""``rope_qdq_inplace`` as the ``fe`` command sees it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fe_runtime.arrays import is_jax_array
from fe_runtime.bench.accuracy import half_step
from fe_runtime.bench.peers import torch_compiled
from fe_runtime.bench.workload import Arrays, Case, Expected, Operands, Peer, Source, Workload

from .launch import TAIL
from .workload_tail_rope import rotated, rotated_exactly

__all__ = ["ROPE_QDQ"]

LIMITS = {"fp4": 6.0, "fp8": 448.0}
ELEMENTS = {"fp4": "float4_e2m1fn", "fp8": "float8_e4m3fn"}
FLOORS = {("fp4", "ue8m0"): 6 * 2.0**-126, ("fp8", "ue8m0"): 1e-4, ("fp4", "e4m3"): 6 * 2.0**-9}


Mode = tuple[str, int, str]


def _mode(case: Case) -> Mode:
    options = {"group_size": 32, "scale_format": "ue8m0", **case.options}
    return str(options["quantization"]), int(str(options["group_size"])), str(options["scale_format"])


def _is_shared(case: Case) -> bool:
    return _mode(case)[:2] == ("fp4", 32)


def _operands(case: Case) -> Operands:
    tokens, heads, channels = (case.dims[letter] for letter in "NHD")
    rows = tokens if _is_shared(case) else tokens * heads
    return {
        "x": ((tokens, heads, channels), case.dtype),
        "cache": ((2 * rows, TAIL), "float32"),
        "positions": ((rows,), "int32"),
    }


def _inputs(case: Case, source: Source) -> Arrays:
    operands = _operands(case)
    rows = operands["positions"][0][0]
    frequency = 10000.0 ** (-np.arange(TAIL // 2) / (TAIL // 2))
    angle = np.arange(2 * rows)[:, None] * frequency
    return {
        "x": source.activations(*operands["x"]),
        "cache": source.array(np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)),
        "positions": source.array(2 * np.arange(rows, dtype=np.int32)),
    }


def _expected(case: Case, inputs: Arrays) -> Expected:
    """Rotate in float64; the error is half a step of the element at the value, times the scale, and for a scale that
    was rounded down also what it cuts off the largest values."""
    quantization, group_size, scale_format = _mode(case)
    x, limit = inputs["x"], LIMITS[quantization]
    tables = inputs["cache"][inputs["positions"]]
    flat = x if _is_shared(case) else x.reshape(-1, x.shape[-1])
    values, allowed = (
        part.reshape(*x.shape[:-1], -1, group_size)
        for part in rotated_exactly(flat, tables[:, : TAIL // 2], tables[:, TAIL // 2 :])
    )
    largest = np.maximum((np.abs(values) + allowed).max(axis=-1, keepdims=True), FLOORS[quantization, scale_format])
    r = largest / limit * (1 + 2.0**-20)
    cut = 0.0
    if scale_format == "e4m3":
        error = half_step(r, "float8_e4m3fn")
        scale, cut = r + error, 2 * limit * error
    else:
        scale = 2.0 ** np.ceil(np.log2(r))
    codes = half_step((np.abs(values) + allowed) / scale, ELEMENTS[quantization]) * scale
    return Expected(values.reshape(x.shape), (codes + cut + 2 * allowed).reshape(x.shape))


def _decode(case: Case, outputs: Arrays) -> Any:
    return outputs["out"].astype(np.float64)


def _plain_torch(case: Case, inputs: Arrays) -> Any:
    torch: Any = importlib.import_module("torch")
    x, tables = inputs["x"], inputs["cache"][inputs["positions"]]
    shape = (x.shape[0], 1, TAIL) if _is_shared(case) else (*x.shape[:-1], TAIL)
    cosine, sine = tables.reshape(shape).chunk(2, dim=-1)
    tail = rotated(torch, x[..., -TAIL:].float(), cosine, sine).to(x.dtype)
    v = torch.cat([x[..., :-TAIL], tail], dim=-1).float()
    return x.copy_(_quantised_torch(torch, case, v).reshape(x.shape))


def _quantised_torch(torch: Any, case: Case, v: Any) -> Any:
    quantization, group_size, scale_format = _mode(case)
    limit = LIMITS[quantization]
    groups = v.reshape(*v.shape[:-1], -1, group_size)
    r = groups.abs().amax(dim=-1, keepdim=True).clamp(min=FLOORS[quantization, scale_format]) / limit
    power = torch.exp2(torch.ceil(torch.log2(r)))
    scale = r.clamp(max=448).to(torch.float8_e4m3fn).float() if scale_format == "e4m3" else power
    n = (groups / scale).clamp(-limit, limit)
    if quantization == "fp8":
        return (n.to(torch.float8_e4m3fn).float() * scale).to(torch.bfloat16)
    step = torch.where(n.abs() < 2, 0.5, torch.where(n.abs() < 4, 1.0, 2.0))
    return (torch.round(n / step) * step * scale).to(torch.bfloat16)


def _plain_numpy(case: Case, inputs: Arrays) -> Any:
    return _plain(np, _mode(case), inputs["x"], inputs["cache"][inputs["positions"]])


def _plain_jax(case: Case, inputs: Arrays) -> Any:
    return _jitted(_mode(case))(inputs["x"], inputs["cache"], inputs["positions"])


@functools.cache
def _jitted(mode: Mode) -> Callable[..., Any]:
    jax: Any = importlib.import_module("jax")
    function: Callable[..., Any] = jax.jit(lambda x, cache, positions: _plain(jax.numpy, mode, x, cache[positions]))
    return function


def _plain(xp: Any, mode: Mode, x: Any, tables: Any) -> Any:
    """The plain expression in numpy's names."""
    quantization, group_size, scale_format = mode
    fp8: Any = importlib.import_module("ml_dtypes").float8_e4m3fn
    limit = LIMITS[quantization]
    shape = (x.shape[0], 1, TAIL) if mode[:2] == ("fp4", 32) else (*x.shape[:-1], TAIL)
    cosine, sine = xp.split(tables.reshape(shape), 2, axis=-1)
    tail = rotated(xp, x[..., -TAIL:].astype(np.float32), cosine, sine).astype(x.dtype)
    v = xp.concatenate([x[..., :-TAIL], tail], axis=-1).astype(np.float32)
    groups = v.reshape(*x.shape[:-1], -1, group_size)
    floor = np.float32(FLOORS[quantization, scale_format])
    r = xp.maximum(xp.abs(groups).max(axis=-1, keepdims=True), floor) / np.float32(limit)
    scale = r.clip(max=448).astype(fp8).astype(np.float32) if scale_format == "e4m3" else 2 ** xp.ceil(xp.log2(r))
    n = (groups / scale).clip(-limit, limit)
    if quantization == "fp8":
        return (n.astype(fp8).astype(np.float32) * scale).astype(x.dtype).reshape(x.shape)
    step = xp.where(xp.abs(n) < 2, np.float32(0.5), xp.where(xp.abs(n) < 4, np.float32(1), np.float32(2)))
    return (xp.round(n / step) * step * scale).astype(x.dtype).reshape(x.shape)


def _adapt(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Return the wrapper, or for JAX arrays, which cannot be written, the function that returns the new x."""

    def call(x: Any, cache: Any, positions: Any, **options: Any) -> Any:
        if is_jax_array(x):
            return {"out": importlib.import_module("fe_rope").rope_qdq_jax(x, cache, positions, **options)}
        return wrapper(x, cache, positions, **options)

    return call


def _make_class(inputs: Arrays, outputs: Arrays, options: Mapping[str, object]) -> Any:
    api: Any = importlib.import_module("fe_rope").RopeQDQInplace
    return api(inputs["x"], inputs["cache"], inputs["positions"], **options)


def _case(tokens: int, heads: int, channels: int, quantization: str, group_size: int = 32) -> Case:
    options: dict[str, object] = {"quantization": quantization}
    if group_size == 16:
        options |= {"group_size": 16, "scale_format": "e4m3"}
    return Case({"N": tokens, "H": heads, "D": channels}, "bfloat16", options)


ROPE_QDQ = Workload(
    operation="fe_rope.rope_qdq:OPERATION",
    wrapper="fe_rope:rope_qdq_inplace",
    adapt=_adapt,
    summary="rotation of the last 64 channels, then quantise and dequantise, in place",
    dims=("N", "H", "D"),
    operands=_operands,
    inputs=_inputs,
    expected=_expected,
    decode=_decode,
    plain={"numpy": _plain_numpy, "torch": _plain_torch, "jax": _plain_jax},
    make_class=_make_class,
    demo=(_case(256, 4, 128, "fp4"), _case(2, 128, 512, "fp8"), _case(1, 256, 512, "fp4", 16)),
    bench=(
        _case(16384, 32, 128, "fp4"),
        _case(4, 16384, 512, "fp8"),
        _case(4096, 4, 128, "fp4"),
        _case(8192, 1, 128, "fp4"),
        _case(1, 4096, 512, "fp4", 16),
        _case(64, 4096, 512, "fp4", 16),
        _case(1, 5, 512, "fp8"),
    ),
    host=_case(1, 5, 512, "fp8"),
    presets={
        "default": (
            *(_case(4096, heads, 128, "fp4") for heads in (1, 4, 32)),
            _case(1, 4096, 512, "fp8"),
            _case(1, 4096, 512, "fp4", 16),
        )
    },
    peers=(Peer("torch.compile", "the plain expression", torch_compiled(_plain_torch)),),
)
