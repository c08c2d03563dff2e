"""Arithmetic on shapes and strides (both in elements): order, contiguity, views, packed FP4."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from fe_runtime.errors import InvalidArgumentError, explain

__all__ = [
    "canonicalize_unit_dim_strides",
    "contiguous_stride",
    "has_distinct_elements",
    "has_order",
    "inverse_order",
    "is_contiguous",
    "ordered_stride",
    "resolve_view_shape",
    "stride_order_of",
    "unpack_fp4",
    "view_stride",
]


def stride_order_of(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Return the dimensions from the innermost outwards: sorted by (stride, extent), ties by position."""
    if len(stride) == 2:  # the common case, without the sort
        return (0, 1) if (stride[0], shape[0]) <= (stride[1], shape[1]) else (1, 0)
    return tuple(sorted(range(len(stride)), key=lambda dim: (stride[dim], shape[dim])))


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the C-contiguous stride; as in torch, a zero extent counts as one."""
    stride: list[int] = []
    reach = 1
    for extent in reversed(shape):
        stride.append(reach)
        reach *= max(extent, 1)
    return tuple(reversed(stride))


def inverse_order(order: Sequence[int]) -> tuple[int, ...]:
    """Return the order of dimensions that undoes another one."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def ordered_stride(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the stride without gaps of an array whose dimensions lie in ``order``, outermost first; a zero extent
    counts as one."""
    steps = dict(zip(order, contiguous_stride([shape[dim] for dim in order]), strict=True))
    return tuple(steps[dim] for dim in range(len(shape)))


def has_order(shape: Sequence[int], stride: Sequence[int], order: Sequence[int]) -> bool:
    """Return whether the dimensions lie in ``order``, outermost first: unit stride inside, no overlap, gaps or not.

    Strides of extents of 1 do not count; an array without elements has every order.
    """
    if 0 in shape:
        return True
    reach = 0
    for number, dim in enumerate(reversed(order)):
        if shape[dim] == 1:
            continue
        if (stride[dim] != 1) if number == 0 else (stride[dim] <= reach):
            return False
        reach += (shape[dim] - 1) * stride[dim]
    return True


def has_distinct_elements(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether all strides are positive and no two elements share memory, larger strides stepping over smaller
    ones."""
    reach = 0
    if 0 in shape:
        return True
    for step, extent in sorted(zip(stride, shape, strict=True)):
        if extent > 1:
            if step <= reach:
                return False
            reach += step * (extent - 1)
    return True


def is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether the elements lie in C order without gaps (as in torch: always, when there are none)."""
    if 0 in shape:
        return True
    reach = 1
    for extent, step in zip(reversed(shape), reversed(stride), strict=True):
        if extent != 1 and step != reach:
            return False
        reach *= extent
    return True


def canonicalize_unit_dim_strides(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return ``stride`` with the total element count in place of each extent-1 dimension's stride.

    Such a stride never helps to reach an element, and frameworks disagree about its value. Zero extents count as one.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: runtime conventions, layouts.
    """
    if 1 not in shape:
        return tuple(stride)
    total = prod(max(extent, 1) for extent in shape)
    return tuple(total if extent == 1 else step for extent, step in zip(shape, stride, strict=True))


def unpack_fp4(
    shape: Sequence[int], stride: Sequence[int], name: str = "tensor", packed: int | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the logical shape and stride of an array whose bytes hold two FP4 codes each.

    The codes of a byte are neighbours along the unit-stride dimension: its extent doubles, the strides of all other
    dimensions double. ``packed`` is that dimension; where it is not given and several dimensions have unit stride, the
    one of largest extent is meant (the stride of an extent-1 dimension says nothing), then the last.

    Raises
    ------
    InvalidArgumentError
        No dimension has unit stride, or the one that must have it has not.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: runtime conventions, packed FP4.
    """
    if packed is None:
        unit = [dim for dim, step in enumerate(stride) if step == 1]
        packed = max(unit, key=lambda dim: (shape[dim], dim), default=None)
        is_tight, which = packed is not None, "a unit-stride dimension"
    else:
        is_tight, which = stride[packed] == 1 or shape[packed] <= 1 or 0 in shape, f"unit stride in dimension {packed}"
    if not is_tight:
        fix = "Two FP4 codes share a byte, so one dimension must be stored without gaps."
        raise InvalidArgumentError(explain("packed FP4", name, f"have {which}", f"{stride=}", fix))
    logical_shape = tuple(2 * extent if dim == packed else extent for dim, extent in enumerate(shape))
    logical_stride = tuple(1 if dim == packed else 2 * step for dim, step in enumerate(stride))
    return logical_shape, logical_stride


def resolve_view_shape(shape: Sequence[int], count: int) -> tuple[int, ...]:
    """Return ``shape`` with its -1, if any, filled in so that it holds ``count`` elements.

    Raises
    ------
    RuntimeError
        Several -1, another negative extent, or a shape that does not hold ``count`` elements.
    """
    shape = tuple(shape)
    if shape.count(-1) > 1 or any(extent < -1 for extent in shape):
        raise RuntimeError(f"view: shape {shape} may hold one -1 and no other negative extent")
    known = prod(extent for extent in shape if extent != -1)
    if -1 not in shape:
        if known != count:
            raise RuntimeError(f"view: shape {shape} does not hold {count} elements")
        return shape
    if known == 0 or count % known:
        raise RuntimeError(f"view: the -1 in shape {shape} has no value for {count} elements")
    return tuple(count // known if extent == -1 else extent for extent in shape)


def view_stride(shape: Sequence[int], stride: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...] | None:
    """Return the stride of a view of shape ``wanted`` (same element count); None if only a copy has that shape.

    Dimensions of the source merge into runs of evenly spaced elements; each run must split exactly into
    neighbouring dimensions of the wanted shape.
    """
    if 0 in shape:
        return tuple(stride) if tuple(shape) == tuple(wanted) else contiguous_stride(wanted)
    todo = list(wanted)
    result: list[int] = []
    for count, step in _even_runs(shape, stride):
        while todo and (count > 1 or todo[-1] == 1):
            extent = todo.pop()
            if count % extent:
                return None
            result.append(step)
            count //= extent
            step *= extent
        if count > 1:
            return None
    return tuple(reversed(result))


def _even_runs(shape: Sequence[int], stride: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (element count, spacing) of the maximal evenly spaced runs, innermost first."""
    if not shape:
        yield 1, 1
        return
    count, spacing = shape[-1], stride[-1]
    for extent, step in zip(reversed(shape[:-1]), reversed(stride[:-1]), strict=True):
        if extent == 1 or step == count * spacing:
            count *= extent
        else:
            yield count, spacing
            count, spacing = extent, step
    yield count, spacing
