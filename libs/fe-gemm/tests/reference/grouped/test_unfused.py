"""``grouped_gemm``: the reference against loops in float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
import torch
from naive_gemm import assert_within, cast, storing_error, value_of
from naive_grouped import (
    ALL_FRAMEWORKS,
    BF16,
    FRAMEWORKS,
    ROWS,
    SIZES,
    by_row,
    call,
    each_on_host,
    ends,
    plain,
    product,
    tail_is,
)

from fe_gemm.reference.grouped import grouped_gemm
from fe_runtime.testing import to_framework, to_numpy

N, K = 40, 48


def problem(sizes: list[int], rows: int = ROWS, whole: bool = False, n: int = N, k: int = K) -> list[Any]:
    """Return A, offsets, alpha, B (E, N, K), bias (N, E) and prob; the tail of A and prob is NaN."""
    rng, off = np.random.default_rng(0), ends(sizes)
    a, b = plain(rng, (rows, k), whole), plain(rng, (len(sizes), n, k), whole)
    alpha = rng.choice([0.5, 1.0, -2.0], len(sizes)) if whole else rng.standard_normal(len(sizes))
    prob = rng.choice([0.25, 1.0, 2.0], rows) if whole else rng.uniform(0, 1, rows)
    bias = rng.integers(-8, 8, (len(sizes), n)) if whole else rng.standard_normal((len(sizes), n))
    a[off[-1] :], prob[off[-1] :] = np.nan, np.nan
    return [a, off, alpha.astype(np.float32), b, bias.astype(np.float32).T, prob.astype(np.float32)]


def expected(a: Any, off: Any, alpha: Any, b: Any, bias: Any, prob: Any) -> tuple[Any, Any]:
    c = by_row(alpha, off, len(a))[:, None] * product(a, b, off)
    factor = np.nan_to_num(prob.astype(np.float64))[:, None]
    if bias is None:
        return c * factor, c
    c = c + by_row(value_of(bias).T, off, len(a)) * factor
    return c, c


@pytest.mark.parametrize("framework", ALL_FRAMEWORKS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_whole_numbers_are_exact(name: str, with_bias: bool, framework: str) -> None:
    a, off, alpha, b, bias, prob = problem(SIZES[name], whole=True)
    bias = bias if with_bias else None
    d, c = call(
        grouped_gemm,
        framework,
        [a, off, alpha, b, bias, None, prob],
        c_dtype="float32",
        d_dtype="float16",
        generate_c=True,
    )
    want_d, want_c = expected(a, off, alpha, b, bias, prob)
    np.testing.assert_array_equal(value_of(d), cast(want_d, "float16"))
    np.testing.assert_array_equal(c, want_c)
    assert tail_is(d, off, 0)
    assert tail_is(c, off, 0)


@pytest.mark.parametrize(
    ("dtype", "framework"), [*each_on_host(["bfloat16", "float16", "float32"]), ("float32", "jit")]
)
def test_every_result_is_within_its_bound(dtype: str, framework: str) -> None:
    for with_bias in (False, True):
        a, off, alpha, b, bias, prob = problem(SIZES["empty first, middle, last"])
        bias = bias if with_bias else None
        d, c = call(
            grouped_gemm, framework, [a, off, alpha, b, bias, None, prob], c_dtype=dtype, d_dtype=dtype, generate_c=True
        )
        size = by_row(np.abs(alpha), off, len(a))[:, None] * product(abs(a), abs(b), off)
        for got, want in zip((d, c), expected(a, off, alpha, b, bias, prob), strict=True):
            assert_within(value_of(got), want, storing_error(want, dtype) + 2.0**-20 * size + 2.0**-22, dtype)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("form", ["legacy", "canonical", "n-major", "legacy n-major"])
def test_forms_of_the_operands(form: str, framework: str) -> None:
    a, off, alpha, b, _, prob = problem(SIZES["none empty"], whole=True)
    want, _ = expected(a, off, alpha, b, None, prob)
    by_n = np.ascontiguousarray(b.transpose(0, 2, 1))
    given, major = {
        "legacy": (b.transpose(1, 2, 0), "k"),
        "canonical": (b, "k"),
        "n-major": (by_n, "n"),
        "legacy n-major": (by_n.transpose(2, 1, 0), "n"),
    }[form]
    for rank in (2, 3):
        first, factor = (a[:, :, None], prob[:, None, None]) if rank == 3 else (a, prob)
        d, c = call(grouped_gemm, framework, [first, off, alpha, given, None, None, factor], b_major=major)
        assert c is None
        assert d.dtype == BF16
        assert d.shape == ((ROWS, N, 1) if rank == 3 else (ROWS, N))
        np.testing.assert_array_equal(value_of(d).reshape(ROWS, N), cast(want, "bfloat16"))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("major", ["k", "n"])
def test_weights_behind_addresses(major: str, framework: str) -> None:
    a, off, alpha, b, _, prob = problem([5, 0, 7, 4], 16, whole=True)
    b[3] = b[0]
    kind = "jax" if framework == "jit" else framework
    stored = [to_framework(np.ascontiguousarray(x if major == "k" else x.T), kind) for x in b[[2, 0, 1]]]
    order = [1, 2, 0, 1]  # of any order, and one shared
    address = [stored[i].ctypes.data if kind == "numpy" else _pointer(stored[i]) for i in order]
    table = np.array(address, np.int64)
    given = [a, off, alpha, None, None, table.view(np.uint8) if kind == "jax" else table, prob]
    d, _ = call(grouped_gemm, framework, given, n=N, b_dtype="bfloat16", b_major=major)
    np.testing.assert_array_equal(value_of(d), cast(expected(a, off, alpha, b, None, prob)[0], "bfloat16"))


def _pointer(x: Any) -> int:
    return int(x.data_ptr() if isinstance(x, torch.Tensor) else x.unsafe_buffer_pointer())


def test_addresses_of_experts_without_rows_are_not_followed() -> None:
    a, off, alpha, b, _, prob = problem([5, 0, 3], 8, whole=True)
    table = np.array([b[0].ctypes.data, 16, b[2].ctypes.data], np.int64)
    d, _ = grouped_gemm(a, off, alpha, None, None, table, prob, n=N, b_dtype="bfloat16")
    np.testing.assert_array_equal(value_of(d), cast(expected(a, off, alpha, b, None, prob)[0], "bfloat16"))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_bias_is_scaled_by_prob_and_the_product_is_not(framework: str) -> None:
    a, b = np.ones((2, 16), BF16), np.ones((1, 32, 16), BF16)
    bias, prob = np.full((1, 32), 8, BF16).T, np.array([0.5, 0.25], np.float32)
    off, alpha = np.array([2], np.int32), np.array([3], np.float32)
    d, c = call(grouped_gemm, framework, [a, off, alpha, b, bias, None, prob], generate_c=True)
    for x in (d, c):
        np.testing.assert_array_equal(value_of(x), [[48 + 4] * 32, [48 + 2] * 32])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_many_experts_and_the_sizes_of_a_real_layer(framework: str) -> None:
    for sizes, rows in [([162, 0, 2577, 446, 0, 83], 3268), ([e % 3 if e % 97 < 2 else 0 for e in range(1024)], 40)]:
        a, off, alpha, b, _, prob = problem(sizes, max(rows, sum(sizes)), whole=True, n=8, k=16)
        d, _ = call(grouped_gemm, framework, [a, off, alpha, b, None, None, prob], d_dtype="float32")
        np.testing.assert_array_equal(d, expected(a, off, alpha, b, None, prob)[0])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_numbers_of_one_row_or_expert_stay_there(framework: str) -> None:
    a, off, alpha, b, _, prob = problem([3, 0, 4], 9, whole=True)
    a[1], b[1], alpha[1] = np.nan, np.inf, np.nan  # expert 1 has no rows
    d, _ = call(grouped_gemm, framework, [a, off, alpha, b, None, None, prob])
    spoiled = np.isnan(value_of(d))
    assert spoiled[1].all()
    assert not np.delete(spoiled, 1, axis=0).any()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_without_rows(framework: str) -> None:
    a, off, alpha, b, _, prob = problem([0, 0], 0)
    d, c = call(grouped_gemm, framework, [a, off, alpha, b, None, None, prob], generate_c=True)
    assert d.shape == c.shape == (0, N)


def test_other_offsets_compile_nothing_new() -> None:
    a, _, alpha, b, _, prob = problem([3, 0, 4], 9, whole=True)
    compiled = jax.jit(functools.partial(grouped_gemm, d_dtype="float32"))
    given = [np.nan_to_num(x) for x in (a, alpha, b, prob)]
    first, factor, weight, prob_ = (to_framework(x, "jax") for x in given)
    for sizes in ([3, 0, 4], [0, 9, 0], [0, 0, 0], [1, 1, 1]):
        off = ends(sizes)
        want, _ = expected(given[0], off, alpha, b, None, given[3])
        np.testing.assert_array_equal(np.asarray(compiled(first, off, factor, weight, prob=prob_)[0]), want)
    assert compiled._cache_size() == 1


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_sums_in_double_precision(framework: str) -> None:
    a, b, one = np.array([[1.0, 2.0**-30, -1.0]], BF16), np.ones((1, 1, 3), BF16), np.ones(1, np.float32)
    given = [a, np.array([1], np.int32), one, b, None, None, one]
    d, _ = call(grouped_gemm, framework, given, d_dtype="float32", accumulate="float64")
    assert d.item() == 2.0**-30


def test_malformed_offsets_reach_no_wrong_address() -> None:
    a, _, alpha, b, _, prob = problem([3, 0, 4], 9, whole=True)
    for off in ([5, 3, 900], [-7, 2, -1], [2**31 - 1] * 3):
        for framework in FRAMEWORKS:
            (d, _) = call(grouped_gemm, framework, [a, np.array(off, np.int32), alpha, b, None, None, prob])
            assert to_numpy(d).shape == (9, N)
