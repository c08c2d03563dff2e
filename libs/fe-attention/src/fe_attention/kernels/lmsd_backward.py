"""Kernels of the gradients of LMSD: rows, then the sums of what the blocks added up.

With ``g`` the parts of dy as dropout leaves them, ``xh = x*rstd - mean*rstd``, ``gln = g_product*a`` and
``wd = w*gln``, a row of du is ``(g_product*ln + g_u)*a'`` and one of dx
``g_x + (wd - xh*mean(xh*wd) - mean(wd))*rstd``. Sums over rows of ``gln*xh`` (for the weight) and ``gln`` (for the
bias) grow in the registers of each thread, column by column; a second kernel adds those of all blocks, in order.

Each thread copies its share of a row to its own places in shared memory, asynchronously and some rows ahead, so the
only meeting of a row's threads is the one for its two means. The parts of dy, x, u and the mask are read, dx and du
written: 15 bytes for each element of x, with all parts and dropout.

Functions marked ``cute.jit`` branch or loop on the device; the others only compose while compiling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int8, Int32, Int64, cute

from fe_attention.planning.lmsd_backward import VECTOR, split_config
from fe_runtime.cute.activation import sigmoid
from fe_runtime.cute.arguments import fake_rows, fake_stream, fake_vector
from fe_runtime.cute.memory import access_bits, store_atom
from fe_runtime.cute.partial_sums import launch_sums
from fe_runtime.cute.philox import keep_factor
from fe_runtime.cute.reduce import WARP, block_sums, tree_sum, warp_sum
from fe_runtime.cute.rows import store_vector

from .lmsd_rows import BYTES, NORM, READ, SUMS, DirectRows, Place, Setup, StagedRows, U, X, bf16, both

__all__ = ["build"]

MANY = 512
"""Threads of a block from which each has too few registers to keep values while its row's threads meet."""


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments.

    In order: dy, x, u, w, b, mean, rstd, mask?, dx, du, dw?, db, scratch for these two, p?, stream.
    ``config`` is what :func:`fe_attention.planning.lmsd_backward.config` returns.
    """
    setup = Setup(arch, *split_config(config))

    @cute.jit
    def lmsd_backward(*arguments: Any) -> None:
        _launch(setup, arguments)

    return lmsd_backward, tuple(_fake_arguments(setup).values())


def _launch(setup: Setup, arguments: tuple[Any, ...]) -> None:
    """Launch the blocks that walk over the rows, then the sums of their sums."""
    how = setup.launch
    operands = dict(zip(setup.operands, arguments, strict=True))
    walk_kernel.set_name_prefix("fe_attention_lmsd_backward", remove_cutlass_symbol=True, keep_mangled_name=False)
    tiles = Int32(cute.ceil_div(operands["x"].shape[0], how.groups))
    walk_kernel(setup, *[operands.get(name) for name in (*READ, "dx", "du", *SUMS, "p")]).launch(
        grid=(cutlass.min(tiles, how.blocks), 1, 1),
        block=(how.threads, 1, 1),
        stream=operands["stream"],
        min_blocks_per_mp=how.blocks_per_sm,
        preferred_smem_carveout=100 if how.stages else -1,  # the rows under way are there
    )
    pairs = [(operands[f"{name}_sums"], operands[f"d{name}"]) for name in ("w", "b") if f"d{name}" in operands]
    launch_sums(pairs, how.blocks, how.overlap, operands["stream"], "fe_attention_lmsd_backward_sums")


@cute.kernel
def walk_kernel(
    setup: cutlass.Constexpr[Setup],
    dy: cute.Tensor,
    x: cute.Tensor,
    u: cute.Tensor,
    w: cute.Tensor,
    b: cute.Tensor,
    mean: cute.Tensor,
    rstd: cute.Tensor,
    mask: cute.Tensor | None,
    dx: cute.Tensor,
    du: cute.Tensor,
    w_sums: cute.Tensor | None,
    b_sums: cute.Tensor,
    p: Float32 | None,
) -> None:
    """The blocks walk over the rows."""
    how = setup.launch
    if cutlass.const_expr(how.overlap):
        cute.arch.griddepcontrol_launch_dependents()
    place = Place.here(setup, x)
    allocator = cutlass.memory.SmemAllocator()
    exchange = allocator.allocate_tensor(Float32, cute.make_layout((max(1, how.threads // WARP), 2, 2)), 16)
    factor = keep_factor(p) if setup.problem.has_dropout else None
    rows = (StagedRows if how.stages else DirectRows).of(setup, allocator, place, (dy, x, u, mask), (w, b))
    sums = (_zeros(setup) if setup.problem.compute_dweight else None, _zeros(setup))
    given = _statistics(mean, rstd, place, Int32(0))
    if cutlass.const_expr(how.stages > 0):
        for stage in cutlass.range_constexpr(how.stages - 1):
            _fetch(rows, place, Int32(stage), stage)
    for i in cutlass.range(place.count, unroll=1):
        row, stage = place.row(i), i
        if cutlass.const_expr(how.stages > 0):
            ahead = i + (how.stages - 1)
            _fetch(rows, place, ahead, ahead % how.stages)
            cute.arch.cp_async_wait_group(how.stages - 1)
            stage = i % how.stages
        coming = _statistics(mean, rstd, place, i + 1)  # a row early: they are needed at once
        exists = True if how.groups == 1 else row < place.rows
        here = place.clamped(row)
        work = Work(setup, rows, place, here, stage, given, factor, exists)
        scaled, dots = work.first(du[here, None], sums)
        means = _row_means(setup, dots, exchange[None, None, i % 2])
        work.second(scaled, means, dx[here, None])
        given = coming
    if cutlass.const_expr(how.stages > 0):
        cute.arch.cp_async_wait_group(0)
    room = rows.room(setup) if how.groups > 1 else None
    for target, found in zip((w_sums, b_sums), sums, strict=True):
        if cutlass.const_expr(found is not None):
            _store_sums(setup, found, target[place.block, None], place, room)


class Work:
    """A thread's share of a row: what it computes before and after the row's threads meet."""

    def __init__(
        self,
        setup: Setup,
        rows: StagedRows | DirectRows,
        place: Place,
        row: Int64,
        stage: Int32,
        given: tuple[Float32, Float32],
        factor: Float32 | None,
        exists: Boolean | bool,
    ) -> None:
        mean, self.rstd = given
        self.centre = -(mean * self.rstd)
        self.setup, self.rows, self.place, self.where = setup, rows, place, (row, stage)
        self.factor, self.exists = factor, exists
        self.keeps = setup.launch.threads < MANY

    def first(
        self, du: cute.Tensor, sums: tuple[cute.Tensor | None, cute.Tensor]
    ) -> tuple[list[list[Float32]], list[Float32]]:
        """Store du, add to the sums over rows, and return ``wd`` (unless it takes too many registers) and the thread's
        sums of ``xh*wd`` and ``wd``."""
        scaled, dots, totals = [], [], []
        for j in range(self.setup.partition.count):
            x, u, gain, shift = (self.rows.values(name, *self.where, j) for name in ("x", "u", "w", "b"))
            bits = self._bits(j)
            upstream = {plane: self._upstream(plane, j, bits) for plane in self.setup.planes if plane != X}
            results, wd = [], []
            for n in range(VECTOR):
                xh = self._xh(x[n])
                a, slope = self._activated(u[n])
                gradient = upstream[NORM][n]
                of_a = gradient * cute.math.fma(xh, gain[n], shift[n])
                of_a = of_a + upstream[U][n] if U in upstream else of_a
                results.append(of_a if slope is None else of_a * slope)
                gln = gradient * a
                wd.append(gain[n] * gln)
                for target, term in zip(sums, (gln * xh, gln), strict=True):
                    if target is not None:
                        target[n, j] = target[n, j] + term
            self._store(results, du, j)
            dots.append(tree_sum([self._xh(x[n]) * wd[n] for n in range(VECTOR)]))
            totals.append(tree_sum(wd))
            scaled += [wd] if self.keeps else []
            if not self.keeps:
                cute.arch.sync_warp()  # else the compiler reads the next vector before this one is done with
        return scaled, [tree_sum(dots), tree_sum(totals)]

    def second(self, scaled: list[list[Float32]], means: list[Float32], dx: cute.Tensor) -> None:
        """Store dx."""
        dot, total = means
        for j in range(self.setup.partition.count):
            wd = scaled[j] if self.keeps else self._scaled(j)
            x = self.rows.values("x", *self.where, j)
            of_x = self._upstream(X, j, self._bits(j)) if X in self.setup.planes else None
            results = []
            for n in range(VECTOR):
                inner = cute.math.fma(-self._xh(x[n]), dot, wd[n] - total)
                results.append(inner * self.rstd if of_x is None else cute.math.fma(inner, self.rstd, of_x[n]))
            self._store(results, dx, j)
            if not self.keeps:
                cute.arch.sync_warp()

    def _scaled(self, j: int) -> list[Float32]:
        """Compute ``wd`` of a vector once more."""
        u, gain = (self.rows.values(name, *self.where, j) for name in ("u", "w"))
        upstream = self._upstream(NORM, j, self._bits(j))
        return [gain[n] * (upstream[n] * self._activated(u[n])[0]) for n in range(VECTOR)]

    def _xh(self, x: Float32) -> Float32:
        return cute.math.fma(x, self.rstd, self.centre)

    def _activated(self, u: Float32) -> tuple[Float32, Float32 | None]:
        """Return the activated u and its derivative, ``s + a*(1 - s)``; ``None`` stands for 1."""
        if not self.setup.problem.apply_u_silu:
            return u, None
        s = sigmoid(u)
        a = u * s
        return a, cute.math.fma(a, Float32(1.0) - s, s)

    def _bits(self, j: int) -> list[Int32] | None:
        """Return the words of the mask; those of a row that does not exist say that nothing was kept."""
        if not self.setup.problem.has_dropout:
            return None
        words = self.rows.mask(*self.where, j)
        return words if self.exists is True else [cutlass.select_(self.exists, word, Int32(0)) for word in words]

    def _upstream(self, plane: int, j: int, bits: list[Int32] | None) -> list[Float32]:
        """Return a part of dy as dropout leaves it; 0 for a row that does not exist."""
        values = self.rows.values(f"dy{plane}", *self.where, j)
        zero, found = Float32(0.0), []
        for n in range(VECTOR):
            value = values[n]
            if bits is not None:
                kept = (bits[n // 4] & (1 << (8 * (n % 4) + plane))) != 0
                value = cutlass.select_(kept, value * self.factor, zero)
            elif self.exists is not True:
                value = cutlass.select_(self.exists, value, zero)
            found.append(value)
        return found

    def _store(self, results: list[Float32], row: cute.Tensor, j: int) -> None:
        partition = self.setup.partition
        index = partition.index(self.place.lane, 0, j)
        inside = both(self.exists, partition.inside(index, j))
        store_vector(bf16(results), row, index, inside, partition, store_atom(BFloat16, 8 * BYTES))


@cute.jit
def _fetch(rows: cutlass.Constexpr[StagedRows], place: cutlass.Constexpr[Place], i: Int32, stage: Int32 | int) -> None:
    """Start to copy the group's row ``i``, if the block has one; either way one more group of copies is under way."""
    if i < place.count:
        rows.fetch(place.clamped(place.row(i)), stage)
    cute.arch.cp_async_commit_group()


