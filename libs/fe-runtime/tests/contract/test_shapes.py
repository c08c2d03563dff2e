"""Shape patterns, layouts and merged strides, against enumeration and torch's own rules."""

from __future__ import annotations

import itertools
import math
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fe_runtime.contract import ANY_LAYOUT, CONTIGUOUS, UNIT_INNER, ShapePattern, compact, merged_strides, pitched
from fe_runtime.strides import inverse_order, ordered_stride


@pytest.mark.parametrize(
    ("text", "shape", "dims"),
    [
        ("... C", (2, 3, 64), {"...": (2, 3), "C": 64}),
        ("... C", (64,), {"...": (), "C": 64}),
        ("B ... C", (2, 3, 4, 64), {"B": 2, "...": (3, 4), "C": 64}),
        ("B ... C", (2, 64), {"B": 2, "...": (), "C": 64}),
        ("N N 2", (5, 5, 2), {"N": 5}),
        ("", (), {}),
        ("...", (), {"...": ()}),
        ("... 4 C 1", (7, 4, 3, 1), {"...": (7,), "C": 3}),
    ],
)
def test_a_matching_shape_binds_its_letters(text: str, shape: tuple[int, ...], dims: dict[str, object]) -> None:
    pattern, bound = ShapePattern(text), {}
    assert pattern.fits_rank(len(shape))
    assert pattern.match(shape, bound) is None
    assert bound == dims
    assert pattern.shape(bound) == shape


@pytest.mark.parametrize(
    ("text", "shape", "known", "token"),
    [
        ("N N", (5, 6), {}, "N"),
        ("N 2", (5, 3), {}, "2"),
        ("C", (5,), {"C": 6}, "C"),
        ("... C", (2, 3, 5), {"...": (2, 4)}, "..."),
        ("... C", (2, 3, 5), {"...": (6,), "C": 5}, "..."),
        ("C 1*", (5, 1, 2), {}, "1*"),
    ],
)
def test_the_token_that_disagrees_is_named(text: str, shape: tuple[int, ...], known: dict, token: str) -> None:
    assert ShapePattern(text).match(shape, dict(known)) == token


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("1 1*", {1, 2, 3}), ("A B", {2}), ("...", {0, 1, 2, 3}), ("... C", {1, 2, 3}), ("B ... C 1", {3}), ("", {0})],
)
def test_ranks(text: str, ranks: set[int]) -> None:
    assert {rank for rank in range(4) if ShapePattern(text).fits_rank(rank)} == ranks


def test_patterns_print_as_python_shapes() -> None:
    assert [str(ShapePattern(text)) for text in ("C", "... C", "...", "A B 1", "1 1*")] == [
        "(C,)",
        "(..., C)",
        "(...)",
        "(A, B, 1)",
        "(1, 1, ..., 1)",
    ]


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_any_number_of_ones(rank: int) -> None:
    dims: dict[str, object] = {}
    assert ShapePattern("C 1*").match((5, *[1] * (rank - 1)), dims) is None  # type: ignore[arg-type]
    assert dims == {"C": 5}


