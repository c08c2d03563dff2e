"""A thread's part of the features of a token in ``gemm_proj_rope_mxfp8``: traded, rotated, and their largest ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from fe_runtime.cute.rounding import bf16_values, bf16_word, fma_rn, mul_rn

__all__ = [
    "Values",
    "chosen",
    "halved",
    "larger_pair",
    "magnitudes",
    "or_zero",
    "rounded_words",
    "row_maxima",
    "scale",
    "traded",
]

RECIPROCAL = 0.0022321429569274187  # 1/448 rounded to float32


@dataclass(frozen=True, slots=True)
class Values:
    """A thread's part of a token: 16 words of two bf16, of the first 128 features, and 16 rotated float32 numbers."""

    plain: list[Int32]
    rotated: list[Float32]

    @classmethod
    def of(cls, words: list[list[Int32]], tables: list[list[Int32]]) -> Values:
        """Rotate eight pairs: ``a c - b s``, then ``b c' + a s'``, each rounded once."""
        cos, sin, second_cos, second_sin = ([n for word in part for n in bf16_values(word)] for part in tables)
        pairs = [bf16_values(word) for word in words[2]]
        first = [fma_rn(a, c, -mul_rn(b, s)) for (a, b), c, s in zip(pairs, cos, sin, strict=True)]
        second = [fma_rn(b, c, mul_rn(a, s)) for (a, b), c, s in zip(pairs, second_cos, second_sin, strict=True)]
        return cls(words[0] + words[1], first + second)

    @property
    def runs(self) -> list[list[Float32]]:
        """The numbers, in runs of neighbours: 16, 16, 8 and 8."""
        plain = [number for word in self.plain for number in bf16_values(word)]
        return [plain[:16], plain[16:], self.rotated[:8], self.rotated[8:]]


def rounded_words(accumulator: cute.Tensor, half: int, third: int) -> list[Int32]:
    """Return a thread's accumulators in 64 features of one of its rows, rounded, as words of two neighbours."""
    places = [((0, half, 8 * third + block), 0, 0) for block in range(8)]
    return [bf16_word(accumulator[at], accumulator[((1, *at[0][1:]), 0, 0)]) for at in places]


def traded(words: list[Int32], quarter: Int32) -> list[Int32]:
    """Trade pairs of features among four threads, so that each gets 16 neighbours of 64 features.

    Word i of thread q is pair 4 i + q. The upper two bits of i change places with the two bits of q, one after the
    other: a thread gives the word in which the bit differs from its own and puts what it gets in its place. Then word
    4 b + p of thread q, with b the lowest bit of i, is pair 8 q + 4 b + p.
    """
    for distance, bit in ((2, 4), (1, 2)):
        upper = quarter & distance != 0
        for i in [i for i in range(8) if i & bit == 0]:
            low, high = words[i], words[i + bit]
            got = cute.arch.shuffle_sync_bfly(chosen(upper, low, high), distance)
            words[i], words[i + bit] = chosen(upper, got, low), chosen(upper, high, got)
    return [words[4 * (p >> 1) + 2 * (p & 1) + b] for b in range(2) for p in range(4)]


def row_maxima(values: Values) -> list[Float32]:
    """Return for each run of a token's values the largest magnitude of the block of 32 features that it is in."""
    plain = []
    for part in (values.plain[:8], values.plain[8:]):
        words = [magnitudes(word) for word in part]
        plain.append(_tree(words, larger_pair))
    # Both halves of a word, of both words, side by side; two threads share a block.
    halves = [cute.arch.prmt(*plain, order) for order in (0x5410, 0x7632)]
    both = larger_pair(Int32(halves[0]), Int32(halves[1]))
    both = larger_pair(both, cute.arch.shuffle_sync_bfly(both, 1))
    rotated = []
    for part in (values.rotated[:8], values.rotated[8:]):
        largest = _tree([cute.math.absf(number) for number in part], cute.arch.fmax)
        rotated.append(cute.arch.warp_reduction(largest, cute.arch.fmax, threads_in_group=4))
    return [or_zero(number) for number in (*bf16_values(both), *rotated)]


def halved(values: list[Any], distance: int, lane: Int32, join: Callable[[Any, Any], Any]) -> list[Any]:
    """Join values with those of another lane: the one with the bit clear gets the first half of them."""
    upper, half = lane & distance != 0, len(values) // 2
    pairs = zip(values[:half], values[half:], strict=True)
    return [join(chosen(upper, b, a), cute.arch.shuffle_sync_bfly(chosen(upper, a, b), distance)) for a, b in pairs]


def scale(largest: Float32) -> tuple[Int32, Float32]:
    """Return the code of the least power of two >= RN(largest / 448), at least 2^-127, and 2^(127 - code).

    One more unit than the mantissa has carries into the exponent; below 2^-126 half of that decides between 0 and 1.
    Code 254, of an infinite maximum, gives the factor 0.
    """
    bits = mul_rn(largest, Float32(RECIPROCAL)).bitcast(Int32)
    code = cutlass.min((bits + chosen(bits < 0x800000, Int32(0x3FFFFF), Int32(0x7FFFFF))) >> 23, Int32(254))
    return code, ((254 - code) << 23).bitcast(Float32)


def magnitudes(word: Int32) -> Int32:
    """Return a word of two bf16 without signs."""
    return word & 0x7FFF7FFF


def larger_pair(a: Int32, b: Int32) -> Int32:
    """Return the larger ones of two words of two bf16; NaN loses."""
    return cute.arch.inline_ptx("max.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b])


def or_zero(number: Float32) -> Float32:
    """Return a number >= 0, and 0 for NaN."""
    return cute.arch.fmax(number, Float32(0.0))


def chosen(condition: Boolean, value: Any, otherwise: Any) -> Any:
    """Return one of two numbers, of the type of the first."""
    return type(value)(cutlass.select_(condition, value, otherwise))


def _tree(values: list[Any], join: Callable[[Any, Any], Any]) -> Any:
    while len(values) > 1:
        values = [join(values[i], values[i + 1]) for i in range(0, len(values), 2)]
    return values[0]
