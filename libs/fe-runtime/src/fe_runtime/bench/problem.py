"""One case of a workload in one place: its arrays, its calls, its plan and its bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from fe_runtime.api_base import APIBase
from fe_runtime.arrays import Device, empty
from fe_runtime.contract import Bound, OutputSpec
from fe_runtime.dtypes import bits
from fe_runtime.plan import Plan, Target
from fe_runtime.tensor_desc import TensorDesc

from .places import NumpyPlace, Place
from .workload import Arrays, Case, Workload

__all__ = ["CPU_REFERENCE", "ON_THE_CPU", "Problem", "describe_case", "minimum_bytes", "plan_case"]

CPU_REFERENCE = "reference on the CPU"
ON_THE_CPU = "Kernels need a GPU: here fe runs its reference, which is made to be right, not fast."


class Problem:
    """A case whose arrays exist.

    Parameters
    ----------
    workload, case, place
        What to run and where.
    seed
        Of the random arrays.
    sets
        Sets of arrays to rotate among.
    via_host
        Make the arrays in numpy and copy them, so that :attr:`host_inputs` holds the same values.
    """

    def __init__(
        self, workload: Workload, case: Case, place: Place, seed: int = 0, sets: int = 1, via_host: bool = False
    ) -> None:
        self.workload, self.case, self.place = workload, case, place
        self.operation = workload.load_operation()
        self._wrapper = workload.load_wrapper()
        self._options = dict(case.options)
        self.host_inputs: Arrays = workload.inputs(case, NumpyPlace().source(seed)) if via_host else {}
        self.sets: list[dict[str, Any]] = [self._make(seed + number) for number in range(sets)]
        self.bound: Bound = self.operation.bind(self._in_order(self.sets[0]), self._options)
        self.plan: Plan = self.operation.plan(self.bound)

    def ours(self, round_number: int = 0) -> Any:
        """Call the wrapper."""
        return self._wrapper(**self._set(round_number), **self._options)

    def wrapper_call(self) -> Callable[[], Any]:
        """Return ``call()`` that calls the wrapper on the first set of arrays and does nothing else."""
        wrapper, arguments = self._wrapper, {**self.sets[0], **self._options}
        return lambda: wrapper(**arguments)

    def plain(self, round_number: int = 0) -> Any:
        """Evaluate the plain expression."""
        return self.workload.plain[self.place.framework](self.case, self._set(round_number))

    @property
    def has_plain(self) -> bool:
        """Whether the plain expression exists in this framework."""
        return self.place.framework in self.workload.plain

    def outputs(self, backend: str = "auto") -> tuple[Any, ...]:
        """Run the operation on the first set of arrays, which stay as they are.

        The new values of mutated inputs follow the outputs.
        """
        arrays, mutated = self.sets[0], self.bound.mutated
        if not mutated:
            return self.operation.run(self._in_order(arrays), self._options, None, backend)
        if self.place.framework == "jax":  # nothing mutates there: the new values are results
            return self.operation.run_eagerly(self._in_order(arrays), self._options, None, backend)
        copies = {name: self.place.put(self.place.get(arrays[name]).copy()) for name in mutated}
        made = self.operation.run(self._in_order({**arrays, **copies}), self._options, None, backend)
        return (*made, *copies.values())

    def results(self) -> Arrays:
        """Run the wrapper; return its outputs as numpy arrays, by name."""
        return {name: self.place.get(a) for name, a in self.ours().items() if a is not None}

    def class_call(self) -> Callable[[], Any]:
        """Return ``call()`` that executes the class form, compiled, into outputs that exist."""
        outputs = {
            name: None if spec is None else self._allocate(spec)
            for name, spec in zip(self.operation.contract.output_names, self.bound.outputs, strict=True)
        }
        made = (self.workload.make_class or self._plain_class)(self.sets[0], outputs, self._options)
        made.compile()
        execute, arguments = made.execute, {**self.sets[0], **outputs}
        return lambda: execute(**arguments)

    def _plain_class(self, inputs: Arrays, outputs: Arrays, options: Mapping[str, object]) -> APIBase:
        """Return the class form of an operation without a class of its own."""
        contract = self.operation.contract

        class Plain(APIBase):
            def execute(self, **arrays: Any) -> None:
                self._execute(
                    [arrays.get(name) for name in contract.input_names],
                    [arrays.get(name) for name in contract.output_names],
                )

        made = [outputs.get(name) for name in contract.output_names]
        return Plain(self.operation, self._in_order(inputs), made, options)

    @property
    def backend(self) -> str:
        """Where the call runs, in words."""
        if self.plan.kernel is not None:
            return f"{self.plan.backend} kernel"
        return "reference on the GPU" if self.place.on_gpu else CPU_REFERENCE

    def _make(self, seed: int) -> dict[str, Any]:
        if self.host_inputs:
            contract = self.operation.contract
            mutated = [contract.input_names[number] for number in contract.mutated]
            return {
                name: self.place.put(array.copy() if name in mutated else array)
                for name, array in self.host_inputs.items()
            }
        return dict(self.workload.inputs(self.case, self.place.source(seed)))

    def _set(self, round_number: int) -> Mapping[str, Any]:
        return self.sets[round_number % len(self.sets)]

    def _in_order(self, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(arrays.get(name) for name in self.operation.contract.input_names)

    def _allocate(self, spec: OutputSpec) -> Any:
        return empty(self.place.framework, spec.shape, spec.dtype, self.place.device)


def describe_case(workload: Workload, case: Case, device: Device) -> Bound:
    """Bind a case without making its arrays."""
    operation = workload.load_operation()
    operands = workload.operands(case)
    strides = workload.strides(case) if workload.strides else {}
    arrays = [
        TensorDesc.of(operands[name][1], operands[name][0], strides.get(name), device, name)
        if name in operands
        else None
        for name in operation.contract.input_names
    ]
    return operation.bind(arrays, dict(case.options))


def plan_case(workload: Workload, case: Case, target: Target | None) -> Plan:
    """Plan a case for a GPU, or for the CPU where ``target`` is ``None``."""
    device = Device("cpu") if target is None else Device("cuda", 0)
    return workload.load_operation().plan(describe_case(workload, case, device), "auto", target)


def minimum_bytes(bound: Bound) -> int:
    """Return the bytes that any implementation must move.

    Each input is read once, each output and each mutated input written once.
    """
    arrays = [(desc.shape, desc.dtype) for desc in bound.arrays.values()]
    written = [(spec.shape, spec.dtype) for spec in bound.outputs if spec is not None]
    written += [(bound.arrays[name].shape, bound.arrays[name].dtype) for name in bound.mutated]
    return sum(math.prod(shape) * bits(dtype) // 8 for shape, dtype in (*arrays, *written))
