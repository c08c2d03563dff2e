"""The matrix that comes in beside the product: cells of 64 x 64 by TMA, a few ahead of their turn.

Each warp group has its own buffers and a barrier for each. Its issuing warp starts the first copies of a tile before
the tile's product, and each further one when the cell before it in the same buffer is in registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cute.nvgpu import cpasync

from fe_gemm.planning.problem import CELL, Sheet
from fe_gemm.planning.tiles import UPSTREAM_BUFFERS
from fe_runtime.cute.tma import load_atom, tiles_from

from .cells import cell_layout, made_here, read, stored_columns, thread_offset
from .stage import cells_in_memory

__all__ = ["Inlet", "inlet_atom"]


def inlet_atom(sheet: Sheet, array: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
    """Return the copy of cells of a matrix, and the matrix as TMA sees it. What lies outside arrives as zeros."""
    layout = cute.select(cell_layout(sheet, 1), mode=[0, 1])
    return load_atom(array, layout, (CELL, stored_columns(sheet)), 1)


@dataclass(frozen=True, slots=True)
class Inlet:
    """One warp group's way in.

    ``places`` are the (row, column) of a tile's cells in their order; ``whole`` is the matrix's layout by values;
    ``full`` is the first barrier; ``turns``, in a register, counts the cells read from the first buffer's point of
    view: how often it has been filled.
    """

    sheet: Sheet
    places: tuple[tuple[int, int], ...]
    atom: cute.CopyAtom
    slots: cute.Tensor
    array: cute.Tensor
    whole: cute.Layout
    start: Int32
    full: cute.Pointer
    issues: Boolean
    tiles: cute.Tensor

    @classmethod
    def of(
        cls,
        sheet: Sheet,
        places: tuple[tuple[int, int], ...],
        pair: tuple[cute.CopyAtom, cute.Tensor],
        memory: cute.Pointer,
        full: cute.Pointer,
        thread: Int32,
    ) -> Inlet:
        """Return the way in of a thread, through the buffers of its warp group, which begin at ``memory``."""
        atom, array = pair
        cells = cells_in_memory(sheet, memory, UPSTREAM_BUFFERS, sheet.cell_bytes)
        parts = cute.local_tile(array, (CELL, stored_columns(sheet)), (None, None, None))
        slots, cells_there = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(cells, 0, 2), cute.group_modes(parts, 0, 2)
        )
        tiles = cute.make_rmem_tensor((1,), Int32)
        tiles[0] = Int32(0)
        issues = cute.arch.make_warp_uniform(thread // 32) == 0
        start = memory.toint() + thread_offset(sheet, thread)
        return cls(sheet, places, atom, slots, cells_there, array.layout, start, full, issues, tiles)

    def begin(self, row: Int32, column: Int32, batch: Int32) -> None:
        """Start the first copies of the tile that begins in ``row`` and in the ``column``-th cell."""
        for index in range(min(UPSTREAM_BUFFERS, len(self.places))):
            self.fetch(index, row, column, batch)

    def fetch(self, index: int, row: Int32, column: Int32, batch: Int32) -> None:
        """Start the copy of the ``index``-th cell of a tile, if it has so many; its buffer has been read by all."""
        if index < len(self.places):
            down, right = self.places[index]
            self._fetch(index % UPSTREAM_BUFFERS, row + down * CELL, column + right, batch)

    def read(self, index: int) -> cute.Tensor:
        """Return a thread's values of the ``index``-th cell of the tile."""
        buffer, turn = index % UPSTREAM_BUFFERS, index // UPSTREAM_BUFFERS
        turns = (len(self.places) - buffer + UPSTREAM_BUFFERS - 1) // UPSTREAM_BUFFERS
        cute.arch.mbarrier_wait(self.full + buffer, (self.tiles[0] * turns + turn) & 1)
        return read(self.sheet, made_here(self.start) + buffer * self.sheet.cell_bytes)

    def end(self) -> None:
        """Count a finished tile."""
        self.tiles[0] = self.tiles[0] + 1

    @cute.jit
    def _fetch(self, buffer: cutlass.Constexpr[int], row: Int32, column: Int32, batch: Int32) -> None:
        if self.issues:
            barrier = self.full + buffer
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.sheet.cell_bytes)
            from_ = tiles_from(self.array, self.whole, (row, 0, batch))[None, 0, column, 0]
            to = self.slots[None, buffer]
            cute.copy(self.atom, from_, to, tma_bar_ptr=barrier)
