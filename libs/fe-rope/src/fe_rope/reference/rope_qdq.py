"""Tail rotation, then quantisation and dequantisation in groups of channels, on arrays of any framework."""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace

from fe_runtime import formats
from fe_runtime.formats import _backend as backend

from . import exact
from .tail_rope import TAIL, rotate_tail

__all__ = ["rope_qdq_inplace"]

FLOORS = {("fp4", "ue8m0"): 6 * 2.0**-126, ("fp8", "ue8m0"): 1e-4, ("fp4", "e4m3"): 6 * 2.0**-9}
"""The least maximum of a group that its scale is made from."""

ELEMENTS = {"fp4": "float4_e2m1fn", "fp8": "float8_e4m3fn"}


def rope_qdq_inplace(
    x: Any, cache: Any, positions: Any, *, quantization: str, group_size: int, scale_format: str
) -> tuple[Any]:
    """Rotate the last 64 channels, round them to bf16, then quantise and dequantise all channels in groups.

    Per group: ``r = max(amax, floor) * RN(1/limit)``, its scale the least power of two ``>= r`` (ue8m0); or
    ``r = max(amax, floor) / limit``, its scale ``e4m3(r)``. Then ``bf16(q * scale)`` with
    ``q = RN(clamp(v / scale, -limit, limit))`` in E2M1 or E4M3.

    Parameters
    ----------
    x
        (..., D) bfloat16, D a multiple of the group and at least 64.
    cache
        (P, 64) float32: 32 cosines, then 32 sines.
    positions
        int32 or int64, one for each row, or for each first index of a three-dimensional x. Clamped to [0, P).
    quantization, group_size, scale_format
        One of ("fp4", 32, "ue8m0"), ("fp8", 32, "ue8m0"), ("fp4", 16, "e4m3").

    Returns
    -------
    tuple
        The new x alone.

    Notes
    -----
    Values that are not finite: an infinite one counts as the largest finite one in its group's maximum, and becomes
    ``limit * scale``; a NaN does not count, and stays NaN.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: tail RoPE with quantise-dequantise, arithmetic.
    """
    xp = array_namespace(x)
    rows = cache[xp.clip(positions, 0, cache.shape[0] - 1)]
    lead = x.shape[:-1]
    shared = quantization == "fp4" and group_size == 32  # by all heads of a token
    shape = (lead[0], 1, TAIL) if shared else (*lead, TAIL)
    rows = rows.reshape(shape)
    rotated = rotate_tail(x, rows[..., : TAIL // 2], rows[..., TAIL // 2 :])
    groups = exact.widen(rotated).reshape((*lead, x.shape[-1] // group_size, group_size))
    scale = _scales(groups, quantization, scale_format)
    quantised = _rounded(backend.divide(groups, scale), ELEMENTS[quantization])
    values = exact.narrow(exact.multiply(quantised, scale))
    return (values.reshape(x.shape),)


def _scales(groups: Any, quantization: str, scale_format: str) -> Any:
    xp = array_namespace(groups)
    limit = formats.element_type(ELEMENTS[quantization]).max_finite
    # As integers, magnitudes are in the order of the numbers, and no compiler takes a subnormal one for zero.
    magnitudes = backend.bits_of(groups) & 0x7FFFFFFF
    magnitudes = xp.where(magnitudes > _INFINITY, 0, xp.where(magnitudes > _LARGEST, _LARGEST, magnitudes))
    floor = int(np.float32(FLOORS[quantization, scale_format]).view(np.int32))
    largest = backend.float_of_bits(xp.clip(xp.max(magnitudes, axis=-1, keepdims=True), floor, None))
    if scale_format == "e4m3":
        return formats.decode(formats.cast(backend.divide(largest, limit), "float8_e4m3fn"))
    pattern = backend.bits_of(exact.multiply(largest, 1.0 / limit))
    return backend.float_of_bits((pattern + 0x7FFFFF) >> 23 << 23)  # up, unless the mantissa is 0


_INFINITY = 0x7F800000
_LARGEST = 0x7F7F0000  # the largest finite bf16


def _rounded(values: Any, element: str) -> Any:
    """Return fp32 values rounded to an element type, which saturates; NaN stays."""
    xp = array_namespace(values)
    rounded = formats.decode(formats.cast(values, element), element)
    return xp.where(xp.isnan(values), values, rounded)
