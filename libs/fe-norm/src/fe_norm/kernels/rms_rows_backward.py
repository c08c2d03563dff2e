"""Kernels of the gradients of ``rms_norm`` and ``rmsnorm_silu``: rows, then the sums of what the blocks added up.

With ``xh = rstd*x``, ``dz`` the gradient before the activation and ``u = dz*w``, a row of the result is
``rstd*(u - xh*mean(u*xh))``, plus the gradient of the sum where a residual was added. Sums over rows of ``dz*xh`` (for
the weight) and ``dz`` (for the bias) grow in the registers of each thread, column by column; a second kernel adds those
of all blocks, in order.

Each thread copies its share of a row to its own places in shared memory, asynchronously and some rows ahead, so the
only meeting of a row's threads is the one for its mean. At least dout and x are read and dx written: 6 bytes an element
in 16-bit formats, 8 with a residual's gradient.

Functions marked ``cute.jit`` branch or loop on the device; the others only compose while compiling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import CopyG2ROp

from fe_norm.launch_backward import split_config
from fe_runtime.cute.activation import sigmoid
from fe_runtime.cute.arguments import fake_rows, fake_stream, fake_vector
from fe_runtime.cute.memory import access_bits, store_atom
from fe_runtime.cute.partial_sums import launch_sums
from fe_runtime.cute.reduce import WARP, block_sums, tree_sum, warp_sum
from fe_runtime.cute.rows import store_vector
from fe_runtime.cute.types import numeric

from .backward_rows import READ, LoadedRow, Place, Setup, StagedRows, Vectors
from .output import rounded

__all__ = ["build"]


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments.

    In order: dout, dresidual?, x, w?, bias?, rstd?, dx, dw?, dbias?, scratch for each of these two, eps?, stream.
    ``config`` is what :func:`fe_norm.launch_backward.config` returns.
    """
    setup = Setup(arch, *split_config(config))

    @cute.jit
    def rms_rows_backward(*arguments: Any) -> None:
        _launch(setup, arguments)

    return rms_rows_backward, tuple(_fake_arguments(setup).values())


def _launch(setup: Setup, arguments: tuple[Any, ...]) -> None:
    """Launch the blocks that walk over the rows, then the sums of their sums."""
    how = setup.launch
    operands = dict(zip(setup.operands, arguments, strict=True))
    kernel, suffix = (walk_kernel, "") if setup.partition.chunks == 1 else (long_rows_kernel, "_long_rows")
    kernel.set_name_prefix(f"fe_norm_{setup.name}{suffix}", remove_cutlass_symbol=True, keep_mangled_name=False)
    tiles = Int32(cute.ceil_div(operands["x"].shape[0], how.groups))
    kernel(setup, *[operands.get(name) for name in (*READ, "dx", "w_sums", "bias_sums", "eps")]).launch(
        grid=(cutlass.min(tiles, how.blocks), 1, 1),
        block=(how.threads, 1, 1),
        stream=operands["stream"],
        min_blocks_per_mp=how.blocks_per_sm,
        preferred_smem_carveout=100,  # the rows under way are there
    )
    pairs = [(operands[f"{name}_sums"], operands[f"d{name}"]) for name in ("w", "bias") if f"{name}_sums" in operands]
    if pairs:
        launch_sums(pairs, how.blocks, how.overlap, operands["stream"], f"fe_norm_{setup.name}_sums")


@cute.kernel
def walk_kernel(
    setup: cutlass.Constexpr[Setup],
    dout: cute.Tensor,
    dresidual: cute.Tensor | None,
    x: cute.Tensor,
    w: cute.Tensor | None,
    bias: cute.Tensor | None,
    rstd: cute.Tensor | None,
    dx: cute.Tensor,
    w_sums: cute.Tensor | None,
    bias_sums: cute.Tensor | None,
    eps: Float32 | None,
) -> None:
    """Rows whose sums stay in registers: the blocks walk over them."""
    how = setup.launch
    if cutlass.const_expr(how.overlap):
        cute.arch.griddepcontrol_launch_dependents()
    place = Place.here(setup, x)
    allocator = cutlass.memory.SmemAllocator()
    exchange = _exchange(setup, allocator)
    rows = StagedRows.of(setup, allocator, place, (dout, x, dresidual), _values(setup, w, bias))
    sums = (_zeros(setup, w_sums), _zeros(setup, bias_sums))
    given = _given(rstd, place, Int32(0))
    for stage in cutlass.range_constexpr(how.stages - 1):
        _fetch(rows, place, Int32(stage), stage)
    for i in cutlass.range(place.count, unroll=1):
        ahead = i + (how.stages - 1)
        _fetch(rows, place, ahead, ahead % how.stages)
        cute.arch.cp_async_wait_group(how.stages - 1)
        stage, row = i % how.stages, place.row(i)
        next_given = _given(rstd, place, i + 1)  # a row early: it is needed just after the row's threads meet
        scale, mean, kept = _statistics(setup, rows, stage, given, eps, exchange, i)
        if cutlass.const_expr(how.groups == 1):
            _finish(setup, rows, stage, kept, scale, mean, dx[row, None], sums)
        else:
            if row < place.rows:  # the last tile may have groups without a row
                _finish(setup, rows, stage, kept, scale, mean, dx[row, None], sums)
        given = next_given
    cute.arch.cp_async_wait_group(0)
    room = rows.room(setup)
    if cutlass.const_expr(w_sums is not None):
        _store_sums(setup, sums[0], w_sums[place.block, None], place, room)
    if cutlass.const_expr(bias_sums is not None):
        _store_sums(setup, sums[1], bias_sums[place.block, None], place, room)


