"""The body of every ``<op>_jax``: check the call, apply the operation's primitive, give it its derivative."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fe_runtime.arrays import detect_framework
from fe_runtime.contract import Bound
from fe_runtime.contract.options import any_of, short
from fe_runtime.dtypes import canonical_dtype
from fe_runtime.errors import InvalidArgumentError, explain

from .primitive import Call, bind_call, fill

if TYPE_CHECKING:
    from fe_runtime.operation import Operation

__all__ = ["entry", "prepare", "reject", "reject_fp4_dtypes", "reject_mutation"]


def entry(operation: Operation, arrays: Sequence[Any], options: Mapping[str, object], backend: str = "auto") -> Any:
    """Run an operation on JAX arrays, eagerly or under any tracing.

    Parameters
    ----------
    operation
        The operation.
    arrays
        One entry per declared input: a JAX array, a tracer, a numpy array, or ``None`` where absent.
    options
        Static values by name.
    backend
        ``"auto"``, ``"reference"`` or a kernel backend.

    Returns
    -------
    jax.Array or tuple
        The output, or all declared outputs in order, ``None`` where the options produce none; then the new values of
        the inputs that the operation writes into elsewhere. Here no input changes: XLA gives the input's buffer to
        its new value where nobody else needs it, and copies it otherwise.

    Raises
    ------
    TypeError, InvalidArgumentError
        The call breaks the contract.
    NotSupportedError
        No kernel serves it, and one was demanded by name or by ``FE_STRICT=1``; raised when the call is lowered, or
        at once for arrays whose device is known.

    Notes
    -----
    Under ``jit`` everything but the arrays is static. ``vmap`` raises. Inside ``shard_map`` the call works on the local
    shards; under ``jit`` over several devices without it, XLA gathers the operands. An output that has no gradient
    counts as constant.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: runtime conventions, JAX entry points.
    """
    given = [jax.numpy.asarray(array) if isinstance(array, np.ndarray) else array for array in arrays]
    for name, array in zip(operation.contract.input_names, given, strict=True):
        framework = detect_framework(array)
        if framework not in ("jax", "unknown"):
            raise InvalidArgumentError(explain(operation.name, name, "be a JAX array", framework, "Convert it."))
    reject_fp4_dtypes(operation, given, options)
    outputs = operation.run_eagerly(given, options, None, backend)
    return outputs if len(outputs) > 1 else outputs[0]


def prepare(operation: Operation, bound: Bound, backend: str) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return ``run(arrays) -> outputs`` for calls of one signature, traced or not."""
    call = Call.of(operation, bound, backend)
    function = _function(call)

    def run(arrays: Sequence[Any]) -> tuple[Any, ...]:
        present = [array for array in arrays if array is not None]
        return fill(bound, function(*_varying_alike(present)))

    return run


def reject(operation: Operation, **arguments: object) -> None:
    """Raise for each argument that is given though JAX has no place for it: streams, output buffers, pointers.

    Raises
    ------
    InvalidArgumentError
        An argument is not ``None``.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: runtime conventions, JAX entry points.
    """
    for name, value in arguments.items():
        if value is not None:
            rule, fix = "be None for JAX arrays", "XLA allocates the outputs and orders the call itself."
            raise InvalidArgumentError(explain(operation.name, name, rule, type(value).__name__, fix))


def reject_mutation(operation: Operation, arrays: Sequence[Any]) -> None:
    """Raise where an operation would write into a JAX array, which is immutable.

    Raises
    ------
    InvalidArgumentError
        The operation has mutated inputs; the text names the functional entry point.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: runtime conventions, frameworks.
    """
    names = operation.contract.input_names
    for number in operation.contract.mutated:
        if arrays[number] is not None:
            rule, fix = "be writable", f"Call {operation.jax_entry}, which returns the new value."
            raise InvalidArgumentError(explain(operation.name, names[number], rule, "a JAX array", fix))


