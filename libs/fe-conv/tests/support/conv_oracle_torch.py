"""``causal_conv1d`` in float64 on torch tensors, sequence by sequence: fast enough for a GPU, differentiable."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch


@dataclass
class Call:
    """The operands of one call; x is (B, D, T), of any strides."""

    x: Any
    weight: Any
    bias: Any = None
    states: Any = None
    offsets: Any = None
    labels: Any = None
    activation: str = "silu"

    @property
    def arguments(self) -> dict[str, Any]:
        """The same as keywords of ``causal_conv1d``."""
        known = {"x": self.x, "weight": self.weight, "bias": self.bias, "activation": self.activation}
        known |= {"initial_states": self.states, "cu_seqlens": self.offsets, "seq_idx": self.labels}
        return known | {"return_final_states": self.labels is None}

    @property
    def leaves(self) -> dict[str, Any]:
        """The operands that have gradients."""
        known = {"x": self.x, "weight": self.weight, "bias": self.bias, "states": self.states}
        return {name: array for name, array in known.items() if array is not None}


def forward(call: Call) -> tuple[Any, Any, Any]:
    """Return z (before the activation), y and the final states (``None`` with labels), in float64."""
    x, weight = call.x.double(), call.weight.double()
    width = weight.shape[1]
    if call.labels is not None:
        z, final = _labelled(x, weight, call.labels), None
    else:
        states = x.new_zeros(_rows(call), x.shape[1], width - 1) if call.states is None else call.states.double()
        z, final = _sequences(x, weight, states, call.offsets)
    inside = _inside(call)
    z = z if call.bias is None else z + call.bias.double()[:, None]
    y = z * torch.sigmoid(z) if call.activation == "silu" else z
    return z, torch.where(inside, y, 0.0), final


def gradients(call: Call, dy: Any, dfinal: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the gradients by name, and for each a size to which the error of fp32 arithmetic is proportional.

    That is the sum of the absolute values of its terms ``dz*w`` or ``dz*h``. An error ``e`` of ``z``, proportional to
    the absolute terms of ``z`` in turn, moves ``dz = dy*silu'(z)`` by ``dy*silu''(z)*e``, and ``|silu''| <= 1/2``: so
    ``dz`` counts as ``dy*(1 + size of z)``, also where ``silu'`` is zero.
    """
    leaves = {name: array.detach().double().requires_grad_() for name, array in call.leaves.items()}
    _, y, final = forward(_with(call, leaves))
    found = _grad(y, final, dy, dfinal, leaves)
    sizes = {name: array.detach().abs().requires_grad_() for name, array in leaves.items()}
    linear, _, ends = forward(_with(call, sizes, activation="identity"))
    spread = dy.double().abs() * (1 + (linear.detach() if call.activation == "silu" else 0))
    spread = torch.where(_inside(call), spread, 0.0)
    return found, _grad(linear, ends, spread, None if dfinal is None else dfinal.abs(), sizes)


def magnitude(call: Call) -> float:
    """Return the largest sum of absolute terms of any output."""
    sizes = {name: array.detach().double().abs() for name, array in call.leaves.items()}
    z, _, _ = forward(_with(call, sizes, activation="identity"))
    return float(z.max()) if z.numel() else 0.0


def _with(call: Call, leaves: dict[str, Any], activation: str | None = None) -> Call:
    known = {name: leaves.get(name) for name in ("x", "weight", "bias", "states")}
    return Call(**known, offsets=call.offsets, labels=call.labels, activation=activation or call.activation)


def _grad(y: Any, final: Any, dy: Any, dfinal: Any, leaves: dict[str, Any]) -> dict[str, Any]:
    outputs, grads = [y], [dy.double()]
    if dfinal is not None:
        outputs, grads = [y, final], [dy.double(), dfinal.double()]
    found = torch.autograd.grad(outputs, list(leaves.values()), grads, allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
    }


def _rows(call: Call) -> int:
    return int(call.x.shape[0]) if call.offsets is None else len(call.offsets) - 1


def _inside(call: Call) -> Any:
    """Return which tokens belong to a sequence, to broadcast against (B, D, T)."""
    length = call.x.shape[2]
    if call.labels is not None:
        return (call.labels >= 0)[:, None, :]
    if call.offsets is None:
        return torch.ones(1, 1, length, dtype=torch.bool, device=call.x.device)
    first, last = int(call.offsets[0]), int(call.offsets[-1])
    at = torch.arange(length, device=call.x.device)
    return ((at >= first) & (at < last))[None, None, :]


def _sequences(x: Any, weight: Any, states: Any, offsets: Any) -> tuple[Any, Any]:
    if offsets is None:
        return _one(torch.cat([states, x], dim=2), weight)
    bounds = offsets.tolist()
    parts = [
        _one(torch.cat([states[n : n + 1], x[:, :, start:stop]], dim=2), weight)
        for n, (start, stop) in enumerate(pairwise(bounds))
    ]
    before, after = x.new_zeros(1, x.shape[1], bounds[0]), x.new_zeros(1, x.shape[1], x.shape[2] - bounds[-1])
    return torch.cat([before, *(z for z, _ in parts), after], dim=2), torch.cat([end for _, end in parts])


def _one(h: Any, weight: Any) -> tuple[Any, Any]:
    width = weight.shape[1]
    length = h.shape[2] - width + 1
    z = torch.zeros_like(h[:, :, :length])
    for j in range(width):
        z = z + weight[:, j, None] * h[:, :, j : j + length]
    return z, h[:, :, length:]


def _labelled(x: Any, weight: Any, labels: Any) -> Any:
    width, length = weight.shape[1], x.shape[2]
    z = torch.zeros_like(x)
    for back in range(min(width, length)):
        same = (labels[:, back:] == labels[:, : length - back])[:, None, :]
        tap = torch.where(same, x[:, :, : length - back], 0.0) * weight[:, width - 1 - back, None]
        z = z + torch.nn.functional.pad(tap, (back, 0))
    return z
