"""Views of the memory of JAX arrays, as the class form hands them to kernels."""

from __future__ import annotations

import gc

import fe_toy
import jax.numpy as jnp
import numpy as np
import pytest

from fe_runtime.arrays import Device, get_data_ptr
from fe_runtime.compile import cache
from fe_runtime.contract import Sample
from fe_runtime.errors import InvalidArgumentError
from fe_runtime.jax import in_place
from fe_runtime.operation import Operation
from fe_runtime.plan import HOPPER, Form, Kernel
from fe_runtime.tensor_desc import TensorDesc

VIEWS = [
    pytest.param(jnp.arange(12, dtype=jnp.float32).reshape(3, 4), (2, 6), "float32", id="reshaped"),
    pytest.param(jnp.arange(6, dtype=jnp.float16), (6,), "float16", id="float16"),
    pytest.param(jnp.arange(6, dtype=jnp.int32), (3, 2), "int32", id="int32"),
    pytest.param(jnp.ones((4, 4), jnp.float8_e4m3fn), (16,), "float8_e4m3fn", id="fp8 as bytes"),
]


@pytest.mark.parametrize(("array", "shape", "dtype"), VIEWS)
def test_views_share_the_memory(array, shape, dtype):
    view = np.from_dlpack(in_place.BufferView(array, shape, dtype))
    assert view.ctypes.data == get_data_ptr(array)
    assert view.shape == shape
    assert view.tobytes() == np.asarray(array).tobytes()


def test_views_keep_the_array_alive_and_let_it_go():
    before = len(in_place._alive)
    view = np.from_dlpack(in_place.BufferView(jnp.full(1000, 3.0), (1000,), "float32"))
    gc.collect()
    assert len(in_place._alive) == before + 1
    assert view.sum() == 3000
    del view
    gc.collect()
    assert len(in_place._alive) == before


@pytest.mark.parametrize("wait", [True, False])
def test_launch_passes_views_and_scalars(wait, monkeypatch):
    synchronised = []
    monkeypatch.setattr(in_place, "synchronize", synchronised.append)
    x, y = jnp.arange(8, dtype=jnp.float32).reshape(2, 4), jnp.zeros((2, 4), jnp.float32)
    place = Device("cuda", 0)
    sample = Sample(TensorDesc.of("float32", (2, 4), device=place), "jax", 16)
    bound = fe_toy.OPERATION.bind((sample, None), {"scale": 2.0})
    kernel = Kernel(None, Form(((8,), None), ((8,), None), ("scale", "limit")))  # the spec is not looked at

    def run(given, made, scale, limit):
        assert (scale, limit) == (2.0, 1.0)
        given, made = np.from_dlpack(given), np.from_dlpack(made)
        assert given.shape == made.shape == (8,)
        assert made.ctypes.data == get_data_ptr(y)
        np.testing.assert_array_equal(given, np.arange(8))

    in_place.in_place_launch(fe_toy.OPERATION, bound, kernel, run, wait=wait)((x, None), (y, None))
    assert synchronised == ([place, place] if wait else [])


def test_repeated_executions_of_one_object(monkeypatch):
    """The second call of a signature finds overlaps too, and waits unless that very call names a stream."""
    plan, launches, synchronised = Operation.plan, [], []
    monkeypatch.setattr(Operation, "plan", lambda self, bound, backend="auto": plan(self, bound, backend, HOPPER))
    monkeypatch.setattr(cache, "load", lambda spec: lambda *operands: launches.append(operands))
    monkeypatch.setattr(in_place, "synchronize", synchronised.append)
    x, y = jnp.ones((2, 4)), jnp.zeros((2, 4))
    operation = fe_toy.ScaleClamp(x, None, y)
    operation.compile()
    for number, stream in enumerate((0, None, 0, None, None), 1):
        operation.execute(x, None, y, current_stream=stream)
        assert len(launches) == number
    assert len(synchronised) == 6  # before and after
    with pytest.raises(InvalidArgumentError, match="y must not share memory with x"):
        operation.execute(x, None, x)
    assert len(launches) == 5
