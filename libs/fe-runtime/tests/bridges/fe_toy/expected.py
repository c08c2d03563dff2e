"""What ``scale_clamp`` and its derivative are, in float64 numpy: shares nothing with the reference."""

from __future__ import annotations

import numpy as np


def value(x, bias=0.0, scale=1.0, limit=1.0):
    z = np.float64(x) * scale + np.float64(bias)
    return np.minimum(np.maximum(z, -limit), limit)


def kept(x, bias=0.0, scale=1.0, limit=1.0):
    z = np.float64(x) * scale + np.float64(bias)
    return np.uint8((z >= -limit) & (z <= limit))


def derivative(function, x, step=1e-6):
    """Central differences of a scalar function of one array."""
    x = np.float64(x)
    result = np.empty_like(x)
    for index in np.ndindex(*x.shape):
        moved = x.copy()
        moved[index] += step
        above = function(moved)
        moved[index] -= 2 * step
        result[index] = (above - function(moved)) / (2 * step)
    return result


def sample(*shape, seed=0):
    """Normal values none of which lies near the clipping points of the tests."""
    x = np.random.default_rng(seed).standard_normal(shape)
    return np.float32(np.where(np.abs(np.abs(x) - 0.5) < 0.01, 0.3, x))
