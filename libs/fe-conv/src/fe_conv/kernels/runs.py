"""Loads and stores of neighbouring tokens of a channel, with what lies before and after them.

Functions marked ``cute.jit`` branch or loop on the device; the others only compose while compiling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute

from fe_conv.tiles import halo

from .setup import Setup
from .values import load_piece, store_piece

__all__ = ["Run", "load_run", "store_run"]


@dataclass(frozen=True, slots=True)
class Run:
    """A channel of a row of the batch."""

    setup: Setup
    x: cute.Tensor
    initial: cute.Tensor | None
    batch: Int32
    channel: Int32

    @property
    def tokens(self) -> Int32:
        """Tokens in the row."""
        return Int32(self.x.shape[1])

    def of(self, array: cute.Tensor) -> cute.Tensor:
        """Return the channel's tokens in an array (B, T, D)."""
        return array[self.batch, None, self.channel]


def load_run(
    run: Run, array: cute.Tensor, token: Int32, whole: bool, before: bool = False, after: bool = False
) -> list[Any]:
    """Return a vector of tokens that starts at ``token``, with the W-1 before and the W-1 after it where asked for.

    ``whole``: they all exist, but for those before the row, which come from the initial state. Others give 0.
    """
    vector, piece, history = run.setup.launch.vector, halo(run.setup.problem), run.setup.problem.width - 1
    values: list[Any] = []
    if before:
        values += _items(_load_before(run, token, whole))[piece - history :]
    values += _items(_load(run, array, token, vector, whole))
    if after:
        values += _items(_load(run, array, token + vector, piece, whole))[:history]
    return values


def _items(values: cute.Tensor) -> list[Any]:
    return [values[v] for v in range(cute.size(values.shape))]


@cute.jit
def _load(
    run: Run, array: cute.Tensor, token: Int32, count: cutlass.Constexpr[int], whole: cutlass.Constexpr[bool]
) -> cute.Tensor:
    """Load ``count`` tokens from ``token`` on, a multiple of ``count``."""
    values = cute.make_rmem_tensor((count,), run.setup.dtype)
    if cutlass.const_expr(whole):
        _load_piece(run, array, token, values)
    else:
        values.fill(0.0)
        if token + count <= run.tokens:
            _load_piece(run, array, token, values)
        else:
            for v in cutlass.range_constexpr(count):
                if token + v < run.tokens:
                    values[v] = run.of(array)[token + v]
    return values


def _load_piece(run: Run, array: cute.Tensor, token: Int32, values: cute.Tensor) -> None:
    count = cute.size(values.shape)
    load_piece(cute.local_tile(run.of(array), (count,), (token // count,)), values, run.setup.problem.load_alignment)


@cute.jit
def _load_before(run: Run, token: Int32, whole: cutlass.Constexpr[bool]) -> cute.Tensor:
    """Load the piece of x that ends before ``token``."""
    piece, history = halo(run.setup.problem), run.setup.problem.width - 1
    values = cute.make_rmem_tensor((piece,), run.setup.dtype)
    values.fill(0.0)
    if token > 0:
        loaded = _load(run, run.x, token - piece, piece, whole)
        values.store(loaded.load())
    else:
        if cutlass.const_expr(run.initial is not None):
            for place in cutlass.range_constexpr(history):
                values[piece - history + place] = run.initial[run.batch, run.channel, place]
    return values


@cute.jit
def store_run(run: Run, values: list[Any], array: cute.Tensor, token: Int32, whole: cutlass.Constexpr[bool]) -> None:
    """Store a vector of tokens, those that exist."""
    count = cutlass.const_expr(len(values))
    target = run.of(array)
    if cutlass.const_expr(whole):
        _store_piece(run, values, target, token)
    else:
        if token + count <= run.tokens:
            _store_piece(run, values, target, token)
        else:
            for v in cutlass.range_constexpr(count):
                if token + v < run.tokens:
                    target[token + v] = run.setup.dtype(values[v])


def _store_piece(run: Run, values: list[Any], target: cute.Tensor, token: Int32) -> None:
    count = len(values)
    piece = cute.local_tile(target, (count,), (token // count,))
    store_piece(run.setup, values, piece, run.setup.problem.store_alignment)
