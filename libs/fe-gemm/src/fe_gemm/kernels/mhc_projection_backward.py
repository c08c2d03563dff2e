"""Kernels of ``mhc_projection_backward``: one reads x, writes dx and sums the weight's gradient over a range of rows,
one adds the sums of the ranges in order.

Bytes. x is read and dx written once, 4 bytes an element: 336 MB for (4096, 24, 20480), 79 us of copying on an H200.
Weight, its gradient and each split's partial sum are N/M of a matrix of float32: 2 MB each.

Why ``mma.sync`` and no shared memory for x. Computed transposed, both products want x in one place: where a lane holds
columns (g, g + 8) and rows (2t, 2t + 1, 2t + 8, 2t + 9) of ``dx^T = s x^T + W^T P^T`` as accumulators, it needs just
these elements of x for ``dweight^T = x^T P`` as the first operand, two rows paired in a word. Which columns a tile
consists of is free, so a lane takes eight neighbours: it loads and stores 16 bytes of each of four rows, four tiles
are its eight columns, and a warp's access is four rows of 128 bytes. Nothing of x passes from lane to lane. Its share
of the weight and of the gradient stays in registers, 2 * 2 * vector * N / 8 words.

Rates. For N = 24, 16 rows and 16 columns are 6 TF32 products (16, 8, 8) and 6 bf16 ones (16, 8, 16), as P is split
into two bf16 terms, beside 1 KB from and to memory. Memory needs 56 cycles of an H200 multiprocessor for that KB, its
four tensor cores 12 to 20 for the products. wgmma would need fewer, but takes x from shared memory in one order and
dx's start from registers in another. The coefficients, 1.5 KB for 16 rows, are fetched once for a block, prepared as
operands and read as such by all of its warps: 3 KB of shared memory for each 2 KB of x.

x comes ahead by asynchronous copies, each thread to its own place, so only the coefficients need barriers.

Functions marked ``cute.jit`` branch or loop on the device; the others only compose while compiling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import CopyG2ROp

from fe_gemm.planning.mhc import STEP_ROWS, Launch, Problem, split_config
from fe_runtime.cute.arguments import fake_rows, fake_stream
from fe_runtime.cute.memory import load_atom, store_atom
from fe_runtime.cute.ring import ThreadRing
from fe_runtime.cute.rounding import bf16_values, bf16_word

from .mhc_coefficients import Coefficients
from .warp_mma import high_halves, low_halves, mma_bf16, mma_tf32, tf32

__all__ = ["build"]

NAME = "mhc_projection_backward"
SUM_THREADS = 256
SUM_VECTOR = 4
"""Columns that a thread of the sum treats."""


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments.

    In order: x, weight, grad_proj, grad_r, r, dx, dweight, partial sums (splits, N * Kc), stream. ``config`` is what
    :func:`fe_gemm.planning.mhc.config` returns.
    """
    del arch
    setup = Setup(*split_config(config))

    @cute.jit
    def mhc_projection_backward(
        x: cute.Tensor,
        weight: cute.Tensor,
        grad_proj: cute.Tensor,
        grad_r: cute.Tensor,
        r: cute.Tensor,
        dx: cute.Tensor,
        dweight: cute.Tensor,
        partials: cute.Tensor,
        stream: Any,
    ) -> None:
        _launch(setup, (x, weight, grad_proj, grad_r, r, dx), dweight, partials, stream)

    return mhc_projection_backward, _fake_arguments(setup)


@dataclass(frozen=True, slots=True)
class Setup:
    """All that is static in a compilation."""

    problem: Problem
    launch: Launch

    @property
    def tiles(self) -> int:
        """Tiles of 16 columns of a warp."""
        return self.launch.vector // 2


def _fake_arguments(setup: Setup) -> tuple[Any, ...]:
    problem = setup.problem
    tokens = cute.sym_int64()
    x = fake_rows(BFloat16, tokens, problem.columns, 16)
    weight = fake_rows(Float32, problem.coefficients, problem.columns, 16)
    coefficients = (tokens, cute.sym_int())
    grad_proj = cute.runtime.make_fake_tensor(Float32, coefficients, (cute.sym_int64(), 1), assumed_align=16)
    scalars = cute.runtime.make_fake_tensor(Float32, (tokens,), (1,), assumed_align=16)
    partials = fake_rows(Float32, setup.launch.splits, problem.coefficients * problem.columns, 16)
    return x, weight, grad_proj, scalars, scalars, x, weight, partials, fake_stream()


