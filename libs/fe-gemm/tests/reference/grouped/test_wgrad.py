"""``grouped_gemm_wgrad``: the reference against loops in float64."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
from naive_gemm import (
    E2M1,
    E4M3,
    E8M0,
    FORMATS,
    STORED,
    VALUES,
    assert_within,
    cast,
    operand,
    pack,
    storing_error,
    value_of,
)
from naive_grouped import (
    ALL_FRAMEWORKS,
    BF16,
    FRAMEWORKS,
    ROWS,
    SIZES,
    call,
    canonical,
    each_on_host,
    ends,
    expert_scales,
    members,
    plain,
    row_offset,
    scaled,
)

from fe_gemm.reference.grouped import grouped_gemm_dglu, grouped_gemm_glu, grouped_gemm_wgrad
from fe_runtime.testing import to_framework

M, N = 24, 40


def expected(a: Any, b: Any, off: Any) -> Any:
    """Return (E, M, N) of (M, T) and (T, N), one token after the other."""
    found = np.zeros((len(off), a.shape[0], b.shape[1]))
    for e in range(len(off)):
        for t in members(off, e):
            found[e] += a[:, t, None] * b[None, t]
    return found


def bf16_problem(sizes: list[int], tokens: int = ROWS, whole: bool = True) -> tuple[Any, Any, Any]:
    """Return A (M, T), B (T, N) and offsets; the tail is NaN."""
    rng, off = np.random.default_rng(0), ends(sizes)
    a, b = plain(rng, (M, tokens), whole), plain(rng, (tokens, N), whole)
    a[:, off[-1] :], b[off[-1] :] = np.nan, np.nan
    return a, b, off


@pytest.mark.parametrize("framework", ALL_FRAMEWORKS)
@pytest.mark.parametrize("name", SIZES)
def test_whole_numbers_are_exact(name: str, framework: str) -> None:
    a, b, off = bf16_problem(SIZES[name])
    for dtype in ("float32", "bfloat16"):
        (found,) = call(grouped_gemm_wgrad, framework, [a, b, None, None, off], wgrad_dtype=dtype)
        assert found.dtype == STORED[dtype]
        np.testing.assert_array_equal(value_of(found), cast(expected(value_of(a), value_of(b), off), dtype))
        for e, size in enumerate(SIZES[name]):
            assert size or found[e].tobytes() == bytes(found[e].nbytes)  # exactly +0


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_sums_are_within_their_bound(framework: str) -> None:
    a, b, off = bf16_problem(SIZES["one has nearly all"], whole=False)
    for dtype in ("float16", "float32"):
        (found,) = call(grouped_gemm_wgrad, framework, [a, b, None, None, off], wgrad_dtype=dtype)
        want = expected(value_of(a), value_of(b), off)
        size = expected(abs(value_of(a)), abs(value_of(b)), off)
        assert_within(value_of(found), want, storing_error(want, dtype) + 2.0**-19 * size, dtype)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_accumulation_rounds_the_addend_first_and_leaves_empty_experts(framework: str) -> None:
    a, b, off = bf16_problem(SIZES["empty first, middle, last"])
    old = np.random.default_rng(1).standard_normal((len(off), M, N)).astype(BF16)
    old[0, 0, :2] = [-0.0, np.nan]
    (found,) = call(grouped_gemm_wgrad, framework, [a, b, None, None, off, old], accumulate_on_output=True)
    addend = cast(expected(value_of(a), value_of(b), off), "bfloat16")
    want = cast(np.float32(value_of(old)) + np.float32(addend), "bfloat16")
    for e, size in enumerate(SIZES["empty first, middle, last"]):
        if size:
            np.testing.assert_array_equal(value_of(found[e]), want[e])
        else:
            assert found[e].tobytes() == old[e].tobytes()
    fresh = call(grouped_gemm_wgrad, framework, [a, b, None, None, off], accumulate_on_output=True)[0]
    np.testing.assert_array_equal(value_of(fresh), addend)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_majors(framework: str) -> None:
    a, b, off = bf16_problem(SIZES["none empty"])
    want = call(grouped_gemm_wgrad, framework, [a, b, None, None, off])[0]
    turned = [np.ascontiguousarray(x.T).T for x in (a, b)]
    for first, second in [(turned[0], b), (a, turned[1]), turned]:
        assert call(grouped_gemm_wgrad, framework, [first, second, None, None, off])[0].tobytes() == want.tobytes()


def ragged(x: Any, off: Any) -> Any:
    """Return (R, T) with each expert's tokens, and the tail, as a matrix of its own, one after the other."""
    parts = np.split(x, off, axis=1)
    return np.concatenate([np.ascontiguousarray(part).reshape(-1) for part in parts]).reshape(x.shape)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_ragged_order(framework: str) -> None:
    a, b, off = bf16_problem(SIZES["none empty"])
    want = cast(expected(value_of(a), value_of(b), off), "bfloat16")
    by_token, b_by_token = ragged(a, off), ragged(np.ascontiguousarray(b.T), off).T
    given = [(by_token, b)]
    if framework != "jit":  # arrays of JAX are row-major
        by_row = np.ascontiguousarray(a.T).T
        given += [(by_token, b_by_token), (by_row, b), (by_row, b_by_token)]
    for first, second in given:
        arrays = [first, second, None, None, off]
        (found,) = call(grouped_gemm_wgrad, framework, arrays, input_order="tensor_ragged")
        np.testing.assert_array_equal(value_of(found), want)


