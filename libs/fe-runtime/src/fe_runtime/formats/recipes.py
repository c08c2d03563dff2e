"""The recipes that quantise blocks: how a scale follows from a block, and codes from a scale.

``amax`` is the largest magnitude of a block. It leaves NaN out, and the code of a NaN is NaN (e2m1: code 7). All
arithmetic is fp32, each step rounded once to nearest even; the codes saturate.
"""

from __future__ import annotations

import numpy as np

from fe_runtime.dtypes import canonical_dtype
from fe_runtime.errors import InvalidArgumentError, explain
from fe_runtime.formats import _backend as backend
from fe_runtime.formats._backend import Array
from fe_runtime.formats.blocks import Blocks, cut
from fe_runtime.formats.e8m0 import e8m0_inv, e8m0_up
from fe_runtime.formats.elements import cast, decode
from fe_runtime.formats.packing import pack_fp4, unpack_fp4

__all__ = ["dequantize", "quantize_mx", "quantize_nc", "quantize_nv", "quantize_nvfp4_norm"]

_FLT_MAX = float(np.finfo(np.float32).max)
_FLT_MIN = float(np.finfo(np.float32).tiny)


def _reciprocals(**limits: float) -> dict[str, float]:
    return {name: float(np.float32(1) / np.float32(limit)) for name, limit in limits.items()}


_RCP_MX = _reciprocals(float8_e4m3fn=448.0, float8_e5m2=57344.0, float4_e2m1fn=6.0)
# The GEMM epilogues use the limit 128 for e5m2, and none for wider outputs.
_RCP_NC = _reciprocals(
    float8_e4m3fn=448.0, float8_e5m2=128.0, float4_e2m1fn=6.0, float16=1.0, bfloat16=1.0, float32=1.0
)


def quantize_mx(x: Array, dtype: object, *, axis: int = -1, vec: int = 32) -> tuple[Array, Array]:
    """Quantise blocks to MXFP8 or MXFP4 (``Q-MX``).

    ``byte = E8M0_UP(amax * RCP)``, ``code = CAST(x * 2**(127 - byte))``

    Parameters
    ----------
    x
        Floating-point array of one or more dimensions, taken as fp32.
    dtype
        float8_e4m3fn, float8_e5m2 or float4_e2m1fn.
    axis
        The dimension that is cut into blocks.
    vec
        Elements per block; the last block may be partial.

    Returns
    -------
    tuple
        Elements, in the shape of ``x`` and the framework's dtype; e2m1 is packed along the last dimension
        (``float4_e2m1fn_x2`` in torch, ``uint8`` elsewhere). And e8m0 scales, ``ceil(extent / vec)`` along ``axis``.

    Raises
    ------
    InvalidArgumentError
        Another dtype, no such axis, or e2m1 with an odd last dimension.

    Notes
    -----
    Never clips a finite number. A block of zeros has scale byte 0. An infinite ``amax`` gives byte 254 and codes
    that mean nothing.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: block-scaled formats, generation of scales.
    """
    operation = "formats.quantize_mx"
    name = _element(operation, dtype, _RCP_MX)
    blocks = cut(operation, x, vec, axis)
    byte = e8m0_up(backend.multiply(blocks.amax(), _RCP_MX[name]))
    elements = _elements(blocks, backend.multiply(blocks.values, e8m0_inv(byte)), name)
    return elements, backend.as_type(blocks.per_block(byte), "float8_e8m0fnu")


