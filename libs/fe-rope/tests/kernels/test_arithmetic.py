"""The arithmetic by which the kernels avoid divisions and conversions, step by step in numpy, over all its operands."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

F32 = np.float32
MAGNITUDES = np.arange(0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(F32)
"""Every finite bf16 magnitude."""

SCALES = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(F32)
"""Every positive E4M3 number."""


def round_to_steps(values: Any, mantissa_bits: int, smallest_exponent: int) -> Any:
    """As ``fe_runtime.cute.rounding`` has it: beside the right power of two, fp32 has the format's steps."""
    exponent = values.view(np.int32) & 0x7F800000
    power = np.maximum(exponent, (127 + smallest_exponent) << 23).astype(np.int32).view(F32)
    anchor = power * F32(2.0 ** (23 - mantissa_bits))
    return (values + anchor) - anchor


@pytest.mark.parametrize(
    ("dtype", "steps", "limit"),
    [(ml_dtypes.float4_e2m1fn, (1, 0), 6.0), (ml_dtypes.float8_e4m3fn, (3, -6), 448.0)],
    ids=["E2M1", "E4M3"],
)
def test_rounding_to_a_format_by_an_addition(dtype: Any, steps: tuple[int, int], limit: float) -> None:
    """All midpoints and their neighbours, and what lies between."""
    codes = np.arange(128 if limit > 6 else 8, dtype=np.uint8)
    table = codes.view(dtype).astype(F32)
    table = np.unique(table[np.isfinite(table)])
    middle = ((table[1:].astype(float) + table[:-1]) / 2).astype(F32)
    near = [np.nextafter(middle, F32(0)), middle, np.nextafter(middle, F32(np.inf))]
    random = np.random.default_rng(0).uniform(0, limit, 100_000).astype(F32)
    tiny = np.array([0, 1e-45, 1e-38, 2.0**-30], F32)
    values = np.concatenate([table, *near, random, random * F32(2.0**-9), tiny])
    np.testing.assert_array_equal(round_to_steps(values, *steps), values.astype(dtype).astype(F32))


def test_quotients_by_an_e4m3_scale() -> None:
    """A product with the reciprocal, corrected once, chooses the element that the exact quotient chooses."""
    wide = np.longdouble
    for scale in SCALES:
        values = MAGNITUDES[MAGNITUDES <= 16 * scale]  # beyond, both are clamped
        reciprocal = F32(1) / scale
        guess = values * reciprocal
        remainder = (values.astype(wide) - guess.astype(wide) * wide(scale)).astype(F32)
        quotient = (remainder.astype(wide) * wide(reciprocal) + guess.astype(wide)).astype(F32)
        got = round_to_steps(np.minimum(quotient, F32(6)), 1, 0)
        exact = np.minimum(values.astype(np.float64) / float(scale), 6)
        np.testing.assert_array_equal(got, exact.astype(F32).astype(ml_dtypes.float4_e2m1fn).astype(F32), str(scale))


@pytest.mark.parametrize("limit", [6.0, 448.0])
def test_least_power_of_two_by_an_addition_to_the_bits(limit: float) -> None:
    r = MAGNITUDES * F32(1 / limit)
    r = r[r >= F32(2.0**-126)]  # the least that a floor leaves
    bits = (r.view(np.int32) + 0x7FFFFF) & 0x7F800000
    scale, inverse = bits.astype(np.int32).view(F32), ((254 << 23) - bits).astype(np.int32).view(F32)
    np.testing.assert_array_equal(scale, np.exp2(np.ceil(np.log2(r.astype(np.longdouble)))).astype(F32))
    np.testing.assert_array_equal(scale * inverse, 1)
