"""Element types and their conversion from and to fp32 (``CAST``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from fe_runtime.dtypes import canonical_dtype
from fe_runtime.errors import InvalidArgumentError, explain
from fe_runtime.formats import _backend as backend
from fe_runtime.formats._backend import Array

__all__ = ["ELEMENT_TYPES", "ElementType", "cast", "cast_fp8", "decode", "element_type"]


@dataclass(frozen=True, slots=True)
class ElementType:
    """Facts about one narrow floating-point type.

    ``nan_code`` is what a NaN becomes: the type's NaN, or for e2m1, which has none, the largest code.
    """

    name: str
    bits: int
    signed: bool
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_finite: float
    max_code: int
    nan_code: int
    has_nan: bool
    has_infinity: bool

    @property
    def min_normal(self) -> float:
        """Smallest positive normal number (e8m0: the smallest number, byte 0)."""
        return 2.0 ** (1 - self.bias) if self.signed else 2.0**-self.bias

    @property
    def min_subnormal(self) -> float:
        """Smallest positive number."""
        return self.min_normal * 2.0**-self.mantissa_bits


def _types() -> dict[str, ElementType]:
    rows = (
        ElementType("float8_e4m3fn", 8, True, 4, 3, 7, 448.0, 0x7E, 0x7F, True, False),
        ElementType("float8_e5m2", 8, True, 5, 2, 15, 57344.0, 0x7B, 0x7F, True, True),
        ElementType("float4_e2m1fn", 4, True, 2, 1, 1, 6.0, 0x7, 0x7, False, False),
        ElementType("float8_e8m0fnu", 8, False, 8, 0, 127, 2.0**127, 0xFE, 0xFF, True, False),
    )
    return {row.name: row for row in rows}


ELEMENT_TYPES: Mapping[str, ElementType] = MappingProxyType(_types())
"""The narrow types by canonical name."""

_WIDE = ("float16", "bfloat16", "float32")


def element_type(dtype: object) -> ElementType:
    """Return the facts about a narrow type.

    Raises
    ------
    InvalidArgumentError
        ``dtype`` is not one of :data:`ELEMENT_TYPES`.

    Source
    ------
    OCP Microscaling Formats (MX) 1.0, element and scale types.
    """
    name = canonical_dtype(dtype)
    if name not in ELEMENT_TYPES:
        rule = f"be one of {', '.join(ELEMENT_TYPES)}"
        raise InvalidArgumentError(explain("formats.element_type", "dtype", rule, name))
    return ELEMENT_TYPES[name]


def cast(x: Array, dtype: object) -> Array:
    """Round ``x`` to another type, to nearest with ties to even (``CAST``).

    Parameters
    ----------
    x
        Floating-point array, any shape. It is taken as fp32; fp64 is rounded to fp32 first.
    dtype
        e4m3, e5m2 or e2m1: saturates, NaN stays NaN. float16, bfloat16, float32: overflows to infinity.

    Returns
    -------
    Array
        The shape of ``x``, in the framework's dtype. e2m1 gives ``uint8`` with one code (0..15) per byte, ready for
        :func:`pack_fp4`; e2m1 has no NaN, so NaN becomes code 7 as in the hardware's conversion.

    Raises
    ------
    InvalidArgumentError
        Another dtype; e8m0 in particular, whose rounding is :func:`e8m0_up`.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: block-scaled formats, conversion of elements.
    """
    name = canonical_dtype(dtype)
    if name in _WIDE:
        return backend.convert(backend.as_float32(x), name)
    kind = ELEMENT_TYPES.get(name)
    if kind is None or not kind.signed:
        fix = "Round scales with formats.e8m0_up." if kind else ""
        rule = "be float8_e4m3fn, float8_e5m2, float4_e2m1fn, float16, bfloat16 or float32"
        raise InvalidArgumentError(explain("formats.cast", "dtype", rule, name, fix))
    codes = _encode(backend.as_float32(x), kind)
    return codes if kind.bits == 4 else backend.as_type(codes, name)


def cast_fp8(x: Array, dtype: object = "float8_e4m3fn") -> Array:
    """Round ``x`` to an fp8 type: :func:`cast` for e4m3 and e5m2 only.

    Raises
    ------
    InvalidArgumentError
        ``dtype`` is not an fp8 type.
    """
    name = canonical_dtype(dtype)
    if name not in ("float8_e4m3fn", "float8_e5m2"):
        raise InvalidArgumentError(explain("formats.cast_fp8", "dtype", "be float8_e4m3fn or float8_e5m2", name))
    return cast(x, name)


def decode(x: Array, dtype: object = None) -> Array:
    """Return the fp32 values of narrow numbers; exact.

    Parameters
    ----------
    x
        Array of a narrow or wide floating-point dtype, or ``uint8`` codes, any shape.
    dtype
        What ``uint8`` codes mean; e2m1 codes are one per byte (:func:`unpack_fp4`), the high nibble is ignored.
        None: the dtype of ``x``.

    Raises
    ------
    InvalidArgumentError
        No value is defined for the dtype, or ``x`` has another dtype than ``dtype``.

    Source
    ------
    OCP Microscaling Formats (MX) 1.0, element and scale types.
    """
    held = backend.dtype_name(x)
    name = held if dtype is None else canonical_dtype(dtype)
    if held not in (name, "uint8", "int8"):
        raise InvalidArgumentError(explain("formats.decode", "x", f"be {name} or its bytes", f"dtype {held}"))
    if name in _WIDE:
        return backend.as_float32(x)
    if name not in ELEMENT_TYPES:
        fix = "Use unpack_fp4 for FP4 pairs, and say what bytes mean: decode(x, 'float4_e2m1fn')."
        raise InvalidArgumentError(explain("formats.decode", "dtype", "be a floating-point type", name, fix))
    if name == "float8_e8m0fnu":
        return _decode_e8m0(backend.as_bytes(x))
    if name == "float4_e2m1fn":
        return _decode_e2m1(backend.as_bytes(x))
    return backend.as_float32(backend.as_type(backend.as_bytes(x), name))


_INFINITY_BITS = 0x7F800000
_ONE_HALF_BITS = 126 << 23
_SIGN_BIT = -(1 << 31)


def _encode(x: Array, kind: ElementType) -> Array:
    """Return the ``uint8`` codes of fp32 ``x`` in a signed narrow type."""
    xp = backend.namespace(x)
    if kind.bits == 8 and backend.framework_of(x) == "torch":
        # One conversion instead of a dozen passes. Clamped, because its overflow depends on the torch version.
        codes = backend.as_bytes(backend.convert(x.clamp(-kind.max_finite, kind.max_finite), kind.name))
        return xp.where(xp.isnan(x), kind.nan_code, codes)
    bits = backend.bits_of(x)
    magnitude = bits & 0x7FFFFFFF
    max_bits = _pattern(kind.max_finite)
    codes = _round_magnitude(xp.where(magnitude > max_bits, max_bits, magnitude), kind)
    sign = (bits >> (32 - kind.bits)) & (1 << (kind.bits - 1))
    codes = xp.where(magnitude > _INFINITY_BITS, kind.nan_code, codes | sign)
    return xp.astype(codes, xp.uint8)


def _round_magnitude(magnitude: Array, kind: ElementType) -> Array:
    """Return the codes of non-negative fp32 bit patterns that do not exceed the largest finite number."""
    xp = backend.namespace(magnitude)
    # Normal numbers: drop the surplus mantissa bits. Half of the unit, less one unless the kept part is odd, is added
    # first; a carry runs into the exponent, as it should.
    shift = 23 - kind.mantissa_bits
    odd = (magnitude >> shift) & 1
    rounded = (magnitude + ((1 << (shift - 1)) - 1) + odd) >> shift
    normal = rounded - ((127 - kind.bias) << kind.mantissa_bits)
    # Subnormal numbers: beside this anchor an fp32 unit is one subnormal step, so that the addition rounds.
    anchor = kind.min_subnormal * 2.0**23
    subnormal = backend.bits_of(backend.float_of_bits(magnitude) + anchor) - _pattern(anchor)
    return xp.where(magnitude < _pattern(kind.min_normal), subnormal, normal)


def _decode_e2m1(codes: Array) -> Array:
    xp = backend.namespace(codes)
    codes = xp.astype(codes, xp.int32)
    magnitude = codes & 7
    # From code 2 on the two exponent bits and the mantissa bit stand in the fp32 pattern as they are; 0 and 1 are
    # subnormal (0 and 0.5).
    subnormal = xp.astype(magnitude == 1, xp.int32) * _ONE_HALF_BITS
    bits = xp.where(magnitude >= 2, (magnitude << 22) + _ONE_HALF_BITS, subnormal)
    return backend.float_of_bits(xp.where((codes & 8) != 0, bits | _SIGN_BIT, bits))


def _decode_e8m0(scales: Array) -> Array:
    xp = backend.namespace(scales)
    scales = xp.astype(scales, xp.int32)
    bits = xp.where(scales == 0, 0x00400000, scales << 23)  # 2**-127 is subnormal
    return backend.float_of_bits(xp.where(scales == 255, 0x7FC00000, bits))


def _pattern(value: float) -> int:
    return int(np.float32(value).view(np.int32))