@cute.kernel
def long_rows_kernel(
    setup: cutlass.Constexpr[Setup],
    dout: cute.Tensor,
    dresidual: cute.Tensor | None,
    x: cute.Tensor,
    w: cute.Tensor | None,
    bias: cute.Tensor | None,
    rstd: cute.Tensor | None,
    dx: cute.Tensor,
    w_sums: cute.Tensor | None,
    bias_sums: cute.Tensor | None,
    eps: Float32 | None,
) -> None:
    """Rows whose sums do not fit into registers: read again for the result, and the sums grow in memory."""
    if cutlass.const_expr(setup.launch.overlap):
        cute.arch.griddepcontrol_launch_dependents()
    place = Place.here(setup, x)
    exchange = _exchange(setup, cutlass.memory.SmemAllocator())
    partition = setup.partition
    for i in cutlass.range(place.count, unroll=1):
        row = place.row(i)
        loads = LoadedRow(setup, place.lane, tuple(_row(a, row) for a in (dout, x, dresidual)), _values(setup, w, bias))
        if cutlass.const_expr(rstd is None):
            squares = Float32(0.0)
            for chunk in range(partition.chunks):
                squares = squares + _squares(loads, chunk, partition.count)
            scale = _rstd(setup, _row_sum(setup, squares, exchange, 0), eps)
        else:
            scale = rstd[row]
        dot = Float32(0.0)
        for chunk in range(partition.chunks):
            dot = dot + _dot_of_chunk(setup, loads, chunk, scale)
        mean = scale * _row_sum(setup, dot, exchange, 1 if rstd is None else i % 2) * Float32(1.0 / partition.columns)
        for chunk in range(partition.chunks):
            for j in cutlass.range_constexpr(partition.count):
                values = loads.vectors(chunk, j)
                dz = _gradient_of_z(setup, values, scale)
                index = partition.index(place.lane, chunk, j)
                inside = partition.inside(index, j)
                _store(setup, _dx(dz, values, scale, mean), dx[row, None], index, inside)
                if cutlass.const_expr(w_sums is not None):
                    terms = _products(dz, values, scale)
                    _add_to_memory(setup, terms, w_sums[place.block, None], index, inside, i)
                if cutlass.const_expr(bias_sums is not None):
                    _add_to_memory(setup, dz, bias_sums[place.block, None], index, inside, i)


@cute.jit
def _fetch(rows: cutlass.Constexpr[StagedRows], place: cutlass.Constexpr[Place], i: Int32, stage: Int32 | int) -> None:
    """Start to copy the group's row ``i``, if it has one; either way one more group of copies is under way."""
    row = place.row(i)
    if row < place.rows:
        rows.fetch(row, stage)
    cute.arch.cp_async_commit_group()


def _given(rstd: cute.Tensor | None, place: Place, i: Int32) -> Float32:
    """Return rstd of the group's row ``i``, if it is given and if there is such a row; otherwise some number."""
    return Float32(0.0) if rstd is None else rstd[cutlass.min(place.row(i), place.rows - 1)]


def _statistics(
    setup: Setup,
    rows: StagedRows,
    stage: Int32,
    given: Float32,
    eps: Float32 | None,
    exchange: cute.Tensor | None,
    i: Int32,
) -> tuple[Float32, Float32, list[list[Float32]] | None]:
    """Return ``rstd``, ``mean(u*xh)``, and the gradient of z where it is not that of the output."""
    count, scale = setup.partition.count, given
    if not setup.problem.has_rstd:
        scale = _rstd(setup, _row_sum(setup, _squares(rows, stage, count), exchange, 0), eps)
    kept = None
    if setup.problem.activation is not None:
        kept = [_gradient_of_z(setup, rows.vectors(stage, j), scale) for j in range(count)]
    dots = [_dot(kept and kept[j], rows.vectors(stage, j)) for j in range(count)]
    total = _row_sum(setup, tree_sum(dots), exchange, i % 2 if setup.problem.has_rstd else 1)
    return scale, scale * total * Float32(1.0 / setup.problem.columns), kept


