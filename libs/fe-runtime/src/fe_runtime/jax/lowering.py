"""What a call becomes when XLA compiles it: the reference, or a custom call to the compiled kernel.

Nothing is compiled while JAX traces. Lowering for CUDA compiles the kernel, and needs no GPU for that: where none is
found the program is lowered for a Hopper one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.interpreters import mlir

from fe_runtime.compile.toolchain import ToolchainError
from fe_runtime.contract import Bound
from fe_runtime.device import Device
from fe_runtime.dtypes import framework_dtype
from fe_runtime.launch import BYTES, START, is_empty
from fe_runtime.operation import load_kernel
from fe_runtime.plan import Kernel, Target
from fe_runtime.reference import reference_outputs

from .primitive import Call, mutated_inputs
from .targets import bridge_problem, ffi_target

__all__ = ["lower_for_cuda", "lower_reference"]

_GPU = Device("cuda", 0)


def lower_reference(context: Any, *operands: Any, call: Call) -> Any:
    """Lower to the reference; a kernel asked for by name raises ``NotSupportedError``."""
    bound = call.bound(Device("cpu"))
    call.operation.plan(bound, call.backend)
    return _lower(context, operands, lambda *arrays: _reference(call, bound, arrays))


def lower_for_cuda(context: Any, *operands: Any, call: Call) -> Any:
    """Lower to the kernel that the plan names, compiled now, or to the reference with the fallback warning."""
    bound = call.bound(_GPU)
    plan = call.operation.plan(bound, call.backend, Target.of(_GPU))
    if plan.kernel is not None and (problem := bridge_problem()) is not None:
        if call.backend != "auto":
            raise ToolchainError(f"{call.operation.name}: {problem.reason}. {problem.fix}")
        plan = replace(plan, backend="reference", kernel=None, missing=problem)
    plan, run = load_kernel(plan, call.backend, is_empty(bound))
    kernel = plan.kernel
    if kernel is None or run is None:
        return _lower(context, operands, lambda *arrays: _reference(call, bound, arrays))
    name = ffi_target(kernel, run)
    return _lower(context, operands, lambda *arrays: _launch(call, bound, kernel, name, arrays))


def _lower(context: Any, operands: Sequence[Any], function: Any) -> Any:
    return mlir.lower_fun(function, multiple_results=True)(context, *operands)


def _reference(call: Call, bound: Bound, arrays: Sequence[Any]) -> list[Any]:
    given = iter(arrays)
    filled: list[Any] = [None if known is None else next(given) for known in call.inputs]
    results = reference_outputs(call.operation, bound, filled)
    outputs, changed = results[: len(bound.outputs)], iter(results[len(bound.outputs) :])
    contract = call.operation.contract
    values = [next(changed).reshape(filled[n].shape) for n in contract.mutated if filled[n] is not None]
    return [output for output in outputs if output is not None] + values


def _launch(call: Call, bound: Bound, kernel: Kernel, name: str, arrays: Sequence[Any]) -> list[Any]:
    form = kernel.form
    operands = [
        _presented(array, shape, desc.dtype)
        for array, shape, desc in zip(arrays, _present(form.inputs), bound.arrays.values(), strict=True)
    ]
    specs = _present(bound.outputs)
    results = [_buffer(shape, spec.dtype) for shape, spec in zip(_present(form.outputs), specs, strict=True)]
    mutated = mutated_inputs(call)
    aliases = {at: len(results) + number for number, at in enumerate(mutated)}
    for number, spec in enumerate(specs):
        if spec.accumulate:  # what it holds before is one more operand, whose buffer it takes over
            aliases[len(operands)] = number
            operands.append(jnp.full(results[number].shape, START[spec.accumulate], results[number].dtype))
    results += [jax.ShapeDtypeStruct(operands[at].shape, operands[at].dtype) for at in mutated]
    results += [_buffer(*known) for known in form.scratch]
    scalars = {scalar: _attribute(bound.options[scalar]) for scalar in form.scalars}
    made = jax.ffi.ffi_call(name, results, input_output_aliases=aliases)(*operands, **scalars)
    outputs = [_restored(output, spec.shape, spec.dtype) for output, spec in zip(made, specs, strict=False)]
    given = list(bound.arrays.values())
    changed = zip(mutated, made[len(specs) :], strict=False)
    return outputs + [_restored(array, arrays[at].shape, given[at].dtype) for at, array in changed]


def _buffer(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.uint8 if dtype in BYTES else framework_dtype(dtype, "jax"))


def _present(values: Sequence[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def _presented(array: Any, shape: tuple[int, ...], dtype: str) -> Any:
    array = lax.bitcast_convert_type(array, jnp.uint8) if dtype in BYTES else array
    return array.reshape(shape)


def _restored(array: Any, shape: tuple[int, ...], dtype: str) -> Any:
    array = array.reshape(shape)
    return lax.bitcast_convert_type(array, framework_dtype(dtype, "jax")) if dtype in BYTES else array


def _attribute(value: Any) -> Any:
    # FFI attributes are typed; kernels take 32-bit floats, and integers of any width.
    if isinstance(value, bool):
        return np.bool_(value)
    return np.float32(value) if isinstance(value, float) else np.int64(value)
