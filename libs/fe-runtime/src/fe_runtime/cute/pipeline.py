"""A ring of slots in shared memory that TMA fills and warps read, guarded by two barriers per slot (sm_90).

``full[s]`` completes a phase when the bytes of slot s have arrived: one arrival, by the producer that announces the
bytes, plus the bytes themselves. ``empty[s]`` completes a phase when every reader has left the slot.

The n-th use of a slot (n = 0, 1, ...) waits for phase n of ``full``, whose parity is n & 1. Before it, the producer
waits for phase n - 1 of ``empty``, whose parity is (n - 1) & 1; a fresh barrier lets a wait for parity 1 pass, so the
first round does not block. A producer therefore starts with parity 1 and a reader with parity 0, and both flip it each
time they pass the end of the ring.

In a cluster a slot is filled by several producers at once: each loads a part and multicasts it. So a producer may
only write once the readers of *every* block that it writes to have left the slot: readers arrive at the ``empty``
barrier of each block that sends to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Boolean, Int32, Int64, cute

__all__ = ["Position", "Ring"]


@dataclass(frozen=True, slots=True)
class Ring:
    """The barriers of a ring.

    Parameters
    ----------
    full, empty
        First of ``slots`` barriers each, in shared memory.
    slots
        How many there are.
    """

    full: cute.Pointer
    empty: cute.Pointer
    slots: int

    @classmethod
    def allocate(cls, allocator: Any, slots: int) -> Ring:
        """Take the barriers from a shared-memory allocator; :meth:`initialise` makes them usable."""
        barriers = allocator.allocate_array(Int64, 2 * slots)
        return cls(barriers, barriers + slots, slots)

    @cute.jit
    def initialise(self, readers: int, writers: int = 1) -> None:
        """Set the barriers up; called by one warp.

        ``readers`` is the number of arrivals that empty a slot, ``writers`` of those that fill it, the announcement of
        bytes among them. A fence and a barrier over the block (the cluster) must follow before any other use.
        """
        with cute.arch.elect_one():
            for i in range(self.slots):
                cute.arch.mbarrier_init(self.full + i, writers)
                cute.arch.mbarrier_init(self.empty + i, readers)

    @cute.jit
    def acquire(self, at: Position, transfer_bytes: int) -> None:
        """Producer warp: wait until the slot is empty and announce the bytes that will fill it."""
        cute.arch.mbarrier_wait(self.empty + at.slot, at.parity)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + at.slot, transfer_bytes)

    @cute.jit
    def wait(self, at: Position) -> None:
        """Reader: wait until the slot is full."""
        cute.arch.mbarrier_wait(self.full + at.slot, at.parity)

    @cute.jit
    def release(self, at: Position, target: Int32 | None, arrives: Boolean) -> None:
        """Reader warp: tell that it has left the slot.

        Each lane for which ``arrives`` holds does so at the block ``target`` of the cluster; ``None``: at its own.
        """
        if arrives:
            cute.arch.mbarrier_arrive(self.empty + at.slot, target)


class Position:
    """Where a producer or a reader stands in a ring: the slot, and the parity of the phase it waits for next."""

    def __init__(self, slots: int, slot: Int32, parity: Int32) -> None:
        self.slots = slots
        self.slot = slot
        self.parity = parity

    @classmethod
    def of_producer(cls, slots: int) -> Position:
        """Return the start of a producer."""
        return cls(slots, Int32(0), Int32(1))

    @classmethod
    def of_reader(cls, slots: int) -> Position:
        """Return the start of a reader."""
        return cls(slots, Int32(0), Int32(0))

    def next(self) -> Position:
        """Return the position one slot further."""
        last = Int32(self.slot == self.slots - 1)
        return Position(self.slots, (self.slot + 1) * (1 - last), self.parity ^ last)

    def ahead(self, steps: Int32) -> Position:
        """Return the position ``steps`` slots further."""
        reached = self.slot + steps
        return Position(self.slots, reached % self.slots, self.parity ^ ((reached // self.slots) & 1))

    # What the kernel language asks of a value that loops carry.
    def __extract_mlir_values__(self) -> list[Any]:
        return [self.slot.ir_value(), self.parity.ir_value()]

    def __new_from_mlir_values__(self, values: list[Any]) -> Position:
        return Position(self.slots, Int32(values[0]), Int32(values[1]))
