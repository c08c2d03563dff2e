"""C = A B^T on Hopper: one warp loads, two warp groups compute and store, blocks are persistent.

Warps 0 to 3 are the producer group, of which warp 0 works: for each tile of C and each 64 of K it waits for a slot of
the ring and starts the TMA loads of A and B. The two computing warp groups run the products of a slot as one group of
wgmma each and leave a slot when the group after it has been started and its own is complete. Nothing but the ring
connects the warps: the producer runs ahead into the next tile while C is stored, and one computing group may still
compute while the other stores.

A cluster shares loads: see :class:`~fe_runtime.cute.pipeline.Ring`. All its blocks treat neighbouring tiles with equal
numbers of steps, so their rings turn equally often; a tile outside C is computed from zeros and not written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from fe_gemm.tiles import CELL_ROWS, CONSUMERS, DEPTH, Launch, Problem, split_config
from fe_runtime.cute.arguments import fake_stream
from fe_runtime.cute.pipeline import Position, Ring
from fe_runtime.cute.schedule import TileGrid
from fe_runtime.cute.types import numeric
from fe_runtime.cute.wgmma import WARP_GROUP, WarpGroupMma

from .operands import Loader, Place, Source
from .store import CELL_COLUMNS, Store, Storer

__all__ = ["build"]

THREADS = (1 + CONSUMERS) * WARP_GROUP
READING_WARPS = CONSUMERS * WARP_GROUP // 32
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232
"""40 + 2 * 232 registers per thread of each warp group are all that 384 threads can have."""


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments: a (M, K, L), b (N, K, L), c (M, N, L), multiprocessors, stream.

    ``config`` is what :func:`fe_gemm.tiles.config` returns.
    """
    del arch
    setup = Setup(*split_config(config))

    @cute.jit
    def gemm(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, multiprocessors: Int32, stream: Any) -> None:
        _launch(setup, a, b, c, multiprocessors, stream)

    return gemm, _fake_arguments(setup.problem)


@dataclass(frozen=True, slots=True)
class Setup:
    """All that is static in a compilation."""

    problem: Problem
    launch: Launch

    @property
    def source(self) -> Source:
        """Where tiles of A and B come from."""
        return Source(self.problem, self.launch)

    @property
    def store(self) -> Store:
        """How tiles of C leave."""
        return Store(self.problem, self.launch)

    def tiles(self, c: cute.Tensor) -> TileGrid:
        """Return the tiles of C, counted in clusters."""
        how = self.launch
        m, n, batches = c.shape
        return TileGrid(
            cute.ceil_div(m, how.tile_m * how.cluster_m),
            cute.ceil_div(n, how.tile_n * how.cluster_n),
            batches,
            how.band,
        )


def _fake_arguments(problem: Problem) -> tuple[Any, ...]:
    m, n, k, batches = (cute.sym_int() for _ in range(4))
    dtype = numeric(problem.dtype)
    return (
        _fake_matrices(dtype, m, k, batches, problem.a_major == "k"),
        _fake_matrices(dtype, n, k, batches, problem.b_major == "k"),
        _fake_matrices(numeric(problem.c_dtype), m, n, batches, problem.c_major == "n"),
        Int32(1),
        fake_stream(),
    )