def quantize_nc(
    x: Array,
    dtype: object,
    norm_const: Array | float,
    *,
    scale_dtype: object = "float8_e8m0fnu",
    axis: int = -1,
    vec: int = 32,
    propagate_nan: bool = False,
    norm_first: bool = False,
) -> tuple[Array, Array]:
    """Quantise blocks as the GEMM epilogues do, with a global factor (``Q-NC``).

    ``p = (amax * RCP) * n``, ``s = E8M0_UP(p)`` or ``CAST_e4m3(p)``, ``code = CAST(x * min(n * (1/s), FLT_MAX))``

    Parameters
    ----------
    x
        Floating-point array of one or more dimensions, taken as fp32.
    dtype
        float8_e4m3fn, float8_e5m2 or float4_e2m1fn; or float16, bfloat16, float32, which have ``RCP = 1`` and do not
        saturate.
    norm_const
        ``n``, finite and > 0: a number, or an array of one element.
    scale_dtype
        float8_e8m0fnu or float8_e4m3fn.
    axis, vec
        As in :func:`quantize_mx`.
    propagate_nan
        A NaN wins ``amax``: its block gets a NaN scale and NaN codes (grouped GEMMs).
    norm_first
        ``p = amax * (RCP * n)``: the order of most column-direction scales of grouped GEMMs.

    Returns
    -------
    tuple
        Elements and scales, as in :func:`quantize_mx`; the scales have the dtype ``scale_dtype``.

    Raises
    ------
    InvalidArgumentError
        Another dtype, no such axis, or e2m1 with an odd last dimension.

    Notes
    -----
    Dequantised, ``x`` is ``code * s / n``. An e4m3 scale that rounds to 0 gives saturated codes and dequantises to 0.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: block-scaled formats, generation of scales; grouped GEMM, its two flags.
    """
    operation = "formats.quantize_nc"
    name = _element(operation, dtype, _RCP_NC)
    scale_name = _scale(operation, scale_dtype)
    blocks = cut(operation, x, vec, axis)
    n, amax = backend.scalar(norm_const, blocks.values), blocks.amax(propagate_nan=propagate_nan)
    if norm_first:
        p = backend.multiply(amax, backend.multiply(n, _RCP_NC[name]))
    else:
        p = backend.multiply(backend.multiply(amax, _RCP_NC[name]), n)
    scale = e8m0_up(p) if scale_name == "float8_e8m0fnu" else backend.as_bytes(cast(p, scale_name))
    one_over_scale = backend.divide(backend.scalar(1.0, p), decode(scale, scale_name))
    factor = _at_most(backend.multiply(one_over_scale, n), _FLT_MAX)
    elements = _elements(blocks, backend.multiply(blocks.values, factor), name)
    return elements, backend.as_type(blocks.per_block(scale), scale_name)


def quantize_nv(x: Array, *, axis: int = -1, vec: int = 16) -> tuple[Array, Array]:
    """Quantise blocks to NVFP4 without a global scale (``Q-NV``).

    ``s = CAST_e4m3(max(amax * RCP, 2**-9))``, ``code = CAST_e2m1(x / s)``

    Parameters
    ----------
    x
        Floating-point array of one or more dimensions, taken as fp32; the last one even.
    axis, vec
        As in :func:`quantize_mx`.

    Returns
    -------
    tuple
        Packed e2m1 elements as in :func:`quantize_mx`, and e4m3 scales.

    Raises
    ------
    InvalidArgumentError
        No such axis, or an odd last dimension.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: block-scaled formats, generation of scales.
    """
    blocks = cut("formats.quantize_nv", x, vec, axis)
    p = _at_least(backend.multiply(blocks.amax(), _RCP_MX["float4_e2m1fn"]), 2.0**-9)
    scale = backend.as_bytes(cast(p, "float8_e4m3fn"))
    values = backend.divide(blocks.values, decode(scale, "float8_e4m3fn"))
    elements = _elements(blocks, values, "float4_e2m1fn")
    return elements, backend.as_type(blocks.per_block(scale), "float8_e4m3fn")


def quantize_nvfp4_norm(y: Array) -> tuple[Array, Array]:
    """Quantise blocks of 16 of the last dimension to NVFP4, by the rule of RMSNorm + SiLU.

    ``q = max(amax / 6, FLT_MIN)``, ``s = CAST_e4m3(q)``, ``code = CAST_e2m1(y / q)`` with the unrounded ``q``

    Parameters
    ----------
    y
        ``(..., C)``, floating point, taken as fp32, ``C`` even.

    Returns
    -------
    tuple
        Packed e2m1 elements ``(..., C/2)`` and e4m3 scales ``(..., ceil(C/16))``.

    Raises
    ------
    InvalidArgumentError
        ``C`` odd, or no dimensions.

    Notes
    -----
    Blocks with ``amax <= 6 * 2**-10`` have scale 0 and dequantise to 0 although their codes are not 0. An infinite
    ``amax`` gives scale 448, codes 7 to the infinities and 0 to the finite members.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: RMSNorm + SiLU, numerics.
    """
    blocks = cut("formats.quantize_nvfp4_norm", y, 16, -1)
    q = _at_least(backend.divide(blocks.amax(), 6.0), _FLT_MIN)
    elements = _elements(blocks, backend.divide(blocks.values, q), "float4_e2m1fn")
    return elements, blocks.per_block(cast(q, "float8_e4m3fn"))