def _statistics(mean: cute.Tensor, rstd: cute.Tensor, place: Place, i: Int32) -> tuple[Float32, Float32]:
    """Return mean and reciprocal deviation of the group's row ``i``, or of the last one."""
    row = place.clamped(place.row(i))
    return mean[row], rstd[row]


def _row_means(setup: Setup, values: list[Float32], exchange: cute.Tensor) -> list[Float32]:
    """Return the means over a row of what its threads have summed."""
    if setup.launch.threads_per_row <= WARP:
        totals = [warp_sum(value, setup.launch.threads_per_row) for value in values]
    else:
        totals = block_sums(values, exchange)
    return [total * Float32(1.0 / setup.problem.columns) for total in totals]


# ---- sums over rows


def _zeros(setup: Setup) -> cute.Tensor:
    sums = cute.make_rmem_tensor((VECTOR, setup.launch.chunk), Float32)
    sums.fill(0.0)
    return sums


@cute.jit
def _store_sums(
    setup: cutlass.Constexpr[Setup],
    sums: cute.Tensor,
    target: cute.Tensor,
    place: cutlass.Constexpr[Place],
    room: cute.Tensor | None,
) -> None:
    """Store the block's sums as a row of ``target``, those of its groups added in order."""
    partition, how = setup.partition, setup.launch
    if cutlass.const_expr(how.groups == 1):
        atom = store_atom(Float32, access_bits(Float32, VECTOR, 16))
        for j in cutlass.range_constexpr(partition.count):
            index = partition.index(place.lane, 0, j)
            store_vector(sums[None, j], target, index, partition.inside(index, j), partition, atom)
    else:
        cute.arch.sync_threads()  # everybody has read what was here
        for j in cutlass.range_constexpr(partition.count):
            index = partition.index(place.lane, 0, j)
            cute.local_tile(room[None, place.group], (VECTOR,), (index,)).store(sums[None, j].load())
        cute.arch.sync_threads()
        for first in cutlass.range_constexpr(0, partition.columns, how.threads):
            column = first + place.thread
            if column < partition.columns:
                target[column] = _sum_of_groups(room, column, how.groups)


