"""Kernels of the gradient of the Engram gate, of tokens that fit in shared memory: everything is read once.

Blocks walk over the tokens. A thread has the same columns of all streams, the key and the value, and copies them to its
own places in shared memory, asynchronously: those of the next token as soon as it is through with a stream of this one.
The threads meet once a token, for the sums of g*v. The weight lies in shared memory beside, its gradient grows in
registers; a last kernel adds up those of all blocks, in order.

Memory must move (3H + 1) * D values in and (2H + 1) * D out for each token: 44 bytes times D for four streams.

Functions marked ``cute.jit`` branch or loop on the device; the others only compose while compiling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, cute

from fe_attention.planning.engram import Problem, Whole, split_config
from fe_runtime.cute.arguments import fake_rows, fake_stream
from fe_runtime.cute.partial_sums import launch_sums
from fe_runtime.cute.reduce import WARP, block_sums, tree_sum
from fe_runtime.cute.ring import ThreadRing, copy_ahead
from fe_runtime.cute.rows import RowPartition, load_vector, store_vector

from .bf16 import narrowed
from .engram_common import atom_of, fake_floats, fake_streams, stream_of, writer_of
from .engram_gradient import NUMBERS, coefficients_of, gradients_of

__all__ = ["build"]

OPERANDS = 3
"""Of a stream: grad_out, x, key."""


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments.

    In order: grad_out, x, kv, weight, saved, grad_x, grad_kv, grad_weight, scratch for the sums, stream. ``config`` is
    what :func:`fe_attention.planning.engram.config` returns.
    """
    del arch
    setup = Setup(*split_config(config, Whole))

    @cute.jit
    def engram_gate_saved_backward(*arguments: Any) -> None:
        _launch(setup, *arguments)

    return engram_gate_saved_backward, _fake_arguments(setup.problem)


@dataclass(frozen=True, slots=True)
class Setup:
    """All that is static in a compilation."""

    problem: Problem
    launch: Whole

    @property
    def columns(self) -> RowPartition:
        """The columns of a thread: one vector."""
        return RowPartition(self.problem.width, self.problem.vector, self.launch.threads, 1)


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
    sums: cute.Tensor,
    stream: Any,
) -> None:
    how, name = setup.launch, "fe_attention_engram_gate_saved_backward_whole"
    whole_kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
    whole_kernel(setup, grad_out, x, kv, weight, saved, grad_x, grad_kv, sums).launch(
        grid=(Int32(sums.shape[0]), 1, 1),
        block=(how.threads, 1, 1),
        stream=stream,
        min_blocks_per_mp=how.blocks_per_sm,
        preferred_smem_carveout=100,  # the tokens under way are there
    )
    flat = cute.make_tensor(grad_weight.iterator, cute.make_layout((setup.problem.streams * setup.problem.width,)))
    launch_sums([(sums, flat)], how.blocks, False, stream, f"{name}_weight")


