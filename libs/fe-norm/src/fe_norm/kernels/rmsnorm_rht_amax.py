"""Kernel of ``rmsnorm_rht_amax``: one pass over rows that fit in the registers of a block, two over longer ones.

A team of threads (a part of a warp, or whole warps) shares a row. Each thread loads its share with all loads in flight,
squares and sums it; after one exchange with its team it scales, rotates, rounds and stores it, and keeps the largest
magnitude. A team walks through its rows of a group and loads the next one before it reduces the last. At the end the
maxima of a group meet in one thread, the only writer of their entry.

Memory must move each row once in and once out: 4 bytes per element for 16-bit values.

Functions marked ``cute.jit`` branch or loop on the device; the others only compose while compiling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from fe_norm.launch_rht import VECTOR, Launch, Problem, loads_weight_late, split_config
from fe_runtime.cute.arguments import fake_rows, fake_stream, fake_vector
from fe_runtime.cute.hadamard import hadamard_16, half_sign
from fe_runtime.cute.memory import access_bits, load_atom, prefetch
from fe_runtime.cute.reduce import WARP, block_sums, sum_of_squares, tree_sum, warp_sum
from fe_runtime.cute.rows import RowPartition, load_share, load_vector, narrow_again
from fe_runtime.cute.types import numeric

from .output import OutputFormat, OutputRow

__all__ = ["build"]

FOLD_THREADS = 256
"""Threads of a block that folds partial maxima."""


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments: x, w, o, amax, partials?, eps, stream.

    ``config`` is what :func:`fe_norm.launch_rht.config` returns. ``partials`` is scratch for the maxima of parts of a
    group, whose number divides evenly into the entries of ``amax``.
    """
    del arch
    setup = Setup(*split_config(config))

    @cute.jit
    def rmsnorm_rht_amax(*arguments: Any) -> None:
        _launch(setup, arguments)

    return rmsnorm_rht_amax, _fake_arguments(setup)


@dataclass(frozen=True, slots=True)
class Setup:
    """All that is static in a compilation."""

    problem: Problem
    launch: Launch

    @property
    def partition(self) -> RowPartition:
        """The share of a thread in a row."""
        return RowPartition(self.problem.columns, VECTOR, self.launch.threads_per_row, self.launch.chunk)

    @property
    def output(self) -> OutputFormat:
        """The output format."""
        return OutputFormat(self.problem.x_dtype, self.partition, self.problem.o_alignment, False)

    @property
    def rows(self) -> int:
        """Rows of a team."""
        return self.problem.group // self.launch.teams


def _launch(setup: Setup, arguments: tuple[Any, ...]) -> None:
    """Launch one block per tile of groups, then, for partial maxima, one per entry."""
    how = setup.launch
    x, w, o, amax, *partials, eps, stream = arguments
    maxima = partials[0] if partials else amax
    kernel = rows_kernel if how.is_one_pass(setup.problem) else two_pass_kernel
    kernel(setup, x, w, o, maxima, eps).launch(
        grid=(Int32(cute.ceil_div(maxima.shape[0], how.groups)), 1, 1),
        block=(how.threads, 1, 1),
        stream=stream,
        min_blocks_per_mp=how.blocks_per_sm,
        preferred_smem_carveout=-1,  # the driver's choice; without it the compiler would ask a GPU
    )
    if partials:
        fold_kernel(maxima, amax).launch(
            grid=(Int32(amax.shape[0]), 1, 1),
            block=(FOLD_THREADS, 1, 1),
            stream=stream,
            preferred_smem_carveout=-1,
        )


