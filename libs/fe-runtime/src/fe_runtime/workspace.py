"""The workspace that a caller hands to ``execute``: one vector of bytes, cut into the scratch arrays of a kernel."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

from .arrays import alignment, describe, get_device, is_torch_tensor, overlap
from .contract import Bound
from .dtypes import bits, framework_dtype
from .errors import InvalidArgumentError, explain

__all__ = ["ALIGNMENT", "Scratch", "check", "check_apart", "cut", "record_stream", "size"]

ALIGNMENT = 16
"""Bytes of which the address of a workspace is a multiple on a GPU."""
STEP = 128
"""Bytes of which every scratch array starts at a multiple inside the workspace: a line of the cache."""

Scratch = Sequence[tuple[tuple[int, ...], str]]
"""Shape and dtype of each scratch array, as in :class:`fe_runtime.plan.Form`."""


def size(scratch: Scratch) -> int:
    """Return how many bytes hold the scratch arrays."""
    return sum(_reach(shape, dtype) for shape, dtype in scratch)


def check(operation: str, workspace: Any, needed: int, bound: Bound, name: str = "workspace") -> None:
    """Raise ``InvalidArgumentError`` unless the workspace is a long enough uint8 vector beside the operands.

    ``name``: that of the argument.
    """
    rule = f"be a contiguous uint8 vector of at least {needed} bytes on {bound.device}"
    fix = "Allocate scratch_workspace_bytes() bytes."
    try:
        desc = describe(workspace, name)
    except (TypeError, InvalidArgumentError) as error:
        given = type(workspace).__name__
        raise InvalidArgumentError(explain(operation, name, rule, given, fix)) from error
    is_vector = desc.ndim == 1 and desc.dtype == "uint8" and (desc.numel() < 2 or desc.stride[0] == 1)
    if not is_vector or desc.numel() < needed:
        given = f"{desc.dtype} of shape {tuple(desc.shape)} with strides {tuple(desc.stride)}"
        raise InvalidArgumentError(explain(operation, name, rule, given, fix))
    if not bound.same_place(get_device(workspace)):
        raise InvalidArgumentError(explain(operation, name, rule, f"one on {get_device(workspace)}", fix))
    if bound.device.type == "cuda" and alignment(workspace) < ALIGNMENT:
        rule, given = f"start at a multiple of {ALIGNMENT} bytes", f"one of {alignment(workspace)}"
        raise InvalidArgumentError(explain(operation, name, rule, given, fix))


def check_apart(operation: str, workspace: Any, operands: Iterable[tuple[str, Any]]) -> None:
    """Raise ``InvalidArgumentError`` if the workspace shares memory with an operand; absent ones are ``None``."""
    for name, operand in operands:
        if operand is not None and overlap(workspace, operand):
            rule, fix = "not overlap an operand in memory", "Pass memory that nothing else uses."
            raise InvalidArgumentError(explain(operation, "workspace", rule, f"overlap with {name}", fix))


def cut(workspace: Any, scratch: Scratch) -> list[Any]:
    """Return the scratch arrays in a checked workspace, a torch tensor."""
    arrays, start = [], 0
    for shape, dtype in scratch:
        held = workspace[start : start + _bytes(shape, dtype)]
        arrays.append(held.view(framework_dtype(dtype, "torch")).view(shape))
        start += _reach(shape, dtype)
    return arrays


def record_stream(workspace: Any) -> None:
    """Tell torch's allocator that the current stream uses the workspace."""
    if is_torch_tensor(workspace) and workspace.is_cuda:
        torch: Any = sys.modules["torch"]
        workspace.record_stream(torch.cuda.current_stream(workspace.device))


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    return prod(shape) * bits(dtype) // 8


def _reach(shape: tuple[int, ...], dtype: str) -> int:
    return -(-_bytes(shape, dtype) // STEP) * STEP
