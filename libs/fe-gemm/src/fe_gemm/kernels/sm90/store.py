"""How a tile of C leaves the registers: rounded, through shared memory, by TMA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Boolean, Int32, cute
from cutlass.cute.nvgpu import cpasync

from fe_gemm.tiles import CELL_BYTES, CELL_ROWS, CONSUMERS, Launch, Problem, cells
from fe_runtime.cute.tma import store_atom, swizzled_layout, swizzled_offset
from fe_runtime.cute.types import numeric
from fe_runtime.cute.wgmma import WARP_GROUP

__all__ = ["Store", "Storer"]

CELL_COLUMNS = 64
_FIRST_BARRIER = 1  # number 0 is the barrier of the whole block


@dataclass(frozen=True, slots=True)
class Store:
    """What is static about the output: 16-bit values in cells of 64 x 64."""

    problem: Problem
    launch: Launch

    @property
    def layout(self) -> cute.ComposedLayout:
        """Layout (rows, columns, buffers) of the buffers of one warp group."""
        shape = (CELL_ROWS, CELL_COLUMNS)
        buffers = self.launch.store_buffers
        return swizzled_layout(numeric(self.problem.c_dtype), shape, self.problem.c_major == "n", buffers)

    def atoms(self, c: cute.Tensor) -> tuple[Any, ...]:
        """Return what the kernel needs of C: a TMA copy and the array as TMA sees it."""
        layout = cute.select(self.layout, mode=[0, 1])
        return store_atom(c, layout, (CELL_ROWS, CELL_COLUMNS))

    def allocate(self, allocator: Any) -> cute.Tensor:
        """Return the buffers (rows, columns, (buffers, warp groups)) in shared memory."""
        layout = self.layout
        groups = cute.make_layout(CONSUMERS, stride=cute.cosize(layout.outer))
        both = cute.append(layout.outer, groups)
        return allocator.allocate_tensor(numeric(self.problem.c_dtype), both, byte_alignment=1024, swizzle=layout.inner)


@dataclass(frozen=True, slots=True)
class Storer:
    """One warp group's view: stores accumulators as a part of C.

    ``slots`` and ``array`` are the buffers (copy, buffer) and C (copy, row, column, batch) of the TMA copy ``atom``, in
    cells; ``address`` is where a thread's matrix row lies in the first buffer; the warp that ``issues`` starts copies.
    """

    how: Store
    group: Int32
    atom: cute.CopyAtom
    slots: cute.Tensor
    array: cute.Tensor
    address: Int32
    issues: Boolean

    @classmethod
    def of(cls, how: Store, shared: cute.Tensor, atoms: tuple[Any, ...], group: Int32, thread: Int32) -> Storer:
        """Return the view of a thread of a warp group."""
        atom, c = atoms
        buffers = shared[None, None, None, group]
        tiles = cute.local_tile(c, (CELL_ROWS, CELL_COLUMNS), (None, None, None))
        slots, array = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(buffers, 0, 2), cute.group_modes(tiles, 0, 2)
        )
        address = buffers.iterator.toint() + _lane_offset(thread, how.problem.c_major == "m")
        return cls(how, group, atom, slots, array, address, cute.arch.make_warp_uniform(thread // 32) == 0)

    @cute.jit
    def store(self, accumulator: cute.Tensor, row: Int32, column: Int32, batch: Int32) -> None:
        """Store the accumulators of a warp group whose first cell is (``row``, ``column``)."""
        buffers = self.how.launch.store_buffers
        per_row = self.how.launch.tile_n // CELL_COLUMNS
        for i in range(cells(self.how.problem, self.how.launch)):
            down, right = i // per_row, i % per_row
            self._wait_for_buffer()
            self._write(_words(self.how, accumulator, down, right), i % buffers)
            self._hand_over(i % buffers, row + down, column + right, batch)

    @cute.jit
    def finish(self) -> None:
        """Wait until nothing is read from shared memory any more."""
        if self.issues:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def _wait_for_buffer(self) -> None:
        """Let all threads of the group wait until the oldest buffer has been read."""
        if self.issues:
            cute.arch.cp_async_bulk_wait_group(self.how.launch.store_buffers - 1, read=True)
        self._barrier()

    def _write(self, words: cute.Tensor, buffer: int) -> None:
        """Write a thread's 16 pairs of values into a buffer, four 8 x 8 matrices at a time."""
        base = self.address + buffer * CELL_BYTES
        transposes = self.how.problem.c_major == "m"
        trans = ".trans" if transposes else ""
        for pair in range(CELL_COLUMNS // 16):
            # Two column blocks further is 32 bytes along a row, which the swizzle turns into an exclusive or, or, when
            # columns lie one below the other, 16 rows further.
            address = base + pair * 16 * 128 if transposes else base ^ (pair << 5)
            cute.arch.inline_ptx(
                f"stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [{{$r0}}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
                read_only_args=[address, *(words[4 * pair + i] for i in range(4))],
            )

    @cute.jit
    def _hand_over(self, buffer: int, row: Int32, column: Int32, batch: Int32) -> None:
        """Start the copy of a buffer to global memory once all threads have written it."""
        cute.arch.fence_proxy("async.shared", space="cta")
        self._barrier()
        if self.issues:
            cute.copy(self.atom, self.slots[None, buffer], self.array[None, row, column, batch])
            cute.arch.cp_async_bulk_commit_group()

    def _barrier(self) -> None:
        cute.arch.barrier(barrier_id=_FIRST_BARRIER + self.group, number_of_threads=WARP_GROUP)


def _lane_offset(thread: Int32, transposes: bool) -> Int32:
    """Return the byte offset of the matrix row that a lane addresses, in the first column blocks of a cell.

    Matrix q of four (lanes 8q to 8q + 7) is rows 8 (q & 1) and columns 8 (q >> 1) of a warp's 16 x 16 values.
    """
    warp, lane = thread // 32, thread % 32
    if transposes:
        return swizzled_offset((lane // 16) * 8 + lane % 8, warp * 2 + (lane // 8) % 2)
    return swizzled_offset(warp * 16 + lane % 16, lane // 16)


def _words(store: Store, accumulator: cute.Tensor, down: int, right: int) -> cute.Tensor:
    """Return the rounded values of one cell: pairs of columns, for each column block of 8 the two rows."""
    cell = cute.make_rmem_tensor((2, 2, CELL_COLUMNS // 8), numeric(store.problem.c_dtype))
    blocks = CELL_COLUMNS // 8
    values = cute.make_rmem_tensor((2, 2, blocks), accumulator.element_type)
    for block in range(blocks):
        for half in range(2):
            for side in range(2):
                values[side, half, block] = accumulator[((side, half, right * blocks + block), down, 0)]
    cell.store(values.load().to(cell.element_type))
    return cute.recast_tensor(cute.make_tensor(cell.iterator, cute.make_layout(cute.size(cell))), Int32)
