"""Sums over the rows of a matrix that nobody stores, always in the same order.

A warp group adds up what it has of a row and leaves it in a workspace; a second kernel adds these parts, those of the
first columns first, and writes the sums or adds them to what is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from fe_runtime.cute.reduce import warp_sum
from fe_runtime.cute.rounding import add_rn, sub_rn

from .region import Region, row_reduction

__all__ = ["RowSums", "add_up"]

_THREADS = 128


@dataclass(frozen=True, slots=True)
class RowSums:
    """A thread's view: the workspace (part, batch, row) and, in registers, its two rows' sums."""

    partials: cute.Tensor
    sums: cute.Tensor

    @classmethod
    def of(cls, partials: cute.Tensor) -> RowSums:
        """Return the view of a thread."""
        return cls(partials, cute.make_rmem_tensor((2,), Float32))

    def begin(self) -> None:
        """Start the sums of two rows in a tile."""
        self.sums[0] = Float32(0.0)
        self.sums[1] = Float32(0.0)

    def add(self, terms: cute.Tensor, region: Region) -> None:
        """Add a fragment."""
        for half, total in enumerate(row_reduction(terms, region, _add)):
            self.sums[half] = self.sums[half] + total

    def finish(self, row: Int32, part: Int32, batch: Int32, inside: tuple[Boolean, Boolean], leads: Boolean) -> None:
        """Store the sums as the ``part``-th of a row; the thread that ``leads`` its four does."""
        for half in range(2):
            total = warp_sum(self.sums[half], threads=4)
            _store(self.partials, total, row + 8 * half, part, batch, leads & inside[half])


@cute.jit
def _store(partials: cute.Tensor, total: Float32, row: Int32, part: Int32, batch: Int32, stores: Boolean) -> None:
    if stores and part < partials.shape[0]:
        partials[part, batch, row] = total


def _add(total: Float32, value: Float32) -> Float32:
    return total + value


def add_up(
    partials: cute.Tensor, sums: cute.Tensor, accumulates: bool, stream: Any, offsets: cute.Tensor | None = None
) -> None:
    """Launch the second kernel: partials (parts, L, M) to sums (M, 1, L).

    ``offsets``: the ends of groups of rows; rows behind the last one have no sums: they get 0, or are left alone.
    """
    _, batches, rows = partials.shape
    add_up_kernel.set_name_prefix("fe_gemm_row_sums", remove_cutlass_symbol=True, keep_mangled_name=False)
    add_up_kernel(partials, sums, offsets, accumulates).launch(
        grid=(cute.ceil_div(rows * batches, _THREADS), 1, 1), block=(_THREADS, 1, 1), stream=stream
    )


@cute.kernel
def add_up_kernel(
    partials: cute.Tensor, sums: cute.Tensor, offsets: cute.Tensor | None, accumulates: cutlass.Constexpr[bool]
) -> None:
    """Add the parts of one row per thread."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    parts, batches, rows = partials.shape
    number, count = block * _THREADS + thread, rows * batches
    if cutlass.const_expr(offsets is not None):
        summed = cutlass.min(count, offsets[offsets.shape[0] - 1])
        parts = parts * Int32(number < summed)
        if cutlass.const_expr(accumulates):
            count = summed
    if number < count:
        batch = number // rows
        row = number - batch * rows
        total, excess = Float32(0.0), Float32(0.0)
        for part in cutlass.range(parts, unroll=4):
            # What a rounded sum has too much is taken off the next part, so the error does not grow with their number.
            term = sub_rn(partials[part, batch, row], excess)
            more = add_rn(total, term)
            excess = sub_rn(sub_rn(more, total), term)
            if excess != excess:  # an infinite sum has none
                excess = Float32(0.0)
            total = more
        if cutlass.const_expr(accumulates):
            total = sums[row, 0, batch] + total
        sums[row, 0, batch] = total
