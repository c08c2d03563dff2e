"""The calls that a contract must reject, derived from its declaration, and the check that they are rejected well."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fe_runtime.contract import Bound, Contract, Input, Option, bind
from fe_runtime.contract.shapes import Dims
from fe_runtime.dtypes import DTYPES, canonical_dtype
from fe_runtime.errors import InvalidArgumentError
from fe_runtime.strides import contiguous_stride

from .generate import Call
from .memory import NumpyArray, strided_array, to_framework, to_numpy

__all__ = ["InvalidCall", "assert_rejected", "invalid_calls"]


@dataclass(frozen=True)
class InvalidCall:
    """One call with one thing wrong: ``argument`` is at fault, ``error`` is the exact class to raise."""

    id: str
    arrays: tuple[Any, ...]
    options: dict[str, object]
    error: type[Exception]
    argument: str


def invalid_calls(contract: Contract, example: Call) -> list[InvalidCall]:
    """Return calls that differ from a valid one in a single respect that the declaration forbids.

    For each array: no array at all, wrong ranks, each extent off by one that another argument or a number fixes, each
    dtype that is not allowed, strides that the layout forbids, an array of another framework (if torch is loaded).
    For each option: wrong Python kinds, values outside its choices, and the values it lists as invalid. For each rule
    with a ``violation``: the call that it builds.

    Parameters
    ----------
    contract
        The declaration.
    example
        A valid call. Give it extents above 1, or there are no strides to break, and pass every optional input.

    Raises
    ------
    TypeError, InvalidArgumentError
        The example itself is invalid.
    """
    bound = bind(contract, example.arrays, example.options)
    found: list[InvalidCall] = []
    for at, declared in enumerate(contract.inputs):
        for label, array, error in _bad_arrays(contract, bound, example, at, declared):
            arrays = (*example.arrays[:at], array, *example.arrays[at + 1 :])
            found.append(InvalidCall(f"{declared.name}-{label}", arrays, example.options, error, declared.name))
    for option in contract.options:
        for value, error in _bad_values(option):
            options = {**example.options, option.name: value}
            label = f"{option.name}-{type(value).__name__}-{value}"
            found.append(InvalidCall(label, example.arrays, options, error, option.name))
    for number, rule in enumerate(contract.rules):
        if rule.violation is not None:
            call = dict(
                rule.violation({**dict(zip(contract.input_names, example.arrays, strict=True)), **example.options})
            )
            arrays = tuple(call.pop(name) for name in contract.input_names)
            found.append(InvalidCall(f"rule{number}-{rule.argument}", arrays, call, rule.error, rule.argument))
    return found


def assert_rejected(
    run: Callable[[tuple[Any, ...], dict[str, object]], object],
    operation: str,
    call: InvalidCall,
    outputs: Sequence[Any] = (),
) -> None:
    """Run an invalid call and check its one error: the exact class, a text that names operation, argument and what was
    given, and nothing written.

    Parameters
    ----------
    run
        ``run(arrays, options)`` makes the call.
    operation
        Name that the text starts with.
    call
        One of :func:`invalid_calls`.
    outputs
        Arrays that the call could write into; they and the inputs must not change.
    """
    operands = [x for x in (*call.arrays, *outputs) if isinstance(x, np.ndarray) or hasattr(x, "data_ptr")]
    before = [to_numpy(x).tobytes() for x in operands]
    try:
        run(call.arrays, call.options)
    except Exception as error:
        if type(error) is not call.error:
            raise AssertionError(f"{call.id}: raised {error!r} instead of {call.error.__name__}") from error
        text = str(error)
    else:
        raise AssertionError(f"{call.id}: was accepted instead of raising {call.error.__name__}")
    start = f"{operation}: {call.argument} must "
    if not text.startswith(start) or "; got " not in text:
        raise AssertionError(f"{call.id}: the text must start with {start!r} and say what was given; it is {text!r}")
    if before != [to_numpy(x).tobytes() for x in operands]:
        raise AssertionError(f"{call.id}: an operand changed although the call was rejected")


Bad = tuple[str, Any, type[Exception]]


def _bad_arrays(contract: Contract, bound: Bound, example: Call, at: int, declared: Input) -> Iterator[Bad]:
    array = example.arrays[at]
    yield "list", [1.0, 2.0], TypeError
    yield "number", 1.0, TypeError
    yield "string", "x", TypeError
    if not declared.optional:
        yield "None", None, contract.error("missing")
    if array is None:
        return
    for rank in (0, array.ndim - 1, array.ndim + 1, array.ndim + 2):
        if rank >= 0 and not any(pattern.fits_rank(rank) for pattern in declared.patterns):
            yield f"rank{rank}", np.zeros((1,) * rank, array.dtype), contract.error("rank")
    yield from _bad_shapes(contract, bound, example, at, declared, array)
    for stride in _bad_strides(declared, array.shape):
        broken = strided_array(array.shape, stride, canonical_dtype(array.dtype), array)
        yield f"strides{stride}".replace(" ", ""), broken, contract.error("layout")
    tight = contiguous_stride(array.shape)
    for dtype in _bad_dtypes(bound, declared):
        stride = tuple(step // array.itemsize for step in array.strides) if declared.layout.orders else tight
        yield dtype, strided_array(array.shape, stride, dtype), contract.error("dtype")
    if "torch" in sys.modules and any(other is not None for other in example.arrays[:at]):
        yield "framework", to_framework(array, "torch"), InvalidArgumentError


def _bad_shapes(
    contract: Contract, bound: Bound, example: Call, at: int, declared: Input, array: NumpyArray
) -> Iterator[Bad]:
    """Yield the array with each extent raised by one that an earlier argument, or a number, fixes."""
    earlier = {token for other in contract.inputs[:at] if bound.has(other.name) for token in other.shape.split()}
    earlier |= set(contract.derived)
    known: Dims = {letter: extent for letter, extent in bound.dims.items() if letter in earlier}
    for axis in range(array.ndim):
        shape = (*array.shape[:axis], array.shape[axis] + 1, *array.shape[axis + 1 :])
        fits = (p for p in declared.patterns if p.fits_rank(len(shape)))
        packed = declared.pairs if bound.dtype(declared.name) == "float4_e2m1fn" else None
        meant = tuple(2 * extent if dim == packed else extent for dim, extent in enumerate(shape))
        if all(pattern.match(meant, dict(known)) is not None for pattern in fits):
            yield f"extent{axis}", np.zeros(shape, array.dtype), contract.error("shape")


def _bad_strides(declared: Input, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    tight = contiguous_stride(shape)
    tried = [tuple(2 * step for step in tight), tuple(reversed(contiguous_stride(shape[::-1])))]
    if shape:
        tried.append((-tight[0], *tight[1:]))
        tried.append((*contiguous_stride((*shape[:-1], shape[-1] + 3))[:-1], 1))
    for stride in dict.fromkeys(tried):
        if not declared.layout.holds(shape, stride):
            yield stride


def _bad_dtypes(bound: Bound, declared: Input) -> Iterator[str]:
    partner = bound.dtype(declared.dtype_of) if declared.dtype_of else None
    for dtype in DTYPES:
        if dtype.startswith("float4") or (dtype == "uint8" and declared.pairs is not None):  # numpy's packed pairs
            continue
        meant = declared.dtype_aliases.get(dtype, dtype)
        if meant not in declared.dtypes or (partner is not None and meant != partner):
            yield dtype


_WRONG_KINDS: dict[object, tuple[object, ...]] = {
    float: ("1", [1.0], 1j, True),
    int: (1.5, "1", [1], True),
    bool: (1, "yes", 0.0),
    str: (3, ["a"], b"a"),
}


def _bad_values(option: Option) -> Iterator[tuple[object, type[Exception]]]:
    if option.kind == "dtype":
        yield "no_such_dtype", option.error
        yield 3, option.error
    for value in _WRONG_KINDS.get(option.kind, ()):
        yield value, TypeError
    if option.default is not None:
        yield None, option.error if option.kind == "dtype" else TypeError
    outside: dict[object, object] = {
        int: 1 + sum(c for c in option.choices if isinstance(c, int)),
        str: "no_such_choice",
    }
    if option.choices and option.kind in outside:
        yield outside[option.kind], option.error
    if option.choices and option.kind == "dtype":
        yield from ((d, option.error) for d in DTYPES if d not in (*option.choices, *option.aliases))
    for value in option.invalid:
        yield value, option.error


def _integers(values: Sequence[object]) -> list[int]:
    return [value for value in values if isinstance(value, int)]
