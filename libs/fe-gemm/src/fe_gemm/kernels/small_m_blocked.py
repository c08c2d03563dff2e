"""Product of a few block-scaled rows (tokens) with many (weights): out[m, n] = sum over k of a[m, k] b[n, k].

The floor is one reading of the weights. Codes and scales come to shared memory by asynchronous copies, each thread's
own, so warps never wait for each other while they multiply. A thread widens its codes in registers, where they already
are an operand of ``mma.sync``: the order of K within a step is chosen so that a thread's 16 neighbouring bytes are what
it has to supply. The tokens, widened once per block, lie in shared memory in the order in which they are an operand.

In a step a warp multiplies 64 or 32 rows of weights, 4 * 16 bytes deep, with all tokens: 16 rows of each quarter of a
tile, or of two, of which lane 4 g + t supplies bytes 16 t to 16 t + 15 of rows g and g + 8. Sums of the warps that
share a slice of K are added in shared memory, sums of slices by a second kernel; both in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import Float32, Int32, Uint8, cute

from fe_gemm.planning.small_m import SmallProblem, split_config
from fe_runtime.cute.arguments import fake_stream, fake_vector
from fe_runtime.cute.convert import bf16_products
from fe_runtime.cute.ring import ThreadRing
from fe_runtime.cute.types import numeric

from .add_slices import launch_addition
from .blocked import ATOM_ROWS, WORD_ROWS
from .small_m_operands import (
    TO_UNIT,
    TO_UNIT_FIRST,
    Cursor,
    Setup,
    Weights,
    Work,
    widen_tokens,
)
from .warp_mma import mma_bf16

__all__ = ["build", "launch_small_m"]


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments.

    a (M, K, 1), b (N, K, 1), sfa and sfb (bytes,), out (M, N, 1), sums (slices M, N) in float32, slices,
    multiprocessors, stream. Codes are bytes; two e2m1 codes in each.
    """
    setup = Setup.of(arch, *split_config(config))

    @cute.jit
    def small_m_blocked(
        a: cute.Tensor,
        b: cute.Tensor,
        sfa: cute.Tensor,
        sfb: cute.Tensor,
        out: cute.Tensor,
        sums: cute.Tensor,
        slices: Int32,
        multiprocessors: Int32,
        stream: Any,
    ) -> None:
        launch_small_m(setup, (a, sfa), (b, sfb), sums, slices, multiprocessors, stream)
        launch_addition(sums, out, slices, stream)

    return small_m_blocked, _fake_arguments(setup.problem)


Operand = tuple[cute.Tensor, cute.Tensor]
"""Codes (rows, bytes of K, 1) and scales."""


