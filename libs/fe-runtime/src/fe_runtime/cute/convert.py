"""From float32 to the 8- and 4-bit float formats, from their codes to bf16, and the arithmetic of block scales."""

from __future__ import annotations

import cutlass
from cutlass import Float16, Float32, Int32, Uint16, cute

__all__ = [
    "E2M1_MAX",
    "E4M3_MAX",
    "bf16_products",
    "block_quotients",
    "byte_of_each",
    "e2m1_as_e4m3",
    "e2m1_to_bf16",
    "e2m1_unordered",
    "e2m1_word",
    "e4m3_code",
    "e4m3_pair",
    "e4m3_to_bf16",
    "e4m3_to_f16",
    "e5m2_to_bf16",
    "e5m2_to_f16",
    "e8m0_to_bf16",
    "e8m0_to_f32",
    "f16_products",
    "f16_values",
    "nvfp4_scale",
]

E4M3_MAX = 448.0
E2M1_MAX = 6.0

_EXPONENT = 0x7F800000
_MANTISSA_BITS = 23
_SIXTH = 0.16666667163372040  # 1/6 rounded to float32
_SMALLEST_NORMAL = 2.0**-126
_TOP_BITS = -0x7F7F7F80  # 0x80808080, of each byte
_SIGNS = -0x7FFF8000  # 0x80008000, of two bf16


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
    even = byte_of_each(codes[0::2], 0) & 0x07070707
    odd = byte_of_each(codes[1::2], 0) & 0x07070707
    top = [sign.bitcast(Int32) for sign in signs]
    even_signs = (byte_of_each(top[0::2], 3) >> 4) & 0x08080808
    odd_signs = byte_of_each(top[1::2], 3) & _TOP_BITS
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


def e4m3_to_bf16(codes: Int32, hardware: bool) -> tuple[Int32, Int32]:
    """Return the values of four e4m3 codes, the first in the lowest byte, as two words of two bf16; exact.

    ``hardware``: the architecture has the conversion to float16 (sm_89 and later).
    """
    if hardware:
        low, high = (_e4m3_to_f16(Uint16(half)) for half in (codes, codes >> 16))
        return _f16_to_bf16(low), _f16_to_bf16(high)
    spread = (cute.arch.prmt(codes, 0, order) for order in (_LOW_BYTES, _HIGH_BYTES))
    low, high = (_e4m3_to_bf16_by_shift(Int32(pair)) for pair in spread)
    return low, high


def e4m3_to_f16(codes: Int32) -> tuple[Int32, Int32]:
    """Return four e4m3 codes, the first in the lowest byte, as two words of two float16; exact (sm_89)."""
    low, high = (_e4m3_to_f16(Uint16(half)) for half in (codes, codes >> 16))
    return low, high


def e5m2_to_f16(codes: Int32) -> tuple[Int32, Int32]:
    """Return the values of four e5m2 codes, as :func:`e4m3_to_f16`: a code is the upper byte of a float16."""
    low, high = (Int32(cute.arch.prmt(codes, 0, order)) for order in (_LOW_BYTES, _HIGH_BYTES))
    return low, high


def e2m1_as_e4m3(codes: Int32) -> tuple[Int32, Int32]:
    """Return eight e2m1 codes, the first in the lowest nibble, as two words of e4m3 codes of 2^-6 of their values.

    The first word has the codes with even numbers. Exponent and mantissa are only moved to where e4m3 has them; 0.5
    becomes a subnormal number.
    """
    even, odd = (word & _TOP_BITS | (word >> 2) & 0x1C1C1C1C for word in (codes << 4, codes))
    return even, odd


def e5m2_to_bf16(codes: Int32) -> tuple[Int32, Int32]:
    """Return the values of four e5m2 codes, as :func:`e4m3_to_bf16`: a code is the upper byte of a float16."""
    low, high = (_f16_to_bf16(Int32(cute.arch.prmt(codes, 0, order))) for order in (_LOW_BYTES, _HIGH_BYTES))
    return low, high


def e2m1_to_bf16(codes: Int32) -> list[Int32]:
    """Return the values of eight e2m1 codes, the first in the lowest nibble, as four words of two bf16; exact.

    Upper and lower byte of a magnitude come from tables of eight bytes, in which ``prmt`` looks four codes up at once.
    """
    found = []
    for four in (codes, codes >> 16):
        index = four & 0x7777
        upper = Int32(cute.arch.prmt(0x3F3F3F00, 0x40404040, index))
        lower = cute.arch.prmt(-0x3F800000, -0x3F7FC000, index)  # 0xC0800000, 0xC0804000
        # An index above 7 asks for the sign of a byte, eight times: 0xFF for negative codes, 0x80 for others.
        signs = Int32(cute.arch.prmt(_TOP_BITS, _TOP_BITS, four)) << 1
        upper = upper | (signs & _TOP_BITS)
        found += [Int32(cute.arch.prmt(lower, upper, order)) for order in (0x5140, 0x7362)]
    return found


