"""The block-scaled formats: which element goes with which scale and block length."""

from __future__ import annotations

from dataclasses import dataclass

from fe_runtime.dtypes import canonical_dtype
from fe_runtime.errors import InvalidArgumentError, explain

__all__ = ["BLOCK_FORMATS", "BlockFormat", "block_format"]


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One row of the table: element and scale dtype by canonical name, and elements per scale."""

    name: str
    element: str
    scale: str
    vec: int


BLOCK_FORMATS: tuple[BlockFormat, ...] = (
    BlockFormat("mxfp8_e4m3", "float8_e4m3fn", "float8_e8m0fnu", 32),
    BlockFormat("mxfp8_e5m2", "float8_e5m2", "float8_e8m0fnu", 32),
    BlockFormat("mxfp4", "float4_e2m1fn", "float8_e8m0fnu", 32),
    BlockFormat("nvfp4", "float4_e2m1fn", "float8_e4m3fn", 16),
    BlockFormat("fp4_e8m0_16", "float4_e2m1fn", "float8_e8m0fnu", 16),
)
"""Every combination that GEMM operands may have."""

_PACKED = ("uint8", "float4_e2m1fn_x2")
_E8M0_BYTES = ("uint8", "int8")


def block_format(element: object, scale: object, vec: int, *, operation: str = "formats.block_format") -> BlockFormat:
    """Return the block-scaled format of an operand.

    Parameters
    ----------
    element
        dtype of the elements. ``float4_e2m1fn_x2`` and ``uint8`` mean packed e2m1.
    scale
        dtype of the scales. ``uint8`` and ``int8`` mean e8m0 bytes.
    vec
        Elements per scale (``sf_vec_size``).
    operation
        Named in the error.

    Raises
    ------
    InvalidArgumentError
        The combination is none of :data:`BLOCK_FORMATS`.

    Source
    ------
    OCP Microscaling Formats (MX) 1.0; contract of cuDNN Frontend OSS 1.32: block-scaled formats.
    """
    element_name, scale_name = canonical_dtype(element), canonical_dtype(scale)
    element_name = "float4_e2m1fn" if element_name in _PACKED else element_name
    scale_name = "float8_e8m0fnu" if scale_name in _E8M0_BYTES else scale_name
    for row in BLOCK_FORMATS:
        if (row.element, row.scale, row.vec) == (element_name, scale_name, vec):
            return row
    rows = "; ".join(f"{row.element} with {row.scale} per {row.vec}" for row in BLOCK_FORMATS)
    given = f"{element_name} with {scale_name} per {vec}"
    raise InvalidArgumentError(explain(operation, "element, scale and block length", f"be one of: {rows}", given))
