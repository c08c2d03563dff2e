"""Valid calls of a contract, drawn by hypothesis from the declaration alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fe_runtime.contract import Bound, Contract, Input, Layout, Option, ShapePattern, bind
from fe_runtime.contract.alignment import misalignment
from fe_runtime.contract.shapes import BATCH, Dims
from fe_runtime.dtypes import DTYPES, bits
from fe_runtime.errors import InvalidArgumentError
from fe_runtime.strides import contiguous_stride, ordered_stride
from fe_runtime.tensor_desc import TensorDesc

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
    from hypothesis import assume
    from hypothesis import strategies as st

    @st.composite
    def calls(draw: DrawFn) -> Call:
        chosen = {option.name: draw(st.sampled_from(_values_of(option, options or {}))) for option in contract.options}
        sizes: Dims = {}
        dtypes: dict[str, str] = {}
        random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        arrays: list[NumpyArray | None] = []
        for declared in contract.inputs:
            if declared.optional and not draw(st.booleans()):
                arrays.append(None)
                continue
            _derive(contract, declared, sizes, chosen)
            shape = _draw_shape(draw, contract, declared, sizes, extents or {})
            partner = dtypes.get(declared.dtype_of or "")
            dtype = dtypes[declared.name] = partner or draw(st.sampled_from(_dtypes_of(declared)))
            aligned = _strides_of(declared, shape, dtype, negative_strides)
            assume(aligned)
            stride = draw(st.sampled_from(aligned))
            stored = draw(st.sampled_from(_stored_as(declared, dtype)))
            shape, stride = _in_bytes(declared, dtype, shape, stride)
            contents = (values or default_values)(declared.name, shape, stored, random)
            array = strided_array(shape, stride, stored, contents)
            as_view = bool(declared.view) and draw(st.sampled_from((False, True)))
            arrays.append(array.transpose(declared.view) if as_view else array)
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


def strides_for(shape: Sequence[int], layout: Layout, negative: bool = False, step: int = 8) -> list[tuple[int, ...]]:
    """Return the strides that are tried for a shape and satisfy a layout, the contiguous one first.

    ``step``: elements by which the pitch of a layout with gaps grows.
    """
    tried = dict.fromkeys([contiguous_stride(shape), *_other_strides(tuple(shape), negative)])
    for order in layout.orders:
        gaps = tuple(extent + (step if dim == order[-1] else 0) for dim, extent in enumerate(shape))
        tried |= dict.fromkeys([ordered_stride(shape, order), ordered_stride(gaps, order)])
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
    forms = [ShapePattern(text).shape(sizes) for text in (declared.shape, *declared.also)]
    shape: tuple[int, ...] = draw(st.sampled_from(forms))
    return shape if _means(declared, shape, sizes) else ShapePattern(declared.shape).shape(sizes)


def _means(declared: Input, shape: tuple[int, ...], sizes: Dims) -> bool:
    # A form with a trailing 1 may also read as the canonical pattern with other extents: (..., C) = (4, 1).
    first = next(p for p in declared.patterns if p.fits_rank(len(shape)) and p.match(shape, {}) is None)
    dims: Dims = {}
    first.match(shape, dims)
    return all(sizes[letter] == extent for letter, extent in dims.items())


def _dtypes_of(declared: Input) -> list[str]:
    packs = declared.pairs is not None
    found = [name for name in declared.dtypes if name in DTYPES and (packs or not name.startswith("float4"))]
    return found or list(declared.dtypes)


def _stored_as(declared: Input, dtype: str) -> list[str]:
    """Return the dtypes of numpy arrays that mean ``dtype``."""
    if dtype == "float4_e2m1fn":
        return ["uint8"]
    return [dtype, *(alias for alias, meant in declared.dtype_aliases.items() if meant == dtype)]


def _strides_of(declared: Input, shape: tuple[int, ...], dtype: str, negative: bool) -> list[tuple[int, ...]]:
    """Return strides that are as the declaration wants them, also in bytes."""
    tried = strides_for(shape, declared.layout, negative, max(8, 8 * declared.alignment // bits(dtype)))
    if dtype == "float4_e2m1fn":
        tried = [s for s in tried if s[declared.pairs or 0] == 1 and shape[declared.pairs or 0] % 2 == 0]
    descs = (TensorDesc.of(dtype, shape, stride) for stride in tried)
    return [desc.stride for desc in descs if misalignment(desc, declared.layout, declared.alignment) is None]


def _in_bytes(
    declared: Input, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides of the array that holds the elements: packed pairs count as one."""
    if dtype != "float4_e2m1fn":
        return shape, stride
    packed = declared.pairs
    return (
        tuple(extent // 2 if dim == packed else extent for dim, extent in enumerate(shape)),
        tuple(step if dim == packed else step // 2 for dim, step in enumerate(stride)),
    )


def _derive(contract: Contract, declared: Input, sizes: Dims, options: dict[str, object]) -> None:
    for letter in declared.shape.split():
        if letter in contract.derived:
            sizes[letter] = contract.derived[letter](Bound(contract.operation, dims=sizes, options=options))


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

    bound: Bound = bind(replace(contract, rules=(), outputs=()), call.arrays, call.options)
    assume(all(rule.holds(bound) for rule in contract.rules))
    try:
        bind(contract, call.arrays, call.options)
    except InvalidArgumentError:  # a result that cannot be aligned
        assume(not any(spec is not None and spec.alignment > 1 for spec in (o.spec(bound) for o in contract.outputs)))
        raise
    return call
