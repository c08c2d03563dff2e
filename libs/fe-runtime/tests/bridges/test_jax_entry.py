"""The JAX entry and the wrapper on JAX arrays: eager, under jit, differentiated, and what raises."""

from __future__ import annotations

import fe_toy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fe_toy import expected

from fe_runtime import jax as bridge
from fe_runtime.errors import InvalidArgumentError, NotSupportedError
from fe_runtime.tuple_dict import TupleDict

X = expected.sample(3, 4)
BIAS = np.float32([0.2, -0.4, 0.1, 0.6])
WEIGHT = np.float32([1.0, -2.0, 0.5, 3.0])


def entry(x, bias=None, **options):
    return fe_toy.scale_clamp_jax(x, bias, **options)


def loss(x, bias):
    return (entry(x, bias, scale=0.5)[0] * WEIGHT).sum()


def dx(bias=BIAS):
    return expected.derivative(lambda v: (expected.value(v, bias, 0.5) * WEIGHT).sum(), X)


def dbias(bias=BIAS):
    return expected.derivative(lambda v: (expected.value(X, v, 0.5) * WEIGHT).sum(), bias)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_values(transform):
    y, kept = transform(lambda x, b: entry(x, b, scale=2.0, limit=0.5, mask=True))(jnp.asarray(X), jnp.asarray(BIAS))
    np.testing.assert_allclose(y, expected.value(X, BIAS, 2.0, 0.5), rtol=1e-6)
    np.testing.assert_array_equal(kept, expected.kept(X, BIAS, 2.0, 0.5))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_wrapper(transform):
    made = transform(lambda x: fe_toy.scale_clamp(x, None, 2.0))(jnp.asarray(X))
    assert isinstance(made, TupleDict)
    assert list(made.keys()) == ["y", "kept"]
    assert made["kept"] is None
    np.testing.assert_allclose(made["y"], expected.value(X, scale=2.0), rtol=1e-6)


def test_absent_outputs_are_none():
    assert entry(jnp.asarray(X))[1] is None


def test_numpy_arrays_are_taken_by_the_entry():
    y, _ = entry(X)
    assert isinstance(y, jax.Array)


def test_a_warm_eager_call_is_not_bound_again(monkeypatch):
    x = jnp.asarray(expected.sample(11, 4))
    first = entry(x)[0]
    monkeypatch.setattr(fe_toy.OPERATION, "bind", None)
    np.testing.assert_array_equal(entry(x + 0)[0], first)


def test_scalars_are_part_of_the_signature():
    x = jnp.asarray(X)
    assert not np.array_equal(entry(x, scale=2.0)[0], entry(x, scale=3.0)[0])


def test_eval_shape():
    shapes = jax.eval_shape(
        lambda x: entry(x, out_dtype=jnp.float8_e4m3fn, mask=True), jax.ShapeDtypeStruct((5, 2, 4), jnp.bfloat16)
    )
    assert [(s.shape, s.dtype) for s in shapes] == [((5, 2, 4), jnp.float8_e4m3fn), ((5, 2, 4), jnp.uint8)]


def test_the_operation_is_one_primitive():
    program = str(jax.make_jaxpr(lambda x: entry(x)[0])(X))
    assert "fe_toy.scale_clamp[call=fe_toy.scale_clamp]" in program


def test_empty_arrays():
    y, kept = entry(jnp.ones((0, 4)), mask=True)
    assert (y.shape, kept.shape) == ((0, 4), (0, 4))


def test_donated_inputs():
    @jax.jit
    def keep(x):
        return entry(x)[0]

    donate = jax.jit(lambda x: entry(x)[0], donate_argnums=0)
    np.testing.assert_array_equal(donate(jnp.asarray(X)), keep(X))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_gradients(transform):
    found = transform(jax.grad(loss, (0, 1)))(jnp.asarray(X), jnp.asarray(BIAS))
    np.testing.assert_allclose(found[0], dx(), atol=1e-6)
    np.testing.assert_allclose(found[1], dbias(), atol=1e-6)


