"""No output may share memory with another operand: the check before each launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .arrays import byte_range, get_data_ptr, overlap
from .contract import Contract
from .errors import InvalidArgumentError, explain

__all__ = ["Meetings", "check_overlap", "may_overlap", "meetings"]

Meetings = tuple[tuple[int, int, int, int], ...]
"""Operands ``(output, other, low, high)`` that overlap if ``low < address(output) - address(other) < high``."""


def check_overlap(contract: Contract, arrays: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Raise ``InvalidArgumentError`` if an output shares a byte with an input or with another output."""
    names = (*contract.input_names, *contract.output_names)
    operands = (*arrays, *outputs)
    for number in range(len(arrays), len(operands)):
        if operands[number] is None:
            continue
        for other in range(number):
            if operands[other] is not None and overlap(operands[number], operands[other]):
                rule, fix = f"not share memory with {names[other]}", "Allocate it separately."
                text = explain(contract.operation, names[number], rule, "overlapping arrays", fix)
                raise InvalidArgumentError(text)


def meetings(operands: Sequence[Any], inputs: int) -> Meetings:
    """Return, for each output and each operand before it, how far apart their addresses may be while they overlap.

    It depends on the signature alone. ``inputs`` is the number of operands, from the front, that are inputs.
    """
    reach = [None if operand is None else _reach(operand) for operand in operands]
    found: list[tuple[int, int, int, int]] = []
    for number in range(inputs, len(operands)):
        for other in range(number):
            mine, its = reach[number], reach[other]
            if mine is not None and its is not None:
                found.append((number, other, its[0] - mine[1], its[1] - mine[0]))
    return tuple(found)


def may_overlap(known: Meetings, operands: Sequence[Any]) -> bool:
    """Return whether the byte range of an output meets another one: the quick test for torch tensors."""
    for number, other, low, high in known:
        if low < operands[number].data_ptr() - operands[other].data_ptr() < high:
            return True
    return False


def _reach(operand: Any) -> tuple[int, int]:
    """Return the bytes that an operand reaches, counted from its address."""
    address, (start, stop) = get_data_ptr(operand), byte_range(operand)
    return start - address, stop - address
