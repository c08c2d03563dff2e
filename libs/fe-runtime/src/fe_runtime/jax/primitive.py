"""An operation as a JAX primitive: one call as a value, the shapes of its results, its place among transformations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from fe_runtime.contract import Bound, Sample
from fe_runtime.device import Device
from fe_runtime.dtypes import framework_dtype
from fe_runtime.errors import NotSupportedError
from fe_runtime.tensor_desc import TensorDesc

if TYPE_CHECKING:
    from fe_runtime.operation import Operation

__all__ = ["Call", "bind_call", "fill", "mutated_inputs"]

BUFFER_ALIGNMENT = 16
"""Bytes at which every XLA buffer starts at least."""


@dataclass(frozen=True)
class Call:
    """All that is static in a call: the operation, dtype and shape of each input, the options, the backend."""

    operation: Operation
    inputs: tuple[tuple[str, tuple[int, ...]] | None, ...]
    options: tuple[tuple[str, object], ...]
    backend: str

    @classmethod
    def of(cls, operation: Operation, bound: Bound, backend: str) -> Call:
        """Take the static facts of a checked call."""
        inputs = tuple(
            (bound.arrays[name].dtype, bound.given[name]) if bound.has(name) else None
            for name in operation.contract.input_names
        )
        return cls(operation, inputs, tuple(bound.options.items()), backend)

    def bound(self, device: Device | None = None) -> Bound:
        """Check the call again, as one on ``device``."""
        place = device or Device("unknown")
        samples = [
            None if known is None else Sample(TensorDesc.of(*known, device=place), "jax", BUFFER_ALIGNMENT)
            for known in self.inputs
        ]
        return self.operation.bind(samples, dict(self.options))

    @property
    def has_gradient(self) -> bool:
        """Whether the operation has a gradient for these inputs and options."""
        gradient = self.operation.gradient
        if gradient is None or self.operation.is_inference_only(dict(self.options)):
            return False
        dtypes = [None if known is None else known[0] for known in self.inputs]
        return gradient.serves(self.operation.contract.input_names, dtypes)

    def __str__(self) -> str:
        return self.operation.qualified_name


def bind_call(call: Call, arrays: Sequence[Any]) -> list[Any]:
    """Apply the operation's primitive to the inputs that are present.

    Returns the outputs that are present, then the new values of mutated inputs.
    """
    outputs: list[Any] = _primitive(call.operation).bind(*arrays, call=call)
    return outputs


def fill(bound: Bound, outputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return the outputs that the call produces in the contract's order, ``None`` for the others; what follows them,
    the new values of mutated inputs, stays."""
    made = iter(outputs)
    return (*(None if spec is None else next(made) for spec in bound.outputs), *made)


def mutated_inputs(call: Call) -> list[int]:
    """Return the numbers, among the inputs that are present, of those that the operation writes into."""
    present = [number for number, known in enumerate(call.inputs) if known is not None]
    return [at for at, number in enumerate(present) if number in call.operation.contract.mutated]


@functools.cache
def _primitive(operation: Operation) -> Primitive:
    from .lowering import lower_for_cuda, lower_reference

    primitive = Primitive(operation.qualified_name)
    primitive.multiple_results = True
    primitive.def_impl(_run)
    primitive.def_abstract_eval(_abstract_results)
    mlir.register_lowering(primitive, lower_reference)
    mlir.register_lowering(primitive, lower_for_cuda, platform="cuda")
    ad.primitive_jvps[primitive] = _raiser(_derivative, _DERIVATIVE_FIX)
    batching.primitive_batchers[primitive] = _raiser(lambda _call: "batching rule for jax.vmap", _BATCHING_FIX)
    return primitive


_DERIVATIVE_FIX = "Wrap the input in jax.lax.stop_gradient, or give the call a jax.custom_vjp."
_BATCHING_FIX = "Call it on the whole batch where its leading dimensions allow that, or use jax.lax.map."


def _run(*arrays: Any, call: Call) -> Any:
    return _jitted(call)(*arrays)


@functools.lru_cache(maxsize=4096)
def _jitted(call: Call) -> Callable[..., Any]:
    return jax.jit(lambda *arrays: bind_call(call, arrays))


def _abstract_results(*inputs: Any, call: Call) -> list[Any]:
    made = [spec for spec in call.bound().outputs if spec is not None]
    outputs = [_like(inputs[0], spec.shape, framework_dtype(spec.dtype, "jax")) for spec in made]
    return outputs + [_like(inputs[0], inputs[at].shape, inputs[at].dtype) for at in mutated_inputs(call)]


def _like(first: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return the abstract array of a result; inside ``shard_map`` it varies over the mesh as the inputs do."""
    mesh = first.sharding.mesh
    if mesh.empty:
        return jax.core.ShapedArray(shape, dtype)
    spec = jax.sharding.PartitionSpec(*[None] * len(shape))
    return first.update(shape=shape, dtype=dtype, weak_type=False, sharding=first.sharding.update(spec=spec))


def _derivative(call: Call) -> str:
    # Of a differentiable call only the derivative of its derivative gets here: the first one is a custom_vjp.
    return "second derivative" if call.has_gradient else "derivative"


def _raiser(what: Callable[[Call], str], fix: str) -> Callable[..., Any]:
    def rule(*_arguments: Any, call: Call, **_parameters: Any) -> Any:
        name, lacking = call.operation.jax_entry or call.operation.name, what(call)
        raise NotSupportedError(f"{name} has no {lacking}. {fix}", reason=f"{name} has no {lacking}")

    return rule
