"""Valid calls of a contract, drawn by hypothesis from the declaration alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fe_runtime.contract import Bound, Contract, Input, Layout, Option, ShapePattern, bind
from fe_runtime.contract.shapes import BATCH, Dims
from fe_runtime.dtypes import DTYPES
from fe_runtime.strides import contiguous_stride

from .memory import NumpyArray, strided_array

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

__all__ = ["Call", "Values", "default_values", "strides_for", "valid_calls"]

Values = Callable[[str, tuple[int, ...], str, np.random.Generator], NumpyArray]
"""``values(name, shape, dtype, random) -> array``: what an input holds."""

EXTENTS = (1, 2, 3, 7, 16, 33, 64)
BATCH_EXTENTS = (0, 1, 2, 3, 5)
MAX_BATCH_RANK = 3


class Call(NamedTuple):
    """The arguments of one call: a numpy array (or ``None``) for each declared input, and options by name."""

    arrays: tuple[NumpyArray | None, ...]
    options: dict[str, object]


def valid_calls(
    contract: Contract,
    *,
    extents: Mapping[str, Sequence[int]] | None = None,
    options: Mapping[str, Sequence[object]] | None = None,
    values: Values | None = None,
    negative_strides: bool = False,
) -> SearchStrategy[Call]:
    """Return a strategy for calls that the contract accepts.

    Drawn are the extents, the rank of ``...``, the accepted forms of each shape, dtypes, which optional inputs are
    present, memory layouts (padded rows, transposed, broadcast, where the layout allows them), options and values.

    Parameters
    ----------
    contract
        The declaration.
    extents
        Extents to draw a dimension letter from. By default 1, 2, 3, 7, 16, 33, 64, for a dynamic letter also 0;
        for ``...`` the extents of each of its up to three dimensions.
    options
        Values to draw an option from. By default its choices, or its default and what its rule allows near it.
    values
        Contents of the inputs; by default :func:`default_values`.
    negative_strides
        Whether to draw reversed dimensions, which only numpy has.

    Notes
    -----
    Calls that a rule between arguments forbids are drawn again; where a rule leaves few calls, say which extents suit
    it. A call that the contract rejects for any other reason is a fault of the contract and fails the test.
    """
    from hypothesis import strategies as st

    @st.composite
    def calls(draw: DrawFn) -> Call:
        sizes: Dims = {}
        dtypes: dict[str, str] = {}
        random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        arrays: list[NumpyArray | None] = []
        for declared in contract.inputs:
            if declared.optional and not draw(st.booleans()):
                arrays.append(None)
                continue
            shape = _draw_shape(draw, contract, declared, sizes, extents or {})
            partner = dtypes.get(declared.dtype_of or "")
            dtype = dtypes[declared.name] = partner or draw(st.sampled_from(_arrays_of(declared.dtypes)))
            stride = draw(st.sampled_from(strides_for(shape, declared.layout, negative_strides)))
            contents = (values or default_values)(declared.name, shape, dtype, random)
            arrays.append(strided_array(shape, stride, dtype, contents))
        chosen = {option.name: draw(st.sampled_from(_values_of(option, options or {}))) for option in contract.options}
        return _follow_rules(contract, Call(tuple(arrays), chosen))

    return calls()


def default_values(name: str, shape: tuple[int, ...], dtype: str, random: np.random.Generator) -> NumpyArray:
    """Return normal deviates for floats, scales around 1 for e8m0, and small non-negative integers."""
    del name
    if dtype == "bool":
        return random.integers(0, 2, shape).astype(np.bool_)
    if dtype == "float8_e8m0fnu":
        scales: NumpyArray = np.exp2(random.integers(-4, 5, shape).astype(np.float64))
        return scales
    if "int" in dtype:
        return random.integers(0, 8, shape)
    return random.standard_normal(shape)


def strides_for(shape: Sequence[int], layout: Layout, negative: bool = False) -> list[tuple[int, ...]]:
    """Return the strides that are tried for a shape and satisfy a layout, the contiguous one first."""
    tried = dict.fromkeys([contiguous_stride(shape), *_other_strides(tuple(shape), negative)])
    return [stride for stride in tried if layout.holds(shape, stride)]


def _other_strides(shape: tuple[int, ...], negative: bool) -> list[tuple[int, ...]]:
    rank = len(shape)
    if rank == 0:
        return []
    found = [
        (*contiguous_stride((*shape[:-1], shape[-1] + 1))[:-1], 1),  # rows that no wide load suits
        (*contiguous_stride((*shape[:-1], shape[-1] + 8))[:-1], 1),  # padded rows
        tuple(2 * step for step in contiguous_stride(shape)),  # every other element
    ]
    if rank > 1:
        padded = (*shape[:1], shape[1] + 1, *shape[2:])
        found.append(contiguous_stride(padded))  # outermost dimension apart: it does not merge
        found.append(tuple(reversed(contiguous_stride(shape[::-1]))))  # column-major
        found.append((0, *contiguous_stride(shape)[1:]))  # broadcast
    if negative:
        found.append((-contiguous_stride(shape)[0], *contiguous_stride(shape)[1:]))
        found.append((*contiguous_stride(shape)[:-1], -1))
    return found


def _draw_shape(
    draw: DrawFn, contract: Contract, declared: Input, sizes: Dims, extents: Mapping[str, Sequence[int]]
) -> tuple[int, ...]:
    """Draw the extents that are still free and one of the accepted forms."""
    from hypothesis import strategies as st

    for token in declared.shape.split():
        if token.isdigit() or token in sizes:
            continue
        if token == BATCH:
            each = st.sampled_from(tuple(extents.get(BATCH, BATCH_EXTENTS)))
            sizes[token] = tuple(draw(st.lists(each, max_size=MAX_BATCH_RANK)))
        else:
            default = (0, *EXTENTS) if token in contract.dynamic else EXTENTS
            sizes[token] = draw(st.sampled_from(tuple(extents.get(token, default))))
    shape: tuple[int, ...] = draw(st.sampled_from([pattern.shape(sizes) for pattern in declared.patterns]))
    return shape if _means(declared, shape, sizes) else ShapePattern(declared.shape).shape(sizes)


def _means(declared: Input, shape: tuple[int, ...], sizes: Dims) -> bool:
    # A form with a trailing 1 may also read as the canonical pattern with other extents: (..., C) = (4, 1).
    first = next(p for p in declared.patterns if p.fits_rank(len(shape)) and p.match(shape, {}) is None)
    dims: Dims = {}
    first.match(shape, dims)
    return all(sizes[letter] == extent for letter, extent in dims.items())


def _arrays_of(dtypes: Sequence[str]) -> list[str]:
    return [name for name in dtypes if name in DTYPES and not name.startswith("float4")] or list(dtypes)


def _values_of(option: Option, given: Mapping[str, Sequence[object]]) -> list[object]:
    if option.name in given:
        return list(given[option.name])
    if option.choices:
        found = [option.default, *option.choices, *option.aliases]
    elif option.kind is bool:
        found = [option.default, True, False]
    elif option.kind in (int, float):
        found = [option.default, *_near(option)]
    else:
        found = [option.default]
    allowed = [v for v in found if v is option.default or option.holds is None or option.holds(v)]
    return list({(type(v), v): v for v in allowed}.values())


def _near(option: Option) -> list[object]:
    start: Any = option.default if option.default is not None else 1
    numbers = [start, 2 * start, start + 1, 0]
    kind: Any = option.kind
    return [kind(number) for number in numbers]


def _follow_rules(contract: Contract, call: Call) -> Call:
    from hypothesis import assume

    bound: Bound = bind(replace(contract, rules=()), call.arrays, call.options)
    assume(all(rule.holds(bound) for rule in contract.rules))
    return call
