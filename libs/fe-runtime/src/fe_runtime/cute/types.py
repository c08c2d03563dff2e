"""Names of dtypes and architectures, as kernels need them."""

from __future__ import annotations

import cutlass

from fe_runtime.architecture import architecture_number

__all__ = ["architecture_number", "numeric", "storage"]

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
