"""The gated activations and their slopes, and columns that alternate in blocks of 32: gate, up, gate, up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from array_api_compat import array_namespace

__all__ = ["Activation", "interleaved", "separated"]

Array: TypeAlias = Any

BLOCK = 32
"""Columns that are all gate, or all up."""


@dataclass(frozen=True)
class Activation:
    """``swiglu``, ``geglu`` or ``situglu`` (with or without the ``d`` of the backward), its factors rounded to fp32."""

    name: str
    linear_offset: float
    alpha: float
    clamp_max: float
    clamp_min: float
    beta1: float
    beta2: float

    @classmethod
    def of(
        cls,
        act_func: str,
        linear_offset: float | None,
        geglu_alpha: float,
        glu_clamp_max: float,
        glu_clamp_min: float,
        situ_beta1: float,
        situ_beta2: float,
    ) -> Activation:
        """Return an activation by the arguments of the operations; ``linear_offset=None``: 1 for geglu."""
        name = act_func.removeprefix("d")
        if name not in ("swiglu", "geglu", "situglu"):
            raise ValueError(f"act_func must be swiglu, geglu or situglu; got {act_func!r}")
        offset = 1.0 if linear_offset is None else linear_offset
        factors = (offset, geglu_alpha, glu_clamp_max, glu_clamp_min, situ_beta1, situ_beta2)
        return cls(name, *(float(np.float32(factor)) for factor in factors))

    def forward(self, gate: Array, up: Array) -> Array:
        """Return the activation of fp32 arrays of one shape. NaN stays NaN."""
        xp = array_namespace(gate)
        if self.name == "geglu":
            gate, up = _at_most(gate, self.clamp_max), self._clamped(up)
            return (up + self.linear_offset) * (gate * _sigmoid(self.alpha * gate)[0])
        s, _ = _sigmoid(gate)
        if self.name == "swiglu":
            return up * (gate * s)
        return (self.beta1 * xp.tanh(gate / self.beta1) * s) * (self.beta2 * xp.tanh(up / self.beta2))

    def backward(self, gate: Array, up: Array) -> tuple[Array, Array, Array]:
        """Return the activation, and its slopes by gate and by up. Beyond a clamp, the slope is 0."""
        if self.name == "geglu":
            return self._geglu_slopes(gate, up)
        if self.name == "situglu":
            return self._situglu_slopes(gate, up)
        s, rest = _sigmoid(gate)
        return gate * s * up, up * s * (1 + gate * rest), gate * s

    def _geglu_slopes(self, gate: Array, up: Array) -> tuple[Array, Array, Array]:
        xp = array_namespace(gate)
        below, shifted = _at_most(gate, self.clamp_max), self._clamped(up) + self.linear_offset
        s, rest = _sigmoid(self.alpha * below)
        zero = xp.zeros_like(gate)
        by_gate = xp.where(gate > self.clamp_max, zero, shifted * s * (1 + self.alpha * below * rest))
        by_up = xp.where((up < self.clamp_min) | (up > self.clamp_max), zero, below * s)
        return below * s * shifted, by_gate, by_up

    def _situglu_slopes(self, gate: Array, up: Array) -> tuple[Array, Array, Array]:
        xp = array_namespace(gate)
        s, rest = _sigmoid(gate)
        t, v = xp.tanh(gate / self.beta1), xp.tanh(up / self.beta2)
        from_gate, from_up = self.beta1 * t * s, self.beta2 * v
        by_gate = from_up * ((1 - t * t) * s + self.beta1 * t * s * rest)
        return from_gate * from_up, by_gate, from_gate * (1 - v * v)

    def _clamped(self, up: Array) -> Array:
        up = _at_most(up, self.clamp_max)
        return array_namespace(up).where(up < self.clamp_min, self.clamp_min, up)


def separated(x: Array) -> tuple[Array, Array]:
    """Return gate and up, each (M, N), of (M, 2N)."""
    xp = array_namespace(x)
    rows, columns = x.shape
    pairs = xp.reshape(x, (rows, columns // (2 * BLOCK), 2, BLOCK))
    gate, up = (xp.reshape(pairs[:, :, part, :], (rows, columns // 2)) for part in (0, 1))
    return gate, up


def interleaved(gate: Array, up: Array) -> Array:
    """Return (M, 2N) of gate and up, (M, N)."""
    xp = array_namespace(gate)
    rows, columns = gate.shape
    parts = [xp.reshape(part, (rows, columns // BLOCK, BLOCK)) for part in (gate, up)]
    return xp.reshape(xp.stack(parts, axis=2), (rows, 2 * columns))


def _at_most(x: Array, ceiling: float) -> Array:
    return array_namespace(x).where(x > ceiling, ceiling, x)


def _sigmoid(z: Array) -> tuple[Array, Array]:
    """Return ``1 / (1 + exp(-z))`` without overflow, and 1 minus it without cancellation."""
    xp = array_namespace(z)
    decay = xp.exp(-xp.abs(z))
    positive, one = z >= 0, xp.ones_like(z)
    return xp.where(positive, one, decay) / (1 + decay), xp.where(positive, decay, one) / (1 + decay)
