"""Block-scaled operands on the device: words of codes and of scales as bf16, and where the scales of a row are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, Int64, cute

from fe_runtime.cute.convert import e2m1_to_bf16, e2m1_unordered, e4m3_to_bf16, e5m2_to_bf16, e8m0_to_bf16
from fe_runtime.cute.types import architecture_number

__all__ = ["ATOM_ROWS", "WORD_ROWS", "Format", "scale_atoms"]

ATOM_ROWS = 128
"""Rows of an atom of the scale layout; it holds four scales of each."""

WORD_ROWS = 32
"""Rows between those that have neighbouring words in an atom."""


@dataclass(frozen=True, slots=True)
class Format:
    """How an operand is stored: canonical dtype names of elements and scales, and elements per scale.

    ``hardware``: the architecture converts e4m3 codes itself.
    """

    element: str
    scale: str
    vec: int
    hardware: bool

    @staticmethod
    def of(arch: str, element: str, scale: str, vec: int) -> Format:
        """Return the format on an architecture such as ``"sm_90a"``."""
        return Format(element, scale, vec, architecture_number(arch) >= 89)

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return 4 if self.element == "float4_e2m1fn" else 8

    def values(self, codes: Int32) -> list[Int32]:
        """Return the values of a word of codes as words of two bf16."""
        if self.element == "float4_e2m1fn":
            return e2m1_to_bf16(codes)
        return list(e5m2_to_bf16(codes) if self.element == "float8_e5m2" else e4m3_to_bf16(codes, self.hardware))

    def unordered(self, codes: Int32) -> list[Int32]:
        """Return the same values, in an order that is always the same, and e2m1 values times 2^-126."""
        return e2m1_unordered(codes) if self.bits == 4 else self.values(codes)

    def factors(self, scales: Int32) -> list[Int32]:
        """Return the values of four scales as words of two bf16."""
        return list(e8m0_to_bf16(scales) if self.scale == "float8_e8m0fnu" else e4m3_to_bf16(scales, self.hardware))


def scale_atoms(scales: cute.Tensor, shape: tuple[Any, Any, Any], vec: int) -> cute.Tensor:
    """Return the scales of matrices (rows, columns, batches) as words (4, 32, column tiles, row tiles, batches).

    Byte b of word (q, i) of an atom belongs to row 32 q + i and block b. Only the start of ``scales`` is used.
    """
    rows, columns, batches = shape
    row_tiles, column_tiles = cute.ceil_div(rows, ATOM_ROWS), cute.ceil_div(columns, 4 * vec)
    words = ATOM_ROWS  # of four bytes, as many as an atom has rows
    line, matrix = Int64(column_tiles) * words, Int64(column_tiles) * row_tiles * words
    layout = cute.make_layout(
        (4, WORD_ROWS, column_tiles, row_tiles, batches),
        stride=(1, 4, words, cute.assume(line, divby=words), cute.assume(matrix, divby=words)),
    )
    return cute.make_tensor(cute.recast_ptr(scales.iterator, dtype=Int32), layout)
