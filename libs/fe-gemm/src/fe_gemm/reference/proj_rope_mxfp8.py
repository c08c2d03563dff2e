"""Query projection, rotation of the last 64 features of each head and MXFP8 codes in both directions, on arrays of any
framework."""

from __future__ import annotations

from typing import Any, TypeAlias

from array_api_compat import array_namespace

from fe_runtime import formats
from fe_runtime.formats import _backend as backend

from . import operands

__all__ = ["HEAD", "HEAD_BLOCKS", "PLAIN", "ROTATED", "gemm_proj_rope_mxfp8"]

Array: TypeAlias = Any

PLAIN = 128
"""Features of a head that are only projected, the first ones."""
ROTATED = 64
"""Features of a head that are rotated, the last ones."""
HEAD = PLAIN + ROTATED
BLOCK = 32
"""Features, or tokens, that share a scale."""
HEAD_BLOCKS = HEAD // BLOCK


def gemm_proj_rope_mxfp8(
    x: Array,
    w: Array,
    cos: Array,
    sin: Array,
    x_scale: Array = None,
    w_scale: Array = None,
    *,
    w_out_in: bool = True,
    accumulate: str = "float32",
) -> tuple[Array, Array, Array, Array]:
    """Project, rotate and quantise.

    ``Y = bf16(x w^T)``; of a head's features ``q``, the pairs ``q[128+2j], q[129+2j]`` are rotated to the features
    ``128+j`` and ``160+j``; then ``Q-MX`` in e4m3 over 32 features, and over 32 tokens, of the same fp32 values.

    Parameters
    ----------
    x
        (T, K) bf16, or e4m3 with ``x_scale`` (T, K/32), e8m0 or its bytes. T a multiple of 32.
    w
        (N, K), with ``w_scale`` (N, K/32); without ``w_out_in`` (K, N), with (K/32, N). N = 192 H.
    cos, sin
        (T, 64) bf16; the two halves of a row belong to the two outputs of each pair.
    w_out_in
        The layout of ``w``.
    accumulate
        ``"float64"``: sum in fp64, rounded once to fp32.

    Returns
    -------
    tuple
        (T, H, 192) e4m3, (T, H, 6) uint8; (T, H, 192) e4m3, (T/32, H, 192) uint8.

    Notes
    -----
    Products of bf16 numbers are exact in fp32, so a rotated value is rounded once. A block of zeros has scale byte 0.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: projection with RoPE and MXFP8 output, mathematics.
    """
    acc = _projected(x, w, x_scale, w_scale, 1 if w_out_in else 0, accumulate)
    q = _rounded_to_bfloat16(acc)
    heads = array_namespace(q).reshape(q, (q.shape[0], q.shape[1] // HEAD, HEAD))
    values = _rotated(heads, formats.decode(cos), formats.decode(sin))
    row, row_scales = formats.quantize_mx(values, "float8_e4m3fn", axis=2, vec=BLOCK)
    column, column_scales = formats.quantize_mx(values, "float8_e4m3fn", axis=0, vec=BLOCK)
    return row, formats.byte_view(row_scales), column, formats.byte_view(column_scales)


def _projected(x: Array, w: Array, x_scale: Array, w_scale: Array, depth_axis: int, accumulate: str) -> Array:
    """Return the (T, N) sums over the depth, which is dimension ``depth_axis`` of ``w``."""
    left = formats.decode(x) if x_scale is None else formats.dequantize(x, x_scale, vec=BLOCK)
    right = formats.decode(w) if w_scale is None else formats.dequantize(w, w_scale, vec=BLOCK, axis=depth_axis)
    xp = array_namespace(right)
    right = right if depth_axis == 1 else xp.permute_dims(right, (1, 0))
    return operands.accumulator(left[:, :, None], right[:, :, None], accumulate=accumulate)[0]


def _rounded_to_bfloat16(x: Array) -> Array:
    """Return fp32 values rounded to bf16, as fp32.

    On the bit patterns, because a compiler may leave out a conversion to bf16 and back. A carry runs into the exponent,
    as it should; NaN stays.
    """
    xp = array_namespace(x)
    pattern = backend.bits_of(x)
    rounded = (pattern + (0x7FFF + ((pattern >> 16) & 1))) & ~0xFFFF
    is_nan = (pattern & 0x7FFFFFFF) > 0x7F800000
    return backend.float_of_bits(xp.where(is_nan, pattern, rounded))


def _rotated(heads: Array, cos: Array, sin: Array) -> Array:
    """Return (T, H, 192) with the last 64 features rotated by (T, 64) tables, pairs side by side becoming halves."""
    xp = array_namespace(heads)
    half = ROTATED // 2
    even, odd = heads[:, :, PLAIN::2], heads[:, :, PLAIN + 1 :: 2]
    cos, sin = cos[:, None, :], sin[:, None, :]
    first = even * cos[:, :, :half] - odd * sin[:, :, :half]
    second = odd * cos[:, :, half:] + even * sin[:, :, half:]
    return xp.concat([heads[:, :, :PLAIN], first, second], axis=2)
