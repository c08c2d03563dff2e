"""The reference of ``causal_conv1d_update`` against a loop that keeps every token in a Python list."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fe_conv.reference.update import causal_conv1d_update

Array = np.ndarray[Any, Any]
BF16 = ml_dtypes.bfloat16


def naive(
    x: Array,
    state: Array,
    weight: Array,
    bias: Array | None,
    lengths: Array | None,
    indices: Array | None,
    activation: str,
) -> tuple[Array, Array]:
    """Token by token, one Python float at a time; a ring is written where its counter points."""
    tokens = x if x.ndim == 3 else x[:, :, None]
    out, state = np.zeros(tokens.shape, np.float64), state.copy()
    (rows, channels, count), (slots, _, length), width = tokens.shape, state.shape, weight.shape[1]
    for n in range(rows):
        slot = n if indices is None else int(indices[n])
        if not 0 <= slot < slots:
            continue
        for k in range(count):
            for d in range(channels):
                line = list(state[slot, d])
                if lengths is not None:
                    at = (int(lengths[n]) + k) % length
                    line = line[at:] + line[:at]  # oldest first
                history = [*line, tokens[n, d, k]][len(line) + 1 - width :]
                z = math.fsum(float(w) * float(h) for w, h in zip(weight[d], history, strict=True))
                z += 0.0 if bias is None else float(bias[d])
                out[n, d, k] = z / (1 + math.exp(-z)) if activation == "silu" else z
                if lengths is not None:
                    state[slot, d, at] = tokens[n, d, k]
                elif length:
                    state[slot, d] = np.array([*line, tokens[n, d, k]], state.dtype)[1:]
    return out.reshape(x.shape), state


def case(
    rows: int, channels: int, width: int, length: int, slots: int, tokens: int | None = None, dtype: Any = np.float32
) -> tuple[Array, Array, Array, Array]:
    rng = np.random.default_rng(width * 100 + length)
    shape = (rows, channels) if tokens is None else (rows, channels, tokens)
    shapes = (shape, (slots, channels, length), (channels, width), (channels,))
    x, state, weight, bias = (rng.standard_normal(s).astype(dtype) for s in shapes)
    return x, state, weight, bias


@pytest.mark.parametrize("activation", ["identity", "silu"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("width", "length"), [(1, 0), (1, 2), (2, 1), (3, 2), (4, 3), (4, 4), (5, 9), (8, 7)])
@pytest.mark.parametrize("tokens", [None, 1, 3, 12], ids=lambda k: f"K={k}")
def test_shifted_state(tokens: int | None, width: int, length: int, biased: bool, activation: str) -> None:
    x, state, weight, bias = case(3, 5, width, length, 4, tokens)
    given = bias if biased else None
    out, new = causal_conv1d_update(x, state, weight, given, activation=activation)
    want, want_state = naive(x, state, weight, given, None, None, activation)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(new, want_state)
    assert out.shape == x.shape
    assert out.dtype == x.dtype


@pytest.mark.parametrize(("width", "length"), [(1, 1), (2, 1), (4, 3), (4, 4), (4, 7), (6, 5)])
@pytest.mark.parametrize("tokens", [None, 2, 9], ids=lambda k: f"K={k}")
def test_ring(tokens: int | None, width: int, length: int) -> None:
    x, state, weight, bias = case(4, 3, width, length, 4, tokens)
    lengths = np.array([0, length - 1, 5 * length + 2, -1], np.int32)
    out, new = causal_conv1d_update(x, state, weight, bias, lengths, activation="silu")
    want, want_state = naive(x, state, weight, bias, lengths, None, "silu")
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(new, want_state)


def test_a_ring_that_was_filled_token_by_token_is_the_shifted_state() -> None:
    x, state, weight, bias = case(2, 3, 4, 4, 2)
    shifted = ring = state
    for step in range(9):
        token = np.random.default_rng(step).standard_normal(x.shape).astype(np.float32)
        place = np.full(2, step, np.int32)
        a, shifted = causal_conv1d_update(token, shifted, weight, bias, activation="silu")
        b, ring = causal_conv1d_update(token, ring, weight, bias, place, activation="silu")
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("ring", [False, True], ids=["shifted", "ring"])
def test_indices_and_padding(ring: bool) -> None:
    x, state, weight, bias = case(5, 3, 4, 4, 7)
    indices = np.array([6, -1, 2, -1, 0], np.int32)
    lengths = np.array([3, 1, 4, 1, 5], np.int32) if ring else None
    out, new = causal_conv1d_update(x, state, weight, bias, lengths, indices, activation="silu")
    want, want_state = naive(x, state, weight, bias, lengths, indices, "silu")
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(new, want_state)
    assert not np.signbit(out[[1, 3]]).any()
    assert (out[[1, 3]] == 0).all()


def test_rows_outside_the_state_are_padding() -> None:
    x, state, weight, _ = case(4, 3, 4, 3, 2)
    out, new = causal_conv1d_update(
        x, state, weight, None, None, np.array([2, -5, 1, 2**31 - 1], np.int32), activation="identity"
    )
    assert (out[[0, 1, 3]] == 0).all()
    np.testing.assert_array_equal(new[0], state[0])
    np.testing.assert_array_equal(new[1], np.concatenate([state[1, :, 1:], x[2, :, None]], axis=1))


def test_of_duplicates_one_is_kept() -> None:
    x, state, weight, _ = case(3, 4, 4, 3, 2)
    _, new = causal_conv1d_update(x, state, weight, None, None, np.array([1, 1, 1], np.int32), activation="identity")
    candidates = [np.concatenate([state[1, :, 1:], x[n, :, None]], axis=1) for n in range(3)]
    assert any(np.array_equal(new[1], candidate) for candidate in candidates)
    np.testing.assert_array_equal(new[0], state[0])


def test_payloads_move_bit_by_bit() -> None:
    x, state, weight, _ = case(1, 4, 4, 4, 1, dtype=BF16)
    bits = state.view(np.uint16)
    bits[0, :, 1] = [0x8000, 0x7F81, 0xFFC1, 0x0001]  # -0, a signalling NaN, a NaN with payload, a subnormal
    x.view(np.uint16)[0] = [0xFF82, 0x8000, 0x7FFF, 0x8001]
    with np.errstate(invalid="ignore"):
        _, new = causal_conv1d_update(x, state, weight, activation="silu")
    np.testing.assert_array_equal(new.view(np.uint16)[0, :, :3], bits[0, :, 1:])
    np.testing.assert_array_equal(new.view(np.uint16)[0, :, 3], x.view(np.uint16)[0])


def test_one_rounding_and_an_oracle() -> None:
    x, state, weight, bias = case(3, 8, 4, 4, 3, dtype=BF16)
    exact, _ = causal_conv1d_update(x, state, weight, bias, activation="silu", compute="float64")
    np.testing.assert_allclose(exact, naive(x, state, weight, bias, None, None, "silu")[0], rtol=1e-13, atol=1e-15)
    out, _ = causal_conv1d_update(x, state, weight, bias, activation="silu")
    assert out.dtype == BF16
    np.testing.assert_allclose(out.astype(np.float64), exact, rtol=2.0**-8, atol=1e-6)


def test_no_rows_and_no_tokens() -> None:
    x, state, weight, _ = case(0, 4, 4, 3, 2)
    indices = np.empty(0, np.int32)
    out, new = causal_conv1d_update(x, state, weight, None, None, indices, activation="silu")
    assert out.shape == (0, 4)
    np.testing.assert_array_equal(new, state)
    x, state, weight, _ = case(2, 4, 4, 3, 2, tokens=0)
    for lengths in (None, np.array([1, 2], np.int32)):
        out, new = causal_conv1d_update(x, state, weight, None, lengths, activation="silu")
        assert out.shape == (2, 4, 0)
        np.testing.assert_array_equal(new, state)


def to_torch(array: Array) -> Any:
    import torch

    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def to_jax(array: Array) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(array)


def bits_of(array: Any) -> Array:
    if hasattr(array, "detach"):
        import torch

        return np.asarray(array.contiguous().view(torch.uint16 if array.itemsize == 2 else torch.uint32))
    return np.asarray(array).view(np.uint16 if array.dtype.itemsize == 2 else np.uint32)


@pytest.mark.parametrize("convert", [to_torch, to_jax], ids=["torch", "jax"])
@pytest.mark.parametrize("ring", [False, True], ids=["shifted", "ring"])
@pytest.mark.parametrize("tokens", [None, 3], ids=lambda k: f"K={k}")
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=["fp32", "fp16", "bf16"])
def test_frameworks_agree(convert: Callable[[Array], Any], dtype: Any, tokens: int | None, ring: bool) -> None:
    x, state, weight, bias = case(6, 8, 4, 5, 9, tokens, dtype)
    indices = np.array([8, 3, -1, 0, 5, -1], np.int32)
    lengths = np.array([3, 1, 4, 1, 5, 9], np.int32) if ring else None
    want, want_state = causal_conv1d_update(x, state, weight, bias, lengths, indices, activation="silu")
    given = [None if a is None else convert(a) for a in (x, state, weight, bias, lengths, indices)]
    got, new = causal_conv1d_update(*given, activation="silu")
    assert type(got).__module__.split(".")[0] != "numpy"
    np.testing.assert_array_equal(bits_of(new), bits_of(want_state))
    apart = np.abs(bits_of(got).astype(np.int64) - bits_of(want).astype(np.int64))
    assert apart.max() <= (1 if dtype != np.float32 else 64)  # another library's exp rounds another way
