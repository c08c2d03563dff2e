"""Kernel of the Engram gate: a block treats one stream of a few tokens, its weight in registers.

Each thread loads its share of the stream, the key and the value with all loads in flight; the three sums meet in one
exchange with the block; then the share of the stream, still in registers, takes the value times the gate. The blocks
of the streams of a token lie side by side, so that the value comes from memory once. Streams too long for the registers
are read again for the result.

Memory must move (2H + 1) * D values in and H * D out for each token: 26 bytes times D for four streams.

Functions marked ``cute.jit`` branch or loop on the device; the others only compose while compiling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, cute

from fe_attention.planning.engram import Forward, Problem, split_config
from fe_runtime.cute.activation import sigmoid
from fe_runtime.cute.arguments import fake_rows, fake_stream
from fe_runtime.cute.memory import store_atom
from fe_runtime.cute.reduce import WARP, block_sums, sum_of_squares, tree_sum, warp_sum
from fe_runtime.cute.rows import RowPartition, load_share, narrow_again, store_vector

from .bf16 import rounded_bf16
from .engram_common import FLOOR, atom_of, fake_floats, fake_streams, stream_of, writer_of

__all__ = ["build"]

SUMS = 3


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments: x, kv, weight, token_mask, out, saved, eps, stream.

    ``config`` is what :func:`fe_attention.planning.engram.config` returns.
    """
    del arch
    setup = Setup(*split_config(config, Forward))

    @cute.jit
    def engram_gate_saved_forward(*arguments: Any) -> None:
        _launch(setup, *arguments)

    return engram_gate_saved_forward, _fake_arguments(setup.problem)


@dataclass(frozen=True, slots=True)
class Setup:
    """All that is static in a compilation."""

    problem: Problem
    launch: Forward

    @property
    def partition(self) -> RowPartition:
        """The share of a thread in a stream."""
        problem, how = self.problem, self.launch
        return RowPartition(problem.width, problem.vector, how.threads, how.chunk)


def _launch(
    setup: Setup,
    x: cute.Tensor,
    kv: cute.Tensor,
    weight: cute.Tensor,
    mask: cute.Tensor,
    out: cute.Tensor,
    saved: cute.Tensor,
    eps: Float32,
    stream: Any,
) -> None:
    how = setup.launch
    name = "fe_attention_engram_gate_saved_forward"
    gate_kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
    gate_kernel(setup, x, kv, weight, mask, out, saved, eps).launch(
        grid=(Int32(cute.ceil_div(x.shape[0], how.tokens)) * setup.problem.streams, 1, 1),
        block=(how.threads, 1, 1),
        stream=stream,
        min_blocks_per_mp=how.blocks_per_sm,
        preferred_smem_carveout=-1,  # the driver's choice; without it the compiler would ask a GPU
    )


