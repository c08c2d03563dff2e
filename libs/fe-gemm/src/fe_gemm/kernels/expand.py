"""Expansion of a block-scaled operand to bf16 in memory, value by value exact, for a matrix product that follows.

The floor is each byte once: the codes, a scale for 16 or 32 of them, and two bytes for each element written. No thread
needs another one's data. Padding of the scales is read but never used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import BFloat16, Boolean, Int32, Int64, Uint8, cute

from fe_gemm.planning.expand import GROUP, TILE, Launch, Problem, split_config
from fe_runtime.cute.arguments import fake_stream, fake_vector
from fe_runtime.cute.convert import bf16_products, byte_of_each
from fe_runtime.cute.memory import access_bits, load_atom, store_atom

from .blocked import Format, scale_atoms
from .column_groups import Atoms, ColumnGroup
from .lines import ALIGNMENT, by_line, divided, workspace_matrices

__all__ = ["Setup", "build", "expanded_matrices", "fake_arguments", "launch_expand"]

STRIDE = TILE // GROUP
"""Lines between those of a group: 32, which is also the elements of a block where the lines are columns."""


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments: codes (R, C, L), scales (bytes,), workspace, for grouped columns the
    ends of the groups (E,), stream.

    Codes are bytes, two e2m1 codes in each: (R, C / 2, L) then. ``config`` is what
    :func:`fe_gemm.planning.expand.config` returns.
    """
    setup = Setup.of(arch, *split_config(config))
    problem = setup.problem

    @cute.jit
    def expand(codes: cute.Tensor, scales: cute.Tensor, workspace: cute.Tensor, *rest: Any) -> None:
        *offsets, stream = rest
        launch_expand(setup, codes, scales, expanded_matrices(problem, codes, workspace), stream, *offsets)

    ends = [cute.runtime.make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=4)]
    return expand, (*fake_arguments(problem), *(ends if problem.grouped else ()), fake_stream())


@dataclass(frozen=True, slots=True)
class Setup:
    """All that is static in a compilation."""

    problem: Problem
    launch: Launch
    format: Format

    @staticmethod
    def of(arch: str, problem: Problem, launch: Launch) -> Setup:
        """Return the setup for an architecture such as ``"sm_90a"``."""
        return Setup(problem, launch, Format.of(arch, problem.element, problem.scale, problem.vec))


def launch_expand(
    setup: Setup,
    codes: cute.Tensor,
    scales: cute.Tensor,
    out: cute.Tensor,
    stream: Any,
    offsets: cute.Tensor | None = None,
) -> None:
    """Launch the expansion of an operand; called by a launcher.

    Parameters
    ----------
    codes
        As for :func:`build`.
    scales
        Any view of the scales in the blocked layout; only its start is used, which is a multiple of 16 bytes.
    out
        bf16 matrices (R, C, L) of the operand's extents and major; lines and matrices at multiples of 16 bytes.
    offsets
        int32 (E,): the columns at which groups end, for grouped columns.
    """
    how = setup.launch
    lines, length, batches = by_line(out, setup.problem.major).shape
    spans, tiles = cute.ceil_div(length, how.span), cute.ceil_div(lines, TILE)
    divisors = [cute.fast_divmod_create_divisor_v2(number) for number in (spans, tiles)]
    expand_kernel(setup, codes, scales, out, *divisors, offsets).launch(
        grid=(spans * how.parts * tiles * batches, 1, 1),
        block=(how.threads, 1, 1),
        stream=stream,
        min_blocks_per_mp=how.blocks_per_sm,
        preferred_smem_carveout=-1,  # the driver's choice; without it the compiler would ask a GPU
    )


