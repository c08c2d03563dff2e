"""The reference of ``rope_qdq`` against a naive loop in exact arithmetic, bit for bit, in every framework."""

from __future__ import annotations

import functools
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from naive_rope import E2M1, E4M3, bfloats, group_scale, nearest, same_bits, tables
from naive_rope import rope_qdq as naive

from fe_rope.reference.rope_qdq import rope_qdq_inplace
from fe_runtime.testing import to_framework, to_numpy

FRAMEWORKS = ("numpy", "torch", "jax")
MODES = {"fp4/32": ("fp4", 32, "ue8m0"), "fp8/32": ("fp8", 32, "ue8m0"), "fp4/16": ("fp4", 16, "e4m3")}
NAMES = ("quantization", "group_size", "scale_format")
POSITIONS = 11


def run(framework: str, mode: str, *arrays: Any) -> Any:
    function = reference_of(mode, framework == "jax")
    (out,) = function(*(to_framework(array, framework) for array in arrays))
    return to_numpy(out)


@functools.cache
def reference_of(mode: str, compiled: bool) -> Any:
    function = functools.partial(rope_qdq_inplace, **dict(zip(NAMES, MODES[mode], strict=True)))
    return jax.jit(function) if compiled else function


def operands(mode: str, kind: str = "normal", columns: int = 96, seed: int = 0) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    x = bfloats(rng, (3, 2, columns), kind)
    cache = np.concatenate(tables(rng, (POSITIONS, 32), kind), axis=1)
    positions = rng.integers(0, POSITIONS, 3 if mode == "fp4/32" else 6)
    return x, cache, positions.astype(np.int32)


def without_rotation(x: Any) -> tuple[Any, Any, Any]:
    """Operands that leave the tail as it is: one row for each position, or one position for all."""
    cache = np.concatenate([np.ones((1, 32)), np.zeros((1, 32))], axis=1).astype(np.float32)
    return x, cache, np.zeros(x.shape[0], np.int32)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("kind", ["normal", "bits"])
@pytest.mark.parametrize("mode", MODES)
def test_every_bit_is_that_of_the_naive_loop(framework: str, kind: str, mode: str) -> None:
    x, cache, positions = operands(mode, kind)
    assert same_bits(run(framework, mode, x, cache, positions), naive(x, cache, positions, *MODES[mode]))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("mode", MODES)
def test_groups_of_one_size_each(framework: str, mode: str) -> None:
    """Groups from the smallest subnormal to the largest number: floors, saturated scales, results that overflow."""
    rng = np.random.default_rng(1)
    exponents = np.arange(-133, 128, 3)
    sizes = rng.uniform(1, 1.99, (exponents.size, 1, 64)) * 2.0 ** exponents[:, None, None]
    x = (sizes * rng.choice([-1, 1, 0.3, -0.1, 0], sizes.shape)).astype(ml_dtypes.bfloat16)
    arrays = without_rotation(x)
    assert same_bits(run(framework, mode, *arrays), naive(*arrays, *MODES[mode]))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_ties_go_to_the_even_code(framework: str) -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    row = [6.0, *ties, *(-v for v in ties), -0.0, *[0.0] * 16]
    x = np.array([[row * 2]], np.float32).astype(ml_dtypes.bfloat16)
    out = run(framework, "fp4/32", *without_rotation(x)).astype(np.float32)
    want = [6.0, 0, 1, 1, 2, 2, 4, 4, -0.0, -1, -1, -2, -2, -4, -4, -0.0]
    np.testing.assert_array_equal(out[0, 0, :16], want)
    assert np.signbit(out[0, 0, 8])
    assert np.signbit(out[0, 0, 15])


@pytest.mark.parametrize(("mode", "limit"), [("fp4/32", 6.0), ("fp8/32", 448.0)])
def test_maxima_of_limit_times_a_power_of_two_keep_that_power(mode: str, limit: float) -> None:
    for k in (-20, -3, 0, 5, 100):
        if limit * 2.0**k < 1e-4 * 448:
            continue
        assert group_scale(limit * 2.0**k, mode.partition("/")[0], "ue8m0") == 2.0**k
        x = np.full((1, 1, 64), limit * 2.0**k, np.float32).astype(ml_dtypes.bfloat16)
        assert same_bits(run("numpy", mode, *without_rotation(x)), x)


def test_a_scale_that_was_rounded_down_clamps() -> None:
    x = np.zeros((1, 64), np.float32)
    x[0, 0] = 6 * 2.0**-9 * 1.49  # r = 1.49 * 2^-9, rounded to 2^-9
    out = run("numpy", "fp4/16", *without_rotation(x.astype(ml_dtypes.bfloat16))).astype(np.float32)
    assert out[0, 0] == 6 * 2.0**-9


def test_the_rotated_tail_is_rounded_before_the_maximum() -> None:
    """The result is that of two calls: one that rotates only, one that quantises only."""
    from fe_rope.reference.tail_rope import tail_rope

    x, cache, positions = operands("fp8/32", columns=128, seed=4)
    flat, rows = x.reshape(6, 128), cache[positions]
    (rotated,) = tail_rope(flat, rows[:, :32], rows[:, 32:])
    want = run("numpy", "fp8/32", *without_rotation(rotated))
    assert same_bits(run("numpy", "fp8/32", x, cache, positions).reshape(6, 128), want)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("mode", MODES)
def test_positions_outside_the_cache_are_clamped(framework: str, mode: str) -> None:
    x, cache, positions = operands(mode)
    positions[0], positions[1] = -5, POSITIONS + 100
    want = naive(x, cache, positions.clip(0, POSITIONS - 1), *MODES[mode])
    assert same_bits(run(framework, mode, x, cache, positions), want)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("mode", MODES)
def test_values_that_are_not_finite(framework: str, mode: str) -> None:
    """NaN stays where it is; infinity counts as the largest finite number and becomes limit times scale."""
    rng = np.random.default_rng(7)
    x = bfloats(rng, (1, 1, 160))
    clean = run(framework, mode, *without_rotation(x)).astype(np.float32)
    x[..., 3], x[..., 40] = np.nan, -np.inf
    finite = np.where(np.isnan(x.astype(np.float32)), 0, x.astype(np.float32)).astype(x.dtype)
    finite[..., 40] = -np.float32(3.3895314e38)
    want = run(framework, mode, *without_rotation(finite)).astype(np.float32)
    out = run(framework, mode, *without_rotation(x)).astype(np.float32)
    assert np.isnan(out[..., 3]).all()
    keep = [i for i in range(160) if i not in (3, 40)]
    np.testing.assert_array_equal(out[..., keep], want[..., keep])
    np.testing.assert_array_equal(out[..., 64:], clean[..., 64:])
    assert (out[..., 40] == (-6 * 448 if mode == "fp4/16" else -np.inf)).all()


def test_the_nearest_value_is_that_of_a_table() -> None:
    """The rounding of the naive loop itself, against ml_dtypes."""
    values = np.random.default_rng(8).uniform(-7, 7, 2000).astype(np.float32)
    np.testing.assert_array_equal(
        [nearest(float(v), E4M3) for v in values * 60], (values * 60).astype(ml_dtypes.float8_e4m3fn).astype(float)
    )
    e2m1 = values.clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype(float)
    np.testing.assert_array_equal([nearest(float(v), E2M1) for v in values], e2m1)
