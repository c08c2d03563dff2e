"""``grouped_gemm_glu``: the reference against loops in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from naive_gemm import E4M3, E5M2, E8M0, FORMATS, STORED, assert_within, cast, encode, storing_error, value_of
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

from fe_gemm.reference.grouped import grouped_gemm_glu
from fe_runtime.testing import to_framework

N, K = 128, 64
ACTIVATIONS: dict[str, dict[str, float]] = {
    "swiglu": {},
    "geglu": {},
    "geglu other": {"linear_offset": 0.25, "geglu_alpha": 1.3, "glu_clamp_max": 1.5, "glu_clamp_min": -0.75},
    "situglu": {},
    "situglu other": {"situ_beta1": 1.5, "situ_beta2": 3.0},
}


TRACED = ("swiglu", "geglu other", "situglu")
RESULTS = [
    *each_on_host([(E4M3, 0.3), (E5M2, 2.0**20), ("bfloat16", 1.5), ("float16", 1.0)]),
    *(((E4M3, 0.3), "jit"), (("bfloat16", 1.5), "jit"), ((E4M3, 0.3), "jax")),
]
"""dtypes of quantised results, norm constants, and frameworks."""


def factors(rng: Any, off: Any, rows: int, whole: bool = False) -> tuple[Any, Any, Any]:
    """Return alpha, bias (N, E) and prob, NaN in the tail."""
    count = len(off)
    alpha = rng.choice([0.5, 1.0, 2.0], count) if whole else rng.uniform(0.5, 1.5, count)
    bias = rng.integers(-8, 8, (count, N)) if whole else rng.standard_normal((count, N))
    prob = rng.choice([0.25, 1.0, -2.0], rows) if whole else rng.uniform(0, 1, rows)
    prob[off[-1] :] = np.nan
    return alpha.astype(np.float32), bias.astype(np.float32).T, prob.astype(np.float32)


def pre_activation(values: Any, weight: Any, off: Any, alpha: Any, bias: Any) -> Any:
    h = by_row(alpha, off, len(values))[:, None] * product(values, weight, off)
    return h if bias is None else h + by_row(value_of(bias).T, off, len(values))


def activated(h: Any, name: str, prob: Any, off: Any, **given: float) -> Any:
    gates, ups = columns(h.shape[1] // 2)
    x = forward(name, h[:, gates], h[:, ups], **given)
    if prob is not None:
        x = x * np.nan_to_num(value_of(prob))[:, None]
    x[off[-1] :] = 0
    return x


def maxima(x: Any, off: Any) -> Any:
    return np.array([[np.abs(x[members(off, e)]).max(initial=-np.inf)] for e in range(len(off))])


@pytest.mark.parametrize(("case", "framework"), [*each_on_host(ACTIVATIONS), *((case, "jit") for case in TRACED)])
def test_bf16_activations_are_within_their_bound(case: str, framework: str) -> None:
    rng, off = np.random.default_rng(1), ends(SIZES["empty first, middle, last"])
    a, b = plain(rng, (ROWS, K)), plain(rng, (len(off), N, K), size=0.25)
    alpha, bias, prob = factors(rng, off, ROWS)
    a[off[-1] :] = np.nan
    name, given = case.split()[0], ACTIVATIONS[case]
    h = pre_activation(value_of(a), value_of(b), off, alpha, bias)
    want = activated(h, name, prob, off, **given)
    arrays = [a, None, off, alpha, b, None, bias, None, None, None, prob]
    c, d, *rest = call(
        grouped_gemm_glu,
        framework,
        arrays,
        act_func=name,
        c_dtype="float32",
        d_dtype="float32",
        generate_c=True,
        **given,
    )
    assert rest == [None] * 4
    error = 2.0**-18 * pre_activation(abs(value_of(a)), abs(value_of(b)), off, alpha, abs(bias))
    assert_within(c, h, storing_error(h, "float32") + error, "float32", "c")
    gates, ups = columns(N // 2)
    by_gate, by_up = slopes(name, h[:, gates], h[:, ups], **given)
    through = np.abs(by_gate * error[:, gates]) + np.abs(by_up * error[:, ups])
    assert_within(d, want, 2.0**-18 * np.abs(want) + through + 1e-6, "float32", "d")
    assert tail_is(c, off, 0)
    assert tail_is(d, off, 0)


@pytest.mark.parametrize(("name", "framework"), [*each_on_host(FORMATS), ("mxfp8_e5m2", "jit"), ("nvfp4", "jit")])
def test_block_scaled_operands(name: str, framework: str) -> None:
    rng, off = np.random.default_rng(2), ends(SIZES["none empty"])
    a, b = scaled(rng, name, ROWS, N, K, len(off))
    alpha, _, prob = factors(rng, off, ROWS)
    alpha *= 2.0**-8 if FORMATS[name][0] != "float4_e2m1fn" else 2.0**-4
    a.scales[off[-1] :] = 0x7F if FORMATS[name][1] == E4M3 else 0xFF
    h = pre_activation(np.nan_to_num(a.exact()[..., 0]), weights(b), off, alpha, None)
    error = 2.0**-18 * pre_activation(np.nan_to_num(abs(a.exact()[..., 0])), abs(weights(b)), off, alpha, None)
    rounded = prob.astype(STORED["bfloat16"])
    arrays = [a.elements()[:, :, 0], a.blocked("physical", 1), off, alpha, canonical(b.elements())]
    arrays += [b.blocked("physical", 2).reshape(-1), None, None, None, None, rounded]
    c, d, d_col, amax, *scales = call(grouped_gemm_glu, framework, arrays, sf_vec_size=a.vec)
    assert_within(value_of(c), h, storing_error(h, "bfloat16") + error, "bfloat16", "c")
    want = activated(h, "swiglu", rounded, off)
    gates, ups = columns(N // 2)
    by_gate, by_up = slopes("swiglu", h[:, gates], h[:, ups])
    through = np.abs(by_gate * error[:, gates]) + np.abs(by_up * error[:, ups]) + 2.0**-18 * np.abs(want) + 1e-30
    assert_within(value_of(d), want, storing_error(want, "bfloat16") + through, "bfloat16", "d")
    np.testing.assert_allclose(amax, maxima(want, off), rtol=1e-4)
    assert d_col is None
    assert scales == [None, None]
    assert tail_is(d, off, 0)


def whole_problem(sizes: list[int], rows: int = ROWS, element: str = "mxfp8_e4m3") -> tuple[Any, ...]:
    """Return operands whose gates are far from 0, or 0: then the sigmoid is 0, 1/2 or 1 and the result exact."""
    rng, off = np.random.default_rng(3), ends(sizes)
    a, b = scaled(rng, element, rows, N, K, len(off), whole=True)
    a.codes[:, 0], b.codes[:, 0], a.scales[:, 0], b.scales[:, 0] = encode(16.0, a.element), 0, 127, 127
    gates, _ = columns(N // 2)
    b.codes[gates, 0] = encode(rng.choice([-256.0, 256.0], (N // 2, len(off))), b.element)
    b.codes[gates[3]] = 0
    alpha, _, prob = factors(rng, off, rows, whole=True)
    h = pre_activation(a.exact()[..., 0], weights(b), off, alpha, None)
    assert ((np.abs(h[:, gates]) > 200) | (h[:, gates] == 0)).all()
    exact = activated(h, "swiglu", prob, off)
    return a, b, off, alpha, prob, h, np.where(np.abs(exact) < 1e-30, 0, exact)


def scaled_arrays(a: Any, b: Any, off: Any, alpha: Any, prob: Any, norm: float | None) -> list[Any]:
    const = None if norm is None else np.array([norm], np.float32)
    return [
        *(a.elements()[:, :, 0], a.blocked("physical", 1), off, alpha, canonical(b.elements())),
        *(b.blocked("physical", 2), None, None, None, const, prob),
    ]


@pytest.mark.parametrize(("result", "framework"), RESULTS)
def test_quantised_results_have_the_same_bytes(result: tuple[str, float], framework: str) -> None:
    dtype, norm = result
    a, b, off, alpha, prob, h, exact = whole_problem(SIZES["empty first, middle, last"])
    arrays = scaled_arrays(a, b, off, alpha, prob, norm)
    c, d, d_col, amax, row, col = call(grouped_gemm_glu, framework, arrays, sf_vec_size=32, c_dtype=E5M2, d_dtype=dtype)
    np.testing.assert_array_equal(value_of(c), cast(h, E5M2))
    for got, scales, axis in ((d, row, 1), (d_col, col, 0)):
        codes, want = quantised(exact, dtype, norm, axis)
        got = without_negative_zero(got.view(np.uint8)) if dtype in (E4M3, E5M2) else got.astype(np.float64) + 0.0
        np.testing.assert_array_equal(got, codes if codes.dtype == np.uint8 else codes.astype(np.float64))
        assert scales.dtype == STORED[E8M0]
        np.testing.assert_array_equal(scales.view(np.uint8).reshape(-1), row_scales(want if axis else want.T))
    if dtype in (E4M3, E5M2):
        assert amax is None
    else:
        np.testing.assert_array_equal(amax, maxima(exact, off))
        assert np.isneginf(amax[[0, 2, 3, 6]]).all()


@pytest.mark.parametrize(("sizes", "rows"), [([0, 128, 0, 256, 128], 640), ([256, 128, 0, 128, 40], 640)])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_column_scales_of_each_expert(sizes: list[int], rows: int, framework: str) -> None:
    a, b, off, alpha, prob, _, exact = whole_problem(sizes, rows)
    arrays = scaled_arrays(a, b, off, alpha, prob, 1.0)
    *_, d_col, _, _, col = call(
        grouped_gemm_glu, framework, arrays, sf_vec_size=32, d_dtype=E4M3, discrete_col_sfd=True
    )
    codes, scales = quantised(exact, E4M3, 1.0, 0)
    np.testing.assert_array_equal(without_negative_zero(d_col.view(np.uint8)), codes)
    want = expert_scales(scales.T, off, rows, 32)
    np.testing.assert_array_equal(col.view(np.uint8).reshape(-1), want)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_column_scales_take_the_norm_constant_last(framework: str) -> None:
    a, b, off, alpha, prob, _, exact = whole_problem(SIZES["one has all"])
    blocks = np.array([np.abs(exact[m : m + 32]).max(axis=0) for m in range(0, ROWS, 32)], np.float32)
    reciprocal = np.float32(1) / np.float32(448)
    for norm in np.float32(448) / np.unique(blocks[blocks > 0]):
        one, other = (blocks * reciprocal) * norm, blocks * (reciprocal * norm)
        if ((one <= 1) != (other <= 1)).any():
            break
    else:
        raise AssertionError("no constant tells the orders apart")
    arrays = scaled_arrays(a, b, off, alpha, prob, float(norm))
    col = call(grouped_gemm_glu, framework, arrays, sf_vec_size=32, d_dtype=E4M3)[5]
    want = quantised(exact, E4M3, float(norm), 0)[1]
    np.testing.assert_array_equal(col.view(np.uint8).reshape(-1), row_scales(want.T))


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_legacy_forms(framework: str) -> None:
    a, b, off, alpha, prob, h, _ = whole_problem(SIZES["none empty"])
    canonical_results = call(
        grouped_gemm_glu, framework, scaled_arrays(a, b, off, alpha, prob, 1.0), sf_vec_size=32, d_dtype=E4M3
    )
    arrays = [
        *(a.elements(), a.blocked("logical", 3), off, alpha, b.elements(), b.blocked("logical", 4), None, None, None),
        *(np.ones(1, np.float32), prob[:, None, None]),
    ]
    results = call(grouped_gemm_glu, framework, arrays, sf_vec_size=32, d_dtype=E4M3)
    for got, want in zip(results[:3], canonical_results[:3], strict=True):
        assert got.shape == (*want.shape, 1)
        assert got.tobytes() == want.tobytes()
    for got, want in zip(results[4:], canonical_results[4:], strict=True):
        assert got.shape[:2] == (32, 4)
        np.testing.assert_array_equal(got.view(np.uint8).transpose(5, 2, 4, 0, 1, 3), want.view(np.uint8))
    np.testing.assert_array_equal(value_of(results[0])[..., 0], cast(h, "bfloat16"))


@pytest.mark.parametrize("framework", ["torch", "jit"])
def test_packed_fp4_of_torch_and_scales_as_bytes(framework: str) -> None:
    rng, off = np.random.default_rng(4), ends(SIZES["none empty"])
    a, b = scaled(rng, "mxfp4", ROWS, N, K, len(off), whole=True)
    alpha, _, prob = factors(rng, off, ROWS, whole=True)
    arrays = scaled_arrays(a, b, off, alpha, prob, None)
    want = call(grouped_gemm_glu, "numpy", arrays, sf_vec_size=32, c_dtype="float16")[0]
    arrays[1], arrays[5] = arrays[1].view(np.uint8), arrays[5].view(np.int8)
    if framework == "jit":
        got = call(grouped_gemm_glu, "jit", arrays, sf_vec_size=32, c_dtype="float16")[0]
    else:
        given = [None if x is None else to_framework(x, "torch") for x in arrays]
        given[0], given[4] = (given[i].view(torch.float4_e2m1fn_x2) for i in (0, 4))
        got = grouped_gemm_glu(*given, sf_vec_size=32, c_dtype="float16")[0].numpy()
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_weights_and_scales_behind_addresses(framework: str) -> None:
    a, b, off, alpha, prob, *_ = whole_problem([5, 0, 20, 7], 40)
    arrays = scaled_arrays(a, b, off, alpha, prob, 1.0)
    options = {"sf_vec_size": 32, "d_dtype": E4M3}
    want = call(grouped_gemm_glu, "numpy", arrays, **options)
    kept = [np.ascontiguousarray(x) for x in canonical(b.elements())]
    kept_scales = [np.ascontiguousarray(x) for x in b.blocked("physical", 5)]
    tables = [np.array([x.ctypes.data for x in stored], np.int64) for stored in (kept, kept_scales)]
    if framework == "jit":
        tables = [table.view(np.uint8) for table in tables]
    arrays[4], arrays[5], arrays[7:9] = None, None, tables
    got = call(grouped_gemm_glu, framework, arrays, n=N, b_dtype=E4M3, **options)
    for x, y in zip(got, want, strict=True):
        assert (x is None) == (y is None)
        assert x is None or x.tobytes() == y.tobytes()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nan_wins_its_blocks_and_its_maximum(framework: str) -> None:
    a, b, off, alpha, prob, _, exact = whole_problem([64, 0, 96, 0, 0, 0, 0])
    b.codes[columns(N // 2)[1][5], 7, 2] = 0x7F  # column 5 of expert 2, rows 64 and after
    arrays = scaled_arrays(a, b, off, alpha, prob, 1.0)
    options = {"sf_vec_size": 32, "c_dtype": E5M2, "d_dtype": E4M3}
    _, d, d_col, _, row, col = call(grouped_gemm_glu, framework, arrays, **options)
    exact[64:160, 5] = np.nan
    for got, scales, axis in ((d, row, 1), (d_col, col, 0)):
        codes, want = quantised(exact, E4M3, 1.0, axis)
        spoiled = np.isnan(value_of(got))
        np.testing.assert_array_equal(spoiled, (codes & 0x7F) == 0x7F)
        assert spoiled[64:160, :32].all() if axis else spoiled[64:160, 5].all()
        assert not spoiled[:64].any()
        assert not spoiled[160:].any()
        np.testing.assert_array_equal(scales.view(np.uint8).reshape(-1), row_scales(want if axis else want.T))
    amax = call(grouped_gemm_glu, framework, [*arrays[:9], None, prob], sf_vec_size=32, c_dtype=E5M2)[3]
    assert np.isfinite(amax[0, 0])
    assert np.isneginf(amax[[1, 3]]).all()
    assert np.isnan(amax[2, 0])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_single_group_takes_all_rows(framework: str) -> None:
    rng = np.random.default_rng(5)
    a, b = plain(rng, (20, K), whole=True), plain(rng, (1, N, K), whole=True)
    one, prob = np.ones(1, np.float32), np.ones(20, np.float32)
    arrays = [a, None, np.array([7], np.int32), one, b, None, None, None, None, None, prob]
    c = call(grouped_gemm_glu, framework, arrays, generate_c=True, use_single_group_runtime_offsets=True)[0]
    np.testing.assert_array_equal(value_of(c), cast(product(value_of(a), value_of(b), [20]), "bfloat16"))
    assert call(grouped_gemm_glu, framework, arrays)[0] is None


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_without_rows(framework: str) -> None:
    a, b, off, alpha, prob, *_ = whole_problem([0, 0], 0)
    for discrete in (False, True):
        c, d, d_col, amax, row, col = call(
            grouped_gemm_glu,
            framework,
            scaled_arrays(a, b, off, alpha, prob, 1.0),
            sf_vec_size=32,
            discrete_col_sfd=discrete,
            with_amax=True,
        )
        assert c.shape == (0, N)
        assert d.shape == d_col.shape == (0, N // 2)
        assert row.shape == (1, 0, 1, 32, 4, 4)
        assert col.shape == (1, 1, 0, 32, 4, 4)
        assert np.isneginf(amax).all()
        assert amax.shape == (2, 1)


def test_prob_left_out_is_one_and_an_unknown_activation_is_named() -> None:
    a, b, off, alpha, prob, *_ = whole_problem([5, 20], 25)
    arrays = scaled_arrays(a, b, off, alpha, prob, None)
    without = grouped_gemm_glu(*arrays[:10], sf_vec_size=32)[1]
    ones = grouped_gemm_glu(*arrays[:10], np.ones(25, np.float32), sf_vec_size=32)[1]
    assert without.tobytes() == ones.tobytes()
    with pytest.raises(ValueError, match="act_func"):
        grouped_gemm_glu(*arrays[:10], sf_vec_size=32, act_func="relu")


def test_jit_and_eager_agree_bit_for_bit() -> None:
    rng, off = np.random.default_rng(6), ends(SIZES["none empty"])
    a, b = scaled(rng, "mxfp8_e4m3", ROWS, N, K, len(off))
    alpha, _, prob = factors(rng, off, ROWS)
    arrays = scaled_arrays(a, b, off, alpha, prob, 0.3)
    options = {"sf_vec_size": 32, "c_dtype": E5M2, "d_dtype": E4M3}
    eager, jitted = (call(grouped_gemm_glu, framework, arrays, **options) for framework in ("jax", "jit"))
    for x, y in zip(eager, jitted, strict=True):
        assert (x is None) == (y is None)
        assert x is None or x.tobytes() == y.tobytes()
