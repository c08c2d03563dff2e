"""Which part of the work a block and a thread take."""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, cute

from fe_conv.tiles import walk_tokens

from .setup import Setup

__all__ = ["blocks_of", "carveout", "place_of_thread", "row_of_partials", "walks_of"]


def walks_of(setup: Setup, x: cute.Tensor, partials: cute.Tensor | None) -> tuple[Int32, ...]:
    """Return the tiles of a row of the batch, and the tokens of each of their walks; nothing but for ``rows``.

    ``partials`` has a row per tile (see :func:`fe_conv.tiles.tiles_of`); without it :func:`fe_conv.tiles.walk_tokens`
    decides.
    """
    launch, tokens = setup.launch, Int32(x.shape[1])
    if launch.kernel != "rows":
        return ()
    if partials is None:
        extents = (Int64(extent) for extent in x.shape)
        length = Int32(walk_tokens(launch, *extents, smallest=cutlass.min, largest=cutlass.max))
        return _ceil_div(tokens, length * launch.groups), length
    tiles = cutlass.max(Int32(partials.shape[0]) // cutlass.max(Int32(x.shape[0]), Int32(1)), Int32(1))
    return tiles, _ceil_div(tokens, tiles * (launch.groups * launch.unroll)) * launch.unroll


def carveout(setup: Setup) -> int:
    """Return which share of a multiprocessor's fast memory is to be shared memory, in percent."""
    return 100 if setup.launch.stages else -1  # -1: the driver's choice; without it the compiler would ask a GPU


def blocks_of(setup: Setup, x: cute.Tensor, tiles: Int32 | None = None) -> Int32:
    """Return the number of blocks that cover x (B, T, D)."""
    channels, tokens = _pieces(setup, x, tiles)
    return Int32(x.shape[0]) * tokens * channels


def place_of_thread(
    setup: Setup, x: cute.Tensor, walks: tuple[Int32, Int32] | None = None
) -> tuple[Int32, Int32, Int32]:
    """Return a thread's row of the batch, its first token and its first channel; they may lie past the end of x.

    Blocks that run side by side treat neighbouring memory. ``walks``: see :func:`walks_of`.
    """
    launch = setup.launch
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    lane, group = thread % launch.lanes, thread // launch.lanes
    tiles, length = walks or (None, None)
    channels, tokens = _pieces(setup, x, tiles)
    if setup.problem.channel_last:
        channel, rest = block % channels, block // channels
        batch, token = rest // tokens, rest % tokens
        along, across = lane, group
    else:
        batch, rest = block // (channels * tokens), block % (channels * tokens)
        channel, token = rest // tokens, rest % tokens
        along, across = group, lane
    wide, long = _share(setup, length)
    per_channel, per_token = _block(setup, length)
    return batch, token * per_token + across * long, channel * per_channel + along * wide


def row_of_partials(setup: Setup, x: cute.Tensor, batch: Int32, token: Int32) -> Int32:
    """Return the row of the partial sums for the tile of a token."""
    return batch * Int32(cute.ceil_div(x.shape[1], setup.launch.tokens)) + token // setup.launch.tokens


def _share(setup: Setup, length: Int32 | None) -> tuple[int, Int32 | int]:
    """Return how many channels and how many tokens lie between neighbouring threads."""
    launch = setup.launch
    if launch.kernel == "rows":
        return launch.vector, length
    return 1, launch.vector if launch.kernel == "runs" else launch.unroll


def _block(setup: Setup, length: Int32 | None) -> tuple[int, Int32 | int]:
    """Return how many channels and how many tokens a block covers."""
    launch = setup.launch
    wide, long = _share(setup, length)
    if setup.problem.channel_last:
        return launch.lanes * wide, long * launch.groups
    return launch.groups * wide, launch.tokens if launch.kernel == "runs" else launch.lanes * long


def _pieces(setup: Setup, x: cute.Tensor, tiles: Int32 | None) -> tuple[Int32, Int32]:
    channels, tokens = _block(setup, None if tiles is None else Int32(1))
    if tiles is None:
        tiles = Int32(cute.ceil_div(x.shape[1], tokens))
    return Int32(cute.ceil_div(x.shape[2], channels)), tiles


def _ceil_div(dividend: Int32, divisor: Int32) -> Int32:
    """Divide positive numbers, rounding up (cute.ceil_div rejects divisors that the compiler finds constant)."""
    return Int32((Int64(dividend) + (divisor - 1)) // divisor)
