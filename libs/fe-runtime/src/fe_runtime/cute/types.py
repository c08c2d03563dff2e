"""Names of dtypes and architectures, as kernels need them."""

from __future__ import annotations

import cutlass

from fe_runtime.architecture import architecture_number

__all__ = ["architecture_number", "numeric", "operand", "storage"]

_NUMERIC = {
    "float32": cutlass.Float32,
    "float16": cutlass.Float16,
    "bfloat16": cutlass.BFloat16,
    "uint8": cutlass.Uint8,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
}


def numeric(name: str) -> type[cutlass.Numeric]:
    """Return the kernel type of a canonical dtype name that kernels calculate with or store as it is."""
    return _NUMERIC[name]


def storage(name: str) -> type[cutlass.Numeric]:
    """Return the type in which kernels see an array: bytes for the 8-bit and smaller float formats."""
    return _NUMERIC.get(name, cutlass.Uint8)


def operand(name: str) -> type[cutlass.Numeric]:
    """Return the type in which the tensor cores see the values of a dtype."""
    return _OPERANDS.get(name) or _NUMERIC[name]


_OPERANDS = {"float8_e4m3fn": cutlass.Float8E4M3FN, "float8_e5m2": cutlass.Float8E5M2}
