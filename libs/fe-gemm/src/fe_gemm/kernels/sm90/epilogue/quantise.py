"""Quantised results: recipe Q-NC, one scale for each 16 or 32 neighbouring columns of a row, in layout L-128x4.

The columns of a block of scales are in the registers of four neighbouring threads. Padding of the scales comes out as
zero by itself: outside the matrix all values are zero or NaN, and NaN does not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float16, Float32, Int32, Int64, Uint8, Uint16, cute

from fe_gemm.planning.problem import CELL
from fe_runtime.cute.rounding import mul_rn

from .cells import BLOCK, eight_bit_pair

__all__ = ["Quantiser", "scale_offset"]

_LARGEST = 3.4028234663852886e38
_RECIPROCAL = {"float8_e4m3fn": 0x3B124925, "float8_e5m2": 0x3C000000}
"""Bits of 1 / 448, rounded, and of 1 / 128."""
_ATOM_ROWS, _ATOM_SCALES, _ATOM_BYTES = 128, 4, 512


@dataclass(frozen=True, slots=True)
class Quantiser:
    """A thread's view of the scales of a matrix of ``rows`` x ``columns`` values."""

    dtype: str
    scale_dtype: str
    vector: int
    scales: cute.Tensor
    norm: Float32
    rows: Int32
    columns: Int32

    def quantise(self, values: cute.Tensor, row: Int32, cell: Int32, batch: Int32, leads: Boolean) -> None:
        """Turn a fragment of 64 columns into what is to be rounded to codes, and store its scales.

        ``row`` is the first of the thread's two rows; the thread that ``leads`` its four stores.
        """
        for half in range(2):
            word = Int32(0)
            for block in range(CELL // self.vector):
                first, end = (i * self.vector // BLOCK for i in (block, block + 1))
                scale, factor = self._scale(_largest(values, half, first, end))
                word = word | (scale << (8 * block))
                for side, b in _pairs(first, end):
                    values[side, half, b] = mul_rn(values[side, half, b], factor)
            self._store(word, row + 8 * half, cell * (CELL // self.vector), batch, leads)

    def _scale(self, largest: Float32) -> tuple[Int32, Float32]:
        """Return the code of the scale and the factor for the values of a block."""
        reciprocal = Int32(_RECIPROCAL[self.dtype]).bitcast(Float32)
        wanted = mul_rn(mul_rn(largest, reciprocal), self.norm)
        code, inverse = _e8m0(wanted) if self.scale_dtype == "float8_e8m0fnu" else _e4m3(wanted)
        return code, cute.arch.fmin(mul_rn(self.norm, inverse), Float32(_LARGEST))

    @cute.jit
    def _store(self, word: Int32, row: Int32, scale: Int32, batch: Int32, leads: Boolean) -> None:
        """Store the scales of a row of a cell, those from number ``scale`` on, unless they lie beyond all atoms."""
        row_atoms = cute.ceil_div(self.rows, _ATOM_ROWS)
        scale_atoms = cute.ceil_div(cute.ceil_div(self.columns, self.vector), _ATOM_SCALES)
        if leads and row < row_atoms * _ATOM_ROWS and scale < scale_atoms * _ATOM_SCALES:
            offset = scale_offset(row, scale, Int64(batch), row_atoms, scale_atoms)
            kind, value = ("b32", word) if CELL // self.vector == 4 else ("b16", Uint16(word))
            cute.arch.inline_ptx(
                f"st.global.{kind} [{{$r0}}], {{$r1}};", read_only_args=[self.scales.iterator.toint() + offset, value]
            )


def scale_offset(row: Any, scale: Any, batch: Any, row_atoms: Any, scale_atoms: Any) -> Any:
    """Return the byte offset of a scale in layout L-128x4."""
    atom = (batch * row_atoms + row // _ATOM_ROWS) * scale_atoms + scale // _ATOM_SCALES
    inside = row % 32 * 16 + row // 32 % 4 * 4 + scale % _ATOM_SCALES
    return atom * _ATOM_BYTES + inside


def _largest(values: cute.Tensor, half: int, first: int, end: int) -> Float32:
    """Return the largest magnitude of a row in some blocks, over four threads; NaN does not count."""
    largest = Float32(0.0)
    for side, block in _pairs(first, end):
        largest = cute.arch.fmax(largest, cute.math.absf(values[side, half, block]))
    return cute.arch.warp_reduction(largest, cute.arch.fmax, threads_in_group=4)


def _e8m0(wanted: Float32) -> tuple[Int32, Float32]:
    """Return the code of the smallest power of two from ``wanted`` on, between 2^-127 and 2^127, and its inverse."""
    bits = wanted.bitcast(Int32)
    code = cutlass.min((bits + 0x7FFFFF) >> 23, Int32(254)) * Int32(bits > 0x400000)
    inverse = cutlass.max((254 - code) << 23, Int32(0x400000))
    return code, inverse.bitcast(Float32)


def _e4m3(wanted: Float32) -> tuple[Int32, Float32]:
    """Return the e4m3 code of the scale and its inverse, NaN for zero: a minimum with that gives the other value.

    The correction makes the approximate reciprocal of a number of four bits the rounded one.
    """
    pair = eight_bit_pair("float8_e4m3fn", wanted, Float32(0.0))
    halves = cute.arch.inline_ptx("cvt.rn.f16x2.e4m3x2 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[pair])
    scale = Uint16(halves & 0xFFFF).bitcast(Float16).to(Float32)
    guess = cute.math.rcp(scale, approx=True, ftz=True)
    inverse = cute.math.fma(guess, cute.math.fma(-scale, guess, Float32(1.0)), guess)
    return Int32(Uint8(pair & 0xFF)), inverse


def _pairs(first: int, end: int) -> list[tuple[int, int]]:
    return [(side, block) for block in range(first, end) for side in range(2)]
