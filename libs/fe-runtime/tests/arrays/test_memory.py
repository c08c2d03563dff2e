"""Pointers, byte ranges, overlap and alignment."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from fe_runtime.arrays import alignment, byte_range, get_data_ptr, overlap


def addresses(array: np.ndarray) -> set[int]:
    """Every byte of an array, by visiting each element."""
    base = array.ctypes.data
    found = set()
    for index in itertools.product(*map(range, array.shape)):
        start = base + sum(i * s for i, s in zip(index, array.strides, strict=True))
        found |= set(range(start, start + array.itemsize))
    return found


@st.composite
def views(draw: st.DrawFn, buffer: np.ndarray) -> np.ndarray:
    """A random slice, perhaps reversed or transposed, of a buffer."""
    slices = []
    for extent in buffer.shape:
        start, stop = sorted((draw(st.integers(0, extent)), draw(st.integers(0, extent))))
        slices.append(slice(start, stop, draw(st.integers(1, 3))))
    view = buffer[tuple(slices)][:: draw(st.sampled_from([1, -1])), :: draw(st.sampled_from([1, -1]))]
    return view.T if draw(st.booleans()) else view


BUFFER = np.zeros((6, 12), np.int16)


class TestByteRange:
    @given(views(BUFFER))
    def test_lowest_and_highest_byte(self, view: np.ndarray) -> None:
        start, stop = byte_range(view)
        bytes_used = addresses(view)
        if bytes_used:
            assert (start, stop) == (min(bytes_used), max(bytes_used) + 1)
        else:
            assert start == stop

    def test_torch_views(self) -> None:
        tensor = torch.zeros(4, 8, dtype=torch.float16)
        base = tensor.data_ptr()
        assert byte_range(tensor) == (base, base + 64)
        assert byte_range(tensor[1:3, 2:5]) == (base + 16 + 4, base + 32 + 10)
        assert byte_range(tensor.t()) == (base, base + 64)
        assert byte_range(tensor[:1].expand(5, 8)) == (base, base + 16)
        assert byte_range(tensor[4:]) == (tensor[4:].data_ptr(),) * 2

    def test_packed_fp4_counts_bytes(self) -> None:
        tensor = torch.zeros(4, 8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        assert byte_range(tensor) == (tensor.data_ptr(), tensor.data_ptr() + 32)
        assert byte_range(tensor[:, :4]) == (tensor.data_ptr(), tensor.data_ptr() + 28)

    def test_jax(self) -> None:
        array = jnp.zeros((2, 3))
        pointer = array.unsafe_buffer_pointer()
        assert byte_range(array) == (pointer, pointer + 24)


class TestOverlap:
    def test_parts_of_one_buffer(self) -> None:
        tensor = torch.zeros(8, 8)
        assert overlap(tensor, tensor)
        assert overlap(tensor[:5], tensor[4:])
        assert not overlap(tensor[:4], tensor[4:])
        assert not overlap(tensor, torch.zeros(8, 8))

    def test_across_frameworks(self) -> None:
        array = np.zeros((8, 8), np.float32)
        tensor = torch.from_numpy(array)  # the same memory in another storage
        assert overlap(array, tensor[3:])
        assert not overlap(array[:3], tensor[3:])

    def test_negative_strides_reach_down(self) -> None:
        array = np.zeros(16, np.float32)
        assert overlap(array[8::-1], array[:2])
        assert not overlap(array[8::-1], array[9:])

    def test_empty_arrays_share_nothing(self) -> None:
        tensor = torch.zeros(8, 8)
        assert not overlap(tensor[2:2], tensor)
        assert not overlap(tensor, tensor[2:2])

    def test_column_blocks_of_one_buffer_are_apart(self) -> None:
        packed = torch.zeros(16, 3 * 8)  # as the gradients of q, k and v in one buffer
        q, k, v = packed.split(8, dim=1)
        assert not overlap(q, k)
        assert not overlap(q, v)
        assert not overlap(v, k)
        assert overlap(packed[:, :9], k)
        heads = torch.zeros(4, 16, 3, 2, 8)  # ... or per head, with outer dimensions around
        assert not overlap(heads[:, :, 0], heads[:, :, 1])
        assert not overlap(heads[:, :, 2], heads[:, :, 0])
        assert overlap(heads[:, :, 0:2], heads[:, :, 1])

    @settings(max_examples=400)
    @given(views(BUFFER), views(BUFFER))
    def test_never_misses_a_shared_byte(self, a: np.ndarray, b: np.ndarray) -> None:
        shared = bool(addresses(a) & addresses(b))
        if shared:
            assert overlap(a, b)
        # The other way round the test may be cautious, but not where the ranges are apart.
        (a0, a1), (b0, b1) = byte_range(a), byte_range(b)
        if a1 <= b0 or b1 <= a0:
            assert not overlap(a, b)

    def test_without_addresses(self) -> None:
        tensor = torch.zeros(4)
        assert not overlap(torch.zeros(4, device="meta"), torch.zeros(4, device="meta"))
        seen: list[bool] = []
        jax.jit(lambda x: seen.append(overlap(x, x)) or x)(jnp.zeros(4))
        assert seen == [False]
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert not overlap(torch.zeros(4), tensor)


class TestPointers:
    @pytest.mark.parametrize("offset", range(17))
    def test_alignment(self, offset: int) -> None:
        raw = np.zeros(64, np.uint8)
        raw = raw[-raw.ctypes.data % 32 :]  # now 32-byte aligned
        expected = next(n for n in (16, 8, 4, 2, 1) if offset % n == 0)
        assert alignment(raw[offset:]) == expected
        assert alignment(torch.from_numpy(raw)[offset:]) == expected
        assert alignment(raw[offset:offset]) == 16  # no elements, nothing to align

    def test_alignment_without_a_pointer(self) -> None:
        assert alignment(torch.zeros(0)) == 16
        assert alignment(torch.zeros(4, device="meta")) == 16
        seen: list[int] = []
        jax.jit(lambda x: seen.append(alignment(x)) or x)(jnp.zeros(4))
        assert seen == [16]

    def test_pointers(self) -> None:
        array = np.zeros(4)
        assert get_data_ptr(array[1:]) == array.ctypes.data + 8
        tensor = torch.zeros(4)
        assert get_data_ptr(tensor) == tensor.data_ptr()

    def test_no_pointer_is_an_error_only_where_it_is_asked_for(self) -> None:
        class Foreign:
            shape = (2,)

            def __dlpack__(self) -> object:
                raise AssertionError

        for array in (Foreign(), torch.zeros(2, device="meta")):
            with pytest.raises(ValueError, match="get_data_ptr: array must have an address"):
                get_data_ptr(array)
