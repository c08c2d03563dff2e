"""The reference of ``mhc_projection_backward`` against naive loops and against the gradient of a forward."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fe_gemm.reference.mhc_projection_backward import mhc_projection_backward
from fe_runtime.testing import to_framework, to_numpy

BF16 = ml_dtypes.bfloat16


def case(m: int, n: int, columns: int, padding: int = 0, seed: int = 0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((m, columns)).astype(BF16)
    weight = rng.standard_normal((n, columns)).astype(np.float32)
    grad_proj = rng.standard_normal((m, n + padding)).astype(np.float32)
    grad_proj[:, n:] = np.nan
    grad_r = rng.standard_normal((m, 1)).astype(np.float32)
    return x, weight, grad_proj, grad_r, (0.5 + rng.random((m, 1))).astype(np.float32)


def naive(x: Any, weight: Any, grad_proj: Any, grad_r: Any, r: Any) -> tuple[Any, Any]:
    """The formulas, one Python float at a time."""
    (m, columns), n = x.shape, weight.shape[0]
    dx, dweight = np.empty((m, columns)), np.empty((n, columns))
    for i in range(m):
        factor = float(grad_r[i, 0]) * (1 / (float(r[i, 0]) * columns))
        for k in range(columns):
            terms = [float(grad_proj[i, j]) * float(weight[j, k]) for j in range(n)]
            dx[i, k] = math.fsum([factor * float(x[i, k]), *terms])
    for j in range(n):
        for k in range(columns):
            dweight[j, k] = math.fsum(float(grad_proj[i, j]) * float(x[i, k]) for i in range(m))
    return dx, dweight


@pytest.mark.parametrize(("m", "n", "columns", "padding"), [(5, 3, 16, 0), (1, 24, 8, 8), (17, 1, 24, 3)])
def test_float64_matches_the_naive_loop(m: int, n: int, columns: int, padding: int) -> None:
    arrays = case(m, n, columns, padding)
    for got, want in zip(mhc_projection_backward(*arrays, compute="float64"), naive(*arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)


def test_it_is_the_gradient_of_the_forward() -> None:
    """``proj = x @ weight^T`` and ``r = sqrt(mean(x^2))``, by central differences in float64."""
    _, weight, grad_proj, grad_r, _ = (np.asarray(array, np.float64) for array in case(3, 4, 8))
    rng = np.random.default_rng(1)
    x = rng.standard_normal((3, 8))

    def loss(x: Any, weight: Any) -> float:
        root = np.sqrt((x * x).mean(axis=-1, keepdims=True))
        return float((grad_proj * (x @ weight.T)).sum() + (grad_r * root).sum())

    def slope(array: Any, at: tuple[int, int], f: Any) -> float:
        step = np.zeros_like(array)
        step[at] = 1e-6
        return (f(array + step) - f(array - step)) / 2e-6

    r = np.sqrt((x * x).mean(axis=-1, keepdims=True))
    dx, dweight = mhc_projection_backward(x, weight, grad_proj, grad_r, r, compute="float64")
    for at in np.ndindex(x.shape):
        assert dx[at] == pytest.approx(slope(x, at, lambda changed: loss(changed, weight)), abs=1e-7)
    for at in np.ndindex(weight.shape):
        assert dweight[at] == pytest.approx(slope(weight, at, lambda changed: loss(x, changed)), abs=1e-7)


def test_results_are_rounded_once() -> None:
    arrays = case(33, 24, 64)
    want_dx, want_dweight = naive(*arrays)
    dx, dweight = mhc_projection_backward(*arrays)
    assert (dx.dtype, dweight.dtype) == (BF16, np.float32)
    off = np.abs(dx.astype(np.float64) - want_dx)
    assert (off <= 2.0**-9 * 2 * np.abs(want_dx) + 2.0**-18 * np.abs(want_dx).max()).all()
    np.testing.assert_allclose(dweight, want_dweight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_no_rows(framework: str) -> None:
    arrays = [to_framework(array, framework) for array in case(0, 3, 16)]
    dx, dweight = map(to_numpy, mhc_projection_backward(*arrays))
    assert dx.shape == (0, 16)
    np.testing.assert_array_equal(dweight, np.zeros((3, 16), np.float32))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_frameworks_agree(framework: str) -> None:
    arrays = case(20, 6, 40, padding=2)
    want = mhc_projection_backward(*arrays)
    got = mhc_projection_backward(*(to_framework(array, framework) for array in arrays))
    for a, b, step in zip(got, want, (2.0**-7, 2.0**-18), strict=True):
        assert to_numpy(a).dtype == b.dtype
        np.testing.assert_allclose(to_numpy(a).astype(np.float64), b.astype(np.float64), rtol=step, atol=step)
