"""A launcher of sums over the rows of two matrices, for tests."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Float32, cute

from fe_runtime.cute.arguments import fake_stream
from fe_runtime.cute.partial_sums import launch_sums


def build(arch: str, most: int, overlap: bool) -> tuple[Any, tuple[Any, ...]]:
    """Return a launcher of two matrices (rows, columns) and their sums, the first float32, the second bf16."""
    del arch

    @cute.jit
    def sums(a: cute.Tensor, b: cute.Tensor, a_sums: cute.Tensor, b_sums: cute.Tensor, stream: Any) -> None:
        launch_sums([(a, a_sums), (b, b_sums)], most, overlap, stream, "fe_test_sums")

    rows, columns, make = cute.sym_int(), cute.sym_int(), cute.runtime.make_fake_tensor
    matrices = [make(Float32, (rows, columns), (cute.sym_int64(), 1), assumed_align=4) for _ in range(2)]
    results = [make(dtype, (columns,), (1,), assumed_align=dtype.width // 8) for dtype in (Float32, BFloat16)]
    return sums, (*matrices, *results, fake_stream())
