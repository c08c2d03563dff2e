"""A thread's walk over the tokens of a vector of channels: what it loads, and which tokens hang together.

``rows`` holds the W-1 tokens before a chunk of ``unroll`` tokens and the chunk itself, as they were loaded: token ``u``
of the chunk meets the rows ``u .. u + W - 1``. Tokens are counted from the start of their row of the batch.

Functions marked ``cute.jit`` branch or loop on the device; the others only compose while compiling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from .sequences import AGAIN, NUMBER, START, STOP, look_up, whole_row
from .setup import Setup
from .values import keep, load_piece, widened

__all__ = [
    "Walk",
    "begin",
    "carry_over",
    "is_linked",
    "is_member",
    "load_labels",
    "meet_boundary",
    "taps_of",
]


@dataclass(frozen=True, slots=True)
class Walk:
    """A walk over the tokens from ``first`` to before ``stop`` in row ``batch``; ``index`` tells which channels.

    ``within`` tells the sequence of the current token, as :mod:`.sequences` defines; ``labels`` are those of ``rows``.
    """

    setup: Setup
    x: cute.Tensor
    marks: cute.Tensor | None
    offsets: cute.Tensor | None
    initial: cute.Tensor | None
    batch: Int32
    first: Int32
    stop: Int32
    index: Int32
    rows: cute.Tensor
    within: cute.Tensor
    labels: cute.Tensor

    @property
    def tokens(self) -> Int32:
        """Tokens in the row."""
        return Int32(self.x.shape[1])

    @property
    def history(self) -> int:
        """Tokens before the current one that its result depends on."""
        return self.setup.problem.width - 1

    def chunk(self, count: int) -> list[cute.Tensor]:
        """Return the first rows of the current chunk."""
        return [self.rows[None, self.history + u] for u in range(count)]


def begin(setup: Setup, arrays: tuple[Any, Any, Any, Any], place: tuple[Int32, Int32, Int32], length: Int32) -> Walk:
    """Return a walk that knows what came before its first token.

    ``arrays``: x, labels, offsets, initial; ``place``: row, first token and vector of channels.
    """
    size = setup.problem.width - 1 + setup.launch.unroll
    batch, first, index = place
    rows = cute.make_rmem_tensor((setup.launch.vector, size), setup.dtype)
    within, labels = whole_row(batch, Int32(arrays[0].shape[1])), cute.make_rmem_tensor((size,), Int32)
    stop = cutlass.min(first + length, Int32(arrays[0].shape[1]))
    walk = Walk(setup, *arrays, batch, first, stop, index, rows, within, labels)
    if walk.offsets is None:
        _rows_before(walk)
    else:
        look_up(within, walk.offsets, first, walk.tokens)
        for back in range(1, walk.history + 1):
            _row_before(walk, back)
    return walk


@cute.jit
def _rows_before(walk: Walk) -> None:
    """Load the tokens before the first one, where all of a row is one sequence."""
    if walk.first > 0:
        for back in cutlass.range_constexpr(1, walk.history + 1):
            _load(walk, walk.first - back, walk.rows[None, walk.history - back])
    else:
        for back in cutlass.range_constexpr(1, walk.history + 1):
            _earlier_row(walk, Int32(walk.history - back), walk.rows[None, walk.history - back])


@cute.jit
def _row_before(walk: Walk, back: cutlass.Constexpr[int]) -> None:
    """Load the token ``back`` before the first one, or what its sequence has there."""
    target = walk.rows[None, walk.history - back]
    if walk.first - back >= walk.within[START]:
        _load(walk, walk.first - back, target)
    else:
        _earlier_row(walk, walk.first - walk.within[START] + (walk.history - back), target)


@cute.jit
def _earlier_row(walk: Walk, place: Int32, target: cute.Tensor) -> None:
    """Load entry ``place`` of the initial state of the current sequence; 0 where there is none."""
    target.fill(0.0)
    if cutlass.const_expr(walk.initial is not None):
        if walk.within[START] < walk.within[STOP]:
            for v in cutlass.range_constexpr(walk.setup.launch.vector):
                channel = walk.index * walk.setup.launch.vector + v
                target[v] = walk.initial[walk.within[NUMBER], channel, place]


@cute.jit
def meet_boundary(walk: Walk, u: cutlass.Constexpr[int], token: Int32) -> None:
    """Begin the next sequence if a token, number ``u`` of the chunk, is not in the current one (packed only)."""
    if token >= walk.within[AGAIN]:
        look_up(walk.within, walk.offsets, token, walk.tokens)
        for place in cutlass.range_constexpr(walk.history):
            _earlier_row(walk, Int32(place), walk.rows[None, u + place])


def _load(walk: Walk, token: Int32, target: cute.Tensor) -> None:
    piece = cute.local_tile(walk.x[walk.batch, token, None], (walk.setup.launch.vector,), (walk.index,))
    load_piece(piece, target, walk.setup.problem.load_alignment)


def load_labels(walk: Walk, token: Int32, count: int, last: Int32 | None = None) -> None:
    """Load the labels of the rows of the chunk that starts at ``token``; those past ``last`` are replaced by it."""
    if walk.marks is not None:
        for n in range(walk.history + count):
            place = cutlass.max(token + (n - walk.history), Int32(0))
            walk.labels[n] = walk.marks[walk.batch, place if last is None else cutlass.min(place, last)]


def carry_over(walk: Walk) -> None:
    """Keep the last W-1 rows of a full chunk for the next one."""
    for n in range(walk.history):
        walk.rows[None, n].store(walk.rows[None, n + walk.setup.launch.unroll].load())


def is_member(walk: Walk, u: int) -> Boolean | None:
    """Whether the current token, number ``u`` of the chunk, is in a sequence; ``None``: all are."""
    if walk.offsets is not None:
        return walk.within[START] < walk.within[STOP]
    return None if walk.marks is None else walk.labels[walk.history + u] >= 0


def is_linked(walk: Walk, u: int, token: Int32, back: int) -> Boolean | None:
    """Whether the token ``back`` before a token, number ``u`` of the chunk, is in its sequence.

    ``None``: yes, or it lies before the array.
    """
    if walk.offsets is not None:
        return token - walk.within[START] >= back
    return None if walk.marks is None else walk.labels[walk.history + u] == walk.labels[walk.history + u - back]


def taps_of(walk: Walk, u: int) -> list[list[Any]]:
    """Return what the filter of each channel meets at token ``u`` of the chunk, oldest first."""
    rows = [widened(walk.setup, walk.rows[None, u + n]) for n in range(walk.history + 1)]
    if walk.marks is not None:
        same = [walk.labels[u + n] == walk.labels[u + walk.history] for n in range(walk.history)]
        rows[:-1] = [[keep(condition, value) for value in row] for condition, row in zip(same, rows[:-1], strict=True)]
    return [list(taps) for taps in zip(*rows, strict=True)]
