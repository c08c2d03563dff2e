"""Which values of a fragment lie in the matrix: tiles reach beyond it, where products are zero, or NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from .cells import BLOCK

__all__ = ["Region", "row_reduction"]


@dataclass(frozen=True, slots=True)
class Region:
    """The part of a matrix under a fragment.

    Parameters
    ----------
    rows
        Whether the thread's two rows lie in the matrix.
    columns
        How many columns of the matrix there are from the first column of the fragment on, perhaps none.
    own
        The same from the thread's first column on.
    """

    rows: tuple[Boolean, Boolean]
    columns: Int32
    own: Int32


def row_reduction(
    values: cute.Tensor, region: Region, join: Callable[[Float32, Float32], Float32]
) -> tuple[Float32, Float32]:
    """Return, for each of the two rows, the values of a thread in the matrix joined one by one, beginning with 0.

    Rows outside the matrix give 0.
    """
    first, second = _reduction(values, region.columns, region.own, join)
    return _if(region.rows[0], first), _if(region.rows[1], second)


@cute.jit
def _reduction(
    values: cute.Tensor,
    columns: Int32,
    own: Int32,
    join: cutlass.Constexpr[Callable[[Float32, Float32], Float32]],
) -> tuple[Float32, Float32]:
    blocks = cutlass.const_expr(cute.size(values, mode=[2]))
    first, second = Float32(0.0), Float32(0.0)
    if columns >= blocks * BLOCK:
        for block in cutlass.range_constexpr(blocks):
            for side in cutlass.range_constexpr(2):
                first = join(first, values[side, 0, block])
                second = join(second, values[side, 1, block])
    else:
        for block in cutlass.range_constexpr(blocks):
            for side in cutlass.range_constexpr(2):
                inside = block * BLOCK + side < own
                first = join(first, _if(inside, values[side, 0, block]))
                second = join(second, _if(inside, values[side, 1, block]))
    return first, second


@cute.jit
def _if(condition: Boolean, value: Float32) -> Float32:
    """Return the value under a condition, and otherwise 0."""
    kept = Float32(0.0)
    if condition:
        kept = value
    return kept
