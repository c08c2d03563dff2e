"""Guarded arrays: their address, what surrounds them, and that every stray write is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fe_runtime.arrays import alignment, get_data_ptr
from fe_runtime.testing import guarded, to_numpy

LAYOUTS = [((3, 5), None), ((3, 5), (8, 1)), ((4, 2, 3), (20, 1, 4)), ((6,), (3,)), ((2, 3), (0, 1)), ((), None)]


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "uint8", "float8_e4m3fn", "int64"])
@pytest.mark.parametrize(("shape", "stride"), LAYOUTS)
def test_shape_strides_and_values(framework: str, dtype: str, shape: tuple[int, ...], stride: Any) -> None:
    values = np.arange(int(np.prod(shape))).reshape(shape) % 5
    if stride == (0, 1):
        values = np.broadcast_to(values[0], shape)
    made = guarded(shape, dtype, stride=stride, values=values, framework=framework)
    np.testing.assert_array_equal(to_numpy(made.array).astype(np.float64), values)
    found = made.array.stride() if framework == "torch" else [s // made.array.itemsize for s in made.array.strides]
    assert stride is None or tuple(found) == stride
    made.check_unchanged()
    made.check_surroundings()


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("wanted", [2, 4, 8, 16, 32])
def test_the_address_is_aligned_exactly_so(framework: str, wanted: int) -> None:
    address = get_data_ptr(guarded((3, 5), "bfloat16", alignment=wanted, framework=framework).array)
    assert address & -address == wanted


@pytest.mark.parametrize("wanted", [1, 3, 12])
def test_impossible_alignments(wanted: int) -> None:
    with pytest.raises(ValueError, match="alignment must be a power of two"):
        guarded((2,), "bfloat16", alignment=wanted)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("offset", [-1, 5, 7, 21, -100, 1000])
def test_a_write_outside_is_found(framework: str, offset: int) -> None:
    made = guarded((3, 5), "float32", stride=(8, 1), framework=framework, name="o")
    element = _reaching(made, offset)
    element[...] = 1
    with pytest.raises(AssertionError, match=f"o: 4 bytes outside the array changed, at offsets {4 * offset} to"):
        made.check_surroundings()
    with pytest.raises(AssertionError, match="o: 4 bytes of the array or around it changed"):
        made.check_unchanged()


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_a_write_inside_is_a_change_only(framework: str) -> None:
    made = guarded((3, 5), "float32", stride=(8, 1), framework=framework)
    made.array[...] = 1
    made.check_surroundings()
    with pytest.raises(AssertionError, match="array: 60 bytes of the array or around it changed, at offsets 0 to 83"):
        made.check_unchanged()


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("alignment_", [2, 16])
def test_canaries(framework: str, alignment_: int) -> None:
    nan = guarded((2, 3), "bfloat16", stride=(4, 1), alignment=alignment_, framework=framework)
    assert np.isnan(to_numpy(nan.array).astype(np.float32)).all()
    number = guarded((2, 3), "bfloat16", stride=(4, 1), canary=64.0, alignment=alignment_, framework=framework)
    assert (to_numpy(number.array).astype(np.float32) == 64).all()
    for offset in (-1, 3, 7, 500):
        assert float(_reaching(number, offset).reshape(())) == 64.0


def test_negative_strides_in_numpy() -> None:
    made = guarded((4,), "float32", stride=(-2,), values=np.arange(4), alignment=4)
    np.testing.assert_array_equal(made.array, np.arange(4))
    assert alignment(made.array) == 4
    _reaching(made, -1)[...] = 1
    with pytest.raises(AssertionError, match="at offsets -4 to -1"):
        made.check_surroundings()


def test_empty_arrays_have_surroundings_too() -> None:
    made = guarded((0, 3), "float32", framework="torch")
    made.check_unchanged()


def test_an_unknown_framework() -> None:
    with pytest.raises(ValueError, match="framework must be"):
        guarded((2,), "float32", framework="jax")


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    made = guarded((3, 5), "bfloat16", stride=(8, 1), alignment=2, framework="torch", device="cuda:0")
    assert alignment(made.array) == 2
    made.array.fill_(1)
    made.check_surroundings()
    _reaching(made, 5).fill_(1)
    with pytest.raises(AssertionError, match="array: 2 bytes outside the array changed, at offsets 10 to 11"):
        made.check_surroundings()


def _reaching(made: Any, offset: int) -> Any:
    """The element at an offset (in elements) from the first one, in or out of the array."""
    array = made.array
    if isinstance(array, torch.Tensor):
        return array.as_strided((1,), (1,), array.storage_offset() + offset)
    start = made._start + offset * array.itemsize
    return np.ndarray((1,), array.dtype, made._buffer, start)
