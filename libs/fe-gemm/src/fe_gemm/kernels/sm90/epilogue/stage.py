"""How finished values leave: rounded into buffers in shared memory, from which TMA copies cells to global memory."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cute.nvgpu import cpasync

from fe_gemm.kernels.sm90.tensor_maps import TensorMaps
from fe_gemm.planning.problem import CELL, Sheet
from fe_gemm.planning.tiles import CELL_BYTES
from fe_runtime.cute.tma import store_atom, tiles_from
from fe_runtime.cute.types import storage
from fe_runtime.cute.wgmma import WARP_GROUP

from .cells import cell_layout, made_here, stored_columns, thread_offset, write

__all__ = ["Outlet", "Stage", "cells_in_memory", "outlet_atom"]

_FIRST_BARRIER = 1  # number 0 is the barrier of the whole block


def outlet_atom(sheet: Sheet, array: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
    """Return the copy of cells to a matrix, and the matrix as TMA sees it."""
    layout = cute.select(cell_layout(sheet, 1), mode=[0, 1])
    return store_atom(array, layout, (CELL, stored_columns(sheet)))


def cells_in_memory(sheet: Sheet, memory: cute.Pointer, count: int, pitch: int) -> cute.Tensor:
    """Return ``count`` cells (rows, columns, cells), ``pitch`` bytes apart, from an address in shared memory on."""
    dtype = storage(sheet.dtype)
    layout = cell_layout(sheet, 1)
    cells = cute.make_layout(count, stride=pitch * 8 // dtype.width)
    outer = cute.append(cute.select(layout.outer, mode=[0, 1]), cells)
    return cute.make_tensor(cute.recast_ptr(memory, layout.inner, dtype), outer)


@dataclass(frozen=True, slots=True)
class Outlet:
    """One warp group's way out for one matrix.

    ``slots`` and ``array`` are the buffers (copy, buffer) and the matrix (copy, row, column, batch) of the TMA copy
    ``atom``, in cells; ``whole`` is the matrix's layout by values; ``start`` is the thread's address in the first
    buffer. With groups of rows each has a map of its own, in which the matrix ends with the group: ``maps``.
    """

    sheet: Sheet
    atom: cute.CopyAtom
    slots: cute.Tensor
    array: cute.Tensor
    whole: cute.Layout
    start: Int32
    maps: TensorMaps | None = None

    @classmethod
    def of(
        cls,
        sheet: Sheet,
        pair: tuple[cute.CopyAtom, cute.Tensor],
        memory: cute.Pointer,
        buffers: int,
        thread: Int32,
        maps: TensorMaps | None = None,
    ) -> Outlet:
        """Return the way out of a thread through the buffers of its warp group, which begin at ``memory``."""
        atom, array = pair
        cells = cells_in_memory(sheet, memory, buffers, CELL_BYTES)
        tiles = cute.local_tile(array, (CELL, stored_columns(sheet)), (None, None, None))
        slots, parts = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(cells, 0, 2), cute.group_modes(tiles, 0, 2)
        )
        return cls(sheet, atom, slots, parts, array.layout, memory.toint() + thread_offset(sheet, thread), maps)

    def copy(self, buffer: int, row: Int32, column: Int32, batch: Int32) -> None:
        """Start the copy of a buffer to the cell that begins in ``row`` and is the ``column``-th from the left."""
        matrix, how = (batch, {}) if self.maps is None else (0, {"tma_desc_ptr": self.maps.at(batch)})
        target = tiles_from(self.array, self.whole, (row, 0, matrix))[None, 0, column, 0]
        cute.copy(self.atom, self.slots[None, buffer], target, **how)


@dataclass(frozen=True, slots=True)
class Stage:
    """The buffers of one warp group, used one after the other, whatever leaves.

    ``stores`` is the number of cells that leave per tile; the warp that ``issues`` starts copies.
    """

    buffers: int
    stores: int
    group: Int32
    issues: Boolean

    @cute.jit
    def begin(self, outlets: tuple[Outlet, ...], batch: Int32) -> None:
        """Make the maps of a group usable for the warp that starts copies."""
        if self.issues:
            for outlet in outlets:
                outlet.maps.acquire(batch)

    def store(self, outlet: Outlet, values: cute.Tensor, index: int, row: Int32, column: Int32, batch: Int32) -> None:
        """Store a fragment as the cell that begins in ``row`` and is the ``column``-th from the left, the ``index``-th
        cell of its tile."""
        buffer = index % self.buffers
        self._acquire(self._younger(index))
        write(outlet.sheet, values, made_here(outlet.start) + buffer * CELL_BYTES)
        self._hand_over(outlet, buffer, row, column, batch)

    @cute.jit
    def drain(self) -> None:
        """Wait until nothing is read from shared memory any more."""
        if self.issues:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def barrier(self) -> None:
        """Wait for all threads of the warp group."""
        cute.arch.barrier(barrier_id=_FIRST_BARRIER + self.group, number_of_threads=WARP_GROUP)

    def _younger(self, index: int) -> int:
        """Return how many copies may be under way when a buffer is used again.

        Tiles begin with the first buffer. If the last one ended in the middle, its last copies are in the first few.
        """
        rest = self.stores % self.buffers
        return rest - 1 if index < rest else self.buffers - 1

    @cute.jit
    def _acquire(self, younger: cutlass.Constexpr[int]) -> None:
        """Let all threads of the group wait until a buffer has been read."""
        if self.issues:
            cute.arch.cp_async_bulk_wait_group(younger, read=True)
        self.barrier()

    @cute.jit
    def _hand_over(
        self, outlet: Outlet, buffer: cutlass.Constexpr[int], row: Int32, column: Int32, batch: Int32
    ) -> None:
        """Start the copy of a buffer to global memory once all threads have written it."""
        cute.arch.fence_proxy("async.shared", space="cta")
        self.barrier()
        if self.issues:
            outlet.copy(buffer, row, column, batch)
            cute.arch.cp_async_bulk_commit_group()
