from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from fe_runtime import formats
from fe_runtime.errors import InvalidArgumentError


def test_check_value(framework: Any) -> None:
    x = np.array([0.5, -6, 1.5, 2, -0.0, 3, 4, -1], np.float32)
    packed = framework.call(lambda v: formats.pack_fp4(formats.cast(v, "float4_e2m1fn")), x)
    assert packed.tobytes().hex(" ") == "f1 43 58 a6"


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_round_trip_along_each_axis(framework: Any, axis: int) -> None:
    codes = np.random.default_rng(0).integers(0, 16, (2, 6, 4)).astype(np.uint8)
    packed = framework.call(lambda c: formats.pack_fp4(c, axis=axis), codes)
    low, high = np.split(np.moveaxis(codes, axis, -1).reshape(-1, 2), 2, axis=-1)
    np.testing.assert_array_equal(np.moveaxis(packed, axis, -1).reshape(-1, 1), low + 16 * high)
    np.testing.assert_array_equal(framework.call(lambda p: formats.unpack_fp4(p, axis=axis), packed), codes)


def test_the_high_nibble_of_a_code_is_ignored(framework: Any) -> None:
    assert framework.call(formats.pack_fp4, np.array([0xF1, 0xA2], np.uint8)).tolist() == [0x21]


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)])
def test_empty(framework: Any, shape: tuple[int, ...]) -> None:
    packed = framework.call(formats.pack_fp4, np.zeros(shape, np.uint8))
    assert packed.shape == (*shape[:-1], shape[-1] // 2)
    assert framework.call(formats.unpack_fp4, packed).shape == shape


def test_torch_pairs_unpack() -> None:
    pairs = torch.tensor([0x21, 0xF0], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert formats.unpack_fp4(pairs).tolist() == [1, 2, 0, 15]


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_native_fp4_arrays_pack(make: Any) -> None:
    native = make(np.array([0.5, -6, 1.5, 2], np.float32).astype(ml_dtypes.float4_e2m1fn))
    assert np.asarray(formats.pack_fp4(native)).tolist() == [0xF1, 0x43]


def test_an_odd_extent_is_rejected(framework: Any) -> None:
    codes = framework.array(np.zeros((2, 3), np.uint8))
    with pytest.raises(InvalidArgumentError, match=r"pack_fp4: codes must have an even extent along axis 1; got shape"):
        formats.pack_fp4(codes)


def test_a_missing_axis_is_rejected(framework: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"axis must name one of the 1 dimensions; got 1"):
        formats.pack_fp4(framework.array(np.zeros(2, np.uint8)), axis=1)


def test_wide_items_are_rejected(framework: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="one-byte items; got dtype float32"):
        formats.unpack_fp4(framework.array(np.zeros(2, np.float32)))
