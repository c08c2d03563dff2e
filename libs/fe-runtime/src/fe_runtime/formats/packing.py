"""Packing of FP4 codes, two per byte, the first in the low nibble."""

from __future__ import annotations

from fe_runtime.errors import InvalidArgumentError, explain
from fe_runtime.formats import _backend as backend
from fe_runtime.formats._backend import Array

__all__ = ["pack_fp4", "unpack_fp4"]


def pack_fp4(codes: Array, axis: int = -1) -> Array:
    """Pack e2m1 codes: ``byte[i] = code[2i] | code[2i+1] << 4``.

    Parameters
    ----------
    codes
        ``uint8``, one code per byte as :func:`cast` gives them (the high nibble is ignored), or a native
        ``float4_e2m1fn`` array of numpy or JAX.
    axis
        The contiguous dimension of the result's consumer; its extent must be even.

    Returns
    -------
    Array
        ``uint8``, half as long along ``axis``.

    Raises
    ------
    InvalidArgumentError
        Odd extent, no such axis, or items wider than a byte.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: block-scaled formats, packing of FP4 pairs.
    """
    codes = backend.as_bytes(codes)
    axis = backend.axis_of("formats.pack_fp4", codes, axis)
    if codes.shape[axis] % 2:
        rule = f"have an even extent along axis {axis}"
        raise InvalidArgumentError(explain("formats.pack_fp4", "codes", rule, f"shape {tuple(codes.shape)}"))
    before = (slice(None),) * axis
    return (codes[(*before, slice(0, None, 2))] & 0xF) | (codes[(*before, slice(1, None, 2))] << 4)


def unpack_fp4(packed: Array, axis: int = -1) -> Array:
    """Return the e2m1 codes of packed pairs, one per byte; the inverse of :func:`pack_fp4`.

    Parameters
    ----------
    packed
        ``torch.float4_e2m1fn_x2`` or ``uint8``.
    axis
        The packed dimension.

    Returns
    -------
    Array
        ``uint8`` codes 0..15, twice as long along ``axis``.

    Raises
    ------
    InvalidArgumentError
        No such axis, or items that are not bytes.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: block-scaled formats, packing of FP4 pairs.
    """
    packed = backend.as_bytes(packed)
    xp = backend.namespace(packed)
    axis = backend.axis_of("formats.unpack_fp4", packed, axis)
    pairs = xp.stack((packed & 0xF, packed >> 4), axis=axis + 1)
    shape = packed.shape
    return xp.reshape(pairs, (*shape[:axis], 2 * shape[axis], *shape[axis + 1 :]))
