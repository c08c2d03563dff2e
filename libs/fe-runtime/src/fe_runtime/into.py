"""Calls whose results go into arrays of the caller, where there are some: the wrappers' form of what classes do.

A call is prepared once per signature, as in :mod:`fe_runtime.operation`, and remembered; a warm one allocates the
results that the caller has no array for, and launches. Where torch has to see the operation as a whole (under
``torch.compile``, say), the results are copied into the caller's arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .aliasing import check_overlap, may_overlap, meetings
from .arrays import is_jax_array, is_torch_tensor, on_stream
from .contract import Bound, OutputSpec, check_outputs
from .dtypes import framework_dtype
from .errors import InvalidArgumentError, explain
from .launch import START, allocator, is_empty, kernel_launch
from .operation import load_kernel, reject_descriptors, signature
from .reference import copy_into, reference_launch
from .strides import inverse_order
from .tensor_desc import TensorDesc
from .values import with_value_check

if TYPE_CHECKING:
    from .operation import Operation

__all__ = ["outputs_into"]

Outputs = tuple[Any, ...]


def outputs_into(
    operation: Operation,
    arrays: Sequence[Any],
    given: Sequence[Any],
    options: Mapping[str, object],
    stream: object = None,
    backend: str = "auto",
) -> Outputs:
    """Run an operation with some of its results in the caller's arrays.

    Parameters
    ----------
    operation, arrays, options, stream, backend
        As in :meth:`fe_runtime.operation.Operation.__call__`.
    given
        One entry per declared output: the caller's array, or ``None`` for a new one. Results that accumulate start
        with what the caller's array holds.

    Returns
    -------
    tuple
        The outputs in order, among them the objects given.

    Raises
    ------
    TypeError, InvalidArgumentError
        The call breaks the contract, an array is not as the call's result, or arrays overlap. JAX arrays cannot be
        written.
    NotSupportedError
        No kernel serves the call, and one was demanded by name or by ``FE_STRICT=1``.
    """
    if all(array is None for array in given):
        return operation.outputs(arrays, options, stream=stream, backend=backend)
    if _must_dispatch(operation, (*arrays, *given)):
        return _copied(operation, arrays, given, options, stream, backend)
    _reject_jax(operation, arrays, given)
    key = signature((*arrays, *given), options, f"{backend}, into arrays of the caller")
    try:
        prepared = operation.prepared(key)
    except TypeError:  # an unhashable option: binding will say what is wrong with it
        key = prepared = None
    if prepared is None:
        prepared = _prepare(operation, arrays, given, options, backend, key)
    if stream is None:
        return prepared(arrays, given)
    with on_stream(operation.resolve_stream(stream, arrays), (*arrays, *given)):
        return prepared(arrays, given)


def _prepare(
    operation: Operation,
    arrays: Sequence[Any],
    given: Sequence[Any],
    options: Mapping[str, object],
    backend: str,
    key: object,
) -> Callable[..., Outputs]:
    contract = operation.contract
    bound = operation.bind_data(arrays, options)
    check_outputs(contract, bound, _completed(bound, given))
    reject_descriptors(contract.operation, contract.output_names, given)
    plan, run = load_kernel(operation.plan(bound, backend), backend, is_empty(bound))
    launch: Callable[..., None] = (
        reference_launch(operation, bound) if plan.kernel is None else kernel_launch(operation, bound, plan.kernel, run)
    )
    if operation.check_values is not None:
        variable = operation.check_variable
        launch = with_value_check(operation.check_values, bound, contract.input_names, launch, variable)
    makers = [_maker(bound, spec) if x is None else None for x, spec in zip(given, bound.outputs, strict=True)]
    first = next(number for number, array in enumerate(arrays) if array is not None)
    known = meetings(contract, (*arrays, *given)) if is_torch_tensor(arrays[first]) else None

    def call(arrays: Sequence[Any], given: Sequence[Any]) -> Outputs:
        if known is None or may_overlap(known, (*arrays, *given)):
            check_overlap(contract, arrays, given)
        like = arrays[first]
        outputs = tuple([x if make is None else make(like) for x, make in zip(given, makers, strict=True)])
        launch(arrays, outputs)
        return outputs

    if key is not None and plan.missing is None:
        operation.remember(key, call)
    return call


def _completed(bound: Bound, given: Sequence[Any]) -> list[Any]:
    """Return the caller's arrays, and descriptors of those that will be made, for the checks."""
    return [
        array if array is not None or spec is None else _description(bound, spec)
        for array, spec in zip(given, bound.outputs, strict=True)
    ]


def _description(bound: Bound, spec: OutputSpec) -> TensorDesc:
    return TensorDesc.of(spec.dtype, *spec.place(bound.framework), device=bound.device)


def _maker(bound: Bound, spec: OutputSpec | None) -> Callable[[Any], Any] | None:
    """Return ``make(first_input)`` for a result that the caller has no array for."""
    if spec is None:
        return None
    if bound.framework == "torch":
        return allocator(bound, spec)

    def make(_first: Any) -> Any:
        order = spec.order or tuple(range(len(spec.shape)))
        dtype: Any = framework_dtype(spec.dtype, "numpy")
        made = np.empty([spec.shape[dim] for dim in order], dtype).transpose(inverse_order(order))
        if spec.accumulate:
            made[...] = START[spec.accumulate]
        return made

    return make


def _reject_jax(operation: Operation, arrays: Sequence[Any], given: Sequence[Any]) -> None:
    named = (*operation.contract.input_names, *operation.contract.output_names)
    if any(map(is_jax_array, (*arrays, *given))):
        name = next(n for n, x in zip(named[len(arrays) :], given, strict=True) if x is not None)
        rule, fix = "be None for JAX arrays", "They are immutable: XLA allocates the results."
        raise InvalidArgumentError(explain(operation.name, name, rule, "an array", fix))


def _must_dispatch(operation: Operation, arrays: Sequence[Any]) -> bool:
    if "torch" not in sys.modules:
        return False
    from .torch import must_dispatch

    return must_dispatch(operation, arrays)


def _copied(
    operation: Operation,
    arrays: Sequence[Any],
    given: Sequence[Any],
    options: Mapping[str, object],
    stream: object,
    backend: str,
) -> Outputs:
    """Run the operation as torch sees it, and copy its results. What is wrong with an array, the copy says."""
    made = operation.outputs(arrays, options, stream=stream, backend=backend)
    for declared, array, result in zip(operation.contract.outputs, given, made, strict=True):
        if array is None:
            continue
        if result is None or array.numel() != result.numel() or array.dtype != result.dtype:
            rule = "be None" if result is None else f"have shape {tuple(result.shape)} and dtype {result.dtype}"
            found = f"shape {tuple(array.shape)} and dtype {array.dtype}"
            raise InvalidArgumentError(explain(operation.name, declared.name, rule, found, "Allocate it so."))
        copy_into(array, result.reshape(array.shape), "" if declared.onto is None else declared.onto(options))
    return tuple(result if array is None else array for array, result in zip(given, made, strict=True))
