"""Sums over the rows of matrices of partial sums, in a fixed order: the last step of a sum over many blocks."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from .reduce import WARP, tree_sum

__all__ = ["launch_sums"]

WARPS = 16
MANY = 8  # loads that a thread has under way


def launch_sums(pairs: list[tuple[cute.Tensor, cute.Tensor]], most: int, overlap: bool, stream: Any, name: str) -> None:
    """Launch ``out = sum over rows of partials`` for pairs ``(partials, out)`` of equal shapes.

    Parameters
    ----------
    pairs
        float32 ``(rows, columns)`` and the result ``(columns,)``, rounded once to its dtype.
    most
        No matrix has more rows.
    overlap
        Start before the kernel that makes the partial sums has finished, and wait for it (sm_90).
    stream, name
        Where to launch, and the name that profilers show.
    """
    partials, outputs = zip(*pairs, strict=True)
    sums_kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
    sums_kernel(most, overlap, list(partials), list(outputs)).launch(
        grid=(cute.ceil_div(outputs[0].shape[0], WARP), len(pairs), 1),
        block=(WARPS * WARP, 1, 1),
        stream=stream,
        use_pdl=overlap,
    )


@cute.kernel
def sums_kernel(
    most: cutlass.Constexpr[int],
    overlap: cutlass.Constexpr[bool],
    partials: list[cute.Tensor],
    outputs: list[cute.Tensor],
) -> None:
    """A warp adds every 16th row of 32 columns; the first warp adds what the others found."""
    if cutlass.const_expr(overlap):
        cute.arch.griddepcontrol_wait()
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    block, which, _ = cute.arch.block_idx()
    column = block * WARP + lane
    layout = cute.make_layout((WARP, WARPS))
    scratch = cutlass.memory.SmemAllocator().allocate_tensor(Float32, layout, byte_alignment=16)
    for number in cutlass.range_constexpr(len(partials)):
        if which == number:
            _sum_columns(partials[number], outputs[number], column, lane, warp, scratch, most)


@cute.jit
def _sum_columns(
    partials: cute.Tensor,
    out: cute.Tensor,
    column: Int32,
    lane: Int32,
    warp: Int32,
    scratch: cute.Tensor,
    most: cutlass.Constexpr[int],
) -> None:
    rows, columns = partials.shape[0], out.shape[0]
    here = cutlass.min(column, columns - 1)  # idle lanes read a neighbour's column rather than branch
    total = Float32(0.0)
    for first in cutlass.range(0, -(-most // WARPS), MANY, unroll=1):
        terms = [_term(partials, (first + i) * WARPS + warp, rows, here) for i in range(MANY)]
        total = total + tree_sum(terms)
    scratch[lane, warp] = total
    cute.arch.sync_threads()
    if warp == 0:
        if column < columns:
            out[column] = tree_sum([scratch[lane, i] for i in range(WARPS)]).to(out.element_type)


def _term(partials: cute.Tensor, row: Int32, rows: Int32, column: Int32) -> Float32:
    """Return an element, or 0 past the last row."""
    value = partials[cutlass.min(row, rows - 1), column]
    return cutlass.select_(row < rows, value, Float32(0.0))
