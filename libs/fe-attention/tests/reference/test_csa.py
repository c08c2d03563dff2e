"""The references of the CSA compressor against naive loops and finite differences; edges of packed sequences."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fe_attention.reference.csa import csa_compressor_backward, csa_compressor_forward

BF16 = ml_dtypes.bfloat16
STEP = 1e-5


def naive(c: dict[str, Any], total: int) -> Any:
    """The table of the contract, one Python float at a time; ``None`` rows are left NaN."""
    kv, score, ape, cu, comp = (c[name] for name in ("kv", "score", "ape", "cu", "comp"))
    ratio, d, coff = c["ratio"], c["d"], c["coff"]
    out = np.full((total, d), np.nan)
    for s in range(len(cu) - 1):
        for i in range((cu[s + 1] - cu[s]) // ratio):
            first = cu[s] + i * ratio
            for j in range(d):
                entries = []
                if coff == 2 and i > 0:
                    entries += [(first - ratio + k, j, k, j) for k in range(ratio)]
                column = j if coff == 1 else d + j
                entries += [(first + k, column, k, column) for k in range(ratio)]
                x = [float(score[t, col]) + float(ape[k, acol]) for t, col, k, acol in entries]
                top = max(x)
                e = [math.exp(a - top) for a in x]
                den = math.fsum(e)
                out[comp[s] + i, j] = math.fsum(
                    float(kv[t, col]) * (w / den) for (t, col, _, _), w in zip(entries, e, strict=True)
                )
    return out


def case(
    lengths: tuple[int, ...],
    ratio: int,
    d: int,
    coff: int,
    dtype: Any = np.float64,
    extra: int = 0,
    spare: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """Sequences of these lengths; ``extra`` tokens after them, ``spare`` rows of the result that no sequence has."""
    rng = np.random.default_rng(seed)
    tokens = sum(lengths) + extra
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    comp = np.concatenate([[0], np.cumsum([n // ratio for n in lengths])]).astype(np.int32)
    total = int(comp[-1]) + spare

    def values(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(dtype)

    return {
        "kv": values(tokens, coff * d),
        "score": values(tokens, coff * d),
        "ape": rng.standard_normal((ratio, coff * d)).astype(np.float64 if dtype is np.float64 else np.float32),
        "cu": cu,
        "comp": comp,
        "ratio": ratio,
        "d": d,
        "coff": coff,
        "total": total,
        "go": values(total, d),
    }


def forward(c: dict[str, Any], **more: Any) -> Any:
    options = {"ratio": c["ratio"], "head_dim": c["d"], "coff": c["coff"], "total_comp": c["total"], **more}
    (out,) = csa_compressor_forward(c["kv"], c["score"], c["ape"], c["cu"], c["comp"], **options)
    return out


def backward(c: dict[str, Any], **more: Any) -> Any:
    options = {"ratio": c["ratio"], "head_dim": c["d"], "coff": c["coff"], **more}
    return csa_compressor_backward(c["go"], c["kv"], c["score"], c["ape"], c["cu"], c["comp"], **options)


FORMS = [(2, 2), (4, 2), (4, 1), (3, 2), (1, 2), (1, 1), (16, 1)]
LENGTHS = (9, 0, 16, 3, 37)


@pytest.mark.parametrize(("ratio", "coff"), FORMS)
def test_forward_matches_the_naive_loop(ratio: int, coff: int) -> None:
    c = case(LENGTHS, ratio, 3, coff, extra=2)
    np.testing.assert_allclose(forward(c, compute="float64"), naive(c, c["total"]), rtol=1e-12, atol=1e-14)


def test_fp32_arithmetic_and_one_rounding() -> None:
    for ratio, coff in ((4, 2), (128, 1)):
        c = case((300, 128, 77), ratio, 8, coff, BF16)
        out = forward(c)
        assert out.dtype == BF16
        want = naive(c, c["total"])
        np.testing.assert_allclose(out.astype(float), want, rtol=1.01 * 2.0**-8, atol=1e-5)


@pytest.mark.parametrize(("ratio", "coff"), [(2, 2), (3, 1), (3, 2), (1, 2)])
def test_gradients_are_the_slopes_of_the_naive_loop(ratio: int, coff: int) -> None:
    c = case((7, 2, 0, 9), ratio, 2, coff, extra=1)
    found = dict(zip(("kv", "score", "ape"), backward(c, compute="float64"), strict=True))
    for name, got in found.items():
        want = np.empty(c[name].shape)
        for index in np.ndindex(want.shape):
            up, down = c[name].copy(), c[name].copy()
            up[index] += STEP
            down[index] -= STEP
            losses = [float((naive({**c, name: v}, c["total"]) * c["go"]).sum()) for v in (up, down)]
            want[index] = (losses[0] - losses[1]) / (2 * STEP)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-8, err_msg=name)


def test_what_no_window_has_gets_exactly_zero() -> None:
    """Tails, first-half columns of a last block, sequences shorter than a block, tokens past the last sequence."""
    c = case((9, 3, 4), 4, 2, 2, extra=3)
    grad_kv, grad_score, _ = backward(c)
    unused = np.ones((19, 4), bool)
    unused[:4] = False  # the first block is in the next window, too
    unused[4:8, 2:] = False
    unused[12:16, 2:] = False
    for grad in (grad_kv, grad_score):
        np.testing.assert_array_equal(grad == 0, unused)


def test_nan_in_unused_places_reaches_nothing() -> None:
    c = case((9, 3, 4), 4, 2, 2, extra=3)
    want, gradients = forward(c), backward(c)
    for name in ("kv", "score"):
        c[name][8:12], c[name][16:] = np.nan, np.nan
        c[name][4:8, :2] = np.inf
        c[name][12:16, :2] = np.nan
    np.testing.assert_array_equal(forward(c), want)
    for got, exact in zip(backward(c), gradients, strict=True):
        np.testing.assert_array_equal(got, exact)


def test_a_bias_that_is_nan_for_the_block_before_spares_first_blocks() -> None:
    c = case((8, 4), 4, 2, 2)
    want = forward(c)
    c["ape"][:, :2] = np.nan
    out = forward(c)
    np.testing.assert_array_equal(out[[0, 2]], want[[0, 2]])
    assert np.isnan(out[1]).all()


def test_rows_that_no_sequence_has() -> None:
    """A first block from token ``cu_seqlens[0]``; their gradient does not count, even if it is NaN."""
    c = case((8, 5), 4, 2, 2, spare=3)
    out = forward(c)
    np.testing.assert_array_equal(out[3:], out[[0, 0, 0]])
    few = {**c, "go": c["go"][:3], "total": 3}
    c["go"][3:] = np.nan
    for got, want in zip(backward(c), backward(few), strict=True):
        np.testing.assert_array_equal(got, want)


def test_nan_and_inf_of_a_window_propagate_and_stay_in_it() -> None:
    c = case((16,), 4, 2, 1)
    clean = forward(c)
    c["score"][5, 0] = np.nan
    c["kv"][9, 1] = np.inf
    out = forward(c)
    assert np.isnan(out[1, 0])
    assert np.isinf(out[2, 1])
    clean[1, 0], clean[2, 1] = out[1, 0], out[2, 1]
    np.testing.assert_array_equal(out, clean)


def test_malformed_prefixes_stay_inside() -> None:
    c = case((8, 8), 4, 2, 2)
    c["cu"] = np.array([-7, 900, 3], np.int32)
    c["comp"] = np.array([2, 50, -1], np.int32)
    assert forward(c).shape == (4, 2)
    assert [grad.shape for grad in backward(c)] == [(16, 4), (16, 4), (4, 4)]


@pytest.mark.parametrize("lengths", [(), (0,), (3, 2), (0, 0, 1)])
def test_no_rows(lengths: tuple[int, ...]) -> None:
    c = case(lengths, 4, 2, 2)
    assert forward(c).shape == (0, 2)
    for grad, name in zip(backward(c), ("kv", "score", "ape"), strict=True):
        np.testing.assert_array_equal(grad, np.zeros_like(c[name]))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_frameworks_agree(framework: str) -> None:
    import jax.numpy as jnp
    import torch

    make: Any = torch.tensor if framework == "torch" else jnp.asarray
    for ratio, coff in ((4, 2), (16, 1)):
        c = case(LENGTHS, ratio, 3, coff, np.float32, extra=2, spare=1)
        other = {name: make(value) if isinstance(value, np.ndarray) else value for name, value in c.items()}
        found, want = (forward(other), *backward(other)), (forward(c), *backward(c))
        for got, exact in zip(found, want, strict=True):
            assert not isinstance(got, np.ndarray)
            np.testing.assert_allclose(np.asarray(got), exact, rtol=1e-5, atol=1e-6)
