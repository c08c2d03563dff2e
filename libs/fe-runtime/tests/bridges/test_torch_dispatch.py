"""Which eager calls go through torch's dispatcher, and what happens to unusual tensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fe_toy
import numpy as np
import pytest
import torch
from fe_toy import expected
from torch._subclasses.fake_tensor import FakeTensorMode

from fe_runtime.errors import InvalidArgumentError, NotSupportedError
from fe_runtime.torch import must_dispatch

X = expected.sample(3, 4)


def tensor(requires_grad: bool = False) -> torch.Tensor:
    return torch.tensor(X, requires_grad=requires_grad)


class Plain(torch.Tensor):
    """A subclass without behaviour of its own."""


class Unreachable:
    def __call__(self, *arguments, **keywords):
        raise AssertionError("the registered op was called")


@pytest.fixture
def no_op(monkeypatch):
    monkeypatch.setattr(fe_toy.OPERATION, "torch_op", Unreachable())


@pytest.mark.usefixtures("no_op")
@pytest.mark.parametrize("requires_grad", [False, True])
def test_eager_calls_do_not_use_the_registered_op(requires_grad):
    y, kept = fe_toy.scale_clamp(tensor(requires_grad), scale=2.0, limit=0.5, mask=True)
    np.testing.assert_allclose(y.detach(), expected.value(X, scale=2.0, limit=0.5), rtol=1e-6)
    np.testing.assert_array_equal(kept, expected.kept(X, scale=2.0, limit=0.5))
    assert y.requires_grad == requires_grad
    assert not kept.requires_grad


@pytest.mark.parametrize(
    ("make", "needed"),
    [
        pytest.param(tensor, False, id="plain"),
        pytest.param(lambda: torch.nn.Parameter(tensor(), requires_grad=False), False, id="parameter"),
        pytest.param(lambda: tensor(requires_grad=True), True, id="requires grad"),
        pytest.param(lambda: torch._neg_view(tensor()), True, id="lazily negated"),
        pytest.param(lambda: FakeTensorMode().from_tensor(tensor()), True, id="fake"),
        pytest.param(lambda: tensor().as_subclass(Plain), True, id="subclass"),
        pytest.param(lambda: X, False, id="numpy"),
    ],
)
def test_must_dispatch(make, needed):
    assert must_dispatch(fe_toy.OPERATION, (make(), None)) is needed


def test_must_dispatch_only_for_operations_that_record():
    x = tensor(requires_grad=True)
    assert not must_dispatch(fe_toy.DETACHED, (x, None))
    assert must_dispatch(fe_toy.INFERENCE, (x, None))
    with torch.no_grad():
        assert not must_dispatch(fe_toy.OPERATION, (x, None))


def test_must_dispatch_under_modes():
    with FakeTensorMode():
        assert must_dispatch(fe_toy.OPERATION, (tensor(), None))
        assert not must_dispatch(fe_toy.OPERATION, (X, None))


def test_lazily_negated_tensors_are_resolved():
    y = fe_toy.scale_clamp(torch._neg_view(tensor()))["y"]
    np.testing.assert_allclose(y, expected.value(-X), rtol=1e-6)


@pytest.mark.parametrize("make", [lambda: tensor().to("meta"), lambda: FakeTensorMode().from_tensor(tensor())])
def test_tensors_without_data_have_shapes_only(make):
    y, kept = fe_toy.scale_clamp(make(), out_dtype=torch.float8_e4m3fn, mask=True)
    assert (y.shape, y.dtype) == ((3, 4), torch.float8_e4m3fn)
    assert (kept.shape, kept.dtype) == ((3, 4), torch.uint8)


def test_subclasses_go_through_torch():
    y = fe_toy.scale_clamp(tensor().as_subclass(Plain))["y"]
    assert type(y) is Plain
    np.testing.assert_allclose(y.as_subclass(torch.Tensor), expected.value(X), rtol=1e-6)


def test_autocast_changes_nothing():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fe_toy.scale_clamp(tensor())["y"].dtype == torch.float32
        assert fe_toy.scale_clamp(tensor(requires_grad=True))["y"].dtype == torch.float32


@pytest.mark.parametrize("requires_grad", [False, True], ids=["direct", "dispatched"])
@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "text"),
    [
        ((torch.ones(4),), {"scale": "2"}, TypeError, "scale must be a Python float"),
        ((torch.ones(4),), {"limit": -1.0}, InvalidArgumentError, "limit must be positive"),
        ((torch.ones(4),), {"out_dtype": torch.int8}, InvalidArgumentError, "out_dtype must"),
        ((torch.ones(4),), {"backend": "fast"}, InvalidArgumentError, "backend must be one of"),
        ((torch.ones(4),), {"backend": "sm90"}, NotSupportedError, "the arrays are on cpu"),
        (([1.0] * 4,), {}, TypeError, "bias must be an array"),
        ((np.ones(4, np.float32),), {}, InvalidArgumentError, "bias must come from the framework of x"),
        ((torch.ones(2),), {}, InvalidArgumentError, r"bias must have shape \(C,\)"),
        ((torch.ones(4).to_sparse(),), {}, InvalidArgumentError, "bias must be a strided tensor"),
    ],
)
def test_errors_are_the_same_on_either_way(requires_grad, arguments, keywords, error, text):
    with pytest.raises(error, match=text):
        fe_toy.scale_clamp(tensor(requires_grad), *arguments, **keywords)


def test_a_missing_array_is_named():
    with pytest.raises(TypeError, match="x must be an array"):
        fe_toy.scale_clamp(None, tensor(requires_grad=True))


def test_operations_of_one_name_replace_each_other():
    from dataclasses import replace

    from fe_runtime.operation import Operation

    first = fe_toy.DETACHED
    contract = replace(first.contract, operation="replaced")
    Operation("fe_toy", contract, first.reference, first.find_kernel)
    Operation("fe_toy", contract, lambda x, bias, **_: (x + 7, None), first.find_kernel)
    assert torch.equal(torch.ops.fe_toy.replaced(tensor())[0], tensor() + 7)


AFTER_TORCH = """
import torch, fe_toy
assert not hasattr(torch.ops.fe_toy, "scale_clamp")
fe_toy.scale_clamp
assert torch.ops.fe_toy.scale_clamp(torch.ones(2, 4))[0].shape == (2, 4)
"""
BEFORE_TORCH = """
import sys, fe_toy
fe_toy.scale_clamp
assert "torch" not in sys.modules
import torch
fe_toy.scale_clamp(torch.ones(2, 4))
assert torch.ops.fe_toy.scale_clamp(torch.ones(2, 4))[0].shape == (2, 4)
"""
BEFORE_TORCH_COMPILED = """
import fe_toy
fe_toy.scale_clamp
import torch
graphs = []
def backend(module, inputs):
    graphs.append(module)
    return module
compiled = torch.compile(lambda x: fe_toy.scale_clamp(x)["y"] + 1, fullgraph=True, backend=backend)
for _ in range(3):
    assert torch.equal(compiled(torch.ones(2, 4)), torch.full((2, 4), 2.0))
assert len(graphs) == 1
"""


@pytest.mark.parametrize(
    "program", [AFTER_TORCH, BEFORE_TORCH, BEFORE_TORCH_COMPILED], ids=["after", "before", "compiled"]
)
def test_registration_in_either_order_of_import(program):
    setup = f"import sys; sys.path.append({str(Path(__file__).parent)!r})\n"
    subprocess.run([sys.executable, "-c", setup + program], check=True)
