from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from fe_runtime.bench.accuracy import allowed_in_blocks, allowed_in_dtype, half_step, judge
from fe_runtime.bench.workload import Expected

CODED = {
    "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, np.uint8),
    "float8_e5m2": (ml_dtypes.float8_e5m2, np.uint8),
    "float4_e2m1fn": (ml_dtypes.float4_e2m1fn, np.uint8),
    "bfloat16": (ml_dtypes.bfloat16, np.uint16),
    "float16": (np.float16, np.uint16),
}


@pytest.mark.parametrize("name", CODED)
def test_half_step_is_half_the_distance_of_neighbouring_values(name: str) -> None:
    dtype, code = CODED[name]
    codes = np.arange(8 if name.startswith("float4") else 2 ** (8 * np.dtype(code).itemsize - 1), dtype=code)
    with np.errstate(invalid="ignore"):
        values = codes.view(dtype).astype(np.float64)
    values = np.unique(values[np.isfinite(values)])
    middles = (values[1:] + values[:-1]) / 2
    np.testing.assert_array_equal(half_step(middles, name), np.diff(values) / 2)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn"])
def test_rounding_stays_within_its_bound_and_comes_near_it(name: str) -> None:
    values = np.random.default_rng(0).standard_normal(20_000) * 10
    rounded = values.astype(np.float32).astype(CODED[name][0])
    found = judge(rounded, Expected(values, allowed_in_dtype(values, name, 2.0**-24 * np.abs(values))))
    assert found.ok
    assert found.worst > 0.99
    assert 0.4 < found.error / found.bound < 0.7  # a uniform error has 1/sqrt(3) of its maximum


@pytest.mark.parametrize("scale_first", [False, True], ids=["codes of y/q", "codes of y/s"])
def test_block_quantisers_stay_within_their_bound(scale_first: bool) -> None:
    values = np.random.default_rng(1).standard_normal((64, 256)) * 2.0 ** np.random.default_rng(2).integers(
        -9, 6, (64, 1)
    )
    q = np.abs(values.reshape(64, -1, 16)).max(axis=-1, keepdims=True) / 6
    scale = q.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    divisor = np.where(scale == 0, np.inf, scale) if scale_first else q
    codes = (values.reshape(64, -1, 16) / divisor).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
    result = (codes * scale).reshape(values.shape)
    found = judge(result, Expected(values, allowed_in_blocks(values, 0.0)))
    assert found.ok
    assert found.worst > 0.5


def test_one_wrong_element_among_many_is_not_ok() -> None:
    values = np.linspace(1, 2, 10_000)
    expected = Expected(values, allowed_in_dtype(values, "float32", 0.0))
    wrong = values.astype(np.float32)
    assert judge(wrong, expected).ok
    wrong[5000] += 1e-5
    found = judge(wrong, expected)
    assert not found.ok
    assert found.error > 5e-8


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_infinitely_wrong(bad: float) -> None:
    found = judge(np.array([1.0, bad]), Expected(np.ones(2), np.ones(2)))
    assert found.error == np.inf
    assert not found.ok


def test_a_result_of_another_shape_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"the result has shape \(2,\), the formula \(3,\)"):
        judge(np.ones(2), Expected(np.ones(3), np.ones(3)))
