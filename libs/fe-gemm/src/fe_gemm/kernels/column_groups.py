"""Groups of columns of a block-scaled operand, each with a layout of scales of its own, one after the other.

Groups are of multiples of four blocks, so all columns of an atom of the scale layout belong to one. Where they are not,
numbers make no sense, but nothing outside the arrays is touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from fe_gemm.planning.expand import Problem

from .blocked import ATOM_ROWS, WORD_ROWS
from .lines import ALIGNMENT

__all__ = ["Atoms", "ColumnGroup"]


@dataclass(frozen=True, slots=True)
class ColumnGroup:
    """The group that the columns of atom number ``tile`` along the rows belong to.

    ``exists``: there is one; ``shape``: rows, columns and batches of the operand, whose groups all are.
    """

    problem: Problem
    shape: tuple[Any, Any, Any]
    offsets: cute.Tensor
    tile: Int32
    exists: Boolean

    @classmethod
    def of(cls, problem: Problem, shape: tuple[Any, Any, Any], offsets: cute.Tensor, tile: Int32) -> ColumnGroup:
        """Return the group; ``offsets``: int32 (E,), the columns at which groups end."""
        exists = offsets[offsets.shape[0] - 1] > tile * (4 * problem.vec)
        return cls(problem, shape, offsets, tile, exists)

    def bounds(self) -> tuple[Int32, Int32]:
        """Return the columns at which the group starts and ends; something in the operand if there is no group."""
        start, end = _search(self.offsets, self.tile * (4 * self.problem.vec))
        start = cutlass.min(cutlass.max(start, 0), self.shape[1])
        return start, cutlass.max(cutlass.min(end, self.shape[1]), start)

    def codes(self, codes: cute.Tensor) -> cute.Tensor:
        """Return the codes so that those of this group are where they would be in one matrix."""
        if not self.problem.ragged or self.problem.major != "k":
            return codes
        start, end = self.bounds()
        line, first = (Int64(count) * self.problem.bits // (8 * ALIGNMENT) for count in (end - start, start))
        line, shift = (cute.assume(n * ALIGNMENT, divby=ALIGNMENT) for n in (line, first * (self.shape[0] - 1)))
        layout = cute.make_layout(codes.shape, stride=(line, 1, codes.stride[2]))
        return cute.make_tensor(codes.iterator + shift, layout)


@dataclass(frozen=True, slots=True)
class Atoms:
    """Scales as :func:`fe_gemm.kernels.blocked.scale_atoms` returns them, or those of a group of columns."""

    words: cute.Tensor
    group: ColumnGroup | None

    def at(self, column_tile: Int32, row_tile: Int32, batch: Int32) -> cute.Tensor:
        """Return an atom: words (4, 32)."""
        if self.group is None:
            return self.words[None, None, column_tile, row_tile, batch]
        _, _, column_tiles, row_tiles, _ = self.words.shape
        columns = 4 * self.group.problem.vec
        start, end = self.group.bounds()
        first, tiles = start // columns, cute.ceil_div(end - start, columns)
        number = Int64(row_tiles) * first + Int64(row_tile) * tiles + (column_tile - first)
        last = Int64(row_tiles) * column_tiles - 1
        number = cutlass.max(cutlass.min(number, last), Int64(0))
        layout = cute.make_layout((ATOM_ROWS // WORD_ROWS, WORD_ROWS), stride=(1, ATOM_ROWS // WORD_ROWS))
        return cute.make_tensor(self.words.iterator + cute.assume(number * ATOM_ROWS, divby=ATOM_ROWS), layout)


@cute.jit
def _search(offsets: cute.Tensor, column: Int32) -> tuple[Int32, Int32]:
    """Return start and end of the group with a column: the first end beyond it, and the end before that."""
    low, high = Int32(0), offsets.shape[0] - 1  # a column behind all groups counts to the last one
    while low < high:
        middle = (low + high) // 2
        if offsets[middle] > column:
            high = middle
        else:
            low = middle + 1
    start = Int32(0)
    if low > 0:
        start = offsets[low - 1]
    return start, offsets[low]
