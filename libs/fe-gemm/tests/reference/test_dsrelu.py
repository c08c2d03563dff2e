"""``gemm_dsrelu``: the reference against loops in float64, and against the slope of ``gemm_srelu``'s formula."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from naive_gemm import (
    E4M3,
    E5M2,
    FORMATS,
    STORED,
    accumulation_error,
    assert_quantised,
    assert_within,
    cast,
    operand,
    product,
    storing_error,
    value_of,
)

from fe_gemm.reference import gemm_dsrelu
from fe_runtime.testing import to_framework, to_numpy

FRAMEWORKS = ("numpy", "torch", "jax")


def problem(
    name: str, m: int, n: int, k: int, batch: int = 1, c_dtype: str = "bfloat16", seed: int = 0, **known: Any
) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    a, b = operand(rng, m, k, batch, name, **known), operand(rng, n, k, batch, name, **known)
    whole = known.get("whole")
    prob = np.exp2(rng.integers(-3, 1, (m, 1, batch))) if whole else rng.standard_normal((m, 1, batch))
    c = rng.integers(-4, 5, (m, n, batch)) if whole else rng.standard_normal((m, n, batch))
    return a, b, c.astype(STORED[c_dtype]), prob.astype(np.float32)


def arrays(a: Any, b: Any, c: Any, prob: Any, framework: str = "numpy", norm_const: float | None = None) -> list[Any]:
    form = "physical" if framework == "jax" else "logical"
    given = [a.elements(), b.elements(), c, a.blocked(form, 1), b.blocked(form, 2), prob]
    given += [] if norm_const is None else [np.array([norm_const], np.float32)]
    return [to_framework(x, framework) for x in given]


def gradients(g: Any, c: Any, prob: Any) -> tuple[Any, Any]:
    """Return d and dprob, one row after the other."""
    d, dprob = np.zeros(g.shape), np.zeros((g.shape[0], 1, g.shape[2]))
    for m in range(g.shape[0]):
        positive, upstream = np.maximum(g[m], 0), value_of(c)[m]
        d[m] = 2 * positive * upstream * prob[m].astype(np.float64)
        dprob[m, 0] = sum(positive[n] ** 2 * upstream[n] for n in range(g.shape[1]))
    return d, dprob


@pytest.mark.parametrize("c_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("size", [1.0, 2.0**-5])
@pytest.mark.parametrize("name", FORMATS)
def test_every_output_is_within_its_bound(name: str, size: float, c_dtype: str) -> None:
    a, b, c, prob = problem(name, 37, 66, 100, 2, c_dtype, size=size)
    alpha = 0.7
    g = np.float64(np.float32(alpha)) * product(a.exact(), b.exact())
    error = alpha * accumulation_error(a.exact(), b.exact())
    want, want_dprob = gradients(g, c, prob)
    through = 2 * error * np.abs(value_of(c) * prob) + 2.0**-20 * np.abs(want)
    positive, upstream = np.maximum(g, 0), np.abs(value_of(c))
    allowed = ((2 * positive * error + error**2 + 2.0**-18 * positive**2) * upstream).sum(axis=1, keepdims=True)
    for d_dtype in ("float32", "float16", "bfloat16"):
        d, dprob, amax, sfd = gemm_dsrelu(
            *arrays(a, b, c, prob), alpha=alpha, d_dtype=d_dtype, sf_vec_size=a.vec, with_amax=True
        )
        assert sfd is None
        assert_within(value_of(d), want, storing_error(want, d_dtype) + through, d_dtype, "d")
        assert dprob.dtype == np.float32
        assert_within(dprob, want_dprob, allowed, "float32", "dprob")
        at = np.unravel_index(np.argmax(np.abs(want)), want.shape)
        assert amax.shape == (1,)
        assert abs(amax.item() - abs(want[at])) <= 2.0**-16 * abs(want[at]) + through[at]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", FORMATS)
def test_integers_give_the_same_bytes(name: str, framework: str) -> None:
    a, b, c, prob = problem(name, 20, 34, 72, 2, whole=True)
    want, want_dprob = gradients(2 * product(a.exact(), b.exact()), c, prob)
    for d_dtype in ("float32", "float16", "bfloat16"):
        d, dprob, *_ = gemm_dsrelu(*arrays(a, b, c, prob, framework), alpha=2.0, d_dtype=d_dtype, sf_vec_size=a.vec)
        np.testing.assert_array_equal(value_of(to_numpy(d)), cast(want, d_dtype))
        np.testing.assert_array_equal(to_numpy(dprob), want_dprob)
        assert tuple(dprob.shape) == (20, 1, 2)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("name", "dtype"), [("mxfp8_e4m3", E4M3), ("mxfp8_e5m2", E5M2), ("mxfp4", E4M3)])
@pytest.mark.parametrize("norm_const", [1.0, 0.3])
def test_quantised_output_has_the_same_bytes(name: str, dtype: str, norm_const: float, framework: str) -> None:
    a, b, c, prob = problem(name, 33, 70, 64, 2, whole=True)
    prob[3], prob[4] = 0, 2.0**-80
    exact, _ = gradients(product(a.exact(), b.exact()), c, prob)
    exact = np.where(exact == 0, 0, exact)
    d, _, amax, sfd = gemm_dsrelu(*arrays(a, b, c, prob, framework, norm_const), d_dtype=dtype, sf_vec_size=32)
    assert amax is None
    codes = to_numpy(d).view(np.uint8)
    assert_quantised(np.where(codes == 0x80, 0, codes), to_numpy(sfd), exact, dtype, norm_const)


def test_it_is_the_slope_of_the_forward_formula() -> None:
    a, b, c, prob = problem("nvfp4", 11, 13, 48, 1, "float32", seed=3)
    x, upstream = product(a.exact(), b.exact()), value_of(c)
    loss = lambda x, prob: np.maximum(x, 0) ** 2 * prob * upstream  # noqa: E731
    step = 1e-6
    d, dprob, *_ = gemm_dsrelu(*arrays(a, b, c, prob), d_dtype="float32", accumulate="float64")
    slope = (loss(x + step, prob.astype(float)) - loss(x - step, prob.astype(float))) / (2 * step)
    np.testing.assert_allclose(d, slope, rtol=1e-4, atol=1e-4)
    slope = (loss(x, prob + 0.5) - loss(x, prob - 0.5)).sum(axis=1, keepdims=True)  # linear in prob
    np.testing.assert_allclose(dprob, slope, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nan_of_a_scale_stays_in_its_row(framework: str) -> None:
    a, b, c, prob = problem("nvfp4", 6, 5, 32)
    a.scales[2, 0, 0] = 0x7F
    d, dprob, amax, _ = gemm_dsrelu(*arrays(a, b, c, prob, framework))
    for result in (d, dprob):
        spoiled = np.isnan(value_of(to_numpy(result)))
        assert spoiled[2].all()
        assert not np.delete(spoiled, 2, axis=0).any()
    assert np.isnan(amax.item())


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_gradient_is_zero_where_the_product_is_not_positive(framework: str) -> None:
    a, b, c, prob = problem("mxfp8_e4m3", 4, 6, 32, whole=True)
    a.codes[:], b.codes[:] = 0x38, 0xB8  # 1 and -1
    b.codes[0] = 0
    d, dprob, *_ = gemm_dsrelu(*arrays(a, b, c, prob, framework), sf_vec_size=32)
    assert not value_of(to_numpy(d)).any()
    assert not to_numpy(dprob).any()


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("m", "batch"), [(0, 1), (3, 0)])
def test_nothing_to_multiply(m: int, batch: int, framework: str) -> None:
    a, b, c, prob = problem("mxfp4", m, 6, 32, batch)
    d, dprob, amax, sfd = gemm_dsrelu(*arrays(a, b, c, prob, framework), sf_vec_size=32)
    assert (tuple(d.shape), tuple(dprob.shape)) == ((m, 6, batch), (m, 1, batch))
    assert (tuple(amax.shape), amax.item(), sfd) == ((1,), -np.inf, None)


@pytest.mark.parametrize("d_dtype", ["bfloat16", E5M2])
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp4"])
def test_jit_and_eager_agree_bit_for_bit(name: str, d_dtype: str) -> None:
    a, b, c, prob = problem(name, 40, 34, 100)
    run = lambda *x: gemm_dsrelu(*x, alpha=0.7, d_dtype=d_dtype, sf_vec_size=32)  # noqa: E731
    given = arrays(a, b, c, prob, "jax", 0.3)
    for eager, jitted in zip(run(*given), jax.jit(run)(*given), strict=True):
        assert (eager is None) == (jitted is None)
        assert eager is None or to_numpy(eager).tobytes() == to_numpy(jitted).tobytes()