def launch_small_m(
    setup: Setup,
    a: Operand,
    b: Operand,
    sums: cute.Tensor,
    slices: Int32 | int,
    multiprocessors: Int32 | int,
    stream: Any,
) -> None:
    """Launch the products of slices of K; called by a launcher. As many blocks as can run, the same for each slice."""
    small_m_kernel(setup, *a, *b, sums, slices).launch(
        grid=(multiprocessors // slices * slices, 1, 1),
        block=(setup.launch.threads, 1, 1),
        stream=stream,
        min_blocks_per_mp=1,
    )


@cute.kernel
def small_m_kernel(
    setup: cutlass.Constexpr[Setup],
    a: cute.Tensor,
    sfa: cute.Tensor,
    b: cute.Tensor,
    sfb: cute.Tensor,
    sums: cute.Tensor,
    slices: Int32,
) -> None:
    """Start to copy weights, widen the tokens of a slice meanwhile, then multiply tile after tile."""
    how = setup.launch
    thread, _, _ = cute.arch.thread_idx()
    allocator = cutlass.memory.SmemAllocator()
    tokens = allocator.allocate_tensor(
        Int32, cute.make_layout((4, 32, setup.pieces, setup.blocks, how.slice_steps)), byte_alignment=16
    )
    partial = allocator.allocate_tensor(
        Float32, cute.make_layout((4, 32, how.quarters, setup.blocks, how.threads // 32)), byte_alignment=16
    )
    ring = ThreadRing.of(allocator, Int32, (4, how.vectors, how.threads, how.stages), thread, 16)
    weights = Weights.of(setup, b, sfb, Work.of(setup, b, slices))
    ahead = weights.fetch_first(ring)
    widen_tokens(setup, a, sfa, tokens, weights.work)
    cute.arch.sync_threads()
    _multiply(weights, ring, ahead, tokens, partial, sums, a.shape[0])


@cute.jit
def _multiply(
    weights: Weights,
    ring: ThreadRing,
    ahead: Cursor,
    tokens: cute.Tensor,
    partial: cute.Tensor,
    sums: cute.Tensor,
    count: Int32,
) -> None:
    """Multiply all tiles of the block; copies run ahead, also across tiles."""
    setup, work = weights.setup, weights.work
    how = setup.launch
    accumulator = cute.make_rmem_tensor((4, setup.blocks, how.quarters), Float32)
    stage = Int32(0)
    for tile in cutlass.range(work.first, work.tiles, work.stride, unroll=1):
        accumulator.fill(0.0)
        for number in cutlass.range(work.steps, unroll=1):
            cute.arch.cp_async_wait_group(how.stages - 2)
            step = work.depth_warp + number * how.depth_warps
            _multiply_step(weights, ring, stage, tokens, step, accumulator)
            weights.fetch(ring, ahead, cutlass.select_(stage == 0, Int32(how.stages - 1), stage - 1))
            ahead = ahead.next(work)
            stage = cutlass.select_(stage == how.stages - 1, Int32(0), stage + 1)
        _add_warps(setup, accumulator, partial, sums, work, tile, count)
    cute.arch.cp_async_wait_group(0)


def _multiply_step(
    weights: Weights, ring: ThreadRing, stage: Int32, tokens: cute.Tensor, step: Int32, accumulator: cute.Tensor
) -> None:
    """Add the product of a step: the warp's rows of weights, all tokens."""
    setup, work = weights.setup, weights.work
    problem = setup.problem
    factors = _factors(setup, ring, stage, weights.block((work.first_step + step) * 4 + work.t), work.first_quarter)
    operands = [
        [
            word
            for piece in range(setup.pieces)
            for word in _words(tokens[None, work.g * 4 + work.t, piece, block, step])
        ]
        for block in range(setup.blocks)
    ]
    per_scale = min(problem.vec, problem.per_lane) // 2  # words of two values
    for q in range(setup.launch.quarters):
        rows = []
        for half in range(2):
            codes = _words(ring.slot(2 * q + half, stage))
            values = [value for word in codes for value in setup.weights.unordered(word)]
            if problem.bits == 4 and not setup.shifts:
                values = [bf16_products(value, TO_UNIT) for value in values]
            rows.append([bf16_products(value, factors[half][i // per_scale][q]) for i, value in enumerate(values)])
        for j in range(0, problem.per_lane // 2, 2):
            a = [rows[0][j], rows[1][j], rows[0][j + 1], rows[1][j + 1]]
            for block in range(setup.blocks):
                old = [accumulator[i, block, q] for i in range(4)]
                new = mma_bf16(a, operands[block][j : j + 2], old)
                for i in range(4):
                    accumulator[i, block, q] = new[i]


def _factors(
    setup: Setup, ring: ThreadRing, stage: Int32, first: Int32, first_quarter: Int32
) -> list[list[list[Int32]]]:
    """Return a thread's scales of a step, each as a word of two: for rows g and g + 8, by block, by quarter."""
    quarters, found = setup.launch.quarters, []
    for half in range(2):
        slot = ring.slot(2 * quarters + half, stage)
        chunk = _words(cute.local_tile(slot, (quarters,), (first_quarter // quarters,)))
        blocks = []
        for block in range(setup.scales):
            twice = 0x4400 + (first % 4 + block) * 0x1111
            pairs = [Int32(cute.arch.prmt(chunk[q], chunk[q + 1], twice)) for q in range(0, quarters, 2)]
            factors = [factor for pair in pairs for factor in setup.weights.factors(pair)]
            blocks.append([bf16_products(factor, TO_UNIT_FIRST) for factor in factors] if setup.shifts else factors)
        found.append(blocks)
    return found


def _words(shared: cute.Tensor) -> list[Int32]:
    """Load neighbouring words of shared memory at once."""
    words = cute.make_rmem_tensor(shared.shape, Int32)
    words.store(shared.load())
    return [words[i] for i in range(cute.size(words))]


@cute.jit
def _add_warps(
    setup: cutlass.Constexpr[Setup],
    accumulator: cute.Tensor,
    partial: cute.Tensor,
    sums: cute.Tensor,
    work: Work,
    tile: Int32,
    count: Int32,
) -> None:
    """Add the sums of the warps that share the slice, and store them for the second kernel."""
    how = setup.launch
    thread, _, _ = cute.arch.thread_idx()
    quarters, row_warps = how.quarters, how.row_warps
    for q in cutlass.range_constexpr(quarters):
        for block in cutlass.range_constexpr(setup.blocks):
            partial[None, thread % 32, q, block, thread // 32].store(accumulator[None, block, q].load())
    cute.arch.sync_threads()
    items = row_warps * quarters * setup.blocks * 32
    for item in cutlass.range(thread, items, how.threads, unroll=1):
        lane, q, rest = item % 32, item // 32 % quarters, item // (32 * quarters)
        block, row_warp = rest % setup.blocks, rest // setup.blocks
        total = cute.make_rmem_tensor((4,), Float32)
        total.store(partial[None, lane, q, block, row_warp].load())
        for depth in cutlass.range_constexpr(1, how.depth_warps):
            total.store(total.load() + partial[None, lane, q, block, row_warp + depth * row_warps].load())
        quarter, token = row_warp // 2 * quarters + q, block * 8 + lane % 4 * 2
        row = tile * ATOM_ROWS + quarter * WORD_ROWS + row_warp % 2 * 16 + lane // 4
        for i in cutlass.range_constexpr(4):
            if (token + i % 2 < count) & (row + i // 2 * 8 < sums.shape[1]):
                sums[work.slice * count + token + i % 2, row + i // 2 * 8] = total[i]
    cute.arch.sync_threads()


def _fake_arguments(problem: SmallProblem) -> tuple[Any, ...]:
    m, n, held, slices = (cute.sym_int() for _ in range(4))
    operands = [
        cute.runtime.make_fake_tensor(
            Uint8, (rows, held, 1), (cute.sym_int64(divisibility=16), 1, cute.sym_int64()), assumed_align=16
        )
        for rows in (m, n)
    ]
    scales = [fake_vector(Uint8, cute.sym_int64(), 16) for _ in range(2)]
    line = cute.sym_int64(divisibility=8)
    out = cute.runtime.make_fake_tensor(
        numeric(problem.out_dtype), (m, n, 1), (line, 1, cute.sym_int64()), assumed_align=16
    )
    pitch = cute.sym_int64(divisibility=4)
    sums = cute.runtime.make_fake_tensor(Float32, (slices, n), (pitch, 1), assumed_align=16)
    return (*operands, *scales, out, sums, Int32(1), Int32(1), fake_stream())


small_m_kernel.set_name_prefix("fe_gemm_small_m", remove_cutlass_symbol=True, keep_mangled_name=False)
