"""The life of a call: check, plan, compile once, allocate, launch.

An :class:`Operation` holds what one operation is (contract, reference, kernel plan, gradient). Its wrapper, its class
and its torch and JAX entry points are all derived from it.

A call is prepared once per *signature* (framework, dtypes, shapes, strides, device, pointer alignment, options) and
the prepared call is remembered, so a warm call costs one dictionary look-up, the allocation and the launch. Preparing
costs some tens of microseconds and compiles only when the plan names a kernel that was never built.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import launch
from .aliasing import guard_mutated
from .arrays import detect_framework, get_device, is_jax_array, on_stream, resolve_stream
from .compile import cache
from .compile.toolchain import ToolchainError
from .contract import Bound, Contract, bind
from .errors import InvalidArgumentError, explain, renamed
from .plan import Kernel, NoKernel, Plan, Target, check_backend, choose, fall_back
from .reference import reference_call
from .tensor_desc import TensorDesc
from .tuple_dict import TupleDict, register_pytrees
from .values import ValueCheck, with_value_check

if TYPE_CHECKING:
    from .gradient import Gradient

__all__ = ["OPERATIONS", "Operation", "load_kernel", "reject_descriptors", "signature"]

Outputs = tuple[Any, ...]
PreparedCall = Callable[[Sequence[Any]], Outputs]

MAX_PREPARED = 4096
"""Prepared calls kept per operation; they are cheap to make again, so the table is simply emptied when full."""


@dataclass(eq=False)
class Operation:
    """One operation of a library.

    Parameters
    ----------
    library
        Import name of the library, also the torch namespace.
    contract
        What the operation accepts and returns.
    reference
        ``reference(*arrays, **options) -> tuple`` of outputs on arrays of any framework, in the contract's canonical
        shapes and output dtypes; absent outputs are ``None``. It writes into no array: new values of mutated inputs
        follow the outputs. Or its place, ``"module:function"``, which is imported
        when the reference is first needed: a process that runs kernels never pays for it.
    find_kernel
        The pure plan of the kernels: a :class:`Kernel`, or a :class:`NoKernel` with the reason.
    gradient
        How torch and JAX differentiate it; ``None`` for an operation without gradient.
    inference_only
        Raise when a gradient is required, instead of running on detached data. A function decides by the options.
    check_values
        ``check(bound, read)`` raises for forbidden values of offsets, indices, positions; see
        :mod:`fe_runtime.values`.
    check_variable
        Another library's environment variable that asks for ``check_values`` on a GPU too.
    jax_entry
        Public name of the JAX entry point, for error texts.
    stream_argument
        Name of the wrapper's stream parameter, which differs by family, for error texts.
    """

    library: str
    contract: Contract
    reference: Callable[..., Outputs] | str
    find_kernel: Callable[[Bound, Target], Kernel | NoKernel]
    gradient: Gradient | None = None
    inference_only: bool | Callable[[Mapping[str, object]], bool] = False
    check_values: ValueCheck | None = None
    check_variable: str = ""
    jax_entry: str = ""
    stream_argument: str = "stream"

    def __post_init__(self) -> None:
        self.name = self.contract.operation
        self.qualified_name = f"{self.library}.{self.name}"
        if self.gradient is not None:
            self.gradient.check(self.contract)
        self.records_gradient = self.gradient is not None or bool(self.inference_only)
        self.output_names = self.contract.output_names
        self.torch_op: Any = None
        self.run_reference = _at(self.reference) if isinstance(self.reference, str) else self.reference
        self._torch_bridge: Any = None
        self._prepared: dict[object, PreparedCall] = {}
        _announce(self)

    def __call__(
        self, arrays: Sequence[Any], options: Mapping[str, object], *, stream: object = None, backend: str = "auto"
    ) -> TupleDict:
        """Run the operation: the body of every wrapper.

        Parameters
        ----------
        arrays
            One entry per declared input, ``None`` where absent.
        options
            Values by name.
        stream
            ``None``, or a stream in any form of ``fe_runtime.arrays.resolve_stream``.
        backend
            ``"auto"``, ``"reference"`` or a kernel backend.

        Returns
        -------
        TupleDict
            The contract's outputs in order; an output that the options do not produce is ``None``.

        Raises
        ------
        TypeError, InvalidArgumentError
            The call breaks the contract.
        NotSupportedError
            No kernel serves it, and one was demanded by name or by ``FE_STRICT=1``.
        """
        if stream is None and self._torch_bridge is not None:  # the way of every warm call on the GPU
            prepared = self._warm(arrays, options, backend)
            if prepared is not None:
                return TupleDict.of(self.output_names, prepared(arrays))
        outputs = self.run(arrays, options, stream, backend)
        register_pytrees()
        return TupleDict.of(self.output_names, outputs)

    def outputs(
        self, arrays: Sequence[Any], options: Mapping[str, object], *, stream: object = None, backend: str = "auto"
    ) -> Outputs:
        """Like :meth:`__call__`, returning a plain tuple, for operations whose results have no names."""
        if stream is None and self._torch_bridge is not None:
            prepared = self._warm(arrays, options, backend)
            if prepared is not None:
                return prepared(arrays)
        return self.run(arrays, options, stream, backend)

    def outputs_into(
        self,
        arrays: Sequence[Any],
        outputs: Sequence[Any],
        options: Mapping[str, object],
        *,
        stream: object = None,
        backend: str = "auto",
    ) -> Outputs:
        """Like :meth:`outputs`, with results in the caller's arrays where there are some (``None``: a new one); see
        :mod:`fe_runtime.into`."""
        from .into import outputs_into

        return outputs_into(self, arrays, outputs, options, stream, backend)

    def is_inference_only(self, options: Mapping[str, object]) -> bool:
        """Whether a call with these options must not need a gradient."""
        decide = self.inference_only
        return decide(options) if callable(decide) else decide

    def _warm(self, arrays: Sequence[Any], options: Mapping[str, object], backend: str) -> PreparedCall | None:
        try:
            key = self._torch_bridge.eager_key(self.records_gradient, arrays, options, backend)
            return None if key is None else self._prepared.get(key)
        except TypeError:  # an unhashable option: binding will say what is wrong with it
            return None

    def run(
        self, arrays: Sequence[Any], options: Mapping[str, object], stream: object = None, backend: str = "auto"
    ) -> Outputs:
        """Run the operation where the framework can see it: past the table of warm calls."""
        bridge = self._torch_bridge
        if bridge is None and "torch" in sys.modules:
            from .torch import dispatch, must_dispatch  # torch came after this operation

            if must_dispatch(self, arrays):
                return dispatch(self, arrays, options, stream, backend)
            self._torch_bridge = sys.modules["fe_runtime.torch"]  # never reached while torch traces
        elif bridge is not None and bridge.must_dispatch(self, arrays):
            outputs: Outputs = bridge.dispatch(self, arrays, options, stream, backend)
            return outputs
        if any(map(is_jax_array, arrays)):
            from .jax.entry import reject_fp4_dtypes, reject_mutation

            reject_mutation(self, arrays)
            reject_fp4_dtypes(self, arrays, options)
        return self.run_eagerly(arrays, options, stream, backend)

    def run_eagerly(
        self, arrays: Sequence[Any], options: Mapping[str, object], stream: object = None, backend: str = "auto"
    ) -> Outputs:
        """Like :meth:`run`, past torch's dispatcher: nothing is traced, transformed or differentiated."""
        key = signature(arrays, options, backend)
        try:
            prepared = self._prepared.get(key)
        except TypeError:  # an unhashable option: binding will say what is wrong with it
            key = prepared = None
        if prepared is None:
            prepared = self._prepare(arrays, options, backend, key)
        if stream is None:
            return prepared(arrays)
        with on_stream(self.resolve_stream(stream, arrays), arrays):
            return prepared(arrays)

    def bind(self, arrays: Sequence[Any], options: Mapping[str, object]) -> Bound:
        """Check a call against the contract; see :func:`fe_runtime.contract.bind`."""
        return bind(self.contract, arrays, options)

    def plan(self, bound: Bound, backend: str = "auto", target: Target | None = None) -> Plan:
        """Choose backend and kernel for a checked call; ``target`` defaults to the GPU that holds the arrays."""
        check_backend(self.name, backend)
        if target is None and bound.device.type == "cuda" and backend != "reference":
            target = Target.of(bound.device)
        return choose(bound, backend, self.find_kernel, target)

    def resolve_stream(self, stream: object, arrays: Sequence[Any]) -> Any:
        """Turn the caller's ``stream`` into a request; see :func:`fe_runtime.arrays.resolve_stream`."""
        first = next(array for array in arrays if array is not None)
        framework = detect_framework(first)
        if framework == "jax":
            fix = f"Leave it out: XLA orders {self.jax_entry or 'the call'} itself."
            rule = "be None for JAX arrays"
            raise InvalidArgumentError(explain(self.name, self.stream_argument, rule, repr(stream), fix))
        try:
            return resolve_stream(stream, framework, get_device(first), self.stream_argument)
        except (TypeError, InvalidArgumentError) as error:
            raise renamed(error, self.name) from error

    def bind_data(self, arrays: Sequence[Any], options: Mapping[str, object]) -> Bound:
        """Like :meth:`bind`, of arrays with data, whose framework can allocate results."""
        bound = self.bind(arrays, options)
        reject_descriptors(self.name, self.contract.input_names, arrays)
        if bound.framework == "unknown":
            first = next(iter(bound.arrays))
            fix = "Use the class API with preallocated outputs for other DLPack producers."
            rule = "be a torch, JAX or numpy array"
            raise InvalidArgumentError(explain(self.name, first, rule, bound.framework, fix))
        return bound

    def remember(self, key: object, prepared: Callable[..., Outputs]) -> None:
        """Keep a prepared call for its signature."""
        if len(self._prepared) >= MAX_PREPARED:
            self._prepared.clear()
        self._prepared[key] = prepared

    def prepared(self, key: object) -> Callable[..., Outputs] | None:
        """Return the call that was prepared for a signature, if one was."""
        return self._prepared.get(key)

    def _prepare(self, arrays: Sequence[Any], options: Mapping[str, object], backend: str, key: object) -> PreparedCall:
        bound = self.bind_data(arrays, options)
        if bound.framework == "jax":
            missing, prepared = self._prepare_jax(bound, backend, traced=key is None)
        else:
            missing, prepared = self._load(bound, backend)
        if self.contract.mutated and bound.framework != "jax" and bound.device.type != "meta":
            prepared = guard_mutated(self.contract, arrays, prepared)
        if self.check_values is not None:
            names = self.contract.input_names
            prepared = with_value_check(self.check_values, bound, names, prepared, self.check_variable)
        if key is not None and missing is None:  # strict mode is read at each call
            self.remember(key, prepared)
        return prepared

    def _load(self, bound: Bound, backend: str) -> tuple[NoKernel | None, PreparedCall]:
        if bound.device.type == "meta":  # torch tensors without data: the registered op knows their shapes
            from .torch.dispatch import call_op

            return None, lambda arrays: call_op(self, arrays, bound.options, backend)
        plan, run = load_kernel(self.plan(bound, backend), backend, launch.is_empty(bound))
        if plan.kernel is None:
            return plan.missing, reference_call(self, bound)
        return None, launch.kernel_call(self, bound, plan.kernel, run)

    def _prepare_jax(self, bound: Bound, backend: str, traced: bool) -> tuple[NoKernel | None, PreparedCall]:
        from .jax.entry import prepare

        missing = None
        check_backend(self.name, backend)
        if not traced:  # otherwise the device is known, and the plan made, when the call is lowered
            plan = self.plan(bound, backend)
            fall_back(plan)
            missing = plan.missing
        return missing, prepare(self, bound, backend)