def _finish(
    setup: Setup,
    rows: StagedRows,
    stage: Int32,
    kept: list[list[Float32]] | None,
    rstd: Float32,
    mean: Float32,
    dx: cute.Tensor,
    sums: tuple[cute.Tensor | None, ...],
) -> None:
    """Store the thread's share of a row of dx and add to the sums."""
    partition = setup.partition
    for j in range(partition.count):
        values = rows.vectors(stage, j)
        dz = _elements(values.dout, partition.vector) if kept is None else kept[j]
        index = partition.index(rows.lane, 0, j)
        _store(setup, _dx(dz, values, rstd, mean), dx, index, partition.inside(index, j))
        for target, terms in zip(sums, (_products(dz, values, rstd), dz), strict=True):
            for n in range(partition.vector if target is not None else 0):
                target[n, j] = target[n, j] + terms[n]


# ---- one vector


def _gradient_of_z(setup: Setup, values: Vectors, rstd: Float32) -> list[Float32]:
    """Return the gradient of what is activated, ``dout * s*(1 + z*(1 - s))`` for SiLU."""
    dout = _elements(values.dout, setup.launch.vector)
    if setup.problem.activation is None:
        return dout
    found = []
    for n, gradient in enumerate(dout):
        z = rstd * values.x[n]
        z = z if values.w is None else z * values.w[n]
        z = z if values.bias is None else z + values.bias[n]
        s = sigmoid(z)
        found.append(gradient * (s * (Float32(1.0) + z * (Float32(1.0) - s))))
    return found


def _dot(dz: list[Float32] | None, values: Vectors) -> Float32:
    """Return the sum of ``u*x``."""
    count = cute.size(values.x.shape)
    dz = _elements(values.dout, count) if dz is None else dz
    return tree_sum([_scaled(dz[n], values, n) * values.x[n] for n in range(count)])


def _dx(dz: list[Float32], values: Vectors, rstd: Float32, mean: Float32) -> list[Float32]:
    """Return ``rstd*(u - xh*mean) + dresidual``."""
    found = []
    for n, gradient in enumerate(dz):
        result = rstd * (_scaled(gradient, values, n) - (rstd * values.x[n]) * mean)
        found.append(result if values.dresidual is None else result + values.dresidual[n])
    return found


def _products(dz: list[Float32], values: Vectors, rstd: Float32) -> list[Float32]:
    """Return ``dz*xh``."""
    return [gradient * (rstd * values.x[n]) for n, gradient in enumerate(dz)]


def _scaled(gradient: Float32, values: Vectors, n: int) -> Float32:
    return gradient if values.w is None else gradient * values.w[n]


def _elements(values: cute.TensorSSA, count: int) -> list[Float32]:
    return [values[n] for n in range(count)]


# ---- one row


def _dot_of_chunk(setup: Setup, loads: LoadedRow, chunk: Int32, rstd: Float32) -> Float32:
    """Return the sum of ``u*x`` over a thread's share of a chunk."""
    shares = [loads.vectors(chunk, j) for j in range(setup.partition.count)]
    return tree_sum([_dot(_gradient_of_z(setup, values, rstd), values) for values in shares])


def _squares(rows: StagedRows | LoadedRow, where: Int32, count: int) -> Float32:
    """Return the sum of the squares of a thread's share."""
    shares = [rows.vectors(where, j).x for j in range(count)]
    return tree_sum([tree_sum([v * v for v in _elements(x, cute.size(x.shape))]) for x in shares])


def _row_sum(setup: Setup, value: Float32, exchange: cute.Tensor | None, turn: Int32 | int) -> Float32:
    """Return the sum over the threads that share a row. Successive calls take turns with two parts of ``exchange``."""
    if exchange is None:
        total = warp_sum(value, setup.launch.threads_per_row)
        cute.arch.sync_warp()  # else the compiler keeps a row in registers, in float32, rather than read it again
        return total
    return block_sums([value], exchange[None, None, turn])[0]


def _rstd(setup: Setup, total: Float32, eps: Float32) -> Float32:
    """Return ``rsqrt(total / C + eps)``, as the forward does."""
    return cute.math.rsqrt(total * Float32(1.0 / setup.problem.columns) + eps, approx=True)


