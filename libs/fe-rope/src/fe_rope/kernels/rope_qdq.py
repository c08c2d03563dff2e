"""Kernel of ``rope_qdq_inplace``: rotate the tail, then quantise and dequantise groups of channels, all in registers.

Each element is read once and written once, in place, so the floor is 4 bytes of traffic for each, beside tables of 256
bytes a token. Two or four neighbouring threads share a group: its maximum takes one or two exchanges. Every thread
loads its vectors before it stores any, and no other thread touches them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from fe_rope.launch import TAIL, Launch, Problem, split_config
from fe_runtime.cute.arguments import fake_rows, fake_stream
from fe_runtime.cute.rounding import bf16_values, bf16_word, div_rn, fma_rn, min_or_nan, mul_rn, round_to_steps
from fe_runtime.cute.types import numeric

from .tiles import Place, fake_array, grid, load, places, prefetch_tile, rotate, store, words

__all__ = ["MODES", "Mode", "build"]


@dataclass(frozen=True, slots=True)
class Mode:
    """How a group is quantised: its channels, the largest value and bits of an element, the least maximum, the scale.

    ``steps`` are mantissa bits and smallest exponent of the element's format. ``power``: the scale is a power of two,
    otherwise an E4M3 number.
    """

    group: int
    limit: float
    steps: tuple[int, int]
    floor: float
    power: bool


E2M1, E4M3 = (1, 0), (3, -6)
MODES = {
    "fp4/32/ue8m0": Mode(32, 6.0, E2M1, 6 * 2.0**-126, True),
    "fp8/32/ue8m0": Mode(32, 448.0, E4M3, 1e-4, True),
    "fp4/16/e4m3": Mode(16, 6.0, E2M1, 6 * 2.0**-9, False),
}


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments: x, cache, positions, x again, stream.

    ``config`` is what :func:`fe_rope.launch.config` returns, its ``mode`` a key of :data:`MODES`, and
    ``position_dtype``.
    """
    problem, launch = split_config(config)
    setup = Setup(problem, launch, MODES[str(problem.mode)])

    @cute.jit
    def rope_qdq_inplace(
        x: cute.Tensor, cache: cute.Tensor, positions: cute.Tensor, result: cute.Tensor, stream: Any
    ) -> None:
        rope_qdq_kernel(setup, x, cache, positions, result).launch(
            grid=(grid(problem, launch, x.shape[0]), 1, 1),
            block=(launch.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=launch.blocks_per_sm,
            preferred_smem_carveout=-1,  # the driver's choice; without it the compiler would ask a GPU
        )

    return rope_qdq_inplace, _fake_arguments(problem, numeric(config["position_dtype"]))


@dataclass(frozen=True, slots=True)
class Setup:
    """All that is static in a compilation."""

    problem: Problem
    launch: Launch
    mode: Mode


@cute.kernel
def rope_qdq_kernel(
    setup: cutlass.Constexpr[Setup], x: cute.Tensor, cache: cute.Tensor, positions: cute.Tensor, result: cute.Tensor
) -> None:
    """Load all of a thread's vectors, rotate those in the tail, requantise, store."""
    problem, launch = setup.problem, setup.launch
    where = places(problem, launch, x.shape[0])
    shares = [load(problem, x, place, problem.x_alignment, False) for place in where]
    if cutlass.const_expr(launch.prefetch > 0):
        prefetch_tile(x, problem, launch)

    def tables(place: Place) -> tuple[cute.Tensor, cute.Tensor]:
        row = cache[_position(positions, cache, place), None]
        return tuple(cute.local_tile(row, (TAIL // 2,), (half,)) for half in (0, 1))

    rotate(shares, where, problem, tables, problem.table_alignment)
    for values in shares:
        _requantise(words(values), setup.mode)
    for values, place in zip(shares, where, strict=True):
        store(values, result, place, problem, problem.x_alignment)


def _position(positions: cute.Tensor, cache: cute.Tensor, place: Place) -> Int64:
    """Return the position of a token, clamped to the cache: a wrong one never reads beyond it."""
    position = Int64(positions[Int64(place.token)])
    return cutlass.max(cutlass.min(position, Int64(cache.shape[0]) - 1), Int64(0))


def _requantise(values: cute.Tensor, mode: Mode) -> None:
    """Quantise and dequantise a thread's part of a group, as words of two values, in its registers."""
    count = cute.size(values.shape)
    pairs = [[cute.math.absf(value) for value in bf16_values(values[i])] for i in range(count)]
    largest = pairs[0][0]
    for value in [value for pair in pairs for value in pair][1:]:
        largest = cute.arch.fmax(largest, value)
    lanes = mode.group // (2 * count)
    largest = cute.arch.warp_reduction(largest, cute.arch.fmax, threads_in_group=lanes)
    largest = cute.arch.fmin(cute.arch.fmax(largest, Float32(mode.floor)), Float32(LARGEST))
    through = _by_power(largest, mode) if mode.power else _by_e4m3(largest, mode)
    for i in range(count):
        low, high = (through(value) for value in pairs[i])
        values[i] = bf16_word(low, high) | (values[i] & SIGNS)


LARGEST = 3.3895313892515355e38
"""The largest finite bf16: an infinite value counts as it."""

SIGNS = -0x7FFF8000  # 0x80008000


def _by_power(largest: Float32, mode: Mode) -> Callable[[Float32], Float32]:
    """Return what quantises and dequantises a magnitude by the least power of two >= largest / limit.

    A quotient by a power of two is a product with its inverse, rounded alike.
    """
    r = mul_rn(largest, Float32(1.0 / mode.limit)).bitcast(Int32)
    bits = (r + 0x7FFFFF) & 0x7F800000
    scale, inverse = bits.bitcast(Float32), (Int32(254 << 23) - bits).bitcast(Float32)

    def through(value: Float32) -> Float32:
        quotient = min_or_nan(mul_rn(value, inverse), Float32(mode.limit))
        return mul_rn(round_to_steps(quotient, *mode.steps), scale)

    return through


def _by_e4m3(largest: Float32, mode: Mode) -> Callable[[Float32], Float32]:
    """Return the same for the scale e4m3(largest / limit).

    The quotient is a product with the reciprocal, corrected once by its remainder. It may be an ulp off, and the
    element is still right: where the exact quotient lies on a boundary between elements it has few bits, so the
    correction gives it exactly; elsewhere a value of 8 bits over a scale of 4 is at least 2^-9 of it away from one.
    """
    r = cute.arch.fmin(div_rn(largest, Float32(mode.limit)), Float32(448.0))
    scale = round_to_steps(r, *E4M3)
    reciprocal = div_rn(Float32(1.0), scale)

    def through(value: Float32) -> Float32:
        value = min_or_nan(value, Float32(LARGEST))
        guess = mul_rn(value, reciprocal)
        quotient = fma_rn(fma_rn(-guess, scale, value), reciprocal, guess)
        return mul_rn(round_to_steps(min_or_nan(quotient, Float32(mode.limit)), *mode.steps), scale)

    return through


def _fake_arguments(problem: Problem, position: type[cutlass.Numeric]) -> tuple[Any, ...]:
    tokens = cute.sym_int64()
    x = fake_array(problem, tokens, problem.x_alignment, problem.packed)
    cache = fake_rows(Float32, cute.sym_int64(), TAIL, problem.table_alignment)
    positions = cute.runtime.make_fake_tensor(
        position, (tokens,), (cute.sym_int64(),), assumed_align=position.width // 8
    )
    return x, cache, positions, x, fake_stream()


rope_qdq_kernel.set_name_prefix("fe_rope_rope_qdq", remove_cutlass_symbol=True, keep_mangled_name=False)
