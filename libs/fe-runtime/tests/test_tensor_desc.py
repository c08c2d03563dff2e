"""TensorDesc against torch's own metadata, and the stride rules."""

import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fe_runtime.device import Device
from fe_runtime.strides import (
    canonicalize_unit_dim_strides,
    contiguous_stride,
    is_contiguous,
    stride_order_of,
    unpack_fp4,
    view_stride,
)
from fe_runtime.tensor_desc import TensorDesc

Pair = tuple[torch.Tensor, TensorDesc]


def desc_of(tensor: torch.Tensor) -> TensorDesc:
    return TensorDesc.of(tensor.dtype, tensor.shape, tensor.stride(), tensor.device)


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    """A tensor of random rank, extents and strides, beside its descriptor.

    Extents 0 and 1 are frequent: nearly all special cases of torch's rules hang on them. Strides come from a permuted
    and sliced buffer, or are free (gaps, overlaps and broadcasts) through as_strided.
    """
    shape = draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 4]), max_size=4))
    if draw(st.booleans()):
        steps = [draw(st.integers(0, 6)) for _ in shape]
        tensor = torch.empty(0).new_empty(1 + sum((max(n, 1) - 1) * s for n, s in zip(shape, steps, strict=True)))
        tensor = tensor.as_strided(shape, steps)
    else:
        order = draw(st.permutations(range(len(shape))))
        tensor = torch.empty([n * 2 for n in shape]).permute(order)
        tensor = tensor[tuple(slice(0, n // 2) for n in tensor.shape)]
    return tensor, desc_of(tensor)


def same_outcome(tensor: torch.Tensor, desc: TensorDesc, method: Callable[[Any], Any]) -> None:
    """Both give the same shape and stride, or both raise an error of the same class."""
    try:
        expected = method(tensor)
    except (IndexError, RuntimeError) as error:
        with pytest.raises(type(error)):
            method(desc)
        return
    found = method(desc)
    assert (found.shape, found.stride) == (tuple(expected.shape), expected.stride())
    assert found.stride_order == stride_order_of(found.shape, found.stride)
    assert (found.dtype, found.device) == ("float32", Device("cpu"))


dims = st.integers(-6, 6)


class TestParityWithTorch:
    @given(pairs())
    def test_metadata(self, pair: Pair) -> None:
        tensor, desc = pair
        assert desc.shape == desc.size() == tuple(tensor.size())
        assert desc.stride == tensor.stride()
        assert desc.ndim == desc.dim() == tensor.ndim
        assert desc.numel() == tensor.numel()
        assert desc.is_contiguous() == tensor.is_contiguous()

    @given(pairs(), dims)
    def test_size_of_a_dimension(self, pair: Pair, dim: int) -> None:
        tensor, desc = pair
        try:
            expected = tensor.size(dim)
        except IndexError:
            with pytest.raises(IndexError):
                desc.size(dim)
        else:
            assert desc.size(dim) == expected

    @given(pairs())
    def test_len(self, pair: Pair) -> None:
        tensor, desc = pair
        if tensor.ndim:
            assert len(desc) == len(tensor)
        else:
            with pytest.raises(TypeError):
                len(desc)
        assert desc  # also when the array is empty

    @given(pairs(), st.lists(dims, max_size=5))
    def test_permute(self, pair: Pair, order: list[int]) -> None:
        same_outcome(*pair, lambda t: t.permute(order))
        if order:
            same_outcome(*pair, lambda t: t.permute(*order))

    @given(pairs(), st.data())
    def test_valid_permute(self, pair: Pair, data: st.DataObject) -> None:
        order = data.draw(st.permutations(range(pair[0].ndim)))
        same_outcome(*pair, lambda t: t.permute(tuple(order)))

    @given(pairs(), dims, dims)
    def test_transpose(self, pair: Pair, first: int, second: int) -> None:
        same_outcome(*pair, lambda t: t.transpose(first, second))

    @given(pairs(), dims, st.lists(dims, max_size=3))
    def test_squeeze(self, pair: Pair, dim: int, several: list[int]) -> None:
        same_outcome(*pair, lambda t: t.squeeze())
        same_outcome(*pair, lambda t: t.squeeze(dim))
        same_outcome(*pair, lambda t: t.squeeze(tuple(several)))

    @given(pairs(), dims)
    def test_unsqueeze(self, pair: Pair, dim: int) -> None:
        same_outcome(*pair, lambda t: t.unsqueeze(dim))

    @given(pairs())
    def test_contiguous(self, pair: Pair) -> None:
        same_outcome(*pair, lambda t: t.contiguous())
        assert not pair[1].is_contiguous() or pair[1].contiguous() is pair[1]

    @settings(max_examples=300)
    @given(pairs(), st.data())
    def test_view(self, pair: Pair, data: st.DataObject) -> None:
        count = pair[0].numel()
        # Mostly shapes of the right size: the divisors of the count, some ones, and perhaps one hole.
        divisors = [n for n in range(1, count + 1) if count % n == 0] or [0, 1, 2]
        shape = data.draw(st.lists(st.sampled_from([*divisors, 1, -1]), max_size=4))
        if data.draw(st.booleans()) and shape.count(-1) == 0:
            rest = math.prod(shape) or 1
            shape.insert(data.draw(st.integers(0, len(shape))), count // rest)
        same_outcome(*pair, lambda t: t.view(tuple(shape)))
        if shape:
            same_outcome(*pair, lambda t: t.view(*shape))

    @given(pairs(), st.lists(st.integers(0, 4), max_size=3), st.lists(st.integers(-1, 4), max_size=3))
    def test_as_strided(self, pair: Pair, size: list[int], stride: list[int]) -> None:
        roomy = torch.empty(10_000).as_strided(pair[0].shape, pair[0].stride())
        same_outcome(roomy, desc_of(roomy), lambda t: t.as_strided(size, stride))
        same_outcome(roomy, desc_of(roomy), lambda t: t.as_strided(size, stride, 3))

    def test_as_strided_refuses_negative_entries(self) -> None:
        desc = TensorDesc.of("float32", (4,))
        for size, offset in (((-1,), None), ((0, -1), None), ((2,), -1)):  # torch lets (0, -1) pass
            with pytest.raises(RuntimeError, match="negative entry"):
                desc.as_strided(size, (1,) * len(size), offset)

    def test_views_that_merge_and_split_runs(self) -> None:
        # Hand-made cases: rows with a gap keep their pitch, a transposed matrix has no flat view.
        padded = TensorDesc.of("float32", (4, 6), (8, 1))
        assert padded.view(2, 2, 3, 2).stride == (16, 8, 2, 1)
        with pytest.raises(RuntimeError, match="no view"):
            padded.view(24)
        with pytest.raises(RuntimeError, match="no view"):
            padded.view(6, 4)
        assert view_stride((4, 6), (1, 4), (2, 2, 6)) == (2, 1, 4)


class TestConstruction:
    def test_fields_are_normalised(self) -> None:
        desc = TensorDesc(torch.bfloat16, [2, 3], [3, 1], [1, 0], "cuda:1")  # type: ignore[arg-type]
        assert desc == TensorDesc("bfloat16", (2, 3), (3, 1), (1, 0), Device("cuda", 1))
        assert isinstance(desc.shape, tuple)
        assert not desc.interpret_uint8_as_fp4x2

    def test_it_is_a_value(self) -> None:
        desc = TensorDesc.of("float16", (2, 3), name="x")
        other = desc.renamed("y")
        assert other.name == "y"
        assert desc == other  # a name is for error texts
        assert hash(desc) == hash(other)
        assert pickle.loads(pickle.dumps(desc)) == desc
        with pytest.raises(AttributeError):
            desc.shape = ()  # type: ignore[misc]

    def test_checks(self) -> None:
        with pytest.raises(ValueError, match=r"TensorDesc q: stride must have one entry for each of 2 dimensions"):
            TensorDesc("float32", (2, 3), (1,), (1, 0), Device("cpu"), name="q")
        for order in ((0, 0), (0,), (1, 2), (0, 1, 2)):
            with pytest.raises(ValueError, match="stride_order must be a permutation"):
                TensorDesc("float32", (2, 3), (3, 1), order, Device("cpu"))
        with pytest.raises(TypeError, match="device must be"):
            TensorDesc("float32", (2,), (1,), (0,), 7)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="known dtype"):
            TensorDesc("float31", (2,), (1,), (0,), Device("cpu"))

    def test_of(self) -> None:
        desc = TensorDesc.of(np.float32, (2, 3, 4), device="cuda:0", name="x")
        assert desc == TensorDesc("float32", (2, 3, 4), (12, 4, 1), (2, 1, 0), Device("cuda", 0))
        assert desc.name == "x"
        assert TensorDesc.of("int8", (2, 3), (1, 2)).stride_order == (0, 1)
        with pytest.raises(ValueError, match="stride must have one entry for each of 2 dimensions"):
            TensorDesc.of("int8", (2, 3), (1,))

    def test_negative_strides_are_allowed(self) -> None:
        assert TensorDesc.of("int8", (2, 3), (-3, 1)).stride_order == (0, 1)

    def test_a_view_keeps_name_and_flag(self) -> None:
        desc = TensorDesc("float4_e2m1fn", (2, 4), (4, 1), (1, 0), Device("cpu"), True, "w").transpose(0, 1)
        assert (desc.name, desc.interpret_uint8_as_fp4x2) == ("w", True)


class TestStrides:
    @given(pairs())
    def test_stride_order_sorts_by_stride_then_extent(self, pair: Pair) -> None:
        tensor, desc = pair
        keys = [(tensor.stride(d), tensor.size(d)) for d in desc.stride_order]
        assert keys == sorted(keys)
        assert sorted(desc.stride_order) == list(range(tensor.ndim))

    def test_stride_order_of_a_column(self) -> None:
        # Both strides are 1; the extent-1 dimension is the inner one.
        assert stride_order_of((4, 1), (1, 1)) == (1, 0)
        assert stride_order_of((1, 4), (1, 1)) == (0, 1)
        assert stride_order_of((), ()) == ()

    @given(pairs())
    def test_contiguous_stride(self, pair: Pair) -> None:
        tensor = pair[0]
        fresh = torch.empty(tensor.shape)
        assert contiguous_stride(tensor.shape) == fresh.stride()
        assert is_contiguous(tensor.shape, fresh.stride())

    @pytest.mark.parametrize(
        ("shape", "stride", "canonical"),
        [
            pytest.param((4, 8), (8, 1), (8, 1), id="nothing to do"),
            pytest.param((4, 8, 1), (8, 1, 1), (8, 1, 32), id="appended by unsqueeze"),
            pytest.param((4, 8, 1), (8, 1, 32), (8, 1, 32), id="as a batch of one"),
            pytest.param((1, 1), (7, 9), (1, 1), id="one element"),
            pytest.param((), (), (), id="scalar"),
            pytest.param((1, 0, 3), (5, 3, 1), (3, 3, 1), id="zero extents count as one"),
        ],
    )
    def test_canonical_unit_strides(
        self, shape: tuple[int, ...], stride: tuple[int, ...], canonical: tuple[int, ...]
    ) -> None:
        assert canonicalize_unit_dim_strides(shape, stride) == canonical
        assert TensorDesc.of("int8", shape, stride).canonical_stride == canonical

    def test_canonical_strides_reach_the_same_elements(self) -> None:
        tensor = torch.arange(12.0).reshape(3, 1, 4)
        again = torch.as_strided(tensor, tensor.shape, canonicalize_unit_dim_strides(tensor.shape, (4, 99, 1)))
        assert torch.equal(again, tensor)


class TestPackedFp4:
    @pytest.mark.parametrize(
        ("shape", "stride", "logical_shape", "logical_stride"),
        [
            pytest.param((4, 8), (8, 1), (4, 16), (16, 1), id="row-major"),
            pytest.param((4, 8), (1, 4), (8, 8), (1, 8), id="column-major"),
            pytest.param((4, 8, 1), (8, 1, 1), (4, 16, 1), (16, 1, 2), id="batch of one with stride 1"),
            pytest.param((4, 8, 2), (8, 1, 32), (4, 16, 2), (16, 1, 64), id="batched"),
            pytest.param((4, 8), (12, 1), (4, 16), (24, 1), id="padded rows"),
            pytest.param((1, 1), (1, 1), (1, 2), (2, 1), id="one byte"),
            pytest.param((0, 8), (8, 1), (0, 16), (16, 1), id="empty"),
        ],
    )
    def test_logical_metadata(
        self,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        logical_shape: tuple[int, ...],
        logical_stride: tuple[int, ...],
    ) -> None:
        assert unpack_fp4(shape, stride) == (logical_shape, logical_stride)

    def test_codes_are_where_the_logical_strides_say(self) -> None:
        # Unpack by hand: code (i, 2j + n) is nibble n of byte (i, j), so it sits at nibble position 2 * byte + n.
        packed = np.arange(12).reshape(3, 4).T  # 4 x 3 bytes, column-major
        shape, stride = unpack_fp4(packed.shape, tuple(s // packed.itemsize for s in packed.strides))
        assert shape == (8, 3)
        for row in range(8):
            for column in range(3):
                position = row * stride[0] + column * stride[1]
                assert position == 2 * packed[row // 2, column] + row % 2

    def test_no_unit_stride(self) -> None:
        with pytest.raises(ValueError, match=r"packed FP4: w must have a unit-stride dimension; got stride=\(16, 2\)"):
            unpack_fp4((4, 8), (16, 2), "w")
