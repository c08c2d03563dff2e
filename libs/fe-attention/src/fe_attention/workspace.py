"""Class forms whose ``execute`` writes into a workspace of the caller: one vector of bytes, cut into scratch arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fe_runtime import workspace as memory
from fe_runtime.arrays import allocate_byte_workspace
from fe_runtime.contract import Bound
from fe_runtime.operation import Operation
from fe_runtime.plan import HOPPER, Kernel

from .implied_outputs import ImpliedOutputsAPI

__all__ = ["WorkspaceAPI"]


class WorkspaceAPI(ImpliedOutputsAPI):
    """A class form whose ``execute`` needs a ``workspace``, also where the reference runs: what passes there passes on
    a GPU. JAX arrays take none: XLA's memory is used."""

    def __init__(
        self, operation: Operation, inputs: Sequence[Any], options: Mapping[str, object], backend: str
    ) -> None:
        self._call = threading.local()
        super().__init__(operation, inputs, options, backend)

    def scratch_workspace_bytes(self) -> int:
        """Return the bytes of the workspace that ``execute`` needs for operands like the samples."""
        bound, plan = self._check()
        return memory.size(self._scratch(bound, plan.kernel))

    def allocate_workspace(self) -> Any:
        """Return a new workspace on the samples' device, in their framework (torch for descriptors on a GPU)."""
        bound, _ = self._check()
        framework = bound.framework
        if framework not in ("torch", "numpy"):
            framework = "numpy" if bound.device.type == "cpu" else "torch"
        return allocate_byte_workspace(self.scratch_workspace_bytes(), framework, str(bound.device))

    def _execute_in(self, workspace: Any, arrays: Sequence[Any], outputs: Sequence[Any], stream: object = None) -> None:
        """Execute with a workspace.

        Raises
        ------
        NotCompiledError
            ``compile`` was not called.
        InvalidArgumentError
            An operand is not as compiled, or the workspace is missing, too small, misaligned or overlaps an operand.
        """
        self._call.workspace, self._call.on_stream = workspace, stream is not None
        try:
            self._execute(arrays, outputs, stream)
        finally:
            self._call.workspace = None

    def _scratch(self, bound: Bound, kernel: Kernel | None) -> memory.Scratch:
        found = kernel or self._operation.find_kernel(bound, HOPPER)
        return found.form.scratch if isinstance(found, Kernel) else ()

    def _launch(
        self, live: Bound, kernel: Kernel | None, run: Callable[..., object], *others: Any
    ) -> Callable[..., None]:
        """Return the launch that hands the workspace, checked, to the kernel."""
        scratch = self._scratch(live, kernel)
        if live.framework == "jax" or not scratch:
            return super()._launch(live, kernel, run, *others)
        scalars = 0
        if kernel is not None:
            scalars = len(kernel.form.scalars)
            kernel = replace(kernel, form=replace(kernel.form, scratch=(), related=False))

        def run_in_workspace(*operands: Any) -> None:
            first = len(operands) - scalars
            run(*operands[:first], *memory.cut(self._call.workspace, scratch), *operands[first:])

        launch = super()._launch(live, kernel, run_in_workspace, *others)

        def launch_with_workspace(arrays: Sequence[Any], outputs: Sequence[Any]) -> None:
            self._check_workspace(live, memory.size(scratch), (*arrays, *outputs))
            launch(arrays, outputs)

        return launch_with_workspace

    def _check_workspace(self, live: Bound, needed: int, operands: Sequence[Any]) -> None:
        """Raise unless the workspace of the execution under way does."""
        workspace, contract = self._call.workspace, self._operation.contract
        memory.check(live.operation, workspace, needed, live)
        named = zip((*contract.input_names, *contract.output_names), operands, strict=True)
        memory.check_apart(live.operation, workspace, named)
        if self._call.on_stream:
            memory.record_stream(workspace)
