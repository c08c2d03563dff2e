"""Product of a few block-scaled rows (tokens) with many (weights) on Hopper: out[m, n] = sum over k of a[m, k] b[n, k].

The floor is one reading of the weights. A block has the rows of weights that fall to its multiprocessor. One warp loads
them and their scales, by TMA, into a ring of slots that are 128 bytes deep; other warps bring the tokens of each slot
as operands in float16; the rest multiply, each its own rows, without waiting for each other. See
:mod:`.few_rows_products` for the arithmetic, :mod:`.few_rows_shared` for what a slot holds.

Instructions for each byte of weights, with 16 tokens, counted in the machine code: 3.5 with MXFP8, of which one
multiplies sums by scales, and 5.9 with NVFP4. Weights are rows of the tensor cores' operands, so 16 tokens cost a
quarter of what 64 do; with tokens as rows, 64 of them at least, it would be four times as much.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Uint8, cute

from fe_gemm.kernels.add_slices import launch_addition
from fe_gemm.kernels.blocked import scale_atoms
from fe_gemm.planning.scaled_few_rows import ATOM_BYTES, ATOM_ROWS, SLOT_BYTES, split_config
from fe_runtime.cute.arguments import fake_stream, fake_vector
from fe_runtime.cute.pipeline import Position
from fe_runtime.cute.tma import load_atom
from fe_runtime.cute.types import numeric

from .arguments import aligned
from .few_rows_products import Multiplier
from .few_rows_shared import Setup, Shared, Work, items
from .few_rows_tokens import bring_tokens
from .operands import Operand, Share

__all__ = ["build", "launch_few_rows"]


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments.

    a (M, K, 1), b (N, K, 1), sfa and sfb (bytes,), out (M, N, 1), if K is cut sums (slices M, N) in float32,
    multiprocessors, stream. Codes are bytes; two e2m1 codes in each.
    """
    del arch
    setup = Setup(*split_config(config))

    @cute.jit
    def scaled_few_rows(*arguments: Any) -> None:
        a, b, sfa, sfb, *results, multiprocessors, stream = arguments
        _launch(setup, (a, sfa), (b, sfb), results, multiprocessors, stream)

    return scaled_few_rows, _fake_arguments(setup)


def _launch(setup: Setup, a: Any, b: Any, results: list[cute.Tensor], multiprocessors: Int32, stream: Any) -> None:
    out, *sums = results
    left = sums[0] if sums else out[None, None, 0]
    launch_few_rows(setup, a, b, left, multiprocessors, stream)
    if sums:
        launch_addition(left, out, Int32(setup.launch.slices), stream)


def launch_few_rows(
    setup: Setup,
    a: tuple[cute.Tensor, cute.Tensor],
    b: tuple[cute.Tensor, cute.Tensor],
    sums: cute.Tensor,
    multiprocessors: Int32 | int,
    stream: Any,
) -> None:
    """Launch the product of tokens and weights, codes and scales of each; called by a launcher.

    ``sums``: (slices M, N), what is to be added where K is cut, and else the product.
    """
    how, weights = setup.launch, aligned(b[0], True)
    atom = load_atom(weights, setup.weights_layout, (how.rows, SLOT_BYTES), 1)
    few_rows_kernel(setup, atom, b[1], aligned(a[0], True), a[1], sums).launch(
        grid=(cutlass.min(items(setup, b[0].shape[0]), multiprocessors), 1, 1),
        block=(how.threads, 1, 1),
        stream=stream,
        min_blocks_per_mp=1,
    )


