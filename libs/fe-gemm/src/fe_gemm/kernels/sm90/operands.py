"""Operand source for values of 16 and 8 bits: tiles of A and B by TMA, read by wgmma as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int16, Int32, cute
from cutlass.cute.nvgpu import cpasync

from fe_gemm.planning.tiles import Launch, Problem
from fe_runtime.cute.pipeline import Position, Ring
from fe_runtime.cute.tma import load_atom, swizzled_layout
from fe_runtime.cute.types import operand

__all__ = ["Loader", "Place", "Source"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a block stands in its cluster: ranks run down the rows first, or along K."""

    launch: Launch
    rank: Int32

    @property
    def row(self) -> Int32 | int:
        """Row in the cluster."""
        return self.rank % self.launch.cluster_m if self.launch.cluster_m > 1 else 0

    @property
    def column(self) -> Int32 | int:
        """Column in the cluster."""
        return self.rank // self.launch.cluster_m if self.launch.cluster_n > 1 else 0

    @property
    def part(self) -> Int32 | int:
        """Number of its part of K."""
        return self.rank if self.launch.cluster_k > 1 else 0

    @property
    def same_row(self) -> Int32 | int:
        """Mask of the blocks with the same tile of A."""
        bits = sum(1 << (self.launch.cluster_m * i) for i in range(self.launch.cluster_n))
        return bits << self.row

    @property
    def same_column(self) -> Int32 | int:
        """Mask of the blocks with the same tile of B."""
        bits = (1 << self.launch.cluster_m) - 1
        return bits << (self.launch.cluster_m * self.column)


@dataclass(frozen=True, slots=True)
class Source:
    """What is static about the operands."""

    problem: Problem
    launch: Launch

    @property
    def layouts(self) -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
        """Layouts (rows, depth, slots) of the tiles of A and B in shared memory."""
        problem, how = self.problem, self.launch
        dtype, depth = operand(problem.dtype), problem.depth
        return (
            swizzled_layout(dtype, (how.tile_m, depth), problem.a_major == "k", how.slots),
            swizzled_layout(dtype, (how.tile_n, depth), problem.b_major == "k", how.slots),
        )

    def atoms(self, a: cute.Tensor, b: cute.Tensor) -> tuple[Any, ...]:
        """Return what the kernel needs of A and B: for each a TMA copy and the array as TMA sees it."""
        how, depth = self.launch, self.problem.depth
        a_layout, b_layout = self.layouts
        return (
            *load_atom(self._typed(a), a_layout, (how.tile_m, depth), how.cluster_n),
            *load_atom(self._typed(b), b_layout, (how.tile_n, depth), how.cluster_m),
        )

    def _typed(self, array: cute.Tensor) -> cute.Tensor:
        """Return an array, which is bytes for 8-bit values, with the type of its values."""
        return cute.make_tensor(cute.recast_ptr(array.iterator, dtype=operand(self.problem.dtype)), array.layout)

    def allocate(self, allocator: Any) -> tuple[cute.Tensor, cute.Tensor]:
        """Return the tiles of A and B in shared memory."""
        dtype = operand(self.problem.dtype)
        a, b = (
            allocator.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for layout in self.layouts
        )
        return a, b


@dataclass(frozen=True, slots=True)
class Share:
    """Which of how many parts of a tile a block loads, and the mask of the blocks that get it."""

    part: Int32 | int
    parts: int
    mask: Int32 | int


@dataclass(frozen=True, slots=True)
class Operand:
    """The producer's view of A or B: the copy, the slots (copy, slot) and the array (copy, row, step, batch).

    ``mask`` has a bit for each block of the cluster that gets what this block loads, or is ``None`` without multicast.
    """

    atom: cute.CopyAtom
    slots: cute.Tensor
    array: cute.Tensor
    mask: Int16 | None

    @classmethod
    def of(cls, atom: cute.CopyAtom, array: cute.Tensor, tile: cute.Tensor, share: Share) -> Operand:
        """Return the view of a block that loads a share of each tile."""
        tiles = cute.local_tile(array, (cute.size(tile, mode=[0]), cute.size(tile, mode=[1])), (None, None, None))
        slots, array = cpasync.tma_partition(
            atom,
            share.part,
            cute.make_layout(share.parts),
            cute.group_modes(tile, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )
        return cls(atom, slots, array, None if share.parts == 1 else Int16(share.mask))

    def load(self, ring: Ring, at: Position, row: Int32, batch: Int32, step: Int32) -> None:
        """Start filling a slot."""
        more = {} if self.mask is None else {"mcast_mask": self.mask}
        from_, to = self.array[None, row, step, batch], self.slots[None, at.slot]
        cute.copy(self.atom, from_, to, tma_bar_ptr=ring.full + at.slot, **more)


@dataclass(frozen=True, slots=True)
class Loader:
    """The producer's view of both operands: loads the tiles of one k step of a tile of C into a slot."""

    launch: Launch
    a: Operand
    b: Operand

    @classmethod
    def of(
        cls, launch: Launch, place: Place, shared: tuple[cute.Tensor, cute.Tensor], atoms: tuple[Any, ...]
    ) -> Loader:
        """Return the view of a block."""
        a_atom, a, b_atom, b = atoms
        a_share = Share(place.column, launch.cluster_n, place.same_row)
        b_share = Share(place.row, launch.cluster_m, place.same_column)
        return cls(launch, Operand.of(a_atom, a, shared[0], a_share), Operand.of(b_atom, b, shared[1], b_share))

    def prefetch(self) -> None:
        """Fetch the descriptors."""
        cpasync.prefetch_descriptor(self.a.atom)
        cpasync.prefetch_descriptor(self.b.atom)

    def load(self, ring: Ring, at: Position, row: Int32, column: Int32, batch: Int32, step: Int32) -> None:
        """Wait for a slot and start filling it; called by one warp."""
        ring.acquire(at, self.launch.slot_bytes)
        self.a.load(ring, at, row, batch, step)
        self.b.load(ring, at, column, batch, step)
