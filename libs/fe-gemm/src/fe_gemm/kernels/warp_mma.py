"""Products of 16-row tiles by one warp (``mma.sync``, sm_80 and later), and the numbers that they take.

Lane ``4 g + t`` (g < 8, t < 4) holds, of

* C (16, 8) in float32: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1);
* A (16, 16) in bf16 or float16, pairs along the second dimension: (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8);
* B (16, 8) in bf16 or float16, pairs along the first dimension: (2t, g), (2t + 8, g);
* A (16, 8) in TF32: (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4);
* B (8, 8) in TF32: (t, g), (t + 4, g).
"""

from __future__ import annotations

from collections.abc import Sequence

import cutlass
from cutlass import Float32, Int32, cute

from fe_runtime.cute.rounding import bf16_word, sub_rn

__all__ = ["bf16_terms", "high_halves", "low_halves", "mma_bf16", "mma_f16", "mma_tf32", "tf32"]


def mma_bf16(a: Sequence[Int32], b: Sequence[Int32], c: Sequence[Float32]) -> tuple[Float32, ...]:
    """Return ``A B + C`` of bf16 tiles (16, 16) and (16, 8)."""
    return _mma("m16n8k16.row.col.f32.bf16.bf16.f32", a, b, c)


def mma_f16(a: Sequence[Int32], b: Sequence[Int32], c: Sequence[Float32]) -> tuple[Float32, ...]:
    """Return ``A B + C`` of float16 tiles (16, 16) and (16, 8), which lie like those of bf16."""
    return _mma("m16n8k16.row.col.f32.f16.f16.f32", a, b, c)


def mma_tf32(a: Sequence[Int32], b: Sequence[Int32], c: Sequence[Float32]) -> tuple[Float32, ...]:
    """Return ``A B + C`` of TF32 tiles (16, 8) and (8, 8)."""
    return _mma("m16n8k8.row.col.f32.tf32.tf32.f32", a, b, c)


def tf32(value: Float32) -> Int32:
    """Return a value rounded to TF32: to nearest, ties away from zero."""
    return cute.arch.inline_ptx("cvt.rna.tf32.f32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def bf16_terms(low: Float32, high: Float32) -> tuple[Int32, Int32]:
    """Return two values as words of bf16 pairs that add up to them within 2^-15 of each: the larger terms first.

    The first term is the value cut off, so the rest is exact in float32; infinity leaves no rest.
    """
    words = [value.bitcast(Int32) for value in (low, high)]
    rests = []
    for value, word in zip((low, high), words, strict=True):
        cut = (word & -0x10000).bitcast(Float32)
        rests.append(Float32(cutlass.select_(value == cut, Float32(0.0), sub_rn(value, cut))))
    return high_halves(*words), bf16_word(*rests)


def low_halves(low: Int32, high: Int32) -> Int32:
    """Return the word of the low halves of two words."""
    return _permuted(low, high, 0x5410)


def high_halves(low: Int32, high: Int32) -> Int32:
    """Return the word of the high halves of two words."""
    return _permuted(low, high, 0x7632)


def _permuted(low: Int32, high: Int32, selector: int) -> Int32:
    return cute.arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector};", write_only_types=[Int32], read_only_args=[low, high]
    )


def _mma(shape: str, a: Sequence[Int32], b: Sequence[Int32], c: Sequence[Float32]) -> tuple[Float32, ...]:
    operands = [*a, *b, *c]
    names = iter([f"{{$r{number}}}" for number in range(len(operands))])
    results = [f"{{$w{number}}}" for number in range(len(c))]
    tiles = ["{" + ", ".join(tile) + "}" for tile in (results, *([next(names) for _ in tile] for tile in (a, b, c)))]
    return cute.arch.inline_ptx(
        f"mma.sync.aligned.{shape} {', '.join(tiles)};",
        write_only_types=[Float32] * len(c),
        read_only_args=operands,
    )
