"""Products whose depth is spread over a cluster: the blocks of a cluster compute parts of the sum of one tile.

With few tiles, as with few rows of A, most multiprocessors would have nothing to do. So blocks of a cluster each take a
part of K of the same tile. Then they trade sums: each gets those of the others for a part of the columns and finishes
these. It adds them to its own in the order of the parts of K, so that the result is the same in every run. A cluster
may have several such tiles, whose blocks share operands with those of other tiles and the same part of K.

What the others send comes to lie where the tiles of A and B were, of which nothing is under way then. So the loads of
the next tile wait until it has been read. That costs little where this is of use, with few tiles per block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from fe_gemm.planning.problem import CELL, Problem
from fe_gemm.planning.tiles import CONSUMERS, SPLIT_BARRIERS, finishers, finishing
from fe_runtime.cute.wgmma import WARP_GROUP

from .parts import Place, Tile

__all__ = ["SplitSum"]

THREADS = CONSUMERS * WARP_GROUP
WARPS = THREADS // 32


@dataclass(frozen=True, slots=True)
class SplitSum:
    """The view of a thread; ``tiles`` counts the tiles that its block has treated before.

    The blocks with the first parts of K, so many as there are ``finishers``, get a part of the columns: of each warp
    group ``blocks`` blocks of 8 columns in each of ``cells`` cells, one below the other. ``memory`` has a place for
    each of the other blocks of the tile, with vectors of four accumulators, those of neighbouring threads side by side.

    Phases of three barriers end, with each tile, at each block: of ``left`` when all blocks of the tile have left the
    tiles of A and B, of ``full`` when all have sent, of ``free`` when the blocks that this one loads for have read what
    they got. All blocks of a tile wait for ``full``, so none of them can be a phase ahead of another.
    """

    place: Place
    finishers: int
    blocks: int
    cells: int
    memory: cute.Pointer
    left: cute.Pointer
    full: cute.Pointer
    free: cute.Pointer

    @classmethod
    def allocate(cls, problem: Problem, place: Place, operands: cute.Pointer, allocator: Any) -> SplitSum:
        """Take barriers from a shared-memory allocator; :meth:`initialise` makes them usable.

        ``operands`` is where the tiles of A and B lie.
        """
        how = finishing(problem, place.launch)
        barriers = allocator.allocate_array(Int64, SPLIT_BARRIERS)
        return cls(
            place,
            finishers(problem, place.launch),
            how.group_columns // 8,
            how.group_rows // CELL,
            cute.recast_ptr(operands, dtype=Float32),
            *(barriers + i for i in range(SPLIT_BARRIERS)),
        )

    @cute.jit
    def initialise(self) -> None:
        """Set the barriers up; called by one warp, before a barrier over the cluster."""
        how = self.place.launch
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(self.left, how.cluster_k * WARPS)
            cute.arch.mbarrier_init(self.full, how.cluster_k * WARPS)
            cute.arch.mbarrier_init(self.free, (how.cluster_m + how.cluster_n - 1) * WARPS)

    @property
    def finishes(self) -> Boolean:
        """Whether the block gets a part of the columns."""
        return self.place.part < self.finishers

    def part(self, tile: Tile) -> Tile:
        """Return what the block gets of a warp group's tile."""
        return replace(tile, column=tile.column + self.place.part * (self.blocks * 8 // CELL))

    def wait_until_free(self, tiles: Int32) -> None:
        """Producer: wait until a tile's operands may be loaded."""
        cute.arch.mbarrier_wait(self.free, (tiles & 1) ^ 1)  # a fresh barrier lets the first tile pass

    @cute.jit
    def trade(
        self, accumulator: cute.Tensor, thread: Int32, tiles: Int32, target: Int32 | None, arrives: Boolean
    ) -> cute.Tensor:
        """Return the thread's whole sums of the block's part, if it gets one.

        ``thread`` counts the block's computing threads. To what a warp has read applies what does to a slot that it has
        left: each lane for which ``arrives`` holds announces it at the block ``target`` of the cluster.
        """
        self._announce(self.left, thread)
        self._wait(self.left, tiles)
        total = cute.make_rmem_tensor(((2, 2, self.blocks), self.cells, 1), Float32)
        for part in cutlass.range_constexpr(self.place.launch.cluster_k):
            if self.place.part == part:
                self._distribute(accumulator, total, part, thread)
        self._announce(self.full, thread)
        self._wait(self.full, tiles)
        if self.finishes:
            for place in cutlass.range_constexpr(self.place.launch.cluster_k - 1):
                self._receive(total, place, thread)
        # TMA, which writes there next, has to be told of what threads have written.
        cute.arch.fence_proxy("async.shared", space="cluster")
        cute.arch.fence_acq_rel_cluster()
        cute.arch.sync_warp()
        if arrives:
            cute.arch.mbarrier_arrive(self.free, target)
        return total

    def _block(self, part: Any) -> Any:
        """Return the rank of the block of the tile that has a part of K."""
        return self.place.rank % self.place.launch.sharing + part * self.place.launch.sharing

    def _share(self, accumulator: cute.Tensor, part: int) -> list[Float32]:
        """Return the accumulators that belong to a part of the columns, those of a block side by side."""
        return [
            accumulator[((side, half, part * self.blocks + block), down, 0)]
            for down in range(self.cells)
            for block in range(self.blocks)
            for half in range(2)
            for side in range(2)
        ]

    def _vector(self, place: Any, i: int, thread: Any) -> Any:
        """Return where vector ``i`` for a thread lies, in the place of one of the other blocks."""
        return self.memory + ((place * (self.blocks * self.cells) + i) * THREADS + thread) * 4

    def _distribute(self, accumulator: cute.Tensor, total: cute.Tensor, part: int, thread: Int32) -> None:
        """Send accumulators to the other blocks, and keep those for the own one, whose part of K is ``part``.

        Each block begins with the next one, so that none gets everything at the same time.
        """
        parts = self.place.launch.cluster_k
        for receiver in ((part + step) % parts for step in range(1, parts)):
            if receiver < self.finishers:
                self._send(self._share(accumulator, receiver), part, receiver, thread)
        if part < self.finishers:
            for i, value in enumerate(self._share(accumulator, part)):
                total[i] = value

    def _send(self, values: list[Float32], sender: int, receiver: int, thread: Int32) -> None:
        """Write accumulators to another block; both are named by their parts of K."""
        place = sender - (sender > receiver)  # a block has none for itself
        first = self._vector(place, 0, thread)
        target = cute.arch.map_dsmem_ptr(first, self._block(receiver)).toint()
        for i in range(len(values) // 4):
            cute.arch.inline_ptx(
                "st.shared::cluster.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                read_only_args=[target + i * THREADS * 16, *values[4 * i : 4 * i + 4]],
            )

    def _receive(self, total: cute.Tensor, place: int, thread: Int32) -> None:
        """Add what another block has sent."""
        for i in range(self.blocks * self.cells):
            vector = cute.make_tensor(self._vector(place, i, thread), cute.make_layout(4)).load()
            for j in range(4):
                total[4 * i + j] = total[4 * i + j] + vector[j]

    @cute.jit
    def _announce(self, barrier: cute.Pointer, thread: Int32) -> None:
        """Arrive at a barrier of all blocks of the tile, once all threads of the warp have come this far.

        The fence makes what they have written visible in the whole cluster; an arrival alone does so in their block.
        """
        lane = thread % 32
        cute.arch.fence_acq_rel_cluster()
        cute.arch.sync_warp()
        if lane < self.place.launch.cluster_k:
            cute.arch.mbarrier_arrive(barrier, self._block(lane))

    def _wait(self, barrier: cute.Pointer, tiles: Int32) -> None:
        """Wait until all blocks of the tile have arrived, and see what they have written."""
        cute.arch.mbarrier_wait(barrier, tiles & 1)
        cute.arch.fence_acq_rel_cluster()
