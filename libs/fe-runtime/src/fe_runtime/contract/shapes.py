"""Symbolic shapes such as ``"... C"`` and memory layouts such as "rows with unit inner stride"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fe_runtime.strides import has_order, is_contiguous, ordered_stride

__all__ = [
    "ANY_LAYOUT",
    "CONTIGUOUS",
    "UNIT_INNER",
    "Dims",
    "Layout",
    "ShapePattern",
    "compact",
    "merged_strides",
    "pitched",
]

Dims = dict[str, int | tuple[int, ...]]
"""Dimension letter to extent; ``"..."`` maps to the tuple of leading extents."""

BATCH = "..."
UNITS = "1*"


@dataclass(frozen=True, slots=True)
class ShapePattern:
    """A shape in dimension letters, integers and at most one of ``...`` (any number of extents, also none) and ``1*``
    (any number of ones).

    Examples
    --------
    >>> dims = {}
    >>> ShapePattern("... C").match((2, 3, 64), dims), dims
    (None, {'...': (2, 3), 'C': 64})
    """

    text: str

    @property
    def tokens(self) -> tuple[str, ...]:
        """The pattern's entries."""
        return tuple(self.text.split())

    def fits_rank(self, rank: int) -> bool:
        """Whether an array of this rank can match."""
        fixed = len(self.tokens) - self._is_open
        return rank >= fixed if self._is_open else rank == fixed

    def match(self, shape: Sequence[int], dims: Dims) -> str | None:
        """Bind letters to extents in ``dims``; return the first token that disagrees, or ``None``."""
        for token, group in self.split(shape):
            if token == UNITS:
                if any(extent != 1 for extent in group):
                    return token
                continue
            extent = group if token == BATCH else group[0]
            known = int(token) if token.isdigit() else dims.setdefault(token, extent)
            if known != extent:
                return token
        return None

    def shape(self, dims: Dims) -> tuple[int, ...]:
        """Return the shape with every letter replaced by its extent, ``1*`` by one 1."""
        extents: list[int] = []
        for token in self.tokens:
            extent = 1 if token == UNITS else int(token) if token.isdigit() else dims[token]
            extents.extend(extent if isinstance(extent, tuple) else (extent,))
        return tuple(extents)

    def __str__(self) -> str:
        inner = ", ".join("1, ..., 1" if token == UNITS else token for token in self.tokens)
        return f"({inner},)" if len(self.tokens) == 1 and BATCH not in self.tokens else f"({inner})"

    def split(self, values: Sequence[int]) -> list[tuple[str, tuple[int, ...]]]:
        """Return each token with the values (extents or strides, one per dimension) that belong to it."""
        width = len(values) - len(self.tokens) + 1  # dimensions of the batch, or ones
        groups: list[tuple[str, tuple[int, ...]]] = []
        at = 0
        for token in self.tokens:
            stop = at + (width if token in (BATCH, UNITS) else 1)
            groups.append((token, tuple(values[at:stop])))
            at = stop
        return groups

    @property
    def _is_open(self) -> bool:
        return BATCH in self.tokens or UNITS in self.tokens


@dataclass(frozen=True, slots=True)
class Layout:
    """A named rule on strides (in elements). Extents of 1 and empty arrays satisfy every layout.

    ``orders``: the orders of dimensions in memory, outermost first, that a layout of more than one accepts; see
    :func:`pitched` and :func:`compact`.
    """

    name: str
    rule: str
    fix: str
    holds: Callable[[Sequence[int], Sequence[int]], bool]
    orders: tuple[tuple[int, ...], ...] = ()

    def order(self, shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
        """Return the first of ``orders`` that an array has; all of them fit one without elements."""
        return next((order for order in self.orders if has_order(shape, stride, order)), ())


def pitched(name: str, rule: str, fix: str, *orders: tuple[int, ...]) -> Layout:
    """Return the layout of arrays whose dimensions lie in one of these orders, outermost first.

    The innermost dimension has stride 1. Each other one may leave gaps (rows of any pitch), but nothing overlaps.
    """

    def holds(shape: Sequence[int], stride: Sequence[int]) -> bool:
        return any(has_order(shape, stride, order) for order in orders)

    return Layout(name, rule, fix, holds, orders)


def compact(name: str, rule: str, fix: str, *orders: tuple[int, ...]) -> Layout:
    """Return the layout of arrays whose dimensions lie in one of these orders, outermost first, without gaps.

    As with :func:`pitched`, the order that an array has is fixed by the samples of a class.
    """

    def has_no_gaps(shape: Sequence[int], stride: Sequence[int], order: tuple[int, ...]) -> bool:
        steps = zip(shape, stride, ordered_stride(shape, order), strict=True)
        return all(extent == 1 or step == wanted for extent, step, wanted in steps)

    def holds(shape: Sequence[int], stride: Sequence[int]) -> bool:
        return 0 in shape or any(has_no_gaps(shape, stride, order) for order in orders)

    return Layout(name, rule, fix, holds, orders)


def _significant(shape: Sequence[int], stride: Sequence[int]) -> list[tuple[int, int]]:
    return [(e, s) for e, s in zip(shape, stride, strict=True) if e != 1]


def _has_unit_inner(shape: Sequence[int], stride: Sequence[int]) -> bool:
    if 0 in shape or not shape:
        return True
    outer_nonnegative = all(step >= 0 for _, step in _significant(shape[:-1], stride[:-1]))
    return outer_nonnegative and (shape[-1] == 1 or stride[-1] == 1)


CONTIGUOUS = Layout("contiguous", "be contiguous (row-major)", "Pass a contiguous copy.", is_contiguous)
UNIT_INNER = Layout(
    "unit_inner",
    "have a last dimension of stride 1 and no negative strides",
    "Pass a copy whose last dimension is contiguous.",
    _has_unit_inner,
)
ANY_LAYOUT = Layout("any", "have any strides", "", lambda _shape, _stride: True)


def merged_strides(shape: Sequence[int], stride: Sequence[int], keep: int = 1) -> tuple[int, int] | None:
    """Merge all but the last ``keep`` dimensions into one; return its (extent, stride), or ``None`` if it has none.

    Extent 1 and empty leading shapes always merge. The stride of a merged extent of 1 is the size of one inner block.
    """
    lead = len(shape) - keep
    extent = 1
    for size in shape[:lead]:
        extent *= size
    inner = 1
    for size in shape[lead:]:
        inner *= size
    significant = _significant(shape[:lead], stride[:lead])
    if not significant or extent == 0:
        return extent, inner
    for (_, outer), (size, step) in pairwise(significant):
        if outer != size * step:
            return None
    return extent, significant[-1][1]
