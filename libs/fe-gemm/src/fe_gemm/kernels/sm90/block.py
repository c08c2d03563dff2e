"""What a block does: one warp loads, two warp groups compute and finish tiles, until none is left.

Warps 0 to 3 are the producer group, of which warp 0 works: for each tile of C and each slot's depth of K it waits for a
slot of the ring and starts the TMA loads of A and B. The two computing warp groups run the products of a slot as one
group of wgmma each. Nothing but the ring connects the warps: the producer runs ahead into the next tile while one is
finished, and one computing group may still compute while the other finishes. Only with parts of K of the same tile in
several blocks all of them have to wait for each other at its end: see :mod:`.split_sum`.

A cluster shares loads: see :class:`~fe_runtime.cute.pipeline.Ring`. All its blocks treat neighbouring tiles with equal
numbers of steps, so their rings turn equally often; a tile outside C is computed from zeros and not written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from fe_gemm.planning.problem import CELL, Problem
from fe_gemm.planning.tiles import CONSUMERS, Launch
from fe_runtime.cute.pipeline import Position, Ring
from fe_runtime.cute.wgmma import WARP_GROUP

from .mainloop import main_loop
from .parts import Ending, Finisher, Loader, Place, Schedule, Source, Tile, Turn
from .split_sum import SplitSum

__all__ = ["THREADS", "dimensions", "run_block"]

THREADS = (1 + CONSUMERS) * WARP_GROUP
READING_WARPS = CONSUMERS * WARP_GROUP // 32
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232
"""40 + 2 * 232 registers per thread of each warp group are all that 384 threads can have."""


def dimensions(launch: Launch, count: Any, multiprocessors: Int32 | int) -> dict[str, Any]:
    """Return how a kernel of such blocks is launched: as many clusters as can run at once, or fewer for less work.

    ``count`` is the number of tiles, counted in clusters, or more.
    """
    clusters = cutlass.min(count, multiprocessors // launch.cluster)
    return {
        "grid": (clusters * launch.cluster, 1, 1),
        "block": (THREADS, 1, 1),
        "cluster": (launch.cluster, 1, 1),
        "min_blocks_per_mp": 1,
    }


@cute.jit
def run_block(source: Source, operands: tuple[Any, ...], schedule: Schedule, ending: Ending) -> None:
    """Do the work of one block of a persistent cluster.

    ``operands`` is what the source made of A and B in the launcher.
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
    split = SplitSum.allocate(source.problem, place, shared[0].iterator, allocator) if how.cluster_k > 1 else None
    if warp == 0:
        ring.initialise(READING_WARPS * (how.cluster_m + how.cluster_n - 1))
        ending.initialise(own)
        if cutlass.const_expr(split is not None):
            split.initialise()
    _synchronise(how)
    work = Work.of(source.problem, place, schedule)
    if warp < WARP_GROUP // 32:
        cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        if warp == 0:
            _produce(work, ring, source.loader(place, shared, operands), split)
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
    """What a block has to do: every ``clusters``-th tile, counted in clusters, from the ``cluster``-th on."""

    problem: Problem
    place: Place
    schedule: Schedule
    cluster: Int32
    clusters: Int32

    @classmethod
    def of(cls, problem: Problem, place: Place, schedule: Schedule) -> Work:
        """Return the work of the block that asks."""
        (block, _, _), (blocks, _, _) = cute.arch.block_idx(), cute.arch.grid_dim()
        cluster = place.launch.cluster
        return cls(problem, place, schedule, block // cluster, blocks // cluster)

    @property
    def launch(self) -> Launch:
        """How the work is spread."""
        return self.place.launch

    def first(self) -> Turn:
        """Return the first turn."""
        return self.schedule.first(self.place, self.cluster, self.clusters)

    def part(self, tile: Tile, group: Int32) -> Tile:
        """Return a warp group's part of a tile."""
        how = self.launch
        if how.side_by_side:
            return replace(tile, column=tile.column + group * (how.group_columns // CELL))
        return replace(tile, row=tile.row + group * how.group_rows)


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
def _produce(work: Work, ring: Ring, loader: Loader, split: SplitSum | None) -> None:
    """Load the operands of all tiles; one warp."""
    loader.prefetch()
    at = Position.of_producer(ring.slots)
    turn, done = work.first(), Int32(0)
    while turn.exists():
        tile = turn.tile()
        loader.begin(tile)
        if cutlass.const_expr(split is not None):
            split.wait_until_free(done)
        for step in cutlass.range(tile.steps, unroll=1):
            loader.load(ring, at, tile, step)
            at = at.next()
        turn, done = turn.next(), done + 1


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
    turn, done = work.first(), Int32(0)
    while turn.exists():
        tile = work.part(turn.tile(), group)
        if cutlass.const_expr(split is None):
            finisher.begin(tile)
            at = loop.run(accumulator, at, tile.steps)
            finisher.finish(accumulator, tile)
        else:
            own = split.part(tile)
            if split.finishes:
                finisher.begin(own)
            at = loop.run(accumulator, at, tile.steps)
            total = split.trade(accumulator, thread, done, loop.target, loop.arrives)
            if split.finishes:
                finisher.finish(total, own)
        turn, done = turn.next(), done + 1
    finisher.finish_all()


def _release_target(place: Place, lane: Int32) -> tuple[Int32 | None, Boolean]:
    """Return at which block a lane announces that its warp has left a slot, and whether it does.

    Each lane stands for the block of its number; those that send to this block share its tile of A or of B.
    """
    how = place.launch
    if how.sharing == 1:
        return None, lane == 0
    sends = ((place.same_row | place.same_column) >> lane) & 1
    return lane % how.cluster, sends == 1
