"""Kernel of ``rmsnorm_silu_pad``: one pass over the pixels of the padded output.

A group of threads (a part of a warp, or a block) writes one pixel: zeros on the border and before the first frame, a
copy of an earlier frame, or the activated values of an input pixel, which it also writes to the sum and to the cache
where these want it. Memory must move each input once, and each output once.

Threads exchange sums, so none of a warp may stay away: every group computes, also where it will write zeros, and only
its loads and stores depend on the pixel.

Functions marked ``cute.jit`` branch or loop on the device; the others only compose while compiling.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, cute

from fe_norm.launch_pad import Launch, Problem, split_config
from fe_runtime.cute.activation import silu
from fe_runtime.cute.arguments import fake_stream, fake_vector
from fe_runtime.cute.convert import block_quotients
from fe_runtime.cute.memory import access_bits, load_atom, store_atom
from fe_runtime.cute.reduce import WARP, block_sums, sum_of_squares, warp_sum
from fe_runtime.cute.rows import RowPartition, load_vector, store_vector

__all__ = ["build"]

FRAMES = 2
SMALLEST_NORM = 1e-12
OPERANDS = ("x", "gamma", "input_bias", "previous", "residual", "residual_bias", "padded", "cache", "total", "stream")


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments.

    In order: x, gamma, input_bias?, previous?, residual?, residual_bias?, padded, cache, sum?, stream. ``config`` is
    what :func:`fe_norm.launch_pad.config` returns.
    """
    del arch
    setup = Setup(*split_config(config))

    @cute.jit
    def rmsnorm_silu_pad(*arguments: Any) -> None:
        _launch(setup, arguments)

    return rmsnorm_silu_pad, tuple(_fake_arguments(setup).values())


