"""What the kernels over (tokens, heads, channels) share: places in a tile, rows of memory, the rotation of the tail.

Functions marked ``cute.jit`` branch on the device; the others only compose while compiling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import CopyG2ROp, CopyR2GOp

from fe_rope.launch import TAIL, Launch, Problem
from fe_runtime.cute.memory import access_bits, prefetch
from fe_runtime.cute.rounding import bf16_values, bf16_word, fma_rn, mul_rn

__all__ = ["Place", "Tables", "fake_array", "grid", "load", "places", "prefetch_tile", "rotate", "store", "words"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a vector of a thread lies: all indices are within the array, also those of a vector that does not exist.

    Places of one ``column`` object have the same column; places of one ``table`` number belong to one token.
    """

    token: Int32
    head: Int32 | int
    column: Int32
    exists: Boolean | bool
    table: int


def places(problem: Problem, launch: Launch, tokens: Int64) -> list[Place]:
    """Return the places of a thread's vectors in the tile of its block."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    rest, column_tile = _divided(block, launch.vector_tiles(problem))
    token_tile, head_tile = _divided(rest, launch.head_tiles(problem))
    lines = _lines(launch, thread)
    columns = [_Index.of(column, column_tile, launch.vectors, problem.vectors) for column in _columns(launch, thread)]
    found = []
    for j, (token, head, table) in enumerate(lines):
        column = columns[j % len(columns)]
        heads = _Index.of(head, head_tile, launch.heads, problem.heads)
        token = _Index.of(token, token_tile, launch.tokens, None if launch.tokens == 1 else Int32(tokens))
        slot = True if launch.threads * (j + 1) <= launch.tile else _slot(launch, thread, j) < launch.tile
        exists = _all([slot, column.exists, heads.exists, token.exists])
        found.append(Place(token.value, heads.value, column.value, exists, table))
    return found


@dataclass(frozen=True, slots=True)
class _Index:
    """An index that is clamped to its extent, and whether it had to be."""

    value: Int32 | int
    exists: Boolean | bool

    @staticmethod
    def of(index: Int32 | int, tile: Int32 | int, size: int, extent: Int32 | int | None) -> _Index:
        """Return number ``index`` of a tile of ``size``; ``extent`` ``None``: every tile is full."""
        value = index if isinstance(tile, int) and tile == 0 else index + tile * size
        if extent is None or (isinstance(extent, int) and extent % size == 0):
            return _Index(value, True)
        return _Index(cutlass.min(value, extent - 1), value < extent)


def grid(problem: Problem, launch: Launch, tokens: Int64) -> Int32:
    """Return the number of blocks."""
    return Int32(cute.ceil_div(tokens, launch.tokens)) * (launch.head_tiles(problem) * launch.vector_tiles(problem))


@cute.jit
def prefetch_tile(x: cute.Tensor, problem: cutlass.Constexpr[Problem], launch: cutlass.Constexpr[Launch]) -> None:
    """Bring the tile of a later block to the second-level cache: a run of each token, by a thread of its own."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    if thread < launch.tokens:
        token_tile, head_tile = _divided(block + launch.prefetch, launch.head_tiles(problem))
        token = token_tile * launch.tokens + thread
        if token < x.shape[0]:
            first = row(x, token, head_tile * launch.heads if problem.heads > 1 else 0)
            prefetch(cute.make_tensor(first.iterator, cute.make_layout((launch.heads * problem.columns,))))


def row(x: cute.Tensor, token: Int32, head: Int32 | int) -> cute.Tensor:
    """Return the channels of one head of a token."""
    if cute.rank(x) == 2:
        return x[Int64(token), None]
    return x[Int64(token), head, None]


def load(problem: Problem, x: cute.Tensor, place: Place, alignment: int, constant: bool) -> cute.Tensor:
    """Load a vector into registers. ``constant``: nobody writes the array while the kernel runs."""
    source = cute.local_tile(row(x, place.token, place.head), (problem.vector,), (place.column,))
    return _loaded(source, alignment, constant)


@cute.jit
def store(
    values: cute.Tensor,
    out: cute.Tensor,
    place: Place,
    problem: cutlass.Constexpr[Problem],
    alignment: cutlass.Constexpr[int],
) -> None:
    """Store a vector if its place exists."""
    atom = cute.make_copy_atom(
        CopyR2GOp(), BFloat16, num_bits_per_copy=access_bits(BFloat16, problem.vector, alignment)
    )
    if cutlass.const_expr(place.exists is True):
        cute.copy(atom, values, _target(problem, out, place))
    else:
        if place.exists:
            cute.copy(atom, values, _target(problem, out, place))


def words(values: cute.Tensor) -> cute.Tensor:
    """Return registers of bf16 values as words of two."""
    return cute.recast_tensor(values, Int32)


Tables = Callable[[Place], tuple[cute.Tensor, cute.Tensor]]
"""Returns the (channels / 2,) cosines and sines of a place's token."""


