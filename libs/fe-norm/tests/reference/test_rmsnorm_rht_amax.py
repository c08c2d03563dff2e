"""The reference of ``rmsnorm_rht_amax`` against naive loops in Python floats with an explicit Hadamard matrix."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fe_norm.reference.rmsnorm_rht_amax import rmsnorm_rht_amax
from fe_runtime.testing import to_framework, to_numpy

SIGNS = [[1 - 2 * ((i & j).bit_count() % 2) for j in range(16)] for i in range(16)]


def naive(x: Any, w: Any, eps: float, group: int) -> tuple[Any, Any]:
    """The formula, one Python float at a time."""
    rows, columns = x.shape
    out = np.empty((rows, columns), np.float64)
    for m in range(rows):
        rstd = 1.0 / math.sqrt(math.fsum(float(v) ** 2 for v in x[m]) / columns + eps)
        y = [float(x[m, n]) * rstd * float(w[n]) for n in range(columns)]
        for n in range(columns):
            first = n - n % 16
            out[m, n] = math.fsum(SIGNS[n % 16][j] * y[first + j] for j in range(16)) / 4
    amax = [max(abs(v) for row in out[c : c + group] for v in row) for c in range(0, rows, group)]
    return out, np.array(amax)


def case(rows: int, columns: int, seed: int = 0, dtype: Any = ml_dtypes.bfloat16) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((rows, columns)) * np.exp(rng.standard_normal(columns))).astype(dtype)
    return x, (1 + rng.standard_normal(columns) / 4).astype(dtype)


def largest_of_block(values: Any) -> Any:
    blocks = np.abs(values).reshape(values.shape[0], -1, 16)
    return np.repeat(blocks.max(axis=-1), 16, axis=-1)


@pytest.mark.parametrize("columns", [16, 48, 320])
@pytest.mark.parametrize("group", [1, 2, 3, 6])
def test_float64_matches_the_naive_loop(columns: int, group: int) -> None:
    x, w = case(6, columns)
    o, amax = rmsnorm_rht_amax(x, w, eps=0.25, rows_per_cta=group, compute="float64")
    want, want_amax = naive(x, w, 0.25, group)
    np.testing.assert_allclose(o, want, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(amax, want_amax, rtol=1e-12)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_result_is_rounded_once_to_the_dtype_of_x(dtype: Any) -> None:
    x, w = case(4, 96, dtype=dtype)
    o, amax = rmsnorm_rht_amax(x, w, eps=1e-5, rows_per_cta=2)
    want, want_amax = naive(x, w, 1e-5, 2)
    assert o.dtype == dtype
    # Half an ulp of the output and about 12 fp32 roundings, relative to the largest of the 16 that are summed.
    half = {"bfloat16": 2.0**-9, "float16": 2.0**-12, "float32": 2.0**-25}[np.dtype(dtype).name]
    allowed = half * np.abs(want) * 2 + 2.0**-20 * 4 * largest_of_block(want)
    assert (np.abs(o.astype(np.float64) - want) <= allowed).all()
    assert amax.dtype == np.float32  # taken before the rounding
    np.testing.assert_allclose(amax, want_amax, rtol=1e-6)


def test_rotating_twice_gives_the_values_back() -> None:
    x, w = case(3, 64)
    y, _ = rmsnorm_rht_amax(x, w, eps=0.0, rows_per_cta=1, compute="float64")
    unit = y / np.sqrt((y * y).mean(-1, keepdims=True))  # of mean square 1: the norm leaves it alone
    back, _ = rmsnorm_rht_amax(unit, np.ones(64), eps=0.0, rows_per_cta=1, compute="float64")
    v = x.astype(np.float64)
    want = v / np.sqrt((v * v).mean(-1, keepdims=True)) * w.astype(np.float64)
    np.testing.assert_allclose(back, want / np.sqrt((want * want).mean(-1, keepdims=True)), rtol=1e-12, atol=1e-13)


def test_a_single_channel_becomes_a_row_of_the_matrix() -> None:
    for channel in range(16):
        x = np.zeros((1, 16), np.float32)
        x[0, channel] = 1
        o, amax = rmsnorm_rht_amax(x, np.ones(16, np.float32), eps=0.0, rows_per_cta=1)
        np.testing.assert_array_equal(o[0], SIGNS[channel])  # 1 * sqrt(16) / 4
        assert amax[0] == 1


def test_the_maximum_ignores_nan() -> None:
    x, w = case(6, 32, dtype=np.float32)
    clean, _ = rmsnorm_rht_amax(x, w, eps=1e-5, rows_per_cta=2)
    x[1, 3], x[4], x[5] = np.nan, np.nan, np.nan
    o, amax = rmsnorm_rht_amax(x, w, eps=1e-5, rows_per_cta=2)
    np.testing.assert_array_equal(o[[0, 2, 3]], clean[[0, 2, 3]])
    assert np.isnan(o[[1, 4, 5]]).all()
    np.testing.assert_array_equal(amax, [np.abs(clean[0]).max(), np.abs(clean[2:4]).max(), 0])


def test_a_nan_weight_spoils_its_block_only() -> None:
    x, w = case(2, 48, dtype=np.float32)
    w[20] = np.nan
    o, amax = rmsnorm_rht_amax(x, w, eps=1e-5, rows_per_cta=2)
    assert np.isnan(o[:, 16:32]).all()
    assert np.isfinite(np.delete(o, np.s_[16:32], axis=1)).all()
    assert amax[0] == np.nanmax(np.abs(o))


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_no_rows(framework: str) -> None:
    x = to_framework(np.empty((0, 32), np.float32), framework)
    o, amax = rmsnorm_rht_amax(x, to_framework(np.ones(32, np.float32), framework), eps=1e-5, rows_per_cta=2)
    assert (tuple(o.shape), tuple(amax.shape)) == ((0, 32), (0,))


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_frameworks_agree(framework: str, dtype: Any) -> None:
    convert: Callable[[Any], Any] = lambda array: to_framework(array, framework)  # noqa: E731
    x, w = case(8, 64, seed=5, dtype=dtype)
    want, want_amax = rmsnorm_rht_amax(x, w, eps=1e-5, rows_per_cta=4)
    got, amax = rmsnorm_rht_amax(convert(x), convert(w), eps=1e-5, rows_per_cta=4)
    assert isinstance(got, jnp.ndarray) == (framework == "jax")
    np.testing.assert_allclose(to_numpy(amax), want_amax, rtol=1e-6)
    got, want = to_numpy(got).astype(np.float64), want.astype(np.float64)
    step = 2.0**-8 if dtype is ml_dtypes.bfloat16 else 2.0**-20  # another sum's rounding may move a value by one code
    assert (np.abs(got - want) <= step * np.maximum(np.abs(want), 2.0**-3 * largest_of_block(want))).all()
