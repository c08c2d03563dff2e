"""The arithmetic of the gradient of the Engram gate, which two forms of its kernels share.

Functions marked ``cute.jit`` branch or loop on the device; the others only compose while compiling.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, cute

from fe_attention.planning.engram import Problem

from .engram_common import FLOOR

__all__ = ["NUMBERS", "coefficients_of", "gradients_of"]

NUMBERS = 4
"""Of a stream of a token: gate, dot, rx, rk as saved; gate, c, cx, ck as needed."""


def coefficients_of(problem: Problem, total: Float32, state: cute.Tensor) -> cute.Tensor:
    """Return gate, c, cx, ck: all 0 where the gate is."""
    gate, dot, rx, rk = (state[number] for number in range(NUMBERS))
    magnitude = Float32(cute.math.absf(dot))
    slope = Float32(0.5) * cute.math.rsqrt(magnitude, approx=True)
    slope = total * gate * (Float32(1.0) - gate) * slope
    slope = cutlass.select_(magnitude >= Float32(FLOOR), slope, Float32(0.0))
    share = slope * dot
    parts = [
        gate,
        slope * rx * rk * Float32(problem.width**-0.5),
        share * rx * rx * Float32(1.0 / problem.width),
        share * rk * rk * Float32(1.0 / problem.width),
    ]
    found = cute.make_rmem_tensor((NUMBERS,), Float32)
    for number, part in enumerate(parts):
        found[number] = cutlass.select_(gate != Float32(0.0), part, Float32(0.0))
    return found


@cute.jit
def gradients_of(
    grad_out: cute.Tensor,
    x: cute.Tensor,
    key: cute.Tensor,
    gains: cute.Tensor,
    numbers: cute.Tensor,
    added: cute.Tensor,
    dv: cute.Tensor,
    dx: cute.Tensor,
    dk: cute.Tensor,
) -> None:
    """Make dx and dk of some columns of a stream, and add to dv and the weight's sums, unless the gate is 0."""
    gate, c, cx, ck = numbers[0], numbers[1], numbers[2], numbers[3]
    dx.store(grad_out.load().to(Float32))
    dk.fill(0.0)
    if gate != Float32(0.0):
        g, xs, ks = (values.load().to(Float32) for values in (grad_out, x, key))
        for n in cutlass.range_constexpr(cute.size(dx.shape)):
            cw = c * gains[n]
            dx[n] = g[n] + cw * ks[n] - cx * xs[n]
            dk[n] = cw * xs[n] - ck * ks[n]
            added[n] = added[n] + c * (xs[n] * ks[n])
            dv[n] = dv[n] + gate * g[n]