def test_gradients_keep_shape_and_dtype():
    found = jax.grad(loss, (0, 1))(jnp.asarray(X, jnp.bfloat16), jnp.asarray(BIAS[None], jnp.bfloat16))
    assert [(g.shape, g.dtype) for g in found] == [((3, 4), jnp.bfloat16), ((1, 4), jnp.bfloat16)]


def test_gradient_of_the_wrapper_with_a_constant_output():
    found = jax.grad(lambda x: fe_toy.scale_clamp(x, mask=True)["y"].sum())(jnp.asarray(X))
    np.testing.assert_array_equal(found, np.abs(X) <= 1)


def test_gradient_under_checkpoint_and_scan():
    def total(rows):
        def step(carry, x):
            return carry + jax.checkpoint(lambda v: (entry(v)[0] ** 2).sum())(x), None

        return jax.lax.scan(step, 0.0, rows)[0]

    rows = expected.sample(5, 3, 4)
    np.testing.assert_allclose(jax.grad(total)(jnp.asarray(rows)), 2 * rows * (np.abs(rows) <= 1), rtol=1e-6)


def test_double_differentiation_raises():
    def first(x):
        return jax.grad(lambda v: (entry(v)[0] ** 2).sum())(x).sum()

    with pytest.raises(NotSupportedError, match="scale_clamp_jax has no second derivative"):
        jax.grad(first)(jnp.asarray(X))


@pytest.mark.parametrize("call", [fe_toy.scale_clamp_detached, fe_toy.scale_clamp_inference])
def test_operations_without_gradient_raise(call):
    with pytest.raises(NotSupportedError, match="has no derivative"):
        jax.grad(lambda x: call(x)["y"].sum())(jnp.asarray(X))
    found = jax.grad(lambda x: (x * call(jax.lax.stop_gradient(x))["y"]).sum())(jnp.asarray(X))
    np.testing.assert_allclose(found, expected.value(X), rtol=1e-6)


def test_vmap_raises():
    with pytest.raises(NotSupportedError, match=r"scale_clamp_jax has no batching rule for jax\.vmap"):
        jax.vmap(lambda x: entry(x)[0])(jnp.asarray(X))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"scale": "2"}, TypeError, "scale must be a Python float"),
        ({"limit": -1.0}, InvalidArgumentError, "limit must be positive"),
        ({"backend": "fast"}, InvalidArgumentError, "backend must be one of"),
        ({"backend": "sm90"}, NotSupportedError, "the arrays are on cpu"),
        ({"bias": jnp.ones(2)}, InvalidArgumentError, r"bias must have shape \(C,\)"),
        ({"bias": [1.0, 2.0]}, TypeError, "bias must be an array"),
    ],
)
def test_errors(transform, options, error, text):
    with pytest.raises(error, match=text):
        transform(lambda x: entry(x, **options))(jnp.asarray(X))


def test_the_backend_is_honoured():
    np.testing.assert_allclose(entry(jnp.asarray(X), backend="reference")[0], expected.value(X), rtol=1e-6)


def test_streams_are_rejected():
    with pytest.raises(InvalidArgumentError, match=r"stream must be None for JAX arrays.*scale_clamp_jax"):
        fe_toy.scale_clamp(jnp.asarray(X), stream=0)


def test_other_frameworks_are_rejected():
    import torch

    with pytest.raises(InvalidArgumentError, match="x must be a JAX array; got torch"):
        entry(torch.ones(3, 4))
    with pytest.raises(InvalidArgumentError, match="bias must come from the framework of x"):
        fe_toy.scale_clamp(jnp.asarray(X), BIAS)


def test_reject_names_the_argument():
    bridge.reject(fe_toy.OPERATION, out=None, stream=None)
    with pytest.raises(InvalidArgumentError, match="scale_clamp: stream must be None for JAX arrays"):
        bridge.reject(fe_toy.OPERATION, out=None, stream=0)


def test_class_api_on_the_cpu_names_the_entry():
    x, y = jnp.asarray(X), jnp.zeros((3, 4))
    operation = fe_toy.ScaleClamp(x, None, y)
    assert operation.check_support() is True
    operation.compile()
    with pytest.raises(InvalidArgumentError, match=r"y must be writable.*Call scale_clamp_jax"):
        operation.execute(x, None, y)