@cute.kernel
def gate_kernel(
    setup: cutlass.Constexpr[Setup],
    x: cute.Tensor,
    kv: cute.Tensor,
    weight: cute.Tensor,
    mask: cute.Tensor,
    out: cute.Tensor,
    saved: cute.Tensor,
    eps: Float32,
) -> None:
    """A stream of a few tokens."""
    problem, partition = setup.problem, setup.partition
    layout = cute.make_layout((setup.launch.threads // WARP, SUMS, 2))
    scratch = cutlass.memory.SmemAllocator().allocate_tensor(Float32, layout, byte_alignment=16)
    lane, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    h = block % problem.streams
    first = Int64(block // problem.streams) * setup.launch.tokens
    count = Int32(cutlass.min(Int64(setup.launch.tokens), x.shape[0] - first))
    if cutlass.const_expr(partition.chunks == 1):
        gains = _share(setup, weight[h, None], lane, 0)
        for i in cutlass.range(count, unroll=1):
            token = first + i
            row, value = x[token, h, None], stream_of(kv, token, problem.streams, problem.width)
            shares = [_share(setup, a, lane, 0) for a in (row, stream_of(kv, token, h, problem.width), value)]
            is_kept = mask[token]
            sums = _exchanged(_terms(shares[0], shares[1], gains), scratch, i)
            gate = _gate(setup, sums, is_kept, eps, saved[token, h, None], lane)
            _write(setup, shares[0], shares[2], gate, out[token, h, None], lane, 0)
    else:
        for i in cutlass.range(count, unroll=1):
            token = first + i
            row, value = x[token, h, None], stream_of(kv, token, problem.streams, problem.width)
            key = stream_of(kv, token, h, problem.width)
            is_kept = mask[token]
            a, b, c = Float32(0.0), Float32(0.0), Float32(0.0)
            for chunk in cutlass.range(partition.chunks, unroll=1):
                found = _terms(*[_share(setup, array, lane, chunk) for array in (row, key, weight[h, None])])
                a, b, c = a + found[0], b + found[1], c + found[2]
            gate = _gate(setup, _exchanged([a, b, c], scratch, i), is_kept, eps, saved[token, h, None], lane)
            for chunk in cutlass.range(partition.chunks, unroll=1):
                shares = [_share(setup, array, lane, chunk) for array in (row, value)]
                _write(setup, shares[0], shares[1], gate, out[token, h, None], lane, chunk)


def _share(setup: Setup, row: cute.Tensor, lane: Int32, chunk: Int32 | int) -> cute.Tensor:
    return load_share(row, lane, chunk, setup.partition, atom_of(row, setup.problem, setup.partition.vector))


def _terms(x: cute.Tensor, key: cute.Tensor, gains: cute.Tensor) -> list[Float32]:
    """Return a thread's part of the sums of x^2, k^2 and (x*w)*k."""
    dots = []
    for j in range(cute.size(x.shape[1])):
        xs, ks, ws = (a[None, j].load().to(Float32) for a in (x, key, gains))
        dots.append(tree_sum([(xs[n] * ws[n]) * ks[n] for n in range(cute.size(x.shape[0]))]))
    return [sum_of_squares(x), sum_of_squares(key), tree_sum(dots)]


def _exchanged(sums: list[Float32], scratch: cute.Tensor, i: Int32) -> list[Float32]:
    """Return the sums over the block. Tokens take turns with two places in shared memory: between two uses of one of
    them lies the barrier of the other."""
    if scratch.shape[0] == 1:
        return [warp_sum(value) for value in sums]
    return block_sums(sums, scratch[None, None, i % 2])


@cute.jit
def _gate(
    setup: cutlass.Constexpr[Setup],
    sums: list[Float32],
    is_kept: Boolean,
    eps: Float32,
    saved: cute.Tensor,
    lane: Int32,
) -> Float32:
    """Return the gate; one thread saves it with what it was made of."""
    mean = Float32(1.0 / setup.problem.width)
    rx, rk = (cute.math.rsqrt(total * mean + eps, approx=True) for total in sums[:2])
    dot = (sums[2] * (rx * rk)) * Float32(setup.problem.width**-0.5)
    magnitude = cute.math.absf(dot)
    root = Float32(cute.math.sqrt(cutlass.select_(magnitude < Float32(FLOOR), Float32(FLOOR), magnitude)))
    sign = Float32(dot).bitcast(Int32) & -0x80000000
    gate = sigmoid((root.bitcast(Int32) | sign).bitcast(Float32))
    gate = cutlass.select_(is_kept, gate, Float32(0.0))
    if lane == 0:
        kept = cute.make_rmem_tensor((4,), Float32)
        kept[0], kept[1], kept[2], kept[3] = gate, dot, rx, rk
        cute.copy(store_atom(Float32, 128), kept, saved)
    return gate


def _write(
    setup: Setup, x: cute.Tensor, value: cute.Tensor, gate: Float32, out: cute.Tensor, lane: Int32, chunk: Int32 | int
) -> None:
    """Store x + gate*v, or x where the gate is 0."""
    partition = setup.partition
    is_open = gate != Float32(0.0)
    writer = writer_of(out, setup.problem, partition.vector)
    for j in range(partition.count):
        xs, vs = (narrow_again(a[None, j]).load().to(Float32) for a in (x, value))
        results = [cutlass.select_(is_open, xs[n] + gate * vs[n], xs[n]) for n in range(partition.vector)]
        index = partition.index(lane, chunk, j)
        store_vector(rounded_bf16(results), out, index, partition.inside(index, j), partition, writer)


def _fake_arguments(problem: Problem) -> tuple[Any, ...]:
    tokens, streams, width = cute.sym_int64(), problem.streams, problem.width
    aligned = 2 * problem.vector
    x, out = (fake_streams(BFloat16, tokens, streams, width, aligned) for _ in range(2))
    kv = fake_rows(BFloat16, tokens, (streams + 1) * width, aligned)
    weight = fake_floats(streams, width, min(16, 2 * aligned))
    mask = cute.runtime.make_fake_tensor(Boolean, (tokens,), (1,), assumed_align=1)
    return x, kv, weight, mask, out, fake_streams(Float32, tokens, streams, 4, 16), Float32(1.0), fake_stream()
