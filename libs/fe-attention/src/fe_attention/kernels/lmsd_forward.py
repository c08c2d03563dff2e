"""Kernel of LMSD: groups of threads that each take some rows of x and u, one after the other.

A group (a part of a warp, a warp, or a block) has a row in registers. It starts to load the next one, finds mean and
variance of x with one exchange, and for each vector of 8 columns draws the random words of the planes that y has,
normalises, activates, multiplies, drops, rounds and stores. x and u are read; y, the mask and two numbers a row are
written: 11 bytes for each element of x, with all parts and dropout.

Random numbers cost about as many instructions as fit into the time of that traffic: so the next row is on its way while
they are drawn, and what all rows need (the keys, weight and bias) is made once for several of them.

Functions marked ``cute.jit`` branch or loop on the device; the others only compose while compiling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int8, Int32, Int64, Uint32, cute

from fe_attention.planning.lmsd import VECTOR, Launch, Problem, split_config
from fe_runtime.cute.activation import silu
from fe_runtime.cute.arguments import fake_rows, fake_stream, fake_vector
from fe_runtime.cute.memory import load_atom, prefetch, store_atom
from fe_runtime.cute.philox import PhiloxKey, keep_factor, keep_threshold, philox
from fe_runtime.cute.reduce import WARP, block_sums, tree_sum, warp_sum
from fe_runtime.cute.rows import RowPartition, load_share, load_vector, narrow_again, store_vector

from .lmsd_rows import BYTES, NORM, U, X, bf16, both, unpacked

__all__ = ["build"]

INPUTS, OUTPUTS, SCALARS = ("x", "u", "w", "b"), ("y", "mean", "rstd", "mask"), ("eps", "p", "seed")
DROPOUT = ("mask", "p", "seed")
"""Operands that there are with dropout only."""


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments.

    In order: x, u, w, b, y, mean, rstd, mask?, eps, p?, seed?, stream.

    ``config`` is what :func:`fe_attention.planning.lmsd.config` returns.
    """
    setup = Setup(arch, *split_config(config))

    @cute.jit
    def lmsd_forward(*arguments: Any) -> None:
        _launch(setup, arguments)

    return lmsd_forward, tuple(_fake_arguments(setup).values())


