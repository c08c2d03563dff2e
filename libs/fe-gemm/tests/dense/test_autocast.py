"""torch.autocast changes nothing: the products of a contract are in fp32 whatever surrounds the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fe_gemm
from fe_runtime import formats


def block_scaled(rows: int, seed: int) -> tuple[Any, Any]:
    values = torch.randn(rows, 96, generator=torch.Generator().manual_seed(seed))
    codes, scales = formats.quantize_mx(values, "float8_e4m3fn")
    return codes[..., None], formats.to_blocked(scales[None])


def normal(*shape: int) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


A, SFA = block_scaled(48, 0)
B, SFB = block_scaled(64, 1)
X = normal(64, 96, 1)
PROB, C = normal(48, 1, 1), normal(48, 64, 1).bfloat16()
CALLS: dict[str, Callable[[], Any]] = {
    "gemm_amax": lambda: fe_gemm.gemm_amax_wrapper(A, B, SFA, SFB),
    "gemm_swiglu": lambda: fe_gemm.gemm_swiglu_wrapper(X, X),
    "gemm_srelu": lambda: fe_gemm.gemm_srelu_wrapper(A, B, SFA, SFB, PROB, sf_vec_size=32),
    "gemm_dsrelu": lambda: fe_gemm.gemm_dsrelu_wrapper(A, B, C, SFA, SFB, PROB, sf_vec_size=32),
    "gemm_proj_rope_mxfp8": lambda: fe_gemm.gemm_proj_rope_mxfp8_wrapper(
        normal(32, 64).bfloat16(), normal(192, 64).bfloat16(), normal(32, 64).bfloat16(), normal(32, 64).bfloat16()
    ),
    "mhc_projection_backward": lambda: fe_gemm.mhc_projection_backward(
        normal(16, 64).bfloat16(), normal(8, 64), normal(16, 9), normal(16, 1), normal(16, 1).abs() + 1, allow_tf32=True
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_autocast_changes_nothing(call: Callable[[], Any]) -> None:
    want = [result for result in call() if result is not None]
    with torch.autocast("cpu", torch.bfloat16):
        results = [result for result in call() if result is not None]
    for result, right in zip(results, want, strict=True):
        assert result.dtype == right.dtype
        assert torch.equal(*(array.reshape(-1).view(torch.uint8) for array in (result, right)))


def test_autocast_changes_no_gradient() -> None:
    def gradients() -> list[Any]:
        a, b = X.clone().requires_grad_(), X.clone().requires_grad_()
        fe_gemm.gemm_swiglu_wrapper(a, b)["c_tensor"].float().sum().backward()
        return [a.grad, b.grad]

    want = gradients()
    with torch.autocast("cpu", torch.bfloat16):
        results = gradients()
    assert all(torch.equal(result, right) for result, right in zip(results, want, strict=True))
