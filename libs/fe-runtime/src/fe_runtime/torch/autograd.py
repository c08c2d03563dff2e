"""The derivative of an operation in torch, made of its :class:`fe_runtime.gradient.Gradient`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import enable_single_level_autograd_function  # type: ignore[attr-defined]
from torch.autograd import forward_ad
from torch.autograd.function import Function, _SingleLevelFunction

from fe_runtime.arrays import alignment, describe, is_plain_torch_tensor
from fe_runtime.contract.alignment import misalignment
from fe_runtime.errors import NotSupportedError, explain
from fe_runtime.strides import inverse_order

if TYPE_CHECKING:
    from fe_runtime.contract import Input
    from fe_runtime.operation import Operation

__all__ = ["as_tuple", "differentiable"]

_transforms_active = torch._C._are_functorch_transforms_active

Run = Callable[[Sequence[Any]], tuple[Any, ...]]


def differentiable(
    operation: Operation, arrays: Sequence[Any], options: Mapping[str, object], backend: str, run: Run
) -> tuple[Any, ...]:
    """Compute the outputs with ``run``, which records nothing, and record the derivative if one is needed.

    Raises
    ------
    RuntimeError
        A gradient is needed of an operation for inference only.
    NotSupportedError
        A forward-mode derivative is needed.
    """
    needed = torch.is_grad_enabled() and any(isinstance(array, Tensor) and array.requires_grad for array in arrays)
    if needed and operation.is_inference_only(options):
        given = zip(operation.contract.input_names, arrays, strict=True)
        name = next(name for name, array in given if isinstance(array, Tensor) and array.requires_grad)
        rule = "not require a gradient: the operation is for inference only"
        fix = "Call it under torch.no_grad() or pass detached tensors."
        raise RuntimeError(explain(operation.name, name, rule, "requires_grad=True", fix))
    if not _has_gradient(operation, arrays):
        return _Once.apply(run, operation, *arrays) if needed and _state.in_backward else run(arrays)
    if _has_tangent(arrays):
        raise _no_derivative(operation, "forward-mode derivative", "Use reverse mode: backward or torch.func.grad.")
    if not needed:
        return run(arrays)
    outputs: tuple[Any, ...] = _function(operation).apply(run, operation, options, backend, *arrays)
    return outputs


def _has_gradient(operation: Operation, arrays: Sequence[Any]) -> bool:
    gradient = operation.gradient
    if gradient is None or gradient.applies is None:
        return gradient is not None
    return gradient.serves(operation.contract.input_names, [None if x is None else x.dtype for x in arrays])


class _OneLevel(_SingleLevelFunction):  # type: ignore[misc]
    """A function that is recorded on one level of differentiation.

    A derivative is recorded at the dispatcher's Autograd key, which nested torch.func transforms pass once on each of
    their levels, whereas the public ``Function`` wants to be called from outside all of them. Without transforms the
    two are the same.
    """

    _compiled_autograd_key = staticmethod(Function._compiled_autograd_key)

    @classmethod
    def apply(cls, *arguments: Any) -> Any:
        if not _transforms_active():
            return super().apply(*arguments)  # type: ignore[misc]
        with enable_single_level_autograd_function():
            return super().apply(*arguments)  # type: ignore[misc]


class _Forward(_OneLevel):
    @staticmethod
    def forward(  # type: ignore[override]
        run: Run, operation: Operation, options: Mapping[str, object], backend: str, *arrays: Any
    ) -> tuple[Any, ...]:
        return _below(run, arrays)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        _, operation, options, backend, *arrays = inputs
        contract, gradient = operation.contract, operation.gradient
        made = dict(zip(contract.output_names, output, strict=True))
        known = dict(zip(contract.input_names, arrays, strict=True)) | made
        defaults = {option.name: option.default for option in contract.options}
        ctx.save_for_backward(*gradient.saved(known))
        constant = [array for name, array in made.items() if array is not None and name not in gradient.outputs]
        ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        ctx.shapes = [None if array is None else array.shape for array in arrays]
        ctx.made = [None if (a := made[name]) is None else (a.shape, a.dtype, a.device) for name in gradient.outputs]
        ctx.call = operation, {name: options.get(name, defaults[name]) for name in gradient.options}, backend

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        operation, options, backend = ctx.call
        contract, gradient = operation.contract, operation.gradient
        given = dict(zip(contract.output_names, grads, strict=True))
        if all(given[name] is None for name in gradient.outputs):
            return (None,) * (4 + len(contract.inputs))
        declared = gradient.operation.contract.inputs[: len(gradient.outputs)]
        incoming = [
            _incoming(input_, given[name], made)
            for input_, name, made in zip(declared, gradient.outputs, ctx.made, strict=True)
        ]
        results = _backward(gradient.operation, (*incoming, *ctx.saved_tensors), options, backend)
        found = gradient.by_input(results)
        return (None, None, None, None, *_outgoing(contract.input_names, found, ctx.shapes))


class _Once(_OneLevel):
    """A backward operation while a graph of the backward pass is recorded: it has no derivative of its own."""

    @staticmethod
    def forward(run: Run, operation: Operation, *arrays: Any) -> tuple[Any, ...]:  # type: ignore[override]
        return _below(run, arrays)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.operation = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise _no_derivative(ctx.operation, "derivative (double backward)", "Differentiate once, without create_graph.")


@functools.cache
def _function(operation: Operation) -> Any:
    """Return :class:`_Forward` under the operation's name, which ``grad_fn`` and profilers show."""
    return type("".join(word.capitalize() for word in operation.name.split("_")), (_Forward,), {})


