"""Operands in another form, packed too, and results that take the form of an operand."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch

from fe_runtime.api_base import APIBase
from fe_runtime.contract import Bound, Contract, Input, Output, OutputSpec
from fe_runtime.jax.entry import entry
from fe_runtime.operation import Operation
from fe_runtime.plan import NoKernel
from fe_runtime.testing import to_framework, to_numpy

FRAMEWORKS = ("numpy", "torch", "jax")


def _double(x: Any) -> tuple[Any]:
    """The reference gets (M, X), of packed pairs the bytes, and returns (M, X)."""
    assert x.ndim == 2
    return (x + x,)


def _like_the_operand(bound: Bound) -> OutputSpec:
    rows, columns = bound.dim("M"), bound.dim("X")
    packed = bound.dtype("x") == "float4_e2m1fn"
    columns, dtype = (columns // 2, "uint8") if packed else (columns, "float32")
    if len(bound.given["x"]) == 3:
        return OutputSpec((rows, columns, 1), dtype, order=(2, 0, 1))
    return OutputSpec((rows, columns), dtype)


CONTRACT = Contract(
    "double_rows",
    inputs=(Input("x", "M X", ("float32", "float4_e2m1fn"), also=("M X 1",), pairs=1),),
    outputs=(Output("y", _like_the_operand),),
    dynamic=("M",),
)
OPERATION = Operation("fe_forms", CONTRACT, _double, lambda _bound, _target: NoKernel("there is none"))


class DoubleRows(APIBase):
    def execute(self, x: Any, y: Any) -> None:
        self._execute((x,), (y,))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 1), (1, 4, 1), (0, 4, 1)])
def test_results_have_the_form_of_the_operand(shape: tuple[int, ...], dtype: str, framework: str) -> None:
    x = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    y = OPERATION((to_framework(x, framework),), {})["y"]
    assert tuple(y.shape) == shape
    np.testing.assert_array_equal(to_numpy(y), 2 * x)
    if framework == "torch" and shape == (3, 4, 1):
        assert y.stride() == (4, 1, 12)


def test_results_of_traced_calls() -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4, 1)
    traced = jax.jit(lambda x: entry(OPERATION, (x,), {}))(x)
    np.testing.assert_array_equal(np.asarray(traced), 2 * x)
    compiled = torch.compile(lambda x: OPERATION.run((x,), {})[0], backend="aot_eager", fullgraph=True)
    made = compiled(torch.from_numpy(x))
    assert made.stride() == (4, 1, 12)
    np.testing.assert_array_equal(made.numpy(), 2 * x)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_outputs_of_the_class_have_the_form_of_the_operand(framework: str) -> None:
    x = to_framework(np.ones((3, 4, 1), np.float32), framework)
    y = to_framework(np.zeros((3, 4, 1), np.float32), framework)
    op = DoubleRows(OPERATION, (x,), (y,), {})
    op(x, y)
    assert (to_numpy(y) == 2).all()
    flat = DoubleRows(OPERATION, (x,), (y[:, :, 0],), {})
    with pytest.raises(ValueError, match="double_rows: y must have shape"):
        flat.check_support()