def e2m1_unordered(codes: Int32) -> list[Int32]:
    """Return the values of eight e2m1 codes times 2^-126, as four words of two bf16: number i holds i and i + 4.

    Fewer instructions than :func:`e2m1_to_bf16`, for sums whose order does not matter: sign, exponent and mantissa are
    only moved to where bf16 has them. 0.5 becomes a subnormal number.
    """
    found = []
    for rest in (codes, codes >> 8):
        for place, spread in ((0x000F000F, 0x1040), (0x00F000F0, 0x0104)):
            # The product has the code twice: its sign at the top of each half, its magnitude at bits 6 to 8.
            found.append(((rest & place) * spread) & -0x7E3F7E40)  # 0x81C081C0
    return found


def e8m0_to_bf16(codes: Int32) -> tuple[Int32, Int32]:
    """Return the values of four e8m0 codes, the first in the lowest byte, as two words of two bf16; exact.

    The code is the exponent, but 0 means 2^-127, a subnormal number, and 255 NaN: both need the mantissa 0x40. They are
    the codes for which code + 1 has no bits among the lower eight but, perhaps, the lowest.
    """

    def pair(order: int) -> Int32:
        exponent = (Int32(cute.arch.prmt(codes, 0, order)) >> 1) & 0x7F807F80
        rest = (exponent + 0x00800080) & 0x7F007F00
        flags = _SIGNS - rest  # the sign stays where there is no rest
        return exponent | ((flags >> 9) & 0x00400040)

    return pair(_LOW_BYTES), pair(_HIGH_BYTES)


def e8m0_to_f32(code: Int32) -> Float32:
    """Return the value of an e8m0 code; 255 is NaN."""
    special = Int32((code == 0) | (code == 255))  # 2^-127 is a subnormal number
    return Float32(((code << _MANTISSA_BITS) | (special << (_MANTISSA_BITS - 1))).bitcast(Float32))


def f16_products(a: Int32, b: Int32 | int) -> Int32:
    """Return the products of two words of two float16, rounded once to nearest even."""
    b = _in_register(b) if isinstance(b, int) else b
    return cute.arch.inline_ptx("mul.rn.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b])


def f16_values(pair: Int32) -> tuple[Float32, Float32]:
    """Return two float16 values as float32."""
    low, high = (Uint16(half).bitcast(Float16).to(Float32) for half in (pair, pair >> 16))
    return low, high


def bf16_products(a: Int32, b: Int32 | int) -> Int32:
    """Return the products of two words of two bf16, rounded once to nearest even. NaN gives 0x7FFF.

    A fused sum with -0, which changes nothing: architectures before sm_90 have no product of its own.
    """
    b = _in_register(b) if isinstance(b, int) else b
    return cute.arch.inline_ptx(
        "fma.rn.bf16x2 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Int32],
        read_only_args=[a, b, _in_register(_SIGNS)],
    )


def byte_of_each(words: list[Int32], byte: int) -> Int32:
    """Return one byte of each of four words, the first word's lowest."""
    pick = byte | (byte + 4) << 4
    low, high = (cute.arch.prmt(words[i], words[i + 1], pick) for i in (0, 2))
    return Int32(cute.arch.prmt(low, high, 0x5410))


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


_LOW_BYTES, _HIGH_BYTES = 0x1404, 0x3424
"""Selections by ``prmt`` that move the lower or upper two bytes of a word to the upper bytes of its halves."""


def _in_register(constant: int) -> Int32:
    """Return a constant for an instruction on two bf16, which are never written as numbers."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[Int32(constant)])


def _e4m3_to_f16(pair: Uint16) -> Int32:
    return cute.arch.inline_ptx("cvt.rn.f16x2.e4m3x2 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[pair])


def _f16_to_bf16(pair: Int32) -> Int32:
    """Return two float16 values that bf16 holds too: through float32, whose upper half is then all there is."""
    low, high = (value.bitcast(Int32) for value in f16_values(pair))
    return Int32(cute.arch.prmt(low, high, 0x7632))


def _e4m3_to_bf16_by_shift(pair: Int32) -> Int32:
    """Return the values of two e4m3 codes in the upper bytes of the halves of a word.

    Exponent and mantissa, moved to where bf16 has them, mean 2^-120 of the value, subnormal or not.
    """
    small = (pair & _SIGNS) | ((pair >> 4) & 0x07F007F0)
    values = bf16_products(small, 0x7B807B80)  # 2^120
    nan = ((pair & 0x7F007F00) + 0x01000100) >> 15 & 0x00010001  # where the magnitude is 0x7F
    return values | nan * 0x7FC0
