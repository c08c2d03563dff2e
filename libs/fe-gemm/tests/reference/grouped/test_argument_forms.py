"""The legacy and the discrete operations: other argument forms of ``grouped_gemm_glu`` and ``grouped_gemm_dglu``."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from naive_gemm import E4M3, STORED, U, assert_within, value_of
from naive_grouped import by_row, call, canonical, columns, ends, forward, product, scaled, slopes, weights

from fe_gemm.reference.grouped import (
    discrete_grouped_gemm_dswiglu,
    discrete_grouped_gemm_swiglu,
    grouped_gemm_dglu,
    grouped_gemm_dswiglu,
    grouped_gemm_glu,
    grouped_gemm_swiglu,
)

N, K, ROWS = 64, 64, 160
OFF = ends([32, 0, 96])
GATES, UPS = columns(N)


class Problem:
    """A forward and a backward call: ``n`` rows of weights and everything that may go with them."""

    def __init__(self, n: int, rows: int = ROWS, off: Any = OFF) -> None:
        rng = np.random.default_rng(n)
        self.operand, self.weight = scaled(rng, "mxfp8_e4m3", rows, n, K, len(off))
        self.a, self.sfa = self.operand.elements()[..., 0], self.operand.blocked("physical")
        self.b, self.sfb = canonical(self.weight.elements()), self.weight.blocked("physical")
        self.off, self.alpha = off, (rng.uniform(0.5, 1, len(off)) * 2.0**-8).astype(np.float32)
        self.beta = rng.uniform(0.5, 1, len(off)).astype(np.float32)
        self.prob, self.dprob = (rng.uniform(0.5, 1, rows).astype(np.float32) for _ in range(2))
        self.c = rng.standard_normal((rows, 2 * n)).astype(STORED["bfloat16"])
        self.bias = rng.standard_normal((n, len(off))).astype(STORED["bfloat16"])
        self.norm = np.ones(1, np.float32)
        self.acc = product(self.operand.exact()[..., 0], weights(self.weight), off)

    def tables(self, framework: str) -> list[Any]:
        """Return the addresses of weights and scales, which this object keeps alive."""
        self.kept = [[np.ascontiguousarray(x) for x in stack] for stack in (self.b, self.sfb)]
        tables = [np.array([x.ctypes.data for x in stack], np.int64) for stack in self.kept]
        return [table.view(np.uint8) if framework == "jax" else table for table in tables]


def assert_same(got: list[Any], want: list[Any]) -> None:
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        assert (x is None) == (y is None)
        assert x is None or x.tobytes() == y.tobytes()


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", [E4M3, "bfloat16"])
def test_swiglu(dtype: str, framework: str) -> None:
    p = Problem(2 * N)
    norm = p.norm if dtype == E4M3 else None
    options = {"sf_vec_size": 32, "d_dtype": dtype, "c_dtype": "float32"}
    got = call(grouped_gemm_swiglu, framework, [p.a, p.b, p.sfa, p.sfb, p.off, p.alpha, norm, p.prob], **options)
    arrays = [p.a, p.sfa, p.off, p.alpha, p.b, p.sfb, None, None, None, norm, p.prob]
    assert_same(got, call(grouped_gemm_glu, framework, arrays, generate_c=True, **options))
    h = by_row(p.alpha, p.off, ROWS)[:, None] * p.acc
    np.testing.assert_allclose(got[0], h, rtol=1e-3, atol=1e-3)
    x = forward("swiglu", h[:, GATES], h[:, UPS]) * p.prob[:, None]
    if dtype == "bfloat16":
        assert_within(value_of(got[1]), x, U[dtype] * np.abs(x) + 1e-3 * np.abs(x).max(), dtype)
        assert got[3].shape == (3, 1)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("act_func", ["swiglu", "geglu"])
def test_discrete_swiglu(act_func: str, framework: str) -> None:
    p = Problem(2 * N)
    options: dict[str, Any] = {"sf_vec_size": 32, "d_dtype": E4M3, "act_func": act_func, "discrete_col_sfd": True}
    weights_at, scales_at = p.tables(framework)
    arrays = [p.a, weights_at, p.sfa, scales_at, p.off, p.alpha, p.bias, p.norm]
    got = call(discrete_grouped_gemm_swiglu, framework, arrays, n=2 * N, b_dtype=E4M3, **options)
    arrays = [p.a, p.sfa, p.off, p.alpha, p.b, p.sfb, p.bias, None, None, p.norm, np.ones(ROWS, np.float32)]
    assert_same(got, call(grouped_gemm_glu, framework, arrays, **options))
    assert got[0] is not None


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", [E4M3, "bfloat16", "float32"])
def test_dswiglu(dtype: str, framework: str) -> None:
    p = Problem(N)
    options = {"sf_vec_size": 32, "d_dtype": dtype}
    arrays = [p.a, p.b, p.c, p.sfa, p.sfb, p.off, p.alpha, None, p.prob.astype(STORED["bfloat16"]), p.norm]
    d, d_col, dprob, amax, row, col = call(grouped_gemm_dswiglu, framework, arrays, **options)
    h, prob = value_of(p.c), value_of(arrays[8])
    r = by_row(p.alpha.astype(np.float64) ** 2, p.off, ROWS)[:, None] * p.acc
    np.testing.assert_allclose(dprob, (r * forward("swiglu", h[:, GATES], h[:, UPS])).sum(axis=1), rtol=1e-3, atol=1e-4)
    assert dprob.dtype == np.float32
    assert (amax is not None) == (dtype == "bfloat16")
    assert all((x is not None) == (dtype == E4M3) for x in (d_col, row, col))
    by_gate, by_up = slopes("swiglu", h[:, GATES], h[:, UPS])
    if dtype == "float32":
        np.testing.assert_allclose(d[:, GATES], r * prob[:, None] * by_gate, rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(d[:, UPS], r * prob[:, None] * by_up, rtol=1e-3, atol=1e-6)
    arrays[7] = np.ones(3, np.float32)
    assert_same([d, d_col, dprob, amax, row, col], call(grouped_gemm_dswiglu, framework, arrays, **options))
    arrays[7] = p.beta
    assert call(grouped_gemm_dswiglu, framework, arrays, **options)[0].tobytes() != d.tobytes()
    given = call(grouped_gemm_dswiglu, framework, [*arrays, p.dprob], **options)[2]
    np.testing.assert_array_equal(given[128:], p.dprob[128:])
    assert (given[:128] != p.dprob[:128]).any()


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("act_func", ["dswiglu", "dgeglu"])
def test_discrete_dswiglu(act_func: str, framework: str) -> None:
    p = Problem(N)
    weights_at, scales_at = p.tables(framework)
    for dtype in (E4M3, "bfloat16"):
        options: dict[str, Any] = {"sf_vec_size": 32, "d_dtype": dtype, "act_func": act_func, "generate_dbias": True}
        arrays = [p.a, weights_at, p.c, p.sfa, scales_at, p.off, p.alpha, p.beta, p.prob, p.dprob, p.norm]
        got = call(discrete_grouped_gemm_dswiglu, framework, arrays, n=N, b_dtype=E4M3, **options)
        arrays = [p.a, p.c, p.sfa, p.off, p.alpha, p.beta, p.prob, p.dprob, p.b, p.sfb, None, None, p.norm]
        assert_same(got, call(grouped_gemm_dglu, framework, arrays, **options)[:7])
        assert all((x is not None) == (dtype == E4M3) for x in (got[1], got[5], got[6]))
        assert got[3].shape == (3, 2 * N, 1)


def test_dswiglu_without_rows_has_no_scales() -> None:
    p = Problem(N, 0, ends([0, 0]))
    arrays = [p.a, p.b, p.c, p.sfa, p.sfb, p.off, p.alpha, p.beta, p.prob, p.norm]
    d, d_col, dprob, _, row, col = grouped_gemm_dswiglu(*arrays, sf_vec_size=32, d_dtype=E4M3)
    assert d.shape == d_col.shape == (0, 2 * N)
    assert dprob.shape == (0,)
    assert row is col is None


def test_all_can_be_traced() -> None:
    """Under ``jit`` the results have the same shapes and dtypes; their numbers are those of the operations adapted."""
    forward, backward = Problem(2 * N), Problem(N)
    for p, dense, discrete in [
        (forward, grouped_gemm_swiglu, discrete_grouped_gemm_swiglu),
        (backward, grouped_gemm_dswiglu, discrete_grouped_gemm_dswiglu),
    ]:
        saved = [p.c] if p is backward else []
        rest = [p.off, p.alpha, *([p.beta, p.prob] if p is backward else [])]
        for form in ("numpy", "jax"):
            at = p.tables(form)
            legacy = [p.a, p.b, *saved, p.sfa, p.sfb, *rest, p.norm]
            other = [p.a, at[0], *saved, p.sfa, at[1], *rest, None, p.norm]
            run = partial(dense, sf_vec_size=32, d_dtype=E4M3), partial(discrete, n=p.b.shape[1], sf_vec_size=32)
            if form == "numpy":
                want = [run[0](*legacy), run[1](*other)]
            else:
                found = [jax.eval_shape(run[0], *legacy), jax.eval_shape(run[1], *other)]
        for got, expected in zip(found, want, strict=True):
            shapes = [[None if x is None else (x.shape, x.dtype) for x in results] for results in (got, expected)]
            assert shapes[0] == shapes[1]
