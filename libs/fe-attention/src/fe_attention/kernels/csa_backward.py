"""Kernels of the gradient of the CSA compressor: rows, what no row has, the sums for the bias.

A thread makes the weights of its entries again, as the forward does, and writes the gradients of kv and score where the
entries are: each column of a token belongs to one window at most. Blocks walk over the rows; the sums for the bias grow
in registers and are written as a row of partial sums, which a last kernel adds in order, or added to the result by
atomics. Columns of tokens that no window has are set to 0 by a kernel of its own, which looks at the offsets only.

Memory must move kv and score in and their gradients out, 8 * coff * head_dim bytes a token, and the gradient of the
result in.

Functions marked ``cute.jit`` branch or loop on the device; the others only compose while compiling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, cute

from fe_attention.planning.csa import split_config
from fe_runtime.cute.arguments import fake_rows, fake_stream, fake_vector
from fe_runtime.cute.memory import store_atom
from fe_runtime.cute.partial_sums import launch_sums
from fe_runtime.cute.reduce import WARP

from .bf16 import rounded_bf16
from .csa_common import Entry, Place, Setup, exchange, place_of, segment_of, totals, values_of, weights_of

__all__ = ["build"]

CLEARED = 64
"""Tokens, and threads, of a block that sets to 0 what no window has."""


def build(arch: str, *, atomic: bool, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments.

    In order: grad_out, kv, score, ape, cu_seqlens, cu_seqlens_comp; with ``atomic`` what grad_ape holds; grad_kv,
    grad_score, grad_ape; without ``atomic`` scratch for partial sums; stream. The rest of the configuration is what
    :func:`fe_attention.planning.csa.config` returns.
    """
    del arch
    setup = Setup(*split_config(config))

    @cute.jit
    def csa_compressor_backward(*arguments: Any) -> None:
        _launch(setup, atomic, arguments)

    return csa_compressor_backward, _fake_arguments(setup, atomic)


def _launch(setup: Setup, atomic: bool, arguments: tuple[Any, ...]) -> None:
    how, name = setup.launch, "fe_attention_csa_compressor_backward"
    inputs, (*results, stream) = arguments[:6], arguments[6:]
    grad_kv, grad_score, grad_ape = results[1:] if atomic else results[:3]
    grad_out, cu_seqlens, cu_seqlens_comp = inputs[0], inputs[4], inputs[5]
    rows = Int32(grad_out.shape[0])
    clear_kernel.set_name_prefix(f"{name}_clear", remove_cutlass_symbol=True, keep_mangled_name=False)
    clear_kernel(setup, cu_seqlens, cu_seqlens_comp, grad_kv, grad_score, rows).launch(
        grid=(Int32(cute.ceil_div(grad_kv.shape[0], CLEARED)), 1, 1), block=(CLEARED, 1, 1), stream=stream
    )
    groups_of_rows = cute.ceil_div(rows, how.rows)
    splits = cutlass.min(groups_of_rows, Int32(how.splits)) if atomic else Int32(results[3].shape[0])
    gradient_kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
    target = grad_ape if atomic else results[3]
    gradient_kernel(setup, atomic, *inputs, grad_kv, grad_score, target, splits).launch(
        grid=(splits * how.tiles(setup.problem), 1, 1),
        block=(how.threads, 1, 1),
        stream=stream,
        min_blocks_per_mp=how.blocks_per_sm,
        preferred_smem_carveout=-1,
    )
    if not atomic:
        flat = cute.make_tensor(grad_ape.iterator, cute.make_layout((setup.problem.ratio * setup.problem.columns,)))
        launch_sums([(results[3], flat)], how.splits, False, stream, f"{name}_bias")


