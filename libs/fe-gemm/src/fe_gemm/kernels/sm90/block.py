"""What a block does: one warp loads, two warp groups compute and finish tiles, until none is left.

Warps 0 to 3 are the producer group, of which warp 0 works: for each tile of C and each slot's depth of K it waits for a
slot of the ring and starts the TMA loads of A and B. The two computing warp groups run the products of a slot as one
group of wgmma each. Nothing but the ring connects the warps: the producer runs ahead into the next tile while one is
finished, and one computing group may still compute while the other finishes.

A cluster shares loads: see :class:`~fe_runtime.cute.pipeline.Ring`. All its blocks treat neighbouring tiles with equal
numbers of steps, so their rings turn equally often; a tile outside C is computed from zeros and not written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import cutlass
from cutlass import Boolean, Int32, cute

from fe_gemm.planning.problem import CELL, Problem
from fe_gemm.planning.tiles import CONSUMERS, Launch
from fe_runtime.cute.pipeline import Position, Ring
from fe_runtime.cute.schedule import TileGrid
from fe_runtime.cute.wgmma import WARP_GROUP

from .mainloop import main_loop
from .operands import Loader, Place, Source
from .split_sum import SplitSum

__all__ = ["THREADS", "Ending", "Finisher", "dimensions", "grid", "run_block"]

THREADS = (1 + CONSUMERS) * WARP_GROUP
READING_WARPS = CONSUMERS * WARP_GROUP // 32
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232
"""40 + 2 * 232 registers per thread of each warp group are all that 384 threads can have."""


class Finisher(Protocol):
    """What becomes of accumulators, as a thread of a computing warp group sees it.

    For each tile, in the order of the calls: ``begin`` before the product, ``finish`` after it, with the ``row`` and
    ``column`` of the warp group's first cell of 64 x 64 values; ``finish_all`` in the end. All threads of a warp group
    call them.
    """

    def begin(self, row: Int32, column: Int32, batch: Int32) -> None:
        """Start what takes time and does not need the product."""

    def finish(self, accumulator: cute.Tensor, row: Int32, column: Int32, batch: Int32) -> None:
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


def grid(launch: Launch, m: Any, n: Any, batches: Any) -> TileGrid:
    """Return the tiles of a product (m, n, batches), counted in clusters."""
    return TileGrid(
        cute.ceil_div(m, launch.tile_m * launch.cluster_m),
        cute.ceil_div(n, launch.tile_n * launch.cluster_n),
        batches,
        launch.band,
    )


def dimensions(launch: Launch, tiles: TileGrid, multiprocessors: Int32 | int) -> dict[str, Any]:
    """Return how a kernel of such blocks is launched: as many clusters as can run at once, or fewer for less work."""
    clusters = cutlass.min(tiles.count, multiprocessors // launch.cluster)
    return {
        "grid": (clusters * launch.cluster, 1, 1),
        "block": (THREADS, 1, 1),
        "cluster": (launch.cluster, 1, 1),
        "min_blocks_per_mp": 1,
    }


@cute.jit
def run_block(source: Source, operands: tuple[Any, ...], tiles: TileGrid, ending: Ending) -> None:
    """Do the work of one block of a persistent cluster.

    ``operands`` is what :meth:`fe_gemm.kernels.sm90.operands.Source.atoms` returned.
    """
    how = source.launch
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if how.cluster > 1 else Int32(0)
    place = Place(how, rank)
    allocator = cutlass.memory.SmemAllocator()
    shared = source.allocate(allocator)
    own = ending.allocate(allocator)
    ring = Ring.allocate(allocator, how.slots)
    split = SplitSum.allocate(how, allocator) if how.cluster_k > 1 else None
    if warp == 0:
        ring.initialise(READING_WARPS * (how.cluster_m + how.cluster_n - 1))
        ending.initialise(own)
        if cutlass.const_expr(split is not None):
            split.initialise()
    _synchronise(how)
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    steps = cute.ceil_div(cute.size(operands[1], mode=[1]), source.problem.depth * how.cluster_k)
    work = Work(source.problem, place, tiles, steps, block, blocks)
    if warp < WARP_GROUP // 32:
        cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        if warp == 0:
            _produce(work, ring, Loader.of(how, place, shared, operands))
    else:
        cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
        group = warp // (WARP_GROUP // 32) - 1
        finisher = ending.finisher(own, group, thread % WARP_GROUP)
        _consume(work, ring, shared, finisher, split, group, thread - WARP_GROUP)
    if cutlass.const_expr(how.cluster > 1):
        # Others still arrive at this block's barriers, so it must not be gone.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


@dataclass(frozen=True, slots=True)
class Work:
    """What a block has to do: the tiles, as clusters, with the numbers first, first + stride, ...

    ``steps`` is the number of slots that a tile takes. With K spread over a cluster, some may lie beyond its end and
    hold zeros.
    """

    problem: Problem
    place: Place
    grid: TileGrid
    steps: Int32
    block: Int32
    blocks: Int32

    @property
    def launch(self) -> Launch:
        """How the work is spread."""
        return self.place.launch

    @property
    def numbers(self) -> tuple[Int32, Int32, Int32]:
        """Start, end and stride of this block's numbers."""
        cluster = self.launch.cluster
        return self.block // cluster, self.grid.count, self.blocks // cluster

    def tile(self, number: Int32) -> tuple[Int32, Int32, Int32]:
        """Return (row, column, batch) of a tile, in tiles of one block.

        Marked as equal in all threads of a warp: a hint, and what keeps the divisions where they are called for, before
        the main loop, instead of behind it, where they would hold up the store.
        """
        row, column, batch = (cute.arch.make_warp_uniform(i) for i in self.grid.place(number))
        how = self.launch
        return row * how.cluster_m + self.place.row, column * how.cluster_n + self.place.column, batch

    def cell(self, row: Int32, column: Int32, group: Int32) -> tuple[Int32, Int32]:
        """Return the row and column, in cells, at which a warp group's part of a tile starts."""
        how = self.launch
        down, right = (0, group) if how.side_by_side else (group, 0)
        return (
            row * (how.tile_m // CELL) + down * (how.group_rows // CELL),
            column * (how.tile_n // CELL) + right * (how.group_columns // CELL),
        )


@cute.jit
def _synchronise(how: Launch) -> None:
    """Make the barriers known to the block, or the cluster."""
    cute.arch.mbarrier_init_fence()
    if cutlass.const_expr(how.cluster > 1):
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()


@cute.jit
def _produce(work: Work, ring: Ring, loader: Loader) -> None:
    """Load the operands of all tiles; one warp."""
    loader.prefetch()
    at = Position.of_producer(ring.slots)
    first, end, stride = work.numbers
    for number in cutlass.range(first, end, stride, unroll=1):
        row, column, batch = work.tile(number)
        for step in cutlass.range(work.steps, unroll=1):
            loader.load(ring, at, row, column, batch, work.place.part * work.steps + step)
            at = at.next()


@cute.jit
def _consume(
    work: Work,
    ring: Ring,
    shared: tuple[cute.Tensor, cute.Tensor],
    finisher: Finisher,
    split: SplitSum | None,
    group: Int32,
    thread: Int32,
) -> None:
    """Compute and finish a warp group's part of all tiles."""
    how = work.launch
    loop = main_loop(work.problem, how, ring, shared, group, *_release_target(work.place, thread % 32))
    accumulator = loop.accumulator()
    at = Position.of_reader(ring.slots)
    first, end, stride = work.numbers
    for number in cutlass.range(first, end, stride, unroll=1):
        row, column, batch = work.tile(number)
        cell_row, cell_column = work.cell(row, column, group)
        if cutlass.const_expr(split is None):
            finisher.begin(cell_row, cell_column, batch)
            at = loop.run(accumulator, at, work.steps)
            finisher.finish(accumulator, cell_row, cell_column, batch)
        else:
            if work.place.rank == 0:
                finisher.begin(cell_row, cell_column, batch)
            at = loop.run(accumulator, at, work.steps)
            split.add_up(accumulator, work.place.rank, thread, (number - first) // stride)
            if work.place.rank == 0:
                finisher.finish(accumulator, cell_row, cell_column, batch)
    finisher.finish_all()


def _release_target(place: Place, lane: Int32) -> tuple[Int32 | None, Boolean]:
    """Return at which block a lane announces that its warp has left a slot, and whether it does.

    Each lane stands for the block of its number; those that send to this block share its tile of A or of B.
    """
    how = place.launch
    sharing = how.cluster_m * how.cluster_n
    if sharing == 1:
        return None, lane == 0
    sends = ((place.same_row | place.same_column) >> lane) & 1
    return lane % sharing, sends == 1
