"""Distance between two arrays of fp8 or fp4 codes, in steps of the format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .memory import NumpyArray, to_numpy

__all__ = ["CodeDistance", "code_distance"]

_SIGN = {"float8_e4m3fn": 0x80, "float8_e5m2": 0x80, "float4_e2m1fn": 0x08, "float8_e8m0fnu": 0}
_LARGEST_NUMBER = {"float8_e4m3fn": 0x7E, "float8_e5m2": 0x7C, "float4_e2m1fn": 0x07, "float8_e8m0fnu": 0xFE}
NAN_DISTANCE = 256
"""Steps between a NaN and a number: more than any two numbers have."""


@dataclass(frozen=True)
class CodeDistance:
    """Share of identical codes, and the largest distance in steps with its index (in codes)."""

    equal: float
    worst: int
    index: tuple[int, ...]


def code_distance(got: Any, want: Any, dtype: str) -> CodeDistance:
    """Compare two arrays of codes.

    Parameters
    ----------
    got, want
        Arrays of the format itself or of its bytes (``uint8``); two FP4 codes per byte, the first in the low half.
    dtype
        ``float8_e4m3fn``, ``float8_e5m2``, ``float8_e8m0fnu``, or ``float4_e2m1fn`` for packed pairs.

    Returns
    -------
    CodeDistance
        Neighbouring numbers are one step apart, +0 and -0 none (though not equal). All NaN count as the same number,
        256 steps from any other.
    """
    first, second = _codes(got, dtype), _codes(want, dtype)
    if first.shape != second.shape:
        raise AssertionError(f"codes of shape {first.shape} instead of {second.shape}")
    if not first.size:
        return CodeDistance(1.0, 0, ())
    steps = np.abs(_rank(first, dtype) - _rank(second, dtype))
    nan = _is_nan(first, dtype), _is_nan(second, dtype)
    steps = np.where(nan[0] & nan[1], 0, np.where(nan[0] | nan[1], NAN_DISTANCE, steps))
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(steps)), steps.shape))
    return CodeDistance(float(np.mean((first == second) | (nan[0] & nan[1]))), int(steps[index]), index)


def _codes(array: Any, dtype: str) -> NumpyArray:
    raw = to_numpy(array)
    if raw.dtype.itemsize != 1:
        raise ValueError(f"codes must be bytes or arrays of {dtype}; got {raw.dtype}")
    codes: NumpyArray = raw.reshape(-1).view(np.uint8).reshape(raw.shape)
    if dtype == "float4_e2m1fn" and raw.dtype == np.uint8:
        codes = np.stack([codes & 0x0F, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    return codes.astype(np.int32)


def _rank(codes: NumpyArray, dtype: str) -> NumpyArray:
    sign = _SIGN[dtype]
    size = codes & ~sign
    return np.where(codes & sign, -size, size)


def _is_nan(codes: NumpyArray, dtype: str) -> NumpyArray:
    nan: NumpyArray = (codes & ~_SIGN[dtype]) > _LARGEST_NUMBER[dtype]
    return nan
