"""The integer product and quotient against the processor's, on numbers that XLA itself would get wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from fe_runtime.formats import _xla_float

COUNT = 300_000
SPECIALS = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 2.0**-149, 2.0**-126, 2.0**-127, 3.4e38], np.float32)


def numbers(lowest: int, highest: int, seed: int) -> np.ndarray:
    """Random fp32 numbers with biased exponents in ``[lowest, highest)``, both signs."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(lowest, highest, COUNT) << 23 | rng.integers(0, 2**23, COUNT) | rng.integers(0, 2, COUNT) << 31
    return bits.astype(np.uint32).view(np.float32)


CASES = {
    "any": (numbers(0, 256, 1), numbers(0, 256, 2)),
    "subnormal-and-normal": (numbers(0, 30, 3), numbers(90, 160, 4)),
    "normal-and-subnormal": (numbers(90, 160, 5), numbers(0, 30, 6)),
    "near-one": (numbers(126, 129, 7), numbers(126, 129, 8)),
    "underflow": (numbers(50, 80, 9), numbers(40, 60, 10)),
    "subnormal-quotient": (numbers(1, 30, 11), numbers(120, 160, 12)),
    "specials": (SPECIALS[:, None], SPECIALS[None, :]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("ours", "exact"),
    [(_xla_float.multiply, np.multiply), (_xla_float.divide, np.divide)],
    ids=["multiply", "divide"],
)
def test_same_bits_as_the_processor(case: str, ours: Callable[..., Any], exact: Callable[..., Any]) -> None:
    a, b = CASES[case]
    with np.errstate(all="ignore"):
        want = exact(a, b)
    for got in (np.asarray(ours(a, b)), np.asarray(jax.jit(ours)(a, b))):
        nan = np.isnan(want)
        np.testing.assert_array_equal(np.isnan(got), nan)
        np.testing.assert_array_equal(got.view(np.int32)[~nan], want.view(np.int32)[~nan])


def test_constants_are_not_turned_into_reciprocals() -> None:
    # XLA computes x / 6 as x * (1/6), and (x * a) * b as x * (a * b).
    x = np.abs(numbers(100, 150, 13))
    got = jax.jit(lambda v: _xla_float.divide(v, 6.0))(x)
    np.testing.assert_array_equal(np.asarray(got), x / np.float32(6))
    third, n = np.float32(1 / 3), np.float32(3.3)
    got = jax.jit(lambda v: _xla_float.multiply(_xla_float.multiply(v, third), n))(x)
    np.testing.assert_array_equal(np.asarray(got), (x * third) * n)


def test_no_dtype_is_left_to_promotion() -> None:
    a, b = (array[:5000] for array in CASES["any"])
    with jax.numpy_dtype_promotion("strict"):
        results = _xla_float.multiply(a, b), _xla_float.divide(a, b)
    for result, want in zip(results, (_xla_float.multiply(a, b), _xla_float.divide(a, b)), strict=True):
        np.testing.assert_array_equal(np.asarray(result).view(np.uint32), np.asarray(want).view(np.uint32))
