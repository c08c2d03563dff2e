"""The references of the Engram gate against naive loops and finite differences; frameworks; masked and zero rows."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fe_attention.reference.engram import engram_gate_saved_backward, engram_gate_saved_forward

EPS = 1e-20
STEP = 1e-5
ROUNDOFF = 2.0**-24


def naive(x: Any, kv: Any, w: Any, mask: Any, eps: float) -> tuple[Any, Any]:
    """The formula, one Python float at a time."""
    tokens, streams, width = x.shape
    out, saved = np.empty(x.shape), np.empty((tokens, streams, 4))
    for n in range(tokens):
        for h in range(streams):
            xs = [float(a) for a in x[n, h]]
            ks = [float(a) for a in kv[n, h * width : (h + 1) * width]]
            vs = [float(a) for a in kv[n, streams * width :]]
            rx = 1 / math.sqrt(math.fsum(a * a for a in xs) / width + eps)
            rk = 1 / math.sqrt(math.fsum(a * a for a in ks) / width + eps)
            weighted = math.fsum(a * float(b) * c for a, b, c in zip(xs, w[h], ks, strict=True))
            dot = weighted * (rx * rk) / math.sqrt(width)
            root = math.sqrt(max(abs(dot), 1e-6))
            gate = 1 / (1 + math.exp(-math.copysign(root, dot))) if mask[n] else 0.0
            saved[n, h] = gate, dot, rx, rk
            out[n, h] = [a + gate * v for a, v in zip(xs, vs, strict=True)]
    return out, saved


def case(tokens: int, width: int, dtype: Any = np.float64, streams: int = 4, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((tokens, streams, width)).astype(dtype),
        "kv": rng.standard_normal((tokens, (streams + 1) * width)).astype(dtype),
        "w": rng.standard_normal((streams, width)).astype(np.float64 if dtype is np.float64 else np.float32),
        "mask": rng.random(tokens) < 0.7,
        "g": rng.standard_normal((tokens, streams, width)).astype(dtype),
    }


def forward(c: dict[str, Any], **options: Any) -> Any:
    return engram_gate_saved_forward(c["x"], c["kv"], c["w"], c["mask"], **{"eps": EPS, **options})


def backward(c: dict[str, Any], saved: Any, **options: Any) -> Any:
    return engram_gate_saved_backward(c["g"], c["x"], c["kv"], c["w"], saved, **options)


@pytest.mark.parametrize("streams", [1, 2, 4])
@pytest.mark.parametrize("width", [1, 3, 8, 33])
def test_forward_matches_the_naive_loop(width: int, streams: int) -> None:
    c = case(5, width, streams=streams)
    out, saved = forward(c, compute="float64")
    want_out, want_saved = naive(c["x"], c["kv"], c["w"], c["mask"], EPS)
    np.testing.assert_allclose(out, want_out, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(saved, want_saved, rtol=1e-9, atol=1e-12)


def test_fp32_arithmetic_and_one_rounding() -> None:
    c = case(6, 64, ml_dtypes.bfloat16)
    out, saved = forward(c)
    want_out, want_saved = naive(c["x"], c["kv"], c["w"], c["mask"], EPS)
    assert (out.dtype, saved.dtype) == (ml_dtypes.bfloat16, np.float32)
    np.testing.assert_allclose(out.astype(float), want_out, rtol=1.01 * 2.0**-8 + 64 * ROUNDOFF, atol=64 * ROUNDOFF)
    np.testing.assert_allclose(saved, want_saved, rtol=2e-5, atol=2e-6)


def test_gradients_are_the_slopes_of_the_naive_loop() -> None:
    c = case(3, 5, streams=2)
    c["mask"] = np.array([True, False, True])
    _, saved = forward(c, compute="float64")
    dx, dkv, dw = backward(c, saved, compute="float64")

    def loss(name: str, value: Any) -> float:
        given = {**c, name: value}
        out, _ = naive(given["x"], given["kv"], given["w"], given["mask"], EPS)
        return float((out * c["g"]).sum())

    for name, got in (("x", dx), ("kv", dkv), ("w", dw)):
        want = np.empty(c[name].shape)
        for index in np.ndindex(want.shape):
            up, down = c[name].copy(), c[name].copy()
            up[index] += STEP
            down[index] -= STEP
            want[index] = (loss(name, up) - loss(name, down)) / (2 * STEP)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-8)


def test_gradients_use_saved_and_not_the_mask() -> None:
    """Masked tokens pass g on, add nothing to dv and dweight, and give dk 0."""
    c = case(4, 6)
    c["mask"] = np.array([True, False, True, True])
    _, saved = forward(c, compute="float64")
    dx, dkv, dw = backward(c, saved, compute="float64")
    np.testing.assert_array_equal(dx[1], c["g"][1])
    np.testing.assert_array_equal(dkv[1], 0)
    kept = c["mask"]
    rest = {name: value if name == "w" else value[kept] for name, value in c.items()}
    _, _, alone = backward(rest, saved[kept], compute="float64")
    np.testing.assert_allclose(dw, alone, rtol=1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_masked_rows_with_nan_stay_where_they_are(bad: float) -> None:
    c = case(3, 6)
    clean = {name: value.copy() for name, value in c.items()}
    c["mask"] = clean["mask"] = np.array([True, False, True])
    c["x"][1], c["kv"][1] = bad, bad
    with np.errstate(invalid="ignore"):
        out, saved = forward(c, compute="float64")
        dx, dkv, dw = backward(c, saved, compute="float64")
    want_out, want_saved = forward(clean, compute="float64")
    want = backward(clean, want_saved, compute="float64")
    np.testing.assert_array_equal(out[1], c["x"][1])
    np.testing.assert_array_equal(saved[1, :, 0], 0)
    np.testing.assert_array_equal(out[[0, 2]], want_out[[0, 2]])
    for got, exact in zip((dx, dkv, dw), want, strict=True):
        np.testing.assert_array_equal(got, exact)


def test_nan_in_a_token_that_counts_propagates() -> None:
    c = case(2, 4)
    c["mask"] = np.array([True, True])
    c["kv"][0, 0] = np.nan  # a key of stream 0
    out, saved = forward(c, compute="float64")
    dx, dkv, dw = backward(c, saved, compute="float64")
    assert np.isnan(out[0, 0]).all()
    assert np.isfinite(out[0, 1:]).all()
    assert np.isnan(dx[0, 0]).all()
    assert np.isnan(dw[0]).any()
    assert np.isfinite(dw[1:]).all()
    assert np.isnan(dkv[0, -4:]).all()  # dv takes gate * g


def test_copysign_looks_at_the_sign_bit() -> None:
    """``dot = -0.0`` gives ``sigmoid(-1e-3)``."""
    x, kv = np.ones((2, 1, 1)), np.array([[1e-200, 1.0], [-1e-200, 1.0]])
    with np.errstate(under="ignore"):
        _, saved = engram_gate_saved_forward(
            x, kv, np.ones((1, 1)), np.array([True, True]), eps=1e300, compute="float64"
        )
    np.testing.assert_array_equal(saved[:, 0, 1], 0)
    assert np.signbit(saved[:, 0, 1]).tolist() == [False, True]
    np.testing.assert_allclose(saved[:, 0, 0], 1 / (1 + np.exp([-1e-3, 1e-3])), rtol=1e-12)


def test_no_slope_below_the_floor() -> None:
    c = case(1, 4, streams=1)
    c["mask"] = np.array([True])
    for size, flat in ((0.99e-6, True), (1.01e-6, False)):
        saved = np.array([[[0.4, size, 1.0, 1.0]]])
        _, dkv, dw = backward(c, saved, compute="float64")
        assert (np.abs(dw).max() == 0) == flat
        assert (np.abs(dkv[:, :4]).max() == 0) == flat


def test_rows_of_zeros_stay_finite() -> None:
    c = case(3, 8, ml_dtypes.bfloat16)
    c["mask"] = np.array([True, True, True])
    c["x"][0] = 0
    c["kv"][1] = 0
    c["x"][2], c["kv"][2] = 0, 0
    out, saved = forward(c)
    assert float(saved[0, 0, 2]) == pytest.approx(1e10, rel=1e-6)
    for array in (out, saved, *backward(c, saved)):
        assert np.isfinite(array.astype(np.float32)).all()


def test_no_tokens() -> None:
    c = case(0, 8, np.float32)
    out, saved = forward(c)
    assert (out.shape, saved.shape) == ((0, 4, 8), (0, 4, 4))
    dx, dkv, dw = backward(c, saved)
    assert (dx.shape, dkv.shape) == ((0, 4, 8), (0, 40))
    np.testing.assert_array_equal(dw, np.zeros((4, 8)))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_frameworks_agree(framework: str) -> None:
    import jax.numpy as jnp
    import torch

    c = case(5, 24, np.float32)
    make: Any = torch.tensor if framework == "torch" else jnp.asarray
    other = {name: make(value) for name, value in c.items()}
    found = forward(other)
    want = forward(c)
    found = (*found, *backward(other, make(want[1])))  # where dot is almost 0 the slope is steep
    want = (*want, *backward(c, want[1]))
    for got, exact in zip(found, want, strict=True):
        assert not isinstance(got, np.ndarray)
        np.testing.assert_allclose(np.asarray(got), exact, rtol=2e-5, atol=2e-5)