def _at(place: str) -> Callable[..., Outputs]:
    module, _, name = place.partition(":")

    def reference(*arrays: Any, **options: object) -> Outputs:
        outputs: Outputs = getattr(import_module(module), name)(*arrays, **options)
        return outputs

    return reference


OPERATIONS: dict[str, Operation] = {}
"""Every operation that was imported, by qualified name."""


def _forget_prepared(name: str | None) -> None:
    for operation in OPERATIONS.values():
        if name in (None, operation.qualified_name):
            operation._prepared.clear()


cache.on_clear.append(_forget_prepared)


def _announce(operation: Operation) -> None:
    """Enter a new operation into :data:`OPERATIONS` and, if torch is loaded, into ``torch.ops``."""
    if not hasattr(sys.modules.get("torch"), "library"):  # absent, or still being imported
        OPERATIONS[operation.qualified_name] = operation
        return
    from . import torch as bridge

    OPERATIONS[operation.qualified_name] = operation
    bridge.register(operation)
    operation._torch_bridge = bridge


def load_kernel(plan: Plan, backend: str, empty: bool = False) -> tuple[Plan, Callable[..., object] | None]:
    """Return the plan and its compiled kernel; say so if it falls back.

    ``None`` stands for the reference, and for a call without elements (``empty``), which launches nothing. Where the
    kernel can neither be compiled nor loaded on this installation, the returned plan is the reference, unless a kernel
    was asked for by name.

    Raises
    ------
    NotSupportedError
        No kernel, and one was demanded by name or by ``FE_STRICT=1``.
    NotCompiledError
        The kernel has to be compiled, and that is forbidden here.
    """
    run = None
    if plan.kernel is not None and not empty:
        try:
            run = cache.load(plan.kernel.spec)
        except ToolchainError as error:
            if backend != "auto":
                raise
            plan = replace(plan, backend="reference", kernel=None, missing=NoKernel(str(error).rstrip(".")))
    fall_back(plan)
    return plan, run