def block_scaled(name: str, sizes: list[int], tokens: int) -> tuple[Any, Any, Any, list[Any]]:
    """Return two operands (rows, T), offsets, and the bytes of their scales for each expert, NaN in the tail."""
    rng, off = np.random.default_rng(2), ends(sizes)
    sides = [operand(rng, rows, tokens, 1, name, whole=True) for rows in (M, 136)]
    scales = []
    for side in sides:
        side.scales[:, -(-off[-1] // side.vec) :] = 0x7F if side.scale == E4M3 else 0xFF
        memory = expert_scales(side.scales[..., 0], off, tokens, side.vec, np.random.default_rng(3))
        scales.append(memory.view(STORED[side.scale]))
    return *sides, off, scales


def values_of_tokens(side: Any) -> Any:
    return np.nan_to_num(side.exact()[..., 0])


@pytest.mark.parametrize(("name", "framework"), [*each_on_host(FORMATS), ("mxfp8_e4m3", "jit"), ("nvfp4", "jit")])
def test_block_scaled_operands(name: str, framework: str) -> None:
    a, b, off, scales = block_scaled(name, [0, 128, 0, 256, 128, 0], 640)
    element, _, vec = FORMATS[name]
    first, second = a.elements()[..., 0], b.elements()[..., 0]
    second = second if element == E2M1 and framework == "jit" else second.T
    want = expected(values_of_tokens(a), values_of_tokens(b).T, off)
    for shape in ((-1,), (128, -1)):
        sfa, sfb = scales[0].reshape(shape), scales[1].reshape((-1,) if shape == (-1,) else (256, -1))
        arrays = [first, second, sfa, sfb, off]
        (found,) = call(grouped_gemm_wgrad, framework, arrays, sf_vec_size=vec, wgrad_dtype="float32")
        np.testing.assert_array_equal(found, want)
        assert not found[[0, 2, 5]].any()


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_global_scales(framework: str) -> None:
    a, b, off, scales = block_scaled("nvfp4", [64, 0, 128], 256)
    ga, gb = np.array([0.5, np.nan, 3], np.float32), np.array([2, 1, -4], np.float32)
    arrays = [a.elements()[..., 0], b.elements()[..., 0].T, *scales, off, None, None, ga, gb]
    (found,) = call(grouped_gemm_wgrad, framework, arrays, sf_vec_size=16, wgrad_dtype="float32")
    want = expected(values_of_tokens(a), values_of_tokens(b).T, off) * np.nan_to_num(ga * gb)[:, None, None]
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_ragged_order_of_block_scaled_operands(framework: str) -> None:
    for name in ("mxfp8_e5m2", "nvfp4"):
        a, b, off, scales = block_scaled(name, [128, 0, 128, 256], 640)
        sides = [np.ascontiguousarray(ragged(side.codes[..., 0], off)) for side in (a, b)]
        stored = [pack(x, 1) if a.element == E2M1 else x.view(STORED[a.element]) for x in sides]
        arrays = [stored[0], stored[1].T, *scales, off]
        (found,) = call(
            grouped_gemm_wgrad,
            framework,
            arrays,
            sf_vec_size=a.vec,
            wgrad_dtype="float32",
            input_order="tensor_ragged",
        )
        np.testing.assert_array_equal(found, expected(values_of_tokens(a), values_of_tokens(b).T, off))


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_results_through_addresses(dtype: str, framework: str) -> None:
    a, b, off = bf16_problem([5, 0, 20], 30)
    want = cast(expected(value_of(a), value_of(b), off), dtype)
    for accumulates in (False, True):
        memory = [np.full((M, N), 2, STORED[dtype]) for _ in off]
        table = np.array([x.ctypes.data for x in memory], np.int64)
        found = call(
            grouped_gemm_wgrad,
            framework,
            [a, b, None, None, off, None, table],
            wgrad_dtype=dtype,
            accumulate_on_output=accumulates,
        )
        assert found == [None]
        for e, got in enumerate(memory):
            np.testing.assert_array_equal(value_of(got), cast(want[e] + 2 * accumulates, dtype))


def test_jax_does_not_write_through_addresses() -> None:
    a, b, off = bf16_problem([5, 0, 20], 30)
    table = np.zeros(3 * 8, np.uint8)
    with pytest.raises(NotImplementedError, match="addresses"):
        call(grouped_gemm_wgrad, "jax", [a, b, None, None, off, None, table])


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_column_scales_of_a_result_are_what_it_takes(framework: str) -> None:
    """The weight gradient of D_col and its scales, forward and backward, as they come out of the operations."""
    sizes, rows, n, k = [128, 0, 256, 128], 512, 64, 64
    rng, off = np.random.default_rng(4), ends(sizes)
    a, b = scaled(rng, "mxfp8_e4m3", rows, 2 * n, k, len(off))
    ones, prob, norm = np.ones(len(off), np.float32), np.ones(rows, np.float32), np.ones(1, np.float32)
    options = {"sf_vec_size": 32, "d_dtype": E4M3, "discrete_col_sfd": True}
    forward = [a.elements()[..., 0], a.blocked("physical"), off, ones / 64, canonical(b.elements())]
    forward += [b.blocked("physical"), None, None, None, norm, prob]
    c, _, h_col, _, _, h_scales = call(grouped_gemm_glu, framework, forward, **options)
    dy, w = scaled(rng, "mxfp8_e4m3", rows, n, k, len(off))
    backward = [dy.elements()[..., 0], c, dy.blocked("physical"), off, ones / 16, ones, prob, None]
    backward += [canonical(w.elements()), w.blocked("physical"), None, None, norm]
    _, d_col, *_, d_scales, _ = call(grouped_gemm_dglu, framework, backward, **options)
    arrays = [d_col.T, h_col, d_scales.reshape(-1), h_scales.reshape(-1), off]
    (found,) = call(grouped_gemm_wgrad, framework, arrays, sf_vec_size=32, wgrad_dtype="float32")
    sides = [_dequantised(x, scales, off) for x, scales in ((d_col, d_scales), (h_col, h_scales))]
    want = expected(sides[0].T, sides[1], off)
    size = expected(abs(sides[0]).T, abs(sides[1]), off)
    assert_within(found, want, 2.0**-19 * size, "float32")
    assert np.abs(want).max() > 1


def _dequantised(x: Any, scales: Any, off: Any) -> Any:
    """Return (T, R) of D_col and the bytes of its scales, looked up one by one."""
    found, memory = value_of(x).copy(), VALUES[E8M0][scales.view(np.uint8).reshape(-1)]
    tokens, rows = x.shape
    for e in range(len(off)):
        group = members(off, e)
        base = -(-rows // 128) * 128 * group.start // 32
        for p in range(len(group) // 32):
            for j in range(rows):
                at = base + row_offset(j, p, len(group) // 32)
                found[group.start + 32 * p : group.start + 32 * p + 32, j] *= memory[at]
    assert tokens == off[-1]
    return found


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_many_experts_and_no_tokens(framework: str) -> None:
    a, b, off = bf16_problem([e % 3 if e % 97 < 2 else 0 for e in range(1024)], 40)
    (found,) = call(grouped_gemm_wgrad, framework, [a[:4], b[:, :8], None, None, off], wgrad_dtype="float32")
    np.testing.assert_array_equal(found, expected(value_of(a[:4]), value_of(b[:, :8]), off))
    a, b, off = bf16_problem([0, 0], 0)
    (found,) = call(grouped_gemm_wgrad, framework, [a, b, None, None, off])
    assert found.shape == (2, M, N)
    assert not value_of(found).any()


def test_numbers_of_one_expert_stay_there() -> None:
    for framework in FRAMEWORKS:
        a, b, off = bf16_problem([10, 0, 20], 40)
        a[3, 4] = np.nan
        found = value_of(call(grouped_gemm_wgrad, framework, [a, b, None, None, off])[0])
        assert np.isnan(found[0, 3]).all()
        assert np.isnan(found).sum() == N


def test_sums_in_double_precision() -> None:
    a, b = np.array([[1, 2.0**-30, -1]], BF16), np.ones((3, 1), BF16)
    off = np.array([3], np.int32)
    for framework in ("numpy", "torch"):
        arrays = [to_framework(x, framework) for x in (a, b)]
        (found,) = grouped_gemm_wgrad(
            *arrays, None, None, to_framework(off, framework), wgrad_dtype="float32", accumulate="float64"
        )
        assert found.item() == 2.0**-30
    with pytest.raises(ValueError, match="64-bit"):
        call(grouped_gemm_wgrad, "jax", [a, b, None, None, off], accumulate="float64")


def test_scales_of_the_wrong_size_are_refused() -> None:
    a, b, off, scales = block_scaled("mxfp8_e4m3", [128, 128], 256)
    with pytest.raises(ValueError, match="scales of"):
        grouped_gemm_wgrad(a.elements()[..., 0], b.elements()[..., 0].T, scales[0][:-1], scales[1], off, sf_vec_size=32)


def test_packed_fp4_of_torch() -> None:
    a, b, off, scales = block_scaled("mxfp4", [128, 256], 384)
    given = [torch.from_numpy(x.elements()[..., 0].copy()).view(torch.float4_e2m1fn_x2) for x in (a, b)]
    (found,) = grouped_gemm_wgrad(
        given[0], given[1].t(), *(to_framework(x, "torch") for x in (*scales, off)), sf_vec_size=32
    )
    want = cast(expected(values_of_tokens(a), values_of_tokens(b).T, off), "bfloat16")
    np.testing.assert_array_equal(found.float().numpy(), want)


def test_malformed_offsets_reach_no_wrong_address() -> None:
    a, b, _, scales = block_scaled("mxfp8_e4m3", [128, 0, 256], 384)
    for malformed in ([256, 128, 900], [-7, 200, -1], [2**31 - 1] * 3):
        for framework in FRAMEWORKS:
            arrays = [a.elements()[..., 0], b.elements()[..., 0].T, *scales, np.array(malformed, np.int32)]
            for order in ("tensor2d", "tensor_ragged"):
                found = call(grouped_gemm_wgrad, framework, arrays, sf_vec_size=32, input_order=order)[0]
                assert found.shape == (3, M, 136)


def test_wide_integers_of_jax() -> None:
    a, b, off = bf16_problem([5, 0, 20], 30)
    want = expected(value_of(a), value_of(b), off)
    with jax.enable_x64(True):
        for accumulate in ("float32", "float64"):
            arrays = [a, b, None, None, off]
            for order in ("tensor2d", "tensor_ragged"):
                found = call(
                    grouped_gemm_wgrad,
                    "jit",
                    [ragged(a, off) if order == "tensor_ragged" else a, *arrays[1:]],
                    wgrad_dtype="float32",
                    accumulate=accumulate,
                    input_order=order,
                )[0]
                np.testing.assert_array_equal(found, want)
