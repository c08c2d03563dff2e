"""What ``causal_conv1d`` and its gradient are, token by token and tap by tap in float64: shares nothing with the
reference.

First it is written down where every value comes from (:class:`Taps`); the sums then follow that list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

TOKEN, STATE = "token", "state"
Place = tuple[str, int, int]  # (TOKEN, batch row, t) or (STATE, sequence, i)


@dataclass
class Taps:
    """``terms[b, t]`` lists (tap, place of the value); a token without an entry belongs to no sequence.

    ``finals[n, i]`` is the place that a final state copies, ``None`` for a zero.
    """

    terms: dict[tuple[int, int], list[tuple[int, Place]]]
    finals: dict[tuple[int, int], Place | None]


def taps(shape: Any, width: int, offsets: Any = None, labels: Any = None, has_states: bool = False) -> Taps:
    """List the taps of every token of x of ``shape`` (B, D, T)."""
    batch, _, length = shape
    if labels is not None:
        return Taps(_labelled(np.asarray(labels), width), {})
    if offsets is None:
        spans = [(b, 0, length) for b in range(batch)]
    else:
        spans = [(0, int(start), int(stop)) for start, stop in pairwise(offsets)]
    terms: dict[tuple[int, int], list[tuple[int, Place]]] = {}
    finals: dict[tuple[int, int], Place | None] = {}
    for n, (b, start, stop) in enumerate(spans):
        history: list[Place | None] = [(STATE, n, i) if has_states else None for i in range(width - 1)]
        whole = history + [(TOKEN, b, t) for t in range(start, stop)]
        for t in range(start, stop):
            window = whole[t - start : t - start + width]
            terms[b, t] = [(j, place) for j, place in enumerate(window) if place is not None]
        for i, place in enumerate(whole[len(whole) - (width - 1) :]):
            finals[n, i] = place
    return Taps(terms, finals)


def _labelled(labels: Any, width: int) -> dict[tuple[int, int], list[tuple[int, Place]]]:
    terms = {}
    for b, t in np.ndindex(*labels.shape):
        if labels[b, t] < 0:
            continue
        reached = [(j, t - (width - 1) + j) for j in range(width)]
        terms[b, t] = [(j, (TOKEN, b, p)) for j, p in reached if p >= 0 and labels[b, p] == labels[b, t]]
    return terms


def forward(
    x: Any, weight: Any, bias: Any = None, activation: str = "identity", *, states: Any = None, **where: Any
) -> tuple[Any, Any]:
    """Return y (B, D, T) and the final states (N, D, W-1), which are meaningless with labels."""
    x, weight, bias, states = _wide(x, weight, bias, states)
    found = taps(x.shape, weight.shape[1], has_states=states is not None, **where)
    y = np.zeros_like(x)
    for (b, t), terms in found.terms.items():
        z = _preactivation(x, weight, bias, states, terms)
        y[b, :, t] = z if activation == "identity" else z * _sigmoid(z)
    count = 1 + max((n for n, _ in found.finals), default=-1)
    final = np.zeros((count, x.shape[1], weight.shape[1] - 1))
    for (n, i), place in found.finals.items():
        if place is not None:
            final[n, :, i] = _value(x, states, place)
    return y, final


def magnitude(x: Any, weight: Any, bias: Any = None, *, states: Any = None, **where: Any) -> float:
    """Return the largest sum of absolute terms of any output."""
    given = [None if a is None else np.abs(_wide(a)[0]) for a in (x, weight, bias, states)]
    y, _ = forward(given[0], given[1], given[2], states=given[3], **where)
    return float(np.max(y, initial=0.0))


def backward(
    dy: Any,
    dfinal: Any,
    x: Any,
    weight: Any,
    bias: Any = None,
    activation: str = "identity",
    *,
    states: Any = None,
    absolute: bool = False,
    **where: Any,
) -> dict[str, Any]:
    """Return the gradients ``x``, ``weight``, ``bias``, ``states`` of ``sum(dy*y) + sum(dfinal*final)``.

    ``absolute``: of every term its absolute value, for bounds on the rounding of the sums.
    """
    dy, dfinal, x, weight, bias, states = _wide(dy, dfinal, x, weight, bias, states)
    found = taps(x.shape, weight.shape[1], has_states=states is not None, **where)
    size = np.abs if absolute else (lambda value: value)
    gradient = {TOKEN: np.zeros_like(x), STATE: None if states is None else np.zeros_like(states)}
    dweight, dbias = np.zeros_like(weight), np.zeros(x.shape[1])
    for (b, t), terms in found.terms.items():
        z = _preactivation(x, weight, bias, states, terms)
        s = _sigmoid(z)
        dz = dy[b, :, t] * (1 if activation == "identity" else s * (1 + z * (1 - s)))
        dbias += size(dz)
        for j, place in terms:
            dweight[:, j] += size(dz * _value(x, states, place))
            kind, row, index = place
            gradient[kind][row, :, index] += size(dz * weight[:, j])
    for (n, i), final in found.finals.items() if dfinal is not None else ():
        if final is not None:
            kind, row, index = final
            gradient[kind][row, :, index] += size(dfinal[n, :, i])
    return {"x": gradient[TOKEN], "weight": dweight, "bias": dbias, "states": gradient[STATE]}


def derivative(function: Any, at: Any, step: float = 1e-6) -> Any:
    """Return central differences of a scalar function of one array."""
    at = np.asarray(at, np.float64)
    result = np.empty_like(at)
    for index in np.ndindex(*at.shape):
        values = []
        for sign in (1, -1):
            moved = at.copy()
            moved[index] += sign * step
            values.append(function(moved))
        result[index] = (values[0] - values[1]) / (2 * step)
    return result


def operands(
    batch: int, channels: int, length: int, width: int, *, rows: int | None = None, seed: int = 0
) -> dict[str, Any]:
    """Return random x (B, D, T), weight, bias and states (rows or B, D, W-1) in float64."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, Sequence[int]] = {
        "x": (batch, channels, length),
        "weight": (channels, width),
        "bias": (channels,),
        "states": (batch if rows is None else rows, channels, width - 1),
    }
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def _preactivation(x: Any, weight: Any, bias: Any, states: Any, terms: list[tuple[int, Place]]) -> Any:
    z = np.zeros(x.shape[1])
    for j, place in terms:
        z = z + weight[:, j] * _value(x, states, place)
    return z if bias is None else z + bias


def _value(x: Any, states: Any, place: Place) -> Any:
    kind, row, index = place
    return (x if kind == TOKEN else states)[row, :, index]


def _sigmoid(z: Any) -> Any:
    return np.exp(-np.logaddexp(0, -z))


def _wide(*arrays: Any) -> list[Any]:
    return [None if array is None else np.asarray(array, np.float64) for array in arrays]