def reject_descriptors(operation: str, names: Sequence[str], arrays: Sequence[object]) -> None:
    """Raise ``TypeError`` for a descriptor where data are needed."""
    for name, array in zip(names, arrays, strict=True):
        if isinstance(array, TensorDesc):
            fix = "Descriptors are for the constructor of the class."
            raise TypeError(explain(operation, name, "be an array with data", "a TensorDesc", fix))


def signature(arrays: Sequence[Any], options: Mapping[str, object], backend: str) -> object:
    """Return a key of all that a prepared call depends on; ``None`` for a call that is prepared anew.

    Only plain torch tensors on a GPU and concrete JAX arrays are remembered: there microseconds count.
    """
    bridge: Any = sys.modules.get("fe_runtime.torch")
    key = None if bridge is None else bridge.plain_key(arrays, options, backend)
    return _jax_key(arrays, options, backend) if key is None else key


def _jax_key(arrays: Sequence[Any], options: Mapping[str, object], backend: str) -> object:
    key: list[object] = [backend, *options, *options.values(), *map(type, options.values())]
    for array in arrays:
        kind = type(array)
        if array is None:
            key.append(None)
        elif kind.__name__ == "ArrayImpl" and kind.__module__.startswith("jaxlib"):
            key += array.dtype, array.shape, array.sharding
        else:
            return None
    return tuple(key)
