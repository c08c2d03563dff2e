"""Philox4x32-10: random words that depend on a counter and a key only, whatever the launch."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, Uint64, cute

from .rounding import div_rn, sub_rn

__all__ = ["PhiloxKey", "keep_factor", "keep_threshold", "philox"]

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class PhiloxKey:
    """The keys of the ten rounds, the same for every counter under a seed."""

    rounds: tuple[tuple[Uint32, Uint32], ...]

    @staticmethod
    def of(seed: Int64) -> PhiloxKey:
        """Return the keys of a signed 64-bit seed: its lower half, its upper half."""
        low, high = Uint32(seed & 0xFFFFFFFF), Uint32((seed >> 32) & 0xFFFFFFFF)
        return PhiloxKey(
            tuple((low + Uint32(n * _W0 & 0xFFFFFFFF), high + Uint32(n * _W1 & 0xFFFFFFFF)) for n in range(_ROUNDS))
        )


def philox(c0: Uint32, c1: Uint32, c2: Uint32 | int, c3: Uint32 | int, key: PhiloxKey) -> tuple[Uint32, ...]:
    """Return the four random words of a counter.

    Ten rounds of ``c0' = hi(M1*c2)^c1^k0``, ``c1' = lo(M1*c2)``, ``c2' = hi(M0*c0)^c3^k1``, ``c3' = lo(M0*c0)``, exact:
    two wide products and two three-way exclusive ors each. What constant parts of a counter decide is computed while
    compiling, and what several counters share once.
    """
    c2, c3 = (Uint32(c) if isinstance(c, int) else c for c in (c2, c3))
    for k0, k1 in key.rounds:
        high0, low0 = _product(c0, _M0)
        high1, low1 = _product(c2, _M1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


@cute.jit
def keep_threshold(p: Float32) -> Uint32:
    """Return the smallest word w with ``f32(f32(w) * 2^-32) > p``, for 0 < p < 1.

    With ``P = p * 2^32``, that is the first word that rounds to the float32 above P: it lies half a step above P, and
    the tie goes to the even of the two; where the steps are at most 1, it is the first integer above P.
    """
    bits = p.bitcast(Int32)
    mantissa, shift = bits & 0x7FFFFF | 0x800000, (bits >> 23) - 118
    threshold = (mantissa >> cutlass.min(-shift, Int32(31))) + 1
    if shift > 0:
        half = Int32(1) << (shift - 1)
        threshold = (mantissa << shift) + half + (1 - (mantissa & 1))
    return Uint32(threshold)


def keep_factor(p: Float32) -> Float32:
    """Return ``1 / (1 - p)``, difference and quotient each rounded to float32."""
    return div_rn(Float32(1.0), sub_rn(Float32(1.0), p))


def _product(word: Uint32, factor: int) -> tuple[Uint32, Uint32]:
    """Return the upper and the lower word of a product."""
    product = Uint64(word) * Uint64(factor)
    return Uint32(product >> 32), Uint32(product & 0xFFFFFFFF)