def dequantize(
    elements: Array,
    scales: Array,
    *,
    vec: int | None = None,
    axis: int = -1,
    norm_const: Array | float | None = None,
) -> Array:
    """Return the fp32 values of quantised blocks: ``q * s``, or ``q * s / n``.

    Parameters
    ----------
    elements
        fp8, packed FP4 (``float4_e2m1fn_x2``, or ``uint8`` with two codes per byte along the last dimension), or
        float16, bfloat16, float32.
    scales
        One per block: ``ceil(extent / vec)`` along ``axis``, else the logical shape of ``elements``. e4m3, e8m0, or
        ``uint8`` and ``int8``, which are e8m0 bytes.
    vec
        Elements per block; None: 16 with e4m3 scales, else 32.
    axis
        The dimension that is cut into blocks.
    norm_const
        ``n`` of :func:`quantize_nc`.

    Returns
    -------
    Array
        fp32, the logical shape of ``elements``. A NaN scale makes its block NaN.

    Raises
    ------
    InvalidArgumentError
        Another dtype or shape.

    Notes
    -----
    For FP4 with e4m3 scales, and for all others inside the exponent range, the product is exact in bf16 too.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: block-scaled formats.
    """
    operation = "formats.dequantize"
    packed = backend.dtype_name(elements) in ("uint8", "float4_e2m1fn_x2")
    values = decode(unpack_fp4(elements), "float4_e2m1fn") if packed else decode(elements)
    held = backend.dtype_name(scales)
    scale_name = _scale(operation, "float8_e8m0fnu" if held in ("uint8", "int8") else held)
    blocks = cut(operation, values, vec or (16 if scale_name == "float8_e4m3fn" else 32), axis)
    shape = blocks.values.shape
    wanted = (*shape[: blocks.axis + 1], *shape[blocks.axis + 2 :])
    if tuple(scales.shape) != wanted:
        rule = f"have shape {wanted}, one scale per block"
        raise InvalidArgumentError(explain(operation, "scales", rule, f"shape {tuple(scales.shape)}"))
    factors = backend.namespace(scales).expand_dims(decode(scales, scale_name), axis=blocks.axis + 1)
    result = blocks.join(backend.multiply(blocks.values, factors))
    if norm_const is not None:
        result = backend.divide(result, backend.scalar(norm_const, result))
    return backend.contiguous(result)


def _elements(blocks: Blocks, values: Array, name: str) -> Array:
    """Return the scaled values of the blocks as elements of type ``name``, FP4 in pairs."""
    # Joined before the cast, whose result is then contiguous also when the last block is partial.
    elements = cast(blocks.join(values), name)
    return backend.as_type(pack_fp4(elements), "float4_e2m1fn_x2") if name == "float4_e2m1fn" else elements


def _element(operation: str, dtype: object, known: dict[str, float]) -> str:
    name = canonical_dtype(dtype)
    if name not in known:
        raise InvalidArgumentError(explain(operation, "dtype", f"be one of {', '.join(known)}", name))
    return name


def _scale(operation: str, dtype: object) -> str:
    name = canonical_dtype(dtype)
    if name not in ("float8_e8m0fnu", "float8_e4m3fn"):
        raise InvalidArgumentError(explain(operation, "the scale dtype", "be float8_e8m0fnu or float8_e4m3fn", name))
    return name


def _at_least(x: Array, floor: float) -> Array:
    return backend.namespace(x).where(x < floor, floor, x)


def _at_most(x: Array, ceiling: float) -> Array:
    return backend.namespace(x).where(x > ceiling, ceiling, x)