@dataclass(frozen=True, slots=True)
class Setup:
    """All that is static in a compilation."""

    arch: str
    problem: Problem
    launch: Launch

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands that are present, in order."""
        names = (*INPUTS, *OUTPUTS, *SCALARS, "stream")
        return tuple(name for name in names if self.problem.has_dropout or name not in DROPOUT)

    @property
    def partition(self) -> RowPartition:
        """The share of a thread in a row."""
        how = self.launch
        return RowPartition(self.problem.columns, VECTOR, how.threads_per_row, how.chunk)

    @property
    def planes(self) -> tuple[int, ...]:
        """The parts of a row of y, in order."""
        problem = self.problem
        return (*((U,) if problem.concat_u else ()), *((X,) if problem.concat_x else ()), NORM)


def _launch(setup: Setup, arguments: tuple[Any, ...]) -> None:
    """Launch one block per tile of rows."""
    how = setup.launch
    operands = dict(zip(setup.operands, arguments, strict=True))
    rows_kernel.set_name_prefix("fe_attention_lmsd_forward", remove_cutlass_symbol=True, keep_mangled_name=False)
    tiles = Int32(cute.ceil_div(operands["x"].shape[0], how.tile))
    rows_kernel(setup, *[operands.get(name) for name in (*INPUTS, *OUTPUTS, *SCALARS)]).launch(
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
    u: cute.Tensor,
    w: cute.Tensor,
    b: cute.Tensor,
    y: cute.Tensor,
    mean_out: cute.Tensor,
    rstd_out: cute.Tensor,
    mask: cute.Tensor | None,
    eps: Float32,
    p: Float32 | None,
    seed: Int64 | None,
) -> None:
    """The rows of a group of threads."""
    how, partition = setup.launch, setup.partition
    scratch = _scratch(setup)
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    lane, group = thread % how.threads_per_row, thread // how.threads_per_row
    first, last = Int64(block) * how.tile + group, Int64(x.shape[0] - 1)
    atom = load_atom(BFloat16, 8 * BYTES)
    shares = [load_share(a[cutlass.min(first, last), None], lane, 0, partition, atom) for a in (x, u)]
    if cutlass.const_expr(how.prefetch > 0):
        _prefetch(x, u, first + how.prefetch * how.tile, lane)
    late = how.chunk > 2  # else they take too many registers
    parameters = [] if late else [load_share(a, lane, 0, partition, atom) for a in (w, b)]
    dropout = Dropout.of(p, seed) if setup.problem.has_dropout else None
    for i in cutlass.range(_count(setup, block, x.shape[0]), unroll=1):
        row = first + i * how.groups
        exists = True if how.groups == 1 else row <= last
        # Groups past the last row work on it again rather than branch; they store nothing.
        here = cutlass.min(row, last)
        if cutlass.const_expr(how.rows > 1):
            ahead = cutlass.min(row + how.groups, last)
            coming = [load_share(a[ahead, None], lane, 0, partition, atom) for a in (x, u)]
            if cutlass.const_expr(how.prefetch > 0):
                _prefetch(x, u, row + how.groups + how.prefetch * how.tile, lane)
        mean, rstd = _statistics(setup, shares[0], eps, scratch[None, None, i % 2])
        _store_statistics(mean_out, rstd_out, here, mean, rstd, both(exists, lane == 0))
        centre = -(mean * rstd)
        mask_row = None if mask is None else mask[here, None]
        for j in cutlass.range_constexpr(partition.count):
            index = partition.index(lane, 0, j)
            inside = both(exists, partition.inside(index, j))
            vectors = [narrow_again(share[None, j]) for share in (*shares, *parameters)]
            vectors += [load_vector(a, index, j, partition, atom) for a in (w, b)] if late else []
            values = [unpacked(vector) for vector in vectors]
            parts = _parts(setup, *values, centre, rstd)
            if cutlass.const_expr(dropout is not None):
                parts, bits = dropout.apply(parts, Uint32(here), index)
                store_vector(bits, mask_row, index, inside, partition, store_atom(Int8, 8 * VECTOR))
            for number in cutlass.range_constexpr(len(setup.planes)):
                results = bf16(parts[setup.planes[number]])
                place = index + number * partition.vectors
                store_vector(results, y[here, None], place, inside, partition, store_atom(BFloat16, 8 * BYTES))
        if cutlass.const_expr(how.rows > 1):
            for share, arrived in zip(shares, coming, strict=True):
                share.store(arrived.load())


def _count(setup: Setup, block: Int32, rows: Int64) -> Int32:
    """Return how many rows the first group of a block has. All of the block go through as many: the compiler can then
    keep what is the same for all threads, the keys above all, once for a warp."""
    how = setup.launch
    left = Int64(rows) - Int64(block) * how.tile
    return Int32(cutlass.min((left + (how.groups - 1)) // how.groups, Int64(how.rows)))


@dataclass(frozen=True, slots=True)
class Dropout:
    """What decides which elements are kept, and the factor of those."""

    threshold: Uint32
    factor: Float32
    key: PhiloxKey

    @staticmethod
    def of(p: Float32, seed: Int64) -> Dropout:
        """Return the dropout of a ratio above 0."""
        return Dropout(keep_threshold(p), keep_factor(p), PhiloxKey.of(seed))

    def apply(
        self, parts: dict[int, list[Float32]], row: Uint32, index: Int32
    ) -> tuple[dict[int, list[Float32]], cute.Tensor]:
        """Drop elements of vector ``index`` of a row; return also the mask's bits."""
        found: dict[int, list[Float32]] = {plane: [] for plane in parts}
        bits = [Int32(0) for _ in range(VECTOR // 4)]
        for half in range(VECTOR // 4):
            group = Uint32(index) * Uint32(VECTOR // 4) + Uint32(half)
            for plane, values in parts.items():
                for n, word in enumerate(philox(row, group, plane, 0, self.key)):
                    kept = word >= self.threshold
                    value = values[4 * half + n] * self.factor
                    found[plane].append(cutlass.select_(kept, value, Float32(0.0)))
                    bit = (1 << plane) << (8 * n)
                    bits[half] = bits[half] + cutlass.select_(kept, Int32(bit), Int32(0))
        items = cute.make_rmem_tensor((VECTOR,), Int8)
        words = cute.recast_tensor(items, Int32)
        for half, word in enumerate(bits):
            words[half] = word
        return found, items


def _parts(
    setup: Setup,
    x: list[Float32],
    u: list[Float32],
    gain: list[Float32],
    shift: list[Float32],
    centre: Float32,
    rstd: Float32,
) -> dict[int, list[Float32]]:
    """Return the parts of a vector of y before anything is dropped; ``centre`` is ``-mean*rstd``."""
    found: dict[int, list[Float32]] = {plane: [] for plane in setup.planes}
    for n in range(VECTOR):
        a = silu(u[n]) if setup.problem.apply_u_silu else u[n]
        ln = cute.math.fma(cute.math.fma(x[n], rstd, centre), gain[n], shift[n])
        for plane, value in ((NORM, ln * a), (X, x[n]), (U, a)):
            if plane in found:
                found[plane].append(value)
    return found


def _statistics(setup: Setup, share: cute.Tensor, eps: Float32, scratch: cute.Tensor) -> tuple[Float32, Float32]:
    """Return mean and reciprocal deviation of a row: ``rsqrt(max(mean(x^2) - mean^2, 0) + eps)``, relative error of the
    instruction at most 2^-22. NaN stays."""
    vectors = [unpacked(narrow_again(share[None, j])) for j in range(share.shape[1])]
    terms = [tree_sum([tree_sum(values) for values in vectors]), tree_sum([_squares(values) for values in vectors])]
    if setup.launch.threads_per_row <= WARP:
        total, squares = (warp_sum(term, setup.launch.threads_per_row) for term in terms)
    else:
        total, squares = block_sums(terms, scratch)
    one = Float32(1.0 / setup.problem.columns)
    mean = total * one
    variance = squares * one - mean * mean
    variance = cutlass.select_(variance < Float32(0.0), Float32(0.0), variance)
    return mean, cute.math.rsqrt(variance + eps, approx=True)


def _squares(values: list[Float32]) -> Float32:
    """Return the sum of the squares of a vector, in two chains."""
    chains = [Float32(0.0)] * 2
    for n, value in enumerate(values):
        chains[n % 2] = cute.math.fma(value, value, chains[n % 2])
    return chains[0] + chains[1]


def _scratch(setup: Setup) -> cute.Tensor:
    """Return shared memory for the partial sums of the warps that share a row, for rows in turn."""
    layout = cute.make_layout((max(1, setup.launch.threads // WARP), 2, 2))
    return cutlass.memory.SmemAllocator().allocate_tensor(Float32, layout, byte_alignment=16)


@cute.jit
def _prefetch(x: cute.Tensor, u: cute.Tensor, row: Int64, lane: Int32) -> None:
    """Bring rows to the second-level cache, those of a block that starts a little later."""
    if (lane == 0) & (row < x.shape[0]):
        prefetch(x[row, None])
        prefetch(u[row, None])


@cute.jit
def _store_statistics(
    mean_out: cute.Tensor, rstd_out: cute.Tensor, row: Int64, mean: Float32, rstd: Float32, here: Boolean
) -> None:
    if here:
        mean_out[row] = mean
        rstd_out[row] = rstd


def _fake_arguments(setup: Setup) -> dict[str, Any]:
    problem = setup.problem
    columns, tokens = problem.columns, cute.sym_int64()
    arguments = {
        "x": fake_rows(BFloat16, tokens, columns, BYTES),
        "u": fake_rows(BFloat16, tokens, columns, BYTES),
        "w": fake_vector(BFloat16, columns, BYTES),
        "b": fake_vector(BFloat16, columns, BYTES),
        "y": fake_rows(BFloat16, tokens, problem.parts * columns, BYTES),
        "mean": fake_vector(Float32, tokens, 4),
        "rstd": fake_vector(Float32, tokens, 4),
        "mask": fake_rows(Int8, tokens, columns, VECTOR),
        "eps": Float32(0.0),
        "p": Float32(0.0),
        "seed": Int64(0),
        "stream": fake_stream(),
    }
    return {name: arguments[name] for name in setup.operands}
