"""Epilogues of products that another kernel left as sums in float32, one matrix for each slice of K.

Products of few rows are computed with the weights as rows of the tensor cores' operands, so their accumulators are not
those that epilogues take. Here a block adds the slices in their order into shared memory, all threads at work, and a
thread takes from there what it would have accumulated, for the same :class:`~fe_gemm.kernels.sm90.epilogue.Finisher`.
For M rows and one slice that moves 8 M bytes for each row of the weights, which has K bytes in MXFP8: 1.6 % of them for
M = 16 and K = 8192, and one more launch, which begins before the product ends (programmatic dependent launch).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from fe_gemm.planning.launches import split_config
from fe_gemm.planning.problem import CELL
from fe_gemm.planning.tiles import CONSUMERS, Launch
from fe_runtime.cute.arguments import fake_stream
from fe_runtime.cute.memory import load_atom
from fe_runtime.cute.wgmma import WARP_GROUP, fragment_column, fragment_row

from .arguments import aligned
from .epilogue import Arrays, Epilogue, Finisher
from .parts import Tile

__all__ = ["build", "launch_finish"]

VECTOR = 4
"""Neighbouring sums that a thread adds at once."""
PADDING = 8
"""Elements between rows in shared memory, with which the rows that a warp reads together lie in different banks."""


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments: sums (slices M, N), what the epilogue reads and writes, slices,
    stream.

    ``config`` is what :func:`fe_gemm.planning.launches.config` returns for the tiles that
    :func:`fe_gemm.planning.few_rows.finishing_launch` chose; the order is :attr:`Epilogue.names`.
    """
    del arch
    problem, launches = split_config(config)
    epilogue = Epilogue(problem, launches.many)

    @cute.jit
    def finish_sums(*arguments: Any) -> None:
        sums, *values, slices, stream = arguments
        arrays = dict(zip(epilogue.names, values, strict=True))
        epilogue.prepare(arrays, stream)
        launch_finish(epilogue, sums, slices, arrays, stream)

    m, n = cute.sym_int(), cute.sym_int()
    line = cute.sym_int64(divisibility=4)
    sums = cute.runtime.make_fake_tensor(Float32, (cute.sym_int(), n), (line, 1), assumed_align=16)
    return finish_sums, (sums, *epilogue.fake_arguments(m, n, 1), Int32(1), fake_stream())


def launch_finish(epilogue: Epilogue, sums: cute.Tensor, slices: Int32, arrays: Arrays, stream: Any) -> None:
    """Launch the epilogue on sums (slices M, N), and what has to run after it; called by a launcher.

    ``arrays`` are what :attr:`Epilogue.names` names, of one batch. Lines of sums start at multiples of 16 bytes. What
    :meth:`Epilogue.prepare` launches has to come before the kernel that leaves the sums: only that one is waited for.
    """
    how, sheets = epilogue.launch, epilogue.sheets
    arrays = {name: aligned(x, sheets[name].major == "n") if name in sheets else x for name, x in arrays.items()}
    rows = sums.shape[0] // slices
    finish_sums_kernel(epilogue, epilogue.parameters(arrays), sums, slices).launch(
        grid=(cute.ceil_div(sums.shape[1], how.tile_n), cute.ceil_div(rows, how.tile_m), 1),
        block=(CONSUMERS * WARP_GROUP, 1, 1),
        stream=stream,
        use_pdl=True,
    )
    epilogue.complete(arrays, stream)


@cute.kernel
def finish_sums_kernel(
    epilogue: cutlass.Constexpr[Epilogue], parameters: tuple[Any, ...], sums: cute.Tensor, slices: Int32
) -> None:
    """Finish a tile, each warp group its part."""
    how = epilogue.launch
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    allocator = cutlass.memory.SmemAllocator()
    shared = epilogue.allocate(allocator)
    total = allocator.allocate_tensor(
        Float32, cute.make_layout((how.tile_m, how.tile_n), stride=(how.tile_n + PADDING, 1)), byte_alignment=16
    )
    if warp == 0:
        epilogue.initialise(shared)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    group = warp // (WARP_GROUP // 32)
    tile_column, tile_row, _ = cute.arch.block_idx()
    down, right = (0, group) if how.side_by_side else (group, 0)
    own = down * how.group_rows, right * how.group_columns
    first, rows = (tile_row * how.tile_m, tile_column * how.tile_n), sums.shape[0] // slices
    tile = Tile(first[0] + own[0], (first[1] + own[1]) // CELL, Int32(0), rows, Int32(0))
    finisher = Finisher.of(epilogue, shared, parameters, group, thread % WARP_GROUP)
    finisher.begin(tile)
    left = cutlass.min(rows - first[0], Int32(how.tile_m))
    cute.arch.griddepcontrol_wait()  # until the sums are there
    _add_slices(sums, slices, rows, total, first, left, thread)
    cute.arch.sync_threads()
    finisher.finish(_accumulator(how, total, own, left, thread % WARP_GROUP), tile)
    finisher.finish_all()


@cute.jit
def _add_slices(
    sums: cute.Tensor,
    slices: Int32,
    rows: Int32,
    total: cute.Tensor,
    first: tuple[Int32, Int32],
    left: Int32,
    thread: Int32,
) -> None:
    """Add slices of a tile that starts at ``first`` and has ``left`` rows; zeros beyond the last column."""
    across = cute.size(total, mode=[1]) // VECTOR
    last = (sums.shape[1] - 1) // VECTOR
    for number in cutlass.range(thread, left * across, CONSUMERS * WARP_GROUP, unroll=2):
        row, index = number // across, number % across
        place = cutlass.min(first[1] // VECTOR + index, last)
        added, column = cute.make_rmem_tensor((VECTOR,), Float32), first[1] + index * VECTOR
        added.fill(0.0)
        for slice_ in cutlass.range(slices, unroll=4):
            values = cute.make_rmem_tensor((VECTOR,), Float32)
            line = sums[slice_ * rows + first[0] + row, None]
            cute.copy(load_atom(Float32, 32 * VECTOR), cute.local_tile(line, (VECTOR,), (place,)), values)
            added.store(added.load() + values.load())
        for i in cutlass.range_constexpr(VECTOR):
            added[i] = cutlass.select_(column + i < sums.shape[1], added[i], Float32(0.0))
        cute.local_tile(total[row, None], (VECTOR,), (index,)).store(added.load())


@cute.jit
def _accumulator(
    how: cutlass.Constexpr[Launch],
    total: cute.Tensor,
    first: tuple[Int32 | int, Int32 | int],
    left: Int32,
    thread: Int32,
) -> cute.Tensor:
    """Return what the thread would have accumulated of the part of a tile from ``first`` on; zeros below its rows."""
    blocks, cells = how.group_columns // 8, how.group_rows // CELL
    accumulator = cute.make_rmem_tensor(((2, 2, blocks), cells, 1), Float32)
    accumulator.fill(0.0)
    for cell in cutlass.range_constexpr(cells):
        for half in cutlass.range_constexpr(2):
            row = first[0] + cell * CELL + fragment_row(thread) + 8 * half
            if row < left:
                line = cute.local_tile(total[row, None], (2,), (None,))
                for block in cutlass.range_constexpr(blocks):
                    pair = line[None, (first[1] + fragment_column(thread)) // 2 + 4 * block].load()
                    for side in cutlass.range_constexpr(2):
                        accumulator[((side, half, block), cell, 0)] = pair[side]
    return accumulator


finish_sums_kernel.set_name_prefix("fe_gemm_finish", remove_cutlass_symbol=True, keep_mangled_name=False)
