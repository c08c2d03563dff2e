"""Rounding of float32 to the 8- and 4-bit float formats, and the arithmetic of block scales."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Uint16, cute

__all__ = ["E2M1_MAX", "E4M3_MAX", "block_quotients", "e2m1_word", "e4m3_code", "e4m3_pair", "nvfp4_scale"]

E4M3_MAX = 448.0
E2M1_MAX = 6.0

_EXPONENT = 0x7F800000
_MANTISSA_BITS = 23
_SIXTH = 0.16666667163372040  # 1/6 rounded to float32
_SMALLEST_NORMAL = 2.0**-126


@cute.jit
def e4m3_pair(low: Float32, high: Float32, hardware: cutlass.Constexpr[bool]) -> Uint16:
    """Return the e4m3 codes of two values, ``low`` in the low byte: nearest, ties to even, saturating at +-448.

    NaN gives 0x7F. ``hardware``: the architecture has the conversion (sm_89 and later).
    """
    if cutlass.const_expr(hardware):
        pair = cute.arch.inline_ptx(
            "cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint16], read_only_args=[high, low]
        )
    else:
        pair = Uint16(e4m3_code(low) | (e4m3_code(high) << 8))
    return pair


@cute.jit
def e4m3_code(value: Float32) -> Int32:
    """Return the e4m3 code of a value, as :func:`e4m3_pair`, without the conversion instruction.

    Between powers of two 2^e the format has steps of 2^(e-3), below 2^-6 steps of 2^-9. Adding 2^(e+20) makes
    float32 round to just that step and leaves the number of steps in the low bits of the sum.
    """
    magnitude = cute.arch.fmin(cute.math.absf(value), Float32(E4M3_MAX))
    exponent = cutlass.max(magnitude.bitcast(Int32) & _EXPONENT, Int32((127 - 6) << _MANTISSA_BITS))
    magic = exponent + (20 << _MANTISSA_BITS)
    steps = (magnitude + magic.bitcast(Float32)).bitcast(Int32) - magic
    code = steps + (exponent >> 20) - ((127 - 6) << 3)
    code = code | ((value.bitcast(Int32) >> 24) & 0x80)
    if value != value:
        code = Int32(0x7F)
    return code


def e2m1_word(values: list[Float32], signs: list[Float32]) -> Int32:
    """Return the e2m1 codes of eight values, the first in the lowest nibble, with the signs of ``signs``.

    Nearest, ties to even, saturating at +-6. A NaN gives 7, with the sign of its partner.
    """
    codes = [_e2m1_bits(value) for value in values]
    even = _gather(codes[0::2], byte=0) & 0x07070707
    odd = _gather(codes[1::2], byte=0) & 0x07070707
    top = [sign.bitcast(Int32) for sign in signs]
    even_signs = (_gather(top[0::2], byte=3) >> 4) & 0x08080808
    odd_signs = _gather(top[1::2], byte=3) & -0x7F7F7F80  # 0x80808080
    return even | (odd << 4) | even_signs | odd_signs


def nvfp4_scale(largest: Float32) -> Float32:
    """Return ``max(largest / 6, 2^-126)``, the unrounded scale of an NVFP4 block.

    The quotient is correctly rounded for ``largest >= 2^-100`` and at most one ulp off below; infinity stays.
    """
    guess = largest * Float32(_SIXTH)
    remainder = cute.math.fma(-guess, Float32(E2M1_MAX), largest)
    quotient = cute.math.fma(remainder, Float32(_SIXTH), guess)  # NaN for infinity
    return _unless_infinite(largest, cute.arch.fmax(quotient, Float32(_SMALLEST_NORMAL)), largest)


def block_quotients(values: list[Float32], scale: Float32) -> list[Float32]:
    """Return ``value / scale`` for the values of a block that share a scale between 2^-126 and 2^126, or infinite.

    One reciprocal, then per value a product and one correction by its exact remainder. The result is the correctly
    rounded quotient, but for scales under 2^-100 (where the remainder is not exact) and for quotients within 2^-22
    ulp of a rounding boundary: it may be one ulp off there. An infinite scale divides finite values to zero (of
    either sign) and others to NaN.
    """
    guess = cute.math.rcp(scale, approx=True, ftz=True)
    divisor = _unless_infinite(scale, scale, Float32(0.0))
    reciprocal = cute.math.fma(guess, cute.math.fma(-divisor, guess, Float32(1.0)), guess)
    return [_corrected(value * reciprocal, value, divisor, reciprocal) for value in values]


def _corrected(quotient: Float32, dividend: Float32, divisor: Float32, reciprocal: Float32) -> Float32:
    remainder = cute.math.fma(-quotient, divisor, dividend)
    return cute.math.fma(remainder, reciprocal, quotient)


@cute.jit
def _unless_infinite(test: Float32, value: Float32, otherwise: Float32) -> Float32:
    """Return ``value``, or ``otherwise`` if ``test`` is +infinity."""
    if test == Float32(float("inf")):
        value = otherwise
    return value


def _e2m1_bits(value: Float32) -> Int32:
    """Return a number whose low three bits are the e2m1 code of ``|value|``.

    As in :func:`e4m3_code`: steps of 2^(e-1), of 1/2 below 1, counted by adding 2^(e+22). The count goes from 0 to 4
    for e = 0 and continues with 2 more for each further power of two, which ``exponent >> 22`` adds, being
    ``2 * (127 + e)``, 6 + 2e modulo 8; the 2 in the added number completes 8.
    """
    magnitude = cute.arch.fmin(cute.math.absf(value), Float32(E2M1_MAX))
    exponent = cutlass.max(magnitude.bitcast(Int32) & _EXPONENT, Int32(127 << _MANTISSA_BITS))
    magic = exponent + ((22 << _MANTISSA_BITS) + 2)
    return (magnitude + magic.bitcast(Float32)).bitcast(Int32) + (exponent >> 22)


def _gather(words: list[Int32], byte: int) -> Int32:
    """Return one byte of each of four words, the first word's lowest."""
    pick = byte | (byte + 4) << 4
    low, high = (cute.arch.prmt(words[i], words[i + 1], pick) for i in (0, 2))
    return Int32(cute.arch.prmt(low, high, 0x5410))
