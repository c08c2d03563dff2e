"""The reference of ``rmsnorm_silu_pad`` against naive loops that round each step."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fe_norm.reference.rmsnorm_silu_pad import rmsnorm_silu_pad
from fe_runtime.testing import to_framework, to_numpy

BF16 = ml_dtypes.bfloat16


def bf16(value: Any) -> Any:
    return np.float32(np.float32(value).astype(BF16))


def naive_pixel(v: list[Any], gamma: Any) -> list[Any]:
    """Normalise and activate the channels of a pixel, each step in fp32 and rounded to bf16."""
    norm = np.float32(max(np.sqrt(np.float32(math.fsum(float(e) ** 2 for e in v))), np.float32(1e-12)))
    root = np.float32(math.sqrt(len(v)))
    out = []
    for element, gain in zip(v, gamma, strict=True):
        n = bf16(element / norm)
        g = bf16(bf16(n * root) * np.float32(gain))
        out.append(bf16(g / (np.float32(1) + np.exp(-g))))
    return out


def naive(x: Any, gamma: Any, bias: Any, previous: Any, residual: Any, residual_bias: Any) -> tuple[Any, Any, Any]:
    count, frames, height, width, channels = x.shape
    earlier = 0 if previous is None else previous.shape[1]
    padded = np.zeros((count, frames + 2, height + 2, width + 2, channels), np.float32)
    sequence = np.zeros((count, earlier + frames, height, width, channels), np.float32)
    total = np.zeros(x.shape, np.float32)
    for n, t, h, w in np.ndindex(x.shape[:-1]):
        for c in range(channels):
            v = np.float32(x[n, t, h, w, c])
            if bias is not None:
                v = bf16(v + np.float32(bias[c]))
            if residual is not None:
                r = np.float32(residual[n, t, h, w, c])
                if residual_bias is not None:
                    r = bf16(r + np.float32(residual_bias[c]))
                v = bf16(v + r)
            total[n, t, h, w, c] = v
        sequence[n, earlier + t, h, w] = naive_pixel(list(total[n, t, h, w]), gamma)
        padded[n, t + 2, h + 1, w + 1] = sequence[n, earlier + t, h, w]
    for p in range(earlier):
        sequence[:, p] = previous[:, p].astype(np.float32)
        padded[:, 2 - earlier + p, 1:-1, 1:-1] = sequence[:, p]
    return padded, sequence[:, -min(2, frames + earlier) :], total


def case(
    frames: int = 2, earlier: int = 0, biased: bool = False, residual: bool = False, channels: int = 24, seed: int = 0
) -> list[Any]:
    rng = np.random.default_rng(seed)

    def values(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(BF16)

    return [
        values(2, frames, 3, 2, channels),
        values(channels),
        values(channels) if biased else None,
        values(2, earlier, 3, 2, channels) if earlier else None,
        values(2, frames, 3, 2, channels) if residual else None,
        values(channels) if residual and biased else None,
    ]


def check(arrays: list[Any], **options: Any) -> None:
    padded, cache, total = rmsnorm_silu_pad(*arrays, **options)
    want = naive(*arrays)
    has_sum = arrays[4] is not None or options.get("save_input", False)
    assert (total is None) == (not has_sum)
    for got, expected in zip((padded, cache, total), want, strict=True):
        if got is None:
            continue
        assert got.dtype == BF16
        assert got.shape == expected.shape
        # Another order of the sum or another exp may move a rounded step by one code: two of 2^-8 at most, rarely.
        off = np.abs(got.astype(np.float32) - expected)
        assert (off <= 2.0**-6 * np.abs(expected)).all()
        assert (off != 0).mean() < 0.02


@pytest.mark.parametrize("frames", [1, 2, 3])
@pytest.mark.parametrize("earlier", [0, 1, 2])
def test_frames_and_cache(frames: int, earlier: int) -> None:
    check(case(frames, earlier))


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
def test_pre_add(biased: bool, residual: bool) -> None:
    check(case(biased=biased, residual=residual, channels=7), save_input=not residual)


@pytest.mark.parametrize("channels", [1, 7, 160])
def test_any_number_of_channels(channels: int) -> None:
    check(case(channels=channels))


def test_a_zero_pixel_stays_zero_and_nan_stays_in_its_pixel() -> None:
    arrays = case(frames=1)
    arrays[0][0, 0, 0, 0] = 0
    clean, _, _ = rmsnorm_silu_pad(*arrays)
    assert (clean[0, 2, 1, 1] == 0).all()
    arrays[0][1, 0, 1, 1, 3] = np.nan
    with np.errstate(invalid="ignore"):
        padded, _, _ = rmsnorm_silu_pad(*arrays)
    assert np.isnan(padded[1, 2, 2, 2]).all()
    padded[1, 2, 2, 2] = clean[1, 2, 2, 2]
    np.testing.assert_array_equal(padded, clean)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_frameworks_agree(framework: str) -> None:
    arrays = case(frames=2, earlier=1, biased=True, residual=True)
    want = rmsnorm_silu_pad(*arrays)
    got = rmsnorm_silu_pad(*(to_framework(array, framework) for array in arrays))
    for a, b in zip(got, want, strict=True):
        same = to_numpy(a).view(np.uint16) == b.view(np.uint16)
        assert same.mean() > 0.99
        np.testing.assert_allclose(to_numpy(a).astype(np.float32), b.astype(np.float32), rtol=2.0**-6)