def _exchange(setup: Setup, allocator: cutlass.memory.SmemAllocator) -> cute.Tensor | None:
    how = setup.launch
    if how.threads_per_row <= WARP:
        return None
    return allocator.allocate_tensor(Float32, cute.make_layout((how.threads // WARP, 1, 2)), byte_alignment=16)


def _values(setup: Setup, w: cute.Tensor | None, bias: cute.Tensor | None) -> tuple[cute.Tensor | None, ...]:
    """Return the parameters whose values count: without an activation those of the bias do not."""
    return w, None if setup.problem.activation is None else bias


def _row(array: cute.Tensor | None, row: Int64) -> cute.Tensor | None:
    return None if array is None else array[row, None]


def _store(setup: Setup, results: list[Float32], row: cute.Tensor, index: Int32, inside: Any) -> None:
    dtype = row.element_type
    atom = store_atom(dtype, access_bits(dtype, setup.launch.vector, 16))
    store_vector(rounded(results, setup.problem.x_dtype), row, index, inside, setup.partition, atom)


# ---- sums over rows


def _zeros(setup: Setup, target: cute.Tensor | None) -> cute.Tensor | None:
    if target is None:
        return None
    sums = cute.make_rmem_tensor((setup.launch.vector, setup.launch.chunk), Float32)
    sums.fill(0.0)
    return sums


@cute.jit
def _store_sums(
    setup: cutlass.Constexpr[Setup],
    sums: cute.Tensor,
    target: cute.Tensor,
    place: cutlass.Constexpr[Place],
    room: cute.Tensor,
) -> None:
    """Store the block's sums as a row of ``target``, those of its groups added in order."""
    partition, how = setup.partition, setup.launch
    atom = store_atom(Float32, access_bits(Float32, partition.vector, 16))
    if cutlass.const_expr(how.groups == 1):
        for j in cutlass.range_constexpr(partition.count):
            index = partition.index(place.lane, 0, j)
            store_vector(sums[None, j], target, index, partition.inside(index, j), partition, atom)
    else:
        cute.arch.sync_threads()  # everybody has read what was here
        for j in cutlass.range_constexpr(partition.count):
            index = partition.index(place.lane, 0, j)
            cute.local_tile(room[None, place.group], (partition.vector,), (index,)).store(sums[None, j].load())
        cute.arch.sync_threads()
        for first in cutlass.range_constexpr(0, partition.columns, how.threads):
            column = first + place.thread
            if column < partition.columns:
                target[column] = _sum_of_groups(room[column, None])


def _sum_of_groups(parts: cute.Tensor) -> Float32:
    total = parts[0]
    for group in range(1, cute.size(parts.shape)):
        total = total + parts[group]
    return total


@cute.jit
def _add_to_memory(
    setup: cutlass.Constexpr[Setup],
    terms: list[Float32],
    target: cute.Tensor,
    index: Int32,
    inside: Any,
    i: Int32,
) -> None:
    """Add to the block's sums in memory, which only this thread touches at this place; the first row starts them."""
    partition = setup.partition
    bits = access_bits(Float32, partition.vector, 16)
    known = cute.make_rmem_tensor((partition.vector,), Float32)
    known.fill(0.0)
    if (i > 0) & inside:
        source = cute.local_tile(target, (partition.vector,), (index,))
        cute.copy(cute.make_copy_atom(CopyG2ROp(), Float32, num_bits_per_copy=bits), source, known)
    for n in cutlass.range_constexpr(partition.vector):
        known[n] = known[n] + terms[n]
    store_vector(known, target, index, inside, partition, store_atom(Float32, bits))


def _fake_arguments(setup: Setup) -> dict[str, Any]:
    problem, columns = setup.problem, setup.problem.columns
    tokens, blocks = cute.sym_int64(), cute.sym_int64()
    x, dout = numeric(problem.x_dtype), numeric(problem.dout_dtype)
    weight, bias = (numeric(dtype or "float32") for dtype in (problem.weight_dtype, problem.bias_dtype))
    vector = setup.launch.vector
    sums = fake_rows(Float32, blocks, columns, min(16, 4 * vector))
    arguments = {
        "dout": fake_rows(dout, tokens, columns, problem.dout_alignment),
        "dresidual": fake_rows(x, tokens, columns, problem.x_alignment),
        "x": fake_rows(x, tokens, columns, problem.x_alignment),
        "w": fake_vector(weight, columns, problem.weight_alignment),
        "bias": fake_vector(bias, columns, problem.weight_alignment),
        "rstd": fake_vector(Float32, tokens, 4),
        "dx": fake_rows(x, tokens, columns, min(16, vector * x.width // 8)),
        "dw": fake_vector(weight, columns, weight.width // 8),
        "dbias": fake_vector(bias, columns, bias.width // 8),
        "w_sums": sums,
        "bias_sums": sums,
        "eps": Float32(0.0),
        "stream": fake_stream(),
    }
    return {name: arguments[name] for name in setup.operands}
