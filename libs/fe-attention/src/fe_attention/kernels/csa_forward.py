"""Kernel of the CSA compressor: a thread pools some neighbouring channels of a row, or of a part of its window.

Short windows (CSA: two blocks of four tokens) are one thread's: all its loads are in flight at once, and every element
of kv and score is read by one thread only. Longer ones (HCA: a block of 128 tokens) are shared by threads that meet for
the maximum and for the sums. Where a row's window lies, each thread finds from the offsets.

Memory must move all of kv and score once, and the result: 4 * coff * head_dim bytes a token, and 2 * head_dim / ratio.

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

from .bf16 import rounded_bf16
from .csa_common import Entry, Place, Setup, exchange, place_of, totals, values_of, weights_of

__all__ = ["build"]


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments: kv, score, ape, cu_seqlens, cu_seqlens_comp, out, stream.

    ``config`` is what :func:`fe_attention.planning.csa.config` returns.
    """
    del arch
    setup = Setup(*split_config(config))

    @cute.jit
    def csa_compressor_forward(*arguments: Any) -> None:
        _launch(setup, *arguments)

    return csa_compressor_forward, _fake_arguments(setup)


def _launch(
    setup: Setup,
    kv: cute.Tensor,
    score: cute.Tensor,
    ape: cute.Tensor,
    cu_seqlens: cute.Tensor,
    cu_seqlens_comp: cute.Tensor,
    out: cute.Tensor,
    stream: Any,
) -> None:
    how = setup.launch
    name = "fe_attention_csa_compressor_forward"
    pool_kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
    pool_kernel(setup, kv, score, ape, cu_seqlens, cu_seqlens_comp, out).launch(
        grid=(Int32(cute.ceil_div(out.shape[0], how.rows)) * how.tiles(setup.problem), 1, 1),
        block=(how.threads, 1, 1),
        stream=stream,
        min_blocks_per_mp=how.blocks_per_sm,
        preferred_smem_carveout=-1,  # the driver's choice; without it the compiler would ask a GPU
    )


@cute.kernel
def pool_kernel(
    setup: cutlass.Constexpr[Setup],
    kv: cute.Tensor,
    score: cute.Tensor,
    ape: cute.Tensor,
    cu_seqlens: cute.Tensor,
    cu_seqlens_comp: cute.Tensor,
    out: cute.Tensor,
) -> None:
    """Some channels of some rows."""
    how, tiles = setup.launch, setup.launch.tiles(setup.problem)
    block, _, _ = cute.arch.block_idx()
    place = Place.of(setup, block % tiles)
    row = block // tiles * how.rows + place.slot
    rows = Int32(out.shape[0])
    present = cutlass.min(row, rows - 1)  # threads past the last row compute it again, for their barriers
    first, reaches_back, _ = place_of(cu_seqlens, cu_seqlens_comp, present, Int64(kv.shape[0]), setup.problem.ratio)
    result = _pooled(setup, place, kv, score, ape, first, reaches_back, exchange(setup))
    _store(setup, rounded_bf16(result), out, row, (row < rows) & place.inside & (place.group == 0), place.index)


def _pooled(
    setup: Setup,
    place: Place,
    kv: cute.Tensor,
    score: cute.Tensor,
    ape: cute.Tensor,
    first: Int64,
    reaches_back: Boolean,
    scratch: cute.Tensor | None,
) -> list[Float32]:
    """Return the sum over the window of kv times its weights."""
    entries = [Entry.of(setup, place, number, first, reaches_back) for number in range(setup.share)]
    scores, loaded = ([entry.load(setup, array) for entry in entries] for array in (score, kv))
    e, den = weights_of(setup, entries, scores, ape, scratch)
    terms = []
    for number, entry in enumerate(entries):
        values = values_of(setup, entry, loaded[number])
        terms.append([a * b for a, b in zip(values, e[number], strict=True)])
    sums = totals(setup, terms, scratch, 2)
    return [total * cute.math.rcp(d, approx=True) for total, d in zip(sums, den, strict=True)]


@cute.jit
def _store(
    setup: cutlass.Constexpr[Setup],
    values: cute.Tensor,
    out: cute.Tensor,
    row: Int32,
    is_mine: Boolean,
    index: Int32,
) -> None:
    if is_mine:
        target = cute.local_tile(out[row, None], (setup.launch.vector,), (index,))
        cute.copy(store_atom(BFloat16, setup.bits(BFloat16)), values, target)


def _fake_arguments(setup: Setup) -> tuple[Any, ...]:
    problem = setup.problem
    tokens, rows, offsets = cute.sym_int64(), cute.sym_int64(), cute.sym_int64()
    aligned = 2 * setup.launch.vector
    kv, score = (fake_rows(BFloat16, tokens, problem.columns, aligned) for _ in range(2))
    ape = fake_rows(Float32, problem.ratio, problem.columns, min(16, 2 * aligned))
    cu, comp = (fake_vector(Int32, offsets, 4) for _ in range(2))
    return kv, score, ape, cu, comp, fake_rows(BFloat16, rows, problem.head_dim, aligned), fake_stream()
