"""Vectorised loads and stores of global memory."""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import CopyG2ROp, CopyR2GOp

__all__ = ["access_bits", "load_atom", "prefetch", "store_atom"]

MAX_ACCESS_BYTES = 16


def access_bits(dtype: type[cutlass.Numeric], elements: int, alignment: int) -> int:
    """Return the bits of one access to ``elements`` neighbours that start at a multiple of ``alignment`` bytes."""
    return min(elements * dtype.width, 8 * alignment, 8 * MAX_ACCESS_BYTES)


def load_atom(dtype: type[cutlass.Numeric], bits: int) -> cute.CopyAtom:
    """Return the copy of ``bits`` from global memory, which nobody writes meanwhile, into registers.

    Leave the first-level cache its part even for data that is read once: loads that bypass it are 3 to 4 % slower
    on Hopper.
    """
    return cute.make_copy_atom(CopyG2ROp(), dtype, num_bits_per_copy=bits, invariant=True)


def store_atom(dtype: type[cutlass.Numeric], bits: int) -> cute.CopyAtom:
    """Return the copy of ``bits`` from registers into global memory.

    Plain write-back: marking the data as evicted first makes streaming kernels 3 % slower on Hopper.
    """
    return cute.make_copy_atom(CopyR2GOp(), dtype, num_bits_per_copy=bits)


def prefetch(values: cute.Tensor) -> None:
    """Ask for a contiguous array, 16-byte aligned and a multiple of that, to come to the second-level cache (sm_90).

    Called by one thread; costs one instruction, whatever the size.
    """
    size = cute.size(values.shape) * values.element_type.width // 8
    cute.arch.inline_ptx(
        "cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};", read_only_args=[values.iterator.toint(), Int32(size)]
    )
