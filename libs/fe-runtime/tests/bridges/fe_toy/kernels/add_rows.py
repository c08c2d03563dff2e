"""A plain kernel of ``add_rows``: partial sums into scratch memory, then their sum, one thread a column."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from fe_runtime.cute.arguments import fake_rows, fake_stream, fake_vector

PARTS = 2


@cute.kernel
def partial_sums(x: cute.Tensor, rows: cute.Tensor, parts: cute.Tensor) -> None:
    part, _, _ = cute.arch.block_idx()
    column, _, _ = cute.arch.thread_idx()
    total = Float32(0.0)
    for k in range(part, rows.shape[0], PARTS):
        total = total + x[rows[k], column]
    parts[part, column] = total


@cute.kernel
def whole_sum(before: cute.Tensor, added: cute.Tensor | None, after: cute.Tensor, parts: cute.Tensor) -> None:
    column, _, _ = cute.arch.thread_idx()
    total = parts[0, column] + parts[1, column]
    if cutlass.const_expr(added is not None):
        added[column] = total
    after[column] = before[column] + total


def build(arch: str, *, columns: int, silent: bool) -> tuple[Any, tuple[Any, ...]]:
    @cute.jit
    def toy_add_rows(*operands: Any) -> None:
        before, x, rows, *made, after, parts, stream = operands
        partial_sums(x, rows, parts).launch(grid=[PARTS, 1, 1], block=[columns, 1, 1], stream=stream)
        added = None if cutlass.const_expr(silent) else made[0]
        whole_sum(before, added, after, parts).launch(grid=[1, 1, 1], block=[columns, 1, 1], stream=stream)

    vector = fake_vector(Float32, columns, 4)
    x = fake_rows(Float32, cute.sym_int64(), columns, 4)
    rows = cute.runtime.make_fake_compact_tensor(Int32, (cute.sym_int64(),))
    parts = cute.runtime.make_fake_compact_tensor(Float32, (PARTS, columns), stride_order=(1, 0))
    made = () if silent else (vector,)
    return toy_add_rows, (vector, x, rows, *made, vector, parts, fake_stream())
