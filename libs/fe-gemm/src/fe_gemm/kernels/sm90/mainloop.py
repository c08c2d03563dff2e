"""The main loop of a warp group: the product of the tiles in a ring, added up in registers.

With 16-bit operands the tensor cores add up the whole of K. With 8-bit operands they keep only about 13 bits of a sum,
so partial sums of 128 products, a slot, are made in registers of their own and added to the accumulators there. The
tensor cores work for the other warp group meanwhile. (Two sets of partial sums per warp group, of halves of the
columns, reached 978 TFLOP/s on an H200, where this reached 1412.)
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from fe_gemm.planning.tiles import Launch, Problem
from fe_runtime.cute.pipeline import Position, Ring
from fe_runtime.cute.types import operand
from fe_runtime.cute.wgmma import WarpGroupMma

__all__ = ["Direct", "Promoting", "main_loop"]


def main_loop(
    problem: Problem,
    launch: Launch,
    ring: Ring,
    shared: tuple[cute.Tensor, cute.Tensor],
    group: Int32,
    target: Int32 | None,
    arrives: Boolean,
) -> Direct | Promoting:
    """Return the main loop of a warp group over the ring that fills the tiles ``shared``."""
    mma = WarpGroupMma.of(
        operand(problem.dtype),
        launch.group_rows,
        launch.group_columns,
        problem.a_major == "k",
        problem.b_major == "k",
    )
    row, column = (0, group) if launch.side_by_side else (group, 0)
    a = cute.local_tile(shared[0], (launch.group_rows, problem.depth, launch.slots), (row, 0, 0))
    b = cute.local_tile(shared[1], (launch.group_columns, problem.depth, launch.slots), (column, 0, 0))
    kind = Promoting if problem.promotes else Direct
    return kind(mma, *mma.operands(a, b), ring, target, arrives)


@dataclass(frozen=True, slots=True)
class _Loop:
    """The parts of a main loop.

    ``a`` and ``b`` are descriptors of the slots; a slot is left by arriving at the block ``target`` of the cluster.
    """

    mma: WarpGroupMma
    a: cute.Tensor
    b: cute.Tensor
    ring: Ring
    target: Int32 | None
    arrives: Boolean

    def accumulator(self) -> cute.Tensor:
        """Return the registers of the accumulators: ((2, 2, columns / 8), rows / 64, 1)."""
        return self.mma.accumulator()


class Direct(_Loop):
    """Adds up in the tensor cores."""

    __slots__ = ()

    @cute.jit
    def run(self, accumulator: cute.Tensor, at: Position, steps: Int32) -> Position:
        """Compute a tile; return where the next one starts in the ring.

        A slot is left when the group of instructions after its own has been started and its own is complete.
        """
        self.ring.wait(at)
        self.mma.accumulate(accumulator, self.a, self.b, at.slot, fresh=True)
        last = at
        at = at.next()
        for _ in cutlass.range(steps - 1, unroll=1):
            self.ring.wait(at)
            self.mma.accumulate(accumulator, self.a, self.b, at.slot)
            warpgroup.wait_group(1)
            self.ring.release(last, self.target, self.arrives)
            last = at
            at = at.next()
        warpgroup.wait_group(0)
        self.ring.release(last, self.target, self.arrives)
        return at


class Promoting(_Loop):
    """Adds up partial sums of a slot's depth in registers."""

    __slots__ = ()

    @cute.jit
    def run(self, accumulator: cute.Tensor, at: Position, steps: Int32) -> Position:
        """Compute a tile; return where the next one starts in the ring."""
        partial = self.mma.accumulator()
        accumulator.fill(0.0)
        for _ in cutlass.range(steps, unroll=1):
            self.ring.wait(at)
            self.mma.accumulate(partial, self.a, self.b, at.slot, fresh=True)
            warpgroup.wait_group(0)
            self.ring.release(at, self.target, self.arrives)
            accumulator.store(accumulator.load() + partial.load())
            at = at.next()
        return at
