"""IEEE fp32 product and quotient from integer operations, for JAX.

XLA flushes subnormals on the CPU, regroups products, and replaces some divisions by products with a reciprocal.
Integer operations are left alone, so these results have the same bits on every backend, eager and under ``jit``.
Only loaded when a JAX array is met.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

__all__ = ["divide", "multiply"]

_SIGN = np.uint32(0x80000000)
_INFINITY = np.uint32(0x7F800000)
_NAN = np.uint32(0x7FC00000)
_HIDDEN_BIT = np.uint32(1 << 23)


@jax.jit
def multiply(a: Array, b: Array | float) -> Array:
    """Return ``a * b`` rounded to nearest even; operands broadcast."""
    sign, (mag_a, exp_a, sig_a), (mag_b, exp_b, sig_b) = _operands(a, b)
    high, low = _product(sig_a, sig_b)
    short = high < _HIDDEN_BIT  # the product lies in [1, 4): bring it to [1, 2)
    high, low = jnp.where(short, high << 1 | low >> 23, high), jnp.where(short, low << 1 & 0xFFFFFF, low)
    exponent = exp_a + exp_b - 127 + jnp.where(short, 0, 1)
    sticky = (low & 0x1FFFFF) != 0
    result = _round(exponent, high << 3 | low >> 21 | _bit(sticky))
    infinite = (mag_a == _INFINITY) | (mag_b == _INFINITY)
    zero = (mag_a == 0) | (mag_b == 0)
    return _assemble(sign, result, infinite, zero, nan=_any_nan(mag_a, mag_b) | (infinite & zero))


@jax.jit
def divide(a: Array, b: Array | float) -> Array:
    """Return ``a / b`` rounded to nearest even; operands broadcast."""
    sign, (mag_a, exp_a, sig_a), (mag_b, exp_b, sig_b) = _operands(a, b)
    short = sig_a < sig_b  # the quotient lies in (1/2, 2): bring it to [1, 2)
    rest = jnp.where(short, sig_a << 1, sig_a) - sig_b
    quotient = jnp.ones_like(rest)
    for _ in range(26):  # long division: 23 fraction bits and 3 for rounding
        rest = rest << 1
        fits = rest >= sig_b
        rest = jnp.where(fits, rest - sig_b, rest)
        quotient = quotient << 1 | _bit(fits)
    exponent = exp_a - exp_b + 127 - jnp.where(short, 1, 0)
    result = _round(exponent, quotient | _bit(rest != 0))
    both_zero, both_infinite = (mag_a | mag_b) == 0, (mag_a & mag_b) == _INFINITY
    infinite, zero = (mag_a == _INFINITY) | (mag_b == 0), (mag_a == 0) | (mag_b == _INFINITY)
    return _assemble(sign, result, infinite, zero, nan=_any_nan(mag_a, mag_b) | both_zero | both_infinite)


_Parts = tuple[Array, Array, Array]


def _operands(a: Array, b: Array | float) -> tuple[Array, _Parts, _Parts]:
    bits_a, bits_b = (lax.bitcast_convert_type(jnp.asarray(x, jnp.float32), jnp.uint32) for x in (a, b))
    return (bits_a ^ bits_b) & _SIGN, _unpack(bits_a), _unpack(bits_b)


def _unpack(bits: Array) -> _Parts:
    """Return the magnitude's bits, the biased exponent, and the significand in ``[2**23, 2**24)``.

    Subnormals are normalised (exponent below 1). Exponent and significand of 0, infinity and NaN mean nothing.
    """
    magnitude = bits & ~_SIGN
    fraction = magnitude & (_HIDDEN_BIT - 1)
    exponent = (magnitude >> 23).astype(jnp.int32)
    shift = lax.clz(fraction) - 8
    significand = jnp.where(exponent == 0, fraction << shift, fraction | _HIDDEN_BIT)
    return magnitude, jnp.where(exponent == 0, 1 - shift.astype(jnp.int32), exponent), significand


def _product(a: Array, b: Array) -> tuple[Array, Array]:
    """Return the 48-bit product of two 24-bit integers as its upper and lower 24 bits."""
    high_a, low_a, high_b, low_b = a >> 12, a & 0xFFF, b >> 12, b & 0xFFF
    lowest = low_a * low_b
    middle = high_a * low_b + low_a * high_b + (lowest >> 12)
    return high_a * high_b + (middle >> 12), (middle & 0xFFF) << 12 | lowest & 0xFFF


def _round(exponent: Array, significand: Array) -> Array:
    """Return the bits of ``significand / 2**26 * 2**(exponent - 127)``, significand in ``[2**26, 2**27)``.

    The lowest bit of the significand is sticky: it stands for everything below it.
    """
    shift = jnp.clip(1 - exponent, 0, 26).astype(jnp.uint32)  # subnormal results lose bits
    lost = significand & ((jnp.uint32(1) << shift) - 1)
    significand = significand >> shift | _bit(lost != 0)
    kept, rest = significand >> 3, significand & 7
    kept = kept + _bit((rest > 4) | ((rest == 4) & (kept & 1 == 1)))
    bits = (jnp.clip(exponent, 1, 255).astype(jnp.uint32) - 1 << 23) + kept
    return jnp.minimum(bits, _INFINITY)


def _bit(condition: Array) -> Array:
    """Return 1 or 0; JAX may be set to promote no dtype by itself."""
    return condition.astype(jnp.uint32)


def _any_nan(mag_a: Array, mag_b: Array) -> Array:
    return (mag_a > _INFINITY) | (mag_b > _INFINITY)


def _assemble(sign: Array, bits: Array, infinite: Array, zero: Array, *, nan: Array) -> Array:
    bits = jnp.where(zero, np.uint32(0), jnp.where(infinite, _INFINITY, bits))
    return lax.bitcast_convert_type(sign | jnp.where(nan, _NAN, bits), jnp.float32)
