"""Derivatives in torch: ordinary autograd, torch.func, and the calls that have none."""

from __future__ import annotations

import threading
from dataclasses import replace

import fe_toy
import fe_toy.front_door
import numpy as np
import pytest
import torch
from fe_toy import expected
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from fe_runtime.errors import NotSupportedError
from fe_runtime.gradient import Gradient

X = expected.sample(3, 4)
BIAS = np.float32([0.2, -0.4, 0.1, 0.6])
WEIGHT = np.float32([1.0, -2.0, 0.5, 3.0])


TORCH_WEIGHT, TORCH_BIAS = torch.tensor(WEIGHT), torch.tensor(BIAS)


def loss(x, bias):
    return (fe_toy.scale_clamp(x, bias, 0.5)["y"] * TORCH_WEIGHT).sum()


def op_loss(x, bias):
    return (torch.ops.fe_toy.scale_clamp(x, bias, scale=0.5)[0] * TORCH_WEIGHT).sum()


def dx(x=X, bias=BIAS):
    return expected.derivative(lambda v: (expected.value(v, bias, 0.5) * WEIGHT).sum(), x)


def dbias(x=X, bias=BIAS):
    return expected.derivative(lambda v: (expected.value(x, v, 0.5) * WEIGHT).sum(), bias)


def leaf(array):
    return torch.tensor(array, requires_grad=True)


@pytest.mark.parametrize("function", [loss, op_loss], ids=["wrapper", "op"])
def test_backward(function):
    x, bias = leaf(X), leaf(BIAS)
    function(x, bias).backward()
    np.testing.assert_allclose(x.grad, dx(), atol=1e-6)
    np.testing.assert_allclose(bias.grad, dbias(), atol=1e-6)


def test_gradients_have_the_shape_in_which_the_input_came():
    bias = leaf(BIAS[None])
    loss(torch.tensor(X), bias).backward()
    np.testing.assert_allclose(bias.grad, dbias()[None], atol=1e-6)


def test_expanded_gradients_are_made_dense():
    x = leaf(X)
    fe_toy.scale_clamp(x)["y"].sum().backward()
    np.testing.assert_array_equal(x.grad, np.abs(X) <= 1)


def test_an_input_that_needs_no_gradient_gets_none():
    x, bias = torch.tensor(X), leaf(BIAS)
    loss(x, bias).backward()
    assert x.grad is None
    np.testing.assert_allclose(bias.grad, dbias(), atol=1e-6)


def test_constant_outputs_are_not_differentiable():
    y, kept = fe_toy.scale_clamp(leaf(X), mask=True)
    assert y.requires_grad
    assert y.grad_fn.name() == "ScaleClampBackward"
    assert not kept.requires_grad


def test_checkpointing():
    x, bias = leaf(X), leaf(BIAS)
    checkpoint(loss, x, bias, use_reentrant=False).backward()
    np.testing.assert_allclose(x.grad, dx(), atol=1e-6)


