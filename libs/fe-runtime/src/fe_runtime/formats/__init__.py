"""Low-precision formats: element types, FP4 packing, scale layouts, and the recipes that quantise blocks.

Every function takes numpy arrays, torch tensors or JAX arrays (also tracers) and returns the same kind, with the same
bits in each framework. This is the definition that kernels are compared with.

Source: the contracts of cuDNN Frontend OSS 1.32 and OCP Microscaling Formats (MX) 1.0.
"""

from fe_runtime.formats.block_formats import BLOCK_FORMATS, BlockFormat, block_format
from fe_runtime.formats.e8m0 import e8m0_inv, e8m0_up
from fe_runtime.formats.elements import ELEMENT_TYPES, ElementType, cast, cast_fp8, decode, element_type
from fe_runtime.formats.packing import pack_fp4, unpack_fp4
from fe_runtime.formats.recipes import dequantize, quantize_mx, quantize_nc, quantize_nv, quantize_nvfp4_norm
from fe_runtime.formats.scale_layout import (
    blocked_view,
    from_blocked,
    scale_form,
    scale_offset,
    scale_shape,
    scales_per_row,
    to_blocked,
)
from fe_runtime.formats.views import byte_view, typed_view

__all__ = [
    "BLOCK_FORMATS",
    "ELEMENT_TYPES",
    "BlockFormat",
    "ElementType",
    "block_format",
    "blocked_view",
    "byte_view",
    "cast",
    "cast_fp8",
    "decode",
    "dequantize",
    "e8m0_inv",
    "e8m0_up",
    "element_type",
    "from_blocked",
    "pack_fp4",
    "quantize_mx",
    "quantize_nc",
    "quantize_nv",
    "quantize_nvfp4_norm",
    "scale_form",
    "scale_offset",
    "scale_shape",
    "scales_per_row",
    "to_blocked",
    "typed_view",
    "unpack_fp4",
]
