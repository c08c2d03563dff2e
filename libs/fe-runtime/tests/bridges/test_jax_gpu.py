"""The JAX bridge with the toy kernel on a GPU."""

from __future__ import annotations

import fe_toy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fe_toy import expected
from fe_toy.kernels import accumulate

from fe_runtime import env
from fe_runtime import jax as bridge
from fe_runtime.errors import InvalidArgumentError

pytestmark = pytest.mark.gpu

X = expected.sample(6, 8)
BIAS = expected.sample(8, seed=1)


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    env.configure(cache_dir=tmp_path_factory.mktemp("kernels"))
    yield
    env.configure(cache_dir=None)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_values(transform, dtype):
    x, bias = jnp.asarray(X, dtype), jnp.asarray(BIAS, dtype)
    y, _ = transform(lambda x, b: fe_toy.scale_clamp_jax(x, b, scale=2.0, limit=0.75, backend="sm90"))(x, bias)
    assert y.dtype == dtype
    want = expected.value(np.float32(x), np.float32(bias), 2.0, 0.75)
    np.testing.assert_allclose(np.float32(y), want, rtol=2 * float(jnp.finfo(dtype).eps), atol=1e-6)


def test_fp8_and_leading_dimensions():
    y, _ = fe_toy.scale_clamp_jax(jnp.asarray(X).reshape(2, 3, 8), out_dtype=jnp.float8_e4m3fn, backend="sm90")
    assert (y.dtype, y.shape) == (jnp.float8_e4m3fn, (2, 3, 8))
    np.testing.assert_allclose(np.float32(y).reshape(6, 8), expected.value(X), rtol=2**-4, atol=2**-10)


def test_wrapper():
    y = fe_toy.scale_clamp(jnp.asarray(X), scale=2.0)["y"]
    assert next(iter(y.devices())).platform == "gpu"
    np.testing.assert_allclose(y, expected.value(X, scale=2.0), rtol=1e-6)


def test_the_call_is_ordered_with_its_neighbours():
    @jax.jit
    def chain(x, matrix):
        for _ in range(4):
            matrix = matrix @ matrix / 2048  # stays all ones
        x = x * matrix[0, 0]
        return fe_toy.scale_clamp_jax(x)[0] + 1

    for seed in range(3):
        x = expected.sample(6, 8, seed=seed)
        np.testing.assert_allclose(chain(x, jnp.ones((2048, 2048))), expected.value(x) + 1, rtol=1e-5)


def test_loops_reuse_the_kernel():
    rows = expected.sample(50, 6, 8)
    made = jax.jit(lambda rows: jax.lax.map(lambda x: fe_toy.scale_clamp_jax(x)[0], rows))(rows)
    np.testing.assert_allclose(made, expected.value(rows), rtol=1e-6)


@pytest.mark.filterwarnings("ignore::fe_runtime.errors.FallbackWarning")  # the backward has no kernel
def test_gradients():
    found = jax.jit(jax.grad(lambda x, b: (fe_toy.scale_clamp_jax(x, b, scale=0.5)[0] ** 2).sum(), (0, 1)))(X, BIAS)
    z = 0.5 * X + BIAS
    np.testing.assert_allclose(found[0], z * (np.abs(z) <= 1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], (2 * z * (np.abs(z) <= 1)).sum(0), rtol=1e-5, atol=1e-5)


def test_donated_input():
    made = jax.jit(lambda x: fe_toy.scale_clamp_jax(x)[0], donate_argnums=0)(jnp.asarray(X))
    np.testing.assert_allclose(made, expected.value(X), rtol=1e-6)


@pytest.mark.parametrize("stream", [None, 0])
def test_class_writes_in_place(stream):
    x, y = jnp.asarray(X), jnp.zeros((6, 8))
    operation = fe_toy.ScaleClamp(x, None, y, scale=2.0)
    operation.compile()
    operation.execute(x, None, y, current_stream=stream)
    if stream is not None:
        jax.block_until_ready(jnp.asarray(0) + 1)
        import ctypes

        ctypes.CDLL("libcuda.so.1").cuCtxSynchronize()
    np.testing.assert_allclose(y, expected.value(X, scale=2.0), rtol=1e-6)
    with pytest.raises(InvalidArgumentError, match="not share memory"):
        operation.execute(x, None, x)


def test_class_takes_more_rows():
    operation = fe_toy.ScaleClamp(jnp.asarray(X), None, jnp.zeros((6, 8)))
    operation.compile()
    x, y = jnp.asarray(expected.sample(20, 8)), jnp.zeros((20, 8))
    operation.execute(x, None, y)
    np.testing.assert_allclose(y, expected.value(np.asarray(x)), rtol=1e-6)


def test_call():
    struct = jax.ShapeDtypeStruct((32,), jnp.float32)
    x = jnp.arange(32, dtype=jnp.float32)
    np.testing.assert_array_equal(bridge.call(accumulate.double, output_shape_dtype=struct)(x), 2 * np.arange(32))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_initialised_outputs_do_not_accumulate_over_executions(transform):
    struct = jax.ShapeDtypeStruct((32,), jnp.float32)
    starts = {0: bridge.zeros_init, 1: lambda s: jnp.full(s.shape, 5.0, s.dtype)}
    function = transform(
        bridge.call(accumulate.add, output_shape_dtype=(struct, struct), initialized_outputs=starts, factor=3)
    )
    x = jnp.arange(32, dtype=jnp.float32)
    for _ in range(3):
        y, z = function(x)
        np.testing.assert_array_equal(y, np.arange(32))
        np.testing.assert_array_equal(z, 5 + 3 * np.arange(32))
