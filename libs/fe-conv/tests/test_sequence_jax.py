"""``causal_conv1d_jax``: eagerly, under ``jit``, ``grad``, ``eval_shape``; layouts; what it refuses."""

from __future__ import annotations

from typing import Any

import conv_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fe_conv import causal_conv1d_jax
from fe_runtime import DtypeError, InvalidArgumentError, NotSupportedError

D, T, W = 3, 11, 4
OFFSETS = np.array([0, 1, 4, 4, 6, 11], np.int32)
LABELS = np.array([[0, 0, 0, 1, 1, -1, -1, 1, 0, 0, 2], [5, 5, 5, 5, 5, 5, 5, 4, 4, -3, 5]], np.int32)
MODES: dict[str, dict[str, Any]] = {
    "rows": {},
    "rows with states": {"states": True},
    "packed": {"offsets": OFFSETS},
    "packed with states": {"offsets": OFFSETS, "states": True},
    "labels": {"labels": LABELS},
}


def case(mode: str, dtype: Any = np.float32) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the operands by the oracle's names, and where the sequences lie."""
    where = {name: value for name, value in MODES[mode].items() if name != "states"}
    batch = 1 if "offsets" in where else 2
    rows = len(OFFSETS) - 1 if "offsets" in where else batch
    values = oracle.operands(batch, D, T, W, rows=rows)
    if "states" not in MODES[mode]:
        del values["states"]
    return {name: value.astype(dtype) for name, value in values.items()}, where


def call(values: dict[str, Any], where: dict[str, Any], channel_last: bool, **options: Any) -> tuple[Any, ...]:
    """Return y as (B, D, T), and the final states where there are any."""
    x = values["x"].swapaxes(1, 2) if channel_last else values["x"]
    has_final = "labels" not in where
    result = causal_conv1d_jax(
        x,
        values["weight"],
        values.get("bias"),
        "silu",
        initial_states=values.get("states"),
        seq_idx=where.get("labels"),
        cu_seqlens=where.get("offsets"),
        return_final_states=has_final,
        channel_last=channel_last,
        **options,
    )
    y, *final = result if has_final else (result,)
    return (y.swapaxes(1, 2) if channel_last else y, *final)


@pytest.mark.parametrize("channel_last", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_values_and_gradients(mode: str, channel_last: bool) -> None:
    values, where = case(mode)
    jitted = jax.jit(lambda v, w: call(v, w, channel_last))
    want = oracle.forward(**values, activation="silu", **where)
    for results in (call(values, where, channel_last), jitted(values, where)):
        for got, exact in zip(results, want, strict=False):
            np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-6)

    rng = np.random.default_rng(4)
    grads = [rng.standard_normal(result.shape).astype(np.float32) for result in results]
    dfinal = grads[1] if len(grads) > 1 else None
    want_gradients = oracle.backward(grads[0], dfinal, **values, activation="silu", **where)
    scales = oracle.backward(grads[0], dfinal, **values, activation="silu", absolute=True, **where)

    def loss(v: Any, w: Any) -> Any:
        return sum(jnp.vdot(result, grad) for result, grad in zip(call(v, w, channel_last), grads, strict=True))

    for differentiate in (jax.grad(loss), jax.jit(jax.grad(loss))):
        for name, gradient in differentiate(values, where).items():
            error = np.abs(np.asarray(gradient, np.float64) - want_gradients[name])
            assert (error <= 2.0**-18 * scales[name]).all(), name


def test_one_program_serves_every_content_of_the_offsets() -> None:
    values, _ = case("packed")
    jitted = jax.jit(lambda v, offsets: call(v, {"offsets": offsets}, True))
    for offsets in (OFFSETS, OFFSETS[::-1].copy(), np.array([0, 11, 11, 11, 11, 11], np.int32)):
        assert np.isfinite(jitted(values, offsets)[0]).all()
    assert jitted._cache_size() == 1


def test_shapes_and_dtypes_without_data() -> None:
    values, where = case("packed with states", jnp.bfloat16)
    y, final = jax.eval_shape(lambda v: call(v, where, True), values)
    assert (y.shape, y.dtype) == ((1, D, T), jnp.bfloat16)
    assert (final.shape, final.dtype) == ((5, D, W - 1), jnp.bfloat16)


def test_gradients_have_the_dtypes_of_their_operands() -> None:
    values, where = case("rows with states", jnp.bfloat16)
    values["weight"] = values["weight"].astype(np.float32)
    found = jax.grad(lambda v: call(v, where, False)[0].astype(jnp.float32).sum())(values)
    assert {name: gradient.dtype.name for name, gradient in found.items()} == {
        "x": "bfloat16",
        "weight": "float32",
        "bias": "bfloat16",
        "states": "bfloat16",
    }


def test_lowering_needs_no_gpu() -> None:
    values, where = case("rows")
    assert "stablehlo" in jax.jit(lambda v: call(v, where, True)).lower(values).as_text()


def test_what_is_static_must_be() -> None:
    values, _ = case("rows")
    with pytest.raises(TypeError, match="causal_conv1d: channel_last must be a Python bool"):
        jax.jit(lambda flag: causal_conv1d_jax(values["x"], values["weight"], channel_last=flag))(True)
    with pytest.raises(TypeError, match="causal_conv1d: return_final_states must be a Python bool"):
        jax.jit(lambda flag: causal_conv1d_jax(values["x"], values["weight"], return_final_states=flag))(True)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"activation": "gelu"}, NotSupportedError),
        ({"cu_seqlens": np.array([0, 4], np.int32)}, InvalidArgumentError),
        ({"initial_states": np.zeros((2, D, W), np.float32)}, InvalidArgumentError),
        ({"initial_states": np.zeros((2, D, W - 1), np.float16)}, DtypeError),
        ({"seq_idx": LABELS, "return_final_states": True}, InvalidArgumentError),
        ({"bias": [1.0]}, TypeError),
    ],
    ids=["activation", "packed rows", "state width", "state dtype", "labels and states", "list"],
)
def test_errors_are_those_of_the_contract(changed: dict[str, Any], error: type[Exception]) -> None:
    values, _ = case("rows")
    with pytest.raises(error) as caught:
        causal_conv1d_jax(values["x"], values["weight"], **changed)
    assert type(caught.value) is error


def test_vmap_is_refused() -> None:
    values, _ = case("rows")
    many = jnp.stack([values["x"]] * 2)
    with pytest.raises(NotSupportedError, match=r"causal_conv1d_jax has no batching rule for jax\.vmap"):
        jax.vmap(lambda x: causal_conv1d_jax(x, values["weight"]))(many)