@cute.kernel
def rows_kernel(
    setup: cutlass.Constexpr[Setup], x: cute.Tensor, w: cute.Tensor, o: cute.Tensor, amax: cute.Tensor, eps: Float32
) -> None:
    """Rows that stay in registers between the sum and the store."""
    scratch = _scratch(setup)
    place = _place(setup, amax)
    share = _load_row(setup, x, place, 0, 0)
    gains = Gains.of(setup, w, place.lane)
    largest = Float32(0.0)
    last = setup.rows - 1
    for i in cutlass.range(last):
        if cutlass.const_expr(setup.launch.ahead > 0):
            following = _load_row(setup, x, place, i + 1, 0)
            _prefetch(setup, x, place, i)
            largest = _finish_row(setup, share, gains, o, place, i, eps, scratch, largest)
            share.store(following.load())
        else:
            _prefetch(setup, x, place, i)
            largest = _finish_row(setup, share, gains, o, place, i, eps, scratch, largest)
            share.store(_load_row(setup, x, place, i + 1, 0).load())
    _prefetch(setup, x, place, last)
    largest = _finish_row(setup, share, gains, o, place, last, eps, scratch, largest)
    _write_largest(setup, amax, place, largest, scratch)


@cute.kernel
def two_pass_kernel(
    setup: cutlass.Constexpr[Setup], x: cute.Tensor, w: cute.Tensor, o: cute.Tensor, amax: cute.Tensor, eps: Float32
) -> None:
    """Rows too long for the registers of a block: read once for the sum and again, from the cache, for the store."""
    scratch = _scratch(setup)
    place = _place(setup, amax)
    gains = Gains.of(setup, w, place.lane)
    largest = Float32(0.0)
    for i in cutlass.range(setup.rows):
        total = Float32(0.0)
        for chunk in cutlass.range(setup.partition.chunks):
            total = total + sum_of_squares(_load_row(setup, x, place, i, chunk))
        factor = _factor(setup, _row_sum(setup, total, scratch, i), eps)
        for chunk in cutlass.range(setup.partition.chunks):
            share = _load_row(setup, x, place, i, chunk)
            largest = _write_share(setup, share, gains, factor, o, place, i, chunk, largest)
    _write_largest(setup, amax, place, largest, scratch)


