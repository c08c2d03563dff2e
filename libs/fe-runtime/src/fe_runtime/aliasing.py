"""No operand that is written may share memory with another one: the check before each launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .arrays import byte_range, get_data_ptr, is_torch_tensor, overlap
from .contract import Contract
from .errors import InvalidArgumentError, explain

__all__ = ["Meetings", "check_overlap", "guard_mutated", "may_overlap", "meetings"]

Meetings = tuple[tuple[int, int, int, int], ...]
"""Operands ``(written, other, low, high)`` that overlap if ``low < address(written) - address(other) < high``."""


def check_overlap(contract: Contract, arrays: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Raise ``InvalidArgumentError`` if an output or a mutated input shares a byte with another operand."""
    names = (*contract.input_names, *contract.output_names)
    operands = (*arrays, *outputs)
    for number, other in _pairs(contract, operands):
        if overlap(operands[number], operands[other]):
            rule, fix = f"not share memory with {names[other]}", "Allocate it separately."
            raise InvalidArgumentError(explain(contract.operation, names[number], rule, "overlapping arrays", fix))


def meetings(contract: Contract, operands: Sequence[Any]) -> Meetings:
    """Return, for each operand that is written and each other one, how far apart their addresses may be while they
    overlap.

    It depends on the signature alone. ``operands``: the inputs, then as many of the outputs as there are to be checked.
    """
    reach = [None if operand is None else _reach(operand) for operand in operands]
    found: list[tuple[int, int, int, int]] = []
    for number, other in _pairs(contract, operands):
        mine, its = reach[number], reach[other]
        if mine is not None and its is not None:
            found.append((number, other, its[0] - mine[1], its[1] - mine[0]))
    return tuple(found)


def may_overlap(known: Meetings, operands: Sequence[Any]) -> bool:
    """Return whether the byte range of a written operand meets another one: the quick test for torch tensors."""
    for number, other, low, high in known:
        if low < operands[number].data_ptr() - operands[other].data_ptr() < high:
            return True
    return False


def guard_mutated(contract: Contract, arrays: Sequence[Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run(arrays)`` of a signature with the check that its mutated inputs overlap no other input."""
    known = meetings(contract, arrays) if any(map(is_torch_tensor, arrays)) else None

    def guarded(given: Sequence[Any]) -> Any:
        if known is None or may_overlap(known, given):
            check_overlap(contract, given, ())
        return run(given)

    return guarded


def _pairs(contract: Contract, operands: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Yield each present operand that is written with each other present one."""
    inputs = len(contract.inputs)
    written = [*contract.mutated, *range(inputs, len(operands))]
    for number in written:
        for other in range(max(number, inputs)):
            if other != number and operands[number] is not None and operands[other] is not None:
                yield number, other


def _reach(operand: Any) -> tuple[int, int]:
    """Return the bytes that an operand reaches, counted from its address."""
    address, (start, stop) = get_data_ptr(operand), byte_range(operand)
    return start - address, stop - address
