"""Bounds that follow from the number of roundings and the length of sums, and the comparison with float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fe_runtime.dtypes import canonical_dtype

from .memory import NumpyArray, to_numpy

__all__ = ["Accumulation", "Closeness", "assert_close", "rounding_bound", "ulp", "unit_roundoff"]

_FORMATS = {  # bits of the significand with the leading one, exponent of the smallest normal number
    "float64": (53, -1022),
    "float32": (24, -126),
    "bfloat16": (8, -126),
    "float16": (11, -14),
    "float8_e4m3fn": (4, -6),
    "float8_e5m2": (3, -14),
    "float4_e2m1fn": (2, 0),
    "float8_e8m0fnu": (1, -127),
}


@dataclass(frozen=True)
class Accumulation:
    """A sum inside the computation.

    Parameters
    ----------
    additions
        Longest chain of additions that a term passes: the number of terms less one for a plain loop, about its
        logarithm for a tree. The larger one is always safe.
    magnitude
        Sum of the absolute values of the terms, per element of the result (or one for all).
    dtype
        Accumulator.
    """

    additions: int
    magnitude: Any
    dtype: str = "float32"

    @property
    def bound(self) -> NumpyArray:
        """Largest error of the sum, whatever the order of its terms."""
        error = self.additions * unit_roundoff(self.dtype)
        if error >= 0.5:
            raise ValueError(f"{self.additions} additions in {self.dtype} have no useful bound")
        bound: NumpyArray = error / (1 - error) * np.abs(_float64(self.magnitude))
        return bound


@dataclass(frozen=True)
class Closeness:
    """What :func:`assert_close` found: norm of the error relative to the result, and the worst element's share of its
    bound with its index."""

    relative_norm: float
    worst: float
    index: tuple[int, ...]


def assert_close(
    got: Any,
    want: Any,
    *,
    roundings: int | Mapping[str, int],
    accumulation: Accumulation | None = None,
    allowance: Any = 0.0,
    dtype: str | None = None,
    name: str = "result",
) -> Closeness:
    """Compare a result with its value in float64; every element must lie within a bound derived from the computation.

    Parameters
    ----------
    got
        Array of any framework.
    want
        Exact result (float64). NaN and infinities must appear in ``got`` at exactly the same places.
    roundings, accumulation, allowance
        See :func:`rounding_bound`.
    dtype
        Format of the result; by default that of ``got``.
    name
        For the error text.

    Raises
    ------
    AssertionError
        With the relative norm, the number of elements out of bounds, the worst one and its index.
    """
    computed = to_numpy(got)
    exact = _float64(want)
    if computed.shape != exact.shape:
        raise AssertionError(f"{name}: shape {computed.shape} instead of {exact.shape}")
    bound = rounding_bound(
        exact,
        dtype=dtype or canonical_dtype(computed.dtype),
        roundings=roundings,
        accumulation=accumulation,
        allowance=allowance,
    )
    values = computed.astype(np.float64)
    _assert_same_special(values, exact, name)
    finite = np.isfinite(exact)
    error = np.where(finite, np.abs(np.where(finite, values, 0) - np.where(finite, exact, 0)), 0)
    share = np.where(error == 0, 0, error / np.where(bound > 0, bound, np.finfo(np.float64).tiny))
    found = _closeness(error, np.where(finite, exact, 0), share)
    if found.worst > 1:
        raise AssertionError(_text(name, found, values, exact, error, bound, share))
    return found


def rounding_bound(
    want: Any,
    *,
    dtype: str,
    roundings: int | Mapping[str, int],
    accumulation: Accumulation | None = None,
    allowance: Any = 0.0,
) -> NumpyArray:
    """Return the largest error of each element: half a unit in the last place for each rounding, and that of the sum.

    Parameters
    ----------
    want
        Exact result.
    dtype
        Format of the result.
    roundings
        How many times the value is rounded on its way: a number, all of them to ``dtype``, or a number by format,
        ``{"float32": 6, "bfloat16": 1}``.
    accumulation
        The sum that the value comes from, if any.
    allowance
        Further error, derived by the test, say of an approximate function: an array or a number.

    Notes
    -----
    Finer formats come first, and each rounding is taken at the largest value that the errors before it may have led
    to, so a value next to a power of two gets the wider spacing.
    """
    size = np.abs(_float64(want))
    error = np.zeros_like(size) + np.abs(_float64(allowance))
    if accumulation is not None:
        error = error + accumulation.bound
    counts = {dtype: roundings} if isinstance(roundings, int) else dict(roundings)
    for name in sorted(counts, key=lambda each: -_FORMATS[each][0]):
        for _ in range(counts[name]):
            error = error + ulp(size + error, name) / 2
    return np.asarray(error)


def ulp(x: Any, dtype: str) -> NumpyArray:
    """Return the spacing of the numbers of a format around ``x`` (float64); that of the subnormals near zero."""
    bits, smallest = _FORMATS[dtype]
    values = np.abs(_float64(x))
    _, exponent = np.frexp(np.where(np.isfinite(values), values, 0))
    spacing: NumpyArray = np.ldexp(1.0, np.maximum(np.where(values == 0, smallest, exponent - 1), smallest) - bits + 1)
    return np.where(np.isfinite(values), spacing, np.nan)


def unit_roundoff(dtype: str) -> float:
    """Return the largest relative error of one rounding to nearest of a normal number."""
    return float(2.0 ** -_FORMATS[dtype][0])


def _float64(x: Any) -> NumpyArray:
    return to_numpy(x).astype(np.float64) if hasattr(x, "shape") and np.shape(x) else np.asarray(x, np.float64)


def _assert_same_special(values: NumpyArray, exact: NumpyArray, name: str) -> None:
    special = ~np.isfinite(exact) | ~np.isfinite(values)
    same = (values == exact) | (np.isnan(values) & np.isnan(exact))
    wrong = special & ~same
    if wrong.any():
        index = _first(wrong)
        text = f"got {values[index]}, want {exact[index]}"
        raise AssertionError(f"{name}: {int(wrong.sum())} NaN or infinite values differ, the first at {index}: {text}")


def _closeness(error: NumpyArray, exact: NumpyArray, share: NumpyArray) -> Closeness:
    if not error.size:
        return Closeness(0.0, 0.0, ())
    norm = float(np.linalg.norm(error.ravel()))
    size = float(np.linalg.norm(exact.ravel()))
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(share)), share.shape))
    return Closeness(norm / size if size else norm, float(share[index]), index)


def _text(
    name: str,
    found: Closeness,
    values: NumpyArray,
    exact: NumpyArray,
    error: NumpyArray,
    bound: NumpyArray,
    share: NumpyArray,
) -> str:
    at = found.index
    return (
        f"{name}: {int((share > 1).sum())} of {share.size} elements are beyond their bound. Worst at {at}: "
        f"got {values[at]:.9g}, want {exact[at]:.9g}, off by {error[at]:.3g}, {share[at]:.3g} times the bound "
        f"{bound[at]:.3g}. Relative norm of the error {found.relative_norm:.3g}."
    )


def _first(mask: NumpyArray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(mask)), mask.shape))
