"""How far results are from a formula in float64, and how far rounding may take them.

The bound is no tolerance chosen by hand: it is the largest error that correct rounding to the output format can make
on these values, plus that of the fp32 arithmetic before it. Every element must stay within its own bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .workload import Expected

__all__ = ["Accuracy", "allowed_in_blocks", "allowed_in_dtype", "half_step", "judge"]

_STEPS = {  # bits after the point, exponent of the smallest normal value
    "float64": (52, -1022),
    "float32": (23, -126),
    "bfloat16": (7, -126),
    "float16": (10, -14),
    "float8_e4m3fn": (3, -6),
    "float8_e5m2": (2, -14),
    "float4_e2m1fn": (1, 0),
}


@dataclass(frozen=True)
class Accuracy:
    """Relative error ``|result - expected| / |expected|`` in the 2-norm, the same norm of what is allowed, and the
    largest share of its own allowance that any element takes."""

    error: float
    bound: float
    worst: float

    @property
    def ok(self) -> bool:
        """Whether every element is within its bound."""
        return self.worst <= 1.0


def judge(result: Any, expected: Expected) -> Accuracy:
    """Compare a result (numpy, any real dtype) with what is expected of it; NaN and infinity are infinitely wrong."""
    values = np.asarray(result, np.float64)
    if values.shape != expected.values.shape:
        raise ValueError(f"the result has shape {values.shape}, the formula {expected.values.shape}")
    with np.errstate(invalid="ignore"):
        off = np.abs(values - expected.values)
    off = np.where(np.isfinite(off), off, np.inf)
    norm = max(float(np.linalg.norm(expected.values)), np.finfo(np.float64).tiny)
    bound = float(np.linalg.norm(expected.allowed)) / norm
    worst = float(np.max(off / np.maximum(expected.allowed, np.finfo(np.float64).tiny), initial=0.0))
    return Accuracy(float(np.linalg.norm(off)) / norm, bound, worst)


def allowed_in_dtype(values: Any, dtype: str, arithmetic: Any) -> Any:
    """Return the largest error of each value when it is computed up to ``arithmetic`` and rounded once to ``dtype``.

    Values beyond the largest finite one are not provided for.
    """
    return half_step(np.abs(values) + arithmetic, dtype) + arithmetic


def allowed_in_blocks(
    values: Any,
    arithmetic: Any,
    block: int = 16,
    element: str = "float4_e2m1fn",
    scale: str = "float8_e4m3fn",
    largest: float = 6.0,
) -> Any:
    """Return the largest error of each value in a block-scaled format, blocks along the last dimension.

    With the scale ``s`` within half a step of ``q = max|y| / largest`` and a code within half a step of ``y / q``, the
    error of ``code * s`` is at most ``half_step(y / q) * s + |y / q| * |s - q|``.
    """
    blocks = np.abs(values).reshape(*values.shape[:-1], -1, block)
    margin = np.broadcast_to(arithmetic, values.shape).reshape(blocks.shape)
    q = np.max(blocks + margin, axis=-1, keepdims=True) / largest
    q = np.maximum(q, np.finfo(np.float32).tiny)
    scale_error = half_step(q, scale)
    codes = (blocks + margin) / q
    allowed = half_step(codes, element) * (q + scale_error) + codes * scale_error + margin * 2
    return allowed.reshape(values.shape)


def half_step(values: Any, dtype: str) -> Any:
    """Return half the distance between neighbouring values of ``dtype`` at each of ``values``, in float64."""
    bits, smallest = _STEPS[dtype]
    _, exponent = np.frexp(np.abs(values))  # values in [2^(exponent-1), 2^exponent)
    return np.ldexp(1.0, np.maximum(exponent - 1, smallest) - bits - 1)