@cute.kernel
def few_rows_kernel(
    setup: cutlass.Constexpr[Setup],
    weights: tuple[cute.CopyAtom, cute.Tensor],
    sfb: cute.Tensor,
    a: cute.Tensor,
    sfa: cute.Tensor,
    out: cute.Tensor,
) -> None:
    """Give each warp its part."""
    how = setup.launch
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), thread % 32
    shared = Shared.allocate(setup, cutlass.memory.SmemAllocator())
    if warp == 0:
        shared.ring.initialise(how.computing_warps, 2)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    rows, held, _ = weights[1].shape
    work = Work.of(setup, rows, held * 8 // setup.problem.bits)
    if warp < how.computing_warps:
        _compute(setup, work, shared, out, a.shape[0], warp, lane)
    elif warp == how.computing_warps:
        _load(setup, work, shared, weights, sfb, held)
    else:
        bring_tokens(setup, work, shared, a, sfa, warp - (how.computing_warps + 1), lane)


@cute.jit
def _load(
    setup: cutlass.Constexpr[Setup],
    work: Work,
    shared: Shared,
    weights: tuple[cute.CopyAtom, cute.Tensor],
    sfb: cute.Tensor,
    held: Int32,
) -> None:
    """Load weights and their scales into all slots; one warp."""
    problem, how = setup.problem, setup.launch
    source = Operand.of(*weights, shared.weights, Share(0, 1, 0))
    atoms = scale_atoms(sfb, (work.rows, held * 8 // problem.bits, 1), problem.vec)
    at = Position.of_producer(how.slots)
    for item in cutlass.range(work.first, work.items, work.stride, unroll=1):
        tile, slice_ = work.place(item)
        first_atom = tile * how.rows // ATOM_ROWS
        for number in cutlass.range(work.steps, unroll=1):
            step = slice_ * work.steps + number
            column = cutlass.min(step * problem.scale_columns, work.column_atoms - 1)
            size = cutlass.min(work.column_atoms - column, Int32(problem.scale_columns)) * ATOM_BYTES
            shared.ring.acquire(at, how.rows * SLOT_BYTES + how.atoms * size)
            source.load(shared.ring, at, tile, Int32(0), step)
            for i in cutlass.range_constexpr(how.atoms):
                row = cutlass.min(first_atom + i, work.row_atoms - 1)
                target = shared.atoms[None, None, None, i, at.slot]
                _copy_bulk(atoms[None, None, column, row, 0], target, size, shared.ring.full + at.slot)
            at = at.next()
    cute.arch.griddepcontrol_launch_dependents()  # what makes results of the sums may come and wait


@cute.jit
def _copy_bulk(source: cute.Tensor, target: cute.Tensor, size: Int32, barrier: cute.Pointer) -> None:
    """Start to copy ``size`` bytes to shared memory, which ``barrier`` counts; called by a warp."""
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
            read_only_args=[target.iterator.toint(), source.iterator.toint(), size, barrier.toint()],
        )


@cute.jit
def _compute(
    setup: cutlass.Constexpr[Setup],
    work: Work,
    shared: Shared,
    out: cute.Tensor,
    count: Int32,
    warp: Int32,
    lane: Int32,
) -> None:
    """Multiply and store a warp's part of all items."""
    multiplier = Multiplier.of(setup, work, shared, warp, lane)
    accumulator = multiplier.accumulator()
    at = Position.of_reader(setup.launch.slots)
    for item in cutlass.range(work.first, work.items, work.stride, unroll=1):
        tile, slice_ = work.place(item)
        places = multiplier.scale_places(tile)
        accumulator.fill(0.0)
        for number in cutlass.range(work.steps, unroll=1):
            shared.ring.wait(at)
            multiplier.add_slot(accumulator, at.slot, slice_ * work.steps + number, places)
            cute.arch.sync_warp()
            shared.ring.release(at, None, lane == 0)
            at = at.next()
        if cutlass.const_expr(shared.sums is not None):
            _add_warps(setup, shared, accumulator, warp, lane)
        if warp < setup.launch.row_warps:
            first = (slice_ * count, tile * setup.launch.rows + multiplier.first_row)
            _store(setup, work, accumulator, out, count, first, lane)


@cute.jit
def _add_warps(
    setup: cutlass.Constexpr[Setup], shared: Shared, accumulator: cute.Tensor, warp: Int32, lane: Int32
) -> None:
    """Add the sums of warps that share rows to those of the first of them."""
    how, blocks = setup.launch, setup.problem.blocks
    places = [(block, tile) for block in range(blocks) for tile in range(how.tiles)]
    cute.arch.barrier(barrier_id=1, number_of_threads=32 * how.computing_warps)  # the last sums have been read
    if warp >= how.row_warps:
        for block, tile in cutlass.const_expr(places):
            shared.sums[None, lane, block, tile, warp - how.row_warps].store(accumulator[None, block, tile].load())
    cute.arch.barrier(barrier_id=1, number_of_threads=32 * how.computing_warps)
    if warp < how.row_warps:
        for other in cutlass.range_constexpr(how.depth_warps - 1):
            for block, tile in cutlass.const_expr(places):
                own = accumulator[None, block, tile]
                own.store(own.load() + shared.sums[None, lane, block, tile, warp + other * how.row_warps].load())


@cute.jit
def _store(
    setup: cutlass.Constexpr[Setup],
    work: Work,
    accumulator: cute.Tensor,
    out: cute.Tensor,
    count: Int32,
    first: tuple[Int32, Int32],
    lane: Int32,
) -> None:
    """Store sums of ``count`` tokens; ``first``: the place of the first token and of the thread's first row."""
    line, row = first
    for tile in cutlass.range_constexpr(setup.launch.tiles):
        for block in cutlass.range_constexpr(setup.problem.blocks):
            for i in cutlass.range_constexpr(4):
                token, own = block * 8 + lane % 4 * 2 + i % 2, row + tile * 16 + i // 2 * 8
                if Boolean(token < count) & Boolean(own < work.rows):
                    out[line + token, own] = accumulator[i, block, tile].to(out.element_type)


def _fake_arguments(setup: Setup) -> tuple[Any, ...]:
    m, n, held = (cute.sym_int() for _ in range(3))
    make = cute.runtime.make_fake_tensor
    operands = [
        make(Uint8, (rows, held, 1), (cute.sym_int64(divisibility=16), 1, cute.sym_int64()), assumed_align=16)
        for rows in (m, n)
    ]
    scales = [fake_vector(Uint8, cute.sym_int64(), 16) for _ in range(2)]
    strides = (cute.sym_int64(divisibility=8), 1, cute.sym_int64())
    out = make(numeric(setup.problem.out_dtype), (m, n, 1), strides, assumed_align=16)
    sums = []
    if setup.launch.slices > 1:
        sums = [make(Float32, (cute.sym_int(), n), (cute.sym_int64(divisibility=4), 1), assumed_align=16)]
    return (*operands, *scales, out, *sums, Int32(1), fake_stream())


few_rows_kernel.set_name_prefix("fe_gemm_few_rows", remove_cutlass_symbol=True, keep_mangled_name=False)
