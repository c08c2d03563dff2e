"""Sums over the threads that share a row. Every order is fixed, so results are the same from run to run."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute

__all__ = ["WARP", "block_sums", "sum_of_squares", "tree_sum", "warp_sum"]

WARP = 32
_CHAINS = 4
_TREE = 16  # partial sums that every thread adds itself; more are added by a warp


def sum_of_squares(share: cute.Tensor) -> Float32:
    """Return the sum of the squares of a thread's registers in float32, in four interleaved chains."""
    values = share.load().to(Float32)
    count = cute.size(share.shape)
    chains = [Float32(0.0)] * min(_CHAINS, count)
    for i in range(count):
        chains[i % _CHAINS] = chains[i % _CHAINS] + values[i] * values[i]
    return tree_sum(chains)


def tree_sum(terms: list[Float32]) -> Float32:
    """Return the sum of a few values, added pairwise."""
    while len(terms) > 1:
        terms = [sum(terms[i + 1 : i + 2], terms[i]) for i in range(0, len(terms), 2)]
    return terms[0]


def warp_sum(value: Float32, threads: int = WARP) -> Float32:
    """Return, in each of ``threads`` (a power of two up to 32) neighbouring lanes, the sum over them: a butterfly."""
    return cute.arch.warp_reduction(value, lambda a, b: a + b, threads_in_group=threads)


@cute.jit
def block_sums(values: list[Float32], scratch: cute.Tensor) -> list[Float32]:
    """Return in every thread the sums over the block of a few values each, with one barrier.

    ``scratch`` is shared memory ``(warps, len(values))``, written once in the life of the block.
    """
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    sums = [warp_sum(value) for value in values]
    if lane == 0:
        for i in cutlass.range_constexpr(len(sums)):
            scratch[warp, i] = sums[i]
    cute.arch.sync_threads()
    return [_sum_of_partials(scratch[None, i], lane) for i in range(len(sums))]


@cute.jit
def _sum_of_partials(partials: cute.Tensor, lane: Int32) -> Float32:
    count = cutlass.const_expr(cute.size(partials.shape))
    if cutlass.const_expr(count <= _TREE):
        values = partials.load()
        total = tree_sum([values[i] for i in range(count)])
    else:
        total = Float32(0.0)
        for first in cutlass.range_constexpr(0, count, WARP):
            if lane + first < count:
                total = total + partials[lane + first]
        total = warp_sum(total)
    return total
