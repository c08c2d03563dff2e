"""Partial sums of the parameter gradients, and their sum. Every order is fixed: results are the same from run to run.

A row of ``partials`` belongs to a tile of tokens; it holds the sums for the oldest tap of all channels, then for the
next tap, and so on, and at last those for the bias.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute

from .setup import Setup

__all__ = ["launch_sum", "store_sums", "sum_kernel"]

COLUMNS, ROWS = 32, 8
"""Threads of a summing block: neighbours read neighbouring columns, each every ``ROWS``-th row."""

_AT_ONCE = 8  # rows that a thread loads together


def store_sums(
    setup: Setup,
    sums: cute.Tensor,
    partials: cute.Tensor,
    channels: Int32,
    allocator: cutlass.memory.SmemAllocator,
) -> None:
    """Store the sums ``(vector, taps and bias)`` of all threads of a block, added over the walks of its tile."""
    launch, count, width = setup.launch, setup.problem.sums, setup.launch.width
    block, _, _ = cute.arch.block_idx()
    pieces = cute.ceil_div(channels, width)
    first, tile = (block % pieces) * width, block // pieces
    if launch.groups == 1:
        _store_own(setup, sums, partials, channels, first, tile)
        return
    layout = cute.make_layout((launch.groups, count, width), stride=(count * width, width, 1))
    shared = allocator.allocate_tensor(setup.wide, layout, byte_alignment=16)
    _store_added(setup, sums, partials, channels, first, tile, shared)


@cute.jit
def _store_own(
    setup: Setup, sums: cute.Tensor, partials: cute.Tensor, channels: Int32, first: Int32, tile: Int32
) -> None:
    """Store the sums of a thread, where its walk is all of the tile."""
    vector = setup.launch.vector
    thread, _, _ = cute.arch.thread_idx()
    channel = first + thread * vector
    if channel < channels:
        for j in cutlass.range_constexpr(setup.problem.sums):
            for v in cutlass.range_constexpr(vector):
                partials[tile, j * channels + channel + v] = sums[v, j]


@cute.jit
def _store_added(
    setup: Setup,
    sums: cute.Tensor,
    partials: cute.Tensor,
    channels: Int32,
    first: Int32,
    tile: Int32,
    shared: cute.Tensor,
) -> None:
    """Store the sums of a tile's walks, added in order."""
    launch, count, width = setup.launch, setup.problem.sums, setup.launch.width
    thread, _, _ = cute.arch.thread_idx()
    lane, group = thread % launch.lanes, thread // launch.lanes
    for j in cutlass.range_constexpr(count):
        for v in cutlass.range_constexpr(launch.vector):
            shared[group, j, lane * launch.vector + v] = sums[v, j]
    cute.arch.sync_threads()
    for place in range(thread, count * width, launch.threads):
        j, column = place // width, place % width
        if first + column < channels:
            total = shared[0, j, column]
            for other in cutlass.range_constexpr(1, launch.groups):
                total = total + shared[other, j, column]
            partials[tile, j * channels + first + column] = total


@cute.kernel
def sum_kernel(
    setup: cutlass.Constexpr[Setup], partials: cute.Tensor, dweight: cute.Tensor, dbias: cute.Tensor | None
) -> None:
    """Add the rows of ``partials`` and store the gradients of the filter and of the bias."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    lane, group = thread % COLUMNS, thread // COLUMNS
    shared = cutlass.memory.SmemAllocator().allocate_tensor(
        setup.wide, cute.make_layout((ROWS, COLUMNS), stride=(COLUMNS, 1)), byte_alignment=16
    )
    column, channels = block * COLUMNS + lane, Int32(dweight.shape[0])
    is_there = column < channels * setup.problem.sums
    if is_there:
        shared[group, lane] = _sum_of_rows(setup, partials, group, column)
    cute.arch.sync_threads()
    if is_there & (group == 0):
        total = shared[0, lane]
        for other in cutlass.range_constexpr(1, ROWS):
            total = total + shared[other, lane]
        _store_gradient(setup, total, column // channels, column % channels, dweight, dbias)


@cute.jit
def _sum_of_rows(setup: Setup, partials: cute.Tensor, first: Int32, column: Int32) -> Any:
    rows = Int32(partials.shape[0])
    total = setup.wide(0.0)
    whole = cutlass.max(rows - first, Int32(0)) // (ROWS * _AT_ONCE)
    for chunk in cutlass.range(whole, unroll=1):
        values = [partials[first + (chunk * _AT_ONCE + n) * ROWS, column] for n in range(_AT_ONCE)]
        for n in cutlass.range_constexpr(_AT_ONCE):
            total = total + values[n]
    for row in cutlass.range(first + whole * ROWS * _AT_ONCE, rows, ROWS, unroll=1):
        total = total + partials[row, column]
    return total


@cute.jit
def _store_gradient(
    setup: Setup, total: Any, number: Int32, channel: Int32, dweight: cute.Tensor, dbias: cute.Tensor | None
) -> None:
    if cutlass.const_expr(dbias is None):
        dweight[channel, number] = dweight.element_type(total)
    else:
        if number < setup.problem.width:
            dweight[channel, number] = dweight.element_type(total)
        else:
            dbias[channel] = dbias.element_type(total)


def launch_sum(setup: Setup, operands: dict[str, Any]) -> None:
    """Launch the sum over the tiles."""
    columns = Int32(operands["dweight"].shape[0]) * setup.problem.sums
    sum_kernel(setup, operands["partials"], operands["dweight"], operands["dbias"]).launch(
        grid=(cute.ceil_div(columns, COLUMNS), 1, 1),
        block=(COLUMNS * ROWS, 1, 1),
        stream=operands["stream"],
        preferred_smem_carveout=-1,
    )


sum_kernel.set_name_prefix("fe_conv_sum", remove_cutlass_symbol=True, keep_mangled_name=False)