def _below(run: Run, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Run what lies below this level of differentiation; the levels of enclosing transforms record for themselves."""
    if not _transforms_active():
        return run(arrays)
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        return run(arrays)


def _backward(
    operation: Operation, arrays: Sequence[Any], options: Mapping[str, object], backend: str
) -> tuple[Any, ...]:
    if not torch.is_grad_enabled():
        return operation.run(arrays, options, None, backend)
    with _in_backward():  # a derivative of this one may be asked for: let the dispatcher see it on every level
        return as_tuple(operation.torch_op(*arrays, **options, backend=backend))


def as_tuple(outputs: Any) -> tuple[Any, ...]:
    """Return what the dispatcher returned as a tuple: it hands over a single output bare, and none as ``None``."""
    if outputs is None:
        return ()
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _incoming(declared: Input, grad: Any, made: tuple[Any, Any, Any] | None) -> Any:
    """Return the gradient of an output as the backward operation takes it: dense, ``None`` only where it may be."""
    if grad is not None:
        return _laid_out(declared, grad)
    if made is None or declared.optional:
        return None
    shape, dtype, device = made
    return _laid_out(declared, torch.zeros(shape, dtype=dtype, device=device))


def _laid_out(declared: Input, grad: Any) -> Any:
    """Return a gradient with strides that the backward operation takes."""
    layout, wanted = declared.layout, declared.alignment
    if layout.holds(grad.shape, grad.stride()):
        starts_well = wanted == 1 or not is_plain_torch_tensor(grad) or alignment(grad) >= wanted
        if starts_well and misalignment(describe(grad), layout, wanted) is None:
            return grad
    order = layout.orders[0] if layout.orders else tuple(range(grad.ndim))
    return grad.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse_order(order))


def _outgoing(names: Sequence[str], found: Mapping[str, Any], shapes: Sequence[Any]) -> Iterator[Any]:
    """Yield the gradient of each input in the shape in which the input was passed."""
    for name, shape in zip(names, shapes, strict=True):
        grad = found.get(name)
        # The same object where inputs share a gradient: torch then knows not to accumulate into it.
        yield None if grad is None or shape is None else grad if grad.shape == shape else grad.reshape(shape)


def _has_tangent(arrays: Sequence[Any]) -> bool:
    if forward_ad._current_level < 0:
        return False
    return any(array is not None and forward_ad.unpack_dual(array).tangent is not None for array in arrays)


class _State(threading.local):
    in_backward = False


_state = _State()


@contextmanager
def _in_backward() -> Iterator[None]:
    before, _state.in_backward = _state.in_backward, True
    try:
        yield
    finally:
        _state.in_backward = before


def _no_derivative(operation: Operation, kind: str, fix: str) -> NotSupportedError:
    return NotSupportedError(f"{operation.name} has no {kind}. {fix}", reason=f"{operation.name} has no {kind}")