def test_backward_in_other_threads():
    x = leaf(X)
    losses = [loss(x, torch.tensor(BIAS)) for _ in range(4)]
    threads = [threading.Thread(target=value.backward) for value in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_allclose(x.grad, 4 * dx(), atol=1e-5)


def test_double_backward_raises():
    x = leaf(X)
    (first,) = torch.autograd.grad(fe_toy.scale_clamp(x)["y"].square().sum(), x, create_graph=True)
    np.testing.assert_allclose(first.detach(), 2 * X * (np.abs(X) <= 1), rtol=1e-6)
    with pytest.raises(NotSupportedError, match="scale_clamp_backward has no derivative"):
        first.sum().backward()


def test_create_graph_does_not_disturb_other_terms():
    x = leaf(X)
    (first,) = torch.autograd.grad(fe_toy.scale_clamp(x)["y"].sum() + x.pow(3).sum(), x, create_graph=True)
    np.testing.assert_allclose(first.detach(), 3 * X**2 + (np.abs(X) <= 1), rtol=1e-6)


def test_without_gradient_the_results_are_detached():
    for call in (fe_toy.scale_clamp_detached, lambda x: {"y": torch.ops.fe_toy.scale_clamp_detached(x)[0]}):
        assert not call(leaf(X))["y"].requires_grad


def test_inference_only_by_the_options(monkeypatch):
    monkeypatch.setattr(fe_toy.OPERATION, "inference_only", lambda options: options.get("out_dtype") == "float8_e4m3fn")
    x = torch.tensor(X, requires_grad=True)
    for call in (fe_toy.scale_clamp, torch.ops.fe_toy.scale_clamp):
        with pytest.raises(RuntimeError, match="for inference only"):
            call(x, out_dtype="float8_e4m3fn")
    assert fe_toy.scale_clamp(x)["y"].requires_grad


def test_inference_only():
    for call in (fe_toy.scale_clamp_inference, torch.ops.fe_toy.scale_clamp_inference):
        with pytest.raises(RuntimeError, match="for inference only"):
            call(leaf(X))
        with torch.no_grad():
            call(leaf(X))
        call(torch.tensor(X))


def test_forward_mode_raises():
    x = torch.tensor(X)
    with forward_ad.dual_level():
        with pytest.raises(NotSupportedError, match="no forward-mode derivative"):
            fe_toy.scale_clamp(forward_ad.make_dual(x, x))
        np.testing.assert_allclose(fe_toy.scale_clamp(x)["y"], expected.value(X), rtol=1e-6)
    with pytest.raises(NotSupportedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda v: fe_toy.scale_clamp(v)["y"], (x,), (x,))


@pytest.mark.parametrize("function", [loss, op_loss], ids=["wrapper", "op"])
def test_func_grad(function):
    found = torch.func.grad(function, (0, 1))(torch.tensor(X), torch.tensor(BIAS))
    np.testing.assert_allclose(found[0], dx(), atol=1e-6)
    np.testing.assert_allclose(found[1], dbias(), atol=1e-6)


def test_func_vjp_and_jacrev():
    x = torch.tensor(X[0])
    _, pull = torch.func.vjp(lambda v: fe_toy.scale_clamp(v)["y"], x)
    np.testing.assert_allclose(pull(torch.tensor(WEIGHT))[0], WEIGHT * (np.abs(X[0]) <= 1), rtol=1e-6)
    jacobian = torch.func.jacrev(lambda v: fe_toy.scale_clamp(v)["y"])(x)
    np.testing.assert_array_equal(jacobian, np.diag(np.abs(X[0]) <= 1))


def test_nested_func_grad_raises_instead_of_returning_zeros():
    def first(x):
        return torch.func.grad(lambda v: fe_toy.scale_clamp(v)["y"].square().sum())(x).sum()

    with pytest.raises(NotSupportedError, match="scale_clamp_backward has no derivative"):
        torch.func.grad(first)(torch.tensor(X))
    with pytest.raises(NotSupportedError, match="scale_clamp_backward has no derivative"):
        first(leaf(X)).backward()


def test_compiled_func_grad():
    torch._dynamo.reset()
    compiled = torch.compile(torch.func.grad(loss), fullgraph=True, backend="aot_eager")
    np.testing.assert_allclose(compiled(torch.tensor(X), torch.tensor(BIAS)), dx(), atol=1e-6)


def test_compiled_autograd():
    torch._dynamo.reset()

    def step(x):
        loss(x, TORCH_BIAS).backward()

    x = leaf(X)
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="eager")(x)
    np.testing.assert_allclose(x.grad, dx(), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"residuals": ("x", "b")}, "names b"),
        ({"residuals": ("x",)}, "must take the gradients of"),
        ({"wrt": ("x",)}, "must return the gradients of"),
        ({"outputs": ("z",)}, "names z"),
        ({"options": ("mask",)}, "names mask"),
    ],
)
def test_gradients_are_checked_when_declared(change, text):
    fields = {"residuals": ("x", "bias"), "wrt": ("x", "bias"), "outputs": ("y",), "options": ("scale",)}
    gradient = Gradient(fe_toy.BACKWARD, **{**fields, **change})
    with pytest.raises(ValueError, match=text):
        gradient.check(fe_toy.OPERATION.contract)


def test_calls_that_a_gradient_does_not_serve_run_on_detached_data(monkeypatch):
    whole = fe_toy.front_door.OPERATION.gradient
    only_half = replace(whole, applies=lambda dtypes: dtypes["x"] == "float16")
    monkeypatch.setattr(fe_toy.front_door.OPERATION, "gradient", only_half)
    assert fe_toy.scale_clamp(leaf(X).half())["y"].requires_grad
    for function in (lambda x: fe_toy.scale_clamp(x)["y"], lambda x: torch.ops.fe_toy.scale_clamp(x)[0]):
        assert not function(leaf(X)).requires_grad
