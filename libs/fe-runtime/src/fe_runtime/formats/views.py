"""The two views between bytes and one-byte dtypes (fp8, e8m0, packed FP4)."""

from __future__ import annotations

from fe_runtime.dtypes import bits, canonical_dtype
from fe_runtime.errors import InvalidArgumentError, explain
from fe_runtime.formats._backend import Array, as_bytes, as_type, dtype_name

__all__ = ["byte_view", "typed_view"]


def byte_view(x: Array) -> Array:
    """Return the bytes of an array of one-byte items as ``uint8``.

    Parameters
    ----------
    x
        Array of fp8, e8m0, packed FP4, ``int8`` or ``uint8``, any shape and strides. A native ``float4_e2m1fn`` array
        gives one code per byte, in the low nibble.

    Returns
    -------
    Array
        ``uint8``, the shape of ``x``; shares memory with ``x`` in numpy and torch.

    Raises
    ------
    InvalidArgumentError
        The items are wider than one byte.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: block-scaled formats, representation in the frameworks.
    """
    return as_bytes(x)


def typed_view(x: Array, dtype: object) -> Array:
    """Return ``uint8`` bytes as a one-byte dtype.

    Parameters
    ----------
    x
        ``uint8`` array, any shape.
    dtype
        fp8, e8m0, ``float4_e2m1fn_x2`` (which stays ``uint8`` in numpy and JAX), ``int8`` or ``uint8``.

    Returns
    -------
    Array
        The shape of ``x``; shares memory with ``x`` in numpy and torch.

    Raises
    ------
    InvalidArgumentError
        ``x`` is not ``uint8``, or ``dtype`` is not one byte wide.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: block-scaled formats, representation in the frameworks.
    """
    name = canonical_dtype(dtype)
    if dtype_name(x) != "uint8":
        raise InvalidArgumentError(explain("formats.typed_view", "x", "be uint8", f"dtype {dtype_name(x)}"))
    if bits(name) != 8 or name == "bool":
        raise InvalidArgumentError(explain("formats.typed_view", "dtype", "be a number of one byte", name))
    return as_type(x, name)
