"""The schedule of gradients of experts' weights, and the loads of their operands.

Each tile belongs to an expert, whose tokens are its depth. Experts with more tokens come first. All blocks of a cluster
have tiles of the same expert, so they get equal numbers of steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Boolean, Int32, cute

from fe_gemm.planning.grouped_wgrad import Problem, Turns
from fe_gemm.planning.problem import CELL
from fe_gemm.planning.tiles import Launch
from fe_runtime.cute.pipeline import Position, Ring
from fe_runtime.cute.schedule import TileGrid

from . import operands
from .parts import Place, Tile
from .tensor_maps import TensorMaps
from .tickets import Tickets
from .wgrad_groups import Group, Groups

__all__ = ["ExpertTile", "ExpertTiles", "Source", "expert_grid"]


def expert_grid(launch: Launch, m: Any, n: Any, experts: Any) -> TileGrid:
    """Return the tiles of so many W (M, N), counted in clusters."""
    tiles = (cute.ceil_div(m, launch.tile_m * launch.cluster_m), cute.ceil_div(n, launch.tile_n * launch.cluster_n))
    return TileGrid(*tiles, experts, launch.band)


@dataclass(frozen=True, slots=True)
class ExpertTile(Tile):
    """A tile with what it has to know of its expert; ``batch`` is the expert's number."""

    group: Group


