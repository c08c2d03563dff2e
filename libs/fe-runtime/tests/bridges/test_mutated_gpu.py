"""Operations that write into an input, with scratch memory and value checks, on a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from fe_toy import add_rows as toy

from fe_runtime import env
from fe_runtime.errors import InvalidArgumentError

pytestmark = pytest.mark.gpu

RANDOM = np.random.default_rng(0)
TOTAL = RANDOM.standard_normal(8).astype(np.float32)
X = RANDOM.standard_normal((5, 8)).astype(np.float32)
ROWS = np.array([0, 3, 3, 4], np.int32)


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    env.configure(cache_dir=tmp_path_factory.mktemp("kernels"))
    yield
    env.configure(cache_dir=None, check_device_values=None)


def tensors():
    return tuple(torch.tensor(array, device="cuda") for array in (TOTAL, X, ROWS))


def assert_total(total, times=1):
    want = TOTAL + times * toy.expected(TOTAL, X, ROWS)[1]
    np.testing.assert_allclose(total.cpu() if isinstance(total, torch.Tensor) else total, want, rtol=1e-5)


def test_wrapper_writes_in_place_and_counts_the_change():
    total, x, rows = tensors()
    for times in (1, 2, 3):
        before = total._version
        added = toy.add_rows(total, x, rows, backend="sm90")
        assert total._version > before
        assert_total(total, times)
    np.testing.assert_allclose(added.cpu(), toy.expected(TOTAL, X, ROWS)[1], rtol=1e-5)


def test_operation_without_outputs():
    total, x, rows = tensors()
    assert toy.add_rows_silently(total, x, rows, backend="sm90") is total
    assert_total(total)


@pytest.mark.parametrize("silent", [False, True])
def test_class_and_graph(silent):
    total, x, rows = tensors()
    added = () if silent else (torch.empty(8, device="cuda"),)
    operation = (toy.AddRowsSilently if silent else toy.AddRows)(total, x, rows, *added)
    operation(total, x, rows, *added)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operation.execute(total, x, rows, *added)
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert_total(total, 3)


@pytest.mark.parametrize("function", [toy.add_rows, toy.add_rows_silently])
def test_compiled(function):
    torch._dynamo.reset()
    total, x, rows = tensors()
    torch.compile(lambda *given: function(*given), fullgraph=True)(total, x, rows)
    assert_total(total)


def test_overlap():
    _, x, rows = tensors()
    with pytest.raises(InvalidArgumentError, match="total must not share memory with x"):
        toy.add_rows(x[1], x, rows)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_jax(transform):
    total, x, rows = map(jnp.asarray, (TOTAL, X, ROWS))
    new_total, added = transform(lambda *given: toy.add_rows_jax(*given, backend="sm90"))(total, x, rows)
    assert_total(np.asarray(new_total))
    np.testing.assert_allclose(added, toy.expected(TOTAL, X, ROWS)[1], rtol=1e-5)
    np.testing.assert_array_equal(total, TOTAL)


def test_jax_donated():
    step = jax.jit(lambda *given: toy.add_rows_jax(*given)[0], donate_argnums=0)
    total, x, rows = map(jnp.asarray, (TOTAL, X, ROWS))
    for _ in range(3):
        total = step(total, x, rows)
    assert_total(np.asarray(total), 3)


def test_checked_mode_reads_the_values():
    total, x, _ = tensors()
    rows = torch.tensor([0, 7], dtype=torch.int32, device="cuda")
    env.configure(check_device_values=True)
    try:
        added = torch.empty(8, device="cuda")
        for run in (toy.add_rows, lambda *given: toy.AddRows(*given, added)(*given, added)):
            with pytest.raises(InvalidArgumentError, match=r"rows must name rows 0 to 4; got \[7\]"):
                run(total, x, rows)
    finally:
        env.configure(check_device_values=None)
    np.testing.assert_array_equal(total.cpu(), TOTAL)
