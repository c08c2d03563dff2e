"""The two conversions between fp32 scales and e8m0 bytes that the recipes use."""

from __future__ import annotations

from fe_runtime.formats import _backend as backend
from fe_runtime.formats._backend import Array

__all__ = ["e8m0_inv", "e8m0_up"]


def e8m0_up(v: Array) -> Array:
    """Round positive numbers up to a power of two and return its e8m0 byte (``E8M0_UP``).

    ``2**(byte - 127)`` is the smallest power of two >= ``v``, clamped to ``[2**-127, 2**127]``.

    Parameters
    ----------
    v
        fp32 array of numbers >= 0, any shape. The sign is ignored.

    Returns
    -------
    Array
        ``uint8``, the shape of ``v``: 255 for NaN, 254 for infinity, 0 for zero.

    Notes
    -----
    This is ``cvt.rp.satfinite.ue8m0x2.f32``. The casts of ml_dtypes and torch round to nearest and differ.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: block-scaled formats, generation of scales.
    """
    v = backend.as_float32(v)
    xp = backend.namespace(v)
    bits = backend.bits_of(v) & 0x7FFFFFFF
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    byte = exponent + xp.astype(mantissa != 0, xp.int32)
    byte = xp.where(byte > 254, 254, byte)
    byte = xp.where(exponent == 0, xp.astype(mantissa > 0x400000, xp.int32), byte)
    return xp.astype(xp.where(bits > 0x7F800000, 255, byte), xp.uint8)


def e8m0_inv(byte: Array) -> Array:
    """Return the factor ``2**(127 - byte)`` that undoes an e8m0 scale (``E8M0_INV``).

    Parameters
    ----------
    byte
        e8m0 array or its ``uint8`` or ``int8`` bytes, any shape.

    Returns
    -------
    Array
        fp32, exact for bytes 0..253; 0 for byte 254 (``2**-127`` would be subnormal), NaN for byte 255.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: block-scaled formats, generation of scales.
    """
    byte = backend.as_bytes(byte)
    xp = backend.namespace(byte)
    byte = xp.astype(byte, xp.int32)
    return backend.float_of_bits(xp.where(byte == 255, 0x7FC00000, (254 - byte) << 23))