@dataclass(frozen=True, slots=True)
class Room:
    """A thread's places in shared memory, and where what belongs there comes from."""

    ring: ThreadRing
    gains: cute.Tensor
    states: cute.Tensor
    sources: tuple[cute.Tensor, ...]
    thread: Int32
    index: Int32

    @staticmethod
    def of(
        setup: Setup,
        allocator: cutlass.memory.SmemAllocator,
        sources: tuple[cute.Tensor, ...],
        weight: cute.Tensor,
        thread: Int32,
    ) -> Room:
        """Make room, and bring the weight."""
        problem, columns = setup.problem, setup.columns
        shape = (columns.vector, OPERANDS * problem.streams + 1, columns.threads, 1)
        ring = ThreadRing.of(allocator, BFloat16, shape, thread, 2 * columns.vector)
        layout = cute.make_layout(
            (columns.vector, problem.streams, columns.threads),
            stride=(1, columns.threads * columns.vector, columns.vector),
        )
        gains = allocator.allocate_tensor(Float32, layout, byte_alignment=16)
        layout = cute.make_layout((NUMBERS, problem.streams, 2))
        states = allocator.allocate_tensor(Float32, layout, byte_alignment=16)
        index = cutlass.min(thread, columns.vectors - 1)
        for h in range(problem.streams):
            row = weight[h, None]
            values = load_vector(row, index, 0, columns, atom_of(row, problem, columns.vector))
            gains[None, h, thread].store(values.load())
        return Room(ring, gains, states, sources, thread, index)

    def fetch_stream(self, setup: Setup, token: Int64, h: int) -> None:
        """Start to copy a thread's columns of a stream."""
        grad_out, x, kv, _ = self.sources
        rows = (grad_out[token, h, None], x[token, h, None], stream_of(kv, token, h, setup.problem.width))
        for number, row in enumerate(rows):
            self.ring.fetch(self._vector(setup, row), OPERANDS * h + number, 0)

    def fetch_value(self, setup: Setup, token: Int64, turn: Int32 | int) -> None:
        """Start to copy a thread's columns of the value, and the state, which some threads copy for all."""
        _, _, kv, saved = self.sources
        streams = setup.problem.streams
        value = stream_of(kv, token, streams, setup.problem.width)
        self.ring.fetch(self._vector(setup, value), OPERANDS * streams, 0)
        _fetch_state(saved[token, None, None], self.states[None, None, turn], self.thread)

    def _vector(self, setup: Setup, row: cute.Tensor) -> cute.Tensor:
        return cute.local_tile(row, (setup.columns.vector,), (self.index,))


@cute.jit
def _fetch_state(source: cute.Tensor, states: cute.Tensor, thread: Int32) -> None:
    if thread < source.shape[0]:
        copy_ahead(source[thread, None], states[None, thread], 128)


