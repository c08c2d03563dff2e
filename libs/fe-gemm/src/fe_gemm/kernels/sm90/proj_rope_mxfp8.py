"""Kernel of ``gemm_proj_rope_mxfp8``: the Hopper matrix product, a head of 192 features to a tile, and the rotation and
quantisation of the tile in both directions. MXFP8 operands are expanded to bf16 first.

Beside the product, 2 T N bytes of codes and T N / 16 of scales are written, each once; the tables are read once for
each head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import BFloat16, Int32, Int64, Uint8, cute

from fe_gemm.kernels import expand_plain
from fe_gemm.planning.problem import Problem as Product
from fe_gemm.planning.proj_rope import Launch, Problem, split_config
from fe_runtime.cute.arguments import fake_stream

from .block import dimensions, run_block
from .dense_tiles import DenseTiles
from .operands import Source
from .rope_quantiser import RopeQuantiser, Shared, Sheets, Tables

__all__ = ["build"]


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments.

    These are x (T, K), w (N, K) or (K, N), cos and sin (T, 64), for MXFP8 also the scales of x and w; codes by rows
    (T, N), their scales (T, N/32), codes by columns (T, N), their scales (T/32, N); for MXFP8 workspaces for x and w in
    bf16; stream. ``config`` is what :func:`fe_gemm.planning.proj_rope.config` returns.
    """
    problem, how, multiprocessors = split_config(config)
    setup = Setup(problem, how, multiprocessors)

    @cute.jit
    def gemm_proj_rope_mxfp8(*arguments: Any) -> None:
        *arrays, stream = arguments
        if cutlass.const_expr(problem.scaled):
            x, w, cos, sin, x_scale, w_scale, *results, x_values, w_values = arrays
            expand_plain.launch_expand(x, x_scale, x_values, 1, stream)
            expand_plain.launch_expand(w, w_scale, w_values, 1 if problem.w_major == "k" else 0, stream)
            _launch(setup, x_values, w_values, (cos, sin), results, stream)
        else:
            x, w, cos, sin, *results = arrays
            _launch(setup, x, w, (cos, sin), results, stream)

    return gemm_proj_rope_mxfp8, _fake_arguments(problem)


@dataclass(frozen=True, slots=True)
class Setup:
    """All that is static in a compilation."""

    kind: Problem
    launch: Launch
    multiprocessors: int

    @property
    def source(self) -> Source:
        """Where tiles of x and w come from."""
        return Source(self._product, self.launch)

    def tiles(self, operands: tuple[Any, ...]) -> DenseTiles:
        """Return the tiles of the product of what :meth:`Source.atoms` returned."""
        (tokens, depth, _), (features, _, _) = operands[1].shape, operands[3].shape
        return DenseTiles.of(self._product, self.launch, (tokens, features, depth, 1))

    @property
    def _product(self) -> Product:
        return Product(b_major=self.kind.w_major)


def _launch(
    setup: Setup, x: cute.Tensor, w: cute.Tensor, tables: tuple[Any, Any], results: list[cute.Tensor], stream: Any
) -> None:
    """Launch the product of matrices of bf16 and what follows it."""
    row_codes, row_scales, column_codes, column_scales = results
    operands = setup.source.atoms(_matrices(x), _matrices(w, turned=setup.kind.w_major == "n"))
    sheets = (*Sheets.atoms(row_codes), row_scales, *Sheets.atoms(column_codes), column_scales)
    tiles = setup.tiles(operands)
    proj_rope_kernel.set_name_prefix("fe_gemm_proj_rope", remove_cutlass_symbol=True, keep_mangled_name=False)
    proj_rope_kernel(setup, operands, tables, sheets).launch(
        **dimensions(setup.launch, tiles.count, setup.multiprocessors), stream=stream
    )


@cute.kernel
def proj_rope_kernel(
    setup: cutlass.Constexpr[Setup], operands: tuple[Any, ...], tables: tuple[Any, ...], sheets: tuple[Any, ...]
) -> None:
    """One block of a persistent cluster."""
    ending = Ending(Tables(*tables), Sheets(*sheets))
    run_block(setup.source, operands, setup.tiles(operands), ending)


@dataclass(frozen=True, slots=True)
class Ending:
    """Rotation and quantisation, as a block sees it."""

    tables: Tables
    sheets: Sheets

    def allocate(self, allocator: Any) -> Shared:
        return Shared.allocate(allocator)

    def initialise(self, shared: Shared) -> None:
        """Nothing has to be made usable."""

    def finisher(self, shared: Shared, group: Int32, thread: Int32) -> RopeQuantiser:
        return RopeQuantiser.of(self.sheets, self.tables, shared, group, thread)


def _matrices(array: cute.Tensor, turned: bool = False) -> cute.Tensor:
    """Return a matrix as a batch of one, its dimensions exchanged if ``turned``."""
    rows, columns = array.shape
    line = array.stride[0]
    whole = cute.assume(Int64(rows) * line, divby=128 // array.element_type.width)
    shape, stride = ((columns, rows, 1), (1, line, whole)) if turned else ((rows, columns, 1), (line, 1, whole))
    return cute.make_tensor(array.iterator, cute.make_layout(shape, stride=stride))


def _fake_arguments(problem: Problem) -> tuple[Any, ...]:
    tokens, depth, features = (cute.sym_int() for _ in range(3))
    weight = (features, depth) if problem.w_major == "k" else (depth, features)
    operands = [_fake_matrix(Uint8 if problem.scaled else BFloat16, *shape) for shape in ((tokens, depth), weight)]
    tables = [_fake_matrix(BFloat16, tokens, 64) for _ in range(2)]
    scales, workspaces = [], []
    if problem.scaled:
        scales = [_fake_matrix(Uint8, cute.sym_int(), cute.sym_int(), 1) for _ in range(2)]
        workspaces = [_fake_matrix(BFloat16, *shape) for shape in ((tokens, depth), weight)]
    results = [
        _fake_matrix(Uint8, tokens, features),
        _fake_matrix(Uint8, tokens, cute.sym_int(), 2),
        _fake_matrix(Uint8, tokens, features),
        _fake_matrix(Uint8, cute.sym_int(), features, 8),
    ]
    return (*operands, *tables, *scales, *results, *workspaces, fake_stream())


def _fake_matrix(dtype: type[cutlass.Numeric], rows: Any, columns: Any, alignment: int = 16) -> cute.Tensor:
    """Return a matrix of contiguous rows that start at multiples of ``alignment`` bytes."""
    line = cute.sym_int64(divisibility=8 * alignment // dtype.width)
    return cute.runtime.make_fake_tensor(dtype, (rows, columns), (line, 1), assumed_align=alignment)
