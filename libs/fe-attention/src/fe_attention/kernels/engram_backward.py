"""Kernels of the gradient of the Engram gate: the coefficients of each token, their application, the weight's sums.

A gradient needs the sum over a stream of g*v before any of its values. So one block a token makes that sum, and from it
and the saved state the four numbers of each stream. Then blocks walk over the tokens of some columns, the last token
first: what was read of it is still in the second-level cache. A thread has the same columns of all streams: the value's
gradient is a sum in one thread, and the weight's grows in its registers. A last kernel adds up those of all blocks, in
order.

Memory must move (3H + 1) * D values in and (2H + 1) * D out for each token, 44 bytes times D for four streams; the
first kernel reads (H + 1) * D of them once more, and leaves the value to itself: 52 bytes without the cache.

Functions marked ``cute.jit`` branch or loop on the device; the others only compose while compiling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute

from fe_attention.planning.engram import Backward, Problem, split_config
from fe_runtime.cute.arguments import fake_rows, fake_stream
from fe_runtime.cute.memory import load_atom, store_atom
from fe_runtime.cute.partial_sums import launch_sums
from fe_runtime.cute.reduce import WARP, block_sums, tree_sum
from fe_runtime.cute.rows import RowPartition, load_share, load_vector, store_vector

from .bf16 import narrowed
from .engram_common import atom_of, fake_floats, fake_streams, stream_of, writer_of
from .engram_gradient import NUMBERS, coefficients_of, gradients_of

__all__ = ["build"]


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments.

    In order: grad_out, x, kv, weight, saved, grad_x, grad_kv, grad_weight, scratch for the coefficients and for the
    sums, stream. ``config`` is what :func:`fe_attention.planning.engram.config` returns.
    """
    del arch
    setup = Setup(*split_config(config, Backward))

    @cute.jit
    def engram_gate_saved_backward(*arguments: Any) -> None:
        _launch(setup, *arguments)

    return engram_gate_saved_backward, _fake_arguments(setup.problem)


@dataclass(frozen=True, slots=True)
class Setup:
    """All that is static in a compilation."""

    problem: Problem
    launch: Backward

    @property
    def stream(self) -> RowPartition:
        """The share of a thread in a stream, for the coefficients."""
        problem, how = self.problem, self.launch
        return RowPartition(problem.width, problem.vector, how.sum_threads, how.sum_chunk)

    @property
    def columns(self) -> RowPartition:
        """The columns of a thread: a chunk is what a block treats."""
        return RowPartition(self.problem.width, self.launch.vector, self.launch.threads, 1)


def _launch(
    setup: Setup,
    grad_out: cute.Tensor,
    x: cute.Tensor,
    kv: cute.Tensor,
    weight: cute.Tensor,
    saved: cute.Tensor,
    grad_x: cute.Tensor,
    grad_kv: cute.Tensor,
    grad_weight: cute.Tensor,
    coefficients: cute.Tensor,
    sums: cute.Tensor,
    stream: Any,
) -> None:
    how, name = setup.launch, "fe_attention_engram_gate_saved_backward"
    coefficients_kernel.set_name_prefix(f"{name}_sums", remove_cutlass_symbol=True, keep_mangled_name=False)
    coefficients_kernel(setup, grad_out, kv, saved, coefficients).launch(
        grid=(Int32(x.shape[0]), 1, 1),
        block=(how.sum_threads, 1, 1),
        stream=stream,
        preferred_smem_carveout=-1,
    )
    apply_kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
    apply_kernel(setup, grad_out, x, kv, weight, coefficients, grad_x, grad_kv, sums).launch(
        grid=(Int32(sums.shape[0]) * setup.columns.chunks, 1, 1),
        block=(how.threads, 1, 1),
        stream=stream,
        min_blocks_per_mp=how.blocks_per_sm,
        preferred_smem_carveout=-1,
    )
    flat = cute.make_tensor(grad_weight.iterator, cute.make_layout((setup.problem.streams * setup.problem.width,)))
    launch_sums([(sums, flat)], how.splits, False, stream, f"{name}_weight")


