"""The reference of ``vision_rope_backward`` against a naive loop in exact arithmetic, bit for bit."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from naive_rope import bfloats, same_bits, tables
from naive_rope import vision_rope_backward as naive

from fe_rope.reference.vision_rope_backward import vision_rope_backward, vision_rope_backward_native
from fe_runtime.testing import to_framework, to_numpy

FRAMEWORKS = ("numpy", "torch", "jax")
COMPILED = {function: jax.jit(function) for function in (vision_rope_backward, vision_rope_backward_native)}


def run(framework: str, function: Any, *arrays: Any) -> Any:
    (out,) = (COMPILED[function] if framework == "jax" else function)(
        *(to_framework(array, framework) for array in arrays)
    )
    return to_numpy(out)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("kind", ["normal", "bits"])
@pytest.mark.parametrize("shape", [(5, 2, 64), (3, 1, 6)], ids=str)
def test_every_bit_is_that_of_the_naive_loop(framework: str, kind: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(shape[0])
    q, k, v = (bfloats(rng, shape, kind) for _ in range(3))
    cosine, sine = tables(rng, (shape[0], shape[2] // 2), kind)
    got = run(framework, vision_rope_backward, q, k, v, cosine, sine)
    assert same_bits(got, naive(q, k, v, cosine, sine))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_arrays_as_they_are_stored(framework: str) -> None:
    rng = np.random.default_rng(1)
    q, k, v = (bfloats(rng, (7, 3, 8)) for _ in range(3))
    cosine, sine = tables(rng, (7, 4))
    stored = q.transpose(1, 0, 2).copy(), k.transpose(1, 2, 0).copy(), v.transpose(1, 0, 2).copy()
    got = run(framework, vision_rope_backward_native, *stored, cosine, sine)
    assert same_bits(got, naive(q, k, v, cosine, sine))


def test_products_are_rounded_before_the_sum() -> None:
    """A fused sum would differ: the operands cancel."""
    rng = np.random.default_rng(2)
    q, k, v = (bfloats(rng, (60, 1, 64)) for _ in range(3))
    cosine, _ = tables(rng, (60, 32))
    a, b = (q[:, 0, half * 32 : half * 32 + 32].astype(np.float32) for half in (0, 1))
    sine = (-(a * cosine) / b * (1 + rng.integers(-2, 3, (60, 32)) * 2.0**-23)).astype(np.float32)
    want = naive(q, k, v, cosine, sine)
    assert same_bits(vision_rope_backward(q, k, v, cosine, sine)[0], want)
    fused = (a.astype(np.float64) * cosine + (b * sine)).astype(np.float32).astype(q.dtype)
    assert not same_bits(fused, want[:, :32].copy())


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_v_keeps_every_bit(framework: str) -> None:
    rng = np.random.default_rng(3)
    v = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 2, 64).view(bfloats(rng, (1,)).dtype)
    zeros = np.zeros_like(v)
    cosine, sine = tables(rng, (v.shape[0], 32))
    out = run(framework, vision_rope_backward, zeros, zeros, v, cosine, sine)
    assert same_bits(out[:, 256:].copy(), v.reshape(v.shape[0], 128))


def test_it_is_the_transposed_rotation() -> None:
    """In float64, the backward of the split-half rotation ``a' = a*c - b*s, b' = b*c + a*s`` applied to gradients."""
    rng = np.random.default_rng(4)
    q, k, v = (bfloats(rng, (9, 2, 64)) for _ in range(3))
    angle = rng.uniform(-3, 3, (9, 32))
    cosine, sine = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    out = vision_rope_backward(q, k, v, cosine, sine)[0].astype(np.float64).reshape(9, 3, 2, 64)
    for part, gradient in enumerate((q, k)):
        for t in range(9):
            c, s = np.diag(cosine[t].astype(np.float64)), np.diag(sine[t].astype(np.float64))
            forward = np.block([[c, -s], [s, c]])
            want = gradient[t].astype(np.float64) @ forward
            np.testing.assert_allclose(out[t, part], want, rtol=2.0**-8, atol=1e-6)
