"""The class form of operations whose kernels need scratch memory: from the caller, or from a buffer of the object."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from fe_runtime import workspace as memory
from fe_runtime.api_base import APIBase
from fe_runtime.arrays import allocate_byte_workspace
from fe_runtime.contract import Bound
from fe_runtime.errors import InvalidArgumentError, explain
from fe_runtime.operation import Operation
from fe_runtime.plan import HOPPER, Kernel

__all__ = ["WorkspaceAPI"]


class WorkspaceAPI(APIBase):
    """A class form whose ``execute`` takes a ``workspace``.

    Executions without one share a buffer of the object, so they must not run at the same time on several streams. It is
    made by ``compile`` or, if the samples were descriptors, at the first of them; one with more rows than any before
    makes it larger, or is refused. JAX arrays need no workspace: XLA's memory is used.
    """

    rows = ("M", "a_tensor")
    """The contract's letter for the number of rows, and the input that has them."""

    grows = True
    """Whether the object's buffer becomes larger for more rows than the sample has."""

    def __init__(
        self,
        operation: Operation,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        options: Mapping[str, object],
        backend: str,
    ) -> None:
        self._call = threading.local()
        self._buffers: dict[str, Any] = {}
        self._needs: bool | None = None
        super().__init__(operation, inputs, outputs, options, backend)

    def scratch_workspace_bytes(self) -> int:
        """Return the bytes of the workspace that ``execute`` needs for the sample's M; 0 where it needs none."""
        bound, plan = self._check()
        kernel = plan.kernel or self._operation.find_kernel(bound, HOPPER)
        return memory.size(kernel.form.scratch) if isinstance(kernel, Kernel) else 0

    def compile(self) -> None:
        """Build the kernel, once, and allocate the buffer of executions without a workspace."""
        super().compile()
        bound, plan = self._check()
        if plan.kernel is not None and bound.framework == "torch":
            self._provide(memory.size(plan.kernel.form.scratch), bound)

    def _execute_in(
        self,
        workspace: Any,
        arrays: Sequence[Any],
        outputs: Sequence[Any],
        stream: object = None,
        runtime: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """Execute with the caller's workspace, or without one.

        Raises
        ------
        NotCompiledError
            ``compile`` was not called.
        InvalidArgumentError
            An operand is not as compiled, the workspace does not do or overlaps an operand, or M exceeds the sample's
            without one.
        """
        self._call.workspace, self._call.on_stream = workspace, stream is not None
        try:
            self._execute(arrays, outputs, stream, runtime)
        finally:
            self._call.workspace = self._call.held = None

    def _launch(
        self, live: Bound, kernel: Kernel | None, run: Callable[..., object], *others: Any
    ) -> Callable[..., None]:
        """Return the launch that hands the workspace to the kernel, after a check of it or of M."""
        scratch: memory.Scratch = ()
        scalars = 0
        if kernel is not None and live.framework == "torch":
            scratch, scalars = kernel.form.scratch, len(kernel.form.scalars)
            kernel = replace(kernel, form=replace(kernel.form, scratch=()))

        def run_in_workspace(*operands: Any) -> None:
            first = len(operands) - scalars
            run(*operands[:first], *memory.cut(self._call.held, scratch), *operands[first:])

        needed = memory.size(scratch)
        launch = super()._launch(live, kernel, run_in_workspace if scratch else run, *others)

        def launch_with_workspace(arrays: Sequence[Any], outputs: Sequence[Any]) -> None:
            self._call.held = self._workspace(live, needed, (*arrays, *outputs))
            if self._call.on_stream:
                memory.record_stream(self._call.held)
            launch(arrays, outputs)

        return launch_with_workspace

    def _workspace(self, live: Bound, needed: int, operands: Sequence[Any]) -> Any:
        """Return the workspace of the execution that is under way."""
        given = self._call.workspace
        if given is not None:
            memory.check(live.operation, given, needed, live)
            contract = self._operation.contract
            named = zip((*contract.input_names, *contract.output_names), operands, strict=True)
            memory.check_apart(live.operation, given, named)
            return given
        letter, name = self.rows
        most, rows = self._check()[0].dim(letter), live.dim(letter)
        # Also where the reference runs: what passes here passes on a GPU.
        if rows > most and not self.grows and self._needs_memory():
            rule, fix = f"have at most the sample's {most} rows without a workspace", "Pass a workspace."
            raise InvalidArgumentError(explain(live.operation, name, rule, f"{letter} = {rows}", fix))
        return self._provide(needed, live)

    def _needs_memory(self) -> bool:
        if self._needs is None:
            self._needs = self.scratch_workspace_bytes() > 0
        return self._needs

    def _provide(self, needed: int, bound: Bound) -> Any:
        """Return the object's own buffer on a device, which is allocated here if its samples were descriptors."""
        device = str(bound.device)
        buffer = self._buffers.get(device)
        if needed and (buffer is None or buffer.numel() < needed):
            buffer = self._buffers[device] = allocate_byte_workspace(needed, bound.framework, device)
        return buffer