@cute.kernel
def whole_kernel(
    setup: cutlass.Constexpr[Setup],
    grad_out: cute.Tensor,
    x: cute.Tensor,
    kv: cute.Tensor,
    weight: cute.Tensor,
    saved: cute.Tensor,
    grad_x: cute.Tensor,
    grad_kv: cute.Tensor,
    sums: cute.Tensor,
) -> None:
    """Every so manieth token."""
    problem, columns = setup.problem, setup.columns
    streams = problem.streams
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    allocator = cutlass.memory.SmemAllocator()
    room = Room.of(setup, allocator, (grad_out, x, kv, saved), weight, thread)
    layout = cute.make_layout((setup.launch.threads // WARP, streams, 2))
    exchange = allocator.allocate_tensor(Float32, layout, byte_alignment=16)
    inside = columns.inside(thread, 0)
    added = cute.make_rmem_tensor((columns.vector, streams), Float32)
    added.fill(0.0)
    tokens, step = Int64(x.shape[0]), Int64(sums.shape[0])
    _fetch_first(setup, room, Int64(block))
    for i in cutlass.range(Int32((tokens - block + step - 1) // step), unroll=1):
        token = block + i * step
        cute.arch.cp_async_wait_group(0)
        totals = block_sums(_dots(setup, room, inside), exchange[None, None, i % 2])
        states = room.states[None, None, i % 2]
        _finish(setup, room, totals, states, added, (grad_x, grad_kv), token, token + step, tokens, inside)
        _fetch_last(setup, room, token + step, tokens, (i + 1) % 2)
    for h in cutlass.range_constexpr(streams):
        row = cute.local_tile(sums[block, None], (problem.width,), (h,))
        atom = writer_of(sums, problem, columns.vector)
        store_vector(added[None, h], row, room.index, inside, columns, atom)


@cute.jit
def _fetch_first(setup: cutlass.Constexpr[Setup], room: cutlass.Constexpr[Room], token: Int64) -> None:
    for h in cutlass.range_constexpr(setup.problem.streams):
        room.fetch_stream(setup, token, h)
    room.fetch_value(setup, token, 0)
    cute.arch.cp_async_commit_group()


@cute.jit
def _fetch_last(
    setup: cutlass.Constexpr[Setup], room: cutlass.Constexpr[Room], token: Int64, tokens: Int64, turn: Int32
) -> None:
    if token < tokens:
        room.fetch_value(setup, token, turn)
    cute.arch.cp_async_commit_group()


@cute.jit
def _fetch_next(
    setup: cutlass.Constexpr[Setup],
    room: cutlass.Constexpr[Room],
    token: Int64,
    tokens: Int64,
    h: cutlass.Constexpr[int],
) -> None:
    if token < tokens:
        room.fetch_stream(setup, token, h)


def _dots(setup: Setup, room: Room, inside: Boolean | bool) -> list[Float32]:
    """Return a thread's part of the sums of g*v of all streams."""
    streams = setup.problem.streams
    v = room.ring.slot(OPERANDS * streams, 0).load().to(Float32)
    found = []
    for h in range(streams):
        g = room.ring.slot(OPERANDS * h, 0).load().to(Float32)
        dot = tree_sum([g[n] * v[n] for n in range(setup.columns.vector)])
        found.append(dot if inside is True else cutlass.select_(inside, dot, Float32(0.0)))
    return found


def _finish(
    setup: Setup,
    room: Room,
    totals: list[Float32],
    states: cute.Tensor,
    added: cute.Tensor,
    outputs: tuple[cute.Tensor, cute.Tensor],
    token: Int64,
    following: Int64,
    tokens: Int64,
    inside: Boolean | bool,
) -> None:
    """Store a thread's columns of all gradients of a token, and start to copy those of the next one."""
    grad_x, grad_kv = outputs
    streams, width, columns = setup.problem.streams, setup.problem.width, setup.columns
    write = writer_of(grad_x, setup.problem, columns.vector)
    dv = cute.make_rmem_tensor((columns.vector,), Float32)
    dv.fill(0.0)
    for h in range(streams):
        loaded = [_kept(room.ring.slot(OPERANDS * h + number, 0)) for number in range(OPERANDS)]
        gains = _kept(room.gains[None, h, room.thread])
        numbers = coefficients_of(setup.problem, totals[h], _kept(states[None, h]))
        _fetch_next(setup, room, following, tokens, h)
        dx, dk = (cute.make_rmem_tensor((columns.vector,), Float32) for _ in range(2))
        gradients_of(*loaded, gains, numbers, added[None, h], dv, dx, dk)
        store_vector(narrowed(dx), grad_x[token, h, None], room.index, inside, columns, write)
        store_vector(narrowed(dk), stream_of(grad_kv, token, h, width), room.index, inside, columns, write)
    store_vector(narrowed(dv), stream_of(grad_kv, token, streams, width), room.index, inside, columns, write)


def _kept(values: cute.Tensor) -> cute.Tensor:
    """Return shared memory in registers."""
    found = cute.make_rmem_tensor(values.shape, values.element_type)
    found.store(values.load())
    return found


def _fake_arguments(problem: Problem) -> tuple[Any, ...]:
    tokens, blocks = cute.sym_int64(), cute.sym_int64()
    streams, width, aligned = problem.streams, problem.width, 2 * problem.vector
    wide = min(16, 2 * aligned)
    grad_out, x, grad_x = (fake_streams(BFloat16, tokens, streams, width, aligned) for _ in range(3))
    kv, grad_kv = (fake_rows(BFloat16, tokens, (streams + 1) * width, aligned) for _ in range(2))
    weight, grad_weight = (fake_floats(streams, width, wide) for _ in range(2))
    saved = fake_streams(Float32, tokens, streams, NUMBERS, 16)
    sums = fake_rows(Float32, blocks, streams * width, wide)
    return grad_out, x, kv, weight, saved, grad_x, grad_kv, grad_weight, sums, fake_stream()
