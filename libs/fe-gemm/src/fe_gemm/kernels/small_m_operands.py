"""Operands of the product of a few block-scaled rows: weights on their way to a thread, tokens in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, Uint8, cute

from fe_gemm.planning.small_m import QUARTERS, SmallLaunch, SmallProblem
from fe_runtime.cute.convert import bf16_products
from fe_runtime.cute.memory import load_atom
from fe_runtime.cute.ring import ThreadRing

from .blocked import ATOM_ROWS, WORD_ROWS, Format, scale_atoms

__all__ = ["TO_UNIT", "TO_UNIT_FIRST", "Cursor", "Setup", "Weights", "Work", "widen_tokens"]

TO_UNIT, TO_UNIT_FIRST, TO_UNIT_LATER = 0x7E807E80, 0x7A807A80, 0x43804380
"""Twice 2^126, 2^118 and 2^8 in bf16."""


@dataclass(frozen=True, slots=True)
class Setup:
    """All that is static in a compilation."""

    problem: SmallProblem
    launch: SmallLaunch
    tokens: Format
    weights: Format

    @staticmethod
    def of(arch: str, problem: SmallProblem, launch: SmallLaunch) -> Setup:
        """Return the setup for an architecture such as ``"sm_90a"``."""
        elements = problem.token_element, problem.element
        formats = (Format.of(arch, element, problem.scale, problem.vec) for element in elements)
        return Setup(problem, launch, *formats)

    @property
    def blocks(self) -> int:
        """Blocks of tokens: 8 in each."""
        return self.problem.tokens // 8

    @property
    def shifts(self) -> bool:
        """Whether e2m1 values times 2^-126 are brought to their size by the scales, which are small enough for it.

        Those of the weights are taken times 2^118, those of the tokens times 2^8.
        """
        return self.problem.bits == 4 and self.problem.scale == "float8_e4m3fn"

    @property
    def scales(self) -> int:
        """Scales of a thread's part of a row."""
        return max(1, self.problem.per_lane // self.problem.vec)

    @property
    def pieces(self) -> int:
        """Pieces of 8 elements in a thread's part of a row."""
        return self.problem.per_lane // 8


@dataclass(frozen=True, slots=True)
class Work:
    """What a thread's warp has to do: tiles first, first + stride, ..., and in each ``steps`` steps of a slice of K.

    Parameters
    ----------
    slice, first_step, slice_steps
        The block's slice of K, where it starts, and its length, in steps.
    first_quarter, row
        The first quarter of a tile that is the warp's own, and where its 16 rows begin in each.
    depth_warp
        Number of the warp: steps depth_warp, depth_warp + depth_warps, ... of the slice are its own.
    g, t
        Lane 4 g + t.
    """

    slice: Int32
    first_step: Int32
    slice_steps: Int32
    first: Int32
    tiles: Int32
    stride: Int32
    steps: Int32
    first_quarter: Int32
    row: Int32
    depth_warp: Int32
    g: Int32
    t: Int32

    @staticmethod
    def of(setup: Setup, b: cute.Tensor, slices: Int32) -> Work:
        """Return the work of the calling thread."""
        how = setup.launch
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
        row_warp, depth_warp = warp % how.row_warps, warp // how.row_warps
        all_steps = cute.ceil_div(b.shape[1], 64)
        most = cute.ceil_div(all_steps, slices)
        slice_ = block % slices
        first_step = slice_ * most
        slice_steps = cutlass.max(cutlass.min(most, all_steps - first_step), 0)
        steps = (slice_steps - depth_warp + (how.depth_warps - 1)) // how.depth_warps
        tiles = cute.ceil_div(b.shape[0], ATOM_ROWS)
        return Work(
            slice_,
            first_step,
            slice_steps,
            block // slices,
            tiles,
            blocks // slices,
            cutlass.max(steps, 0),
            row_warp // 2 * how.quarters,
            row_warp % 2 * 16,
            depth_warp,
            lane // 4,
            lane % 4,
        )


class Cursor:
    """Where the copies of a warp are: the tile, and the number of the step among its own."""

    def __init__(self, tile: Int32, number: Int32) -> None:
        self.tile = tile
        self.number = number

    def next(self, work: Work) -> Cursor:
        """Return the place one step further."""
        last = Int32(self.number + 1 >= work.steps)
        return Cursor(self.tile + last * work.stride, (self.number + 1) * (1 - last))

    # What the kernel language asks of a value that loops carry.
    def __extract_mlir_values__(self) -> list[Any]:
        return [self.tile.ir_value(), self.number.ir_value()]

    def __new_from_mlir_values__(self, values: list[Any]) -> Cursor:
        return Cursor(Int32(values[0]), Int32(values[1]))


@dataclass(frozen=True, slots=True)
class Weights:
    """A thread's view of the weights: words (g, half, row warp, quarter, tile, word of K), and the atoms of scales."""

    setup: Setup
    codes: cute.Tensor
    atoms: cute.Tensor
    rows: Int32
    vectors: Int32
    work: Work

    @staticmethod
    def of(setup: Setup, b: cute.Tensor, sfb: cute.Tensor, work: Work) -> Weights:
        """Return the view of the calling thread."""
        problem = setup.problem
        rows, held, _ = b.shape
        pitch = Int64(b.stride[0])  # bytes; words below
        line = cute.assume(pitch // 4, divby=4)
        by = [cute.assume(line * size, divby=4 * size) for size in (8, 16, WORD_ROWS, ATOM_ROWS)]
        words = cute.recast_ptr(b.iterator, dtype=Int32)
        layout = cute.make_layout((8, 2, 2, QUARTERS, cute.ceil_div(rows, ATOM_ROWS), held // 4), stride=(line, *by, 1))
        atoms = scale_atoms(sfb, (rows, held * 8 // problem.bits, 1), problem.vec)
        return Weights(setup, cute.make_tensor(words, layout), atoms, rows, held // 16, work)

    def block(self, vector: Int32) -> Int32:
        """Return the number of the scale of a vector's first element."""
        return vector * self.setup.problem.per_lane // self.setup.problem.vec

    def fetch_first(self, ring: ThreadRing) -> Cursor:
        """Start to copy what has room in the ring but one stage; return where to go on."""
        work = self.work
        at = Cursor(work.first + Int32(work.steps == 0) * work.tiles, Int32(0))
        for stage in range(self.setup.launch.stages - 1):
            self.fetch(ring, at, Int32(stage))
            at = at.next(work)
        return at

    @cute.jit
    def fetch(self, ring: ThreadRing, at: Cursor, stage: Int32) -> None:
        """Start to copy a thread's codes and scales of a step, as a group. Zeros stand beyond the end of a row."""
        work = self.work
        step = work.first_step + work.depth_warp + at.number * self.setup.launch.depth_warps
        vector = step * 4 + work.t
        if at.tile < work.tiles:
            inside = vector < self.vectors
            quarters = cutlass.const_expr(self.setup.launch.quarters)
            first = at.tile * ATOM_ROWS + work.first_quarter * WORD_ROWS + work.row + work.g
            left = self.rows - first
            group = self.codes[work.g, None, work.row // 16, None, at.tile, None]
            group = cute.local_tile(group, (2, quarters, 4), (0, work.first_quarter // quarters, vector))
            for q in cutlass.range_constexpr(quarters):
                for half in cutlass.range_constexpr(2):
                    exists = inside & (left > q * WORD_ROWS + half * 8)
                    _copy_or_clear(ring, group[half, q, None], 2 * q + half, stage, exists)
            scales = self.atoms[None, None, self.block(vector) // 4, at.tile, 0]
            for half in cutlass.range_constexpr(2):
                source = scales[None, work.row + half * 8 + work.g]
                _copy_or_clear(ring, source, 2 * quarters + half, stage, inside)
        cute.arch.cp_async_commit_group()


def _copy_or_clear(ring: ThreadRing, source: cute.Tensor, number: int, stage: Int32, exists: Boolean) -> None:
    """Start to copy 16 bytes, or to clear the slot where the source does not exist (the address is not read then)."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[ring.slot(number, stage).iterator.toint(), source.iterator.toint(), Int32(exists) * Int32(16)],
    )


@cute.jit
def widen_tokens(
    setup: cutlass.Constexpr[Setup], a: cute.Tensor, sfa: cute.Tensor, tokens: cute.Tensor, work: Work
) -> None:
    """Store the tokens of the slice in shared memory as bf16, in the order of operands; zeros where there are none."""
    problem, how = setup.problem, setup.launch
    count, held, _ = a.shape
    vectors = held // 16
    atoms = scale_atoms(sfa, (count, held * 8 // problem.bits, 1), problem.vec)
    thread, _, _ = cute.arch.thread_idx()
    for index in cutlass.range(thread, work.slice_steps * (setup.blocks * 32), how.threads, unroll=4):
        lane, block, step = index % 32, index // 32 % setup.blocks, index // (32 * setup.blocks)
        token, vector = block * 8 + lane // 4, (work.first_step + step) * 4 + lane % 4
        exists = (token < count) & (vector < vectors)
        token, vector = cutlass.min(token, count - 1), cutlass.min(vector, vectors - 1)
        codes = cute.make_rmem_tensor((16,), Uint8)
        cute.copy(load_atom(Uint8, 128), cute.local_tile(a[token, None, 0], (16,), (vector,)), codes)
        first = vector * problem.per_lane // problem.vec
        scales = atoms[token // WORD_ROWS, token % WORD_ROWS, first // 4, 0, 0]
        words = _token_words(setup, cute.recast_tensor(codes, Int32), scales, first % 4)
        for piece in cutlass.range_constexpr(setup.pieces):
            target = tokens[None, lane, piece, block, step]
            for i in cutlass.range_constexpr(4):
                target[i] = cutlass.select_(exists, words[4 * piece + i], Int32(0))


def _token_words(setup: Setup, codes: cute.Tensor, scales: Int32, first: Int32) -> list[Int32]:
    """Return 16 bytes of a token's codes as bf16; ``first`` is the byte of ``scales`` for the first of them."""
    values = [value for i in range(4) for value in setup.tokens.unordered(codes[i])]
    if setup.problem.bits == 4:
        values = [bf16_products(value, TO_UNIT) for value in values]
    factors = []
    for block in range(setup.scales):
        pair = Int32(cute.arch.prmt(scales, scales, (first + block) * 0x1111))
        factors.append(setup.tokens.factors(pair)[0])
    if setup.shifts:
        factors = [bf16_products(factor, TO_UNIT_LATER) for factor in factors]
    each = len(values) // len(factors)
    return [bf16_products(value, factors[i // each]) for i, value in enumerate(values)]
