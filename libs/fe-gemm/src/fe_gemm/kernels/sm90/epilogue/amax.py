"""The largest magnitude of the result, NaN if it has one.

A thread keeps its maximum in a register over all its tiles. At the end each warp joins it with the array by one atomic
maximum of the bits as a signed integer: that orders magnitudes as numbers, with NaN above all, and counts -inf, which
the array holds at first, as negative. No order of the additions matters, so the result is the same in every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32, cute

from .activation import larger_or_nan
from .region import Region, row_reduction

__all__ = ["Amax", "preset"]


@dataclass(frozen=True, slots=True)
class Amax:
    """A thread's view: the array of one float32, and the maximum so far, in a register."""

    array: cute.Tensor
    largest: cute.Tensor

    @classmethod
    def of(cls, array: cute.Tensor) -> Amax:
        """Return the view of a thread that has seen nothing."""
        largest = cute.make_rmem_tensor((1,), Float32)
        largest[0] = Float32(0.0)
        return cls(array, largest)

    def add(self, values: cute.Tensor, region: Region) -> None:
        """Count a fragment."""
        first, second = row_reduction(values, region, _join)
        self.largest[0] = larger_or_nan(self.largest[0], larger_or_nan(first, second))

    @cute.jit
    def finish(self, lane: Int32) -> None:
        """Join the array with what all threads of the warp have seen."""
        largest = cute.arch.warp_reduction(self.largest[0], larger_or_nan)
        if lane == 0:
            cute.arch.inline_ptx(
                "red.relaxed.gpu.global.max.s32 [{$r0}], {$r1};",
                read_only_args=[self.array.iterator.toint(), largest.bitcast(Int32)],
            )


def _join(largest: Float32, value: Float32) -> Float32:
    return larger_or_nan(largest, cute.math.absf(value))


def preset(array: cute.Tensor, stream: Any) -> None:
    """Launch what makes the array -inf, the maximum of nothing."""
    preset_kernel.set_name_prefix("fe_gemm_preset", remove_cutlass_symbol=True, keep_mangled_name=False)
    preset_kernel(array).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@cute.kernel
def preset_kernel(array: cute.Tensor) -> None:
    """Write -inf."""
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        array[0] = Float32(-float("inf"))
