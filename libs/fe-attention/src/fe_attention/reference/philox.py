"""Philox4x32-10, the counter-based random numbers of the dropout masks, and the dropout of HSTU made of it."""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace, device, is_torch_namespace

__all__ = ["keep", "keep_factor", "philox", "threshold"]

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
WORD = 0xFFFFFFFF


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """Return the four random words of each counter, ten rounds.

    A round: ``c0' = hi(M1*c2)^c1^k0``, ``c1' = lo(M1*c2)``, ``c2' = hi(M0*c0)^c3^k1``, ``c3' = lo(M0*c0)``; the key
    grows by its steps between rounds.

    Parameters
    ----------
    counter
        Four arrays of one shape or of shapes that broadcast, all uint32, or all int64 with values below 2^32.
    key
        Two integers below 2^32.
    """
    c0, c1, c2, c3 = counter
    xp = array_namespace(c0)

    def constant(value: int) -> Any:
        return xp.asarray(value, dtype=c0.dtype, device=device(c0))

    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _product(c0, MULTIPLIERS[0], constant)
        high1, low1 = _product(c2, MULTIPLIERS[1], constant)
        c0, c1, c2, c3 = high1 ^ c1 ^ constant(k0), low1, high0 ^ c3 ^ constant(k1), low0
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3


def keep(like: Any, plane: int, seed: int, dropout_ratio: float) -> Any:
    """Return which elements of a matrix (N, D) dropout keeps: ``word >= threshold``.

    The word of element (row, column) is number ``column % 4`` of counter ``(row, column // 4, plane, 0)`` under the key
    ``(seed mod 2^32, seed / 2^32 mod 2^32)``. ``like``: the matrix; only its shape and its place count.
    """
    xp = array_namespace(like)
    rows, columns = like.shape
    # torch has next to no arithmetic of uint32, and JAX no int64 unless it is asked for.
    kind = xp.int64 if is_torch_namespace(xp) else xp.uint32
    place = device(like)
    plain = xp.int64 if kind == xp.int64 else xp.int32
    row, group = (xp.astype(xp.arange(count, dtype=plain, device=place), kind) for count in (rows, -(-columns // 4)))
    zero = xp.zeros((rows, group.shape[0]), dtype=kind, device=place)
    counter = (row[:, None] + zero, group[None, :] + zero, zero + xp.asarray(plane, dtype=kind, device=place), zero)
    words = xp.stack(philox(counter, (seed & WORD, seed >> 32 & WORD)), axis=-1)
    words = xp.reshape(words, (rows, 4 * group.shape[0]))[:, :columns]
    return words >= xp.asarray(threshold(dropout_ratio), dtype=kind, device=place)


def threshold(dropout_ratio: float) -> int:
    """Return the smallest word w with ``f32(f32(w) * 2^-32) > f32(p)``, for 0 < f32(p) < 1.

    With ``P = f32(p) * 2^32``, that is the first word that rounds to the float32 above P: it lies half a step above P,
    and the tie goes to the even of the two; where the steps are at most 1, it is the first integer above P.
    """
    bits = int(np.float32(dropout_ratio).view(np.uint32))
    mantissa, shift = bits & 0x7FFFFF | 0x800000, (bits >> 23) - 118
    if shift < 1:
        return (mantissa >> -shift) + 1
    return (mantissa << shift) + (1 << (shift - 1)) + (mantissa % 2 == 0)


def keep_factor(dropout_ratio: float) -> float:
    """Return ``1 / (1 - p)`` with p, the difference and the quotient each rounded to float32."""
    one = np.float32(1)
    return float(one / (one - np.float32(dropout_ratio)))


def _product(word: Any, factor: int, constant: Any) -> tuple[Any, Any]:
    """Return the upper and the lower word of a product, from products of halves: no sum exceeds 32 bits."""
    half, low_half = constant(16), constant(0xFFFF)
    upper, lower = word >> half, word & low_half
    m1, m0 = constant(factor >> 16), constant(factor & 0xFFFF)
    bottom, cross0, cross1 = lower * m0, upper * m0, lower * m1
    middle = (bottom >> half) + (cross0 & low_half) + (cross1 & low_half)
    low = ((middle & low_half) << half) | (bottom & low_half)
    high = upper * m1 + (cross0 >> half) + (cross1 >> half) + (middle >> half)
    return high, low
