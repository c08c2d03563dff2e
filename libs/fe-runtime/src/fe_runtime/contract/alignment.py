"""Where rows start: what is known of it, and the rule that a declaration may set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fe_runtime.dtypes import bits
from fe_runtime.errors import InvalidArgumentError, explain
from fe_runtime.tensor_desc import TensorDesc

from .shapes import ANY_LAYOUT, CONTIGUOUS, Layout

if TYPE_CHECKING:
    from .bind import Bound

__all__ = ["MAX_ALIGNMENT", "check_alignment", "misalignment", "row_alignment"]

MAX_ALIGNMENT = 16
"""Bytes of the widest load; a larger alignment makes no difference to any kernel."""


def row_alignment(pointer: int, desc: TensorDesc, layout: Layout = CONTIGUOUS) -> int:
    """Return the largest power of two that divides ``pointer`` and the bytes of every stride between runs.

    A run is what a kernel reads side by side: the last dimension, or where the layout leaves it open the longest one
    of stride 1. The stride of a single run counts too, though nobody steps along it: one row takes the kernel that
    more rows of the same array would.
    """
    run = _run(desc, layout)
    for number, step in enumerate(desc.stride):
        if number == run or not isinstance(step, int) or not step:
            continue  # a symbolic stride, while torch traces, says nothing
        if layout.orders and desc.shape[number] == 1:
            continue  # with gaps it may be anything
        step_bytes = abs(step) * bits(desc.dtype) // 8
        pointer = min(pointer, step_bytes & -step_bytes)
    return pointer


def check_alignment(bound: Bound, name: str, desc: TensorDesc, pointer: int, layout: Layout, wanted: int) -> None:
    """Raise ``InvalidArgumentError`` unless the address (of an array on a GPU) and, in a layout with gaps, the length
    and the distances of the runs are multiples of ``wanted`` bytes.

    ``pointer``: the largest power of two that divides the address. An array without elements is always aligned.
    """
    broken = misalignment(desc, layout, wanted)
    if broken is not None:
        raise InvalidArgumentError(explain(bound.operation, name, *broken))
    if pointer < wanted and bound.device.type == "cuda" and 0 not in desc.shape:
        rule, given = f"start at an address that is a multiple of {wanted} bytes", f"a multiple of {pointer}"
        raise InvalidArgumentError(explain(bound.operation, name, rule, given, "Pass a copy."))


def misalignment(desc: TensorDesc, layout: Layout, wanted: int) -> tuple[str, str, str] | None:
    """Return the broken rule, what was given and the fix, if runs are no multiples of ``wanted`` bytes long or apart.

    Only layouts with gaps have runs.
    """
    order = layout.order(desc.shape, desc.stride)
    if not order or 0 in desc.shape:
        return None
    width = bits(desc.dtype)
    if desc.shape[order[-1]] * width % (8 * wanted):
        rule = f"have a contiguous extent (dimension {order[-1]}) of a multiple of {wanted} bytes"
        return rule, f"{desc.shape[order[-1]]} elements of {desc.dtype}", "Pad that dimension."
    if any(desc.shape[dim] != 1 and desc.stride[dim] * width % (8 * wanted) for dim in order[:-1]):
        given = f"strides {tuple(desc.stride)} of {desc.dtype}"
        return f"have strides of multiples of {wanted} bytes", given, "Pass a contiguous copy."
    return None


def _run(desc: TensorDesc, layout: Layout) -> int | None:
    order = layout.order(desc.shape, desc.stride)
    if order:
        return order[-1]
    if layout is not ANY_LAYOUT:
        return desc.ndim - 1
    unit = [number for number, step in enumerate(desc.stride) if step == 1]
    return max(unit, key=lambda number: desc.shape[number], default=None)
