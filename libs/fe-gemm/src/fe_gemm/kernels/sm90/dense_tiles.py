"""The schedule of a batch of products of matrices of equal extents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Boolean, Int32, cute

from fe_gemm.planning.problem import CELL, Problem
from fe_gemm.planning.tiles import Launch
from fe_runtime.cute.schedule import TileGrid

from .parts import Place, Tile

__all__ = ["DenseTiles"]


@dataclass(frozen=True, slots=True)
class DenseTiles:
    """The tiles of products of (rows, K) and (columns, K).

    Parameters
    ----------
    launch
        How the work is spread.
    grid
        The tiles, counted in clusters.
    rows
        Of A.
    steps
        Slots that a tile takes.
    """

    launch: Launch
    grid: TileGrid
    rows: Any
    steps: Any

    @classmethod
    def of(cls, problem: Problem, launch: Launch, extents: tuple[Any, Any, Any, Any]) -> DenseTiles:
        """Return the tiles of products with these M, N, K and number of matrices."""
        m, n, k, batches = extents
        tiles = (cute.ceil_div(m, launch.tile_m * launch.cluster_m), cute.ceil_div(n, launch.tile_n * launch.cluster_n))
        return cls(
            launch, TileGrid(*tiles, batches, launch.band), m, cute.ceil_div(k, problem.depth * launch.cluster_k)
        )

    @property
    def count(self) -> Any:
        """How many tiles there are, counted in clusters."""
        return self.grid.count

    def first(self, place: Place, cluster: Int32, clusters: Int32) -> DenseTurn:
        """Return the first turn of a block."""
        return DenseTurn(self, place, cluster, clusters)


class DenseTurn:
    """Where a warp stands: the number of its tile."""

    def __init__(self, tiles: DenseTiles, place: Place, number: Int32, stride: Int32) -> None:
        self.tiles = tiles
        self.place = place
        self.number = number
        self.stride = stride

    def exists(self) -> Boolean:
        """Whether there is another tile."""
        return self.number < self.tiles.count

    def tile(self) -> Tile:
        """Return the tile.

        Its place is marked as equal in all threads of a warp: a hint, and what keeps the divisions where they are
        called for, before the main loop, instead of behind it, where they would hold up the store.
        """
        row, column, batch = (cute.arch.make_warp_uniform(i) for i in self.tiles.grid.place(self.number))
        how, place = self.tiles.launch, self.place
        return Tile(
            (row * how.cluster_m + place.row) * how.tile_m,
            (column * how.cluster_n + place.column) * (how.tile_n // CELL),
            batch,
            self.tiles.rows,
            self.tiles.steps,
        )

    def next(self) -> DenseTurn:
        """Return the next turn."""
        return DenseTurn(self.tiles, self.place, self.number + self.stride, self.stride)

    # What the kernel language asks of a value that loops carry.
    def __extract_mlir_values__(self) -> list[Any]:
        return [self.number.ir_value()]

    def __new_from_mlir_values__(self, values: list[Any]) -> DenseTurn:
        return DenseTurn(self.tiles, self.place, Int32(values[0]), self.stride)