def _launch(
    setup: Setup, operands: tuple[cute.Tensor, ...], dweight: cute.Tensor, partials: cute.Tensor, stream: Any
) -> None:
    """Launch the walk over x in as many ranges as there are rows for, then the sum."""
    problem, how = setup.problem, setup.launch
    chunks = Int32(cute.ceil_div(operands[0].shape[0], how.chunk))
    share = cute.ceil_div(chunks, how.splits)
    splits = cute.ceil_div(chunks, share)
    walk_kernel.set_name_prefix(f"fe_gemm_{NAME}", remove_cutlass_symbol=True, keep_mangled_name=False)
    walk_kernel(setup, *operands, partials, share).launch(
        grid=(how.strips(problem), splits, 1),
        block=(how.threads, 1, 1),
        stream=stream,
        min_blocks_per_mp=how.blocks_per_sm,
        preferred_smem_carveout=100,  # the steps under way are there
    )
    vectors = problem.coefficients * problem.columns // SUM_VECTOR
    sum_kernel.set_name_prefix(f"fe_gemm_{NAME}_sum", remove_cutlass_symbol=True, keep_mangled_name=False)
    sum_kernel(setup, partials, dweight, splits).launch(
        grid=(-(-vectors // SUM_THREADS), 1, 1), block=(SUM_THREADS, 1, 1), stream=stream, use_pdl=how.overlap
    )


@cute.kernel
def walk_kernel(
    setup: cutlass.Constexpr[Setup],
    x: cute.Tensor,
    weight: cute.Tensor,
    grad_proj: cute.Tensor,
    grad_r: cute.Tensor,
    r: cute.Tensor,
    dx: cute.Tensor,
    partials: cute.Tensor,
    share: Int32,
) -> None:
    """A strip of columns of ``share`` chunks of rows."""
    problem, how = setup.problem, setup.launch
    if cutlass.const_expr(how.overlap):
        cute.arch.griddepcontrol_launch_dependents()
    place = Place.here(setup, Int64(x.shape[0]), share)
    allocator = cutlass.memory.SmemAllocator()
    ring = ThreadRing.of(allocator, Int32, (how.vector // 2, 4, how.threads, how.stages), place.thread, 16)
    coefficients = Coefficients.of(
        problem, how, allocator, place.thread, (grad_proj, grad_r, r), place.first, place.count
    )
    x_rows, dx_rows = place.rows(x), place.rows(dx)
    for step in cutlass.range_constexpr(how.stages - 1):
        _fetch(setup, place, ring, x_rows, Int32(step), Int32(step))
    coefficients.store(coefficients.load(Int32(0)), Int32(0))
    w = _weight(setup, place, weight)
    sums = cute.make_rmem_tensor((4, problem.tiles, setup.tiles), Float32)
    sums.fill(0.0)
    steps = how.chunk // STEP_ROWS
    for chunk in cutlass.range(cute.ceil_div(place.count, how.chunk), unroll=1):
        cute.arch.sync_threads()  # this chunk is there, and everybody has left the one before it
        coming = coefficients.load(chunk + 1)
        for i in cutlass.range_constexpr(steps):
            step = chunk * steps + i
            ahead = step + (how.stages - 1)
            _fetch(setup, place, ring, x_rows, ahead, ahead % how.stages)
            cute.arch.cp_async_wait_group(how.stages - 1)
            words = _words(setup, ring, step % how.stages)
            dx_words = _step(setup, coefficients, chunk % 2, i, words, w, sums)
            _store_dx(setup, place, dx_rows, step, dx_words)
        coefficients.store(coming, (chunk + 1) % 2)
    cute.arch.cp_async_wait_group(0)
    _store_sums(setup, place, sums, partials)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a thread works: its ``count`` rows from ``first`` on, and its neighbouring columns.

    ``quad`` is t, its place among the four lanes that share columns.
    """

    thread: Int32
    quad: Int32
    split: Int32
    first: Int64
    count: Int32
    column: Int32
    inside: Any

    @staticmethod
    def here(setup: Setup, rows: Int64, share: Int32) -> Place:
        """Ask the hardware."""
        how = setup.launch
        thread, _, _ = cute.arch.thread_idx()
        strip, split, _ = cute.arch.block_idx()
        warp, lane = thread // 32, thread % 32
        first = Int64(split) * (share * how.chunk)
        count = Int32(cutlass.min(rows - first, Int64(share * how.chunk)))
        column = strip * how.strip + (warp * 8 + lane // 4) * how.vector
        return Place(thread, lane % 4, split, first, count, column, column < setup.problem.columns)

    def row(self, step: Int32, number: int) -> Int32:
        """Return the row, counted from ``first``, of the thread's vector ``number`` of four in a step."""
        return step * STEP_ROWS + self.quad * 2 + (number % 2 + 8 * (number // 2))

    def rows(self, array: cute.Tensor) -> cute.Tensor:
        """Return the rows of the block."""
        return cute.domain_offset((self.first, 0), array)


# ---- x and dx


def _fetch(setup: Setup, place: Place, ring: ThreadRing, x: cute.Tensor, step: Int32, stage: Int32) -> None:
    """Start to copy the thread's vectors of a step; what lies outside x arrives as zeros."""
    size = setup.launch.vector * 2
    cache = "cg" if size == 16 else "ca"
    for number in range(4):
        row = place.row(step, number)
        is_there = place.inside & (row < place.count)
        source = (x.iterator + cute.crd2idx((row, place.column), x.layout)).toint()
        cute.arch.inline_ptx(
            f"cp.async.{cache}.shared.global [{{$r0}}], [{{$r1}}], {size}, {{$r2}};",
            read_only_args=[
                ring.slot(number, stage).iterator.toint(),
                source,
                Int32(cutlass.select_(is_there, Int32(size), Int32(0))),
            ],
        )
    cute.arch.cp_async_commit_group()


def _words(setup: Setup, ring: ThreadRing, stage: Int32) -> list[list[Int32]]:
    """Return the thread's four vectors of a step, as words of two columns."""
    count = setup.launch.vector // 2
    found = []
    for number in range(4):
        values = ring.slot(number, stage).load()
        found.append([values[i] for i in range(count)])
    return found


@cute.jit
def _store_dx(
    setup: cutlass.Constexpr[Setup],
    place: cutlass.Constexpr[Place],
    dx: cute.Tensor,
    step: Int32,
    words: list[list[Int32]],
) -> None:
    vector = setup.launch.vector
    atom = store_atom(BFloat16, 16 * vector)
    for number in cutlass.range_constexpr(4):
        row = place.row(step, number)
        values = cute.make_rmem_tensor((vector // 2,), Int32)
        for i in cutlass.range_constexpr(vector // 2):
            values[i] = words[number][i]
        if place.inside & (row < place.count):
            target = cute.local_tile(dx[row, None], (vector,), (place.column // vector,))
            cute.copy(atom, cute.recast_tensor(values, BFloat16), target)


# ---- products


def _step(
    setup: Setup,
    coefficients: Coefficients,
    buffer: Int32,
    number: int,
    x: list[list[Int32]],
    w: cute.Tensor,
    sums: cute.Tensor,
) -> list[list[Int32]]:
    """Return dx of a step in the order of x, and add to the sums."""
    scale = coefficients.scale(buffer, number)
    for_dx, for_sums = coefficients.operands(buffer, number)
    found: list[list[Int32]] = [[], [], [], []]
    for tile in range(setup.tiles):
        column = [x[row][tile] for row in range(4)]
        values = [bf16_values(word) for word in column]
        for half in range(2):
            low, high = 2 * half, 2 * half + 1
            c = (
                scale[low] * values[low][0],
                scale[high] * values[high][0],
                scale[low] * values[low][1],
                scale[high] * values[high][1],
            )
            for group, operand in enumerate(for_dx):
                a = [w[i, group, tile] for i in range(4)]
                c = mma_tf32(a, operand[2 * half : 2 * half + 2], c)
            found[low].append(bf16_word(c[0], c[2]))
            found[high].append(bf16_word(c[1], c[3]))
        a = [pick(column[first], column[first + 1]) for first in (0, 2) for pick in (low_halves, high_halves)]
        for group, operand in enumerate(for_sums):
            c = tuple(sums[i, group, tile] for i in range(4))
            for term in (operand[0:2], operand[2:4]):
                c = mma_bf16(a, term, c)
            for i in range(4):
                sums[i, group, tile] = c[i]
    return found


def _weight(setup: Setup, place: Place, weight: cute.Tensor) -> cute.Tensor:
    """Return the thread's share of the weight in TF32, (words of an operand, groups of 8 coefficients, tiles)."""
    problem, vector = setup.problem, setup.launch.vector
    found = cute.make_rmem_tensor((4, problem.tiles, setup.tiles), Int32)
    column = cutlass.min(place.column, problem.columns - vector)
    for group in range(problem.tiles):
        for half in range(2):
            j = place.quad + 8 * group + 4 * half
            values = cute.make_rmem_tensor((vector,), Float32)
            row = weight[cutlass.min(j, problem.coefficients - 1), None]
            source = cute.local_tile(row, (vector,), (column // vector,))
            cute.copy(load_atom(Float32, 128), source, values)
            for i in range(vector):
                value = Float32(cutlass.select_(j < problem.coefficients, values[i], Float32(0.0)))
                found[2 * half + i % 2, group, i // 2] = tf32(value)
    return found


@cute.jit
def _store_sums(
    setup: cutlass.Constexpr[Setup], place: cutlass.Constexpr[Place], sums: cute.Tensor, partials: cute.Tensor
) -> None:
    """Store the sums of the block's rows."""
    problem, vector = setup.problem, setup.launch.vector
    atom = store_atom(Float32, 128)
    for group in cutlass.range_constexpr(problem.tiles):
        for side in cutlass.range_constexpr(2):
            j = place.quad * 2 + (8 * group + side)
            values = cute.make_rmem_tensor((vector,), Float32)
            found = _sums_of(sums, group, side, vector)
            for i in cutlass.range_constexpr(vector):
                values[i] = found[i]
            if place.inside & (j < problem.coefficients):
                index = j * (problem.columns // vector) + place.column // vector
                cute.copy(atom, values, cute.local_tile(partials[place.split, None], (vector,), (index,)))


def _sums_of(sums: cute.Tensor, group: int, side: int, vector: int) -> list[Float32]:
    """Return a thread's sums for the coefficient ``8 group + 2 t + side``, column by column."""
    return [sums[2 * (i % 2) + side, group, i // 2] for i in range(vector)]


@cute.kernel
def sum_kernel(setup: cutlass.Constexpr[Setup], partials: cute.Tensor, dweight: cute.Tensor, splits: Int32) -> None:
    """Each thread adds four columns of the partial sums, in order."""
    if cutlass.const_expr(setup.launch.overlap):
        cute.arch.griddepcontrol_wait()
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    index = block * SUM_THREADS + thread
    size = setup.problem.coefficients * setup.problem.columns
    if index < size // SUM_VECTOR:
        # Not as data that nobody writes: the kernel before this one may still be at it when this one starts.
        atom = cute.make_copy_atom(CopyG2ROp(), Float32, num_bits_per_copy=128)
        total = cute.make_rmem_tensor((SUM_VECTOR,), Float32)
        total.fill(0.0)
        for split in cutlass.range(splits, unroll=4):
            values = cute.make_rmem_tensor((SUM_VECTOR,), Float32)
            source = cute.local_tile(partials[split, None], (SUM_VECTOR,), (index,))
            cute.copy(atom, source, values)
            for i in cutlass.range_constexpr(SUM_VECTOR):
                total[i] = total[i] + values[i]
        flat = cute.make_tensor(dweight.iterator, cute.make_layout(size))
        cute.copy(store_atom(Float32, 128), total, cute.local_tile(flat, (SUM_VECTOR,), (index,)))
