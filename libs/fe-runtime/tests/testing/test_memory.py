"""Strided arrays, and the same array in each framework."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fe_runtime.arrays import describe
from fe_runtime.testing import strided_array, to_framework, to_numpy
from fe_runtime.testing.memory import reach

STORABLE = (
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "uint8",
    "int8",
    "int32",
    "int64",
    "bool",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-9, 9)), max_size=3))
def test_reach_against_all_offsets(dims: list[tuple[int, int]]) -> None:
    shape, stride = tuple(e for e, _ in dims), tuple(s for _, s in dims)
    offsets = [sum(i * s for i, s in zip(index, stride, strict=True)) for index in np.ndindex(shape)]
    assert reach(shape, stride) == ((min(offsets), max(offsets) + 1) if offsets else (0, 0))


@pytest.mark.parametrize("dtype", STORABLE)
def test_values_and_gaps(dtype: str) -> None:
    array = strided_array((2, 3), (5, 1), dtype, np.arange(6).reshape(2, 3))
    want = np.arange(6).reshape(2, 3).astype(array.dtype)
    assert np.ascontiguousarray(array).tobytes() == want.tobytes()
    gap = np.ndarray((2,), (np.void, array.itemsize), array.base, 3 * array.itemsize)  # type: ignore[arg-type]
    assert set(gap.tobytes()) == {0xFF}


@pytest.mark.parametrize("stride", [(3, 1), (8, 1), (1, 2), (0, 1), (6, 2)])
@pytest.mark.parametrize("dtype", STORABLE)
def test_torch_gets_dtype_strides_and_values(dtype: str, stride: tuple[int, ...]) -> None:
    pytest.importorskip("torch")
    array = strided_array((2, 3), stride, dtype, np.arange(6).reshape(2, 3) % 3)
    tensor = to_framework(array, "torch")
    assert (describe(tensor).dtype, tensor.stride()) == (dtype, stride)
    assert to_numpy(tensor).tobytes() == np.ascontiguousarray(array).tobytes()
    assert to_numpy(tensor).dtype == array.dtype


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (2, 3)])
def test_a_copy_in_each_framework(framework: str, shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    copied = to_framework(array, framework)
    assert tuple(copied.shape) == shape
    back = to_numpy(copied)
    assert (back.shape, back.dtype) == (shape, array.dtype)
    np.testing.assert_array_equal(back, array)
    if framework != "jax" and array.size:
        copied[...] = 7
        assert (array != 7).any() or array.size == 1


def test_negative_strides() -> None:
    array = strided_array((4,), (-2,), "float32", np.arange(4))
    assert to_framework(array, "numpy").strides == (-8,)
    assert to_framework(array, "torch").stride() == (1,)
    np.testing.assert_array_equal(to_framework(array, "torch").numpy(), np.arange(4))


def test_an_unknown_framework() -> None:
    with pytest.raises(ValueError, match="framework must be"):
        to_framework(np.ones(2), "tensorflow")
