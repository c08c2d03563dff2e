"""What the parts of a matrix product promise each other: schedules, sources of operands, and what finishes tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from cutlass import Boolean, Int32, cute

from fe_gemm.planning.problem import Problem
from fe_gemm.planning.tiles import Launch
from fe_runtime.cute.pipeline import Position, Ring

__all__ = ["Ending", "Finisher", "Loader", "Place", "Schedule", "Source", "Tile", "Turn"]


@dataclass(frozen=True, slots=True)
class Tile:
    """What a block, or a warp group of it, computes at once.

    Parameters
    ----------
    row
        Its first row, of A and of the result.
    column
        Its first cell of 64 columns.
    batch
        Number of the matrix, or of the group of rows, that it belongs to.
    end
        Where the rows end that belong to the result; what the tile has beyond them is not written.
    steps
        How many slots it takes. With K spread over a cluster, some may lie beyond its end and hold zeros.
    """

    row: Any
    column: Any
    batch: Any
    end: Any
    steps: Any


@dataclass(frozen=True, slots=True)
class Place:
    """Where a block stands in its cluster: ranks run down the rows first, then along the columns, then along K."""

    launch: Launch
    rank: Int32

    @property
    def row(self) -> Int32 | int:
        """Row in the cluster."""
        return self.rank % self.launch.cluster_m if self.launch.cluster_m > 1 else 0

    @property
    def column(self) -> Int32 | int:
        """Column in the cluster."""
        return self.rank // self.launch.cluster_m % self.launch.cluster_n if self.launch.cluster_n > 1 else 0

    @property
    def part(self) -> Int32 | int:
        """Number of its part of K."""
        return self.rank // self.launch.sharing if self.launch.cluster_k > 1 else 0

    @property
    def first(self) -> Int32 | int:
        """Rank of the first block with the same part of K."""
        return self.part * self.launch.sharing

    @property
    def same_row(self) -> Int32 | int:
        """Mask of the blocks with the same tile of A."""
        bits = sum(1 << (self.launch.cluster_m * i) for i in range(self.launch.cluster_n))
        return bits << (self.first + self.row)

    @property
    def same_column(self) -> Int32 | int:
        """Mask of the blocks with the same tile of B."""
        bits = (1 << self.launch.cluster_m) - 1
        return bits << (self.first + self.launch.cluster_m * self.column)


class Turn(Protocol):
    """Where a warp stands in a schedule; a value that loops carry, equal in all threads of a warp."""

    def exists(self) -> Boolean:
        """Whether there is another tile."""

    def tile(self) -> Tile:
        """Return the tile; called by whole warps, like :meth:`next`."""

    def next(self) -> Turn:
        """Return the next turn of the same block."""


class Schedule(Protocol):
    """The tiles of a product, counted in clusters of blocks, in their order."""

    def first(self, place: Place, cluster: Int32, clusters: Int32) -> Turn:
        """Return the first turn of the block at ``place`` in the ``cluster``-th of ``clusters``, whose tiles are the
        ``cluster``-th and from there on every ``clusters``-th; all blocks of a cluster get equal numbers of steps."""


class Loader(Protocol):
    """The producer's view of the operands."""

    def prefetch(self) -> None:
        """Fetch what is needed for all tiles."""

    def begin(self, tile: Tile) -> None:
        """Get ready for a tile."""

    def load(self, ring: Ring, at: Position, tile: Tile, step: Int32) -> None:
        """Wait for a slot and start filling it; called by one warp."""


class Source(Protocol):
    """Where tiles of A and B come from."""

    problem: Problem
    launch: Launch

    def allocate(self, allocator: Any) -> tuple[cute.Tensor, cute.Tensor]:
        """Return the tiles of A and B in shared memory."""

    def loader(self, place: Place, shared: tuple[cute.Tensor, cute.Tensor], operands: tuple[Any, ...]) -> Loader:
        """Return the producer's view, for the block at ``place``."""


class Finisher(Protocol):
    """What becomes of accumulators, as a thread of a computing warp group sees it.

    For each tile, in the order of the calls: ``begin`` before the product, ``finish`` after it, with the warp group's
    part of the tile; ``finish_all`` in the end. All threads of a warp group call them.
    """

    def begin(self, tile: Tile) -> None:
        """Start what takes time and does not need the product."""

    def finish(self, accumulator: cute.Tensor, tile: Tile) -> None:
        """Take the accumulators of a tile."""

    def finish_all(self) -> None:
        """Finish what is left."""


class Ending(Protocol):
    """What becomes of accumulators, as a block sees it: its shared memory, and the views of the threads."""

    def allocate(self, allocator: Any) -> Any:
        """Take shared memory."""

    def initialise(self, shared: Any) -> None:
        """Make it usable; called by one warp, before a barrier over the block."""

    def finisher(self, shared: Any, group: Int32, thread: Int32) -> Finisher:
        """Return the view of a thread, by its number in its warp group."""
