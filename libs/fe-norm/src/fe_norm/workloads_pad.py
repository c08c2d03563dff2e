"""What the ``fe`` command runs, checks, times and compiles of ``rmsnorm_silu_pad``."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fe_runtime.bench.accuracy import half_step
from fe_runtime.bench.peers import torch_compiled
from fe_runtime.bench.workload import Arrays, Case, Expected, Operands, Peer, Source, Workload

__all__ = ["RMSNORM_SILU_PAD"]

OUTPUTS = ("padded_output", "cache_output", "residual_output")
STEPS = 6
"""Bound on the bf16 roundings before the last one, in units of 2^-9 of a value: the sum with the residual, its share in
the norm, three steps of the norm; the fp32 arithmetic takes far less than the sixth."""


def _operands(case: Case) -> Operands:
    pixels = tuple(case.dims.values())
    shapes = {
        "input": pixels,
        "gamma": pixels[-1:],
        "previous": (pixels[0], 2, *pixels[2:]),
        "residual": pixels,
    }
    return {name: (shape, case.dtype) for name, shape in shapes.items() if name in ("input", "gamma", *case.optional)}


def _inputs(case: Case, source: Source) -> Arrays:
    return {
        name: (source.weights if name == "gamma" else source.normal)(*operand)
        for name, operand in _operands(case).items()
    }


def _expected(case: Case, inputs: Arrays) -> Expected:
    """Evaluate the formula in float64 without its roundings, and what they may change."""
    steps = STEPS + ("residual" in case.optional)
    wide = {name: np.asarray(array, np.float64) for name, array in inputs.items()}
    v = wide["input"] + wide.get("residual", 0)
    norm = np.maximum(np.sqrt((v * v).sum(axis=-1, keepdims=True)), 1e-12)
    g = v / norm * math.sqrt(v.shape[-1]) * wide["gamma"]
    s = 1 / (1 + np.exp(-g))
    a = g * s
    moved = steps * 2.0**-9 * np.abs(g)
    off = moved * np.abs(s * (1 + g * (1 - s))) + moved**2 / 4  # the second derivative of SiLU is at most 1/2
    off = off + half_step(np.abs(a) + off, "bfloat16")
    earlier = wide.get("previous", np.zeros((v.shape[0], 0, *v.shape[2:])))
    values = _surrounded(a, earlier)
    allowed = _surrounded(off, np.zeros_like(earlier))
    if "residual" in wide:
        values.append(v)
        allowed.append(half_step(v, "bfloat16"))
    return Expected(*(np.concatenate([part.ravel() for part in parts]) for parts in (values, allowed)))


def _surrounded(a: Any, earlier: Any) -> list[Any]:
    """Return the padded output and the cache."""
    frames = np.concatenate([earlier, a], axis=1)
    before = 2 - earlier.shape[1]
    return [np.pad(frames, ((0, 0), (before, 0), (1, 1), (1, 1), (0, 0))), frames[:, -2:]]


def _decode(case: Case, outputs: Arrays) -> Any:
    del case
    return np.concatenate([outputs[name].astype(np.float64).ravel() for name in OUTPUTS if name in outputs])


def _plain_numpy(case: Case, inputs: Arrays) -> Any:
    del case
    wide = {name: np.asarray(array, np.float32) for name, array in inputs.items()}
    v = wide["input"] + wide.get("residual", np.float32(0))
    g = v / np.sqrt((v * v).sum(axis=-1, keepdims=True)) * np.float32(math.sqrt(v.shape[-1])) * wide["gamma"]
    a = g / (1 + np.exp(-g))
    padded = _surrounded(a, wide.get("previous", np.zeros((v.shape[0], 0, *v.shape[2:]), np.float32)))
    results = [*padded, v] if "residual" in wide else padded
    return tuple(result.astype(inputs["input"].dtype) for result in results)


def _plain_torch(case: Case, inputs: Arrays) -> Any:
    torch: Any = importlib.import_module("torch")
    functional = torch.nn.functional
    v = inputs["input"] + inputs["residual"] if "residual" in inputs else inputs["input"]
    a = functional.silu(functional.normalize(v, dim=-1) * math.sqrt(case.dims["C"]) * inputs["gamma"])
    frames = torch.cat([inputs["previous"], a], dim=1) if "previous" in inputs else a
    padded = functional.pad(frames, (0, 0, 1, 1, 1, 1, 0 if "previous" in inputs else 2, 0))
    return (padded, frames[:, -2:], v) if "residual" in inputs else (padded, frames[:, -2:])


def _plain_jax(case: Case, inputs: Arrays) -> Any:
    del case
    return _jitted()(dict(inputs))


@functools.cache
def _jitted() -> Callable[..., Any]:
    jax: Any = importlib.import_module("jax")
    jnp = jax.numpy

    def plain(inputs: Any) -> Any:
        dtype = inputs["input"].dtype
        v = inputs["input"].astype(jnp.float32) + inputs.get("residual", jnp.zeros((), dtype)).astype(jnp.float32)
        g = v / jnp.sqrt((v * v).sum(axis=-1, keepdims=True)) * math.sqrt(v.shape[-1]) * inputs["gamma"]
        a = jax.nn.silu(g).astype(dtype)
        frames = jnp.concatenate([inputs["previous"], a], axis=1) if "previous" in inputs else a
        before = 0 if "previous" in inputs else 2
        padded = jnp.pad(frames, ((0, 0), (before, 0), (1, 1), (1, 1), (0, 0)))
        results = (padded, frames[:, -2:])
        return (*results, v.astype(dtype)) if "residual" in inputs else results

    compiled: Callable[..., Any] = jax.jit(plain)
    return compiled


def _make_class(inputs: Arrays, outputs: Arrays, options: Mapping[str, object]) -> Any:
    del options
    api: Any = importlib.import_module("fe_norm").RmsNormSiluPad
    return api(**{f"sample_{name}": array for name, array in (*inputs.items(), *outputs.items())})


def _case(frames: int, height: int, width: int, channels: int, optional: tuple[str, ...] = ()) -> Case:
    return Case({"N": 1, "T": frames, "H": height, "W": width, "C": channels}, "bfloat16", optional=optional)


DECODER = ((60, 104, 640), (120, 208, 320), (240, 416, 160))
"""Height, width and channels of the stages of a video decoder."""

RMSNORM_SILU_PAD = Workload(
    operation="fe_norm.rmsnorm_silu_pad:OPERATION",
    wrapper="fe_norm:rmsnorm_silu_pad_wrapper",
    summary="SiLU(v / |v| * sqrt(C) * gamma), padded, with the cache of the last frames",
    dims=("N", "T", "H", "W", "C"),
    operands=_operands,
    inputs=_inputs,
    expected=_expected,
    decode=_decode,
    plain={"numpy": _plain_numpy, "torch": _plain_torch, "jax": _plain_jax},
    make_class=_make_class,
    demo=(_case(2, 15, 26, 160), _case(2, 15, 26, 160, ("previous", "residual"))),
    bench=tuple(_case(8, *shape, optional) for shape in DECODER for optional in ((), ("previous", "residual"))),
    host=_case(1, 4, 4, 160),
    presets={
        "default": tuple(
            _case(4, *shape, optional)
            for shape in DECODER
            for optional in ((), ("previous",), ("residual",), ("previous", "residual"))
        )
    },
    peers=(Peer("torch.compile", "the plain expression", torch_compiled(_plain_torch)),),
)
