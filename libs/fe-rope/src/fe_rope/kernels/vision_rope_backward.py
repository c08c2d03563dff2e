"""Kernel of ``vision_rope_backward``: rotate the gradients of Q and K back, and pack them with that of V.

Each element is read once and written once, so the floor is 12 bytes of traffic for each channel of a head (12 KiB a
token with 16 heads of 64), beside tables of 256 bytes a token. A gradient whose tokens lie side by side is read along
its tokens and transposed in shared memory.

Functions marked ``cute.jit`` branch or loop on the device; the others only compose while compiling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint16, cute
from cutlass.cute.nvgpu import CopyG2ROp, CopyR2GOp, CopyUniversalOp

from fe_rope.launch_vision import COLUMNS, ROWS, Launch, Problem, split_config
from fe_runtime.cute.arguments import fake_rows, fake_stream
from fe_runtime.cute.memory import access_bits, prefetch
from fe_runtime.cute.rounding import add_rn, bf16_word, mul_rn, sub_rn

__all__ = ["build"]

RUN = 8  # values of an access of 16 bytes


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments: q, k, v, cosine, sine, out, stream.

    ``config`` is what :func:`fe_rope.launch_vision.config` returns.
    """
    problem, launch = split_config(config)
    setup = Setup(problem, launch)

    @cute.jit
    def vision_rope_backward(
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        cosine: cute.Tensor,
        sine: cute.Tensor,
        out: cute.Tensor,
        stream: Any,
    ) -> None:
        orders = ([1, 0, 2], [2, 0, 1], [1, 0, 2])
        gradients = [_logical(x, order) if problem.stored else x for x, order in zip((q, k, v), orders, strict=True)]
        tables = [_logical(x, [0, 2]) if problem.table_rank == 3 else x for x in (cosine, sine)]
        tiles = Int32(cute.ceil_div(out.shape[0], launch.tokens)) * launch.head_tiles(problem)
        vision_kernel(setup, *gradients, *tables, out).launch(
            grid=(tiles, 1, 1),
            block=(launch.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=launch.blocks_per_sm,
            preferred_smem_carveout=-1,  # the driver's choice; without it the compiler would ask a GPU
        )

    return vision_rope_backward, _fake_arguments(problem)


@dataclass(frozen=True, slots=True)
class Setup:
    """All that is static in a compilation."""

    problem: Problem
    launch: Launch

    @property
    def forms(self) -> tuple[tuple[str, int], ...]:
        """Where the neighbours of Q, K and V lie, and the alignment of their rows."""
        problem = self.problem
        return (
            (problem.q, problem.q_alignment),
            (problem.k, problem.k_alignment),
            (problem.v, problem.v_alignment),
        )


@cute.kernel
def vision_kernel(
    setup: cutlass.Constexpr[Setup],
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    cosine: cute.Tensor,
    sine: cute.Tensor,
    out: cute.Tensor,
) -> None:
    """One tile of tokens of some heads."""
    problem, launch = setup.problem, setup.launch
    block, _, _ = cute.arch.block_idx()
    token_tile, head_tile = block // launch.head_tiles(problem), block % launch.head_tiles(problem)
    first = token_tile * launch.tokens
    tile = Tile(setup, (q, k, v), cosine, sine, out, first, _shared(setup))
    if cutlass.const_expr(launch.prefetch > 0):
        _prefetch_tile(setup, q, k, v, block + launch.prefetch)
    for number in cutlass.range_constexpr(launch.heads):
        head = head_tile * launch.heads + number
        if cutlass.const_expr(problem.heads % launch.heads == 0):
            _head(tile, head, number)
        else:
            if head < problem.heads:
                _head(tile, head, number)


@dataclass(frozen=True, slots=True)
class Tile:
    """What the threads of a block work on: the operands, its first token, shared memory for transposed gradients."""

    setup: Setup
    gradients: tuple[cute.Tensor, ...]
    cosine: cute.Tensor
    sine: cute.Tensor
    out: cute.Tensor
    first: Int32
    shared: cute.Tensor | None

    def stage(self, part: int, number: int) -> int:
        """Return which tile of shared memory holds a gradient of head ``number`` of the block."""
        before = [form for form, _ in self.setup.forms[:part]].count(COLUMNS)
        return number * self.setup.problem.staged + before


def _head(tile: Tile, head: Int32, number: int) -> None:
    """Treat one head: with a single vector a thread, all loads are under way before the first barrier."""
    problem, launch = tile.setup.problem, tile.setup.launch
    rounds = launch.rounds(problem)
    thread, _, _ = cute.arch.thread_idx()
    if rounds == 1:
        item = _fetch(tile, head, thread)
        _stage_all(tile, head, number)
        _finish(tile, head, number, item)
    else:
        _stage_all(tile, head, number)
        for turn in range(rounds):
            _finish(tile, head, number, _fetch(tile, head, thread + turn * launch.threads))


@dataclass(frozen=True, slots=True)
class Item:
    """A vector of either half of a head's channels: its place, its table entries, what was loaded of Q, K and V."""

    token: Int32
    chunk: Int32
    local: Int32
    exists: Boolean
    cosine: cute.Tensor
    sine: cute.Tensor
    loaded: tuple[Any, ...]


def _fetch(tile: Tile, head: Int32, index: Int32) -> Item:
    """Start the loads of an item, but for gradients that come through shared memory."""
    problem, launch = tile.setup.problem, tile.setup.launch
    local, chunk = index // problem.vectors, index % problem.vectors
    if launch.tokens * problem.vectors % launch.threads:
        local = cutlass.min(local, launch.tokens - 1)
    last = Int32(tile.out.shape[0]) - 1
    token = cutlass.min(tile.first + local, last)
    exists = (tile.first + local <= last) & (index < launch.tokens * problem.vectors)
    loaded = tuple(
        None if form == COLUMNS else _halves(problem, gradient, form, alignment, token, head, chunk)
        for gradient, (form, alignment) in zip(tile.gradients, tile.setup.forms, strict=True)
    )
    cosine, sine = (
        _load(cute.local_tile(table[Int64(token), None], (problem.vector,), (chunk,)), problem.table_alignment)
        for table in (tile.cosine, tile.sine)
    )
    return Item(token, chunk, local, exists, cosine, sine, loaded)


def _finish(tile: Tile, head: Int32, number: int, item: Item) -> None:
    """Rotate and store an item."""
    problem = tile.setup.problem
    for part in range(3):
        halves = item.loaded[part]
        if halves is None:
            halves = _from_shared(tile, tile.stage(part, number), item)
        if part < 2:
            halves = _rotated(problem, halves, item.cosine, item.sine)
        column = (part * problem.heads + head) * 2 * problem.vectors + item.chunk
        _store(problem, tile.out, halves, item.token, column, item.exists)


def _halves(
    problem: Problem, gradient: cute.Tensor, form: str, alignment: int, token: Int32, head: Int32, chunk: Int32
) -> tuple[cute.Tensor, cute.Tensor]:
    """Load a vector of either half of a head's channels."""
    row = _row(problem, gradient, token, head)
    found = []
    for half in range(2):
        if form == ROWS:
            source = cute.local_tile(row, (problem.vector,), (half * problem.vectors + chunk,))
            found.append(_load(source, alignment))
        else:
            values = cute.make_rmem_tensor((problem.vector,), BFloat16)
            for i in range(problem.vector):
                values[i] = row[Int64((half * problem.vectors + chunk) * problem.vector + i)]
            found.append(values)
    return tuple(found)


def _row(problem: Problem, gradient: cute.Tensor, token: Int32, head: Int32) -> cute.Tensor:
    """Return the channels of one head of a token."""
    return gradient[Int64(token), 0 if problem.heads == 1 else Int64(head), None]


def _rotated(
    problem: Problem, halves: tuple[cute.Tensor, cute.Tensor], cosine: cute.Tensor, sine: cute.Tensor
) -> tuple[cute.Tensor, cute.Tensor]:
    """Return ``bf16(RN(RN(a*c) + RN(b*s)))`` and ``bf16(RN(RN(b*c) - RN(a*s)))``."""
    first, second = [], []
    low, high = (half.load().to(Float32) for half in halves)
    for i in range(problem.vector):
        a, b, c, s = low[i], high[i], cosine[i], sine[i]
        first.append(add_rn(mul_rn(a, c), mul_rn(b, s)))
        second.append(sub_rn(mul_rn(b, c), mul_rn(a, s)))
    return _narrowed(first), _narrowed(second)


def _narrowed(values: list[Float32]) -> cute.Tensor:
    """Return registers with the values rounded to bf16."""
    result = cute.make_rmem_tensor((len(values),), BFloat16)
    if len(values) == 1:
        cute.recast_tensor(result, Uint16)[0] = Uint16(bf16_word(values[0], Float32(0.0)) & 0xFFFF)
        return result
    pairs = cute.recast_tensor(result, Int32)
    for i in range(len(values) // 2):
        pairs[i] = bf16_word(values[2 * i], values[2 * i + 1])
    return result


def _load(source: cute.Tensor, alignment: int) -> cute.Tensor:
    dtype, count = source.element_type, cute.size(source.shape)
    bits = access_bits(dtype, count, alignment)
    values = cute.make_rmem_tensor((count,), dtype)
    cute.copy(cute.make_copy_atom(CopyG2ROp(), dtype, num_bits_per_copy=bits, invariant=True), source, values)
    return values


@cute.jit
def _store(
    problem: cutlass.Constexpr[Problem],
    out: cute.Tensor,
    halves: tuple[cute.Tensor, cute.Tensor],
    token: Int32,
    column: Int32,
    exists: Boolean,
) -> None:
    if exists:
        bits = access_bits(BFloat16, problem.vector, problem.out_alignment)
        atom = cute.make_copy_atom(CopyR2GOp(), BFloat16, num_bits_per_copy=bits)
        row = out[Int64(token), None]
        for half in cutlass.range_constexpr(2):
            target = cute.local_tile(row, (problem.vector,), (column + half * problem.vectors,))
            cute.copy(atom, halves[half], target)


# ---- the transposition


def _shared(setup: Setup) -> cute.Tensor | None:
    """Return shared memory for the transposed gradients of a block."""
    problem, launch = setup.problem, setup.launch
    if not problem.staged:
        return None
    layout = cute.make_layout((launch.shared_bytes(problem) // 2,))
    return cutlass.memory.SmemAllocator().allocate_tensor(BFloat16, layout, byte_alignment=16)


def _stage_all(tile: Tile, head: Int32, number: int) -> None:
    """Bring the gradients whose tokens lie side by side to shared memory."""
    if not tile.setup.problem.staged:
        return
    for part, (form, _) in enumerate(tile.setup.forms):
        if form == COLUMNS:
            _stage(tile, tile.gradients[part], head, tile.stage(part, number))
    cute.arch.sync_threads()


@cute.jit
def _stage(tile: cutlass.Constexpr[Tile], gradient: cute.Tensor, head: Int32, stage: cutlass.Constexpr[int]) -> None:
    """Copy the tile of one head: 8 tokens at a time where every such run is aligned, else one by one."""
    if _misalignment(tile.setup.problem, gradient) == 0:
        _stage_runs(tile, gradient, head, stage)
    else:
        _stage_values(tile, gradient, head, stage)


def _misalignment(problem: Problem, gradient: cute.Tensor) -> Int64:
    """Return 0 if all runs of 8 tokens begin at multiples of 16 bytes and the last one is whole."""
    steps = gradient.iterator.toint() | Int64(gradient.stride[2]) * 2 | Int64(gradient.shape[0]) * 2
    if problem.heads > 1:
        steps = steps | Int64(gradient.stride[1]) * 2
    return steps & 15


def _column(gradient: cute.Tensor, head: Int32, channel: Int32, token: Int32) -> cute.Pointer:
    """Return the place of a token in a channel whose tokens lie side by side, at a multiple of 16 bytes."""
    offset = Int64(head) * gradient.stride[1] + Int64(channel) * gradient.stride[2] + Int64(token)
    address = gradient.iterator.toint() + offset * 2
    return cute.make_ptr(BFloat16, address, cute.AddressSpace.gmem, assumed_align=16)


def _stage_runs(tile: Tile, gradient: cute.Tensor, head: Int32, stage: int) -> None:
    launch = tile.setup.launch
    runs = launch.tokens // RUN
    total = runs * tile.setup.problem.channels
    thread, _, _ = cute.arch.thread_idx()
    wide = cute.make_copy_atom(CopyG2ROp(), BFloat16, num_bits_per_copy=128, invariant=True)
    inner = cute.make_copy_atom(CopyUniversalOp(), BFloat16, num_bits_per_copy=128)
    found = []
    for turn in range(-(-total // launch.threads)):
        index = thread + turn * launch.threads
        if launch.threads * (turn + 1) > total:  # several threads then bring the last run
            index = cutlass.min(index, total - 1)
        run, channel = index % runs, index // runs
        # A run past the end is replaced by the last one: nobody reads its tokens.
        token = cutlass.min(tile.first + run * RUN, Int32(gradient.shape[0]) - RUN)
        source = cute.make_tensor(_column(gradient, head, channel, token), cute.make_layout((RUN,)))
        values = cute.make_rmem_tensor((RUN,), BFloat16)
        cute.copy(wide, source, values)
        found.append((values, _slot(tile, stage, channel, run)))
    for values, slot in found:
        cute.copy(inner, values, cute.local_tile(tile.shared, (RUN,), (slot,)))


def _stage_values(tile: Tile, gradient: cute.Tensor, head: Int32, stage: int) -> None:
    launch, total = tile.setup.launch, tile.setup.launch.tokens * tile.setup.problem.channels
    thread, _, _ = cute.arch.thread_idx()
    found = []
    for turn in range(-(-total // launch.threads)):
        index = thread + turn * launch.threads
        if launch.threads * (turn + 1) > total:  # several threads then bring the last value
            index = cutlass.min(index, total - 1)
        local, channel = index % launch.tokens, index // launch.tokens
        token = cutlass.min(tile.first + local, Int32(gradient.shape[0]) - 1)
        offset = Int64(head) * gradient.stride[1] + Int64(channel) * gradient.stride[2] + Int64(token)
        slot = _slot(tile, stage, channel, local // RUN) * RUN + local % RUN
        found.append(((gradient.iterator + offset).load(), slot))
    for value, slot in found:
        tile.shared[slot] = value


def _slot(tile: Tile, stage: int, channel: Int32, run: Int32) -> Int32:
    """Return the place of 8 tokens of a channel in shared memory, in units of them.

    Runs are stored crosswise, so that reading a token's channels of several vectors touches different banks.
    """
    problem, launch = tile.setup.problem, tile.setup.launch
    runs = launch.tokens // RUN
    crossed = run ^ (channel // problem.vector % runs)
    return (stage * problem.channels + channel) * runs + crossed


def _from_shared(tile: Tile, stage: int, item: Item) -> tuple[cute.Tensor, cute.Tensor]:
    problem = tile.setup.problem
    found = []
    for half in range(2):
        values = cute.make_rmem_tensor((problem.vector,), BFloat16)
        for i in range(problem.vector):
            channel = (half * problem.vectors + item.chunk) * problem.vector + i
            slot = _slot(tile, stage, channel, item.local // RUN)
            values[i] = tile.shared[slot * RUN + item.local % RUN]
        found.append(values)
    return tuple(found)


# ---- prefetch and arguments


@cute.jit
def _prefetch_tile(
    setup: cutlass.Constexpr[Setup], q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, block: Int32
) -> None:
    """Bring the tile of a later block to the second-level cache: Q and V in one run a head, K in one a channel."""
    problem, launch = setup.problem, setup.launch
    thread, _, _ = cute.arch.thread_idx()
    first = block // launch.head_tiles(problem) * launch.tokens
    head = block % launch.head_tiles(problem) * launch.heads
    if first + launch.tokens <= q.shape[0]:
        if thread < launch.heads:
            if head + thread < problem.heads:
                for gradient in (q, v):
                    row = _row(problem, gradient, first, head + thread)
                    run = cute.make_layout((launch.tokens * problem.channels,))
                    prefetch(cute.make_tensor(row.iterator, run))
        if thread < problem.channels:
            if _misalignment(problem, k) == 0:
                for number in cutlass.range_constexpr(launch.heads):
                    # Past the last head, the last one again.
                    place = _column(k, cutlass.min(head + number, problem.heads - 1), thread, first)
                    prefetch(cute.make_tensor(place, cute.make_layout((launch.tokens,))))


def _logical(x: cute.Tensor, order: list[int]) -> cute.Tensor:
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=order))


def _fake_arguments(problem: Problem) -> tuple[Any, ...]:
    tokens = cute.sym_int64()
    forms = ((problem.q, problem.q_alignment), (problem.k, problem.k_alignment), (problem.v, problem.v_alignment))
    orders = ((1, 0, 2), (1, 2, 0), (1, 0, 2))
    gradients = [
        _fake_gradient(problem, tokens, form, alignment, order)
        for (form, alignment), order in zip(forms, orders, strict=True)
    ]
    tables = [_fake_table(problem, tokens) for _ in range(2)]
    out = fake_rows(BFloat16, tokens, 3 * problem.heads * problem.channels, problem.out_alignment)
    return (*gradients, *tables, out, fake_stream())


def _fake_gradient(problem: Problem, tokens: Any, form: str, alignment: int, order: tuple[int, ...]) -> cute.Tensor:
    """Stand in for a gradient (T, H, D), or as it is stored. A single head's stride says nothing."""
    step = alignment // 2 if form == ROWS else 1
    shape = (tokens, problem.heads, problem.channels)
    head_stride = cute.sym_int64(divisibility=step if problem.heads > 1 else 1)
    token_stride = 1 if form == COLUMNS else cute.sym_int64(divisibility=step)
    stride = (token_stride, head_stride, 1 if form == ROWS else cute.sym_int64())
    if problem.stored:
        shape, stride = (tuple(values[i] for i in order) for values in (shape, stride))
    return cute.runtime.make_fake_tensor(BFloat16, shape, stride, assumed_align=alignment)


def _fake_table(problem: Problem, tokens: Any) -> cute.Tensor:
    half = problem.channels // 2
    stride = cute.sym_int64(divisibility=max(1, problem.table_alignment // 4))
    if problem.table_rank == 2:
        shape, strides = (tokens, half), (stride, 1)
    else:
        shape, strides = (tokens, 1, half), (stride, cute.sym_int64(), 1)
    return cute.runtime.make_fake_tensor(Float32, shape, strides, assumed_align=problem.table_alignment)


vision_kernel.set_name_prefix("fe_rope_vision_rope_backward", remove_cutlass_symbol=True, keep_mangled_name=False)
