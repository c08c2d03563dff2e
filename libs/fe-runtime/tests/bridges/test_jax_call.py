"""``fe_runtime.jax.call``: lowering of a caller's own kernel, initialised outputs, and the helpers."""

from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fe_toy.kernels import accumulate

from fe_runtime import jax as bridge
from fe_runtime.errors import InvalidArgumentError

X = jax.ShapeDtypeStruct((32,), jnp.float32)
Y = jax.ShapeDtypeStruct((32,), jnp.float32)


def custom_call(function, *arrays):
    text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    (line,) = [line for line in text.splitlines() if "stablehlo.custom_call @CuteDSL" in line]
    return line


def aliases(line):
    found = re.findall(r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)", line)
    return {int(output or 0): int(operand) for output, operand in found}


def test_single_output():
    function = bridge.call(accumulate.double, output_shape_dtype=Y)
    assert jax.eval_shape(function, X) == Y
    assert "(tensor<32xf32>) -> tensor<32xf32>" in custom_call(function, X)


@pytest.mark.parametrize("container", [tuple, list])
def test_the_result_has_the_container_of_the_declaration(container):
    function = bridge.call(accumulate.add, output_shape_dtype=container([Y, Y]), factor=3)
    assert jax.eval_shape(function, X) == container([Y, Y])


@pytest.mark.parametrize("places", [p for n in (1, 2) for p in itertools.combinations(range(2), n)])
def test_initialised_outputs_in_every_position(places):
    function = bridge.call(
        accumulate.add,
        output_shape_dtype=(Y, Y),
        initialized_outputs=dict.fromkeys(places, bridge.zeros_init),
        factor=3,
    )
    assert jax.eval_shape(function, X) == (Y, Y)
    assert aliases(custom_call(function, X)) == {place: 1 + number for number, place in enumerate(places)}


def test_an_initialised_output_beside_an_aliased_one():
    function = bridge.call(
        accumulate.add,
        output_shape_dtype=(Y, Y),
        initialized_outputs={1: bridge.neg_inf_init},
        input_output_aliases={0: 0},
        factor=3,
    )
    with pytest.raises(Exception, match="positional argument"):  # add wants both outputs; the aliased one is its input
        custom_call(function, X)
    function = bridge.call(
        accumulate.double,
        output_shape_dtype=(Y, Y),
        initialized_outputs={1: bridge.neg_inf_init},
        input_output_aliases={0: 0},
    )
    assert aliases(custom_call(function, X)) == {0: 0, 1: 1}


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"initialized_outputs": {2: bridge.zeros_init}}, "name outputs 0 to 1"),
        ({"initialized_outputs": {-1: bridge.zeros_init}}, "name outputs 0 to 1"),
        ({"initialized_outputs": {1: bridge.zeros_init}, "input_output_aliases": {0: 1}}, "input_output_aliases"),
        ({"initialized_outputs": {0: bridge.zeros_init}, "output_shape_dtype": (Y, (Y,))}, "be one ShapeDtypeStruct"),
    ],
)
def test_conflicts(keywords, text):
    with pytest.raises(InvalidArgumentError, match=text):
        bridge.call(accumulate.add, **{"output_shape_dtype": (Y, Y), **keywords})


def test_initial_values():
    struct = jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)
    np.testing.assert_array_equal(bridge.zeros_init(struct), np.zeros((2, 3)))
    assert bridge.neg_inf_init(struct).dtype == jnp.bfloat16
    assert bool(jnp.isneginf(bridge.neg_inf_init(struct)).all())


def test_specs():
    assert bridge.gemm_operand_spec() == bridge.TensorSpec(layout=(1, 0, 2))
    assert bridge.sf_atom_spec() == bridge.TensorSpec(mode=(3, 4, 1, 5, 2, 0))
    buffer = np.empty((6, 5, 7, 32, 4, 4))  # L, MN', K', 32, 4, 4
    assert buffer.transpose(bridge.sf_atom_spec().mode).shape == (32, 4, 5, 4, 7, 6)


def test_row_major_desc():
    desc = bridge.row_major_desc((2, 3), jnp.bfloat16, "a")
    assert (desc.dtype, desc.shape, desc.stride, str(desc.device), desc.name) == (
        "bfloat16",
        (2, 3),
        (3, 1),
        "cuda:0",
        "a",
    )


def test_a_missing_language_names_the_requirement(monkeypatch):
    import importlib

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ImportError, match=r"nvidia-cutlass-dsl >= 4\.8 and jax >= 0\.6"):
        bridge.call(accumulate.double, output_shape_dtype=Y)
