"""Epilogues of products that another kernel left as sums in float32, one matrix for each slice of K.

Products of few rows are computed with the weights as rows of the tensor cores' operands, so their accumulators are not
those that epilogues take. Here a thread loads the values that it would have accumulated, the slices added in their
order, and gives them to the same :class:`~fe_gemm.kernels.sm90.epilogue.Finisher`. For M rows and one slice that moves
8 M bytes for each row of the weights, which has K bytes in MXFP8: 1.6 % of them for M = 16 and K = 8192, and one more
launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from fe_gemm.planning.launches import split_config
from fe_gemm.planning.problem import CELL, Problem
from fe_gemm.planning.tiles import CONSUMERS, Launch, is_valid
from fe_runtime.cute.arguments import fake_stream
from fe_runtime.cute.wgmma import WARP_GROUP, fragment_column, fragment_row

from .arguments import aligned
from .epilogue import Arrays, Epilogue, Finisher

__all__ = ["build", "choose", "launch_finish"]


def choose(problem: Problem) -> Launch:
    """Return the tiles in which sums are finished: the narrowest that the epilogue allows."""
    tiles = [Launch(*tile, slots=2, store_buffers=buffers) for tile in _TILES for buffers in (1, 2)]
    return next(launch for launch in tiles if is_valid(problem, launch))


_TILES = ((64, 128), (64, 256), (128, 64), (128, 128), (128, 256))


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments: sums (slices M, N), what the epilogue reads and writes, slices,
    stream.

    ``config`` is what :func:`fe_gemm.planning.launches.config` returns; the order is :attr:`Epilogue.names`.
    """
    del arch
    problem, launches = split_config(config)
    epilogue = Epilogue(problem, launches.many)

    @cute.jit
    def finish_sums(*arguments: Any) -> None:
        sums, *values, slices, stream = arguments
        launch_finish(epilogue, sums, slices, dict(zip(epilogue.names, values, strict=True)), stream)

    m, n = cute.sym_int(), cute.sym_int()
    line = cute.sym_int64(divisibility=4)
    sums = cute.runtime.make_fake_tensor(Float32, (cute.sym_int(), n), (line, 1), assumed_align=16)
    return finish_sums, (sums, *epilogue.fake_arguments(m, n, 1), Int32(1), fake_stream())


def launch_finish(epilogue: Epilogue, sums: cute.Tensor, slices: Int32, arrays: Arrays, stream: Any) -> None:
    """Launch the epilogue on sums (slices M, N), and what has to run before and after it; called by a launcher.

    ``arrays`` are what :attr:`Epilogue.names` names, of one batch.
    """
    how, sheets = epilogue.launch, epilogue.sheets
    arrays = {name: aligned(x, sheets[name].major == "n") if name in sheets else x for name, x in arrays.items()}
    rows = sums.shape[0] // slices
    epilogue.prepare(arrays, stream)
    finish_sums_kernel(epilogue, epilogue.parameters(arrays), sums, slices).launch(
        grid=(cute.ceil_div(sums.shape[1], how.tile_n), cute.ceil_div(rows, how.tile_m), 1),
        block=(CONSUMERS * WARP_GROUP, 1, 1),
        stream=stream,
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
    if warp == 0:
        epilogue.initialise(shared)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    group = warp // (WARP_GROUP // 32)
    column, row, _ = cute.arch.block_idx()
    down, right = (0, group) if how.side_by_side else (group, 0)
    row = row * (how.tile_m // CELL) + down * (how.group_rows // CELL)
    column = column * (how.tile_n // CELL) + right * (how.group_columns // CELL)
    finisher = Finisher.of(epilogue, shared, parameters, group, thread % WARP_GROUP)
    finisher.begin(row, column, Int32(0))
    accumulator = _accumulator(epilogue, sums, slices, row, column, thread % WARP_GROUP)
    finisher.finish(accumulator, row, column, Int32(0))
    finisher.finish_all()


@cute.jit
def _accumulator(
    epilogue: cutlass.Constexpr[Epilogue], sums: cute.Tensor, slices: Int32, row: Int32, column: Int32, thread: Int32
) -> cute.Tensor:
    """Return what the thread would have accumulated of the cells from (``row``, ``column``) on; zeros outside."""
    how = epilogue.launch
    blocks, cells = how.group_columns // 8, how.group_rows // CELL
    accumulator = cute.make_rmem_tensor(((2, 2, blocks), cells, 1), Float32)
    accumulator.fill(0.0)
    rows = sums.shape[0] // slices
    for slice_ in cutlass.range(slices, unroll=1):
        for cell in cutlass.range_constexpr(cells):
            for half in cutlass.range_constexpr(2):
                own = (row + cell) * CELL + fragment_row(thread) + 8 * half
                if own < rows:
                    line = sums[slice_ * rows + own, None]
                    for block in cutlass.range_constexpr(blocks):
                        for side in cutlass.range_constexpr(2):
                            place = column * CELL + block * 8 + fragment_column(thread) + side
                            if place < sums.shape[1]:
                                old = accumulator[((side, half, block), cell, 0)]
                                accumulator[((side, half, block), cell, 0)] = old + line[place]
    return accumulator


finish_sums_kernel.set_name_prefix("fe_gemm_finish", remove_cutlass_symbol=True, keep_mangled_name=False)
