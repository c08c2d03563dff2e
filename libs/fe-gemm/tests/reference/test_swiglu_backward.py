"""``gemm_swiglu_backward``: the reference against finite differences and against torch's autograd in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from naive_gemm import E4M3, STORED, accumulation_error, assert_within, gated, product, sigmoid, storing_error, value_of

from fe_gemm.reference.swiglu_backward import gemm_swiglu_backward
from fe_runtime.testing import to_framework, to_numpy

M, N, K, L = 5, 128, 7, 2


def arrays(dtype: Any = np.float64, ab12_dtype: Any = np.float64, c_dtype: Any = np.float64, alpha: float = 0.7) -> Any:
    """Return dc, dab12, a, b, ab12."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((rows, K, L)).astype(dtype) for rows in (M, N))
    ab12 = (alpha * product(value_of(a), value_of(b))).astype(ab12_dtype)
    dc = rng.standard_normal((M, N // 2, L)).astype(c_dtype)
    return dc, rng.standard_normal((M, N, L)).astype(ab12_dtype), a, b, ab12


def objective(dc: Any, dab12: Any, a: Any, b: Any, alpha: float) -> float:
    x = alpha * product(a, b)
    up, gate = gated(x)
    total = (dc * up * gate * sigmoid(gate)).sum()
    return float(total if dab12 is None else total + (dab12 * x).sum())


@pytest.mark.parametrize("with_dab12", [False, True])
def test_finite_differences(with_dab12: bool) -> None:
    alpha, step = 0.7, 1e-6
    dc, dab12, a, b, ab12 = arrays()
    dab12 = dab12 if with_dab12 else None
    gradients = gemm_swiglu_backward(dc, dab12, a, b, ab12, alpha=alpha, compute="float64")
    rng = np.random.default_rng(1)
    for _ in range(12):
        for which, gradient in enumerate(gradients):
            at = tuple(int(rng.integers(extent)) for extent in gradient.shape)
            ends = []
            for sign in (1, -1):
                moved = [a.copy(), b.copy()]
                moved[which][at] += sign * step
                ends.append(objective(dc, dab12, *moved, alpha))
            assert gradient[at] == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-6, abs=1e-6)


def test_autograd_of_the_formula() -> None:
    alpha = -0.3
    dc, dab12, a, b, ab12 = arrays(alpha=alpha)
    left, right = (torch.from_numpy(x).requires_grad_(True) for x in (a, b))
    x = alpha * torch.einsum("mkl,nkl->mnl", left, right)
    blocks = x.reshape(M, N // 64, 2, 32, L)
    c = (blocks[:, :, 0] * torch.nn.functional.silu(blocks[:, :, 1])).reshape(M, N // 2, L)
    torch.autograd.backward((c, x), (torch.from_numpy(dc), torch.from_numpy(dab12)))
    da, db = gemm_swiglu_backward(dc, dab12, a, b, ab12, alpha=alpha, compute="float64")
    np.testing.assert_allclose(da, left.grad, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(db, right.grad, rtol=1e-12, atol=1e-12)


def dx_of(dc: Any, dab12: Any, ab12: Any) -> Any:
    """Gradient of x column by column, in float64."""
    dx = np.zeros(ab12.shape) if dab12 is None else dab12.copy()
    for j in range(dc.shape[1]):
        at = 64 * (j // 32) + j % 32
        up, gate = ab12[:, at], ab12[:, at + 32]
        s = sigmoid(gate)
        dx[:, at] += dc[:, j] * gate * s
        dx[:, at + 32] += dc[:, j] * up * s * (1 + gate * (1 - s))
    return dx


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize(("dtype", "ab12_dtype"), [
    ("float16", "float32"), ("bfloat16", "bfloat16"), ("float32", "float16"), ("bfloat16", E4M3),
])  # fmt: skip
def test_roundings(dtype: str, ab12_dtype: str, framework: str) -> None:
    dc, dab12, a, b, ab12 = arrays(STORED[dtype], STORED[ab12_dtype], ml_dtypes.bfloat16)
    given = [to_framework(x, framework) for x in (dc, dab12, a, b, ab12)]
    da, db = (to_numpy(x) for x in gemm_swiglu_backward(*given, alpha=0.7))
    assert (da.dtype, db.dtype) == (a.dtype, b.dtype)
    dx = dx_of(value_of(dc), value_of(dab12), value_of(ab12))
    u = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-20}[dtype]
    # A[m, k] = sum over n: product() sums over the second dimension.
    by_n, by_m = dx, dx.transpose(1, 0, 2)
    for got, left, right in ((da, by_n, value_of(b)), (db, by_m, value_of(a))):
        right = right.transpose(1, 0, 2)
        exact = 0.7 * product(left, right)
        slack = 0.7 * (u * product(np.abs(left), np.abs(right)) + accumulation_error(left, right))
        assert_within(value_of(got), exact, slack + storing_error(exact, dtype), dtype)


def test_dx_is_rounded_to_the_operands_dtype() -> None:
    a, b = np.ones((1, 1, 1), ml_dtypes.bfloat16), np.zeros((64, 1, 1), ml_dtypes.bfloat16)
    b[0] = 1
    dab12 = np.zeros((1, 64, 1), np.float32)
    dab12[0, 0] = 1 + 2.0**-9  # rounds to 1
    zero = np.zeros((1, 32, 1), ml_dtypes.bfloat16)
    da, db = gemm_swiglu_backward(zero, dab12, a, b, np.zeros((1, 64, 1), np.float32))
    assert (float(da[0, 0, 0]), float(db[0, 0, 0])) == (1.0, 1.0)
    da, _ = gemm_swiglu_backward(zero, dab12, *(x.astype(np.float32) for x in (a, b)), np.zeros((1, 64, 1), np.float32))
    assert float(da[0, 0, 0]) == 1 + 2.0**-9


def test_extreme_gates_have_finite_gradients() -> None:
    gates = np.array([-1e30, -200, -88, 0, 88, 200, 1e30], np.float32)
    ab12 = np.zeros((7, 64, 1), np.float32)
    ab12[:, :32], ab12[:, 32:, 0] = 1, gates[:, None]
    ones = np.ones((7, 32, 1), np.float32)
    a, b = np.ones((7, 1, 1), np.float32), np.zeros((64, 1, 1), np.float32)
    b[32] = 1  # da is the gradient of the gate
    da, _ = gemm_swiglu_backward(ones, None, a, b, ab12)
    np.testing.assert_allclose(da[:, 0, 0], [0, 0, 0, 0.5, 1, 1, 1], atol=1e-6)
