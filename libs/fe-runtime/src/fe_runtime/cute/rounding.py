"""fp32 operations that round exactly once and that no compiler fuses, and values as words of two bf16.

For kernels whose results are defined bit for bit. Subnormals stay; ties go to even.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute

__all__ = [
    "add_rn",
    "bf16_values",
    "bf16_word",
    "div_rn",
    "fma_rn",
    "min_or_nan",
    "mul_rn",
    "round_to_steps",
    "sub_rn",
]

_EXPONENT = 0x7F800000
_MANTISSA_BITS = 23


def add_rn(a: Float32, b: Float32) -> Float32:
    """Return ``RN(a + b)``."""
    return _float("add.rn.f32", a, b)


def sub_rn(a: Float32, b: Float32) -> Float32:
    """Return ``RN(a - b)``."""
    return _float("sub.rn.f32", a, b)


def mul_rn(a: Float32, b: Float32) -> Float32:
    """Return ``RN(a * b)``."""
    return _float("mul.rn.f32", a, b)


def div_rn(a: Float32, b: Float32) -> Float32:
    """Return ``RN(a / b)``: a dozen instructions."""
    return _float("div.rn.f32", a, b)


def fma_rn(a: Float32, b: Float32, c: Float32) -> Float32:
    """Return ``RN(a * b + c)``."""
    return _float("fma.rn.f32", a, b, c)


def min_or_nan(a: Float32, b: Float32) -> Float32:
    """Return the smaller value, or NaN if there is one."""
    return _float("min.NaN.f32", a, b)


def round_to_steps(magnitude: Float32, mantissa_bits: int, smallest_exponent: int) -> Float32:
    """Return a value >= 0 rounded to a narrow float format that holds it: to nearest, ties to even; NaN stays.

    The format has ``mantissa_bits`` after the point and its smallest normal number is ``2^smallest_exponent``: (1, 0)
    is E2M1, (3, -6) is E4M3. Between the powers 2^e and 2^(e+1) its step is 2^(e - mantissa_bits), and 2^(e + 23 -
    mantissa_bits) is the number beside which float32 has that step: adding it rounds, subtracting it is exact.
    """
    exponent = magnitude.bitcast(Int32) & _EXPONENT
    power = cutlass.max(exponent, Int32((127 + smallest_exponent) << _MANTISSA_BITS)).bitcast(Float32)
    anchor = power * Float32(2.0 ** (_MANTISSA_BITS - mantissa_bits))
    return sub_rn(add_rn(magnitude, anchor), anchor)


def bf16_values(word: Int32) -> tuple[Float32, Float32]:
    """Return the two bf16 values of a word in float32, the one in the low half first; exact."""
    return (word << 16).bitcast(Float32), (word & -0x10000).bitcast(Float32)


def bf16_word(low: Float32, high: Float32) -> Int32:
    """Return two values rounded to bf16, ``low`` in the low half. NaN gives 0x7FFF."""
    return cute.arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[high, low]
    )


def _float(instruction: str, *operands: Float32) -> Float32:
    names = ", ".join(f"{{$r{number}}}" for number in range(len(operands)))
    return cute.arch.inline_ptx(
        f"{instruction} {{$w0}}, {names};", write_only_types=[Float32], read_only_args=list(operands)
    )
