"""Pieces of operands on their way: each thread copies what it needs next to shared memory, ahead of its turn.

Every thread reads only what it copied itself, so nobody meets at a barrier: a thread waits for its own copies. Bytes
under way cost no registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import LoadCacheMode, cpasync

from .memory import access_bits, load_atom

__all__ = ["ASYNC_BITS", "ThreadRing", "copy_ahead"]

ASYNC_BITS = (32, 64, 128)
"""Sizes of one asynchronous copy."""


@dataclass(frozen=True, slots=True)
class ThreadRing:
    """Room for ``count`` vectors of a thread in each of some stages; vectors start at multiples of ``alignment`` bytes.

    ``slots`` (vector, count, threads, stages) is shared memory, so laid out that the vectors of neighbouring threads
    are neighbours.
    """

    slots: cute.Tensor
    thread: Int32
    alignment: int

    @staticmethod
    def of(
        allocator: cutlass.memory.SmemAllocator,
        dtype: type[cutlass.Numeric],
        shape: tuple[int, int, int, int],
        thread: Int32,
        alignment: int,
    ) -> ThreadRing:
        """Allocate the room; ``shape``: vector, count, threads, stages."""
        vector, count, threads, _ = shape
        layout = cute.make_layout(shape, stride=(1, threads * vector, vector, count * threads * vector))
        return ThreadRing(allocator.allocate_tensor(dtype, layout, byte_alignment=16), thread, alignment)

    def slot(self, number: int, stage: Int32 | int) -> cute.Tensor:
        """Return the place of vector ``number`` in a stage."""
        return self.slots[None, number, self.thread, stage]

    def fetch(self, source: cute.Tensor, number: int, stage: Int32 | int) -> None:
        """Start to copy a vector. It is there once the group of copies that it belongs to was waited for."""
        slot = self.slot(number, stage)
        copy_ahead(source, slot, access_bits(source.element_type, cute.size(slot.shape), self.alignment))


def copy_ahead(source: cute.Tensor, slot: cute.Tensor, bits: int) -> None:
    """Copy to shared memory in accesses of ``bits``: asynchronously, or at once where they are too narrow for that."""
    dtype = source.element_type
    if bits in ASYNC_BITS:
        mode = LoadCacheMode.GLOBAL if bits == max(ASYNC_BITS) else LoadCacheMode.ALWAYS
        atom, piece = cute.make_copy_atom(cpasync.CopyG2SOp(mode), dtype, num_bits_per_copy=bits), bits // dtype.width
        for n in range(cute.size(slot.shape) // piece):  # a call copies one access, whatever the size of its operands
            cute.copy(atom, cute.local_tile(source, (piece,), (n,)), cute.local_tile(slot, (piece,), (n,)))
        return
    values = cute.make_rmem_tensor(slot.shape, dtype)
    cute.copy(load_atom(dtype, bits), source, values)
    slot.store(values.load())