@cute.kernel
def fold_kernel(partials: cute.Tensor, amax: cute.Tensor) -> None:
    """Fold the partial maxima of each entry: one block an entry."""
    scratch = cutlass.memory.SmemAllocator().allocate_tensor(
        Float32, cute.make_layout((FOLD_THREADS // WARP,)), byte_alignment=16
    )
    thread, _, _ = cute.arch.thread_idx()
    entry, _, _ = cute.arch.block_idx()
    count = Int32(partials.shape[0] // amax.shape[0])
    first = Int64(entry) * count
    largest = Float32(0.0)
    for i in cutlass.range(thread, count, FOLD_THREADS):
        largest = cute.arch.fmax(largest, partials[first + i])
    largest = _block_max(largest, scratch)
    if thread == 0:
        amax[entry] = largest


# ---- who does what


@dataclass(frozen=True, slots=True)
class Place:
    """Where a thread works: its place in its team, the rows of its team, and the entry of their maximum."""

    lane: Int32
    first: Int64
    step: int
    entry: Int32
    exists: Boolean | bool

    def row(self, i: Int32 | int) -> Int64:
        """Number of the team's row ``i``."""
        return self.first + i * self.step


def _place(setup: Setup, amax: cute.Tensor) -> Place:
    how = setup.launch
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    lane, team = thread % how.threads_per_row, thread // how.threads_per_row % how.teams
    entry = Int32(block) * how.groups + thread // how.threads_per_group
    # Teams past the last group read it again rather than branch; they store nothing.
    exists = True if how.groups == 1 else entry < Int32(amax.shape[0])
    present = entry if how.groups == 1 else cutlass.min(entry, Int32(amax.shape[0]) - 1)
    return Place(lane, Int64(present) * setup.problem.group + team, how.teams, entry, exists)


def _scratch(setup: Setup) -> cute.Tensor:
    """Return shared memory for a number of each warp: two sums in turn, and a maximum."""
    layout = cute.make_layout((setup.launch.threads // WARP, 1, 3))
    return cutlass.memory.SmemAllocator().allocate_tensor(Float32, layout, byte_alignment=16)


# ---- a row


def _load_row(setup: Setup, x: cute.Tensor, place: Place, i: Int32 | int, chunk: Int32 | int) -> cute.Tensor:
    atom = _atom(x, setup.problem.x_alignment)
    return load_share(x[place.row(i), None], place.lane, chunk, setup.partition, atom)


@cute.jit
def _prefetch(setup: cutlass.Constexpr[Setup], x: cute.Tensor, place: Place, i: Int32) -> None:
    """Bring a row to the second-level cache: one that the team, or a later block, loads a little later."""
    how = setup.launch
    if cutlass.const_expr(how.prefetch > 0):
        later = how.prefetch * how.groups * setup.problem.group
        if cutlass.const_expr(how.lead == 0):
            row = place.row(i) + later
        else:
            row = place.row(i + how.lead)
            if i + how.lead >= setup.rows:
                row = place.row(i + how.lead - setup.rows) + later
        if place.lane == 0 and row < x.shape[0]:
            prefetch(x[row, None])


@dataclass(frozen=True, slots=True)
class Gains:
    """The weight: a thread's share, loaded once for all its rows, or the array, to be loaded vector by vector."""

    values: cute.Tensor
    share: cute.Tensor | None

    @staticmethod
    def of(setup: Setup, w: cute.Tensor, lane: Int32) -> Gains:
        """Load the share now, while the first row is under way, unless it takes too many registers."""
        if loads_weight_late(setup.problem, setup.launch):
            return Gains(w, None)
        return Gains(w, load_share(w, lane, 0, setup.partition, _atom(w, setup.problem.weight_alignment)))

    def vector(self, setup: Setup, lane: Int32, chunk: Int32 | int, j: int) -> cute.TensorSSA:
        """Return vector ``j`` in float32."""
        if self.share is not None:
            values = narrow_again(self.share[None, j])
        else:
            partition, atom = setup.partition, _atom(self.values, setup.problem.weight_alignment)
            values = load_vector(self.values, partition.index(lane, chunk, j), j, partition, atom)
        return values.load().to(Float32)


def _finish_row(
    setup: Setup,
    share: cute.Tensor,
    gains: Gains,
    o: cute.Tensor,
    place: Place,
    i: Int32 | int,
    eps: Float32,
    scratch: cute.Tensor,
    largest: Float32,
) -> Float32:
    """Treat a row that was loaded; return the largest magnitude so far."""
    factor = _factor(setup, _row_sum(setup, sum_of_squares(share), scratch, i), eps)
    return _write_share(setup, share, gains, factor, o, place, i, 0, largest)


def _row_sum(setup: Setup, value: Float32, scratch: cute.Tensor, i: Int32 | int) -> Float32:
    """Return the sum over the threads that share a row. Rows take turns with two places in shared memory: between two
    uses of one of them lies the barrier of the other."""
    how = setup.launch
    if how.threads_per_row <= WARP:
        return warp_sum(value, how.threads_per_row)
    if how.threads == how.threads_per_row:
        return block_sums([value], scratch[None, None, i % 2])[0]
    return _team_sum(setup, value, scratch[None, 0, i % 2])


@cute.jit
def _team_sum(setup: cutlass.Constexpr[Setup], value: Float32, scratch: cute.Tensor) -> Float32:
    """Return the sum over a team of several warps, with a barrier of its own. ``scratch`` has a place for each warp."""
    threads = setup.launch.threads_per_row
    thread, _, _ = cute.arch.thread_idx()
    team = thread // threads
    own = cute.local_tile(scratch, (threads // WARP,), (team,))
    value = warp_sum(value)
    if thread % WARP == 0:
        own[thread % threads // WARP] = value
    cute.arch.barrier(barrier_id=team + 1, number_of_threads=threads)
    partials = own.load()
    return tree_sum([partials[i] for i in range(threads // WARP)])


def _factor(setup: Setup, total: Float32, eps: Float32) -> Float32:
    """Return ``rsqrt(total / N + eps) / 4``; relative error at most 2^-22 plus half of the argument's, 2^-23.

    The 1/4 is that of the rotation. Scaling by it is exact wherever it is done; here it costs nothing.
    """
    mean = total * Float32(1.0 / setup.problem.columns)
    return cute.math.rsqrt(mean + eps, approx=True) * Float32(0.25)


def _write_share(
    setup: Setup,
    share: cute.Tensor,
    gains: Gains,
    factor: Float32,
    o: cute.Tensor,
    place: Place,
    i: Int32 | int,
    chunk: Int32 | int,
    largest: Float32,
) -> Float32:
    """Scale, rotate and store a thread's share of a row; return the largest magnitude so far."""
    partition, sign = setup.partition, half_sign(place.lane)
    target = OutputRow(setup.output, o[place.row(i), None], None, None, place.exists)
    for j in range(partition.count):
        x = narrow_again(share[None, j]).load().to(Float32)
        gain = gains.vector(setup, place.lane, chunk, j)
        rotated = hadamard_16([(x[k] * factor) * gain[k] for k in range(VECTOR)], sign)
        for value in rotated:
            largest = cute.arch.fmax(largest, cute.math.absf(value))
        index = partition.index(place.lane, chunk, j)
        target.store(rotated, index, partition.inside(index, j))
    return largest


def _atom(values: cute.Tensor, alignment: int) -> cute.CopyAtom:
    dtype = values.element_type
    return load_atom(dtype, access_bits(dtype, VECTOR, alignment))


# ---- maxima


@cute.jit
def _write_largest(
    setup: cutlass.Constexpr[Setup], amax: cute.Tensor, place: Place, largest: Float32, scratch: cute.Tensor
) -> None:
    """Write the maximum over the threads of each group."""
    how = setup.launch
    thread, _, _ = cute.arch.thread_idx()
    rank = thread % how.threads_per_group
    if cutlass.const_expr(how.threads_per_group <= WARP):
        largest = _warp_max(largest, how.threads_per_group)
    elif cutlass.const_expr(how.groups == 1):
        largest = _block_max(largest, scratch[None, 0, 2])
    else:
        warps = how.threads_per_group // WARP
        own = cute.local_tile(scratch[None, 0, 2], (warps,), (thread // how.threads_per_group,))
        largest = _group_max(largest, own, rank)
    if rank == 0 and place.exists:
        amax[place.entry] = largest


@cute.jit
def _group_max(largest: Float32, own: cute.Tensor, rank: Int32) -> Float32:
    """Return in the first warp of each group the maximum over its warps, which have ``own`` shared memory."""
    warps = cutlass.const_expr(cute.size(own.shape))
    largest = _warp_max(largest)
    if rank % WARP == 0:
        own[rank // WARP] = largest
    cute.arch.sync_threads()
    largest = Float32(0.0)
    if rank < warps:
        largest = own[rank]
    return _warp_max(largest)


@cute.jit
def _block_max(largest: Float32, scratch: cute.Tensor) -> Float32:
    thread, _, _ = cute.arch.thread_idx()
    return _group_max(largest, scratch, thread)


def _warp_max(value: Float32, threads: int = WARP) -> Float32:
    """Return, in each of ``threads`` neighbouring lanes, the largest value of them; NaN counts only if all are."""
    return cute.arch.warp_reduction(value, cute.arch.fmax, threads_in_group=threads)


def _fake_arguments(setup: Setup) -> tuple[Any, ...]:
    problem, columns = setup.problem, setup.problem.columns
    tokens, dtype = cute.sym_int64(), numeric(problem.x_dtype)
    entries = [cute.sym_int64()] * (1 + problem.has_partials)
    return (
        fake_rows(dtype, tokens, columns, problem.x_alignment),
        fake_vector(numeric(problem.weight_dtype), columns, problem.weight_alignment),
        fake_rows(dtype, tokens, columns, problem.o_alignment),
        *(fake_vector(Float32, cute.sym_int64(), 4) for _ in entries),
        Float32(0.0),
        fake_stream(),
    )


rows_kernel.set_name_prefix("fe_norm_rmsnorm_rht_amax", remove_cutlass_symbol=True, keep_mangled_name=False)
two_pass_kernel.set_name_prefix(
    "fe_norm_rmsnorm_rht_amax_two_pass", remove_cutlass_symbol=True, keep_mangled_name=False
)
fold_kernel.set_name_prefix("fe_norm_rmsnorm_rht_amax_fold", remove_cutlass_symbol=True, keep_mangled_name=False)