def expanded_matrices(problem: Problem, codes: cute.Tensor, workspace: cute.Tensor) -> cute.Tensor:
    """Return a workspace as the bf16 matrices (R, C, L) that the expansion of ``codes`` writes.

    Parameters
    ----------
    codes
        As for :func:`build`.
    workspace
        bf16, of the shape that :func:`fe_gemm.planning.expand.workspace_shape` returns, contiguous.
    """
    rows, held, batches = codes.shape
    return workspace_matrices(workspace, (rows, held * 8 // problem.bits, batches), problem.major)


@cute.kernel
def expand_kernel(
    setup: cutlass.Constexpr[Setup],
    codes: cute.Tensor,
    scales: cute.Tensor,
    out: cute.Tensor,
    spans: cute.FastDivmodDivisorV2,
    tiles: cute.FastDivmodDivisorV2,
    offsets: cute.Tensor | None,
) -> None:
    """Load all of a thread's codes and scales, then convert, multiply and store."""
    problem, how = setup.problem, setup.launch
    words = scale_atoms(scales, out.shape, problem.vec)
    share = Share.of(how, by_line(out, problem.major).shape, spans, tiles)
    group = None
    if cutlass.const_expr(problem.grouped):
        group = ColumnGroup.of(problem, out.shape, offsets, column_tile(setup, share))
        share = replace(share, exists=[exists & group.exists for exists in share.exists])
        codes = group.codes(codes)
    size = how.vector * problem.bits // 8
    packed = _load(by_line(codes, problem.major), share, size)
    atoms, out = Atoms(words, group), by_line(out, problem.major)
    fetch = _factors_of_rows if problem.major == "k" else _factors_of_columns
    factors = fetch(setup, atoms, share)
    vectors = _vectors(out, share, how.vector)
    for number in cutlass.range_constexpr(how.repeats * GROUP):
        scaled = _scaled(setup, packed[number], factors[number])
        _store(scaled, vectors[number], share.exists[number])


def _scaled(setup: Setup, codes: list[Int32], factors: list[Int32]) -> list[Int32]:
    """Return the values of a vector as words of two bf16."""
    values = [value for word in codes for value in setup.format.values(word)]
    return [bf16_products(value, factors[i % len(factors)]) for i, value in enumerate(values)]


@dataclass(frozen=True, slots=True)
class Share:
    """Which vectors are a thread's: in each line number ``index``, or ``safe_index`` to have one that exists.

    ``first`` is the place in the tile, below 32, of the first line of each repeat. ``exists`` has an entry for each
    vector: ``GROUP`` for each repeat.
    """

    tile: Int32
    first: list[Int32]
    index: Int32
    safe_index: Int32
    batch: Int32
    exists: list[Boolean]

    @staticmethod
    def of(how: Launch, shape: tuple[Any, Any, Any], spans: Any, tiles: Any) -> Share:
        """Return the share of the calling thread in (lines, length, batches)."""
        lines, length, _ = shape
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        rest, span = divmod(block, spans)
        rest, part = divided(rest, how.parts)
        batch, tile = divmod(rest, tiles)
        group, lane = divided(thread, how.across)
        first = [(part * how.repeats + repeat) * how.groups + group for repeat in range(how.repeats)]
        index, count = span * how.across + lane, divided(length, how.vector)[0]
        below = [lines - tile * TILE - i for i in first]
        exists = [(index < count) & (left > STRIDE * q) for left in below for q in range(GROUP)]
        return Share(tile, first, index, cutlass.min(index, count - 1), batch, exists)


def column_tile(setup: Setup, share: Share) -> Int32:
    """Return the number of the four blocks along the rows, those of an atom, in which a thread's vectors lie."""
    problem, how = setup.problem, setup.launch
    return divided(share.safe_index, 4 * problem.vec // how.vector)[0] if problem.major == "k" else share.tile


def _factors_of_rows(setup: Setup, atoms: Atoms, share: Share) -> list[list[Int32]]:
    """Return for each line, a row, the scale that its vector has, as a word of two bf16."""
    problem, how = setup.problem, setup.launch
    block, _ = divided(share.safe_index, problem.vec // how.vector)
    _, byte = divided(block, 4)
    atom = atoms.at(column_tile(setup, share), share.tile, share.batch)
    twice = 0x4400 + byte * 0x1111  # selects a byte of one word, then of another, each twice
    words = []
    for first in share.first:
        chunk = cute.make_rmem_tensor((4,), Int32)
        cute.copy(load_atom(Int32, 128), atom[None, first], chunk)
        words += [Int32(cute.arch.prmt(chunk[q], chunk[q + 1], twice)) for q in (0, 2)]
    return [[factor] for word in words for factor in setup.format.factors(word)]


def _factors_of_columns(setup: Setup, atoms: Atoms, share: Share) -> list[list[Int32]]:
    """Return for each line, a column, the scales that the rows of its vector have, as words of two bf16."""
    vector = setup.launch.vector
    row_tile, row = divided(share.safe_index * vector, TILE)
    q, place = divided(row, STRIDE)
    atom = atoms.at(column_tile(setup, share), row_tile, share.batch)
    near = cute.local_tile(atom[q, None], (vector,), (place // vector,))
    words = cute.make_rmem_tensor((vector,), Int32)
    cute.copy(load_atom(Int32, 32), near, words)
    found = []
    for byte in range(GROUP):
        fours = [byte_of_each([words[i + j] for j in range(4)], byte) for i in range(0, vector, 4)]
        found.append([factor for four in fours for factor in setup.format.factors(four)])
    return found * setup.launch.repeats  # in which the lines are in the same blocks


def _vectors(array: cute.Tensor, share: Share, size: int) -> list[cute.Tensor]:
    """Return a thread's vectors of an array (lines, length, batches), of ``size`` items each."""
    _, length, batches = array.shape
    line, one, matrix = array.stride
    step = 8 * ALIGNMENT // array.element_type.width
    apart, tile = (cute.assume(Int64(line) * lines, divby=step * lines) for lines in (STRIDE, TILE))
    count = cute.ceil_div(array.shape[0], TILE)
    layout = cute.make_layout((STRIDE, GROUP, count, length, batches), stride=(line, apart, tile, one, matrix))
    tiled = cute.make_tensor(array.iterator, layout)
    groups = [tiled[first, None, share.tile, None, share.batch] for first in share.first]
    groups = [cute.local_tile(group, (GROUP, size), (0, share.index)) for group in groups]
    return [group[q, None] for group in groups for q in range(GROUP)]


@cute.jit
def _load(codes: cute.Tensor, share: Share, size: cutlass.Constexpr[int]) -> list[list[Int32]]:
    """Load a thread's vectors of codes, ``size`` bytes each, as words. Those that do not exist are anything."""
    atom = load_atom(Uint8, access_bits(Uint8, size, ALIGNMENT))
    found = []
    for vector, exists in zip(_vectors(codes, share, size), share.exists, strict=True):
        values = cute.make_rmem_tensor((size,), Uint8)
        if exists:
            cute.copy(atom, vector, values)
        words = cute.recast_tensor(values, Int32)
        found.append([words[i] for i in range(size // 4)])
    return found


@cute.jit
def _store(words: list[Int32], vector: cute.Tensor, exists: Boolean) -> None:
    """Store a vector of bf16 if its place exists."""
    values = cute.make_rmem_tensor(vector.shape, BFloat16)
    target = cute.recast_tensor(values, Int32)
    for i, word in enumerate(words):
        target[i] = word
    if exists:
        cute.copy(store_atom(BFloat16, access_bits(BFloat16, cute.size(vector.shape), ALIGNMENT)), values, vector)


def fake_arguments(problem: Problem) -> tuple[Any, ...]:
    """Return stand-ins for codes, scales and workspace."""
    rows, columns, batches = (cute.sym_int() for _ in range(3))
    line, matrix = (cute.sym_int64(divisibility=ALIGNMENT) for _ in range(2))
    stride = (line, 1, matrix) if problem.major == "k" else (1, line, matrix)
    codes = cute.runtime.make_fake_tensor(Uint8, (rows, columns, batches), stride, assumed_align=ALIGNMENT)
    shape = (cute.sym_int64(), cute.sym_int(divisibility=8 * ALIGNMENT // BFloat16.width))
    workspace = cute.runtime.make_fake_compact_tensor(BFloat16, shape, stride_order=(1, 0), assumed_align=ALIGNMENT)
    return codes, fake_vector(Uint8, cute.sym_int64(), ALIGNMENT), workspace


expand_kernel.set_name_prefix("fe_gemm_expand", remove_cutlass_symbol=True, keep_mangled_name=False)
