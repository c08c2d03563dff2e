"""The gradients of x, weight and bias where channels are neighbours in memory.

A thread holds a vector of channels and walks over tokens once. At each token it computes ``z`` again from the W-1
tokens before it, then ``dz``; it adds ``dz * h`` to the sums for the filter, and ``dz * weight`` to the gradients of
the current and of the W-1 earlier tokens, the oldest of which is then complete and stored. After its own tokens it
looks at the next W-1, which belong to another walk, to complete the last gradients.

Each thread copies x and dy of its next tokens to its own places in shared memory meanwhile (see :mod:`.stream`).

It moves 3 * size bytes per value of x. The W-1 tokens before and after each walk come from the second-level cache, and
each tile of tokens writes one row of partial sums, ``4 * (W + 1) / tile`` bytes per value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from .partials import store_sums
from .sequences import NUMBER, START, STOP
from .setup import Setup
from .stream import Stream, advance, ring_of, settle, start
from .tiling import place_of_thread
from .values import convolved, derivative, filters, keep, store_piece, widened
from .walk import Walk, begin, carry_over, is_linked, is_member, load_labels, meet_boundary, taps_of

__all__ = ["backward_rows_kernel"]


@cute.kernel
def backward_rows_kernel(
    setup: cutlass.Constexpr[Setup],
    dy: cute.Tensor,
    dfinal: cute.Tensor | None,
    x: cute.Tensor,
    weight: cute.Tensor,
    bias: cute.Tensor | None,
    labels: cute.Tensor | None,
    offsets: cute.Tensor | None,
    initial: cute.Tensor | None,
    dx: cute.Tensor,
    partials: cute.Tensor,
    tiles: Int32,
    length: Int32,
) -> None:
    """Compute dx for the tokens and channels of each thread, and the partial sums of each tile.

    ``tiles`` and ``length``: see :func:`.tiling.walks_of`.
    """
    allocator = cutlass.memory.SmemAllocator()
    rings = ring_of(setup, allocator), ring_of(setup, allocator)
    batch, first, channel = place_of_thread(setup, x, (tiles, length))
    sums = cute.make_rmem_tensor((setup.launch.vector, setup.problem.sums), setup.wide)
    sums.fill(0.0)
    if (first < x.shape[1]) & (channel < x.shape[2]):
        place = (batch, first, channel // setup.launch.vector)
        wanted = length + (setup.problem.width - 1)
        streams = tuple(Stream.of(setup, a, place, wanted, ring) for a, ring in zip((x, dy), rings, strict=True))
        ahead = start(streams)
        parameters = filters(setup, weight, bias, place[2], setup.launch.vector)
        walk = begin(setup, (x, labels, offsets, initial), place, length)
        out = Stream.of(setup, dx, place, length, None)
        _walk_over(Gradient(walk, *parameters, streams, dfinal, out, sums, *_registers(setup)), ahead)
    store_sums(setup, sums, partials, Int32(x.shape[2]), allocator)


@dataclass(frozen=True, slots=True)
class Gradient:
    """A walk and what the gradient needs beside it.

    ``streams`` are those of x and dy. ``pending[:, k - 1]`` is the gradient of the token ``k`` before the current one,
    as far as it is known; ``sums`` are the gradients of the taps and of the bias; ``chunk`` holds dy.
    """

    walk: Walk
    taps: list[list[Any]]
    shifts: list[Any] | None
    streams: tuple[Stream, Stream]
    dfinal: cute.Tensor | None
    out: Stream
    sums: cute.Tensor
    pending: cute.Tensor
    chunk: cute.Tensor


def _registers(setup: Setup) -> tuple[cute.Tensor, cute.Tensor]:
    pending = cute.make_rmem_tensor((setup.launch.vector, setup.problem.width - 1), setup.wide)
    pending.fill(0.0)
    return pending, cute.make_rmem_tensor((setup.launch.vector, setup.launch.unroll), setup.dtype)


@cute.jit
def _walk_over(gradient: Gradient, ahead: tuple[cute.Pointer, ...]) -> None:
    walk, streams, out = gradient.walk, gradient.streams, gradient.out
    unroll, history = walk.setup.launch.unroll, walk.history
    full = (walk.stop - walk.first) // unroll
    here = out.first.iterator
    for chunk in cutlass.range(full, unroll=1):
        token, targets = walk.first + chunk * unroll, out.chunk(here, history)
        places, ahead = ahead, advance(streams, chunk, ahead)
        _read(gradient, chunk, places, token, unroll)
        for u in cutlass.range_constexpr(unroll):
            complete = _treat(gradient, u, token + u)
            _store(gradient, complete, targets[u], None if u >= history else chunk > 0)
        carry_over(walk)
        here = out.after(here)
    rest = walk.first + full * unroll
    settle(streams)
    if rest < walk.stop:  # then no token follows
        targets = out.chunk(here, history)
        _read(gradient, full, ahead, rest, unroll - 1, walk.stop - 1)
        for u in cutlass.range_constexpr(unroll - 1):
            if rest + u < walk.stop:
                complete = _treat(gradient, u, rest + u)
                _store(gradient, complete, targets[u], None if u >= history else full > 0)
    if walk.stop < walk.tokens:
        _read(gradient, full, ahead, walk.stop, history, walk.tokens - 1)
        for u in cutlass.range_constexpr(history):
            if walk.stop + u < walk.tokens:
                _complete(gradient, u, walk.stop + u)
    for back in cutlass.range_constexpr(history, 0, -1):
        place = walk.stop - walk.first - back
        _store(gradient, _column(gradient.pending, back - 1), out.vector(out.first.iterator, Int64(place)), place >= 0)


def _read(
    gradient: Gradient,
    number: Int32,
    places: tuple[cute.Pointer, ...],
    token: Int32,
    count: int,
    last: Int32 | None = None,
) -> None:
    """Take ``count`` tokens of a chunk, which starts at ``token``, into registers; ``last``: where the row ends."""
    walk, (x, dy) = gradient.walk, gradient.streams
    limit = None if last is None else last - token + 1
    x.read(number, places[0], walk.chunk(count), limit)
    dy.read(number, places[1], [gradient.chunk[None, u] for u in range(count)], limit)
    load_labels(walk, token, count, last)


def _treat(gradient: Gradient, u: int, token: Int32) -> list[Any]:
    """Add what one of the walk's own tokens, number ``u`` of the chunk, gives; return the gradient of the token W-1
    before, which is complete."""
    pending, history = gradient.pending, gradient.walk.history
    dz, taps = _dz(gradient, u, token)
    _add_to_sums(gradient, dz, taps)
    complete = _column(pending, history - 1)
    complete = [value + _share(gradient, u, token, dz, v, history) for v, value in enumerate(complete)]
    for v in range(len(dz)):
        for back in range(history - 1, 0, -1):
            pending[v, back] = pending[v, back - 1] + _share(gradient, u, token, dz, v, back)
        pending[v, 0] = _share(gradient, u, token, dz, v, 0)
    if gradient.dfinal is not None:
        _add_state(gradient, token)
    return complete


def _complete(gradient: Gradient, u: int, token: Int32) -> None:
    """Add what token ``u`` after the walk's own ones gives to those."""
    pending = gradient.pending
    dz, _ = _dz(gradient, u, token)
    for v in range(len(dz)):
        for back in range(u + 1, gradient.walk.history + 1):
            place = back - u - 1
            pending[v, place] = pending[v, place] + _share(gradient, u, token, dz, v, back)