def reject_fp4_dtypes(operation: Operation, arrays: Sequence[Any], options: Mapping[str, object]) -> None:
    """Raise for an option that names an FP4 dtype: JAX has none for packed pairs, whose bytes it holds as ``uint8``.

    An operation's own word for the format, such as ``"nvfp4"``, means those bytes.

    Raises
    ------
    InvalidArgumentError
        An FP4 dtype in any spelling; whatever else is wrong with the call is said first.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: runtime conventions, packed FP4.
    """
    for option in operation.contract.options:
        value = options.get(option.name)
        if option.kind == "dtype" and _names_fp4(value):
            operation.bind(arrays, options)
            words = [repr(word) for word in option.aliases if not _names_fp4(word)]
            rule = "name no FP4 dtype for JAX arrays, which have none for packed pairs"
            fix = f"Pass {any_of(words)}: the codes come as uint8." if words else ""
            raise InvalidArgumentError(explain(operation.name, option.name, rule, short(value), fix))


def _names_fp4(value: object) -> bool:
    try:
        return value is not None and canonical_dtype(value).startswith("float4")
    except InvalidArgumentError:
        return False


@functools.lru_cache(maxsize=4096)
def _function(call: Call) -> Callable[..., Any]:
    """Return the call as a function of its present inputs, compiled when called eagerly, differentiable if it is."""

    def function(*arrays: Any) -> tuple[Any, ...]:
        return tuple(bind_call(call, arrays))

    function.__name__ = function.__qualname__ = call.operation.name
    differentiable = _with_gradient(call, function) if call.has_gradient else function
    compiled: Callable[..., Any] = jax.jit(differentiable, inline=True)
    return compiled


def _with_gradient(call: Call, function: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    gradient, contract = call.operation.gradient, call.operation.contract
    assert gradient is not None
    bound = call.bound()
    names = [name for name, known in zip(contract.input_names, call.inputs, strict=True) if known is not None]
    options = {name: value for name, value in call.options if name in gradient.options}

    def forward(*arrays: Any) -> tuple[Any, Any]:
        outputs = function(*arrays)
        known = dict(zip(names, arrays, strict=True)) | dict(
            zip(contract.output_names, fill(bound, outputs), strict=True)
        )
        return outputs, gradient.saved(known)

    def backward(residuals: tuple[Any, ...], cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
        given = dict(zip(contract.output_names, fill(bound, cotangents), strict=True))
        incoming = [given[name] for name in gradient.outputs]
        results = gradient.operation.run_eagerly((*incoming, *residuals), options, None, call.backend)
        found = gradient.by_input(results)
        return tuple(_outgoing(found.get(name), known) for name, known in zip(names, _given(call), strict=True))

    differentiable = jax.custom_vjp(function)
    differentiable.defvjp(forward, backward)
    return differentiable


def _given(call: Call) -> list[tuple[str, tuple[int, ...]]]:
    return [known for known in call.inputs if known is not None]


def _outgoing(gradient: Any, known: tuple[str, tuple[int, ...]]) -> Any:
    """Return the gradient of an input in the dtype and shape in which the input was passed."""
    dtype, shape = known
    return None if gradient is None else gradient.astype(dtype).reshape(shape)


def _varying_alike(arrays: Sequence[Any]) -> list[Any]:
    """Mark all arrays as varying over the mesh axes, inside ``shard_map``, over which any of them does."""
    axes = [_axes(jax.typeof(array)) for array in arrays]
    together = frozenset().union(*axes)
    return [
        array if has == together else jax.lax.pcast(array, tuple(sorted(together - has)), to="varying")
        for array, has in zip(arrays, axes, strict=True)
    ]


def _axes(abstract: Any) -> frozenset[str]:
    # The attribute moved between versions of JAX.
    kinds = getattr(abstract, "manual_axis_type", None)
    found: frozenset[str] = getattr(abstract, "vma", frozenset()) if kinds is None else kinds.varying
    return found
