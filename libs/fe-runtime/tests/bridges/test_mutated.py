"""Operations that write into an input: numpy, torch and JAX on the CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from fe_toy import add_rows as toy

from fe_runtime import env
from fe_runtime.errors import DtypeError, InvalidArgumentError
from fe_runtime.testing import Call, assert_rejected, invalid_calls, to_framework

RANDOM = np.random.default_rng(0)
TOTAL = RANDOM.standard_normal(8).astype(np.float32)
X = RANDOM.standard_normal((5, 8)).astype(np.float32)
ROWS = np.array([0, 3, 3, 4], np.int32)


def arrays(framework="numpy"):
    return tuple(to_framework(array.copy(), framework) for array in (TOTAL, X, ROWS))


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_input_changes_and_the_output_is_returned(framework):
    total, x, rows = arrays(framework)
    added = toy.add_rows(total, x, rows)
    want_total, want_added = toy.expected(TOTAL, X, ROWS)
    np.testing.assert_allclose(total, want_total, rtol=1e-6)
    np.testing.assert_allclose(added, want_added, rtol=1e-6)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_operation_without_outputs(framework):
    total, x, rows = arrays(framework)
    assert toy.add_rows_silently(total, x, rows) is total
    np.testing.assert_allclose(total, toy.expected(TOTAL, X, ROWS)[0], rtol=1e-6)


def test_strided_numpy_input_changes():
    wide = np.repeat(TOTAL, 2)
    total = wide[:8]
    toy.add_rows(total, X, ROWS)
    np.testing.assert_allclose(wide[8:], np.repeat(TOTAL, 2)[8:])
    np.testing.assert_allclose(total, toy.expected(np.repeat(TOTAL, 2)[:8], X, ROWS)[0], rtol=1e-6)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_class_writes_both(framework):
    total, x, rows = arrays(framework)
    added = to_framework(np.zeros(8, np.float32), framework)
    toy.AddRows(total, x, rows, added)(total, x, rows, added)
    want_total, want_added = toy.expected(TOTAL, X, ROWS)
    np.testing.assert_allclose(total, want_total, rtol=1e-6)
    np.testing.assert_allclose(added, want_added, rtol=1e-6)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_mutated_input_may_overlap_no_other(framework):
    _, x, rows = arrays(framework)
    for run in (toy.add_rows, toy.add_rows_silently, lambda *given: toy.AddRowsSilently(*given)(*given)):
        with pytest.raises(InvalidArgumentError, match="total must not share memory with x"):
            run(x[1], x, rows)
    np.testing.assert_array_equal(x, X)


def test_output_may_not_overlap_the_mutated_input():
    total, x, rows = arrays()
    with pytest.raises(InvalidArgumentError, match="added must not share memory with total"):
        toy.AddRows(total, x, rows, np.zeros(8, np.float32))(total, x, rows, total)


def test_read_only_array():
    total, x, rows = arrays()
    total.flags.writeable = False
    with pytest.raises(InvalidArgumentError, match=r"add_rows: total must be writable; got a read-only array\."):
        toy.add_rows(total, x, rows)


def test_torch_sees_the_change():
    total, x, rows = arrays("torch")
    factor = torch.ones(8, requires_grad=True)
    product = factor * total
    before = total._version
    toy.add_rows(total, x, rows)
    assert total._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_schema():
    schema = str(torch.ops.fe_toy.add_rows.default._schema)
    assert schema == 'fe_toy::add_rows(Tensor(a!) total, Tensor x, Tensor rows, *, str backend="auto") -> Tensor'
    assert str(torch.ops.fe_toy.add_rows_silently.default._schema).endswith("-> ()")


@pytest.mark.parametrize("name", ["add_rows", "add_rows_silently"])
def test_opcheck(name):
    torch.library.opcheck(getattr(torch.ops.fe_toy, name).default, arrays("torch"))


@pytest.mark.parametrize("function", [toy.add_rows, toy.add_rows_silently])
def test_compiled(function):
    torch._dynamo.reset()
    total, x, rows = arrays("torch")
    torch.compile(lambda *given: function(*given), fullgraph=True, backend="aot_eager")(total, x, rows)
    np.testing.assert_allclose(total, toy.expected(TOTAL, X, ROWS)[0], rtol=1e-6)


def test_vmap_has_no_rule():
    total, x, rows = arrays("torch")
    with pytest.raises(NotImplementedError, match="writes into its inputs"):
        torch.vmap(toy.add_rows, in_dims=(0, None, None))(total.expand(3, 8).clone(), x, rows)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_jax_entry_returns_the_new_value(transform):
    total, x, rows = arrays("jax")
    new_total, added = transform(toy.add_rows_jax)(total, x, rows)
    want_total, want_added = toy.expected(TOTAL, X, ROWS)
    np.testing.assert_allclose(new_total, want_total, rtol=1e-6)
    np.testing.assert_allclose(added, want_added, rtol=1e-6)
    np.testing.assert_array_equal(total, TOTAL)


def test_wrapper_on_jax_arrays_names_the_entry():
    with pytest.raises(InvalidArgumentError, match=r"total must be writable; .*fe_toy\.add_rows_jax"):
        toy.add_rows(*arrays("jax"))


def test_cuda_lowering_aliases_the_buffer(tmp_path):
    env.configure(cache_dir=tmp_path)
    try:
        traced = jax.jit(toy.add_rows_jax).trace(*map(jnp.asarray, arrays()))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    finally:
        env.configure(cache_dir=None)
    (line,) = [line for line in text.splitlines() if "custom_call" in line]
    assert "output_operand_alias<output_tuple_indices = [1], operand_index = 0" in line
    results = line.partition("->")[2]
    assert results.count("tensor<8xf32>") == 2  # the sum and the new total
    assert "tensor<2x8xf32>" in results  # the scratch


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_values_on_the_cpu_are_checked(framework):
    total, x, _ = arrays(framework)
    rows = to_framework(np.array([0, 5, -1], np.int32), framework)
    run = toy.add_rows_jax if framework == "jax" else toy.add_rows
    with pytest.raises(InvalidArgumentError, match=r"add_rows: rows must name rows 0 to 4; got \[5, -1\]\."):
        run(total, x, rows)
    np.testing.assert_array_equal(total, TOTAL)


def test_values_are_checked_by_the_class_too():
    total, x, rows = arrays()
    operation = toy.AddRows(total, x, rows, np.zeros(8, np.float32))
    with pytest.raises(InvalidArgumentError, match="rows must name rows"):
        operation(total, x, np.full_like(rows, 9), np.zeros(8, np.float32))


@pytest.mark.parametrize("call", invalid_calls(toy.CONTRACT, Call((TOTAL, X, ROWS), {})), ids=lambda call: call.id)
def test_invalid_calls(call):
    assert_rejected(lambda given, _options: toy.add_rows(*given), "add_rows", call)


def test_dtype_errors_are_of_the_class_that_the_contract_names():
    with pytest.raises(DtypeError, match="total must have dtype float32; got float64"):
        toy.add_rows(TOTAL.astype(np.float64), X, ROWS)


def test_lazily_negated_tensors_are_refused() -> None:
    total, x, rows = arrays("torch")
    with pytest.raises(InvalidArgumentError, match=r"total must be writable; got a lazily negated tensor"):
        toy.add_rows(torch._neg_view(total), x, rows)
    added = torch.zeros(8)
    operation = toy.AddRows(total, x, rows, added)
    operation.compile()
    with pytest.raises(InvalidArgumentError, match="x must not be lazily negated"):
        operation.execute(total, torch._neg_view(x), rows, added)
