"""The reference as a backend: on canonical operands, into fresh arrays or into the caller's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from .arrays import is_torch_tensor, permuted
from .contract import Bound, Input, OutputSpec
from .errors import InvalidArgumentError, explain
from .strides import inverse_order

if TYPE_CHECKING:
    from .operation import Operation

__all__ = ["copy_into", "reference_call", "reference_launch", "reference_outputs"]


def reference_call(operation: Operation, bound: Bound) -> Callable[..., tuple[Any, ...]]:
    """Return ``call(arrays) -> outputs`` that runs the reference on arrays of any framework."""

    def call(arrays: Sequence[Any]) -> tuple[Any, ...]:
        results = reference_outputs(operation, bound, arrays)
        made = zip(results, bound.outputs, strict=False)
        outputs = tuple(None if result is None or spec is None else _fresh(result, spec) for result, spec in made)
        _write_mutated(operation, arrays, results)
        return outputs

    return call


def reference_launch(operation: Operation, bound: Bound) -> Callable[..., None]:
    """Return ``launch(arrays, outputs)`` that runs the reference and writes its results into the caller's outputs.

    Raises
    ------
    InvalidArgumentError
        The arrays are of no framework whose operators the reference could use.
    """
    if bound.framework == "unknown":
        rule = "be a torch or numpy array where no kernel serves the call"
        fix = "Convert it with from_dlpack of one of them."
        given = f"another DLPack producer on {bound.device}"
        raise InvalidArgumentError(explain(bound.operation, next(iter(bound.arrays)), rule, given, fix))

    def launch(arrays: Sequence[Any], outputs: Sequence[Any]) -> None:
        results = reference_outputs(operation, bound, arrays)
        named = zip(operation.output_names, outputs, results, bound.outputs, strict=False)
        for name, output, result, spec in named:
            if output is None or spec is None:
                continue
            if name in bound.transposed:
                output = permuted(output, bound.transposed[name])
            copy_into(output, result.reshape(output.shape) if spec.any_units else result, spec.accumulate)
        _write_mutated(operation, arrays, results)

    return launch


def reference_outputs(operation: Operation, bound: Bound, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Run the reference on canonical forms with the bound options.

    Returns the outputs, in their canonical forms, then the new values of the mutated inputs.
    """
    canonical = [
        None if array is None else _canonical(bound, declared, array)
        for declared, array in zip(operation.contract.inputs, arrays, strict=True)
    ]
    with _quiet(bound.framework, bound.device.type):
        results = tuple(operation.run_reference(*canonical, **bound.options))
    outputs = zip(results, bound.outputs, strict=False)
    return (*(_canonical_result(result, spec) for result, spec in outputs), *results[len(bound.outputs) :])


def copy_into(output: Any, result: Any, accumulate: str = "") -> None:
    """Write a reference's result into the caller's array, which may hold the same bytes under another dtype.

    ``accumulate``: as :class:`fe_runtime.contract.OutputSpec` has it. NaN wins a maximum.
    """
    if output.dtype != result.dtype:  # packed FP4 pairs in a uint8 container, or the reverse
        byte = sys.modules["torch"].uint8 if is_torch_tensor(output) else np.uint8
        output, result = output.view(byte), result.view(byte)
    library = sys.modules["torch"] if is_torch_tensor(output) else np
    with library.no_grad() if library is not np else nullcontext():
        if accumulate:
            result = library.maximum(output, result) if accumulate == "max" else library.add(output, result)
        if library is np:
            output[...] = result
        else:
            output.copy_(result)


def _fresh(result: Any, spec: OutputSpec) -> Any:
    """Return a reference's result as a kernel leaves it: with the strides of its kind, and a view of nothing else."""
    if is_torch_tensor(result):
        if spec.order or spec.view:
            shape, stride = spec.place("torch")
            made = sys.modules["torch"].empty_strided(shape, stride, dtype=result.dtype, device=result.device)
            return made.copy_(permuted(result, spec.view) if spec.view else result)
        if result._is_view() or not result.is_contiguous():
            return result.clone(memory_format=sys.modules["torch"].contiguous_format)
        return result
    if not isinstance(result, np.ndarray):
        return result
    if not spec.order:
        return np.ascontiguousarray(result).reshape(result.shape)
    ordered = np.ascontiguousarray(result.transpose(spec.order))
    return ordered.reshape([spec.shape[dim] for dim in spec.order]).transpose(inverse_order(spec.order))


def _canonical(bound: Bound, declared: Input, array: Any) -> Any:
    name = declared.name
    if name in bound.transposed:
        return permuted(array, bound.transposed[name])
    desc = bound.arrays[name]
    if desc.shape == bound.given[name]:
        return array
    packed = declared.pairs if desc.dtype == "float4_e2m1fn" else None
    return array.reshape([extent // 2 if dim == packed else extent for dim, extent in enumerate(desc.shape)])


def _canonical_result(result: Any, spec: OutputSpec | None) -> Any:
    """Return a reference's result in the canonical form: it may come as the view of its kind, or without ones that a
    form of the operands brings with it."""
    if result is None or spec is None or tuple(result.shape) == spec.shape:
        return result
    return permuted(result, inverse_order(spec.view)) if spec.view else result.reshape(spec.shape)


def _write_mutated(operation: Operation, arrays: Sequence[Any], results: Sequence[Any]) -> None:
    contract = operation.contract
    for number, result in zip(contract.mutated, results[len(contract.outputs) :], strict=True):
        array = arrays[number]
        if array is not None and result is not array and 0 not in result.shape:
            copy_into(array, result.reshape(array.shape))


@contextmanager
def _quiet(framework: str, device: str) -> Iterator[None]:
    """Let a reference compute what it says: it meets infinities by contract, gradients are the bridges' business, and
    under autocast its fp32 products would be 16-bit ones."""
    torch: Any = sys.modules.get("torch")
    if framework == "numpy":
        with np.errstate(all="ignore"):
            yield
    elif framework == "torch" and torch is not None:
        with torch.no_grad(), torch.autocast(device, enabled=False):
            yield
    else:
        yield
