"""Activation functions in float32."""

from __future__ import annotations

import cutlass
from cutlass import Float32, cute

__all__ = ["sigmoid", "silu", "tanh"]

_MINUS_LOG2_E = -1.4426950408889634
_TANH_SERIES = (62 / 2835, -17 / 315, 2 / 15, -1 / 3)
"""Coefficients of z^9, z^7, z^5 and z^3 of tanh(z)."""
_NEAR_ZERO = 0.25


@cute.jit
def sigmoid(z: Float32) -> Float32:
    """Return ``1 / (1 + exp(-z))``.

    Two approximate instructions (``ex2``, ``rcp``). Relative error at most ``2^-21 + |z| * 2^-23`` for z > -87, where
    the second term is that of ``z * log2(e)``: its rounding (``|z| * 2^-24``) and the constant's (``|z| * 2^-26``).
    Below -87 the result is 0 (the exact value is under 2^-125).
    """
    exponential = cute.math.exp2(z * Float32(_MINUS_LOG2_E), approx=True, ftz=True)
    return cute.math.rcp(exponential + Float32(1.0), approx=True, ftz=True)


@cute.jit
def silu(z: Float32) -> Float32:
    """Return ``z / (1 + exp(-z))``: the error of :func:`sigmoid` plus half an ulp.

    ``silu(-inf)`` is NaN, as the formula says.
    """
    return z * sigmoid(z)


@cute.jit
def tanh(z: Float32) -> Float32:
    """Return the hyperbolic tangent, with a relative error of at most 2^-20.

    Near zero its series, whose first term left out is below 2^-26 there; elsewhere ``(1 - exp(-2 |z|)) / (1 + ...)``.
    """
    magnitude = cute.math.absf(z)
    decay = cute.math.exp2(magnitude * Float32(2 * _MINUS_LOG2_E), approx=True, ftz=True)
    far = (Float32(1.0) - decay) * cute.math.rcp(decay + Float32(1.0), approx=True, ftz=True)
    square = z * z
    series = Float32(_TANH_SERIES[0])
    for coefficient in _TANH_SERIES[1:]:
        series = series * square + Float32(coefficient)
    signed = cutlass.select_(z < Float32(0.0), -far, far)
    return Float32(cutlass.select_(magnitude < Float32(_NEAR_ZERO), z + z * (square * series), signed))
