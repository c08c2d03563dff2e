"""Activation functions in float32."""

from __future__ import annotations

from cutlass import Float32, cute

__all__ = ["sigmoid", "silu"]

_MINUS_LOG2_E = -1.4426950408889634


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
