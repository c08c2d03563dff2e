"""Kernel of ``tail_rope``: a stream through registers, in which the vectors of the tail are rotated on their way.

Each element is read once and written once, so the floor is 4 bytes of traffic for each, beside tables of 256 bytes a
token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int64, cute

from fe_rope.launch import TAIL, Launch, Problem, split_config
from fe_runtime.cute.arguments import fake_rows, fake_stream

from .tiles import fake_array, grid, load, places, prefetch_tile, rotate, store

__all__ = ["build"]


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments: x, cosine, sine, out, stream.

    ``config`` is what :func:`fe_rope.launch.config` returns.
    """
    setup = Setup(*split_config(config))

    @cute.jit
    def tail_rope(x: cute.Tensor, cosine: cute.Tensor, sine: cute.Tensor, out: cute.Tensor, stream: Any) -> None:
        tail_rope_kernel(setup, x, cosine, sine, out).launch(
            grid=(grid(setup.problem, setup.launch, x.shape[0]), 1, 1),
            block=(setup.launch.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=setup.launch.blocks_per_sm,
            preferred_smem_carveout=-1,  # the driver's choice; without it the compiler would ask a GPU
        )

    return tail_rope, _fake_arguments(setup.problem)


@dataclass(frozen=True, slots=True)
class Setup:
    """All that is static in a compilation."""

    problem: Problem
    launch: Launch


@cute.kernel
def tail_rope_kernel(
    setup: cutlass.Constexpr[Setup], x: cute.Tensor, cosine: cute.Tensor, sine: cute.Tensor, out: cute.Tensor
) -> None:
    """Load all of a thread's vectors, rotate those in the tail, store."""
    problem, launch = setup.problem, setup.launch
    where = places(problem, launch, x.shape[0])
    shares = [load(problem, x, place, problem.x_alignment, True) for place in where]
    if cutlass.const_expr(launch.prefetch > 0):
        prefetch_tile(x, problem, launch)

    def tables(place: Any) -> tuple[cute.Tensor, cute.Tensor]:
        token = Int64(place.token)
        return cosine[token, None], sine[token, None]

    rotate(shares, where, problem, tables, problem.table_alignment)
    for values, place in zip(shares, where, strict=True):
        store(values, out, place, problem, problem.out_alignment)


def _fake_arguments(problem: Problem) -> tuple[Any, ...]:
    tokens = cute.sym_int64()
    return (
        fake_array(problem, tokens, problem.x_alignment, problem.packed),
        fake_rows(Float32, tokens, TAIL // 2, problem.table_alignment),
        fake_rows(Float32, tokens, TAIL // 2, problem.table_alignment),
        fake_array(problem, tokens, problem.out_alignment, True),
        fake_stream(),
    )


tail_rope_kernel.set_name_prefix("fe_rope_tail_rope", remove_cutlass_symbol=True, keep_mangled_name=False)