@dataclass(slots=True)
class ExpertTiles:
    """The tiles of all experts.

    Parameters
    ----------
    problem, launch
        What is computed, and how the work is spread.
    grid
        The tiles, counted in clusters; a batch is a place in the order of the experts.
    rows
        M.
    groups
        The experts in their order.
    tickets
        Where clusters take their tiles, once there is shared memory for it; ``None``: each has those of a plan.
    """

    problem: Problem
    launch: Launch
    grid: TileGrid
    rows: Any
    groups: Groups
    tickets: Tickets | None = None

    @classmethod
    def of(cls, problem: Problem, launch: Launch, extents: tuple[Any, Any, Any], groups: Groups) -> ExpertTiles:
        """Return the tiles for M, N and E. Where W is added to what is there, experts without tokens have none."""
        m, n, experts = extents
        grid = expert_grid(launch, m, n, groups.occupied if problem.accumulates else experts)
        return cls(problem, launch, grid, m, groups)

    def allocate(self, allocator: Any) -> None:
        """Take shared memory for tickets; :meth:`initialise` makes them usable."""
        self.tickets = Tickets.allocate(self.launch, self.groups.counter, allocator)

    def first(self, place: Place, cluster: Int32, clusters: Int32) -> PlannedTurn | TakenTurn:
        """Return the first turn of a block."""
        if self.tickets is None:
            turns = Turns(cluster, clusters, self.grid.count)
            return PlannedTurn(self, place, turns, turns.count, Int32(0))
        gives = (cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0) & (place.rank == 0)
        return TakenTurn(self, place, clusters, gives, cluster, Int32(0))

    def tile(self, place: Place, number: Int32) -> ExpertTile:
        """Return a tile. Marked as equal in all threads of a warp, as in :mod:`.dense_tiles`."""
        how = self.launch
        row, column, rank = (cute.arch.make_warp_uniform(i) for i in self.grid.place(number))
        group = self.groups.at(rank)
        return ExpertTile(
            (row * how.cluster_m + place.row) * how.tile_m,
            (column * how.cluster_n + place.column) * (how.tile_n // CELL),
            group.expert,
            self.rows,
            group.steps(self.problem.product.depth),
            group,
        )


class PlannedTurn:
    """Where a warp stands: the number of its turn, of ``count``."""

    def __init__(self, tiles: ExpertTiles, place: Place, turns: Turns, count: Int32, turn: Int32) -> None:
        self.tiles = tiles
        self.place = place
        self.turns = turns
        self.count = count
        self.turn = turn

    def exists(self) -> Boolean:
        """Whether there is another tile."""
        return self.turn < self.count

    def tile(self) -> ExpertTile:
        """Return the tile."""
        return self.tiles.tile(self.place, self.turns.number(self.turn))

    def next(self) -> PlannedTurn:
        """Return the next turn."""
        return PlannedTurn(self.tiles, self.place, self.turns, self.count, self.turn + 1)

    # What the kernel language asks of a value that loops carry.
    def __extract_mlir_values__(self) -> list[Any]:
        return [self.turn.ir_value()]

    def __new_from_mlir_values__(self, values: list[Any]) -> PlannedTurn:
        return PlannedTurn(self.tiles, self.place, self.turns, self.count, Int32(values[0]))


class TakenTurn:
    """Where a warp stands: the number of its tile, and how many it has had before; ``gives``: see :class:`Tickets`."""

    def __init__(
        self, tiles: ExpertTiles, place: Place, clusters: Int32, gives: Boolean, number: Int32, before: Int32
    ) -> None:
        self.tiles = tiles
        self.place = place
        self.clusters = clusters
        self.gives = gives
        self.number = number
        self.before = before

    def exists(self) -> Boolean:
        """Whether there is another tile."""
        return self.number < self.tiles.grid.count

    def tile(self) -> ExpertTile:
        """Return the tile."""
        return self.tiles.tile(self.place, self.number)

    def next(self) -> TakenTurn:
        """Return the next turn."""
        number = self.tiles.tickets.next(self.before, self.clusters, self.gives)
        return TakenTurn(self.tiles, self.place, self.clusters, self.gives, number, self.before + 1)

    # What the kernel language asks of a value that loops carry.
    def __extract_mlir_values__(self) -> list[Any]:
        return [self.number.ir_value(), self.before.ir_value()]

    def __new_from_mlir_values__(self, values: list[Any]) -> TakenTurn:
        number, before = (Int32(value) for value in values)
        return TakenTurn(self.tiles, self.place, self.clusters, self.gives, number, before)


@dataclass(frozen=True, slots=True)
class Source(operands.Source):
    """Tiles of A and B by way of the experts' ``maps``, which are known in the kernel."""

    gradient: Problem
    maps: tuple[TensorMaps, TensorMaps] | None = None

    def loader(self, place: Place, shared: tuple[cute.Tensor, cute.Tensor], operands_: tuple[Any, ...]) -> Loader:
        """Return the producer's view, for the block at ``place``."""
        plain = operands.Loader.of(place, shared, operands_)
        known = cute.make_rmem_tensor((1,), Int32)
        known[0] = Int32(-1)
        return Loader(self.gradient, plain, self.maps, known)


@dataclass(frozen=True, slots=True)
class Loader:
    """The producer's view: ``known`` is the expert whose maps are usable, in a register."""

    gradient: Problem
    plain: operands.Loader
    maps: tuple[TensorMaps, TensorMaps]
    known: cute.Tensor

    def prefetch(self) -> None:
        """Nothing is known before the first tile."""

    @cute.jit
    def begin(self, tile: ExpertTile) -> None:
        """Make the maps of a tile's expert usable."""
        if tile.batch != self.known[0]:
            for maps in self.maps:
                maps.acquire(tile.batch)
        self.known[0] = tile.batch

    def load(self, ring: Ring, at: Position, tile: ExpertTile, step: Int32) -> None:
        """Wait for a slot and start filling it; called by one warp."""
        ring.acquire(at, self.plain.place.launch.slot_bytes)
        self._load_side(ring, at, tile, step, "a", tile.row)
        self._load_side(ring, at, tile, step, "b", tile.column * CELL)

    def _load_side(self, ring: Ring, at: Position, tile: ExpertTile, step: Int32, name: str, line: Int32) -> None:
        operand, maps = {"a": (self.plain.a, self.maps[0]), "b": (self.plain.b, self.maps[1])}[name]
        start = tile.group.start(self.gradient.majors[name] == "k", name in self.gradient.ragged_maps)
        operand.load_from(ring, at, (line, start, 0), step, maps.at(tile.batch))
