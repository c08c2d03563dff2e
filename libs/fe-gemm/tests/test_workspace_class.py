"""Classes whose kernels expand their operands work in the caller's memory, and say how much they need."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fe_gemm import GemmAmax, GemmProjRopeMxfp8Mxfp8In, GemmSrelu, GemmSwiglu, gemm_proj_rope_mxfp8_wrapper
from fe_runtime import formats

K = 96


def block_scaled(rows: int) -> tuple[Any, Any]:
    codes, scales = formats.quantize_mx(torch.randn(rows, K), "float8_e4m3fn")
    return codes[..., None], formats.to_blocked(scales[None])


def amax(rows: int) -> tuple[Any, tuple[Any, ...]]:
    (a, sfa), (b, sfb) = block_scaled(rows), block_scaled(64)
    outputs = torch.empty(rows, 64, 1), torch.full((1, 1, 1), -torch.inf)
    return GemmAmax(a, b, sfa, sfb, *outputs), (a, b, sfa, sfb, *outputs)


def srelu(rows: int) -> tuple[Any, tuple[Any, ...]]:
    (a, sfa), (b, sfb) = block_scaled(rows), block_scaled(64)
    c, d, prob = torch.empty(rows, 64, 1), torch.empty(rows, 64, 1), torch.rand(rows, 1, 1)
    return GemmSrelu(a, b, c, d, sfa, sfb, prob, sf_vec_size=32), (a, b, c, d, sfa, sfb, prob)


def swiglu(rows: int) -> tuple[Any, tuple[Any, ...]]:
    (a, sfa), (b, sfb) = block_scaled(rows), block_scaled(64)
    outputs = torch.empty(rows, 64, 1), torch.empty(rows, 32, 1)
    op = GemmSwiglu(a, b, *outputs, sample_sfa=sfa, sample_sfb=sfb, sf_vec_size=32)
    return op, (a, b, *outputs, sfa, sfb)


def proj_rope(rows: int) -> tuple[Any, tuple[Any, ...]]:
    (x, x_scale), (w, w_scale) = (formats.quantize_mx(torch.randn(n, K), "float8_e4m3fn") for n in (rows, 192))
    x_scale, w_scale = x_scale.view(torch.uint8), w_scale.view(torch.uint8)
    tables = torch.randn(2, rows, 64).bfloat16()
    outputs = gemm_proj_rope_mxfp8_wrapper(x, w, *tables, x_scale, w_scale)
    arrays = (x, x_scale, w, w_scale, *tables, *outputs)
    return GemmProjRopeMxfp8Mxfp8In(*arrays), arrays


KINDS = {"gemm_amax": (amax, 64), "gemm_srelu": (srelu, 64), "gemm_swiglu": (swiglu, 64), "proj_rope": (proj_rope, 192)}


@pytest.mark.parametrize(("make", "columns"), KINDS.values(), ids=list(KINDS))
def test_expanded_operands_are_all_the_memory(make: Any, columns: int) -> None:
    op, arrays = make(32)
    needed = (32 + columns) * K * 2
    assert op.scratch_workspace_bytes() == needed
    op.compile()
    op.execute(*arrays)
    op.execute(*arrays, workspace=torch.empty(needed, dtype=torch.uint8))
    with pytest.raises(ValueError, match="workspace must be a contiguous uint8 vector of at least 0 bytes"):
        op.execute(*arrays, workspace=torch.empty(8))  # the reference needs none, but this is no vector of bytes


@pytest.mark.parametrize(("make", "columns"), KINDS.values(), ids=list(KINDS))
def test_more_rows_than_the_sample_do_without_a_workspace_too(make: Any, columns: int) -> None:
    op, _ = make(32)
    op.compile()
    _, more = make(64)
    op.execute(*more)
    op.execute(*more, workspace=torch.empty((64 + columns) * K * 2, dtype=torch.uint8))


def test_the_buffer_of_an_object_grows_and_stays() -> None:
    op, _ = amax(32)
    bound, _ = op._check()
    small = op._provide(100, bound)
    large = op._provide(1000, bound)
    assert (small.numel(), large.numel()) == (100, 1000)
    assert op._provide(500, bound) is large


def test_operands_that_the_core_takes_as_they_are_need_nothing() -> None:
    a, b = torch.randn(32, 64, 1).bfloat16(), torch.randn(64, 64, 1).bfloat16()
    op = GemmSwiglu(a, b, torch.empty(32, 64, 1), torch.empty(32, 32, 1, dtype=torch.bfloat16))
    assert op.scratch_workspace_bytes() == 0
    op.compile()
    op.execute(a.repeat(3, 1, 1), b, torch.empty(96, 64, 1), torch.empty(96, 32, 1, dtype=torch.bfloat16))
