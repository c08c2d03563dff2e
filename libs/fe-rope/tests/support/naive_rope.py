"""The operations of fe_rope one element at a time, in exact rational arithmetic with every rounding spelled out.

Nothing here uses the library. Numbers are Python floats, which hold every fp32 and bf16 value; all are finite.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [float(np.array(code, np.uint8).view(ml_dtypes.float8_e4m3fn)) for code in range(127)]


def rounded(value: Fraction, significant: int, negative_zero: bool = False) -> float:
    """To ``significant`` bits (24: fp32, 8: bf16), exponents -126 to 127, nearest, ties to even."""
    if value == 0:
        return -0.0 if negative_zero else 0.0
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    step = Fraction(2) ** (max(exponent, -126) - significant + 1)
    result = round(size / step) * step  # Python rounds ties to even
    return math.copysign(math.inf if result >= 2**128 else float(result), value)


def negative(x: float) -> bool:
    return math.copysign(1.0, x) < 0


def times(a: float, b: float) -> float:
    return rounded(Fraction(a) * Fraction(b), 24, negative(a) != negative(b))


def fused(a: float, c: float, p: float) -> float:
    """``a * c + p`` with one rounding; an exact zero is negative if both terms are."""
    both = negative(p) and negative(a) != negative(c)
    return rounded(Fraction(a) * Fraction(c) + Fraction(p), 24, both)


def plus(a: float, b: float) -> float:
    return fused(a, 1.0, b)


def over(a: float, b: float) -> float:
    return rounded(Fraction(a) / Fraction(b), 24, negative(a) != negative(b))


def bf16(x: float) -> float:
    return x if math.isinf(x) else rounded(Fraction(x), 8, negative(x))


def nearest(x: float, table: list[float]) -> float:
    """The nearest entry with the sign of x, ties to the even code, saturating."""
    size = min(abs(x), table[-1])
    above = bisect_left(table, size)
    code = min({max(above - 1, 0), above}, key=lambda code: (abs(Fraction(table[code]) - Fraction(size)), code % 2))
    return math.copysign(table[code], x)


def tail_rotation(pair: tuple[float, float], c: float, s: float) -> tuple[float, float]:
    a, b = pair
    return bf16(fused(a, c, -times(b, s))), bf16(fused(b, c, times(a, s)))


def half_rotation(pair: tuple[float, float], c: float, s: float) -> tuple[float, float]:
    a, b = pair
    return bf16(plus(times(a, c), times(b, s))), bf16(plus(times(b, c), -times(a, s)))


def tail_rope(x: Any, cosine: Any, sine: Any) -> Any:
    out = x.copy()
    for place in _places(x.shape[:-1]):
        _rotate_tail(out[place], cosine[place[0]], sine[place[0]])
    return out


def rope_qdq(x: Any, cache: Any, positions: Any, quantization: str, group_size: int, scale_format: str) -> Any:
    out = x.copy()
    for row, place in enumerate(_places(x.shape[:-1])):
        shared = (quantization, group_size) == ("fp4", 32)
        table = cache[int(positions[place[0] if shared else row])]
        _rotate_tail(out[place], table[:32], table[32:])
        for start in range(0, x.shape[-1], group_size):
            group = out[place][start : start + group_size]
            group[:] = [*_requantised([float(v) for v in group], quantization, scale_format)]
    return out


def vision_rope_backward(q: Any, k: Any, v: Any, cosine: Any, sine: Any) -> Any:
    """For logical (T, H, D) gradients and (T, D/2) tables."""
    tokens, heads, channels = q.shape
    half = channels // 2
    out = np.empty((tokens, 3, heads, channels), q.dtype)
    out[:, 2] = v
    for part, gradient in enumerate((q, k)):
        for t, h, i in product(range(tokens), range(heads), range(half)):
            pair = float(gradient[t, h, i]), float(gradient[t, h, half + i])
            out[t, part, h, i], out[t, part, h, half + i] = half_rotation(pair, float(cosine[t, i]), float(sine[t, i]))
    return out.reshape(tokens, 3 * heads * channels)


def group_scale(largest: float, quantization: str, scale_format: str) -> float:
    limit = 6.0 if quantization == "fp4" else 448.0
    if scale_format == "e4m3":
        return nearest(over(max(largest, 6 * 2.0**-9), limit), E4M3)
    floor = 6 * 2.0**-126 if quantization == "fp4" else float(np.float32(1e-4))
    r = times(max(largest, floor), float(np.float32(1 / limit)))
    mantissa, exponent = math.frexp(r)  # mantissa in [1/2, 1)
    return 2.0 ** (exponent - (mantissa == 0.5))


def _requantised(group: list[float], quantization: str, scale_format: str) -> Iterator[float]:
    scale = group_scale(max(map(abs, group)), quantization, scale_format)
    table = E2M1 if quantization == "fp4" else E4M3
    for value in group:
        yield bf16(times(nearest(over(value, scale), table), scale))


def _rotate_tail(row: Any, c: Any, s: Any) -> None:
    first = len(row) - 64
    for i in range(32):
        at = first + 2 * i
        row[at], row[at + 1] = tail_rotation((float(row[at]), float(row[at + 1])), float(c[i]), float(s[i]))


def _places(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return product(*map(range, shape))


# ---- operands


def bfloats(rng: np.random.Generator, shape: tuple[int, ...], kind: str = "normal") -> Any:
    """bf16 values: ``normal``, or ``bits``, finite bit patterns of every size, subnormals and signed zeros too."""
    if kind == "normal":
        return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
    pattern = rng.integers(0, 1 << 16, shape, dtype=np.uint16)
    pattern = np.where(pattern & 0x7F80 == 0x7F80, pattern & 0xBFFF, pattern)
    zeros = rng.random(shape) < 0.05
    return np.where(zeros, pattern & 0x8000, pattern).astype(np.uint16).view(ml_dtypes.bfloat16)


def tables(rng: np.random.Generator, shape: tuple[int, ...], kind: str = "normal") -> tuple[Any, Any]:
    """Cosines and sines in fp32; ``bits``: any finite fp32 numbers of magnitude below 2."""
    if kind == "normal":
        angle = rng.uniform(-9, 9, shape)
        return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    patterns = rng.integers(0, 1 << 32, (2, *shape), dtype=np.uint32) & np.uint32(0xBFFFFFFF)
    return tuple(patterns.view(np.float32))


def same_bits(a: Any, b: Any) -> bool:
    return bool((np.asarray(a).view(np.uint16) == np.asarray(b).view(np.uint16)).all())
