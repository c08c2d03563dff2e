"""Matrices as lines: their rows or their columns, whichever are contiguous."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Int32, Int64, cute

__all__ = ["ALIGNMENT", "by_line", "divided", "workspace_matrices"]

ALIGNMENT = 16
"""Bytes of which the start of every line and its length are multiples."""


def by_line(array: cute.Tensor, major: str) -> cute.Tensor:
    """Return matrices (R, C, L) as (lines, length, batches); ``major``: ``"k"`` where the rows are contiguous."""
    if major == "k":
        return array
    return cute.make_tensor(array.iterator, cute.select(array.layout, mode=[1, 0, 2]))


def workspace_matrices(workspace: cute.Tensor, shape: tuple[Any, Any, Any], major: str) -> cute.Tensor:
    """Return a contiguous bf16 workspace (lines, length) as matrices (R, C, L) of a shape; lines may be shorter."""
    rows, columns, _ = shape
    step = 8 * ALIGNMENT // BFloat16.width
    lines = rows if major == "k" else columns
    line, matrix = (cute.assume(Int64(workspace.shape[1]) * count, divby=step) for count in (1, lines))
    stride = (line, 1, matrix) if major == "k" else (1, line, matrix)
    return cute.make_tensor(workspace.iterator, cute.make_layout(shape, stride=stride))


def divided(value: Int32, power: int) -> tuple[Int32, Int32]:
    """Return quotient and remainder of a number >= 0 by a power of two."""
    return value >> (power.bit_length() - 1), value & (power - 1)
