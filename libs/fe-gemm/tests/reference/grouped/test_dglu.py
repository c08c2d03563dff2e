"""``grouped_gemm_dglu``: the reference against loops in float64 and slopes from differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from naive_gemm import E4M3, E5M2, E8M0, FORMATS, STORED, U, assert_within, cast, in_order, storing_error, value_of
from naive_grouped import (
    FRAMEWORKS,
    ROWS,
    SIZES,
    by_row,
    call,
    canonical,
    columns,
    each_on_host,
    ends,
    expert_scales,
    forward,
    members,
    plain,
    product,
    quantised,
    row_scales,
    scaled,
    slopes,
    tail_is,
    weights,
    without_negative_zero,
)

from fe_gemm.reference.grouped import grouped_gemm_dglu

N, K = 64, 64
GATES, UPS = columns(N)
ACTIVATIONS: dict[str, dict[str, float]] = {
    "swiglu": {},
    "geglu": {},
    "geglu other": {"linear_offset": 0.25, "geglu_alpha": 1.3, "glu_clamp_max": 1.5, "glu_clamp_min": -0.75},
    "situglu": {},
    "situglu other": {"situ_beta1": 1.5, "situ_beta2": 3.0},
}
TRACED = ("swiglu", "geglu other", "situglu")


def factors(rng: Any, off: Any, rows: int, whole: bool = False) -> list[Any]:
    """Return alpha, beta, prob (NaN in the tail) and an old dprob."""
    draws: list[Any] = (
        [rng.choice([0.5, 1.0, 2.0], shape) for shape in (len(off), len(off), rows)]
        if whole
        else [rng.uniform(0.5, 1.5, shape) for shape in (len(off), len(off), rows)]
    )
    draws[2][off[-1] :] = np.nan
    return [x.astype(np.float32) for x in (*draws, rng.integers(-9, 9, rows))]


def spread(by_gate: Any, by_up: Any) -> Any:
    """Return (M, 2N) of two parts (M, N)."""
    x = np.zeros((len(by_gate), 2 * N))
    x[:, GATES], x[:, UPS] = by_gate, by_up
    return x


def sums_by_expert(x: Any, off: Any) -> Any:
    return np.array([x[members(off, e)].sum(axis=0) for e in range(len(off))])


def maxima(x: Any, off: Any) -> Any:
    found = [
        [np.abs(x[members(off, e)][:, part]).max(initial=-np.inf) for part in (GATES, UPS)] for e in range(len(off))
    ]
    return np.array(found)[:, :, None]


@pytest.mark.parametrize(("case", "framework"), [*each_on_host(ACTIVATIONS), *((case, "jit") for case in TRACED)])
def test_bf16_gradients_are_within_their_bound(case: str, framework: str) -> None:
    rng, off = np.random.default_rng(1), ends(SIZES["empty first, middle, last"])
    name, given = case.split()[0], ACTIVATIONS[case]
    a, b = plain(rng, (ROWS, K)), plain(rng, (len(off), N, K), size=0.25)
    c = rng.standard_normal((ROWS, 2 * N)).astype(np.float32) * 2
    alpha, beta, prob, old = factors(rng, off, ROWS)
    a[off[-1] :], c[off[-1] :] = np.nan, np.nan
    d, d_col, dprob, dbias, amax, *rest = call(
        grouped_gemm_dglu,
        framework,
        [a, c, None, off, alpha, beta, prob, old, b],
        act_func=f"d{name}",
        d_dtype="float32",
        generate_dbias=True,
        **given,
    )
    assert (d_col, amax, *rest) == (None,) * 5
    r = by_row(alpha.astype(np.float64) ** 2, off, ROWS)[:, None] * product(value_of(a), value_of(b), off)
    error = 2.0**-19 * by_row(alpha**2, off, ROWS)[:, None] * product(abs(value_of(a)), abs(value_of(b)), off)
    h = by_row(beta, off, ROWS)[:, None] * np.nan_to_num(value_of(c))
    gate, up = h[:, GATES], h[:, UPS]
    p = np.nan_to_num(prob.astype(np.float64))[:, None]
    want = spread(*(r * p * slope for slope in slopes(name, gate, up, **given)))
    size = spread(*(np.abs(slope) * p for slope in slopes(name, gate, up, **given)))
    allowed = size * np.hstack([error] * 2)[:, np.argsort(GATES + UPS)] + 2.0**-18 * np.abs(want) + 2e-6
    assert_within(d, want, allowed, "float32", "d")
    act = forward(name, gate, up, **given)
    total = np.abs(r * act).sum(axis=1)
    owned = np.arange(ROWS) < off[-1]
    assert_within(dprob, old + np.where(owned, (r * act).sum(axis=1), 0), 2.0**-18 * total + 1e-4, "float32", "dprob")
    np.testing.assert_array_equal(dprob[~owned], old[~owned])
    exact = sums_by_expert(want, off)[:, :, None]
    assert dbias.dtype == STORED["bfloat16"]
    bound = U["bfloat16"] * np.abs(exact) + sums_by_expert(allowed, off)[:, :, None]
    assert_within(value_of(dbias), exact, bound, "bfloat16", "dbias")
    assert (value_of(dbias)[[0, 2, 3, 6]] == 0).all()
    assert tail_is(d, off, 0)


def whole_problem(sizes: list[int], rows: int = ROWS, name: str = "mxfp8_e4m3", c_dtype: str = "bfloat16") -> Any:
    """Return operands, and exact gradients: gates are so far from 0 that the sigmoid is 0 or 1, or 0 themselves."""
    rng, off = np.random.default_rng(2), ends(sizes)
    a, b = scaled(rng, name, rows, N, K, len(off), whole=True)
    alpha, beta, prob, old = factors(rng, off, rows, whole=True)
    c = spread(rng.choice([-256.0, 0.0, 256.0], (rows, N)), rng.integers(-4, 5, (rows, N)))
    h = by_row(beta, off, rows)[:, None] * c
    gate, up, p = h[:, GATES], h[:, UPS], np.nan_to_num(prob.astype(np.float64))[:, None]
    s = np.where(gate == 0, 0.5, gate > 0)
    r = by_row(alpha.astype(np.float64) ** 2, off, rows)[:, None] * product(
        np.nan_to_num(a.exact()[..., 0]), weights(b), off
    )
    exact = spread(r * p * up * s, r * p * gate * s) + 0.0
    sums = (r * gate * s * up).sum(axis=1)
    return a, b, c.astype(STORED[c_dtype]), off, [alpha, beta, prob, old], exact, sums


def arrays_of(a: Any, b: Any, c: Any, off: Any, given: list[Any], norm: float | None = None) -> list[Any]:
    const = None if norm is None else np.array([norm], np.float32)
    return [
        *(a.elements()[:, :, 0], c, a.blocked("physical", 1), off, *given),
        *(canonical(b.elements()), b.blocked("physical", 2), None, None, const),
    ]


RESULTS = [
    *each_on_host([(E4M3, 0.3, "bfloat16"), (E5M2, 2.0**20, "float32")]),
    ((E4M3, 0.3, "bfloat16"), "jit"),
]
"""dtype of D, norm constant and dtype of C, and frameworks."""


@pytest.mark.parametrize(("result", "framework"), RESULTS)
def test_quantised_results_have_the_same_bytes(result: tuple[str, float, str], framework: str) -> None:
    dtype, norm, c_dtype = result
    a, b, c, off, given, exact, sums = whole_problem(SIZES["none empty"], c_dtype=c_dtype)
    a.scales[off[-1] :] = 0xFF
    d, d_col, dprob, dbias, amax, row, col, activation = call(
        grouped_gemm_dglu,
        framework,
        arrays_of(a, b, c, off, given, norm),
        sf_vec_size=32,
        d_dtype=dtype,
        generate_dbias=True,
    )
    for got, scales, axis in ((d, row, 1), (d_col, col, 0)):
        codes, want = quantised(exact, dtype, norm, axis, norm_first=axis == 0)
        np.testing.assert_array_equal(without_negative_zero(got.view(np.uint8)), codes)
        assert scales.dtype == STORED[E8M0]
        np.testing.assert_array_equal(scales.view(np.uint8).reshape(-1), row_scales(want if axis else want.T))
    np.testing.assert_array_equal(dprob, given[3] + sums)
    np.testing.assert_array_equal(value_of(dbias)[..., 0], cast(sums_by_expert(exact, off), "bfloat16"))
    assert amax is activation is None


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_column_scales_take_the_norm_constant_first(framework: str) -> None:
    a, b, c, off, given, exact, _ = whole_problem(SIZES["one has all"])
    norm = next(n for n in _candidates(exact) if _orders_differ(exact, n))
    options = {"sf_vec_size": 32, "d_dtype": E4M3, "generate_dbias": True}
    results = call(grouped_gemm_dglu, framework, arrays_of(a, b, c, off, given, norm), **options)
    for scales, axis in ((results[5], 1), (results[6], 0)):
        want = quantised(exact, E4M3, norm, axis, norm_first=axis == 0)[1]
        np.testing.assert_array_equal(scales.view(np.uint8).reshape(-1), row_scales(want if axis else want.T))


def _candidates(x: Any) -> list[float]:
    """Return constants by which the scale of some block of rows is next to a power of two."""
    blocks = [np.abs(x[m : m + 32]).max(axis=0) for m in range(0, len(x), 32)]
    return [float(np.float32(448.0 / amax)) for amax in np.unique(blocks) if amax]


def _orders_differ(x: Any, norm: float) -> bool:
    n, reciprocal = np.float32(norm), np.float32(1) / np.float32(448)
    amax = np.array([np.abs(x[m : m + 32]).max(axis=0) for m in range(0, len(x), 32)], np.float32)
    one, other = (amax * reciprocal) * n, amax * (reciprocal * n)
    return bool(((one <= 1) != (other <= 1)).any())


@pytest.mark.parametrize(("name", "framework"), [*each_on_host(FORMATS), ("nvfp4", "jit")])
def test_wide_results_of_block_scaled_operands(name: str, framework: str) -> None:
    a, b, c, off, given, exact, sums = whole_problem(SIZES["empty first, middle, last"], name=name)
    for dtype, norm in [("bfloat16", 2.0 if name.startswith("mxfp8") else None), ("float32", None)]:
        d, d_col, dprob, dbias, amax, *rest = call(
            grouped_gemm_dglu, framework, arrays_of(a, b, c, off, given, norm), sf_vec_size=a.vec, d_dtype=dtype
        )
        np.testing.assert_array_equal(value_of(d), cast(exact, dtype))
        np.testing.assert_array_equal(dprob, given[3] + sums)
        assert (d_col, dbias, *rest) == (None,) * 5
        assert (amax is None) == (dtype == "float32")
        if amax is not None:
            np.testing.assert_array_equal(amax, maxima(exact, off))
            assert np.isneginf(amax[[0, 2, 3, 6]]).all()


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_forms_of_the_operands(framework: str) -> None:
    a, b, c, off, given, *_ = whole_problem(SIZES["none empty"])
    options: dict[str, Any] = {"sf_vec_size": 32, "d_dtype": E4M3}
    want = call(grouped_gemm_dglu, framework, arrays_of(a, b, c, off, given, 1.0), **options)
    alpha, beta, *per_row = given
    prob, old = (x[:, None, None] for x in per_row)
    n_major = np.ascontiguousarray(b.elements().transpose(2, 1, 0))
    for weight, major in [(b.elements("k"), "k"), (in_order(b.elements(), "n"), "k"), (n_major, "n")]:
        arrays = [
            *(a.elements(), c[:, :, None], a.blocked("logical"), off, alpha, beta),
            *(
                prob,
                old,
                weight,
                b.blocked("logical"),
                None,
                None,
                np.ones(1, np.float32),
            ),
        ]
        got = call(grouped_gemm_dglu, framework, arrays, b_major=major, **options)
        for x, y in zip(got[:2], want[:2], strict=True):
            assert x.shape == (*y.shape, 1)
            assert x.tobytes() == y.tobytes()
        assert got[2].shape == (ROWS, 1, 1)
        np.testing.assert_array_equal(got[2].reshape(-1), want[2])
        np.testing.assert_array_equal(got[6].view(np.uint8).transpose(5, 2, 4, 0, 1, 3), want[6].view(np.uint8))


@pytest.mark.parametrize(("major", "framework"), each_on_host("kn"))
def test_weights_behind_addresses(major: str, framework: str) -> None:
    a, b, c, off, given, *_ = whole_problem([5, 0, 20, 7], 40)
    arrays = arrays_of(a, b, c, off, given, 1.0)
    options: dict[str, Any] = {"sf_vec_size": 32, "d_dtype": E4M3, "discrete_col_sfd": True}
    want = call(grouped_gemm_dglu, "numpy", arrays, **options)
    kept = [np.ascontiguousarray(x if major == "k" else x.T) for x in canonical(b.elements())]
    kept_scales = [np.ascontiguousarray(x) for x in b.blocked("physical", 5)]
    tables = [np.array([x.ctypes.data for x in stored], np.int64) for stored in (kept, kept_scales)]
    arrays[8:12] = [None, None, *tables]
    got = call(grouped_gemm_dglu, framework, arrays, n=N, b_major=major, **options)
    for x, y in zip(got, want, strict=True):
        assert (x is None) == (y is None)
        assert x is None or x.tobytes() == y.tobytes()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_clamps_are_inclusive_and_cut_the_gradient_off(framework: str) -> None:
    high, low = 2.0, -1.0
    gates, ups = np.zeros((1, 32)), np.zeros((1, 32))
    gates[0, :4] = [high, np.nextafter(np.float32(high), np.float32(3)), -50, 0.5]
    ups[0, :8] = [0.5, 0.5, 0.5, low, high, -1.001, 2.001, 0.5]
    gates[0, 4:8] = 1
    c = np.hstack([gates, ups]).astype(np.float32)
    a, b, one = (
        plain(np.random.default_rng(0), (1, 8)) * 0 + 1,
        np.ones((1, 32, 8), STORED["bfloat16"]),
        np.ones(1, "f4"),
    )
    d = call(
        grouped_gemm_dglu,
        framework,
        [a, c, None, np.array([1], np.int32), one, one, one, None, b],
        act_func="dgeglu",
        d_dtype="float32",
        glu_clamp_max=high,
        glu_clamp_min=low,
        geglu_alpha=1.0,
    )[0][0]
    by_gate, by_up = d[:32], d[32:]
    assert by_gate[1] == 0
    assert by_up[5] == by_up[6] == 0
    s = 1 / (1 + np.exp(-high))
    np.testing.assert_allclose(by_gate[0], 8 * 1.5 * s * (1 + high * (1 - s)), rtol=1e-5)
    s = 1 / (1 + np.exp(-1.0))
    np.testing.assert_allclose(by_up[[4, 7]], 8 * s, rtol=1e-5)
    np.testing.assert_allclose(by_up[3], 8 * 0.5 / (1 + np.exp(-0.5)), rtol=1e-5)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_beta_of_dgeglu_counts_for_bf16_alone(framework: str) -> None:
    a, b, c, off, given, *_ = whole_problem([5, 3], 8)
    c = (c / 128).astype(STORED["bfloat16"])
    scaled_arrays = arrays_of(a, b, c, off, given)
    values = [a.exact()[..., 0].astype(STORED["bfloat16"]), weights(b).astype(STORED["bfloat16"])]
    bf16 = [values[0], c, None, off, *given, values[1]]
    options = {"act_func": "dgeglu", "d_dtype": "float32"}
    twice = [given[0], given[1] * 4, *given[2:]]

    def both(arrays: list[Any], factor: list[Any], vec: int) -> list[Any]:
        changed = [*arrays[:4], *factor, *arrays[8:]]
        return [call(grouped_gemm_dglu, framework, x, sf_vec_size=vec, **options)[0] for x in (arrays, changed)]

    one, other = both(scaled_arrays, twice, 32)
    np.testing.assert_array_equal(one, other)
    one, other = both(bf16, twice, 16)
    assert not np.array_equal(one, other)
    ones = [given[0], np.ones_like(given[1]), *given[2:]]
    same = call(grouped_gemm_dglu, framework, [*bf16[:4], *ones, bf16[8]], **options)[0]
    np.testing.assert_array_equal(same, call(grouped_gemm_dglu, framework, scaled_arrays, sf_vec_size=32, **options)[0])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rounded_gradients_and_the_activation(framework: str) -> None:
    rng, off = np.random.default_rng(3), ends([3, 0, 5])
    a, b = plain(rng, (10, K)), plain(rng, (3, N, K))
    c = rng.standard_normal((10, 2 * N)).astype(STORED["bfloat16"])
    alpha, beta, prob, old = factors(rng, off, 10)
    arrays = [a, c, None, off, alpha, beta, prob, old, b]
    options: dict[str, Any] = {"act_func": "dgeglu", "d_dtype": "float32"}
    found = call(grouped_gemm_dglu, framework, arrays, with_activation=True, round_dgrad_to_input_dtype=True, **options)
    r = by_row(alpha.astype(np.float64) ** 2, off, 10)[:, None] * product(value_of(a), value_of(b), off)
    h = by_row(beta, off, 10)[:, None] * value_of(c)
    p = np.nan_to_num(prob.astype(np.float64))[:, None]
    act = forward("geglu", h[:, GATES], h[:, UPS])
    want = act * p
    assert found[7].dtype == STORED["bfloat16"]
    assert_within(value_of(found[7]), want, storing_error(want, "bfloat16") + 1e-5, "bfloat16", "activation")
    by_gate, by_up = slopes("geglu", h[:, GATES], h[:, UPS])
    rounded = cast(r, "bfloat16")
    exact = spread(rounded * p * by_gate, rounded * p * by_up)
    near = np.abs(found[0] - exact) <= 1e-4 * np.abs(exact) + 1e-4
    assert near.mean() > 0.99  # a sum next to a midpoint may be rounded the other way
    unrounded = call(grouped_gemm_dglu, framework, arrays, **options)
    assert unrounded[7] is None
    assert (np.abs(unrounded[0] - exact) > 1e-3 * np.abs(exact) + 1e-4).any()


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_prob_and_dprob_left_out(framework: str) -> None:
    a, b, c, off, given, _, sums = whole_problem([5, 3], 8)
    arrays = arrays_of(a, b, c, off, [*given[:2], None, None])
    without = call(grouped_gemm_dglu, framework, arrays, sf_vec_size=32)
    arrays[6] = np.ones(8, np.float32)
    ones = call(grouped_gemm_dglu, framework, arrays, sf_vec_size=32, with_dprob=True)
    assert without[0].tobytes() == ones[0].tobytes()
    assert without[2] is None
    np.testing.assert_array_equal(ones[2], sums)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nan_stays_in_its_expert(framework: str) -> None:
    a, b, c, off, given, *_ = whole_problem([32, 0, 64], 96)
    c[40, UPS[3]] = np.nan
    d, _, dprob, dbias, amax, *_ = call(
        grouped_gemm_dglu, framework, arrays_of(a, b, c, off, given), sf_vec_size=32, generate_dbias=True
    )
    spoiled = np.isnan(value_of(d))
    assert spoiled[40, GATES[3]]
    assert spoiled.sum() <= 2
    assert np.isnan(dprob[40])
    assert np.isnan(dprob).sum() == 1
    assert np.isnan(value_of(dbias)[2, GATES[3]])
    assert np.isnan(value_of(dbias)).sum() <= 2
    assert np.isnan(amax[2, 0, 0])
    assert np.isfinite(amax[0]).all()
    assert np.isneginf(amax[1]).all()


@pytest.mark.parametrize(("rows", "framework"), [*each_on_host([0, 9]), (0, "jit")])
def test_without_rows(rows: int, framework: str) -> None:
    a, b, c, off, given, *_ = whole_problem([0, 0], rows)
    d, d_col, dprob, dbias, amax, row, col, _ = call(
        grouped_gemm_dglu,
        framework,
        arrays_of(a, b, c, off, given, 1.0),
        sf_vec_size=32,
        d_dtype=E4M3,
        generate_dbias=True,
        with_amax=True,
        discrete_col_sfd=True,
    )
    assert d.shape == d_col.shape == (rows, 2 * N)
    np.testing.assert_array_equal(dprob, given[3])
    assert dbias.shape == (2, 2 * N, 1)
    assert not value_of(dbias).any()
    assert np.isneginf(amax).all()
    for x in (d, d_col, row, col):
        assert not x.view(np.uint8).any()
    assert (row.shape[1], col.shape[2]) == (-(-rows // 128),) * 2


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_column_scales_of_each_expert(framework: str) -> None:
    a, b, c, off, given, exact, _ = whole_problem([0, 128, 0, 256, 128], 640)
    *_, col, _ = call(
        grouped_gemm_dglu,
        framework,
        arrays_of(a, b, c, off, given, 1.0),
        sf_vec_size=32,
        d_dtype=E4M3,
        discrete_col_sfd=True,
    )
    want = expert_scales(quantised(exact, E4M3, 1.0, 0, norm_first=True)[1].T, off, 640, 32)
    np.testing.assert_array_equal(col.view(np.uint8).reshape(-1), want)


def test_a_single_group_takes_all_rows() -> None:
    a, b, c, _, given, *_ = whole_problem([20], 20)
    both = [
        grouped_gemm_dglu(
            *arrays_of(a, b, c, np.array([end], np.int32), given),
            sf_vec_size=32,
            use_single_group_runtime_offsets=single,
        )
        for end, single in ((3, True), (20, False))
    ]
    assert both[0][0].tobytes() == both[1][0].tobytes()
