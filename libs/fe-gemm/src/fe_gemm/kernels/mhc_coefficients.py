"""The coefficients of a chunk of rows as operands of both products, in shared memory, two chunks in turn.

For each step of 16 rows and each group of 8 coefficients there are two vectors of four words for each lane: for dx the
TF32 operands of rows 0 to 7 and 8 to 15, for the weight's gradient the two operands of the first bf16 terms and of the
second ones. Lanes are those of :mod:`.warp_mma`. All warps of a block read the same.

A thread brings pairs of rows of one coefficient, as bf16 operands have them. Rows past the last one and coefficients
past N count as zero, whatever the array holds there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from fe_gemm.planning.mhc import STEP_ROWS, Launch, Problem
from fe_runtime.cute.rounding import div_rn

from .warp_mma import bf16_terms, tf32

__all__ = ["Coefficients"]


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The block's view: where coefficients come from, and the room for two chunks.

    ``words`` (word, lane, group of 8, product, step, buffer), ``scales`` (row, buffer). ``arrays`` are grad_proj,
    grad_r and r from the block's first row on, ``count`` its rows.
    """

    problem: Problem
    launch: Launch
    thread: Int32
    arrays: tuple[cute.Tensor, ...]
    count: Int32
    words: cute.Tensor
    scales: cute.Tensor

    @staticmethod
    def of(
        problem: Problem,
        launch: Launch,
        allocator: cutlass.memory.SmemAllocator,
        thread: Int32,
        arrays: tuple[cute.Tensor, ...],
        first: Int64,
        count: Int32,
    ) -> Coefficients:
        """Make room."""
        shape = (4, 32, problem.tiles, 2, launch.chunk // STEP_ROWS, 2)
        words = allocator.allocate_tensor(Int32, cute.make_layout(shape), byte_alignment=16)
        scales = allocator.allocate_tensor(Float32, cute.make_layout((launch.chunk, 2)), byte_alignment=16)
        grad_proj, grad_r, r = arrays
        arrays = (
            cute.domain_offset((first, 0), grad_proj),
            cute.domain_offset((first,), grad_r),
            cute.domain_offset((first,), r),
        )
        return Coefficients(problem, launch, thread, arrays, count, words, scales)

    @property
    def pairs(self) -> int:
        """Pairs of rows of one coefficient that a thread brings for a chunk, at most."""
        return -(-(self.launch.chunk // 2 * self.problem.tiles * 8) // self.launch.threads)

    def load(self, chunk: Int32) -> tuple[list[tuple[Float32, Float32]], Float32]:
        """Load the thread's part of a chunk: pairs of coefficients, and the scale of a row.

        ``scale = grad_r * (1 / (r * Kc))``, the factor of x in dx.
        """
        grad_proj, grad_r, r = self.arrays
        first = chunk * self.launch.chunk
        found = []
        for number in range(self.pairs):
            _, pair, j = self._pair(number)
            column = cutlass.min(j, self.problem.coefficients - 1)
            values = []
            for row in (first + 2 * pair, first + 2 * pair + 1):
                value = grad_proj[cutlass.min(row, self.count - 1), column]
                is_there = (row < self.count) & (j < self.problem.coefficients)
                values.append(Float32(cutlass.select_(is_there, value, Float32(0.0))))
            found.append((values[0], values[1]))
        row = cutlass.min(first + self.thread, self.count - 1)
        scale = grad_r[row] * div_rn(Float32(1.0), r[row] * Float32(self.problem.columns))
        return found, scale

    @cute.jit
    def store(self, part: Any, buffer: Int32) -> None:
        """Store the thread's part of a chunk; a barrier must follow."""
        found, scale = part
        for number in cutlass.range_constexpr(self.pairs):
            index, pair, j = self._pair(number)
            if index < self.launch.chunk // 2 * self.problem.tiles * 8:
                self._store_pair(found[number], pair, j, buffer)
        scales, thread = self.scales, self.thread
        if thread < self.launch.chunk:
            scales[thread, buffer] = scale

    def operands(self, buffer: Int32, step: int) -> tuple[list[list[Int32]], list[list[Int32]]]:
        """Return a lane's words of a step, for each group of 8: those for dx, and those for the gradient."""
        lane = self.thread % 32
        both = []
        for product in range(2):
            groups = []
            for group in range(self.problem.tiles):
                vector = self.words[None, lane, group, product, step, buffer].load()
                groups.append([vector[i] for i in range(4)])
            both.append(groups)
        return both[0], both[1]

    def scale(self, buffer: Int32, step: int) -> list[Float32]:
        """Return the scales of the four rows of a step that a lane treats."""
        rows = self.thread % 4 * 2 + step * STEP_ROWS
        return [self.scales[rows + (i % 2 + 8 * (i // 2)), buffer] for i in range(4)]

    def _pair(self, number: int) -> tuple[Int32, Int32, Int32]:
        """Return the place in the chunk, the pair of rows and the coefficient of a thread's pair."""
        index = self.thread + number * self.launch.threads
        width = self.problem.tiles * 8
        return index, index // width, index % width

    def _store_pair(self, values: tuple[Float32, Float32], pair: Int32, j: Int32, buffer: Int32) -> None:
        step, rest, group = pair // 8, pair % 8, j // 8
        half, t, g = rest // 4, rest % 4, j % 8
        for side, value in enumerate(values):
            lane = (2 * t + side) * 4 + g % 4
            self.words[2 * half + g // 4, lane, group, 0, step, buffer] = tf32(value)
        for term, word in enumerate(bf16_terms(*values)):
            self.words[2 * term + half, g * 4 + t, group, 1, step, buffer] = word
