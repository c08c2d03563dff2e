"""Rotation of the last 64 channels by prepared tables, on arrays of any framework."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from . import exact

__all__ = ["TAIL", "rotate_tail", "tail_rope"]

TAIL = 64
"""Channels that are rotated, the last ones."""


def tail_rope(x: Any, cosine: Any, sine: Any) -> tuple[Any]:
    """Return a copy of ``x`` whose last 64 channels are rotated pairwise.

    ``a, b`` a pair, ``c, s`` its table entries: ``bf16(fma(a, c, -RN(b*s)))`` and ``bf16(fma(b, c, RN(a*s)))``.

    Parameters
    ----------
    x
        (T, ..., D) bfloat16, D even and at least 64.
    cosine, sine
        (T, 32) float32.

    Returns
    -------
    tuple
        The rotated copy alone. All other channels keep their bits.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: tail RoPE, arithmetic.
    """
    shape = (cosine.shape[0],) + (1,) * (x.ndim - 2) + (TAIL // 2,)
    return (rotate_tail(x, cosine.reshape(shape), sine.reshape(shape)),)


def rotate_tail(x: Any, cosine: Any, sine: Any) -> Any:
    """Return ``x`` (..., D) with its tail rotated by tables that broadcast to (..., 32)."""
    xp = array_namespace(x)
    first = x.shape[-1] - TAIL
    tail = exact.widen(x[..., first:])
    a, b = tail[..., 0::2], tail[..., 1::2]
    even = exact.fused(a, cosine, -exact.multiply(b, sine))
    odd = exact.fused(b, cosine, exact.multiply(a, sine))
    pairs = xp.stack([exact.narrow(even), exact.narrow(odd)], axis=-1)
    return exact.join([x[..., :first], pairs.reshape((*x.shape[:-1], TAIL))])
