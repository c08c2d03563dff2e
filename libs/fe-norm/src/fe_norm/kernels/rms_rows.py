"""Kernel of ``rms_norm`` and ``rmsnorm_silu``: one pass over rows that fit in the registers of a block, two over longer
ones.

A group of threads (a part of a warp, or a block) shares a row. Each thread loads its share with all loads in
flight, adds the residual if there is one, squares and sums it, and after one exchange with the group scales, activates,
rounds and stores it. At least x is read and o written, with a residual both of these twice.

Functions marked ``cute.jit`` branch or loop on the device; the others only compose while compiling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from fe_norm.launch import Launch, Problem, loads_parameters_late, split_config
from fe_runtime.cute.activation import silu
from fe_runtime.cute.arguments import fake_rows, fake_stream, fake_vector
from fe_runtime.cute.memory import access_bits, load_atom, prefetch, store_atom
from fe_runtime.cute.reduce import WARP, block_sums, sum_of_squares, warp_sum
from fe_runtime.cute.rows import RowPartition, load_share, load_vector, narrow_again, store_vector
from fe_runtime.cute.types import architecture_number, numeric, storage

from .output import BLOCK, OutputFormat, OutputRow, both

__all__ = ["build"]


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments.

    In order: x, w?, bias?, scale?, residual?, o, sf?, residual_out?, rstd?, eps, stream.

    ``config`` is what :func:`fe_norm.launch.config` returns.
    """
    setup = Setup(arch, *split_config(config))

    @cute.jit
    def rms_rows(*arguments: Any) -> None:
        _launch(setup, arguments)

    return rms_rows, tuple(_fake_arguments(setup).values())


OPERANDS = ("x", "w", "bias", "scale", "residual", "o", "sf", "residual_out", "rstd", "eps", "stream")


