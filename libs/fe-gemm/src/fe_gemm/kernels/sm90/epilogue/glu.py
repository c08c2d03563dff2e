"""Gated activations of columns that alternate in blocks of 32, gate and up, and their slopes: float32, NaN stays NaN.

Fragments hold both columns of a pair in one thread, four blocks of 8 apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, cute

from fe_runtime.cute.activation import sigmoid, tanh

from .cells import fragment

__all__ = ["PAIR_BLOCKS", "Glu"]

PAIR_BLOCKS = 4
"""Blocks of 8 columns from a gate to what it gates."""


@dataclass(frozen=True, slots=True)
class Glu:
    """An activation: swiglu, geglu or situglu, with its scalars, by the names of the operations' arguments.

    Errors are those of :func:`fe_runtime.cute.activation.sigmoid` and ``tanh`` and of one rounding per operation.
    """

    name: str
    first: Float32
    second: Float32
    ceiling: Float32
    floor: Float32

    @classmethod
    def of(cls, name: str, given: Mapping[str, Any]) -> Glu:
        """Return an activation with its scalars out of those of a call."""
        zero = Float32(0.0)
        if name == "geglu":
            names = ("linear_offset", "geglu_alpha", "glu_clamp_max", "glu_clamp_min")
            return cls(name, *(given[scalar] for scalar in names))
        if name == "situglu":
            return cls(name, given["situ_beta1"], given["situ_beta2"], zero, zero)
        return cls(name, zero, zero, zero, zero)

    def of_fragment(self, x: cute.Tensor, prob: tuple[Float32, Float32] | None) -> cute.Tensor:
        """Return the activation of gates and ups in a fragment, times the prob of each of its two rows."""
        count = cute.size(x, mode=[2]) // 2
        values = fragment(count)
        for block in range(count):
            gate = block // PAIR_BLOCKS * 2 * PAIR_BLOCKS + block % PAIR_BLOCKS
            for half in range(2):
                for side in range(2):
                    value = self.value(x[side, half, gate], x[side, half, gate + PAIR_BLOCKS])
                    values[side, half, block] = value if prob is None else value * prob[half]
        return values

    def gradient(
        self, r: cute.Tensor, saved: cute.Tensor, prob: tuple[Float32, Float32] | None
    ) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        """Return the gradients (side, half, block) of gates and ups, in their order, r times the activation, and the
        activation.

        ``r`` is the gradient of the activation, ``saved`` its gates and ups, twice as many blocks; the prob of each row
        is a factor of the gradients, and of what is returned last.
        """
        count = cute.size(r, mode=[2])
        values, terms, acts = (fragment(blocks) for blocks in (2 * count, count, count))
        for block in range(count):
            gate = block // PAIR_BLOCKS * 2 * PAIR_BLOCKS + block % PAIR_BLOCKS
            for half in range(2):
                for side in range(2):
                    given = r[side, half, block]
                    act, by_gate, by_up = self.slopes(saved[side, half, gate], saved[side, half, gate + PAIR_BLOCKS])
                    factor = given if prob is None else given * prob[half]
                    values[side, half, gate] = factor * by_gate
                    values[side, half, gate + PAIR_BLOCKS] = factor * by_up
                    terms[side, half, block] = given * act
                    acts[side, half, block] = act if prob is None else act * prob[half]
        return values, terms, acts

    def value(self, gate: Float32, up: Float32) -> Float32:
        """Return the activation of a gate and what it gates."""
        if self.name == "geglu":
            below = at_most(gate, self.ceiling)
            return (self._clamped(up) + self.first) * (below * sigmoid(self.second * below))
        if self.name == "situglu":
            from_gate, from_up = self._bounded(gate, up)[:2]
            return from_gate * sigmoid(gate) * from_up
        return up * (gate * sigmoid(gate))

    def slopes(self, gate: Float32, up: Float32) -> tuple[Float32, Float32, Float32]:
        """Return the activation, and its slopes by gate and by up; beyond a clamp a slope is 0."""
        if self.name == "geglu":
            return self._geglu_slopes(gate, up)
        one, s = Float32(1.0), sigmoid(gate)
        if self.name == "situglu":
            from_gate, from_up, t, v = self._bounded(gate, up)
            gated = from_gate * s
            by_gate = from_up * ((one - t * t) * s + gated * (one - s))
            return gated * from_up, by_gate, gated * (one - v * v)
        gated = gate * s
        return gated * up, up * s * (one + gate * (one - s)), gated

    def _geglu_slopes(self, gate: Float32, up: Float32) -> tuple[Float32, Float32, Float32]:
        below, shifted = at_most(gate, self.ceiling), self._clamped(up) + self.first
        one, zero, s = Float32(1.0), Float32(0.0), sigmoid(self.second * below)
        gated = below * s
        by_gate = shifted * s * (one + self.second * below * (one - s))
        cut = (up < self.floor) | (up > self.ceiling)
        return (
            gated * shifted,
            Float32(cutlass.select_(gate > self.ceiling, zero, by_gate)),
            Float32(cutlass.select_(cut, zero, gated)),
        )

    def _bounded(self, gate: Float32, up: Float32) -> tuple[Float32, Float32, Float32, Float32]:
        """Return the bounded gate and up of situglu, and the hyperbolic tangents that they are made of."""
        one = Float32(1.0)
        t, v = tanh(gate * (one / self.first)), tanh(up * (one / self.second))
        return self.first * t, self.second * v, t, v

    def _clamped(self, up: Float32) -> Float32:
        return _chosen_or_nan("max", at_most(up, self.ceiling), self.floor)


def at_most(value: Float32, ceiling: Float32) -> Float32:
    """Return the smaller value, or NaN if there is one."""
    return _chosen_or_nan("min", value, ceiling)


def _chosen_or_nan(which: str, a: Float32, b: Float32) -> Float32:
    return cute.arch.inline_ptx(
        f"{which}.NaN.f32 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Float32], read_only_args=[a, b]
    )
