"""Partial sums of the parameter gradients from ``dz`` in every case.

A thread treats ``unroll`` neighbouring taps of a channel (the bias counts as one more tap, which meets 1) and the
tokens of a tile: all of them where channels are neighbours in memory, else every 32nd, and the warp adds up.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute

from fe_runtime.cute.reduce import WARP, warp_sum

from .setup import Setup
from .spot import Spot, is_member, is_same, meet_token, value_of
from .values import keep

__all__ = ["any_sums_kernel", "blocks_of_sums"]


@cute.kernel
def any_sums_kernel(
    setup: cutlass.Constexpr[Setup],
    dz: cute.Tensor,
    x: cute.Tensor,
    labels: cute.Tensor | None,
    offsets: cute.Tensor | None,
    initial: cute.Tensor | None,
    partials: cute.Tensor,
) -> None:
    """Compute ``sum_t dz[t] * h[t + j]`` over a tile for a few taps."""
    launch, problem = setup.launch, setup.problem
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    pieces, runs, tiles = _pieces(setup, x)
    piece, rest = block % pieces, block // pieces
    tap, tile = rest % runs * launch.unroll, rest // runs
    lane, first = thread % WARP, tile % tiles * launch.tokens
    channel, start, step = piece * launch.threads + thread, first, 1
    if cutlass.const_expr(not problem.channel_last):
        channel, start, step = piece * launch.groups + thread // WARP, first + lane, WARP
    if channel < x.shape[2]:
        sums = cute.make_rmem_tensor((launch.unroll,), setup.wide)
        sums.fill(0.0)
        if start < x.shape[1]:
            spot = Spot.of(setup, (x, labels, offsets, initial), tile // tiles, channel, start)
            stop = cutlass.min(first + launch.tokens, Int32(x.shape[1]))
            _add_up(spot, sums, dz, start, stop, step, tap)
        totals = [sums[k] if problem.channel_last else warp_sum(sums[k]) for k in range(launch.unroll)]
        for k in cutlass.range_constexpr(launch.unroll):
            if (tap + k < problem.sums) & ((lane == 0) | problem.channel_last):
                partials[tile, (tap + k) * Int32(x.shape[2]) + channel] = totals[k]


@cute.jit
def _add_up(
    spot: Spot, sums: cute.Tensor, dz: cute.Tensor, start: Int32, stop: Int32, step: cutlass.Constexpr[int], tap: Int32
) -> None:
    for token in cutlass.range(start, stop, step, unroll=1):
        meet_token(spot, token)
        value = dz[spot.batch, token, spot.channel]
        for k in cutlass.range_constexpr(spot.setup.launch.unroll):
            sums[k] = cute.math.fma(value, _met(spot, token, tap + k), sums[k])


@cute.jit
def _met(spot: Spot, token: Int32, tap: Int32) -> Any:
    """Return what a tap meets at a token: 0 at one of no sequence, where x may be NaN."""
    met = spot.setup.wide(1.0)
    if tap < spot.history + 1:
        other = token - spot.history + tap
        met = keep(is_member(spot, token), keep(is_same(spot, token, other), value_of(spot, other)))
    return met


def blocks_of_sums(setup: Setup, x: cute.Tensor) -> Int32:
    """Return the number of blocks for x (B, T, D)."""
    pieces, runs, tiles = _pieces(setup, x)
    return Int32(x.shape[0]) * tiles * runs * pieces


def _pieces(setup: Setup, x: cute.Tensor) -> tuple[Int32, int, Int32]:
    """Return the blocks along the channels, along the taps and along the tokens."""
    launch, problem = setup.launch, setup.problem
    channels = launch.threads if problem.channel_last else launch.groups
    pieces, tiles = Int32(cute.ceil_div(x.shape[2], channels)), Int32(cute.ceil_div(x.shape[1], launch.tokens))
    return pieces, -(-problem.sums // launch.unroll), tiles


any_sums_kernel.set_name_prefix("fe_conv_any_sums", remove_cutlass_symbol=True, keep_mangled_name=False)