@dataclass(frozen=True, slots=True)
class Setup:
    """All that is static in a compilation."""

    arch: str
    problem: Problem
    launch: Launch

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands that are present, in order."""
        problem = self.problem
        optional = {
            "w": problem.weight_dtype is not None,
            "bias": problem.has_bias,
            "scale": problem.has_scale,
            "sf": problem.out_format == "nvfp4",
            "residual": problem.has_residual,
            "residual_out": problem.has_residual,
            "rstd": problem.has_rstd,
        }
        return tuple(name for name in OPERANDS if optional.get(name, True))

    @property
    def partition(self) -> RowPartition:
        """The share of a thread in a row."""
        how = self.launch
        return RowPartition(self.problem.columns, how.vector, how.threads_per_row, how.chunk)

    @property
    def output(self) -> OutputFormat:
        """The output format."""
        problem = self.problem
        return OutputFormat(
            problem.out_format, self.partition, problem.o_alignment, architecture_number(self.arch) >= 89
        )


def _launch(setup: Setup, arguments: tuple[Any, ...]) -> None:
    """Launch one block per tile of rows."""
    how = setup.launch
    operands = dict(zip(setup.operands, arguments, strict=True))
    arrays = [operands.get(name) for name in OPERANDS[:-2]]
    operation = "rms_norm" if setup.problem.activation is None else "rmsnorm_silu"
    kernel, suffix = (rows_kernel, "") if setup.partition.chunks == 1 else (two_pass_kernel, "_two_pass")
    kernel.set_name_prefix(f"fe_norm_{operation}{suffix}", remove_cutlass_symbol=True, keep_mangled_name=False)
    tiles = Int32(cute.ceil_div(operands["x"].shape[0], how.tile))
    kernel(setup, *arrays, operands["eps"]).launch(
        grid=(tiles, 1, 1),
        block=(how.threads, 1, 1),
        stream=operands["stream"],
        min_blocks_per_mp=how.blocks_per_sm,
        preferred_smem_carveout=-1,  # the driver's choice; without it the compiler would ask a GPU
    )


@cute.kernel
def rows_kernel(
    setup: cutlass.Constexpr[Setup],
    x: cute.Tensor,
    w: cute.Tensor | None,
    bias: cute.Tensor | None,
    scale: cute.Tensor | None,
    residual: cute.Tensor | None,
    o: cute.Tensor,
    sf: cute.Tensor | None,
    residual_out: cute.Tensor | None,
    rstd_out: cute.Tensor | None,
    eps: Float32,
) -> None:
    """Rows that stay in registers between the sum and the store."""
    how = setup.launch
    scratch = _scratch(setup)
    lane, rows = _place(setup)
    last = x.shape[0] - 1
    # Groups past the last row read it again rather than branch; they store nothing.
    present = rows if how.tile == 1 else [cutlass.min(row, last) for row in rows]
    shares = [_load_row(setup, x, row, lane, 0) for row in present]
    others = [] if residual is None else [_load_row(setup, residual, row, lane, 0) for row in present]
    if cutlass.const_expr(how.prefetch > 0):
        ahead = [row + how.prefetch * how.tile for row in rows]
        _prefetch(x, ahead, lane)
        if cutlass.const_expr(residual is not None):
            _prefetch(residual, ahead, lane)
    parameters = Parameters.of(setup, w, bias, lane, 0)
    factor = None if scale is None else scale[0]
    if cutlass.const_expr(residual is not None):
        shares = [_added(share, other) for share, other in zip(shares, others, strict=True)]
        for i in cutlass.range_constexpr(how.rows):
            exists = True if how.tile == 1 else rows[i] <= last
            _store_sum(setup, shares[i], residual_out, rows[i], lane, 0, exists)
    sums = _row_sums(setup, [sum_of_squares(share) for share in shares], scratch)
    for i in cutlass.range_constexpr(how.rows):
        rstd = _rstd(setup, sums[i], eps)
        if cutlass.const_expr(how.tile == 1 or sf is not None):
            # Threads exchange NVFP4 maxima, so none of a warp may stay away: only their stores depend on the row.
            exists = True if how.tile == 1 else rows[i] <= last
            _write_share(
                setup, shares[i], parameters, rstd, _output_row(setup, o, sf, factor, rows[i], exists), lane, 0
            )
        else:
            if rows[i] <= last:
                target = _output_row(setup, o, sf, factor, rows[i], True)
                _write_share(setup, shares[i], parameters, rstd, target, lane, 0)
        if cutlass.const_expr(rstd_out is not None):
            _store_rstd(rstd_out, rows[i], rstd, (lane == 0) if how.tile == 1 else (lane == 0) & (rows[i] <= last))


@cute.kernel
def two_pass_kernel(
    setup: cutlass.Constexpr[Setup],
    x: cute.Tensor,
    w: cute.Tensor | None,
    bias: cute.Tensor | None,
    scale: cute.Tensor | None,
    residual: cute.Tensor | None,
    o: cute.Tensor,
    sf: cute.Tensor | None,
    residual_out: cute.Tensor | None,
    rstd_out: cute.Tensor | None,
    eps: Float32,
) -> None:
    """Rows too long for the registers of a block: read once for the sum and again, from the cache, for the store."""
    scratch = _scratch(setup)
    lane, rows = _place(setup)
    total = Float32(0.0)
    for chunk in range(setup.partition.chunks):
        share = _summed(setup, x, residual, rows[0], lane, chunk)
        total = total + sum_of_squares(share)
        if cutlass.const_expr(residual is not None):
            _store_sum(setup, share, residual_out, rows[0], lane, chunk, True)
    rstd = _rstd(setup, _row_sums(setup, [total], scratch)[0], eps)
    if cutlass.const_expr(rstd_out is not None):
        _store_rstd(rstd_out, rows[0], rstd, lane == 0)
    factor = None if scale is None else scale[0]
    for chunk in range(setup.partition.chunks):
        share = _summed(setup, x, residual, rows[0], lane, chunk)
        parameters = Parameters.of(setup, w, bias, lane, chunk)
        target = _output_row(setup, o, sf, factor, rows[0], True)
        _write_share(setup, share, parameters, rstd, target, lane, chunk)


def _scratch(setup: Setup) -> cute.Tensor:
    """Return shared memory for the partial sums of the warps that share a row."""
    how = setup.launch
    warps = max(1, how.threads // WARP)
    layout = cute.make_layout((warps, how.rows))
    return cutlass.memory.SmemAllocator().allocate_tensor(Float32, layout, byte_alignment=16)


def _place(setup: Setup) -> tuple[Int32, list[Int64]]:
    """Return a thread's place in its group, and the rows of the group."""
    how = setup.launch
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    lane, group = thread % how.threads_per_row, thread // how.threads_per_row
    first = Int64(block) * how.tile + group
    return lane, [first + i * how.groups for i in range(how.rows)]


