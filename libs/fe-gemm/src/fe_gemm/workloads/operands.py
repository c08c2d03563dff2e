"""Operands of the dense products for the ``fe`` command: made, dequantised plainly in each library, and bounded.

A case's dtype is that of plain operands, or the name of a block-scaled format: ``mxfp8``, ``mxfp4`` or ``nvfp4``.
Every case has one batch.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from fe_runtime import formats
from fe_runtime.bench.workload import Arrays, Case, Operands, Source
from fe_runtime.dtypes import framework_dtype

__all__ = ["FORMATS", "allowed_in", "as_dtype", "dequantised", "inputs", "is_scaled", "operands", "product"]

FORMATS = {
    "mxfp8": ("float8_e4m3fn", "float8_e8m0fnu", 32),
    "mxfp4": ("float4_e2m1fn", "float8_e8m0fnu", 32),
    "nvfp4": ("float4_e2m1fn", "float8_e4m3fn", 16),
}
"""Element, scale and block length of the block-scaled formats."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "float8_e4m3fn": 2.0**-4}
HALF_SUBNORMAL = {"float16": 2.0**-25, "float8_e4m3fn": 2.0**-10}


def is_scaled(case: Case) -> bool:
    """Whether the operands have scales."""
    return case.dtype in FORMATS


def operands(case: Case) -> Operands:
    """Return shape and dtype of A, B and their scales."""
    depth = case.dims["K"]
    sides = {"a": case.dims["M"], "b": case.dims["N"]}
    if not is_scaled(case):
        return {f"{side}_tensor": ((rows, depth, 1), case.dtype) for side, rows in sides.items()}
    element, scale, vec = FORMATS[case.dtype]
    packed = element == "float4_e2m1fn"
    known: dict[str, tuple[tuple[int, ...], str]] = {}
    for side, rows in sides.items():
        known[f"{side}_tensor"] = ((rows, depth // 2, 1), "uint8") if packed else ((rows, depth, 1), element)
        known[f"sf{side}_tensor"] = formats.scale_shape(rows, formats.scales_per_row(depth, vec)), scale
    return known


def inputs(case: Case, source: Source) -> Arrays:
    """Return A, activations, and B, weights, with their scales."""
    m, n, depth = (case.dims[letter] for letter in ("M", "N", "K"))
    if not is_scaled(case):
        is_fp8 = case.dtype in ("float8_e4m3fn", "float8_e5m2")
        # fp8 without scales has no room for outliers.
        a = source.normal((m, depth, 1), case.dtype, 4.0) if is_fp8 else source.activations((m, depth), case.dtype)
        b = source.normal((n, depth, 1), case.dtype, 4.0 if is_fp8 else depth**-0.5)
        return {"a_tensor": a.reshape(m, depth, 1), "b_tensor": b}
    values = source.activations((m, depth), "float32"), source.normal((n, depth), "float32", depth**-0.5)
    arrays: dict[str, Any] = {}
    for side, matrix in zip("ab", values, strict=True):
        elements, scales = _quantised(matrix, case.dtype)
        arrays[f"{side}_tensor"] = elements.reshape(*elements.shape, 1)
        arrays[f"sf{side}_tensor"] = formats.to_blocked(scales)
    return arrays


def dequantised(framework: str, case: Case, arrays: Arrays, dtype: str) -> tuple[Any, Any]:
    """Return A (M, K) and B (N, K), elements times scales, in a dtype."""
    return _dequantised(framework, case, arrays, "a", dtype), _dequantised(framework, case, arrays, "b", dtype)


def product(framework: str, case: Case, arrays: Arrays) -> Any:
    """Return A B^T (M, N) in float32 as one writes it plainly: in bf16 with torch and JAX, where that is exact."""
    dtype = "float32" if framework == "numpy" or case.dtype in ("float16", "float32") else "bfloat16"
    a, b = dequantised(framework, case, arrays, dtype)
    if framework == "jax":
        jnp: Any = importlib.import_module("jax").numpy
        return jnp.matmul(a, b.T, preferred_element_type=np.float32)
    return as_dtype(a @ b.T, "float32", framework)


def as_dtype(x: Any, dtype: str, framework: str) -> Any:
    """Return an array of a framework in another dtype."""
    target: Any = framework_dtype(dtype, framework)
    return x.to(target) if framework == "torch" else x.astype(target)


def allowed_in(values: Any, error: Any, dtype: str) -> Any:
    """Return the largest error of values that are off by ``error`` when they are rounded to ``dtype``."""
    return error + ROUNDING[dtype] * np.abs(values) + HALF_SUBNORMAL.get(dtype, 0.0)


def _quantised(matrix: Any, name: str) -> tuple[Any, Any]:
    element, scale, _ = FORMATS[name]
    if scale == "float8_e4m3fn":
        elements, scales = formats.quantize_nv(matrix)
    else:
        elements, scales = formats.quantize_mx(matrix, element)
    return (formats.byte_view(elements) if element == "float4_e2m1fn" else elements), scales


def _dequantised(framework: str, case: Case, arrays: Arrays, side: str, dtype: str) -> Any:
    """Return an operand (rows, K), element times scale."""
    elements = arrays[f"{side}_tensor"][..., 0]
    if not is_scaled(case):
        return as_dtype(elements, dtype, framework)
    element, _, vec = FORMATS[case.dtype]
    rows, depth = elements.shape[0], case.dims["K"]
    if element == "float4_e2m1fn":
        values = _table(framework, elements, dtype)[_codes(framework, elements)]
    else:
        values = as_dtype(elements, dtype, framework)
    factors = _factors(framework, arrays[f"sf{side}_tensor"], dtype)[:rows, : depth // vec]
    return (values.reshape(rows, depth // vec, vec) * factors[:, :, None]).reshape(rows, depth)


def _codes(framework: str, packed: Any) -> Any:
    library: Any = importlib.import_module("jax").numpy if framework == "jax" else importlib.import_module(framework)
    return as_dtype(library.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1), "int32", framework)


def _table(framework: str, like: Any, dtype: str) -> Any:
    if framework == "torch":
        torch: Any = importlib.import_module("torch")
        return torch.tensor(E2M1, dtype=framework_dtype(dtype, "torch"), device=like.device)
    library: Any = np if framework == "numpy" else importlib.import_module("jax").numpy
    return library.asarray(E2M1, framework_dtype(dtype, framework))


def _factors(framework: str, blocked: Any, dtype: str) -> Any:
    """Return scales in the blocked layout as plain ones (128 RT, 4 CT)."""
    _, row_tiles, scale_tiles, *_ = blocked.shape
    values = as_dtype(blocked, "float32", framework)
    order = (0, 1, 4, 3, 2, 5)
    plain = values.permute(order) if framework == "torch" else values.transpose(order)
    return as_dtype(plain.reshape(128 * row_tiles, 4 * scale_tiles), dtype, framework)
