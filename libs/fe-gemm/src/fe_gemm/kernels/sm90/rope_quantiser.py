"""What follows the product of ``gemm_proj_rope_mxfp8``: a head's features rotated and quantised in both directions.

A warp group has 64 tokens and the 192 features of a head in its accumulators, each warp 16 tokens. A thread first
trades with the three others of its two rows: in each row it then holds 16 neighbours of every 64 features, rounded to
bf16, and so, of the last 64, eight whole pairs. Thus it rotates pairs, and writes codes, with neighbours side by side.

The scale of a token's 32 features needs two or four threads. That of 32 tokens at a feature needs two warps: a warp
finds the largest magnitudes over its 16 tokens, each thread those of six features, and trades them with its partner
through shared memory; then every thread takes the factors of its features from there. Values stay in registers as they
are, so both directions quantise the same fp32 numbers.

Codes are staged in shared memory and leave by TMA, which writes nothing beyond the last token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint8, Uint16, cute
from cutlass.cute.nvgpu import cpasync

from fe_gemm.planning.proj_rope import BLOCK, HEAD
from fe_gemm.planning.tiles import CELL_ROWS, CONSUMERS
from fe_runtime.cute.convert import e4m3_pair
from fe_runtime.cute.memory import load_atom
from fe_runtime.cute.rounding import bf16_values, mul_rn
from fe_runtime.cute.tma import store_atom
from fe_runtime.cute.wgmma import WARP_GROUP, fragment_row

from .parts import Tile
from .rope_values import (
    Values,
    chosen,
    halved,
    larger_pair,
    magnitudes,
    or_zero,
    rounded_words,
    row_maxima,
    scale,
    traded,
)

__all__ = ["RopeQuantiser", "Sheets", "Tables"]

HEAD_CELLS = HEAD // 64
HALF = 32
"""Features of a head that come from the first, or the second, of the rotated pairs' results."""
WARPS = CONSUMERS * WARP_GROUP // 32
_FIRST_BARRIER = 1  # number 0 is the barrier of the whole block


@dataclass(frozen=True, slots=True)
class Sheets:
    """What leaves: codes and scales, by rows and by columns, all bytes.

    The codes, (T, N), as TMA copies with the arrays as TMA sees them; the scales as (T, 6 H) and (T/32, N).
    """

    row_atom: cute.CopyAtom
    row_codes: cute.Tensor
    row_scales: cute.Tensor
    column_atom: cute.CopyAtom
    column_codes: cute.Tensor
    column_scales: cute.Tensor

    @staticmethod
    def atoms(codes: cute.Tensor) -> tuple[Any, ...]:
        """Return the TMA copy of codes (T, N), 64 tokens of a head at a time, and the array as TMA sees it."""
        return store_atom(codes, cute.make_layout((CELL_ROWS, HEAD), stride=(HEAD, 1)), (CELL_ROWS, HEAD))


