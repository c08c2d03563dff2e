from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fe_runtime import formats
from fe_runtime.errors import InvalidArgumentError

BYTES = np.arange(256, dtype=np.uint8).reshape(16, 16)
NAMES = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int8", "uint8")


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(framework: Any, name: str) -> None:
    typed = formats.typed_view(framework.array(BYTES), name)
    assert framework.is_array(typed, name)
    back = formats.byte_view(typed)
    assert framework.is_array(back, "uint8")
    np.testing.assert_array_equal(framework.numpy(back), BYTES)


def test_fp4_pairs_have_a_dtype_in_torch_only(framework: Any) -> None:
    pairs = formats.typed_view(framework.array(BYTES), "float4_e2m1fn_x2")
    assert framework.is_array(pairs, "float4_e2m1fn_x2" if framework.name == "torch" else "uint8")
    np.testing.assert_array_equal(framework.numpy(formats.byte_view(pairs)), BYTES)


@pytest.mark.parametrize("name", NAMES)
def test_views_share_memory_and_keep_strides(name: str) -> None:
    typed = formats.typed_view(BYTES.T, name)
    assert np.shares_memory(typed, BYTES)
    assert formats.byte_view(typed).strides == BYTES.T.strides
    tensor = torch.from_numpy(BYTES).T
    view = formats.byte_view(formats.typed_view(tensor, name))
    assert (view.data_ptr(), view.stride()) == (tensor.data_ptr(), tensor.stride())


def test_rejections(framework: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="typed_view: x must be uint8; got dtype int32"):
        formats.typed_view(framework.array(np.zeros(4, np.int32)), "float8_e4m3fn")
    with pytest.raises(InvalidArgumentError, match="dtype must be a number of one byte; got float16"):
        formats.typed_view(framework.array(BYTES), "float16")
    with pytest.raises(InvalidArgumentError, match="one-byte items; got dtype int32"):
        formats.byte_view(framework.array(np.zeros(4, np.int32)))
