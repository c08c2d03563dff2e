"""Tiles that clusters take when they are ready for one, instead of by a plan: a counter in global memory.

The producer warp of a cluster's first block takes the number of the next tile from the counter and gives it to the
warps of all blocks through a short ring in their shared memory. So whoever has had short tiles takes more of them. What
is computed does not depend on who computes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Boolean, Int32, Int64, cute

from fe_gemm.planning.tiles import CONSUMERS, Launch
from fe_runtime.cute.wgmma import WARP_GROUP

__all__ = ["SLOTS", "Tickets"]

SLOTS = 4
"""Numbers that may be on their way: a producer may be so many tiles ahead, which matters where they are short."""

_READERS = CONSUMERS * WARP_GROUP // 32


@dataclass(frozen=True, slots=True)
class Tickets:
    """What the warps of a block see: the ``counter``, and in shared memory ``numbers`` and their barriers.

    Phases of ``full`` end when a number has come to this block. Phases of ``empty``, of which those of the first block
    count, end when all warps of the cluster have read one.
    """

    launch: Launch
    counter: cute.Pointer
    numbers: cute.Pointer
    full: cute.Pointer
    empty: cute.Pointer

    @classmethod
    def allocate(cls, launch: Launch, counter: cute.Pointer, allocator: Any) -> Tickets:
        """Take shared memory; :meth:`initialise` makes it usable. ``counter``: 0 in the beginning."""
        barriers = allocator.allocate_array(Int64, 2 * SLOTS)
        return cls(launch, counter, allocator.allocate_array(Int32, SLOTS), barriers, barriers + SLOTS)

    @cute.jit
    def initialise(self) -> None:
        """Set the barriers up; called by one warp, before a barrier over the cluster."""
        cluster = self.launch.cluster
        with cute.arch.elect_one():
            for i in range(SLOTS):
                cute.arch.mbarrier_init(self.full + i, 1)
                cute.arch.mbarrier_init(self.empty + i, cluster * _READERS + cluster - 1)

    @cute.jit
    def next(self, sequence: Int32, clusters: Int32, gives: Boolean) -> Int32:
        """Return the next number, the ``sequence``-th; called by whole warps, which have a first one of their own.

        ``gives``: the calling warp takes it from the counter; in each cluster one does.
        """
        slot, parity = sequence % SLOTS, (sequence // SLOTS) & 1
        lane = cute.arch.lane_idx()
        number = Int32(0)
        if gives:
            if lane == 0:
                number = clusters + cute.arch.atomic_add(self.counter, Int32(1))
            number = cute.arch.shuffle_sync(number, 0)
            cute.arch.mbarrier_wait(self.empty + slot, parity ^ 1)  # a fresh barrier lets the first ones pass
            self._give(number, slot, lane)
        else:
            cute.arch.mbarrier_wait(self.full + slot, parity)
            cute.arch.fence_acq_rel_cluster()
            number = cute.make_tensor(self.numbers, cute.make_layout(SLOTS))[slot]
            number = cute.arch.shuffle_sync(number, 0)
            self._announce(self.empty + slot, Int32(0), lane == 0)
        return number

    @cute.jit
    def _give(self, number: Int32, slot: Int32, lane: Int32) -> None:
        """Write a number to all blocks of the cluster: each lane to the block of its number."""
        if lane < self.launch.cluster:
            target = cute.arch.map_dsmem_ptr(self.numbers + slot, lane).toint()
            cute.arch.inline_ptx("st.shared::cluster.b32 [{$r0}], {$r1};", read_only_args=[target, number])
        self._announce(self.full + slot, lane, lane < self.launch.cluster)

    @cute.jit
    def _announce(self, barrier: cute.Pointer, target: Int32, arrives: Boolean) -> None:
        """Arrive at a barrier of a block, once all threads of the warp have come this far."""
        cute.arch.fence_acq_rel_cluster()
        cute.arch.sync_warp()
        if arrives:
            cute.arch.mbarrier_arrive(barrier, target)