@dataclass(frozen=True, slots=True)
class Tables:
    """Cosines and sines, (T, 64) bf16."""

    cos: cute.Tensor
    sin: cute.Tensor

    def load(self, entries: cute.Tensor, token: Int32, quarter: Int32) -> None:
        """Load eight entries of each half of both tables, as words of two: cos, sin, then their second halves."""
        row = Int64(cutlass.min(token, self.cos.shape[0] - 1))  # beyond the last token any entry will do
        for i, table in enumerate((self.cos, self.sin, self.cos, self.sin)):
            piece = cute.local_tile(table[row, None], (8,), (4 * (i // 2) + quarter,))
            cute.copy(load_atom(BFloat16, 128), piece, cute.recast_tensor(entries[None, i], BFloat16))


@dataclass(frozen=True, slots=True)
class Shared:
    """Shared memory: codes (64, 192, directions, warp groups); a number for each feature and warp, (192, warps)."""

    codes: cute.Tensor
    maxima: cute.Tensor
    factors: cute.Tensor

    @classmethod
    def allocate(cls, allocator: Any) -> Shared:
        """Take it from a shared-memory allocator."""
        codes = cute.make_layout(
            (CELL_ROWS, HEAD, 2, CONSUMERS), stride=(HEAD, 1, CELL_ROWS * HEAD, 2 * CELL_ROWS * HEAD)
        )
        numbers = cute.make_layout((HEAD, WARPS))
        return cls(
            allocator.allocate_tensor(Uint8, codes, byte_alignment=128),
            *(allocator.allocate_tensor(Float32, numbers, byte_alignment=128) for _ in range(2)),
        )


@dataclass(frozen=True, slots=True)
class RopeQuantiser:
    """A thread's view: finishes the accumulators of its warp group.

    ``staged`` are the staged codes as the two TMA copies see them, (copy, direction), ``targets`` the arrays (copy, row
    of cells, head) of both directions. ``entries`` are registers for what :meth:`Tables.load` loads, (4, 4, 2): words,
    pieces, and the thread's two tokens.
    """

    sheets: Sheets
    tables: Tables
    shared: Shared
    staged: tuple[cute.Tensor, cute.Tensor]
    targets: tuple[cute.Tensor, cute.Tensor]
    entries: cute.Tensor
    group: Int32
    thread: Int32

    @classmethod
    def of(cls, sheets: Sheets, tables: Tables, shared: Shared, group: Int32, thread: Int32) -> RopeQuantiser:
        """Return the view of a thread of a warp group."""
        codes = shared.codes[None, None, None, group]
        pairs = [
            cpasync.tma_partition(
                atom,
                0,
                cute.make_layout(1),
                cute.group_modes(codes, 0, 2),
                cute.group_modes(cute.local_tile(array, (CELL_ROWS, HEAD), (None, None)), 0, 2),
            )
            for atom, array in (
                (sheets.row_atom, sheets.row_codes),
                (sheets.column_atom, sheets.column_codes),
            )
        ]
        staged, targets = zip(*pairs, strict=True)
        entries = cute.make_rmem_tensor((4, 4, 2), Int32)
        return cls(sheets, tables, shared, staged, targets, entries, group, thread)

    def begin(self, tile: Tile) -> None:
        """Load the entries of the tables while the product is computed."""
        for half in range(2):
            self.tables.load(self.entries[None, None, half], self._token(tile) + 8 * half, self._quarter)

    def finish(self, accumulator: cute.Tensor, tile: Tile) -> None:
        """Rotate, quantise and store the 64 tokens of a tile for the head that it begins in."""
        head = tile.column // HEAD_CELLS
        token = self._token(tile)
        values = self._rotated(accumulator)
        self._offer_maxima(values)
        maxima = [row_maxima(part) for part in values]
        self._wait_for_buffers()
        self._stage_rows(values, [self._store_row_scales(maxima[i], token + 8 * i, head) for i in (0, 1)])
        self._share_factors(token, head)
        self._stage_columns(values)
        self._hand_over(tile.row // CELL_ROWS, head)

    @cute.jit
    def finish_all(self) -> None:
        """Wait until nothing is read from shared memory any more."""
        if self._issues:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @property
    def _lane(self) -> Int32:
        return self.thread % 32

    @property
    def _quarter(self) -> Int32:
        """Which of the four threads that share rows."""
        return self.thread % 4

    @property
    def _warp(self) -> Int32:
        return self.group * (WARP_GROUP // 32) + self.thread // 32

    @property
    def _issues(self) -> Boolean:
        return cute.arch.make_warp_uniform(self.thread // 32) == 0

    def _token(self, tile: Tile) -> Int32:
        """Return the first of the thread's two tokens; the other one is 8 further."""
        return tile.row + fragment_row(self.thread)

    def _rotated(self, accumulator: cute.Tensor) -> list[Values]:
        """Return the values of both tokens."""
        return [
            Values.of(
                [traded(rounded_words(accumulator, half, third), self._quarter) for third in range(3)],
                [[self.entries[word, piece, half] for word in range(4)] for piece in range(4)],
            )
            for half in (0, 1)
        ]

    def _offer_maxima(self, values: list[Values]) -> None:
        """Write the largest magnitudes over the warp's 16 tokens, of six features for each thread."""
        plain = [larger_pair(magnitudes(a), magnitudes(b)) for a, b in zip(*(v.plain for v in values), strict=True)]
        rotated = [
            cute.arch.fmax(cute.math.absf(a), cute.math.absf(b))
            for a, b in zip(*(v.rotated for v in values), strict=True)
        ]
        for distance in (16, 8, 4):
            plain = halved(plain, distance, self._lane, larger_pair)
            rotated = halved(rotated, distance, self._lane, cute.arch.fmax)
        numbers = [*(number for word in plain for number in bf16_values(word)), *rotated]
        _write_numbers(self.shared.maxima, self._warp, self._places, [or_zero(number) for number in numbers])

    @property
    def _places(self) -> tuple[Int32, Int32]:
        """The thread's own features: the first of four neighbours, and, among the rotated ones, of two."""
        high, middle, low = (self._lane >> bit & 1 for bit in (4, 3, 2))
        plain = 64 * high + 16 * self._quarter + 8 * middle + 4 * low
        rotated = 128 + HALF * high + 8 * self._quarter + 4 * middle + 2 * low
        return plain, rotated

    @cute.jit
    def _wait_for_buffers(self) -> None:
        """Let all threads of the group wait until all have offered their maxima, and the staged codes have left."""
        if self._issues:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        self._barrier()

    def _store_row_scales(self, largest: list[Float32], token: Int32, head: Int32) -> list[Float32]:
        """Store the six scales of a token; return the factors of the thread's runs.

        ``largest`` is what :func:`~.rope_values.row_maxima` returned.
        """
        scales = [scale(value) for value in largest]
        codes = [code for code, _ in scales]
        own = codes[0] | codes[1] << 8
        other = cute.arch.shuffle_sync_bfly(own, 2)
        # The lower two threads have blocks 0 and 2, the upper two 1 and 3.
        upper = self._quarter >= 2
        even, odd = chosen(upper, other, own), chosen(upper, own, other)
        first, second = (even & 0xFF) | (odd & 0xFF) << 8, even >> 8 | (odd & 0xFF00)
        word = chosen(self._quarter == 0, first, chosen(self._quarter == 1, second, codes[2] | codes[3] << 8))
        array, column = self.sheets.row_scales, head * (HEAD // BLOCK) + 2 * self._quarter
        exists = (token < array.shape[0]) & (column < array.shape[1]) & (self._quarter < 3)
        _store_bytes(array, exists, token, column, Uint16(word))
        return [factor for _, factor in scales]

    def _share_factors(self, token: Int32, head: Int32) -> None:
        """Make scales of the maxima of two warps; store them, and tell the own warp their factors."""
        places = self._places
        mine, others = (_read_numbers(self.shared.maxima, self._warp ^ other, places) for other in (0, 1))
        scales = [scale(cute.arch.fmax(a, b)) for a, b in zip(mine, others, strict=True)]
        codes = [code for code, _ in scales]
        _write_numbers(self.shared.factors, self._warp, places, [factor for _, factor in scales])
        array, block = self.sheets.column_scales, token // BLOCK
        exists = (self._warp % 2 == 0) & (block < array.shape[0]) & (head * HEAD < array.shape[1])
        four = codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24
        _store_bytes(array, exists, block, head * HEAD + places[0], four)
        _store_bytes(array, exists, block, head * HEAD + places[1], Uint16(codes[4] | codes[5] << 8))
        cute.arch.sync_warp()

    def _stage_rows(self, values: list[Values], factors: list[list[Float32]]) -> None:
        """Write the codes of both tokens with the factor of each run."""
        for half in (0, 1):
            for start, run, factor in zip(self._starts(half, 0), values[half].runs, factors[half], strict=True):
                _write_codes(start, [mul_rn(number, factor) for number in run])

    def _stage_columns(self, values: list[Values]) -> None:
        """Write the codes of both tokens with the factor of each feature."""
        for run, feature in enumerate(self._features):
            count = 16 if run < 2 else 8
            factors = _read_run(self.shared.factors, self._warp, feature, count)
            for half in (0, 1):
                products = [mul_rn(a, b) for a, b in zip(values[half].runs[run], factors, strict=True)]
                _write_codes(self._starts(half, 1)[run], products)

    @property
    def _features(self) -> list[Int32]:
        """The first feature of each of the thread's runs of neighbours: 16, 16, 8 and 8 features long."""
        quarter = self._quarter
        return [16 * quarter, 64 + 16 * quarter, 128 + 8 * quarter, 160 + 8 * quarter]

    def _starts(self, half: int, direction: int) -> list[Int32]:
        """Return the addresses of the thread's runs in the staged codes."""
        codes = self.shared.codes[None, None, direction, self.group]
        line = codes.iterator.toint() + (fragment_row(self.thread) + 8 * half) * HEAD
        return [line + feature for feature in self._features]

    @cute.jit
    def _hand_over(self, row: Int32, head: Int32) -> None:
        """Start the copies to global memory once all threads of the group have staged their codes."""
        cute.arch.fence_proxy("async.shared", space="cta")
        self._barrier()
        if self._issues:
            atoms = (self.sheets.row_atom, self.sheets.column_atom)
            for direction in cutlass.range_constexpr(2):
                target = self.targets[direction][None, row, head]
                cute.copy(atoms[direction], self.staged[direction][None, direction], target)
            cute.arch.cp_async_bulk_commit_group()

    def _barrier(self) -> None:
        cute.arch.barrier(barrier_id=_FIRST_BARRIER + self.group, number_of_threads=WARP_GROUP)


def _write_codes(address: Int32, numbers: list[Float32]) -> None:
    """Write 8 or 16 codes to shared memory."""
    pairs = [Int32(e4m3_pair(numbers[i], numbers[i + 1], True)) for i in range(0, len(numbers), 2)]
    words = [pairs[i] | pairs[i + 1] << 16 for i in range(0, len(pairs), 2)]
    _store_shared(address, words)


def _write_numbers(array: cute.Tensor, warp: Int32, places: tuple[Int32, Int32], numbers: list[Float32]) -> None:
    start = array.iterator.toint() + 4 * HEAD * warp
    bits = [number.bitcast(Int32) for number in numbers]
    _store_shared(start + 4 * places[0], bits[:4])
    _store_shared(start + 4 * places[1], bits[4:])


def _read_numbers(array: cute.Tensor, warp: Int32, places: tuple[Int32, Int32]) -> list[Float32]:
    return [*_read_run(array, warp, places[0], 4), *_read_run(array, warp, places[1], 2)]


def _read_run(array: cute.Tensor, warp: Int32, feature: Int32, count: int) -> list[Float32]:
    """Read the numbers of neighbouring features, up to four at a time."""
    start, step = array.iterator.toint() + 4 * (HEAD * warp + feature), min(count, 4)
    names = ", ".join(f"{{$w{i}}}" for i in range(step))
    found = []
    for first in range(0, count, step):
        found += cute.arch.inline_ptx(
            f"ld.shared.v{step}.f32 {{{names}}}, [{{$r0}}];",
            write_only_types=[Float32] * step,
            read_only_args=[start + 4 * first],
        )
    return found


def _store_shared(address: Int32, words: list[Int32]) -> None:
    """Write two or four words to shared memory."""
    names = ", ".join(f"{{$r{i + 1}}}" for i in range(len(words)))
    cute.arch.inline_ptx(f"st.shared.v{len(words)}.b32 [{{$r0}}], {{{names}}};", read_only_args=[address, *words])


@cute.jit
def _store_bytes(array: cute.Tensor, exists: Boolean, row: Int32, column: Int32, value: Int32 | Uint16) -> None:
    """Store a word of four or two bytes at a place of a byte matrix without gaps, if it exists."""
    if exists:
        address = array.iterator.toint() + (Int64(row) * array.shape[1] + column)
        kind = cutlass.const_expr("b32" if value.width == 32 else "b16")
        cute.arch.inline_ptx(f"st.global.{kind} [{{$r0}}], {{$r1}};", read_only_args=[address, value])
