from __future__ import annotations

import ml_dtypes
import pytest
import torch

from fe_runtime.errors import InvalidArgumentError
from fe_runtime.formats import block_format


@pytest.mark.parametrize(
    ("element", "scale", "vec", "name"),
    [
        (torch.float8_e4m3fn, torch.float8_e8m0fnu, 32, "mxfp8_e4m3"),
        (ml_dtypes.float8_e5m2, "uint8", 32, "mxfp8_e5m2"),
        ("float4_e2m1fn", "int8", 32, "mxfp4"),
        (torch.float4_e2m1fn_x2, torch.float8_e4m3fn, 16, "nvfp4"),
        ("uint8", "float8_e8m0fnu", 16, "fp4_e8m0_16"),
    ],
)
def test_the_five_formats(element: object, scale: object, vec: int, name: str) -> None:
    assert block_format(element, scale, vec).name == name


@pytest.mark.parametrize(
    ("element", "scale", "vec"),
    [
        ("float4_e2m1fn", "float8_e4m3fn", 32),
        ("float8_e4m3fn", "float8_e8m0fnu", 16),
        ("float8_e4m3fn", "float8_e4m3fn", 32),
        ("bfloat16", "float8_e8m0fnu", 32),
        ("float4_e2m1fn", "float32", 16),
        ("float8_e4m3fn", "float8_e8m0fnu", 64),
    ],
)
def test_anything_else_is_rejected(element: str, scale: str, vec: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"gemm: .* got {element} with {scale} per {vec}"):
        block_format(element, scale, vec, operation="gemm")
