"""Class forms whose ``execute`` writes into a workspace of the caller: one vector of bytes, cut into scratch arrays."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from fe_runtime.arrays import alignment, allocate_byte_workspace, describe, get_device, is_torch_tensor, overlap
from fe_runtime.contract import Bound
from fe_runtime.dtypes import bits, framework_dtype
from fe_runtime.errors import InvalidArgumentError, explain
from fe_runtime.operation import Operation
from fe_runtime.plan import HOPPER, Kernel

from .implied_outputs import ImpliedOutputsAPI

__all__ = ["WorkspaceAPI"]

ALIGNMENT = 16
"""Bytes of which the address of a workspace is a multiple on a GPU."""
STEP = 128
"""Bytes of which every scratch array starts at a multiple inside the workspace: a line of the cache."""

Scratch = Sequence[tuple[tuple[int, ...], str]]
"""Shape and dtype of each scratch array, as in :class:`fe_runtime.plan.Form`."""


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
        return _size(self._scratch(bound, plan.kernel))

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

    def _scratch(self, bound: Bound, kernel: Kernel | None) -> Scratch:
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
            run(*operands[:first], *_cut(self._call.workspace, scratch), *operands[first:])

        launch = super()._launch(live, kernel, run_in_workspace, *others)

        def launch_with_workspace(arrays: Sequence[Any], outputs: Sequence[Any]) -> None:
            self._check_workspace(live, _size(scratch), (*arrays, *outputs))
            launch(arrays, outputs)

        return launch_with_workspace

    def _check_workspace(self, live: Bound, needed: int, operands: Sequence[Any]) -> None:
        """Raise unless the workspace of the execution under way does."""
        workspace, contract = self._call.workspace, self._operation.contract
        _check(live, workspace, needed)
        for name, operand in zip((*contract.input_names, *contract.output_names), operands, strict=True):
            if operand is not None and overlap(workspace, operand):
                rule, fix = "not overlap an operand in memory", "Pass memory that nothing else uses."
                raise InvalidArgumentError(explain(live.operation, "workspace", rule, f"overlap with {name}", fix))
        if self._call.on_stream and is_torch_tensor(workspace) and workspace.is_cuda:
            torch: Any = sys.modules["torch"]
            workspace.record_stream(torch.cuda.current_stream(workspace.device))


def _check(bound: Bound, workspace: Any, needed: int) -> None:
    """Raise ``InvalidArgumentError`` unless the workspace is a long enough uint8 vector beside the operands."""
    rule = f"be a contiguous uint8 vector of at least {needed} bytes on {bound.device}"

    def error(given: str, rule: str = rule) -> InvalidArgumentError:
        return InvalidArgumentError(
            explain(bound.operation, "workspace", rule, given, "Allocate scratch_workspace_bytes() bytes.")
        )

    try:
        desc = describe(workspace, "workspace")
    except (TypeError, InvalidArgumentError) as cause:
        raise error(type(workspace).__name__) from cause
    is_vector = desc.ndim == 1 and desc.dtype == "uint8" and (desc.numel() < 2 or desc.stride[0] == 1)
    if not is_vector or desc.numel() < needed:
        raise error(f"{desc.dtype} of shape {tuple(desc.shape)} with strides {tuple(desc.stride)}")
    if not bound.same_place(get_device(workspace)):
        raise error(f"one on {get_device(workspace)}")
    if bound.device.type == "cuda" and alignment(workspace) < ALIGNMENT:
        raise error(f"one of {alignment(workspace)}", f"start at a multiple of {ALIGNMENT} bytes")


def _cut(workspace: Any, scratch: Scratch) -> list[Any]:
    """Return the scratch arrays in a checked workspace, a torch tensor."""
    arrays, start = [], 0
    for shape, dtype in scratch:
        held = workspace[start : start + _bytes(shape, dtype)]
        arrays.append(held.view(framework_dtype(dtype, "torch")).view(shape))
        start += _reach(shape, dtype)
    return arrays


def _size(scratch: Scratch) -> int:
    return sum(_reach(shape, dtype) for shape, dtype in scratch)


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    return prod(shape) * bits(dtype) // 8


def _reach(shape: tuple[int, ...], dtype: str) -> int:
    return -(-_bytes(shape, dtype) // STEP) * STEP
