"""Products whose depth is spread over a cluster: the blocks of a cluster compute parts of the sum of one tile.

With few tiles, as with few rows of A, most multiprocessors would have nothing to do. So the blocks of a cluster each
take a part of K, and the first one adds up, in the order of the blocks, which makes the result the same in every run.
The others write their accumulators straight into its shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Boolean, Float32, Int32, Int64, cute

from fe_gemm.planning.tiles import CONSUMERS, Launch
from fe_runtime.cute.wgmma import WARP_GROUP

__all__ = ["SplitSum"]

THREADS = CONSUMERS * WARP_GROUP
WARPS = THREADS // 32


@dataclass(frozen=True, slots=True)
class SplitSum:
    """A computing thread's view.

    ``staging`` is shared memory for the accumulators of every other block: vectors of four, those of neighbouring
    threads side by side. Phases of ``full``, at the first block, end when all others have written; of ``empty``, at
    each of the others, when the first block has read.
    """

    launch: Launch
    staging: cute.Pointer
    full: cute.Pointer
    empty: cute.Pointer

    @classmethod
    def allocate(cls, launch: Launch, allocator: Any) -> SplitSum:
        """Take what is needed from a shared-memory allocator; :meth:`initialise` makes it usable."""
        values = (launch.cluster_k - 1) * launch.tile_m * launch.tile_n
        staging = allocator.allocate_array(Float32, values)
        barriers = allocator.allocate_array(Int64, 2)
        return cls(launch, staging, barriers, barriers + 1)

    @cute.jit
    def initialise(self) -> None:
        """Set the barriers up; called by one warp, before a barrier over the cluster."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(self.full, (self.launch.cluster_k - 1) * WARPS)
            cute.arch.mbarrier_init(self.empty, WARPS)

    @cute.jit
    def add_up(self, accumulator: cute.Tensor, rank: Int32, thread: Int32, tiles: Int32) -> None:
        """Add the accumulators of all blocks to those of the first one.

        ``thread`` counts the computing threads of the block, ``tiles`` the tiles that the block has treated before.
        """
        parity = tiles & 1
        if rank > 0:
            cute.arch.mbarrier_wait(self.empty, parity ^ 1)  # a fresh barrier lets the first tile pass
            self._send(accumulator, rank - 1, thread)
            self._announce(self.full, Int32(0), thread)
        else:
            cute.arch.mbarrier_wait(self.full, parity)
            cute.arch.fence_acq_rel_cluster()
            for other in range(self.launch.cluster_k - 1):
                self._receive(accumulator, other, thread)
            for other in range(1, self.launch.cluster_k):
                self._announce(self.empty, Int32(other), thread)

    def _vector(self, place: Any, i: int, thread: Int32) -> cute.Pointer:
        """Return where vector ``i`` of a thread's accumulators lies, for the block whose place is ``place``."""
        block = self.launch.tile_m * self.launch.tile_n
        return self.staging + place * block + (i * THREADS + thread) * 4

    def _send(self, accumulator: cute.Tensor, place: Int32, thread: Int32) -> None:
        flat = cute.make_tensor(accumulator.iterator, cute.make_layout(cute.size(accumulator)))
        target = cute.arch.map_dsmem_ptr(self._vector(place, 0, thread), 0).toint()
        for i in range(cute.size(flat) // 4):
            cute.arch.inline_ptx(
                "st.shared::cluster.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                read_only_args=[target + i * THREADS * 16, *(flat[4 * i + j] for j in range(4))],
            )

    def _receive(self, accumulator: cute.Tensor, place: int, thread: Int32) -> None:
        flat = cute.make_tensor(accumulator.iterator, cute.make_layout(cute.size(accumulator)))
        for i in range(cute.size(flat) // 4):
            sent = cute.make_tensor(self._vector(place, i, thread), cute.make_layout(4))
            for j in range(4):
                flat[4 * i + j] = flat[4 * i + j] + sent[j]

    @cute.jit
    def _announce(self, barrier: cute.Pointer, target: Int32, thread: Int32) -> None:
        """Arrive at a barrier of another block, once all threads of the warp have come this far.

        The fence makes what they have written visible in the whole cluster; an arrival alone does so in their block.
        """
        cute.arch.fence_acq_rel_cluster()
        cute.arch.sync_warp()
        if Boolean(thread % 32 == 0):
            cute.arch.mbarrier_arrive(barrier, target)
