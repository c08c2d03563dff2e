"""Operand source for values of 16 and 8 bits: tiles of A and B by TMA, read by wgmma as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int16, Int32, cute
from cutlass.cute.nvgpu import cpasync

from fe_gemm.planning.problem import CELL, DEPTH_BYTES
from fe_gemm.planning.tiles import Launch, Problem
from fe_runtime.cute.pipeline import Position, Ring
from fe_runtime.cute.tma import load_atom, swizzled_layout, tiles_from
from fe_runtime.cute.types import operand

from .parts import Place, Tile

__all__ = ["Loader", "Place", "Source"]


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

    def loader(self, place: Place, shared: tuple[cute.Tensor, cute.Tensor], operands: tuple[Any, ...]) -> Loader:
        """Return the producer's view of what :meth:`atoms` returned, for the block at ``place``."""
        return Loader.of(place, shared, operands)

    def _typed(self, array: cute.Tensor) -> cute.Tensor:
        """Return an array, which is bytes for 8-bit values, with the type of its values."""
        return cute.make_tensor(cute.recast_ptr(array.iterator, dtype=operand(self.problem.dtype)), array.layout)

    def allocate(self, allocator: Any) -> tuple[cute.Tensor, cute.Tensor]:
        """Return the tiles of A and B in shared memory, those of B behind those of A."""
        dtype, how = operand(self.problem.dtype), self.launch
        memory = allocator.allocate(how.slots * how.slot_bytes, 1024)
        starts = memory, memory + how.slots * how.tile_m * DEPTH_BYTES
        a, b = (
            cute.make_tensor(cute.recast_ptr(start, layout.inner, dtype), layout.outer)
            for start, layout in zip(starts, self.layouts, strict=True)
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

    ``whole`` is the layout of the array as TMA sees it, by values: (row, depth, batch). ``mask`` has a bit for each
    block of the cluster that gets what this block loads, or is ``None`` without multicast.
    """

    atom: cute.CopyAtom
    slots: cute.Tensor
    array: cute.Tensor
    whole: cute.Layout
    mask: Int16 | None

    @classmethod
    def of(cls, atom: cute.CopyAtom, array: cute.Tensor, tile: cute.Tensor, share: Share) -> Operand:
        """Return the view of a block that loads a share of each tile."""
        tiles = cute.local_tile(array, (cute.size(tile, mode=[0]), cute.size(tile, mode=[1])), (None, None, None))
        slots, parts = cpasync.tma_partition(
            atom,
            share.part,
            cute.make_layout(share.parts),
            cute.group_modes(tile, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )
        return cls(atom, slots, parts, array.layout, None if share.parts == 1 else Int16(share.mask))

    def load(self, ring: Ring, at: Position, row: Int32, batch: Int32, step: Int32) -> None:
        """Start filling a slot with the ``row``-th tile."""
        self._copy(ring, at, self.array[None, row, step, batch])

    def load_from(
        self, ring: Ring, at: Position, first: tuple[Any, Any, Any], step: Int32, tensor_map: Any = None
    ) -> None:
        """Start filling a slot with the tile that begins ``step`` tiles of K after a value (row, depth, batch).

        ``tensor_map``: another map than the launch's own.
        """
        from_ = tiles_from(self.array, self.whole, first)
        self._copy(ring, at, from_[None, 0, step, 0], tensor_map)

    def _copy(self, ring: Ring, at: Position, from_: cute.Tensor, tensor_map: Any = None) -> None:
        more = {} if self.mask is None else {"mcast_mask": self.mask}
        if tensor_map is not None:
            more["tma_desc_ptr"] = tensor_map
        cute.copy(self.atom, from_, self.slots[None, at.slot], tma_bar_ptr=ring.full + at.slot, **more)


@dataclass(frozen=True, slots=True)
class Loader:
    """The producer's view of both operands: loads the tiles of one k step of a tile of C into a slot."""

    place: Place
    a: Operand
    b: Operand

    @classmethod
    def of(cls, place: Place, shared: tuple[cute.Tensor, cute.Tensor], atoms: tuple[Any, ...]) -> Loader:
        """Return the view of a block."""
        a_atom, a, b_atom, b = atoms
        how = place.launch
        a_share = Share(place.column, how.cluster_n, place.same_row)
        b_share = Share(place.row, how.cluster_m, place.same_column)
        return cls(place, Operand.of(a_atom, a, shared[0], a_share), Operand.of(b_atom, b, shared[1], b_share))

    def prefetch(self) -> None:
        """Fetch the descriptors."""
        cpasync.prefetch_descriptor(self.a.atom)
        cpasync.prefetch_descriptor(self.b.atom)

    def begin(self, tile: Tile) -> None:
        """Nothing has to be got ready for a tile."""

    def load(self, ring: Ring, at: Position, tile: Tile, step: Int32) -> None:
        """Wait for a slot and start filling it; called by one warp."""
        step = self.place.part * tile.steps + step
        ring.acquire(at, self.place.launch.slot_bytes)
        self.a.load_from(ring, at, (tile.row, 0, tile.batch), step)
        self.b.load_from(ring, at, (tile.column * CELL, 0, tile.batch), step)
