"""The reference of ``rmsnorm_silu`` against naive loops in Python floats and exact code tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fe_norm.reference.rmsnorm_silu import rmsnorm_silu

FP8 = "float8_e4m3fn"
NVFP4 = "float4_e2m1fn_x2"


def naive(x: Any, w: Any, b: Any, eps: float) -> np.ndarray[Any, Any]:
    """The formula, one Python float at a time."""
    rows, columns = x.shape
    out = np.empty((rows, columns), np.float64)
    for m in range(rows):
        mean_square = math.fsum(float(v) ** 2 for v in x[m]) / columns
        rstd = 1.0 / math.sqrt(mean_square + eps)
        for n in range(columns):
            z = float(x[m, n]) * rstd * (1.0 if w is None else float(w[n])) + (0.0 if b is None else float(b[n]))
            out[m, n] = z / (1.0 + math.exp(-z))
    return out


def case(rows: int, columns: int, seed: int = 0, dtype: Any = ml_dtypes.bfloat16) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((rows, columns)) * np.exp(rng.standard_normal(columns))).astype(dtype)
    return x, rng.standard_normal(columns).astype(dtype), rng.standard_normal(columns).astype(dtype)


@pytest.mark.parametrize("columns", [1, 7, 16, 33, 320])
@pytest.mark.parametrize("scaled", [True, False], ids=["weight+bias", "plain"])
def test_fp32_result_matches_the_naive_loop(columns: int, scaled: bool) -> None:
    x, w, b = case(5, columns)
    o, sf = rmsnorm_silu(x, w if scaled else None, b if scaled else None, eps=1e-5, out_dtype="float32")
    want = naive(x, w if scaled else None, b if scaled else None, 1e-5)
    # fp32: about log2(C) + 8 roundings of 2^-24 each, and z carries the cancellation of its two terms.
    scale = np.abs(want) + (np.abs(np.asarray(b, np.float64)) if scaled else 0) + 1e-6
    assert np.max(np.abs(o.astype(np.float64) - want) / scale) < 32 * 2.0**-24
    assert sf is None
    assert o.dtype == np.float32


def test_compute_float64_gives_an_oracle() -> None:
    x, w, b = case(3, 40)
    o, _ = rmsnorm_silu(x, w, b, eps=0.5, out_dtype="float64", compute="float64")
    np.testing.assert_allclose(o, naive(x, w, b, 0.5), rtol=1e-13)


def test_l2_norm_variant_is_the_same_operation_with_eps_over_c() -> None:
    x, w, _ = case(4, 64)
    e = 0.25
    v = x.astype(np.float64)
    z = v / np.sqrt((v * v).sum(-1, keepdims=True) + e) * math.sqrt(64) * w.astype(np.float64)
    o, _ = rmsnorm_silu(x, w, eps=e / 64, out_dtype="float64", compute="float64")
    np.testing.assert_allclose(o, z / (1 + np.exp(-z)), rtol=1e-12)


def test_bf16_output_is_rounded_once_from_fp32() -> None:
    x, w, b = case(6, 96)
    exact, _ = rmsnorm_silu(x, w, b, eps=1e-5, out_dtype="float32")
    rounded, _ = rmsnorm_silu(x, w, b, eps=1e-5, out_dtype="bfloat16")
    assert rounded.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(rounded.astype(np.float32), exact.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_large_magnitudes_neither_warn_nor_lose_the_sign() -> None:
    x = np.array([[-3e4, 3e4, 1.0, -1.0]], np.float32)
    o, _ = rmsnorm_silu(x, np.full(4, 1e3, np.float32), eps=0.0, out_dtype="float32")
    assert o[0, 1] == pytest.approx(1e3 * math.sqrt(2), rel=1e-6)
    assert o[0, 0] == 0
    assert np.signbit(o[0, 0])


def test_non_finite_values_stay_in_their_row() -> None:
    x, w, _ = case(4, 32, dtype=np.float32)
    clean, _ = rmsnorm_silu(x, w, eps=1e-5, out_dtype="float32")
    x[1, 5], x[2, 7] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        o, _ = rmsnorm_silu(x, w, eps=1e-5, out_dtype="float32")
    np.testing.assert_array_equal(o[[0, 3]], clean[[0, 3]])
    assert np.isnan(o[1]).all()
    assert np.isnan(o[2, 7])
    assert (np.delete(o[2], 7) == 0).all()


# --- FP8 and NVFP4, against tables of all codes -------------------------------------------------------------------


def nearest(value: float, table: list[float]) -> int:
    """Index of the nearest table entry, ties to the even code, saturating: the rounding rule, spelled out."""
    magnitude = min(abs(value), table[-1])
    return min(range(len(table)), key=lambda i: (abs(table[i] - magnitude), i % 2))


E4M3 = [float(np.array(code, np.uint8).view(ml_dtypes.float8_e4m3fn)) for code in range(127)]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@pytest.mark.parametrize("scale", [None, 0.37, 400.0], ids=["no-scale", "scale", "saturating"])
def test_fp8_codes_are_the_nearest_ones(scale: float | None) -> None:
    x, w, b = case(4, 64)
    y, _ = rmsnorm_silu(x, w, b, eps=1e-5, out_dtype="float32")
    factor = None if scale is None else np.array([scale], np.float32)
    o, sf = rmsnorm_silu(x, w, b, factor, eps=1e-5, out_dtype=FP8)
    assert sf is None
    assert o.dtype == ml_dtypes.float8_e4m3fn
    scaled = y if factor is None else y * factor
    want = [nearest(float(v), E4M3) | (128 if np.signbit(v) else 0) for v in scaled.ravel()]
    np.testing.assert_array_equal(o.view(np.uint8).ravel(), want)


def test_fp8_keeps_nan() -> None:
    x = np.array([[np.nan, 1.0], [2.0, 1.0]], np.float32)
    o, _ = rmsnorm_silu(x, None, eps=1e-5, out_dtype=FP8)
    assert (o.view(np.uint8)[0] & 0x7F == 0x7F).all()
    assert (o.view(np.uint8)[1] & 0x7F != 0x7F).all()


def test_nvfp4_blocks_follow_the_peer_rule() -> None:
    x, w, b = case(3, 48, seed=3)
    y, _ = rmsnorm_silu(x, w, b, eps=1e-5, out_dtype="float32")
    o, sf = rmsnorm_silu(x, w, b, eps=1e-5, out_dtype=NVFP4)
    assert o.shape == (3, 24)
    assert o.dtype == np.uint8
    assert sf.shape == (3, 3)
    for m in range(3):
        for j in range(3):
            block = y[m, 16 * j : 16 * j + 16]
            q = np.float32(max(np.float32(np.abs(block).max()) / np.float32(6), np.float32(2.0**-126)))
            assert int(sf.view(np.uint8)[m, j]) == nearest(float(q), E4M3)
            codes = [nearest(float(v / q), E2M1) | (8 if np.signbit(v) else 0) for v in block]
            packed = [codes[2 * i] | codes[2 * i + 1] << 4 for i in range(8)]
            np.testing.assert_array_equal(o[m, 8 * j : 8 * j + 8], packed)


def test_nvfp4_tiny_block_stores_scale_zero_but_keeps_codes() -> None:
    # a <= 6 * 2^-10 rounds to sf = 0 (the equality is a tie to even); its codes are still those of y/q.
    silu = 6 * 2.0**-10
    z = 2 * silu  # SiLU(z) is about z/2 there
    x = np.ones((1, 16), np.float32)
    o, sf = rmsnorm_silu(x, np.full(16, z * 0.99, np.float32), eps=0.0, out_dtype=NVFP4)
    assert sf.view(np.uint8)[0, 0] == 0
    assert (o == 0x77).all()


# --- the three frameworks agree -----------------------------------------------------------------------------------


def to_torch(array: Any) -> Any:
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def to_jax(array: Any) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(array)


def bytes_of(array: Any) -> Any:
    if hasattr(array, "detach"):
        import torch

        return array.view(torch.uint8).numpy()
    return np.asarray(array).view(np.uint8)


@pytest.mark.parametrize("convert", [to_torch, to_jax], ids=["torch", "jax"])
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", FP8, NVFP4])
def test_frameworks_agree(convert: Callable[[Any], Any], out_dtype: str) -> None:
    x, w, b = case(8, 64, seed=5)
    want, want_sf = rmsnorm_silu(x, w, b, eps=1e-5, out_dtype=out_dtype)
    got, got_sf = rmsnorm_silu(convert(x), convert(w), convert(b), eps=1e-5, out_dtype=out_dtype)
    assert type(got).__module__.split(".")[0] != "numpy"
    if out_dtype == "float32":
        np.testing.assert_allclose(np.asarray(got), want, rtol=2.0**-20, atol=2.0**-24)
        return
    # Different libm's may move a value over a rounding boundary: almost all codes equal.
    assert (bytes_of(got) == bytes_of(want)).mean() > 0.99
    if want_sf is not None:
        assert (bytes_of(got_sf) == bytes_of(want_sf)).mean() > 0.95