@cute.kernel
def gradient_kernel(
    setup: cutlass.Constexpr[Setup],
    atomic: cutlass.Constexpr[bool],
    grad_out: cute.Tensor,
    kv: cute.Tensor,
    score: cute.Tensor,
    ape: cute.Tensor,
    cu_seqlens: cute.Tensor,
    cu_seqlens_comp: cute.Tensor,
    grad_kv: cute.Tensor,
    grad_score: cute.Tensor,
    sums: cute.Tensor,
    splits: Int32,
) -> None:
    """Some channels of every so manieth group of rows."""
    how, problem = setup.launch, setup.problem
    tiles = how.tiles(problem)
    block, _, _ = cute.arch.block_idx()
    place = Place.of(setup, block % tiles)
    split = block // tiles
    scratch = exchange(setup)
    meeting = _meeting(setup)
    added = cute.make_rmem_tensor((how.vector, setup.share), Float32)
    added.fill(0.0)
    rows = Int32(grad_out.shape[0])
    groups_of_rows = (rows + (how.rows - 1)) // how.rows
    for i in cutlass.range((groups_of_rows - split + splits - 1) // splits, unroll=1):
        row = (i * splits + split) * how.rows + place.slot
        present = cutlass.min(row, rows - 1)  # threads past the last row compute it again, for their barriers
        first, reaches_back, is_real = place_of(cu_seqlens, cu_seqlens_comp, present, Int64(kv.shape[0]), problem.ratio)
        is_mine = is_real & (row < rows) & place.inside
        _row(
            setup,
            place,
            (grad_out[present, None], kv, score, ape),
            (first, reaches_back, is_mine),
            (grad_kv, grad_score),
            added,
            scratch,
        )
    for number in cutlass.range_constexpr(setup.share):
        _flush(setup, atomic, place, number, added[None, number], sums, split, meeting)


def _row(
    setup: Setup,
    place: Place,
    inputs: tuple[cute.Tensor, ...],
    where: tuple[Int64, Boolean, Boolean],
    outputs: tuple[cute.Tensor, cute.Tensor],
    added: cute.Tensor,
    scratch: cute.Tensor | None,
) -> None:
    """Store the gradients of a thread's entries of a row, and add to the bias's sums."""
    grad_out, kv, score, ape = inputs
    first, reaches_back, is_mine = where
    entries = [Entry.of(setup, place, number, first, reaches_back) for number in range(setup.share)]
    scores, loaded = ([entry.load(setup, array) for entry in entries] for array in (score, kv))
    go = _gradient(setup, grad_out, place.index)
    e, den = weights_of(setup, entries, scores, ape, scratch)
    inverse = [cute.math.rcp(d, approx=True) for d in den]
    p = [[a * b for a, b in zip(values, inverse, strict=True)] for values in e]
    y = []
    for number, entry in enumerate(entries):
        values = values_of(setup, entry, loaded[number])
        y.append([(g * v) * w for g, v, w in zip(go, values, p[number], strict=True)])
    total = totals(setup, y, scratch, 2)
    for number, entry in enumerate(entries):
        ds = [cute.math.fma(w, -t, a) for w, t, a in zip(p[number], total, y[number], strict=True)]
        dkv = [g * w for g, w in zip(go, p[number], strict=True)]
        wide = cute.make_rmem_tensor((setup.launch.vector,), Float32)
        for n, value in enumerate(ds):
            wide[n] = value
        is_there = is_mine if entry.exists is True else is_mine & entry.exists
        grads = tuple(cute.local_tile(o[entry.token, None], (setup.launch.vector,), (entry.vector,)) for o in outputs)
        _write(setup, is_there, (rounded_bf16(dkv), rounded_bf16(ds)), grads, wide, added[None, number])


def _gradient(setup: Setup, row: cute.Tensor, index: Int32) -> list[Float32]:
    values = cute.make_rmem_tensor((setup.launch.vector,), BFloat16)
    cute.copy(setup.atom(BFloat16), cute.local_tile(row, (setup.launch.vector,), (index,)), values)
    wide = values.load().to(Float32)
    return [wide[n] for n in range(setup.launch.vector)]


@cute.jit
def _write(
    setup: cutlass.Constexpr[Setup],
    is_there: Boolean,
    values: tuple[cute.Tensor, cute.Tensor],
    targets: tuple[cute.Tensor, cute.Tensor],
    ds: cute.Tensor,
    added: cute.Tensor,
) -> None:
    if is_there:
        cute.copy(store_atom(BFloat16, setup.bits(BFloat16)), values[0], targets[0])
        cute.copy(store_atom(BFloat16, setup.bits(BFloat16)), values[1], targets[1])
        for n in cutlass.range_constexpr(setup.launch.vector):
            added[n] = added[n] + ds[n]


# ---- sums for the bias


def _meeting(setup: Setup) -> cute.Tensor | None:
    """Return shared memory where the rows of a block meet, for one entry at a time."""
    how = setup.launch
    if how.rows == 1:
        return None
    layout = cute.make_layout((how.vector, how.across * how.groups, how.rows))
    return cutlass.memory.SmemAllocator().allocate_tensor(Float32, layout, byte_alignment=16)


@cute.jit
def _flush(
    setup: cutlass.Constexpr[Setup],
    atomic: cutlass.Constexpr[bool],
    place: cutlass.Constexpr[Place],
    number: cutlass.Constexpr[int],
    added: cute.Tensor,
    sums: cute.Tensor,
    split: Int32,
    meeting: cute.Tensor | None,
) -> None:
    """Write, or add to the result, a block's sums for the thread's entry of this number."""
    how, problem = setup.launch, setup.problem
    if cutlass.const_expr(how.rows > 1):
        thread, _, _ = cute.arch.thread_idx()
        mine = thread % (how.across * how.groups)
        meeting[None, mine, place.slot].store(added.load())
        cute.arch.sync_threads()
        if place.slot == 0:
            for slot in cutlass.range_constexpr(1, how.rows):
                added.store(added.load() + meeting[None, mine, slot].load())
        cute.arch.sync_threads()
    at = Int32(place.group + number * how.groups)
    if (place.slot == 0) & place.inside & (at < problem.entries):
        column, k = place.index, at
        if cutlass.const_expr(problem.coff == 2):
            own = at >= problem.ratio
            k = cutlass.select_(own, at - problem.ratio, at)
            column = column + cutlass.select_(own, Int32(setup.vectors), Int32(0))
        vector = k * (problem.columns // how.vector) + column
        if cutlass.const_expr(atomic):
            for n in cutlass.range_constexpr(how.vector):
                cute.arch.atomic_add(sums.iterator + (vector * how.vector + n), added[n])
        else:
            target = cute.local_tile(sums[split, None], (how.vector,), (vector,))
            cute.copy(store_atom(Float32, setup.bits(Float32)), added, target)


# ---- what no window has


@cute.kernel
def clear_kernel(
    setup: cutlass.Constexpr[Setup],
    cu_seqlens: cute.Tensor,
    cu_seqlens_comp: cute.Tensor,
    grad_kv: cute.Tensor,
    grad_score: cute.Tensor,
    rows: Int32,
) -> None:
    """Each thread looks up a token; the threads of a warp set to 0 what no window has of their tokens, one by one."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    lane = cute.arch.lane_idx()
    tokens = Int32(grad_kv.shape[0])
    token = block * CLEARED + thread
    unused = Int32(0)
    if token < tokens:
        unused = _unused(setup, cu_seqlens, cu_seqlens_comp, token, rows)
    if cute.arch.vote_any_sync(unused != 0):
        for n in cutlass.range(WARP, unroll=1):
            parts = cute.arch.shuffle_sync(unused, n)
            for part in cutlass.range_constexpr(setup.problem.coff):
                if (parts >> part) & 1 != 0:
                    _clear(setup, grad_kv[Int64(token - lane + n), None], part, lane)
                    _clear(setup, grad_score[Int64(token - lane + n), None], part, lane)


@cute.jit
def _unused(
    setup: cutlass.Constexpr[Setup],
    cu_seqlens: cute.Tensor,
    cu_seqlens_comp: cute.Tensor,
    token: Int32,
    rows: Int32,
) -> Int32:
    """Return a bit for each part of the columns of a token that no window has."""
    problem = setup.problem
    number, start = segment_of(cu_seqlens, token)
    segments = Int32(cu_seqlens.shape[0]) - 1
    inside = (start <= token) & (number < segments)
    row = cu_seqlens_comp[number] + (token - start) // problem.ratio
    stop = cutlass.min(cu_seqlens_comp[cutlass.min(number + 1, segments)], rows)
    found = Int32(0)
    for part in cutlass.range_constexpr(problem.coff):
        is_used = inside & (row + (problem.coff - 1 - part) < stop)
        found = found | cutlass.select_(is_used, Int32(0), Int32(1 << part))
    return found


@cute.jit
def _clear(setup: cutlass.Constexpr[Setup], row: cute.Tensor, part: cutlass.Constexpr[int], lane: Int32) -> None:
    vector = cutlass.const_expr(setup.launch.vector)
    zeros = cute.make_rmem_tensor((vector,), BFloat16)
    zeros.fill(0.0)
    for index in cutlass.range(lane, setup.vectors, WARP, unroll=1):
        target = cute.local_tile(row, (vector,), (index + part * setup.vectors,))
        cute.copy(store_atom(BFloat16, setup.bits(BFloat16)), zeros, target)


def _fake_arguments(setup: Setup, atomic: bool) -> tuple[Any, ...]:
    problem = setup.problem
    tokens, rows, offsets, splits = (cute.sym_int64() for _ in range(4))
    aligned = 2 * setup.launch.vector
    wide = min(16, 2 * aligned)
    grad_out = fake_rows(BFloat16, rows, problem.head_dim, aligned)
    kv, score, grad_kv, grad_score = (fake_rows(BFloat16, tokens, problem.columns, aligned) for _ in range(4))
    shape, stride = (problem.ratio, problem.columns), (problem.columns, 1)
    ape, held, grad_ape = (cute.runtime.make_fake_tensor(Float32, shape, stride, assumed_align=wide) for _ in range(3))
    cu, comp = (fake_vector(Int32, offsets, 4) for _ in range(2))
    scratch = () if atomic else (fake_rows(Float32, splits, problem.ratio * problem.columns, wide),)
    before = (held,) if atomic else ()
    inputs = (grad_out, kv, score, ape, cu, comp)
    return (*inputs, *before, grad_kv, grad_score, grad_ape, *scratch, fake_stream())
