"""Single values of x and of what surrounds it, for the kernels that serve every case.

Functions marked ``cute.jit`` branch or loop on the device; the others only compose while compiling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from .sequences import AGAIN, NUMBER, START, STOP, look_up, whole_row
from .setup import Setup

__all__ = ["Spot", "is_member", "is_same", "later_value", "meet_token", "shift", "value_of"]


@dataclass(frozen=True, slots=True)
class Spot:
    """A channel of a row of the batch, and in ``within`` the sequence that a thread is in (see :mod:`.sequences`)."""

    setup: Setup
    x: cute.Tensor
    labels: cute.Tensor | None
    offsets: cute.Tensor | None
    initial: cute.Tensor | None
    batch: Int32
    channel: Int32
    within: cute.Tensor

    @staticmethod
    def of(setup: Setup, arrays: tuple[Any, Any, Any, Any], batch: Int32, channel: Int32, token: Int32) -> Spot:
        """Return the spot of a token; ``arrays``: x, labels, offsets, initial."""
        tokens = Int32(arrays[0].shape[1])
        spot = Spot(setup, *arrays, batch, channel, whole_row(batch, tokens))
        if spot.offsets is not None:
            look_up(spot.within, spot.offsets, token, tokens)
        return spot

    @property
    def history(self) -> int:
        """Tokens before one that its result depends on."""
        return self.setup.problem.width - 1

    @property
    def tokens(self) -> Int32:
        """Tokens in the row."""
        return Int32(self.x.shape[1])


@cute.jit
def meet_token(spot: Spot, token: Int32) -> None:
    """Enter the sequence of a token, which comes after those met before."""
    if cutlass.const_expr(spot.offsets is not None):
        if token >= spot.within[AGAIN]:
            look_up(spot.within, spot.offsets, token, spot.tokens)


@cute.jit
def value_of(spot: Spot, token: Int32) -> Any:
    """Return what the current sequence has at a token: x, the initial state before it, or 0."""
    value = spot.setup.wide(0.0)
    if token >= spot.within[START]:
        if token < spot.within[STOP]:
            value = spot.setup.wide(spot.x[spot.batch, token, spot.channel])
    else:
        if cutlass.const_expr(spot.initial is not None):
            place = token - spot.within[START] + spot.history
            if (spot.within[START] < spot.within[STOP]) & (place >= 0):
                value = spot.setup.wide(spot.initial[spot.within[NUMBER], spot.channel, place])
    return value


@cute.jit
def later_value(spot: Spot, array: cute.Tensor, token: Int32) -> Any:
    """Return an array's value at a token after the sequence's start, or 0 past its end."""
    value = spot.setup.wide(0.0)
    if token < spot.within[STOP]:
        value = array[spot.batch, token, spot.channel]
    return value


def is_member(spot: Spot, token: Int32) -> Boolean | None:
    """Whether a token of the current sequence is in a sequence at all; ``None``: all are."""
    if spot.offsets is not None:
        return spot.within[START] < spot.within[STOP]
    return None if spot.labels is None else spot.labels[spot.batch, token] >= 0


def is_same(spot: Spot, token: Int32, other: Int32) -> Boolean | None:
    """Whether two tokens have the same label, the other one limited to the row; ``None``: there are no labels."""
    if spot.labels is None:
        return None
    place = cutlass.max(cutlass.min(other, spot.tokens - 1), Int32(0))
    return spot.labels[spot.batch, token] == spot.labels[spot.batch, place]


def shift(window: cute.Tensor, value: Any) -> None:
    """Drop the first value of a window and append another."""
    last = cute.size(window.shape) - 1
    for k in range(last):
        window[k] = window[k + 1]
    window[last] = value
