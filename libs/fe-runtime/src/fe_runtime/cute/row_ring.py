"""Rows on their way: each thread's share of an operand's next rows, copied to shared memory ahead of their turn.

Every thread reads only what it copied itself, so nobody meets at a barrier: a thread waits for its own copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, cute

from .memory import access_bits
from .ring import copy_ahead
from .rows import RowPartition

__all__ = ["RowRing"]


@dataclass(frozen=True, slots=True)
class RowRing:
    """Room for some rows of an operand.

    ``slots`` (vector, count, threads, stages) is shared memory; ``lane`` is the thread's place in its row. What lies
    past the end of a row is 0.
    """

    slots: cute.Tensor
    partition: RowPartition
    thread: Int32
    lane: Int32
    alignment: int

    @staticmethod
    def of(
        allocator: cutlass.memory.SmemAllocator,
        dtype: type[cutlass.Numeric],
        partition: RowPartition,
        shape: tuple[int, int],
        thread: Int32,
        alignment: int,
    ) -> RowRing:
        """Allocate the room for rows that start at multiples of ``alignment`` bytes; ``shape``: threads, stages."""
        vector, count = partition.vector, partition.count
        threads, stages = shape
        layout = cute.make_layout(
            (vector, count, threads, stages), stride=(1, threads * vector, vector, count * threads * vector)
        )
        slots = allocator.allocate_tensor(dtype, layout, byte_alignment=16)
        ring = RowRing(slots, partition, thread, thread % partition.threads, alignment)
        for j in range(count):
            index = partition.index(ring.lane, 0, j)
            for stage in range(stages):
                _clear_unless(partition.inside(index, j), ring.slot(j, stage))
        return ring

    def fetch(self, row: cute.Tensor, stage: Int32 | int, skipped: int = 0) -> None:
        """Start to copy the thread's share of a row, which begins after ``skipped`` vectors of ``row``."""
        partition, dtype = self.partition, row.element_type
        bits = access_bits(dtype, partition.vector, self.alignment)
        for j in range(partition.count):
            index = partition.index(self.lane, 0, j)
            source = cute.local_tile(row, (partition.vector,), (index + skipped,))
            _copy_if(partition.inside(index, j), source, self.slot(j, stage), bits)

    def slot(self, j: int, stage: Int32 | int) -> cute.Tensor:
        """Return the place of vector ``j`` of the thread's share in a stage."""
        return self.slots[None, j, self.thread, stage]


@cute.jit
def _copy_if(inside: Boolean | bool, source: cute.Tensor, slot: cute.Tensor, bits: cutlass.Constexpr[int]) -> None:
    if cutlass.const_expr(inside is True):
        copy_ahead(source, slot, bits)
    else:
        if inside:
            copy_ahead(source, slot, bits)


@cute.jit
def _clear_unless(inside: Boolean | bool, slot: cute.Tensor) -> None:
    if cutlass.const_expr(inside is not True):
        if not inside:
            slot.fill(0)