@dataclass(frozen=True, slots=True)
class Setup:
    """All that is static in a compilation."""

    problem: Problem
    launch: Launch

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands that are present, in order."""
        there = {
            "input_bias": self.problem.has_input_bias,
            "previous": self.problem.has_previous,
            "residual": self.problem.has_residual,
            "residual_bias": self.problem.has_residual_bias,
            "total": self.problem.has_sum,
        }
        return tuple(name for name in OPERANDS if there.get(name, True))

    @property
    def partition(self) -> RowPartition:
        """The share of a thread in a pixel."""
        problem, how = self.problem, self.launch
        return RowPartition(problem.channels, problem.vector, how.threads_per_pixel, how.chunk)


def _launch(setup: Setup, arguments: tuple[Any, ...]) -> None:
    """Launch, for each padded frame, one block per tile of its pixels."""
    operands = dict(zip(setup.operands, arguments, strict=True))
    count, frames, height, width, _ = operands["padded"].shape
    tiles = cute.ceil_div(height * width, setup.launch.pixels)
    pixels_kernel(setup, *[operands.get(name) for name in OPERANDS[:-1]]).launch(
        grid=(Int32(tiles * frames * count), 1, 1),
        block=(setup.launch.threads, 1, 1),
        stream=operands["stream"],
        preferred_smem_carveout=-1,  # the driver's choice; without it the compiler would ask a GPU
    )


@cute.kernel
def pixels_kernel(
    setup: cutlass.Constexpr[Setup],
    x: cute.Tensor,
    gamma: cute.Tensor,
    input_bias: cute.Tensor | None,
    previous: cute.Tensor | None,
    residual: cute.Tensor | None,
    residual_bias: cute.Tensor | None,
    padded: cute.Tensor,
    cache: cute.Tensor,
    total: cute.Tensor | None,
) -> None:
    """Write the pixels of a tile."""
    scratch = cutlass.memory.SmemAllocator().allocate_tensor(
        Float32, cute.make_layout((max(1, setup.launch.threads // WARP), 1)), byte_alignment=16
    )
    pixel = _pixel(setup, x, previous, padded, cache)
    raw = _load(setup, x, pixel.source, pixel.lane, pixel.is_input)
    added = None if residual is None else _load(setup, residual, pixel.source, pixel.lane, pixel.is_input)
    earlier = None
    if cutlass.const_expr(previous is not None):
        earlier = _load(setup, previous, pixel.earlier, pixel.lane, pixel.is_earlier)
    values = cute.make_rmem_tensor(raw.shape, BFloat16)
    for j in cutlass.range_constexpr(setup.launch.chunk):
        extra = None if added is None else added[None, j]
        _add(setup, raw[None, j], extra, input_bias, residual_bias, pixel.lane, j, values[None, j])
    norm = _norm(setup, sum_of_squares(values), scratch)
    for j in cutlass.range_constexpr(setup.launch.chunk):
        active = _activate(setup, values[None, j], norm, gamma, pixel.lane, j)
        result = cute.make_rmem_tensor((setup.problem.vector,), BFloat16)
        result.fill(0.0)
        if pixel.is_input:
            result.store(active.load())
        if cutlass.const_expr(earlier is not None):
            if pixel.is_earlier:
                result.store(earlier[None, j].load())
        _store(setup, padded, pixel.target, pixel, j, result, pixel.exists)
        _store(setup, cache, pixel.cached, pixel, j, result, pixel.is_cached)
        if cutlass.const_expr(total is not None):
            _store(setup, total, pixel.source, pixel, j, values[None, j], pixel.is_input)


# ---- which pixel


@dataclass(frozen=True, slots=True)
class Pixel:
    """What a group of threads writes: the numbers, in each array of frames, of the pixel that it belongs to."""

    lane: Int32
    target: Int64
    source: Int64
    earlier: Int64
    cached: Int64
    exists: Boolean
    is_input: Boolean
    is_earlier: Boolean
    is_cached: Boolean


def _pixel(
    setup: Setup, x: cute.Tensor, previous: cute.Tensor | None, padded: cute.Tensor, cache: cute.Tensor
) -> Pixel:
    """Find the pixel by its place in the padded output.

    Frames are counted from the first earlier one, so that input frame ``t`` has number ``before + t``, where
    ``before`` is the number of earlier frames.
    """
    how = setup.launch
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    _, frames, height, width, _ = (Int32(extent) for extent in x.shape)
    before = Int32(0) if previous is None else Int32(previous.shape[1])
    kept = Int32(cache.shape[1])
    plane = (height + 2) * (width + 2)
    tiles = (plane + how.pixels - 1) // how.pixels
    place = (Int32(block) % tiles) * how.pixels + thread // how.threads_per_pixel
    frame = Int32(block) // tiles
    item, number = frame // (frames + FRAMES), frame % (frames + FRAMES) - FRAMES + before
    row, column = place // (width + 2) - 1, place % (width + 2) - 1
    exists = place < plane
    inside = exists & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    slot = number - (before + frames - kept)
    return Pixel(
        thread % how.threads_per_pixel,
        Int64(frame) * plane + place,
        _index(item, frames, number - before, row, column, height, width),
        _index(item, before, number, row, column, height, width),
        _index(item, kept, slot, row, column, height, width),
        exists,
        inside & (number >= before),
        inside & (number >= 0) & (number < before),
        inside & (slot >= 0) & (number >= 0),
    )


def _index(item: Int32, frames: Int32, frame: Int32, row: Int32, column: Int32, height: Int32, width: Int32) -> Int64:
    """Return the number of a pixel in an array of ``frames`` frames."""
    return ((Int64(item) * frames + frame) * height + row) * width + column


# ---- its values


def _row(setup: Setup, array: cute.Tensor, index: Int64) -> cute.Tensor:
    """Return the channels of pixel ``index`` of a contiguous array of frames."""
    channels = setup.problem.channels
    pixels = cute.make_layout((Int64(cute.size(array.shape)) // channels, channels), stride=(channels, 1))
    return cute.make_tensor(array.iterator, pixels)[index, None]


@cute.jit
def _load(
    setup: cutlass.Constexpr[Setup], array: cute.Tensor, index: Int64, lane: Int32, there: Boolean
) -> cute.Tensor:
    """Load a thread's share of a pixel; zeros where it is not ``there``."""
    problem, partition = setup.problem, setup.partition
    atom = load_atom(BFloat16, access_bits(BFloat16, problem.vector, problem.pixel_alignment))
    share = cute.make_rmem_tensor((problem.vector, partition.count), BFloat16)
    share.fill(0.0)
    if there:
        row = _row(setup, array, index)
        for j in cutlass.range_constexpr(partition.count):
            number = partition.index(lane, 0, j)
            if number < partition.vectors:
                cute.copy(atom, cute.local_tile(row, (problem.vector,), (number,)), share[None, j])
    return share


