"""Which tokens form a sequence.

Offsets are the caller's data: whatever they hold, nothing here reads outside an array or runs on for ever. A token is
in a sequence if the offsets found by bisection say so; with malformed ones the result is some value.
"""

from __future__ import annotations

from cutlass import Int32, Int64, cute

__all__ = ["AGAIN", "NUMBER", "START", "STOP", "bounds_of", "look_up", "whole_row"]

NUMBER, START, STOP, AGAIN = range(4)
"""What four registers tell about the sequence of a token: its number, where it starts and stops, and the next token for
which to look again. A token in no sequence has ``START == STOP``."""


def whole_row(batch: Int32, tokens: Int32) -> cute.Tensor:
    """Return the registers where a row of the batch is one sequence."""
    within = cute.make_rmem_tensor((4,), Int32)
    within[NUMBER], within[START], within[STOP], within[AGAIN] = batch, Int32(0), tokens, tokens
    return within


@cute.jit
def look_up(within: cute.Tensor, offsets: cute.Tensor, token: Int32, tokens: Int32) -> None:
    """Set the registers for a token of packed sequences."""
    number, start, stop, again = _bounds_of_token(offsets, token, tokens)
    within[NUMBER] = number
    within[START] = start
    within[STOP] = stop
    within[AGAIN] = again


@cute.jit
def bounds_of(offsets: cute.Tensor, number: Int32, tokens: Int32) -> tuple[Int32, Int32]:
    """Return where a sequence starts and stops, ``0 <= start <= stop <= tokens``."""
    start = _offset(offsets, number, tokens)
    stop = _offset(offsets, number + 1, tokens)
    if stop < start:
        stop = start
    return start, stop


@cute.jit
def _bounds_of_token(offsets: cute.Tensor, token: Int32, tokens: Int32) -> tuple[Int32, Int32, Int32, Int32]:
    """Return a token's sequence, where it starts and stops, and the next token for which to ask again.

    ``0 <= start <= token < stop <= tokens`` for a token in a sequence. For others ``start == stop == token``, and the
    number means nothing.
    """
    low, high = Int32(0), Int32(offsets.shape[0])  # how many offsets are at or before the token
    while low < high:
        middle = (low + high) >> 1
        if _offset(offsets, middle, tokens) <= token:
            low = middle + 1
        else:
            high = middle
    number, start, stop, again = low - 1, token, token, tokens
    if low < Int32(offsets.shape[0]):
        again = _offset(offsets, low, tokens)
        if low > 0:
            begin = _offset(offsets, low - 1, tokens)
            if begin <= token:
                start, stop = begin, again
    if again <= token:  # malformed offsets
        start, stop, again = token, token, token + 1
    return number, start, stop, again


@cute.jit
def _offset(offsets: cute.Tensor, number: Int32, tokens: Int32) -> Int32:
    """Return an offset, moved into the array if it lies outside."""
    position = Int64(offsets[number])
    if position < 0:
        position = Int64(0)
    if position > tokens:
        position = Int64(tokens)
    return Int32(position)