@cute.jit
def _sum_of_groups(room: cute.Tensor, column: Int32, groups: cutlass.Constexpr[int]) -> Float32:
    total = room[column, 0]
    for group in cutlass.range(1, groups, unroll=4):
        total = total + room[column, group]
    return total


def _fake_arguments(setup: Setup) -> dict[str, Any]:
    problem = setup.problem
    columns, tokens, blocks = problem.columns, cute.sym_int64(), cute.sym_int64()
    row, vector = fake_rows(BFloat16, tokens, columns, BYTES), fake_vector(BFloat16, columns, BYTES)
    arguments = {
        "dy": fake_rows(BFloat16, tokens, problem.parts * columns, BYTES),
        "x": row,
        "u": fake_rows(BFloat16, tokens, columns, BYTES),
        "w": vector,
        "b": vector,
        "mean": fake_vector(Float32, tokens, 4),
        "rstd": fake_vector(Float32, tokens, 4),
        "mask": fake_rows(Int8, tokens, columns, VECTOR),
        "dx": fake_rows(BFloat16, tokens, columns, BYTES),
        "du": fake_rows(BFloat16, tokens, columns, BYTES),
        "dw": vector,
        "db": vector,
        "w_sums": fake_rows(Float32, blocks, columns, 16),
        "b_sums": fake_rows(Float32, blocks, columns, 16),
        "p": Float32(0.0),
        "stream": fake_stream(),
    }
    return {name: arguments[name] for name in setup.operands}
