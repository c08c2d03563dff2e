"""The convolution where channels are neighbours in memory.

A thread holds a vector of channels and walks over tokens, the W-1 before the current one in registers.
It moves 2 * size bytes per value of x: each value is read once, but for W-1 tokens before each walk (which come from
the second-level cache), and written once.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute

from .setup import Setup
from .stream import Stream, advance, ring_of, settle, start
from .tiling import place_of_thread
from .values import activated, convolved, filters, keep, store_piece
from .walk import Walk, begin, carry_over, is_member, load_labels, meet_boundary, taps_of

__all__ = ["forward_rows_kernel"]


@cute.kernel
def forward_rows_kernel(
    setup: cutlass.Constexpr[Setup],
    x: cute.Tensor,
    weight: cute.Tensor,
    bias: cute.Tensor | None,
    labels: cute.Tensor | None,
    offsets: cute.Tensor | None,
    initial: cute.Tensor | None,
    y: cute.Tensor,
    tiles: Int32,
    length: Int32,
) -> None:
    """Compute y for the tokens and channels of each thread; ``tiles`` and ``length``: see :func:`.tiling.walks_of`."""
    batch, first, channel = place_of_thread(setup, x, (tiles, length))
    ring = ring_of(setup, cutlass.memory.SmemAllocator())
    if (first < x.shape[1]) & (channel < x.shape[2]):
        place = (batch, first, channel // setup.launch.vector)
        stream = Stream.of(setup, x, place, length, ring)
        ahead = start((stream,))
        parameters = filters(setup, weight, bias, place[2], setup.launch.vector)
        walk = begin(setup, (x, labels, offsets, initial), place, length)
        _convolve(walk, parameters, stream, Stream.of(setup, y, place, length, None), ahead)


@cute.jit
def _convolve(walk: Walk, parameters: Any, stream: Stream, out: Stream, ahead: tuple[cute.Pointer, ...]) -> None:
    unroll = walk.setup.launch.unroll
    full = (walk.stop - walk.first) // unroll
    here = out.first.iterator
    for chunk in cutlass.range(full, unroll=1):
        token, targets = walk.first + chunk * unroll, out.chunk(here)
        places, ahead = ahead, advance((stream,), chunk, ahead)
        stream.read(chunk, places[0], walk.chunk(unroll))
        load_labels(walk, token, unroll)
        for u in cutlass.range_constexpr(unroll):
            _treat(walk, parameters, u, token + u, targets[u])
        carry_over(walk)
        here = out.after(here)
    rest = walk.first + full * unroll
    settle((stream,))
    if rest < walk.stop:
        targets = out.chunk(here)
        stream.read(full, ahead[0], walk.chunk(unroll - 1), walk.stop - rest)
        load_labels(walk, rest, unroll - 1, walk.stop - 1)
        for u in cutlass.range_constexpr(unroll - 1):
            if rest + u < walk.stop:
                _treat(walk, parameters, u, rest + u, targets[u])


def _treat(walk: Walk, parameters: Any, u: int, token: Int32, target: cute.Tensor) -> None:
    """Compute a token, number ``u`` of the chunk."""
    setup, (taps, shifts) = walk.setup, parameters
    if setup.problem.offsets is not None:
        meet_boundary(walk, u, token)
    member = is_member(walk, u)
    results = []
    for v, values in enumerate(taps_of(walk, u)):
        z = convolved(values, taps[v], None if shifts is None else shifts[v])
        results.append(keep(member, activated(setup, z)))
    store_piece(setup, results, target, setup.problem.store_alignment)


forward_rows_kernel.set_name_prefix("fe_conv_forward_rows", remove_cutlass_symbol=True, keep_mangled_name=False)
