"""The schedule of products of groups of rows: which tile of which group, found on the device by each warp for itself.

The ends of the groups are known on the device only. A warp looks at 32 groups at a time, one per lane, and moves on to
the next 32 when the number of its tile lies beyond them; numbers only grow. Groups without rows have no tiles. All
warps of a cluster read the same and find the same.

Offsets that decrease, are negative or exceed the number of rows are taken for the nearest ones that do not, as
:func:`fe_gemm.kernels.sm90.tensor_maps.group_end` takes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from fe_gemm.planning.problem import CELL, Problem
from fe_gemm.planning.tiles import Launch
from fe_runtime.cute.schedule import TileGrid

from .parts import Place, Tile

__all__ = ["GroupedTiles", "GroupedTurn", "Lanes", "Window"]

LANES = 32


@dataclass(frozen=True, slots=True)
class Lanes:
    """What the threads of a warp do together, each with a value of its own."""

    offsets: cute.Tensor

    @property
    def own(self) -> Int32:
        """Number of the lane."""
        return cute.arch.lane_idx()

    def offset(self, group: Int32) -> Int32:
        """Return the entry of a group, 0 for a group that does not exist."""
        return _entry(self.offsets, group)

    def below(self, value: Int32, distance: int, otherwise: Int32 | int) -> Int32:
        """Return the value of the lane ``distance`` below, or something else if there is none."""
        there = cute.arch.shuffle_sync_up(value, distance)
        return Int32(cutlass.select_(self.own >= distance, there, Int32(otherwise)))

    def of(self, value: Int32, lane: Int32 | int) -> Int32:
        """Return the value of a lane."""
        return cute.arch.shuffle_sync(value, lane)

    def count(self, condition: Boolean) -> Int32:
        """Return for how many lanes a condition holds."""
        return cute.arch.popc(cute.arch.vote_ballot_sync(condition))

    def larger(self, a: Int32, b: Int32) -> Int32:
        """Return the larger value."""
        return cutlass.max(a, b)

    def smaller(self, a: Int32, b: Int32) -> Int32:
        """Return the smaller value."""
        return cutlass.min(a, b)


@dataclass(frozen=True, slots=True)
class GroupedTiles:
    """The tiles of products of groups of rows with (columns, K) each; one group's tiles are neighbours.

    Parameters
    ----------
    launch
        How the work is spread.
    lanes
        How a warp looks at the offsets.
    groups, rows
        How many groups there are, and rows of A.
    columns
        Tiles beside each other, counted in clusters.
    steps
        Slots that a tile takes.
    """

    launch: Launch
    lanes: Any
    groups: Any
    rows: Any
    columns: Any
    steps: Any

    @classmethod
    def of(cls, problem: Problem, launch: Launch, offsets: cute.Tensor, extents: tuple[Any, Any, Any]) -> GroupedTiles:
        """Return the tiles of products with these numbers of rows of A, columns, and K."""
        rows, columns, k = extents
        columns = cute.ceil_div(columns, launch.tile_n * launch.cluster_n)
        return cls(launch, Lanes(offsets), offsets.shape[0], rows, columns, cute.ceil_div(k, problem.depth))

    @property
    def height(self) -> int:
        """Rows of a cluster's tile."""
        return self.launch.tile_m * self.launch.cluster_m

    @property
    def most(self) -> Any:
        """As many tiles as there can be, counted in clusters, whatever the offsets are."""
        return (self.rows // self.height + cutlass.min(self.groups, self.rows)) * self.columns

    def grid(self, rows: Any) -> TileGrid:
        """Return the tiles of a group of so many rows."""
        return TileGrid((rows + (self.height - 1)) // self.height, self.columns, 1, self.launch.band)

    def first(self, place: Place, cluster: Int32, clusters: Int32) -> GroupedTurn:
        """Return the first turn of a block."""
        return GroupedTurn(self, place, _found(Window.first(self), cluster), cluster, clusters)


class Window:
    """A look at 32 groups from ``base`` on. Each lane has start and end of its group's rows, and the ``tiles`` of all
    groups up to its own; what lies before the first group is the same in all lanes."""

    def __init__(self, schedule: GroupedTiles, base: Any, start: Any, end: Any, tiles: Any) -> None:
        self.schedule = schedule
        self.base = base
        self.start = start
        self.end = end
        self.tiles = tiles

    @classmethod
    def first(cls, schedule: GroupedTiles) -> Window:
        """Return the look at the first groups."""
        return cls._at(schedule, Int32(0), Int32(0), Int32(0))

    @classmethod
    def _at(cls, schedule: GroupedTiles, base: Any, start: Any, before: Any) -> Window:
        """Look at the groups from ``base`` on: rows from ``start`` on, with so many tiles ``before`` them."""
        lanes = schedule.lanes
        end = lanes.larger(lanes.offset(base + lanes.own), start)
        for distance in (1, 2, 4, 8, 16):
            end = lanes.larger(end, lanes.below(end, distance, end))
        end = lanes.smaller(end, schedule.rows)
        start = lanes.below(end, 1, start)
        tiles = schedule.grid(end - start).count
        for distance in (1, 2, 4, 8, 16):
            tiles = tiles + lanes.below(tiles, distance, 0)
        return cls(schedule, base, start, end, tiles + before)

    def is_behind(self, number: Any) -> Any:
        """Whether the tile of this number has to be looked for further on."""
        return (self.total <= number) & (self.base + LANES < self.schedule.groups)

    def next(self) -> Window:
        """Return the look at the next 32 groups."""
        last = self.schedule.lanes.of(self.end, LANES - 1)
        return Window._at(self.schedule, self.base + LANES, last, self.total)

    @property
    def total(self) -> Any:
        """Number of tiles up to the last of these groups."""
        return self.schedule.lanes.of(self.tiles, LANES - 1)

    def place(self, number: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Return group, start and end of its rows, and row and column, in clusters, of a tile that lies in here."""
        lanes = self.schedule.lanes
        lane = lanes.count(self.tiles <= number)
        start, end, after = (lanes.of(value, lane) for value in (self.start, self.end, self.tiles))
        grid = self.schedule.grid(end - start)
        row, column, _ = grid.place(number - (after - grid.count))
        return self.base + lane, start, end, row, column

    # What the kernel language asks of a value that loops carry.
    def __extract_mlir_values__(self) -> list[Any]:
        return [value.ir_value() for value in (self.base, self.start, self.end, self.tiles)]

    def __new_from_mlir_values__(self, values: list[Any]) -> Window:
        return Window(self.schedule, *map(Int32, values))


class GroupedTurn:
    """Where a warp stands: the number of its tile, and the look at the groups that it belongs to."""

    def __init__(self, tiles: GroupedTiles, place: Place, window: Window, number: Int32, stride: Int32) -> None:
        self.tiles = tiles
        self.place = place
        self.window = window
        self.number = number
        self.stride = stride

    def exists(self) -> Boolean:
        """Whether there is another tile."""
        return self.number < cute.arch.make_warp_uniform(self.window.total)

    def tile(self) -> Tile:
        """Return the tile, marked as equal in all threads of a warp."""
        group, start, end, row, column = (cute.arch.make_warp_uniform(i) for i in self.window.place(self.number))
        how, place = self.tiles.launch, self.place
        return Tile(
            start + (row * how.cluster_m + place.row) * how.tile_m,
            (column * how.cluster_n + place.column) * (how.tile_n // CELL),
            group,
            end,
            self.tiles.steps,
        )

    def next(self) -> GroupedTurn:
        """Return the next turn."""
        number = self.number + self.stride
        return GroupedTurn(self.tiles, self.place, _found(self.window, number), number, self.stride)

    # What the kernel language asks of a value that loops carry.
    def __extract_mlir_values__(self) -> list[Any]:
        return [self.number.ir_value(), *self.window.__extract_mlir_values__()]

    def __new_from_mlir_values__(self, values: list[Any]) -> GroupedTurn:
        window = self.window.__new_from_mlir_values__(values[1:])
        return GroupedTurn(self.tiles, self.place, window, Int32(values[0]), self.stride)


@cute.jit
def _found(window: Window, number: Int32) -> Window:
    """Move on to the groups with the tile of this number, or to the last ones."""
    while window.is_behind(number):
        window = window.next()
    return window


@cute.jit
def _entry(offsets: cute.Tensor, group: Int32) -> Int32:
    entry = Int32(0)
    if group < offsets.shape[0]:
        entry = offsets[group]
    return entry
