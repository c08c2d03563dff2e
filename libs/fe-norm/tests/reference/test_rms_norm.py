"""The references of ``rms_norm`` and both gradients against naive loops, finite differences and torch's autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fe_norm.reference.rms_norm import rms_norm, rms_norm_backward
from fe_norm.reference.rmsnorm_silu import rmsnorm_silu_backward

EPS = 1e-3
STEP = 1e-5
ROUNDOFF = 2.0**-24


def naive(x: Any, w: Any, b: Any, eps: float) -> Any:
    """The formula, one Python float at a time."""
    out = np.empty(x.shape, np.float64)
    for m, row in enumerate(x.tolist()):
        rstd = 1 / math.sqrt(math.fsum(v * v for v in row) / len(row) + eps)
        for n, v in enumerate(row):
            out[m, n] = v * rstd * (1.0 if w is None else float(w[n])) + (0.0 if b is None else float(b[n]))
    return out


def naive_silu(x: Any, w: Any, b: Any, eps: float) -> Any:
    z = naive(x, w, b, eps)
    return np.array([[v / (1 + math.exp(-v)) for v in row] for row in z.tolist()])


def case(rows: int, columns: int, dtype: Any = np.float64, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def values(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(dtype)

    return {
        "x": (values(rows, columns) * np.exp(values(columns))).astype(dtype),
        "residual": values(rows, columns),
        "w": values(columns),
        "b": values(columns),
        "dout": values(rows, columns),
        "dres": values(rows, columns),
    }


def slope(loss: Callable[[Any], float], at: Any) -> Any:
    """Central differences of a scalar function, one element at a time."""
    found = np.empty(at.shape)
    for index in np.ndindex(at.shape):
        up, down = at.copy(), at.copy()
        up[index] += STEP
        down[index] -= STEP
        found[index] = (loss(up) - loss(down)) / (2 * STEP)
    return found


@pytest.mark.parametrize("columns", [1, 7, 16, 33])
@pytest.mark.parametrize("scaled", [True, False], ids=["weight+bias", "plain"])
def test_fp32_result_matches_the_naive_loop(columns: int, scaled: bool) -> None:
    c = case(5, columns, np.float32)
    w, b = (c["w"], c["b"]) if scaled else (None, None)
    out, h, rstd = rms_norm(c["x"], w, b, eps=1e-5, out_dtype="float32")
    assert h is None
    assert (out.dtype, rstd.dtype, rstd.shape) == (np.float32, np.float32, (5,))
    want = naive(c["x"].astype(float), w, b, 1e-5)
    scale = np.abs(want) + (np.abs(c["b"]) if scaled else 0) + 1e-6
    assert np.max(np.abs(out - want) / scale) < 32 * ROUNDOFF
    np.testing.assert_allclose(rstd, 1 / np.sqrt((c["x"].astype(float) ** 2).mean(-1) + 1e-5), rtol=32 * ROUNDOFF)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32], ids=["bf16", "fp16", "fp32"])
def test_the_norm_is_of_the_sum_as_it_is_returned(dtype: Any) -> None:
    c = case(6, 40, dtype)
    out, h, rstd = rms_norm(c["x"], c["w"], None, c["residual"], eps=EPS, out_dtype="float32")
    assert h.dtype == dtype
    rounded = (c["x"].astype(np.float32) + c["residual"].astype(np.float32)).astype(dtype)
    np.testing.assert_array_equal(h.astype(np.float32), rounded.astype(np.float32))
    alone, _, rstd_alone = rms_norm(rounded, c["w"], eps=EPS, out_dtype="float32")
    np.testing.assert_array_equal(out, alone)
    np.testing.assert_array_equal(rstd, rstd_alone)


def test_output_is_rounded_once_from_fp32() -> None:
    c = case(4, 64, ml_dtypes.bfloat16)
    exact, _, _ = rms_norm(c["x"], c["w"], c["b"], eps=EPS, out_dtype="float32")
    for dtype in (ml_dtypes.bfloat16, np.float16):
        out, _, _ = rms_norm(c["x"], c["w"], c["b"], eps=EPS, out_dtype=np.dtype(dtype).name)
        assert out.dtype == dtype
        np.testing.assert_array_equal(out.astype(np.float32), exact.astype(dtype).astype(np.float32))


PRESENT = [
    pytest.param(True, True, True, id="weight+bias+residual"),
    pytest.param(True, False, False, id="weight"),
    pytest.param(False, True, False, id="bias"),
    pytest.param(False, False, True, id="residual"),
]


@pytest.mark.parametrize(("weight", "bias", "residual"), PRESENT)
@pytest.mark.parametrize("columns", [1, 2, 9])
def test_gradients_are_the_slopes_of_the_naive_loop(columns: int, weight: bool, bias: bool, residual: bool) -> None:
    c = case(3, columns)
    w, b = c["w"] if weight else None, c["b"] if bias else None
    dres = c["dres"] if residual else None
    h = c["x"] + c["residual"] if residual else c["x"]

    def loss(h: Any, w: Any, b: Any) -> float:
        return float((naive(h, w, b, EPS) * c["dout"]).sum() + (0 if dres is None else (h * dres).sum()))

    _, _, rstd = rms_norm(h, w, b, eps=EPS, out_dtype="float64", compute="float64")
    dx, dw, db = rms_norm_backward(c["dout"], dres, h, w, b, rstd, compute="float64")
    close = {"rtol": 1e-6, "atol": 1e-8}
    np.testing.assert_allclose(dx, slope(lambda v: loss(v, w, b), h), **close)
    assert (dw is None, db is None) == (w is None, b is None)
    if weight:
        np.testing.assert_allclose(dw, slope(lambda v: loss(h, v, b), w), **close)
    if bias:
        np.testing.assert_allclose(db, slope(lambda v: loss(h, w, v), b), **close)


@pytest.mark.parametrize(("weight", "bias"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("columns", [1, 2, 9])
def test_gradients_of_silu_are_the_slopes_of_the_naive_loop(columns: int, weight: bool, bias: bool) -> None:
    c = case(3, columns, seed=1)
    x, w, b = c["x"], c["w"] if weight else None, c["b"] if bias else None

    def loss(x: Any, w: Any, b: Any) -> float:
        return float((naive_silu(x, w, b, EPS) * c["dout"]).sum())

    dx, dw, db = rmsnorm_silu_backward(c["dout"], x, w, b, eps=EPS, compute="float64")
    close = {"rtol": 1e-6, "atol": 1e-8}
    np.testing.assert_allclose(dx, slope(lambda v: loss(v, w, b), x), **close)
    assert (dw is None, db is None) == (w is None, b is None)
    if weight:
        np.testing.assert_allclose(dw, slope(lambda v: loss(x, v, b), w), **close)
    if bias:
        np.testing.assert_allclose(db, slope(lambda v: loss(x, w, v), b), **close)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32], ids=["bf16", "fp16", "fp32"])
def test_fp32_gradients_are_rounded_once_to_the_inputs_dtypes(dtype: Any) -> None:
    c = case(5, 24, dtype)
    w, b = c["w"].astype(np.float32), c["b"].astype(ml_dtypes.bfloat16)
    wide = {name: array.astype(np.float64) for name, array in c.items()} | {"w": w.astype(float), "b": b.astype(float)}
    _, _, rstd = rms_norm(c["x"], w, b, eps=EPS, out_dtype="float32")
    found = rms_norm_backward(c["dout"], c["dres"], c["x"], w, b, rstd)
    exact = rms_norm_backward(
        *(wide[n] for n in ("dout", "dres", "x", "w", "b")),
        1 / np.sqrt((wide["x"] ** 2).mean(-1) + EPS),
        compute="float64",
    )
    for got, want, kind in zip(found, exact, (dtype, np.float32, ml_dtypes.bfloat16), strict=True):
        assert got.dtype == kind
        step = float(ml_dtypes.finfo(kind).eps) / 2
        np.testing.assert_allclose(got.astype(float), want, rtol=1.01 * step + 64 * ROUNDOFF, atol=64 * ROUNDOFF)


def test_leading_dimensions_and_no_rows() -> None:
    c = case(6, 8, np.float32)
    x = c["x"].reshape(2, 3, 8)
    out, h, rstd = rms_norm(x, c["w"], None, c["residual"].reshape(2, 3, 8), eps=EPS, out_dtype="float32")
    assert (out.shape, h.shape, rstd.shape) == ((2, 3, 8), (2, 3, 8), (2, 3))
    one, _, rstd = rms_norm(x[0, 0], c["w"], eps=EPS, out_dtype="float32")
    assert (one.shape, rstd.shape) == ((8,), ())
    dx, dw, _ = rms_norm_backward(one, None, x[0, 0], c["w"], None, rstd)
    assert (dx.shape, dw.shape) == ((8,), (8,))
    empty = np.empty((0, 8), np.float32)
    out, _, rstd = rms_norm(empty, c["w"], eps=EPS, out_dtype="float32")
    dx, dw, db = rms_norm_backward(out, None, empty, c["w"], c["b"], rstd)
    assert (out.shape, dx.shape) == ((0, 8), (0, 8))
    np.testing.assert_array_equal(dw, np.zeros(8))
    np.testing.assert_array_equal(db, np.zeros(8))


def test_torch_agrees() -> None:
    import torch

    c = {name: torch.tensor(array, requires_grad=True) for name, array in case(4, 12).items()}
    h = c["x"] + c["residual"]
    out = torch.nn.functional.rms_norm(h, (12,), c["w"], EPS) + c["b"]
    torch.autograd.backward([out, h], [c["dout"].detach(), c["dres"].detach()])
    with torch.no_grad():
        ours, sum_, rstd = rms_norm(
            c["x"], c["w"], c["b"], c["residual"], eps=EPS, out_dtype="float64", compute="float64"
        )
        dx, dw, db = rms_norm_backward(c["dout"], c["dres"], sum_, c["w"], c["b"], rstd, compute="float64")
    torch.testing.assert_close(ours, out)
    for got, name in ((dx, "x"), (dx, "residual"), (dw, "w"), (db, "b")):
        torch.testing.assert_close(got, c[name].grad)


def test_jax_agrees_with_numpy() -> None:
    import jax.numpy as jnp

    c = case(4, 16, np.float32)
    want = rms_norm(c["x"], c["w"], c["b"], c["residual"], eps=EPS, out_dtype="bfloat16")
    got = rms_norm(*(jnp.asarray(c[n]) for n in ("x", "w", "b", "residual")), eps=EPS, out_dtype="bfloat16")
    for a, b in zip(got, want, strict=True):
        assert not isinstance(a, np.ndarray)
        np.testing.assert_allclose(np.asarray(a, np.float32), b.astype(np.float32), rtol=2.0**-7)
    want = rms_norm_backward(c["dout"], c["dres"], want[1], c["w"], c["b"], want[2])
    got = rms_norm_backward(*(jnp.asarray(a) for a in (c["dout"], c["dres"], got[1], c["w"], c["b"], got[2])))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5, atol=1e-6)
