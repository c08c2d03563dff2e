"""Matrix products of warp groups (wgmma, sm_90) with operands in shared memory and float32 accumulators."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

__all__ = ["WARP_GROUP", "WarpGroupMma", "fragment_column", "fragment_row"]

WARP_GROUP = 128
"""Threads of a warp group."""

ROWS = 64
"""Rows of one instruction."""

DEPTH_BYTES = 32
"""Depth of one instruction, in bytes: 16 values of 16 bits, 32 of 8 bits."""


@dataclass(frozen=True, slots=True)
class WarpGroupMma:
    """The product of a (rows, depth) tile and a (columns, depth) tile in shared memory, by one warp group.

    Parameters
    ----------
    overwriting, adding
        The instruction without and with the old accumulators. (One that is switched inside a device loop would be lost
        outside.)
    rows, columns
        Of the accumulator: a multiple of 64, and a multiple of 8 up to 256.
    """

    overwriting: cute.TiledMma
    adding: cute.TiledMma
    rows: int
    columns: int

    @classmethod
    def of(
        cls,
        dtype: type[cutlass.Numeric],
        rows: int,
        columns: int,
        a_depth_contiguous: bool = True,
        b_depth_contiguous: bool = True,
    ) -> WarpGroupMma:
        """Return the product for operands of 16 bits, or of 8 bits, whose depth (K) has to be contiguous."""
        shape = (ROWS, columns, DEPTH_BYTES * 8 // dtype.width)
        majors = (
            OperandMajorMode.K if a_depth_contiguous else OperandMajorMode.MN,
            OperandMajorMode.K if b_depth_contiguous else OperandMajorMode.MN,
        )
        source = warpgroup.OperandSource.SMEM
        if dtype.width == 16:
            operation = warpgroup.MmaF16BF16Op(dtype, Float32, shape, source, *majors)
        else:
            operation = warpgroup.MmaF8Op(dtype, dtype, Float32, shape, source, *majors)
        overwriting, adding = (cute.make_tiled_mma(cute.make_mma_atom(operation)) for _ in range(2))
        overwriting.set(warpgroup.Field.ACCUMULATE, False)
        adding.set(warpgroup.Field.ACCUMULATE, True)
        return cls(overwriting, adding, rows, columns)

    def operands(self, a: cute.Tensor, b: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
        """Return the descriptors of tiles (rows, depth, slots) and (columns, depth, slots)."""
        mma = self.adding
        thread = mma.get_slice(0)
        return mma.make_fragment_A(thread.partition_A(a)), mma.make_fragment_B(thread.partition_B(b))

    def accumulator(self) -> cute.Tensor:
        """Return the registers of the accumulator: ((2, 2, columns / 8), rows / 64, 1)."""
        return cute.make_rmem_tensor(self.adding.partition_shape_C((self.rows, self.columns)), Float32)

    def accumulate(
        self, accumulator: cute.Tensor, a: cute.Tensor, b: cute.Tensor, slot: Int32, fresh: bool = False
    ) -> None:
        """Start the product of the tiles in ``slot`` and add it to the accumulator, or overwrite it if ``fresh``.

        The instructions form one group, which :func:`cutlass.cute.nvgpu.warpgroup.wait_group` waits for.
        """
        warpgroup.fence()
        for step in range(cute.size(a, mode=[2])):
            mma = self.overwriting if fresh and step == 0 else self.adding
            cute.gemm(mma, accumulator, a[None, None, step, slot], b[None, None, step, slot], accumulator)
        warpgroup.commit_group()


def fragment_row(thread: Int32) -> Int32:
    """Return the first of the two rows, of 64, whose accumulators a thread of a warp group holds; the other is +8."""
    return (thread // 32) * 16 + (thread % 32) // 4


def fragment_column(thread: Int32) -> Int32:
    """Return the first column of a thread's accumulators: it holds this one and the next of every eight."""
    return (thread % 4) * 2
