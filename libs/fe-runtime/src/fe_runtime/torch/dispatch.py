"""Which calls must go through torch's dispatcher, and how they get there.

The dispatcher costs some tens of microseconds per call, more than many kernels run. It is needed where torch has to see
the operation as a whole: while a graph is traced, under a transform or a dispatch mode, for tensors without memory of
their own. It is not needed for a derivative: an eager call that needs one records it directly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from fe_runtime.arrays import on_stream
from fe_runtime.contract import check_option_kinds, check_option_values
from fe_runtime.contract.bind import check_writable
from fe_runtime.dtypes import canonical_dtype
from fe_runtime.errors import InvalidArgumentError, explain
from fe_runtime.plan import check_backend

from .autograd import as_tuple, differentiable

if TYPE_CHECKING:
    from fe_runtime.operation import Operation

__all__ = ["call_op", "dispatch", "eager_key", "must_dispatch", "plain_key"]

_is_tracing = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_transforms_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_jit_trace = torch._C._get_tracing_state


def eager_key(
    records_gradient: bool, arrays: Sequence[Any], options: Mapping[str, object], backend: str
) -> tuple[object, ...] | None:
    """Return :func:`plain_key` if nothing observes the call and no derivative is recorded for it, else ``None``."""
    if _is_tracing() or _is_observed():
        return None
    return plain_key(arrays, options, backend, records_gradient and _is_grad_enabled())


def plain_key(
    arrays: Sequence[Any], options: Mapping[str, object], backend: str, recording: bool = False
) -> tuple[object, ...] | None:
    """Return a key of all that a prepared call on plain CUDA tensors depends on; ``None`` for any other arrays.

    It is not hashable if an option is not. ``recording``: tensors that require a gradient do not count as plain.
    """
    # Types too: True equals 1, but is no valid integer.
    values = options.values()
    key: list[object] = [backend, *options, *values, *map(type, values)]
    for array in arrays:
        if array is None:
            key.append(None)
        elif ((kind := type(array)) is Tensor or kind is Parameter) and array.is_cuda:
            if (recording and array.requires_grad) or array.is_neg():
                return None
            key += array.dtype, array.shape, array.stride(), array.get_device(), array.data_ptr() & 15
        else:
            return None
    return tuple(key)


def must_dispatch(operation: Operation, arrays: Sequence[Any]) -> bool:
    """Return whether a call has to go to :func:`dispatch`.

    True while torch.compile traces, whatever the arrays.
    """
    if _is_tracing():
        return True
    observed = _is_observed()
    recording = operation.records_gradient and _is_grad_enabled()
    for array in arrays:
        kind = type(array)
        if kind is Tensor or kind is Parameter:
            if observed or (recording and array.requires_grad) or array.is_neg():
                return True
        elif isinstance(array, Tensor):
            return True
    return False


def dispatch(
    operation: Operation, arrays: Sequence[Any], options: Mapping[str, object], stream: object, backend: str
) -> tuple[Any, ...]:
    """Run the operation where torch can see it; return its outputs, ``None`` where absent."""
    if _is_tracing():
        return _traced(operation, arrays, options, stream, backend)
    for number in operation.contract.mutated:  # the dispatcher would write into a copy of a negated tensor
        check_writable(operation.name, operation.contract.input_names[number], arrays[number])
    if not _is_complete(operation, arrays):
        return operation.run_eagerly(arrays, options, stream, backend)  # says what is wrong
    if stream is not None:
        with on_stream(operation.resolve_stream(stream, arrays), arrays):
            return dispatch(operation, arrays, options, None, backend)
    if not _is_observed() and all(array is None or _is_dense(array) for array in arrays):
        return differentiable(
            operation, arrays, options, backend, lambda given: operation.run_eagerly(given, options, None, backend)
        )
    check_backend(operation.name, backend)
    values = check_option_values(operation.contract, check_option_kinds(operation.contract, options))
    return call_op(operation, arrays, values, backend)


def call_op(
    operation: Operation, arrays: Sequence[Any], options: Mapping[str, object], backend: str
) -> tuple[Any, ...]:
    """Call the registered op with normalised options; return its outputs as a tuple."""
    return as_tuple(operation.torch_op(*arrays, **options, backend=backend))


def _is_observed() -> bool:
    """Return whether a transform, a dispatch mode (fake tensors, graph tracing) or forward-mode AD is active."""
    return _transforms_active() or _dispatch_modes() > 0 or forward_ad._current_level >= 0 or _jit_trace() is not None


def _is_complete(operation: Operation, arrays: Sequence[Any]) -> bool:
    return all(
        isinstance(array, Tensor) or (array is None and declared.optional)
        for declared, array in zip(operation.contract.inputs, arrays, strict=True)
    )


def _is_dense(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, Parameter) and not tensor.is_neg() and not tensor.is_meta


def _traced(
    operation: Operation, arrays: Sequence[Any], options: Mapping[str, object], stream: object, backend: str
) -> tuple[Any, ...]:
    # What torch.compile traces: keep it to a few plain steps. The fake kernel checks the call.
    if stream is not None:
        fix = "Compiled code runs on one stream: put the call to it on that stream."
        rule = "be None under torch.compile"
        raise InvalidArgumentError(explain(operation.name, operation.stream_argument, rule, "a stream", fix))
    values = {name: value if isinstance(value, _PLAIN) else _dtype_name(value) for name, value in options.items()}
    return call_op(operation, arrays, values, backend)


_PLAIN = (bool, int, float, str, type(None), torch.SymInt, torch.SymFloat)


def _dtype_name(dtype: object) -> str:
    return canonical_dtype(dtype)


# torch.compile calls the function while it traces and takes the result as a constant.
_dtype_name._dynamo_marked_constant = True  # type: ignore[attr-defined]