def _parameter(setup: Setup, values: cute.Tensor, lane: Int32, j: int) -> cute.TensorSSA:
    """Load vector ``j`` of a thread's share of gamma or a bias, in float32."""
    partition = setup.partition
    atom = load_atom(BFloat16, access_bits(BFloat16, partition.vector, setup.problem.channel_alignment))
    return load_vector(values, partition.index(lane, 0, j), j, partition, atom).load().to(Float32)


def _rounded(values: cute.TensorSSA) -> cute.TensorSSA:
    """Round to bfloat16 and widen again."""
    return values.to(BFloat16).to(Float32)


def _add(
    setup: Setup,
    raw: cute.Tensor,
    extra: cute.Tensor | None,
    input_bias: cute.Tensor | None,
    residual_bias: cute.Tensor | None,
    lane: Int32,
    j: int,
    values: cute.Tensor,
) -> None:
    """Add bias and residual to the input, each sum rounded."""
    v = raw.load().to(Float32)
    if input_bias is not None:
        v = _rounded(v + _parameter(setup, input_bias, lane, j))
    if extra is not None:
        r = extra.load().to(Float32)
        if residual_bias is not None:
            r = _rounded(r + _parameter(setup, residual_bias, lane, j))
        v = v + r
    values.store(v.to(BFloat16))


@cute.jit
def _norm(setup: cutlass.Constexpr[Setup], value: Float32, scratch: cute.Tensor) -> Float32:
    """Return ``max(sqrt(sum of squares over the pixel), 1e-12)``; NaN stays."""
    if cutlass.const_expr(setup.launch.threads_per_pixel <= WARP):
        total = warp_sum(value, setup.launch.threads_per_pixel)
    else:
        total = block_sums([value], scratch)[0]
    norm = cute.math.sqrt(total)
    if norm < Float32(SMALLEST_NORM):
        norm = Float32(SMALLEST_NORM)
    return norm


def _activate(setup: Setup, values: cute.Tensor, norm: Float32, gamma: cute.Tensor, lane: Int32, j: int) -> cute.Tensor:
    """Return ``SiLU(v / norm * sqrt(C) * gamma)``, each step rounded.

    The quotients are those of :func:`block_quotients`: correctly rounded but for rare ones at a boundary.
    """
    vector = setup.problem.vector
    v = values.load().to(Float32)
    steps = cute.make_rmem_tensor((vector,), Float32)
    for i, quotient in enumerate(block_quotients([v[i] for i in range(vector)], norm)):
        steps[i] = quotient
    root = Float32(math.sqrt(setup.problem.channels))
    g = _rounded(_rounded(_rounded(steps.load()) * root) * _parameter(setup, gamma, lane, j))
    for i in range(vector):
        steps[i] = silu(g[i])
    active = cute.make_rmem_tensor((vector,), BFloat16)
    active.store(steps.load().to(BFloat16))
    return active


def _store(
    setup: Setup, array: cute.Tensor, index: Int64, pixel: Pixel, j: int, values: cute.Tensor, there: Boolean
) -> None:
    problem, partition = setup.problem, setup.partition
    number = partition.index(pixel.lane, 0, j)
    atom = store_atom(BFloat16, access_bits(BFloat16, problem.vector, problem.pixel_alignment))
    store_vector(values, _row(setup, array, index), number, there & (number < partition.vectors), partition, atom)


def _fake_arguments(setup: Setup) -> dict[str, Any]:
    problem = setup.problem
    count, frames, height, width = (cute.sym_int64() for _ in range(4))

    def pixels(*extents: Any) -> cute.Tensor:
        return cute.runtime.make_fake_compact_tensor(
            BFloat16,
            (*extents, problem.channels),
            stride_order=(4, 3, 2, 1, 0),
            assumed_align=problem.pixel_alignment,
        )

    channels = fake_vector(BFloat16, problem.channels, problem.channel_alignment)
    arguments = {
        "x": pixels(count, frames, height, width),
        "gamma": channels,
        "input_bias": channels,
        "previous": pixels(count, cute.sym_int64(), height, width),
        "residual": pixels(count, frames, height, width),
        "residual_bias": channels,
        "padded": pixels(count, *(cute.sym_int64() for _ in range(3))),
        "cache": pixels(count, cute.sym_int64(), height, width),
        "total": pixels(count, frames, height, width),
        "stream": fake_stream(),
    }
    return {name: arguments[name] for name in setup.operands}


pixels_kernel.set_name_prefix("fe_norm_rmsnorm_silu_pad", remove_cutlass_symbol=True, keep_mangled_name=False)
