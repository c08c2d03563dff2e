"""Sums over the rows of each group, column by column, always in the same order.

A warp group adds up the 64 rows of a cell, in float32, and leaves the sums in a line of a workspace. A second kernel
adds the lines of each group, those of the first rows first, in eight parts, and writes the sums rounded once, or adds
them so rounded to what is there.

Which lines are a group's: :func:`fe_gemm.planning.grouped.line_of`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from fe_gemm.kernels.sm90.rope_values import halved
from fe_gemm.kernels.sm90.tensor_maps import group_end
from fe_gemm.planning.grouped import line_of
from fe_gemm.planning.problem import CELL
from fe_runtime.cute.wgmma import WARP_GROUP

__all__ = ["ColumnSums", "add_up"]

WARPS = WARP_GROUP // 32
BUFFERS = 2
_SLICES = 8


@dataclass(frozen=True, slots=True)
class ColumnSums:
    """A thread's view: the workspace (lines, columns), and shared memory for the sums of each warp, twice: one warp may
    still read those of a cell when the others write those of the next one."""

    partials: cute.Tensor
    memory: cute.Pointer
    thread: Int32

    @classmethod
    def of(cls, partials: cute.Tensor, memory: cute.Pointer, thread: Int32) -> ColumnSums:
        """Return the view of a thread, with its warp group's bytes of shared memory."""
        return cls(partials, cute.recast_ptr(memory, dtype=Float32), thread)

    def offer(self, values: cute.Tensor, inside: tuple[Boolean, Boolean], number: int) -> None:
        """Write the sums over a warp's 16 rows of a fragment as wide as a cell, the ``number``-th of a tile; a barrier
        must follow."""
        lane = self.thread % 32
        sums = [
            _if(inside[0], values[side, 0, block]) + _if(inside[1], values[side, 1, block])
            for block in range(cute.size(values, mode=[2]))
            for side in range(2)
        ]
        for distance in (16, 8, 4):
            sums = halved(sums, distance, lane, _add)
        block = (lane >> 4 & 1) * 4 + (lane >> 3 & 1) * 2 + (lane >> 2 & 1)
        place = self._place(number, self.thread // 32) + (block * 8 + lane % 4 * 2)
        own = cute.make_tensor(place, cute.make_layout(2))
        own[0], own[1] = sums

    @cute.jit
    def finish(self, tile_row: Int32, end: Int32, group: Int32, column: Int32, number: cutlass.Constexpr[int]) -> None:
        """Store the sums of the cell that begins in a row and in a column, if the group reaches so far; one warp does,
        after the barrier."""
        lane = self.thread % 32
        if (self.thread // 32 == number % WARPS) & (tile_row < end) & (column < self.partials.shape[1]):
            self._store(Int64(line_of(tile_row, group)), column + lane * 2, lane * 2, number)

    def _store(self, line: Int64, column: Int32, own: Int32, number: int) -> None:
        """Add the sums of the four warps in two columns, those from ``own`` on of the cell, and store them."""
        pairs = [cute.make_tensor(self._place(number, warp) + own, cute.make_layout(2)) for warp in range(WARPS)]
        target = self.partials.iterator + (line * self.partials.shape[1] + column)
        for i in range(2):
            total = pairs[0][i]
            for pair in pairs[1:]:
                total = total + pair[i]
            cute.make_tensor(target, cute.make_layout(2))[i] = total

    def _place(self, number: int, warp: Int32 | int) -> cute.Pointer:
        return self.memory + (number % BUFFERS * WARPS + warp) * CELL


def _add(a: Float32, b: Float32) -> Float32:
    return a + b


def _if(condition: Boolean, value: Float32) -> Float32:
    return Float32(cutlass.select_(condition, value, Float32(0.0)))


def add_up(
    partials: cute.Tensor, sums: cute.Tensor, offsets: cute.Tensor, rows: Int32, accumulates: bool, stream: Any
) -> None:
    """Launch the second kernel: partials (lines, columns) to sums (E, columns)."""
    groups, columns = sums.shape
    column_sums_kernel.set_name_prefix("fe_gemm_column_sums", remove_cutlass_symbol=True, keep_mangled_name=False)
    column_sums_kernel(partials, sums, offsets, rows, accumulates).launch(
        grid=(cute.ceil_div(columns, 32), groups, 1), block=(32 * _SLICES, 1, 1), stream=stream
    )


@cute.kernel
def column_sums_kernel(
    partials: cute.Tensor,
    sums: cute.Tensor,
    offsets: cute.Tensor,
    rows: Int32,
    accumulates: cutlass.Constexpr[bool],
) -> None:
    """Add 32 columns of a group: each warp a part of the lines, then one warp the parts."""
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    block, group, _ = cute.arch.block_idx()
    parts = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout((32, _SLICES)))
    start = Int32(0)
    if group > 0:
        start = cutlass.min(group_end(offsets, group - 1, lane), rows)
    end = cutlass.min(group_end(offsets, group, lane), rows)
    first, count = line_of(start, group), cute.ceil_div(end - start, CELL)
    column = block * 32 + lane
    inside = column < sums.shape[1]
    total = Float32(0.0)
    if inside:
        for line in cutlass.range(count * warp // _SLICES, count * (warp + 1) // _SLICES, unroll=8):
            total = total + partials[first + line, column]
    parts[lane, warp] = total
    cute.arch.sync_threads()
    if (warp == 0) & inside:
        total = parts[lane, 0]
        for i in cutlass.range_constexpr(1, _SLICES):
            total = total + parts[lane, i]
        rounded = total.to(sums.element_type)
        if cutlass.const_expr(accumulates):
            rounded = (sums[group, column].to(Float32) + rounded.to(Float32)).to(sums.element_type)
        sums[group, column] = rounded