def _dz(gradient: Gradient, u: int, token: Int32) -> tuple[list[Any], list[list[Any]]]:
    """Return ``dz`` of a token, number ``u`` of the chunk, and what its filters meet, per channel.

    Both are 0 for a token of no sequence: x may be anything there, also NaN, which times 0 is NaN.
    """
    walk = gradient.walk
    if walk.offsets is not None:
        meet_boundary(walk, u, token)
    member, taps = is_member(walk, u), taps_of(walk, u)
    results = []
    for v, dz in enumerate(widened(walk.setup, gradient.chunk[None, u])):
        if walk.setup.problem.activation != "identity":
            z = convolved(taps[v], gradient.taps[v], None if gradient.shifts is None else gradient.shifts[v])
            dz = dz * derivative(z)
        results.append(keep(member, dz))
    return results, [[keep(member, value) for value in values] for values in taps]


def _add_to_sums(gradient: Gradient, dz: list[Any], taps: list[list[Any]]) -> None:
    sums = gradient.sums
    for v, values in enumerate(taps):
        for j, value in enumerate(values):
            sums[v, j] = cute.math.fma(dz[v], value, sums[v, j])
        if gradient.shifts is not None:
            sums[v, len(values)] = sums[v, len(values)] + dz[v]


def _share(gradient: Gradient, u: int, token: Int32, dz: list[Any], v: int, back: int) -> Any:
    """Return what a token gives to the gradient of the token ``back`` before it."""
    same = is_linked(gradient.walk, u, token, back) if back else None
    return keep(same, dz[v]) * gradient.taps[v][gradient.walk.history - back]


@cute.jit
def _add_state(gradient: Gradient, token: Int32) -> None:
    """Add the gradient of the final state to the current token, if it is one of the last W-1 of its sequence."""
    walk, within, pending = gradient.walk, gradient.walk.within, gradient.pending
    if (within[START] < within[STOP]) & (token >= within[STOP] - walk.history):
        place = token - within[STOP] + walk.history
        for v in cutlass.range_constexpr(walk.setup.launch.vector):
            channel = walk.index * walk.setup.launch.vector + v
            share = walk.setup.wide(gradient.dfinal[within[NUMBER], place, channel])
            pending[v, 0] = pending[v, 0] + share


@cute.jit
def _store(gradient: Gradient, values: list[Any], target: cute.Tensor, own: cutlass.Boolean | None) -> None:
    """Store the gradient of a token if it is the walk's ``own``; ``None``: it is."""
    setup = gradient.walk.setup
    if cutlass.const_expr(own is None):
        store_piece(setup, values, target, setup.problem.store_alignment)
    else:
        if own:
            store_piece(setup, values, target, setup.problem.store_alignment)


def _column(values: cute.Tensor, number: int) -> list[Any]:
    return [values[v, number] for v in range(values.shape[0])]


backward_rows_kernel.set_name_prefix("fe_conv_backward_rows", remove_cutlass_symbol=True, keep_mangled_name=False)
