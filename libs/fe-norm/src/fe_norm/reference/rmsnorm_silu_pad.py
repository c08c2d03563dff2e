"""Pre-add, L2 normalisation, SiLU, halo padding and the cache of the last frames, on arrays of any framework."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from fe_runtime import formats

__all__ = ["rmsnorm_silu_pad"]

FRAMES = 2
"""Frames before the first one, and the most that are cached."""
SMALLEST_NORM = 1e-12


def rmsnorm_silu_pad(
    x: Any,
    gamma: Any,
    input_bias: Any = None,
    previous: Any = None,
    residual: Any = None,
    residual_bias: Any = None,
    *,
    save_input: bool = False,
) -> tuple[Any, Any, Any]:
    """Add, normalise each pixel's channels, activate, and surround the frames; each step rounds to the dtype of x.

    Parameters
    ----------
    x
        (N, T, H, W, C).
    gamma, input_bias, residual_bias
        (C,); the biases may be ``None``.
    previous
        (N, 1 or 2, H, W, C) or ``None``: activated frames that come before the first one.
    residual
        As x, or ``None``; added after its bias.
    save_input
        Return the sum also without a residual.

    Returns
    -------
    tuple
        ``(padded, cache, sum)``: (N, T+2, H+2, W+2, C), the last up to two frames (N, K, H, W, C), and what was
        normalised, or ``None``.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: RMSNorm + SiLU + padding, numerics.
    """
    xp = array_namespace(x)
    v = _sum(xp, x, input_bias, residual, residual_bias)
    frames = _activated(xp, v, gamma)
    if previous is not None:
        frames = xp.concat([previous, frames], axis=1)
    cache = xp.concat([frames[:, -min(FRAMES, frames.shape[1]) :, ...]], axis=1)  # a copy: it outlives the frames
    padded = _padded(xp, frames, before=x.shape[1] + FRAMES - frames.shape[1])
    return padded, cache, v if save_input or residual is not None else None


def _sum(xp: Any, x: Any, input_bias: Any, residual: Any, residual_bias: Any) -> Any:
    v = _wide(xp, x)
    if input_bias is not None:
        v = _rounded(xp, v + _wide(xp, input_bias), x)
    if residual is not None:
        r = _wide(xp, residual)
        if residual_bias is not None:
            r = _rounded(xp, r + _wide(xp, residual_bias), x)
        v = _rounded(xp, v + r, x)
    return formats.cast(v, x.dtype)


def _activated(xp: Any, values: Any, gamma: Any) -> Any:
    v = _wide(xp, values)
    norm = xp.sqrt(xp.sum(v * v, axis=-1, keepdims=True))
    norm = xp.where(norm < SMALLEST_NORM, xp.full_like(norm, SMALLEST_NORM), norm)  # keeps NaN
    n = _rounded(xp, v / norm, values)
    s = _rounded(xp, n * float(np.float32(math.sqrt(values.shape[-1]))), values)
    g = _rounded(xp, s * _wide(xp, gamma), values)
    return formats.cast(g / (1 + xp.exp(-g)), values.dtype)


def _padded(xp: Any, frames: Any, before: int) -> Any:
    """Put zero frames before, and a border of zeros around each frame."""
    for axis, (low, high) in ((1, (before, 0)), (2, (1, 1)), (3, (1, 1))):
        first = tuple(slice(0, 1) if number == axis else slice(None) for number in range(frames.ndim))
        zero = xp.zeros_like(frames[first])
        frames = xp.concat([zero] * low + [frames] + [zero] * high, axis=axis)
    return frames


def _wide(xp: Any, values: Any) -> Any:
    return xp.astype(values, xp.float32)


def _rounded(xp: Any, values: Any, like: Any) -> Any:
    return _wide(xp, formats.cast(values, like.dtype))