@cute.jit
def _prefetch(x: cute.Tensor, rows: list[Int64], lane: Int32) -> None:
    """Bring rows to the second-level cache, those of a block that starts a little later."""
    if lane == 0:
        for i in cutlass.range_constexpr(len(rows)):
            if rows[i] < x.shape[0]:
                prefetch(x[rows[i], None])


def _summed(
    setup: Setup, x: cute.Tensor, residual: cute.Tensor | None, row: Int64, lane: Int32, chunk: Int32 | int
) -> cute.Tensor:
    """Load a thread's share of a row of x, with the residual added if there is one."""
    share = _load_row(setup, x, row, lane, chunk)
    return share if residual is None else _added(share, _load_row(setup, residual, row, lane, chunk))


def _added(a: cute.Tensor, b: cute.Tensor) -> cute.Tensor:
    """Return ``a + b`` as it is stored: added in float32, rounded to the dtype of both."""
    total = cute.make_rmem_tensor(a.shape, a.element_type)
    for j in range(a.shape[1]):
        total[None, j].store((a[None, j].load().to(Float32) + b[None, j].load().to(Float32)).to(a.element_type))
    return total


def _store_sum(
    setup: Setup,
    share: cute.Tensor,
    residual_out: cute.Tensor,
    row: Int64,
    lane: Int32,
    chunk: Int32 | int,
    exists: Boolean | bool,
) -> None:
    partition, dtype = setup.partition, share.element_type
    atom = store_atom(dtype, access_bits(dtype, partition.vector, setup.problem.x_alignment))
    for j in range(partition.count):
        index = partition.index(lane, chunk, j)
        inside = both(exists, partition.inside(index, j))
        store_vector(share[None, j], residual_out[row, None], index, inside, partition, atom)


@cute.jit
def _store_rstd(rstd_out: cute.Tensor, row: Int64, rstd: Float32, here: Boolean) -> None:
    if here:
        rstd_out[row] = rstd


def _load_row(setup: Setup, x: cute.Tensor, row: Int64, lane: Int32, chunk: Int32 | int) -> cute.Tensor:
    return _load_part(setup, x[row, None], setup.problem.x_alignment, lane, chunk)


@dataclass(frozen=True, slots=True)
class Parameters:
    """Weight and bias: either a thread's shares, loaded, or the arrays, to be loaded vector by vector."""

    arrays: tuple[cute.Tensor | None, cute.Tensor | None]
    shares: tuple[cute.Tensor | None, ...] | None

    @staticmethod
    def of(
        setup: Setup, w: cute.Tensor | None, bias: cute.Tensor | None, lane: Int32, chunk: Int32 | int
    ) -> Parameters:
        """Load the shares now, while the row is under way, unless they take too many registers."""
        arrays = (w, bias)
        if loads_parameters_late(setup.problem, setup.launch):
            return Parameters(arrays, None)
        alignment = setup.problem.weight_alignment
        return Parameters(
            arrays, tuple(None if a is None else _load_part(setup, a, alignment, lane, chunk) for a in arrays)
        )

    def vector(self, setup: Setup, lane: Int32, chunk: Int32 | int, j: int) -> tuple[cute.TensorSSA | None, ...]:
        """Return vector ``j`` of weight and bias in float32."""
        if self.shares is not None:
            vectors = [None if share is None else narrow_again(share[None, j]) for share in self.shares]
        else:
            vectors = [None if a is None else _load_one(setup, a, lane, chunk, j) for a in self.arrays]
        return tuple(None if vector is None else vector.load().to(Float32) for vector in vectors)


