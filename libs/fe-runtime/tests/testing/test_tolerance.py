"""Bounds against numpy's own spacing and brute force over roundings."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fe_runtime.testing import Accumulation, assert_close, rounding_bound, ulp
from fe_runtime.testing.tolerance import unit_roundoff

KINDS: dict[str, Any] = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float4_e2m1fn": ml_dtypes.float4_e2m1fn,
}
RANDOM = np.random.default_rng(0)


def neighbours(name: str) -> np.ndarray:
    """All finite non-negative values of a format of at most 16 bits, ascending."""
    kind = np.dtype(KINDS[name])
    codes = np.arange(2 ** (4 if name == "float4_e2m1fn" else 8 * kind.itemsize))
    with np.errstate(invalid="ignore"):
        values = codes.astype(f"u{kind.itemsize}").view(kind).astype(np.float64)
    return np.unique(np.abs(values[np.isfinite(values)]))


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_ulp_is_the_distance_to_the_next_number(name: str) -> None:
    values = neighbours(name)
    np.testing.assert_array_equal(ulp(values[:-1], name), np.diff(values))
    np.testing.assert_array_equal(ulp(-values[:-1], name), np.diff(values))
    between = (values[1:] + values[:-1]) / 2
    np.testing.assert_array_equal(ulp(between, name), np.diff(values))


@given(st.floats(width=32, allow_nan=False, allow_infinity=False, max_value=2.0**127, min_value=-(2.0**127)))
def test_ulp_of_float32_and_float64_is_numpys(value: float) -> None:
    assert ulp(value, "float32") == np.spacing(np.float32(abs(value)))
    assert ulp(value, "float64") == np.spacing(abs(value))


def test_ulp_of_nothing() -> None:
    assert np.isnan(ulp([np.nan, np.inf, -np.inf], "float32")).all()


@pytest.mark.parametrize("name", list(KINDS)[:-1])
def test_one_rounding_stays_within_half_an_ulp(name: str) -> None:
    exact = np.concatenate([RANDOM.standard_normal(2000), RANDOM.uniform(0.99, 1.01, 200), np.zeros(1)])
    found = assert_close(exact.astype(KINDS[name]), exact, roundings=1)
    if name != "float64":
        assert 0.5 < found.worst <= 1
        assert found.relative_norm < unit_roundoff(name) * (1 if name[:6] != "float8" else 1.5)


def test_roundings_through_several_formats_add_up() -> None:
    exact = RANDOM.standard_normal(20000)
    twice = exact.astype(np.float16).astype(ml_dtypes.bfloat16)
    assert_close(twice, exact, roundings={"float16": 1, "bfloat16": 1})
    with pytest.raises(AssertionError):
        assert_close(twice, exact, roundings={"bfloat16": 1})


def test_a_result_beyond_a_power_of_two_gets_the_wider_spacing() -> None:
    # Half an ulp below 2 is 2^-8; a result that fp32 errors lift above 2 is rounded to multiples of 2^-6.
    exact = np.array([2.0 - 2.0**-20])
    narrow = rounding_bound(exact, dtype="bfloat16", roundings=1)
    wide = rounding_bound(exact, dtype="bfloat16", roundings=1, allowance=2.0**-19)
    assert narrow == 2.0**-8
    assert wide == 2.0**-19 + 2.0**-7


@pytest.mark.parametrize("terms", [2, 100, 3000])
def test_a_sum_in_float32_stays_within_its_bound(terms: int) -> None:
    parts = RANDOM.standard_normal((50, terms)).astype(np.float32)
    exact = parts.astype(np.float64).sum(1)
    plain = np.add.accumulate(parts, axis=1, dtype=np.float32)[:, -1]
    sums = Accumulation(terms - 1, np.abs(parts.astype(np.float64)).sum(1))
    found = assert_close(plain, exact, roundings=0, accumulation=sums)
    assert found.worst > 0


def test_a_sum_in_a_narrow_accumulator_does_not() -> None:
    parts = RANDOM.standard_normal((50, 1000))
    exact = parts.sum(1)
    coarse = np.add.accumulate(parts.astype(np.float16), axis=1, dtype=np.float16)[:, -1].astype(np.float32)
    sums = Accumulation(999, np.abs(parts).sum(1))
    with pytest.raises(AssertionError, match="beyond their bound"):
        assert_close(coarse, exact, roundings=0, accumulation=sums)


def test_a_bound_that_says_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no useful bound"):
        rounding_bound([1.0], dtype="bfloat16", roundings=1, accumulation=Accumulation(200, 1.0, "bfloat16"))


def test_the_text_of_a_failure() -> None:
    exact = np.arange(1.0, 7.0).reshape(2, 3)
    got = exact.astype(np.float32)
    got[1, 2] += 0.5
    with pytest.raises(AssertionError) as caught:
        assert_close(got, exact, roundings=2, name="o_tensor")
    text = str(caught.value)
    assert text.startswith(
        "o_tensor: 1 of 6 elements are beyond their bound. Worst at (1, 2): got 6.5, want 6, off by "
    )
    assert "Relative norm of the error 0.0524" in text


@pytest.mark.parametrize(
    ("got", "want"),
    [(np.nan, 1.0), (1.0, np.nan), (np.inf, 1.0), (np.inf, -np.inf), (np.inf, np.nan), (1e30, np.inf)],
)
def test_special_values_must_agree(got: float, want: float) -> None:
    with pytest.raises(AssertionError, match=r"y: 1 NaN or infinite values differ, the first at \(1,\)"):
        assert_close(np.array([1, got], np.float32), np.array([1, want]), roundings=1, name="y", allowance=1e40)


def test_special_values_that_agree() -> None:
    special = np.array([np.nan, np.inf, -np.inf, 1.0])
    assert assert_close(special.astype(np.float32), special, roundings=1).worst == 0


def test_shapes_must_agree() -> None:
    with pytest.raises(AssertionError, match=r"y: shape \(2,\) instead of \(1, 2\)"):
        assert_close(np.ones(2, np.float32), np.ones((1, 2)), roundings=1, name="y")


def test_nothing_is_close_to_nothing() -> None:
    assert assert_close(np.ones((0, 3), np.float32), np.ones((0, 3)), roundings=1).index == ()


def test_zero_must_be_hit_exactly_without_a_bound() -> None:
    with pytest.raises(AssertionError):
        assert_close(np.array([1e-30], np.float32), np.zeros(1), roundings=0)
    assert_close(np.zeros(1, np.float32), np.zeros(1), roundings=0)


def test_every_framework() -> None:
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    exact = np.linspace(-2, 2, 9)
    for got in (torch.tensor(exact).bfloat16(), jax.numpy.asarray(exact, jax.numpy.bfloat16)):
        assert_close(got, exact, roundings=1)
        with pytest.raises(AssertionError):
            assert_close(got * 1.5, exact, roundings=1)