@cute.kernel
def coefficients_kernel(
    setup: cutlass.Constexpr[Setup],
    grad_out: cute.Tensor,
    kv: cute.Tensor,
    saved: cute.Tensor,
    coefficients: cute.Tensor,
) -> None:
    """One token: the sums of g*v and what follows from them for each stream."""
    problem, partition = setup.problem, setup.stream
    streams = problem.streams
    layout = cute.make_layout((setup.launch.sum_threads // WARP, streams))
    scratch = cutlass.memory.SmemAllocator().allocate_tensor(Float32, layout, byte_alignment=16)
    lane, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    token = Int64(block)
    mine = cutlass.min(lane, streams - 1)  # the stream that a thread finishes, if it does
    state = cute.make_rmem_tensor((NUMBERS,), Float32)
    cute.copy(load_atom(Float32, 128), saved[token, mine, None], state)
    sums = cute.make_rmem_tensor((streams,), Float32)
    sums.fill(0.0)
    value = stream_of(kv, token, streams, problem.width)
    for chunk in cutlass.range(partition.chunks, unroll=1):
        _add_dots(setup, grad_out[token, None, None], value, lane, chunk, sums)
    totals = block_sums([sums[h] for h in range(streams)], scratch)
    if lane < streams:
        found = coefficients_of(problem, _picked(totals, lane), state)
        cute.copy(store_atom(Float32, 128), found, coefficients[token, mine, None])


def _add_dots(
    setup: Setup, grad_out: cute.Tensor, value: cute.Tensor, lane: Int32, chunk: Int32, sums: cute.Tensor
) -> None:
    """Add a thread's share of a chunk of each stream's sum of g*v."""
    v = _share(setup, value, lane, chunk)
    shares = [_share(setup, grad_out[h, None], lane, chunk) for h in range(setup.problem.streams)]
    for h, share in enumerate(shares):
        sums[h] = sums[h] + _dot(share, v)


def _picked(values: list[Float32], number: Int32) -> Float32:
    found = values[0]
    for h in range(1, len(values)):
        found = cutlass.select_(number == h, values[h], found)
    return found


def _share(setup: Setup, row: cute.Tensor, lane: Int32, chunk: Int32) -> cute.Tensor:
    return load_share(row, lane, chunk, setup.stream, atom_of(row, setup.problem, setup.stream.vector))


def _dot(a: cute.Tensor, b: cute.Tensor) -> Float32:
    """Return the sum of the products of two shares."""
    parts = []
    for j in range(cute.size(a.shape[1])):
        av, bv = (share[None, j].load().to(Float32) for share in (a, b))
        parts.append(tree_sum([av[n] * bv[n] for n in range(cute.size(a.shape[0]))]))
    return tree_sum(parts)


@cute.kernel
def apply_kernel(
    setup: cutlass.Constexpr[Setup],
    grad_out: cute.Tensor,
    x: cute.Tensor,
    kv: cute.Tensor,
    weight: cute.Tensor,
    coefficients: cute.Tensor,
    grad_x: cute.Tensor,
    grad_kv: cute.Tensor,
    sums: cute.Tensor,
) -> None:
    """Some columns of every so manieth token: all gradients."""
    problem, columns = setup.problem, setup.columns
    streams, width, vector = problem.streams, problem.width, columns.vector
    lane, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    split = block // columns.chunks
    index = columns.index(lane, block % columns.chunks, 0)
    inside = columns.inside(index, 0)
    gains = cute.make_rmem_tensor((vector, streams), Float32)
    for h in cutlass.range_constexpr(streams):
        row = load_vector(weight[h, None], index, 0, columns, atom_of(weight, problem, vector))
        gains[None, h].store(row.load())
    added = cute.make_rmem_tensor((vector, streams), Float32)
    added.fill(0.0)
    tokens, splits = Int64(x.shape[0]), Int64(sums.shape[0])
    for i in cutlass.range(Int32((tokens - split + splits - 1) // splits), unroll=1):
        token = tokens - 1 - (i * splits + split)
        numbers = _numbers(coefficients, token)
        loaded = [_vectors(setup, (grad_out, x, kv), token, h, index) for h in range(streams)]
        _apply(setup, loaded, gains, numbers, added, grad_x, grad_kv, token, index, inside)
    for h in cutlass.range_constexpr(streams):
        row = cute.local_tile(sums[split, None], (width,), (h,))
        store_vector(added[None, h], row, index, inside, columns, writer_of(sums, problem, vector))


def _numbers(coefficients: cute.Tensor, token: Int64) -> cute.Tensor:
    """Return the numbers of all streams of a token."""
    streams = coefficients.shape[1]
    numbers = cute.make_rmem_tensor((NUMBERS, streams), Float32)
    for h in range(streams):
        cute.copy(load_atom(Float32, 128), coefficients[token, h, None], numbers[None, h])
    return numbers


def _vectors(
    setup: Setup, arrays: tuple[cute.Tensor, ...], token: Int64, h: int, index: Int32
) -> tuple[cute.Tensor, ...]:
    """Return the columns of a stream of grad_out, x and the key."""
    grad_out, x, kv = arrays
    rows = (grad_out[token, h, None], x[token, h, None], stream_of(kv, token, h, setup.problem.width))
    read = atom_of(x, setup.problem, setup.launch.vector)
    return tuple(load_vector(row, index, 0, setup.columns, read) for row in rows)


def _apply(
    setup: Setup,
    loaded: list[tuple[cute.Tensor, ...]],
    gains: cute.Tensor,
    numbers: cute.Tensor,
    added: cute.Tensor,
    grad_x: cute.Tensor,
    grad_kv: cute.Tensor,
    token: Int64,
    index: Int32,
    inside: Any,
) -> None:
    """Store the gradients of some columns of a token, and add to the weight's sums."""
    streams, width, columns = setup.problem.streams, setup.problem.width, setup.columns
    write = writer_of(grad_x, setup.problem, columns.vector)
    dv = cute.make_rmem_tensor((columns.vector,), Float32)
    dv.fill(0.0)
    for h in range(streams):
        dx, dk = (cute.make_rmem_tensor((columns.vector,), Float32) for _ in range(2))
        gradients_of(*loaded[h], gains[None, h], numbers[None, h], added[None, h], dv, dx, dk)
        store_vector(narrowed(dx), grad_x[token, h, None], index, inside, columns, write)
        store_vector(narrowed(dk), stream_of(grad_kv, token, h, width), index, inside, columns, write)
    store_vector(narrowed(dv), stream_of(grad_kv, token, streams, width), index, inside, columns, write)


def _fake_arguments(problem: Problem) -> tuple[Any, ...]:
    tokens, splits = cute.sym_int64(), cute.sym_int64()
    streams, width, aligned = problem.streams, problem.width, 2 * problem.vector
    wide = min(16, 2 * aligned)
    grad_out, x, grad_x = (fake_streams(BFloat16, tokens, streams, width, aligned) for _ in range(3))
    kv, grad_kv = (fake_rows(BFloat16, tokens, (streams + 1) * width, aligned) for _ in range(2))
    weight, grad_weight = (fake_floats(streams, width, wide) for _ in range(2))
    saved, coefficients = (fake_streams(Float32, tokens, streams, NUMBERS, 16) for _ in range(2))
    sums = fake_rows(Float32, splits, streams * width, wide)
    return grad_out, x, kv, weight, saved, grad_x, grad_kv, grad_weight, coefficients, sums, fake_stream()