def _load_part(setup: Setup, values: cute.Tensor, alignment: int, lane: Int32, chunk: Int32 | int) -> cute.Tensor:
    dtype = values.element_type
    atom = load_atom(dtype, access_bits(dtype, setup.launch.vector, alignment))
    return load_share(values, lane, chunk, setup.partition, atom)


def _load_one(setup: Setup, values: cute.Tensor, lane: Int32, chunk: Int32 | int, j: int) -> cute.Tensor:
    """Load vector ``j`` of a thread's share of weight or bias."""
    partition, dtype = setup.partition, values.element_type
    atom = load_atom(dtype, access_bits(dtype, partition.vector, setup.problem.weight_alignment))
    return load_vector(values, partition.index(lane, chunk, j), j, partition, atom)


def _output_row(
    setup: Setup, o: cute.Tensor, sf: cute.Tensor | None, factor: Float32 | None, row: Int64, exists: Boolean | bool
) -> OutputRow:
    scales = None if sf is None else sf[row, None]
    return OutputRow(setup.output, o[row, None], scales, factor, exists)


def _row_sums(setup: Setup, values: list[Float32], scratch: cute.Tensor) -> list[Float32]:
    """Return the sums over the threads that share a row."""
    how = setup.launch
    if how.threads_per_row <= WARP:
        return [warp_sum(value, how.threads_per_row) for value in values]
    return block_sums(values, scratch)


def _rstd(setup: Setup, total: Float32, eps: Float32) -> Float32:
    """Return ``rsqrt(total / C + eps)``; relative error at most 2^-22 plus half of the argument's, 2^-23."""
    return cute.math.rsqrt(total * Float32(1.0 / setup.problem.columns) + eps, approx=True)


def _write_share(
    setup: Setup,
    share: cute.Tensor,
    parameters: Parameters,
    rstd: Float32,
    target: OutputRow,
    lane: Int32,
    chunk: Int32 | int,
) -> None:
    """Scale, activate and store a thread's share of a row."""
    partition = setup.partition
    for j in range(partition.count):
        x = narrow_again(share[None, j]).load().to(Float32)
        gain, shift = parameters.vector(setup, lane, chunk, j)
        results = [_result(setup, i, x, gain, shift, rstd) for i in range(partition.vector)]
        index = partition.index(lane, chunk, j)
        target.store(results, index, partition.inside(index, j))


def _result(
    setup: Setup, i: int, x: cute.TensorSSA, gain: cute.TensorSSA | None, shift: cute.TensorSSA | None, rstd: Float32
) -> Float32:
    """Return ``(rstd * x) * w + b``, activated."""
    z = rstd * x[i]
    if gain is not None:
        z = z * gain[i]
    if shift is not None:
        z = z + shift[i]
    return z if setup.problem.activation is None else silu(z)


def _fake_arguments(setup: Setup) -> dict[str, Any]:
    problem, columns = setup.problem, setup.problem.columns
    tokens = cute.sym_int64()
    x, weight = numeric(problem.x_dtype), problem.weight_dtype or "float32"
    stored = columns // 2 if problem.out_format == "nvfp4" else columns
    arguments = {
        "x": fake_rows(x, tokens, columns, problem.x_alignment),
        "w": fake_vector(numeric(weight), columns, problem.weight_alignment),
        "bias": fake_vector(numeric(problem.bias_dtype or weight), columns, problem.weight_alignment),
        "scale": fake_vector(Float32, 1, 4),
        "o": fake_rows(storage(problem.out_format), tokens, stored, problem.o_alignment),
        "sf": fake_rows(cutlass.Uint8, tokens, columns // BLOCK, 1),
        "residual": fake_rows(x, tokens, columns, problem.x_alignment),
        # always contiguous: rows start at whole vectors, which divide a row, and not always where those of x would
        "residual_out": fake_rows(x, tokens, columns, min(16, setup.launch.vector * x.width // 8)),
        "rstd": fake_vector(Float32, tokens, 4),
        "eps": Float32(0.0),
        "stream": fake_stream(),
    }
    return {name: arguments[name] for name in setup.operands}
