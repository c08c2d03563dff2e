"""The reference of ``tail_rope`` against a naive loop in exact arithmetic, bit for bit, in every framework."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
from naive_rope import bfloats, same_bits, tables
from naive_rope import tail_rope as naive

from fe_rope.reference.tail_rope import tail_rope
from fe_runtime.testing import to_framework, to_numpy

FRAMEWORKS = ("numpy", "torch", "jax")
COMPILED = jax.jit(tail_rope)


def run(framework: str, *arrays: Any) -> Any:
    function = COMPILED if framework == "jax" else tail_rope
    (out,) = function(*(to_framework(array, framework) for array in arrays))
    return to_numpy(out)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("kind", ["normal", "bits"])
@pytest.mark.parametrize("shape", [(3, 64), (2, 3, 66), (2, 1, 2, 96)], ids=str)
def test_every_bit_is_that_of_the_naive_loop(framework: str, kind: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(shape))
    x = bfloats(rng, shape, kind)
    cosine, sine = tables(rng, (shape[0], 32), kind)
    assert same_bits(run(framework, x, cosine, sine), naive(x, cosine, sine))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_cancelling_products_are_rounded_once(framework: str) -> None:
    """``a * c`` close to ``RN(b * s)``: what a product rounded before the sum loses is then all that is left."""
    rng = np.random.default_rng(5)
    x = bfloats(rng, (40, 64))
    cosine, _ = tables(rng, (40, 32))
    a, b = (x[:, part::2].astype(np.float32) for part in (0, 1))
    sine = (a * cosine / b * (1 + rng.integers(-2, 3, (40, 32)) * 2.0**-23)).astype(np.float32)
    want = naive(x, cosine, sine)
    assert same_bits(run(framework, x, cosine, sine), want)
    unfused = (a * cosine - b * sine).astype(x.dtype)
    assert not same_bits(unfused, want[:, ::2])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_copied_channels_keep_every_bit(framework: str) -> None:
    x = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 64)
    x = np.concatenate([x, np.zeros_like(x)], axis=1).view(bfloats(np.random.default_rng(0), (1,)).dtype)
    cosine, sine = tables(np.random.default_rng(1), (x.shape[0], 32))
    out = run(framework, x, cosine, sine)
    assert same_bits(out[:, :64].copy(), x[:, :64].copy())


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_values_that_are_not_finite_stay_in_their_pair(framework: str) -> None:
    rng = np.random.default_rng(2)
    x, (cosine, sine) = bfloats(rng, (2, 64)), tables(rng, (2, 32))
    clean = run(framework, x, cosine, sine).astype(np.float32)
    x[0, 4], x[1, 9] = np.nan, np.inf
    out = run(framework, x, cosine, sine).astype(np.float32)
    assert np.isnan(out[0, 4:6]).all()
    assert np.isinf(out[1, 8:10]).all()
    out[0, 4:6], out[1, 8:10] = clean[0, 4:6], clean[1, 8:10]
    np.testing.assert_array_equal(out, clean)


def test_negated_sines_rotate_back() -> None:
    rng = np.random.default_rng(3)
    x = bfloats(rng, (50, 2, 128))
    angle = rng.uniform(-3, 3, (50, 32))
    cosine, sine = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    back = tail_rope(tail_rope(x, cosine, sine)[0], cosine, -sine)[0]
    # Two roundings to bf16, each half a unit of values up to the length of the pair.
    length = np.hypot(*(x[..., 64 + part :: 2].astype(np.float64) for part in (0, 1)))
    error = np.abs(back.astype(np.float64) - x.astype(np.float64))[..., 64:].reshape(50, 2, 32, 2)
    assert (error <= 3 * 2.0**-8 * length[..., None]).all()


def test_torch_keeps_the_device_and_makes_no_graph() -> None:
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    (out,) = tail_rope(x, torch.ones(2, 32), torch.zeros(2, 32))
    assert torch.equal(out, x)
    assert not out.requires_grad


def test_jax_gives_the_same_bits_without_jit() -> None:
    rng = np.random.default_rng(6)
    x, (cosine, sine) = bfloats(rng, (4, 96), "bits"), tables(rng, (4, 32), "bits")
    (out,) = tail_rope(*(to_framework(array, "jax") for array in (x, cosine, sine)))
    assert same_bits(np.asarray(out), naive(x, cosine, sine))
