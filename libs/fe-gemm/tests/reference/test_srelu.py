"""``gemm_srelu``: the reference against loops in float64."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from naive_gemm import (
    E4M3,
    E5M2,
    FORMATS,
    accumulation_error,
    assert_quantised,
    assert_within,
    cast,
    operand,
    product,
    storing_error,
    value_of,
)

from fe_gemm.reference import gemm_srelu
from fe_runtime.testing import to_framework, to_numpy

FRAMEWORKS = ("numpy", "torch", "jax")
DTYPES = ("float32", "float16", "bfloat16", E4M3, E5M2)


def problem(name: str, m: int, n: int, k: int, batch: int = 1, seed: int = 0, **known: Any) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    a, b = operand(rng, m, k, batch, name, **known), operand(rng, n, k, batch, name, **known)
    prob = np.exp2(rng.integers(-3, 1, (m, 1, batch))) if known.get("whole") else rng.random((m, 1, batch))
    return a, b, prob.astype(np.float32)


def arrays(a: Any, b: Any, prob: Any, framework: str = "numpy", norm_const: float | None = None) -> list[Any]:
    form = "physical" if framework == "jax" else "logical"
    given = [a.elements(), b.elements(), a.blocked(form, 1), b.blocked(form, 2), prob]
    given += [] if norm_const is None else [np.array([norm_const], np.float32)]
    return [to_framework(x, framework) for x in given]


def activation(x: Any, prob: Any) -> Any:
    return np.maximum(x, 0) ** 2 * prob.astype(np.float64)


@pytest.mark.parametrize(("m", "n", "k", "batch"), [(1, 1, 32, 1), (37, 21, 100, 2), (130, 34, 320, 1)])
@pytest.mark.parametrize("size", [1.0, 2.0**-5])
@pytest.mark.parametrize("name", FORMATS)
def test_every_output_is_within_its_bound(name: str, size: float, m: int, n: int, k: int, batch: int) -> None:
    a, b, prob = problem(name, m, n, k, batch, size=size)
    alpha = -0.05
    x = np.float64(np.float32(alpha)) * product(a.exact(), b.exact())
    error = abs(alpha) * accumulation_error(a.exact(), b.exact())
    want = activation(x, prob)
    # Also around the zero of relu, where the slope changes: |relu(x + e)^2 - relu(x)^2| <= 2 relu(x) e + e^2.
    through = (2 * np.maximum(x, 0) * error + error**2) * prob + 2.0**-20 * want
    for c_dtype, d_dtype in [("float32", "float32"), (E4M3, "float16"), ("float16", "bfloat16"), (E5M2, "bfloat16")]:
        c, d, amax, sfd = gemm_srelu(
            *arrays(a, b, prob), alpha=alpha, c_dtype=c_dtype, d_dtype=d_dtype, sf_vec_size=a.vec, with_amax=True
        )
        assert sfd is None
        assert_within(value_of(c), x, storing_error(x, c_dtype) + error, c_dtype, "c")
        assert_within(value_of(d), want, storing_error(want, d_dtype) + through, d_dtype, "d")
        at = np.unravel_index(np.argmax(want), want.shape)
        assert amax.shape == (1,)
        assert abs(amax.item() - want[at]) <= 2.0**-16 * want[at] + through[at]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", FORMATS)
def test_integers_give_the_same_bytes(name: str, framework: str) -> None:
    a, b, prob = problem(name, 40, 34, 72, 2, whole=True)
    x = 0.5 * product(a.exact(), b.exact())
    want = activation(x, prob)
    for c_dtype, d_dtype in zip(DTYPES, ("bfloat16", "float32", "float16", "float32", "bfloat16"), strict=True):
        c, d, *_ = gemm_srelu(
            *arrays(a, b, prob, framework), alpha=0.5, c_dtype=c_dtype, d_dtype=d_dtype, sf_vec_size=a.vec
        )
        np.testing.assert_array_equal(value_of(to_numpy(c)), cast(x, c_dtype))
        np.testing.assert_array_equal(value_of(to_numpy(d)), cast(want, d_dtype))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("name", "dtype"), [("mxfp8_e4m3", E4M3), ("mxfp8_e5m2", E5M2), ("mxfp4", E4M3)])
@pytest.mark.parametrize("norm_const", [1.0, 0.3, 2.0**20])
def test_quantised_output_has_the_same_bytes(name: str, dtype: str, norm_const: float, framework: str) -> None:
    a, b, prob = problem(name, 40, 144, 64, 2, whole=True)
    prob[3] = 0  # a row of zeros
    prob[4] = 2.0**-80  # and one of next to nothing
    exact = activation(product(a.exact(), b.exact()), prob)
    _, d, amax, sfd = gemm_srelu(*arrays(a, b, prob, framework, norm_const), d_dtype=dtype, sf_vec_size=32)
    assert amax is None
    assert_quantised(to_numpy(d), to_numpy(sfd), exact, dtype, norm_const)
    assert tuple(sfd.shape) == ((2, 1, 2, 32, 4, 4) if framework == "jax" else (32, 4, 1, 4, 2, 2))


def test_a_partial_block_of_columns_has_a_scale_of_its_own() -> None:
    a, b, prob = problem("mxfp8_e4m3", 5, 70, 64, whole=True)
    exact = activation(product(a.exact(), b.exact()), prob)
    _, d, _, sfd = gemm_srelu(*arrays(a, b, prob, "numpy", 1.0), d_dtype=E4M3, sf_vec_size=32)
    assert_quantised(d, sfd, exact, E4M3, 1.0)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nan_stays_in_its_row_and_wins_the_maximum(framework: str) -> None:
    a, b, prob = problem("nvfp4", 6, 5, 32)
    a.scales[2, 0, 0] = 0x7F
    c, d, amax, _ = gemm_srelu(*arrays(a, b, prob, framework))
    for result in (c, d):
        spoiled = np.isnan(value_of(to_numpy(result)))
        assert spoiled[2].all()  # relu keeps it
        assert not np.delete(spoiled, 2, axis=0).any()
    assert np.isnan(amax.item())


@pytest.mark.parametrize(("name", "d_dtype", "expected"), [
    ("nvfp4", "bfloat16", True), ("mxfp4", "float32", True), ("mxfp4", E4M3, False), ("mxfp8_e4m3", "bfloat16", False),
])  # fmt: skip
def test_amax_by_default(name: str, d_dtype: str, expected: bool) -> None:
    a, b, prob = problem(name, 4, 6, 32)
    results = gemm_srelu(*arrays(a, b, prob, "numpy", 1.0), d_dtype=d_dtype, sf_vec_size=a.vec)
    assert (results[2] is not None) == expected
    assert (results[3] is not None) == (d_dtype == E4M3)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_factors_with_any_strides(framework: str) -> None:
    a, b, prob = problem("mxfp8_e4m3", 9, 6, 32, 2, whole=True)
    want = gemm_srelu(*arrays(a, b, prob, framework), sf_vec_size=32)[1]
    wide = np.full((9, 3, 2), np.nan, np.float32)
    wide[:, 1:2] = prob
    given = arrays(a, b, prob, framework)
    given[4] = to_framework(wide, framework)[:, 1:2]
    np.testing.assert_array_equal(value_of(to_numpy(gemm_srelu(*given, sf_vec_size=32)[1])), value_of(to_numpy(want)))
    given[4] = given[4][:1].expand(9, 1, 2) if framework == "torch" else np.broadcast_to(given[4][:1], (9, 1, 2))
    same = arrays(a, b, np.repeat(prob[:1], 9, axis=0), framework)
    np.testing.assert_array_equal(
        value_of(to_numpy(gemm_srelu(*given, sf_vec_size=32)[1])),
        value_of(to_numpy(gemm_srelu(*same, sf_vec_size=32)[1])),
    )


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nothing_to_multiply(framework: str) -> None:
    a, b, prob = problem("mxfp4", 0, 6, 32)
    c, d, amax, sfd = gemm_srelu(*arrays(a, b, prob, framework), sf_vec_size=32)
    assert tuple(c.shape) == tuple(d.shape) == (0, 6, 1)
    assert (tuple(amax.shape), amax.item(), sfd) == ((1,), -np.inf, None)


@pytest.mark.parametrize("d_dtype", ["bfloat16", E5M2])
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp4"])
def test_jit_and_eager_agree_bit_for_bit(name: str, d_dtype: str) -> None:
    a, b, prob = problem(name, 40, 34, 100)
    run = lambda *x: gemm_srelu(*x, alpha=0.7, c_dtype=E4M3, d_dtype=d_dtype, sf_vec_size=32)  # noqa: E731
    given = arrays(a, b, prob, "jax", 0.3)
    for eager, jitted in zip(run(*given), jax.jit(run)(*given), strict=True):
        assert (eager is None) == (jitted is None)
        assert eager is None or to_numpy(eager).tobytes() == to_numpy(jitted).tobytes()
