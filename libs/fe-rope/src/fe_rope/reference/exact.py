"""fp32 arithmetic with one rounding a step, and bf16 bits, alike in numpy, torch and JAX.

numpy and torch round each fp32 operation as IEEE 754 says, so there only the fused product-sum needs work. XLA flushes
subnormals and may contract, so JAX arrays go through integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from fe_runtime.formats import _backend as backend

__all__ = ["add", "bits", "fused", "join", "multiply", "narrow", "widen"]

Array: TypeAlias = Any

multiply = backend.multiply
"""``multiply(a, b)``: the fp32 product, rounded once."""


def bits(x: Array) -> Array:
    """Return the bit patterns of a bf16 array, as 16-bit integers that can be moved about."""
    x = x.detach() if backend.framework_of(x) == "torch" else x
    return x.view(backend.namespace(x).int16)


def join(parts: Sequence[Array], axis: int = -1) -> Array:
    """Return bf16 arrays side by side, bit for bit: as numbers, a compiler may change the payload of a NaN."""
    xp = backend.namespace(parts[0])
    return _as_bfloat16(xp.concat([bits(part) for part in parts], axis=axis))


def widen(x: Array) -> Array:
    """Return a bf16 array in fp32; exact."""
    if backend.framework_of(x) != "jax":
        return backend.as_float32(x)
    xp = backend.namespace(x)
    return backend.float_of_bits(xp.astype(bits(x), xp.int32) << 16)


def narrow(x: Array) -> Array:
    """Return an fp32 array in bf16, rounded to nearest with ties to even."""
    if backend.framework_of(x) != "jax":
        return backend.convert(x, "bfloat16")
    xp = backend.namespace(x)
    pattern = backend.bits_of(x)
    # Half a unit, less one unless the kept part is odd; a carry runs into the exponent, as it should.
    rounded = (pattern + (0x7FFF + ((pattern >> 16) & 1))) >> 16
    quiet = (pattern >> 16) | 0x40
    is_nan = (pattern & 0x7FFFFFFF) > _INFINITY
    return _as_bfloat16(xp.astype(xp.where(is_nan, quiet, rounded), xp.int16))


def add(a: Array, b: Array) -> Array:
    """Return fp32 ``a + b``, rounded once."""
    if backend.framework_of(a) != "jax":
        with np.errstate(all="ignore"):
            return a + b
    return _fused_in_integers(backend.namespace(a).ones_like(a), a, b)


def fused(a: Array, c: Array, p: Array) -> Array:
    """Return ``a * c + p``, rounded once, for fp32 ``c`` and ``p`` and an fp32 ``a`` that holds a bf16 value."""
    if backend.framework_of(a) == "jax":
        return _fused_in_integers(a, c, p)
    xp = backend.namespace(a)
    a, c, p = (xp.astype(x, xp.float64) for x in (a, c, p))
    with np.errstate(all="ignore"):
        return xp.astype(_sum_to_odd(xp, a * c, p), xp.float32)  # 8 times 24 bits: the product is exact


_INFINITY = 0x7F800000
_NAN = 0x7FC00000
_TOP = np.uint32(1 << 31)


def _as_bfloat16(pattern: Array) -> Array:
    xp = backend.namespace(pattern)
    return pattern.view(xp.bfloat16 if backend.framework_of(pattern) == "torch" else ml_dtypes.bfloat16)


def _sum_to_odd(xp: Any, x: Array, y: Array) -> Array:
    """Return fp64 ``x + y`` rounded to odd: rounded again, to a format at least two bits shorter, it gives what one
    rounding of the exact sum gives.

    A sum whose last bit is 0, if it is not exact, makes way for its neighbour on the side of the error.
    """
    total = x + y
    part = total - x
    error = (x - (total - part)) + (y - part)  # exact
    pattern = total.view(xp.int64)
    inexact = (error != 0) & xp.isfinite(total)
    outwards = (error > 0) == (total > 0)
    step = xp.where(outwards, 1, -1)
    return xp.where(inexact & (pattern % 2 == 0), pattern + step, pattern).view(xp.float64)


def _fused_in_integers(a: Array, c: Array, p: Array) -> Array:
    """Return ``a * c + p`` from 32-bit integers. ``a`` has 8 significant bits, so the product has 32."""
    xp = backend.namespace(a)
    patterns = [backend.bits_of(x).view(xp.uint32) for x in xp.broadcast_arrays(a, c, p)]
    (exp_a, sig_a), (exp_c, sig_c), y = (_unpacked(xp, pattern) for pattern in patterns)
    product = (sig_a >> 24) * (sig_c >> 8)
    x = _normalised(xp, exp_a + exp_c + 1, product)
    sign_x, sign_y = ((pattern & _TOP) != 0 for pattern in (patterns[0] ^ patterns[1], patterns[2]))
    first = (y[1] == 0) | ((x[1] != 0) & ((x[0] > y[0]) | ((x[0] == y[0]) & (x[1] >= y[1]))))
    big, small = _chosen(xp, first, x, y), _chosen(xp, first, y, x)
    exponent, high, low = _sum(xp, big, small, sign_x != sign_y)
    zero = (high | low) == 0
    magnitude = xp.where(zero, np.uint32(0), _rounded(xp, exponent, high, low))
    # A sum of zero is negative only if both terms are.
    negative = xp.where(zero, sign_x & sign_y, xp.where(first, sign_x, sign_y))
    magnitude, negative = _special(xp, patterns, (sign_x, sign_y), magnitude, negative)
    return backend.float_of_bits((magnitude | xp.where(negative, _TOP, np.uint32(0))).view(xp.int32))


_Number = tuple[Array, Array]
"""Exponent and significand of ``significand * 2**(exponent - 31)``; bit 31 of a nonzero significand is set."""


def _unpacked(xp: Any, pattern: Array) -> _Number:
    biased = xp.astype((pattern >> 23) & 0xFF, xp.int32)
    fraction = (pattern & 0x7FFFFF) << 8
    significand = xp.where(biased > 0, fraction | _TOP, fraction)
    number: _Number = _normalised(xp, xp.maximum(biased, 1) - 127, significand)
    return number


def _normalised(xp: Any, exponent: Array, high: Array, low: Array | None = None) -> Any:
    """Shift the leading one to bit 31 of ``high``, bits of ``low`` moving up into it."""
    for step in (16, 8, 4, 2, 1):
        short = high < np.uint32(1 << (32 - step))
        fill = 0 if low is None else low >> (32 - step)
        high = xp.where(short, high << step | fill, high)
        low = None if low is None else xp.where(short, low << step, low)
        exponent = xp.where(short, exponent - step, exponent)
    return (exponent, high) if low is None else (exponent, high, low)


def _chosen(xp: Any, first: Array, x: _Number, y: _Number) -> _Number:
    return xp.where(first, x[0], y[0]), xp.where(first, x[1], y[1])


def _sum(xp: Any, big: _Number, small: _Number, differ: Array) -> tuple[Array, Array, Array]:
    """Return exponent and 64-bit significand, in two words, of the sum, or the difference, of two numbers.

    Bits of the smaller one that fall off the end set the last bit: far below where the result is rounded.
    """
    (exponent, whole), (other, part) = big, small
    distance = xp.astype(xp.clip(exponent - other, 0, 64), xp.uint32)
    near, far = xp.minimum(distance, np.uint32(31)), xp.clip(distance, 32, 63) - 32
    is_near = distance < 32
    fallen = (part & ((np.uint32(1) << far) - 1)) != 0
    below = xp.where(distance < 64, part >> far | fallen, xp.astype(part != 0, xp.uint32))
    rest = xp.where(is_near, part << 1 << (31 - near), below)
    part = xp.where(is_near, part >> near, np.uint32(0))
    total = whole + part
    carry = total < whole
    sum_high = xp.where(carry, total >> 1 | _TOP, total)
    sum_low = xp.where(carry, total << 31 | rest >> 1 | rest & 1, rest)
    high = xp.where(differ, whole - part - (rest != 0), sum_high)
    low = xp.where(differ, ~rest + 1, sum_low)
    exponent = exponent + xp.where(differ, 0, xp.astype(carry, xp.int32))
    word = high == 0
    exponent = xp.where(word, exponent - 32, exponent)
    high, low = xp.where(word, low, high), xp.where(word, np.uint32(0), low)
    result: tuple[Array, Array, Array] = _normalised(xp, exponent, high, low)
    return result


def _rounded(xp: Any, exponent: Array, high: Array, low: Array) -> Array:
    """Return the fp32 bits of ``(high + low / 2**32) * 2**(exponent - 31)``, to nearest, ties to even."""
    biased = exponent + 127
    significand = high >> 5 | ((high & 31 | low) != 0)  # 24 bits, two for rounding, one for all below
    shift = xp.astype(xp.clip(1 - biased, 0, 26), xp.uint32)  # subnormal results keep fewer
    lost = significand & ((np.uint32(1) << shift) - 1)
    significand = significand >> shift | (lost != 0)
    kept, rest = significand >> 3, significand & 7
    kept = kept + ((rest > 4) | ((rest == 4) & (kept % 2 == 1)))
    pattern = (xp.astype(xp.clip(biased, 1, 255), xp.uint32) - 1 << 23) + kept
    return xp.minimum(pattern, np.uint32(_INFINITY))


def _special(
    xp: Any, patterns: Sequence[Array], signs: tuple[Array, Array], magnitude: Array, negative: Array
) -> tuple[Array, Array]:
    """Return the result where a term is infinite or NaN, the given one elsewhere."""
    a, c, y = (pattern & 0x7FFFFFFF for pattern in patterns)
    sign_x, sign_y = signs
    infinite_x, infinite_y = (a == _INFINITY) | (c == _INFINITY), y == _INFINITY
    nan = (a > _INFINITY) | (c > _INFINITY) | (y > _INFINITY)
    nan = nan | (infinite_x & ((a == 0) | (c == 0))) | (infinite_x & infinite_y & (sign_x != sign_y))
    infinite = infinite_x | infinite_y
    magnitude = xp.where(nan, np.uint32(_NAN), xp.where(infinite, np.uint32(_INFINITY), magnitude))
    negative = xp.where(infinite, xp.where(infinite_x, sign_x, sign_y), negative)
    return magnitude, negative & ~nan
