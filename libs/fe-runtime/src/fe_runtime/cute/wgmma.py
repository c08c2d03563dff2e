"""Matrix products of warp groups (wgmma, sm_90) with 16-bit operands in shared memory and float32 accumulators."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

__all__ = ["WARP_GROUP", "WarpGroupMma", "fragment_column", "fragment_row"]

WARP_GROUP = 128
"""Threads of a warp group."""

ROWS = 64
"""Rows of one instruction."""

DEPTH = 16
"""Depth of one instruction with 16-bit operands."""


class WarpGroupMma:
    """The product of a (rows, depth) tile and a (columns, depth) tile in shared memory, by one warp group.

    Parameters
    ----------
    dtype
        float16 or bfloat16.
    rows, columns
        Of the accumulator: a multiple of 64, and a multiple of 8 up to 256.
    a_depth_contiguous, b_depth_contiguous
        Whether the depth (K) is the contiguous dimension of the tile.
    """

    def __init__(
        self,
        dtype: type[cutlass.Numeric],
        rows: int,
        columns: int,
        a_depth_contiguous: bool = True,
        b_depth_contiguous: bool = True,
    ) -> None:
        operation = warpgroup.MmaF16BF16Op(
            dtype,
            Float32,
            (ROWS, columns, DEPTH),
            warpgroup.OperandSource.SMEM,
            OperandMajorMode.K if a_depth_contiguous else OperandMajorMode.MN,
            OperandMajorMode.K if b_depth_contiguous else OperandMajorMode.MN,
        )
        self._mma = cute.make_tiled_mma(cute.make_mma_atom(operation))
        self._shape = (rows, columns)

    def operands(self, a: cute.Tensor, b: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
        """Return the descriptors of tiles (rows, depth, slots) and (columns, depth, slots)."""
        thread = self._mma.get_slice(0)
        return (
            self._mma.make_fragment_A(thread.partition_A(a)),
            self._mma.make_fragment_B(thread.partition_B(b)),
        )

    def accumulator(self) -> cute.Tensor:
        """Return the registers of the accumulator: ((2, 2, columns / 8), rows / 64, 1)."""
        return cute.make_rmem_tensor(self._mma.partition_shape_C(self._shape), Float32)

    def accumulate(
        self, accumulator: cute.Tensor, a: cute.Tensor, b: cute.Tensor, slot: Int32, fresh: bool = False
    ) -> None:
        """Start the product of the tiles in ``slot`` and add it to the accumulator, or overwrite it if ``fresh``.

        The instructions form one group, which :func:`cutlass.cute.nvgpu.warpgroup.wait_group` waits for.
        """
        warpgroup.fence()
        for step in range(cute.size(a, mode=[2])):
            self._mma.set(warpgroup.Field.ACCUMULATE, not (fresh and step == 0))
            cute.gemm(self._mma, accumulator, a[None, None, step, slot], b[None, None, step, slot], accumulator)
        warpgroup.commit_group()


def fragment_row(thread: Int32) -> Int32:
    """Return the first of the two rows, of 64, whose accumulators a thread of a warp group holds; the other is +8."""
    return (thread // 32) * 16 + (thread % 32) // 4


def fragment_column(thread: Int32) -> Int32:
    """Return the first column of a thread's accumulators: it holds this one and the next of every eight."""
    return (thread % 4) * 2