@cute.jit
def rotate(
    shares: list[cute.Tensor],
    where: list[Place],
    problem: cutlass.Constexpr[Problem],
    tables: cutlass.Constexpr[Tables],
    alignment: cutlass.Constexpr[int],
) -> None:
    """Rotate those vectors of a thread that lie in the tail, in their registers.

    ``a, b`` neighbours, ``c, s`` their table entries: ``bf16(fma(a, c, -RN(b*s)))`` and ``bf16(fma(b, c, RN(a*s)))``.
    """
    first = cutlass.const_expr((problem.columns - TAIL) // problem.vector)
    for column, together in _by_column(shares, where):
        if column >= first:
            known: dict[int, tuple[cute.Tensor, cute.Tensor]] = {}
            for values, place in together:
                if cutlass.const_expr(place.table not in known):
                    known[place.table] = _table_entries(problem, tables, place, column - first, alignment)
                _rotate_vector(words(values), *known[place.table])


def fake_array(problem: Problem, tokens: Any, alignment: int, packed: bool) -> cute.Tensor:
    """Stand in for an array (tokens, heads, channels), or (tokens, channels), of any stride between tokens.

    ``packed``: the heads lie side by side. The stride of a single head says nothing, so it may be anything.
    """
    step = max(1, 8 * alignment // BFloat16.width)
    token_stride = cute.sym_int64(divisibility=step)
    if problem.rank == 2:
        shape, stride = (tokens, problem.columns), (token_stride, 1)
    else:
        single = problem.heads == 1
        head_stride = problem.columns if packed and not single else cute.sym_int64(divisibility=1 if single else step)
        shape, stride = (tokens, problem.heads, problem.columns), (token_stride, head_stride, 1)
    return cute.runtime.make_fake_tensor(BFloat16, shape, stride, assumed_align=alignment)


def _columns(launch: Launch, thread: Int32) -> list[Int32]:
    """Return the column of each of a thread's vectors within the tile; one for all where it is always the same."""
    if launch.threads % launch.vectors == 0:
        return [_divided(thread, launch.vectors)[1]]
    return [_divided(_slot(launch, thread, j), launch.vectors)[1] for j in range(launch.count)]


def _lines(launch: Launch, thread: Int32) -> list[tuple[Int32 | int, Int32 | int, int]]:
    """Return token and head of each of a thread's vectors within the tile, and the number of its table."""
    found: list[tuple[Int32 | int, Int32 | int, int]] = []
    whole, some = launch.threads % launch.vectors == 0, launch.threads // launch.vectors
    first, _ = _divided(thread, launch.vectors)
    for j in range(launch.count):
        line = first + j * some if whole else _divided(_slot(launch, thread, j), launch.vectors)[0]
        if launch.threads * (j + 1) > launch.tile:  # beyond the tile the last line is read again
            line = cutlass.min(line, launch.tokens * launch.heads - 1)
        if launch.tokens == 1:
            found.append((0, line, 0))
        elif whole and launch.heads % some == 0:  # all threads are in one token
            token = j * some // launch.heads
            found.append((token, first + j * some % launch.heads, token))
        else:
            found.append((*_divided(line, launch.heads), j))
    return [(token, 0 if launch.heads == 1 else head, table) for token, head, table in found]


def _all(conditions: list[Boolean | bool]) -> Boolean | bool:
    result: Boolean | bool = True
    for condition in conditions:
        if condition is not True:
            result = condition if result is True else result & condition
    return result


def _slot(launch: Launch, thread: Int32, j: int) -> Int32:
    return thread + j * launch.threads


def _divided(value: Int32, divisor: int) -> tuple[Int32, Int32 | int]:
    """Return quotient and remainder of a number >= 0."""
    if divisor == 1:
        return value, 0
    if divisor & (divisor - 1) == 0:
        return value >> (divisor.bit_length() - 1), value & (divisor - 1)
    quotient = value // divisor
    return quotient, value - quotient * divisor


def _by_column(shares: list[cute.Tensor], where: list[Place]) -> list[tuple[Int32, list[tuple[cute.Tensor, Place]]]]:
    """Return a thread's vectors with their places, those of one column together."""
    found: dict[int, tuple[Int32, list[tuple[cute.Tensor, Place]]]] = {}
    for values, place in zip(shares, where, strict=True):
        found.setdefault(id(place.column), (place.column, []))[1].append((values, place))
    return list(found.values())


def _loaded(source: cute.Tensor, alignment: int, constant: bool) -> cute.Tensor:
    dtype, count = source.element_type, cute.size(source.shape)
    bits = access_bits(dtype, count, alignment)
    atom = cute.make_copy_atom(CopyG2ROp(), dtype, num_bits_per_copy=bits, invariant=constant)
    values = cute.make_rmem_tensor((count,), dtype)
    cute.copy(atom, source, values)
    return values


def _target(problem: Problem, out: cute.Tensor, place: Place) -> cute.Tensor:
    return cute.local_tile(row(out, place.token, place.head), (problem.vector,), (place.column,))


def _table_entries(
    problem: Problem, tables: Tables, place: Place, index: Int32, alignment: int
) -> tuple[cute.Tensor, cute.Tensor]:
    """Load the cosines and sines of a vector, number ``index`` of the tail."""
    pairs = problem.vector // 2
    cosine, sine = (_loaded(cute.local_tile(table, (pairs,), (index,)), alignment, True) for table in tables(place))
    return cosine, sine


def _rotate_vector(values: cute.Tensor, cosine: cute.Tensor, sine: cute.Tensor) -> None:
    for i in range(cute.size(values.shape)):
        values[i] = _rotated(values[i], cosine[i], sine[i])


def _rotated(word: Int32, c: Float32, s: Float32) -> Int32:
    a, b = bf16_values(word)
    return bf16_word(fma_rn(a, c, -mul_rn(b, s)), fma_rn(b, c, mul_rn(a, s)))