small_shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def strided(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = draw(small_shapes)
    steps = st.sampled_from([-4, -1, 0, 1, 2, 3, 4, 6, 8, 12, 16, 24])
    return shape, tuple(draw(steps) for _ in shape)


def offsets(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    """Offset of every element, in row-major order of the indices."""
    indices = itertools.product(*map(range, shape))
    return [sum(i * s for i, s in zip(index, stride, strict=True)) for index in indices]


@given(strided())
def test_contiguous_means_consecutive_offsets(array: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    assert CONTIGUOUS.holds(*array) == (offsets(*array) == list(range(math.prod(array[0]))))


@given(strided())
def test_unit_inner_means_consecutive_rows(array: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    shape, stride = array
    if 0 in shape or not shape:
        assert UNIT_INNER.holds(shape, stride)
        return
    rows = np.array(offsets(shape, stride)).reshape(-1, shape[-1])
    consecutive = (np.diff(rows, axis=1) == 1).all()
    forwards = all(step >= 0 for extent, step in zip(shape[:-1], stride[:-1], strict=True) if extent > 1)
    assert UNIT_INNER.holds(shape, stride) == (consecutive and forwards)


@given(strided())
def test_any_layout_is_any(array: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    assert ANY_LAYOUT.holds(*array)


@given(strided(), st.integers(1, 2))
def test_merged_strides_reach_the_same_rows(array: tuple[tuple[int, ...], tuple[int, ...]], keep: int) -> None:
    shape, stride = array
    if len(shape) < keep:
        return
    lead = shape[: len(shape) - keep], stride[: len(shape) - keep]
    starts = offsets(*lead)
    merged = merged_strides(shape, stride, keep)
    evenly = len(set(np.diff(starts))) <= 1
    if merged is None:
        assert not evenly
        return
    extent, step = merged
    assert extent == len(starts)
    assert starts == [row * step for row in range(extent)] or extent <= 1


def test_a_single_row_has_the_stride_of_a_dense_one() -> None:
    # Nobody steps from it, but compiled code checks the number.
    assert merged_strides((1, 1, 24), (7, 5, 1)) == (1, 24)
    assert merged_strides((0, 3, 24), (7, 5, 1)) == (0, 24)
    assert merged_strides((24,), (1,)) == (1, 24)


@pytest.mark.parametrize(
    ("shape", "stride", "keep", "merged"),
    [
        ((2, 3, 8), (36, 12, 1), 1, (6, 12)),
        ((2, 3, 8), (37, 12, 1), 1, None),
        ((2, 3, 4, 8), (96, 32, 8, 1), 1, (24, 8)),
        ((2, 3, 4, 8), (200, 64, 8, 1), 2, None),
        ((2, 3, 4, 8), (192, 64, 8, 1), 2, (6, 64)),
        ((2, 1, 3, 8), (36, 5, 12, 1), 1, (6, 12)),  # nobody steps through an extent of 1
        ((4, 1, 8), (12, 99, 1), 1, (4, 12)),
        ((2, 3, 8), (0, 0, 1), 1, (6, 0)),  # broadcast
        ((2, 3, 8), (0, 12, 1), 1, None),
    ],
)
def test_merged_strides(
    shape: tuple[int, ...], stride: tuple[int, ...], keep: int, merged: tuple[int, int] | None
) -> None:
    assert merged_strides(shape, stride, keep) == merged


@given(strided(), st.randoms(use_true_random=False))
def test_an_order_in_memory_means_distinct_increasing_offsets(
    array: tuple[tuple[int, ...], tuple[int, ...]], random: Random
) -> None:
    shape, stride = array
    order = list(range(len(shape)))
    random.shuffle(order)
    indices = itertools.product(*(range(shape[dim]) for dim in order))  # the last of the order moves fastest
    offsets = [sum(i * stride[dim] for i, dim in zip(index, order, strict=True)) for index in indices]
    grows = all(later > earlier for earlier, later in itertools.pairwise(offsets))
    inner = not order or shape[order[-1]] == 1 or stride[order[-1]] == 1
    assert pitched("", "", "", tuple(order)).holds(shape, stride) == (0 in shape or (grows and inner))


@given(small_shapes, st.randoms(use_true_random=False))
def test_ordered_strides_are_those_of_a_transposed_array(shape: tuple[int, ...], random: Random) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)
    array = np.empty([max(shape[dim], 1) for dim in order], np.int8).transpose(inverse_order(order))
    assert array.shape == tuple(max(extent, 1) for extent in shape)
    assert ordered_stride(shape, order) == array.strides
    layout = pitched("", "", "", tuple(reversed(order)), tuple(order))
    assert layout.order(shape, array.strides) in layout.orders


@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 3, 4), (2, 1, 4), (2, 3, 1), (0, 3, 4)])
def test_a_compact_layout_has_no_gaps(shape: tuple[int, ...]) -> None:
    """Against all orders: a permuted array without gaps is compact in its own order, and a padded one in none."""
    for order in itertools.permutations(range(3)):
        layout = compact("one", "be so", "Copy it.", order)
        stride = ordered_stride(shape, order)
        assert layout.holds(shape, stride)
        assert layout.order(shape, stride) == order
        wide = tuple(extent + (dim == order[-1]) for dim, extent in enumerate(shape))
        outer = [shape[dim] for dim in order[:-1]]
        assert layout.holds(shape, ordered_stride(wide, order)) == (0 in shape or math.prod(outer) == 1)
        other = ordered_stride(shape, order[::-1])
        assert layout.holds(shape, other) == (0 in shape or sum(extent > 1 for extent in shape) < 2)
