"""A factor for each row, read before the product, which takes longer than the reading."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Boolean, Float32, Int32, cute

from fe_gemm.planning.problem import CELL

__all__ = ["RowFactors"]


@dataclass(frozen=True, slots=True)
class RowFactors:
    """A thread's view: the array (M, 1, L) and, in registers, the factors (half, cell) of its rows in a tile."""

    array: cute.Tensor
    held: cute.Tensor

    @classmethod
    def of(cls, array: cute.Tensor, cells: int) -> RowFactors:
        """Return the view of a thread with rows in so many cells, one below the other."""
        return cls(array, cute.make_rmem_tensor((2, cells), Float32))

    def begin(self, row: Int32, batch: Int32) -> None:
        """Read the factors of a tile in which the thread's first row is ``row``; those outside the matrix are 0."""
        for cell in range(cute.size(self.held, mode=[1])):
            for half in range(2):
                at = row + cell * CELL + 8 * half
                self.held[half, cell] = _read(self.array, at, batch, at < self.array.shape[0])

    def of_cell(self, cell: int) -> tuple[Float32, Float32]:
        """Return the factors of the two rows in a cell."""
        return self.held[0, cell], self.held[1, cell]


@cute.jit
def _read(array: cute.Tensor, row: Int32, batch: Int32, inside: Boolean) -> Float32:
    value = Float32(0.0)
    if inside:
        value = array[row, 0, batch]
    return value