def _fake_matrices(
    dtype: type[cutlass.Numeric], first: Any, second: Any, batches: Any, second_is_contiguous: bool
) -> cute.Tensor:
    """Return matrices in which every line of the contiguous dimension starts at a multiple of 16 bytes."""
    line, matrix = (cute.sym_int64(divisibility=128 // dtype.width) for _ in range(2))
    stride = (line, 1, matrix) if second_is_contiguous else (1, line, matrix)
    return cute.runtime.make_fake_tensor(dtype, (first, second, batches), stride, assumed_align=16)


def _launch(setup: Setup, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, multiprocessors: Int32, stream: Any) -> None:
    """Launch as many clusters as can run at once, or fewer if there is less to do."""
    how = setup.launch
    clusters = cutlass.min(setup.tiles(c).count, multiprocessors // how.cluster)
    gemm_kernel.set_name_prefix("fe_gemm", remove_cutlass_symbol=True, keep_mangled_name=False)
    gemm_kernel(setup, *setup.source.atoms(a, b), *setup.store.atoms(c)).launch(
        grid=(clusters * how.cluster, 1, 1),
        block=(THREADS, 1, 1),
        cluster=(how.cluster, 1, 1),
        stream=stream,
        min_blocks_per_mp=1,
    )


@cute.kernel
def gemm_kernel(
    setup: cutlass.Constexpr[Setup],
    a_atom: cute.CopyAtom,
    a: cute.Tensor,
    b_atom: cute.CopyAtom,
    b: cute.Tensor,
    c_atom: cute.CopyAtom,
    c: cute.Tensor,
) -> None:
    """One block of a persistent cluster."""
    how = setup.launch
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if how.cluster > 1 else Int32(0)
    place = Place(how, rank)
    allocator = cutlass.memory.SmemAllocator()
    shared = setup.source.allocate(allocator)
    buffers = setup.store.allocate(allocator)
    ring = Ring.allocate(allocator, how.slots)
    if warp == 0:
        ring.initialise(READING_WARPS * (how.cluster_m + how.cluster_n - 1))
    _synchronise(how)
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    work = Work(setup, place, setup.tiles(c), cute.ceil_div(cute.size(a, mode=[1]), DEPTH), block, blocks)
    if warp < WARP_GROUP // 32:
        cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        if warp == 0:
            loader = Loader.of(how, place, shared, (a_atom, a, b_atom, b))
            _produce(work, ring, loader)
    else:
        cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
        group = warp // (WARP_GROUP // 32) - 1
        storer = Storer.of(setup.store, buffers, (c_atom, c), group, thread % WARP_GROUP)
        _consume(work, ring, shared, storer, group, thread % 32)
    if cutlass.const_expr(how.cluster > 1):
        # Others still arrive at this block's barriers, so it must not be gone.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


@dataclass(frozen=True, slots=True)
class Work:
    """What a block has to do: the tiles, as clusters, with the numbers first, first + stride, ..."""

    setup: Setup
    place: Place
    grid: TileGrid
    steps: Int32
    block: Int32
    blocks: Int32

    @property
    def numbers(self) -> tuple[Int32, Int32, Int32]:
        """Start, end and stride of this block's numbers."""
        cluster = self.setup.launch.cluster
        return self.block // cluster, self.grid.count, self.blocks // cluster

    def tile(self, number: Int32) -> tuple[Int32, Int32, Int32]:
        """Return (row, column, batch) of a tile, in tiles of one block.

        Marked as equal in all threads of a warp: a hint, and what keeps the divisions where they are called for, before
        the main loop, instead of behind it, where they would hold up the store.
        """
        how = self.setup.launch
        row, column, batch = (cute.arch.make_warp_uniform(i) for i in self.grid.place(number))
        return row * how.cluster_m + self.place.row, column * how.cluster_n + self.place.column, batch


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
            loader.load(ring, at, row, column, batch, step)
            at = at.next()


@cute.jit
def _consume(
    work: Work,
    ring: Ring,
    shared: tuple[cute.Tensor, cute.Tensor],
    storer: Storer,
    group: Int32,
    lane: Int32,
) -> None:
    """Compute and store a warp group's part of all tiles."""
    problem, how = work.setup.problem, work.setup.launch
    mma = WarpGroupMma.of(
        numeric(problem.dtype), how.group_rows, how.tile_n, problem.a_major == "k", problem.b_major == "k"
    )
    own_rows = cute.local_tile(shared[0], (how.group_rows, DEPTH, how.slots), (group, 0, 0))
    a, b = mma.operands(own_rows, shared[1])
    accumulator = mma.accumulator()
    target, arrives = _release_target(work.place, lane)
    at = Position.of_reader(ring.slots)
    first, end, stride = work.numbers
    for number in cutlass.range(first, end, stride, unroll=1):
        row, column, batch = work.tile(number)
        cell_row = row * (how.tile_m // CELL_ROWS) + group * (how.group_rows // CELL_ROWS)
        ring.wait(at)
        mma.accumulate(accumulator, a, b, at.slot, fresh=True)
        last = at
        at = at.next()
        for _ in cutlass.range(work.steps - 1, unroll=1):
            ring.wait(at)
            mma.accumulate(accumulator, a, b, at.slot)
            warpgroup.wait_group(1)
            ring.release(last, target, arrives)
            last = at
            at = at.next()
        warpgroup.wait_group(0)
        ring.release(last, target, arrives)
        storer.store(accumulator, cell_row, column * (how.tile_n // CELL_COLUMNS), batch)
    storer.finish()


def _release_target(place: Place, lane: Int32) -> tuple[Int32 | None, Boolean]:
    """Return at which block a lane announces that its warp has left a slot, and whether it does.

    Each lane stands for the block of its number; those that send to this block share its tile of A or of B.
    """
    how = place.launch
    if how.cluster == 1:
        return None, lane == 0
    sends = ((place.same_row | place.same_column) >> lane) & 1
    return lane % how.cluster, sends == 1
