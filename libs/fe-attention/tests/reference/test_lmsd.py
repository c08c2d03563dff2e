"""The reference of LMSD and its gradient, against naive loops and finite differences in float64."""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fe_attention.reference.lmsd import hstu_lmsd_backward, hstu_lmsd_forward
from fe_runtime.testing import to_framework, to_numpy

BF16 = ml_dtypes.bfloat16
FLAGS = [
    dict(zip(("apply_u_silu", "concat_u", "concat_x"), f, strict=True)) for f in itertools.product([0, 1], repeat=3)
]
FLAGS = [{name: bool(value) for name, value in flags.items()} for flags in FLAGS]
EPS, P, SEED = 1e-3, 0.3, -12345678901


def operands(rows: int = 5, columns: int = 16, dtype: Any = np.float64, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    shapes = ((rows, columns), (rows, columns), (columns,), (columns,))
    return [(rng.standard_normal(shape) + 0.2).astype(dtype) for shape in shapes]


def naive_forward(
    x: Any, u: Any, w: Any, b: Any, p: float, masks: Any, *, apply_u_silu: bool, concat_u: bool, concat_x: bool
) -> Any:
    """Loops over elements in float64; ``masks[plane]`` says what is kept."""
    rows, columns = x.shape
    factor = 1 / (1 - p)
    y = []
    for i in range(rows):
        mean = sum(float(v) for v in x[i]) / columns
        var = sum((float(v) - mean) ** 2 for v in x[i]) / columns
        parts: list[list[float]] = [[], [], []]
        for j in range(columns):
            z = float(u[i, j])
            a = z / (1 + np.exp(-z)) if apply_u_silu else z
            ln = (float(x[i, j]) - mean) / np.sqrt(var + EPS) * float(w[j]) + float(b[j])
            for plane, value in ((2, a), (1, float(x[i, j])), (0, ln * a)):
                parts[2 - plane].append(value * factor if masks[plane][i, j] else 0.0)
        y.append([*(parts[0] if concat_u else []), *(parts[1] if concat_x else []), *parts[2]])
    return np.array(y)


def planes(mask: Any) -> list[Any]:
    return [(mask >> plane) & 1 == 1 for plane in range(3)]


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("p", [0.0, P])
def test_forward_is_the_naive_loop(flags: dict[str, bool], p: float) -> None:
    given = operands()
    options = {"eps": EPS, "dropout_ratio": p, "seed": SEED, **flags}
    y, mean, rstd, mask = hstu_lmsd_forward(*given, **options, compute="float64")
    x = given[0]
    assert (mask is None) == (p == 0)
    masks = planes(mask) if p else [np.ones(x.shape, bool)] * 3
    np.testing.assert_allclose(y, naive_forward(*given, np.float32(p), masks, **flags), rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(mean, x.mean(-1), rtol=1e-12)
    np.testing.assert_allclose(rstd, 1 / np.sqrt(x.var(-1) + EPS), rtol=1e-9)


def test_bits_of_absent_parts_stay_zero() -> None:
    given = operands(rows=20)
    for flags in FLAGS:
        mask = hstu_lmsd_forward(*given, eps=EPS, dropout_ratio=P, seed=SEED, **flags)[3]
        allowed = 1 | 2 * flags["concat_x"] | 4 * flags["concat_u"]
        assert mask.dtype == np.int8
        assert np.bitwise_or.reduce(mask, axis=None) == allowed


def test_planes_do_not_depend_on_their_place_in_y() -> None:
    given = operands(rows=20)
    options: dict[str, Any] = {"eps": EPS, "dropout_ratio": P, "seed": SEED, "apply_u_silu": True}
    full = hstu_lmsd_forward(*given, **options, concat_u=True, concat_x=True)[3]
    for concat_u, concat_x in itertools.product([False, True], repeat=2):
        mask = hstu_lmsd_forward(*given, **options, concat_u=concat_u, concat_x=concat_x)[3]
        np.testing.assert_array_equal(mask, full & (1 | 2 * concat_x | 4 * concat_u))


def test_tiny_ratio_that_float32_keeps_is_dropout_and_zero_is_none() -> None:
    given = operands()
    flags = FLAGS[-1]
    assert hstu_lmsd_forward(*given, eps=EPS, dropout_ratio=1e-40, seed=0, **flags)[3] is not None
    assert hstu_lmsd_forward(*given, eps=EPS, dropout_ratio=1e-60, seed=0, **flags)[3] is None


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("p", [0.0, P])
def test_gradients_are_finite_differences(flags: dict[str, bool], p: float) -> None:
    given = operands(rows=3, columns=8)
    options = {"eps": EPS, "dropout_ratio": p, "seed": SEED, **flags}
    y, mean, rstd, mask = hstu_lmsd_forward(*given, **options, compute="float64")
    dy = np.random.default_rng(1).standard_normal(y.shape)
    back = {"dropout_ratio": p, **flags}
    found = hstu_lmsd_backward(dy, *given, mean, rstd, mask, **back, compute="float64")
    step = 1e-5
    for number, gradient in enumerate(found):
        assert gradient.shape == given[number].shape
        for index in np.ndindex(gradient.shape):
            ends = []
            for sign in (1, -1):
                moved = [array.copy() for array in given]
                moved[number][index] += sign * step
                ends.append((hstu_lmsd_forward(*moved, **options, compute="float64")[0] * dy).sum())
            assert gradient[index] == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-6, abs=1e-7)


def test_no_weight_gradient_unless_wanted() -> None:
    given = operands()
    y, mean, rstd, mask = hstu_lmsd_forward(*given, eps=EPS, dropout_ratio=P, seed=1, **FLAGS[-1])
    options = {"dropout_ratio": P, **FLAGS[-1]}
    with_weight = hstu_lmsd_backward(y, *given, mean, rstd, mask, **options)
    without = hstu_lmsd_backward(y, *given, mean, rstd, mask, **options, compute_dweight=False)
    assert without[2] is None
    for number in (0, 1, 3):
        np.testing.assert_array_equal(with_weight[number], without[number])


@pytest.mark.parametrize("flags", [FLAGS[0], FLAGS[5], FLAGS[7]], ids=str)
def test_frameworks_agree(flags: dict[str, bool]) -> None:
    """Same masks; values at most one bf16 rounding apart, as sums and exponentials differ in their last bit."""
    given = operands(rows=7, columns=40, dtype=BF16)
    results = {}
    for framework in ("numpy", "torch", "jax"):
        arrays = [to_framework(array, framework) for array in given]
        y, mean, rstd, mask = hstu_lmsd_forward(*arrays, eps=EPS, dropout_ratio=P, seed=SEED, **flags)
        back = hstu_lmsd_backward(y, *arrays, mean, rstd, mask, dropout_ratio=P, **flags)
        results[framework] = [to_numpy(array) for array in (y, mean, rstd, mask, *back)]
    for framework in ("torch", "jax"):
        for got, want in zip(results[framework], results["numpy"], strict=True):
            assert got.dtype == want.dtype
            if want.dtype == np.int8:
                np.testing.assert_array_equal(got, want)
            else:
                scale = np.abs(want.astype(np.float64)).max()
                np.testing.assert_allclose(
                    got.astype(np.float64), want.astype(np.float64), rtol=2**-7, atol=2**-7 * scale
                )


def test_float32_arithmetic_rounds_once() -> None:
    given = operands(rows=64, columns=128, dtype=BF16)
    options = {"eps": EPS, "dropout_ratio": P, "seed": 3, **FLAGS[-1]}
    narrow = hstu_lmsd_forward(*given, **options)
    wide = hstu_lmsd_forward(*given, **options, compute="float64")
    assert narrow[0].dtype == BF16
    error = np.abs(narrow[0].astype(np.float64) - wide[0])
    assert (error <= 2.0**-8 * np.abs(wide[0]) + 2.0**-18).all()
    back = {"dropout_ratio": P, **FLAGS[-1]}
    for got, want in zip(
        hstu_lmsd_backward(narrow[0], *given, *narrow[1:], **back),
        hstu_lmsd_backward(narrow[0].astype(np.float64), *given, *wide[1:3], narrow[3], **back, compute="float64"),
        strict=True,
    ):
        assert np.linalg.norm(got.astype(np.float64) - want) <= 2.0**-8 * np.linalg.norm(want)


def test_dropped_elements_select_nothing() -> None:
    """NaN in what is dropped reaches neither y nor, through y's gradient, anything else."""
    x, u, w, b = operands(rows=4)
    options = {"eps": EPS, "dropout_ratio": P, "seed": 7, **FLAGS[-1]}
    y, mean, rstd, mask = hstu_lmsd_forward(x, u, w, b, **options)
    columns = x.shape[1]
    dy = np.ones_like(y)
    for part, plane in enumerate((2, 1, 0)):
        dropped = (mask >> plane) & 1 == 0
        assert (y[:, part * columns : (part + 1) * columns][dropped] == 0).all()
        dy[:, part * columns : (part + 1) * columns][dropped] = np.nan
    results = hstu_lmsd_backward(dy, x, u, w, b, mean, rstd, mask, dropout_ratio=P, **FLAGS[-1])
    assert all(np.isfinite(result).all() for result in results)


def test_no_rows_give_zero_parameter_gradients() -> None:
    given = operands(rows=0, dtype=BF16)
    y, mean, rstd, mask = hstu_lmsd_forward(*given, eps=EPS, dropout_ratio=P, seed=0, **FLAGS[-1])
    assert y.shape == (0, 48)
    assert mean.shape == rstd.shape == (0,)
    _, _, dweight, dbias = hstu_lmsd_backward(y, *given, mean, rstd, mask, dropout_ratio=P, **FLAGS[-1])
    assert (dweight == 0).all()
    assert (dbias == 0).all()


def test_jax_traces() -> None:
    import jax

    arrays = [jnp.asarray(array) for array in operands(dtype=BF16)]
    options = {"eps": EPS, "dropout_ratio": P, "seed": 2**62 + 1, **FLAGS[-1]}
    eager = hstu_lmsd_forward(*arrays, **options)
    traced = jax.jit(lambda *a: hstu_lmsd_forward(*a, **options))(*arrays)
    np.testing.assert_array_equal(eager[3], traced[3])
