"""Declarations of derivatives, and operands that must not need one."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fe_runtime.contract import Contract, Input, Output, OutputSpec
from fe_runtime.errors import InvalidArgumentError
from fe_runtime.gradient import Gradient, reject_required


def contract(name, inputs, outputs, mutated=()):
    return Contract(
        name,
        inputs=tuple(Input(i, "N", ("float32",), mutated=i in mutated) for i in inputs),
        outputs=tuple(Output(o, lambda bound: OutputSpec((bound.dim("N"),), "float32")) for o in outputs),
    )


def gradient():
    backward = SimpleNamespace(contract=contract("back", ("dy", "x"), ("dx",)))
    return Gradient(backward, residuals=("x",), wrt=("x",), outputs=("y",))


def test_gradient_of_an_operation_that_writes_into_its_input():
    gradient().check(contract("op", ("x",), ("y",)))
    with pytest.raises(ValueError, match="writes into its inputs"):
        gradient().check(contract("op", ("x",), ("y",), mutated=("x",)))


@pytest.mark.parametrize("recording", [True, False])
def test_operand_that_requires_a_gradient_is_rejected(recording):
    x = torch.ones(3, requires_grad=True)
    with torch.set_grad_enabled(recording), pytest.raises(InvalidArgumentError, match="op: x must not require a gra"):
        reject_required("op", w=torch.ones(3), x=x)


def test_operands_without_gradients_pass():
    reject_required("op", x=torch.ones(3), w=np.ones(3), none=None)


def test_a_gradient_may_depend_on_the_dtypes():
    conditional = Gradient(
        gradient().operation, ("x",), ("x",), ("y",), applies=lambda dtypes: dtypes == {"x": "float32"}
    )
    assert gradient().serves(("x",), (torch.float8_e4m3fn,))
    assert conditional.serves(("x", "w"), (torch.float32, None))
    assert not conditional.serves(("x",), ("float16",))
    assert not conditional.serves(("x", "w"), (np.float32, np.float32))
