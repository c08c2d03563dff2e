"""Addresses of arrays: pointer, extent in bytes, overlap and alignment."""

from __future__ import annotations

from typing import Any, cast

from fe_runtime.arrays.description import get_device, get_shape, get_strides
from fe_runtime.arrays.recognition import is_fake, is_jax_array, is_numpy_array, is_torch_tensor, is_tracer
from fe_runtime.dtypes import bits, canonical_dtype
from fe_runtime.errors import InvalidArgumentError, explain

__all__ = ["alignment", "byte_range", "get_data_ptr", "overlap"]

MAX_ALIGNMENT = 16  # bytes; the widest access of one thread


def get_data_ptr(x: object) -> int:
    """Return the address of an array's first element.

    Raises
    ------
    InvalidArgumentError
        ``x`` has no address: a tracer, a tensor without data, or a foreign array that does not tell it.

    Notes
    -----
    A jax address is valid while the array is alive and not donated.
    """
    pointer = _pointer(x)
    if pointer is None:
        raise InvalidArgumentError(explain("get_data_ptr", "array", "have an address", type(x).__name__))
    return pointer


def byte_range(x: object) -> tuple[int, int]:
    """Return ``(start, stop)``: the addresses from the lowest to one past the highest byte of an array.

    Negative strides reach below the first element. An array without elements has an empty range.

    Raises
    ------
    InvalidArgumentError
        ``x`` has no address.
    """
    start = get_data_ptr(x)
    array = cast("Any", x)
    if is_torch_tensor(x) and array.is_contiguous():  # the common case, without a walk over the dimensions
        return start, start + int(array.nbytes)
    shape = get_shape(x)
    if 0 in shape:
        return start, start
    itemsize = _itemsize(x)
    below = above = 0
    for extent, step in zip(shape, get_strides(x), strict=True):
        reach = (extent - 1) * step * itemsize
        below, above = below + min(reach, 0), above + max(reach, 0)
    return start + below, start + above + itemsize


def overlap(a: object, b: object) -> bool:
    """Return whether two arrays share a byte.

    Parameters
    ----------
    a, b
        Arrays of any framework. Arrays without an address (tracers, fake tensors), without elements, or on different
        devices share nothing.

    Notes
    -----
    Decided from addresses, not from storage identity, which DLPack hides. Disjoint byte ranges settle nearly every
    call; arrays whose ranges meet still count as disjoint if they are interleaved slices of rows of one pitch, such
    as column blocks of one buffer. Other interleavings count as overlap.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: runtime conventions, aliasing.
    """
    if _pointer(a) is None or _pointer(b) is None:
        return False
    first, second = byte_range(a), byte_range(b)
    if first[0] >= second[1] or second[0] >= first[1] or first[0] == first[1] or second[0] == second[1]:
        return False
    if get_device(a) != get_device(b):
        return False
    return not _interleaved(_byte_layout(a), _byte_layout(b))


def alignment(x: object) -> int:
    """Return the largest power of two, at most 16, that divides the address of an array (in bytes).

    16 for null pointers, for arrays without elements, and for arrays without an address.
    """
    pointer = _pointer(x)
    if not pointer or pointer % MAX_ALIGNMENT == 0 or 0 in get_shape(x):
        return MAX_ALIGNMENT
    return pointer & -pointer


_Layout = tuple[int, int, tuple[tuple[int, int], ...]]  # lowest address, element bytes, (extent, step in bytes)


def _byte_layout(x: object) -> _Layout:
    itemsize = _itemsize(x)
    dims = tuple(
        (extent, abs(step) * itemsize) for extent, step in zip(get_shape(x), get_strides(x), strict=True) if extent > 1
    )
    return byte_range(x)[0], itemsize, dims


def _interleaved(a: _Layout, b: _Layout) -> bool:
    """Return whether ``a`` and ``b`` occupy different columns of rows of some common pitch."""
    pitches = {step for _, _, dims in (a, b) for _, step in dims if step > 0}
    return any(_columns_differ(a, b, pitch) for pitch in pitches)


def _columns_differ(a: _Layout, b: _Layout, pitch: int) -> bool:
    widths = []
    for _, itemsize, dims in (a, b):
        inner = [(extent, step) for extent, step in dims if step % pitch]
        widths.append(itemsize + sum((extent - 1) * step for extent, step in inner))
    gap = (b[0] - a[0]) % pitch  # from the first column of a to the first column of b
    return widths[0] <= gap and widths[1] <= pitch - gap


def _itemsize(x: object) -> int:
    itemsize = getattr(x, "itemsize", None)  # torch, numpy and jax have it
    return itemsize if isinstance(itemsize, int) else (bits(canonical_dtype(cast("Any", x).dtype)) + 7) // 8


def _pointer(x: object) -> int | None:
    """Return the address of the first element, None if there is none or nobody can tell."""
    if is_torch_tensor(x):
        return None if is_fake(x) else int(cast("Any", x).data_ptr())
    if is_numpy_array(x):
        return int(cast("Any", x).ctypes.data)
    if is_tracer(x):
        return None
    getter = getattr(x, "unsafe_buffer_pointer" if is_jax_array(x) else "data_ptr", None)
    return int(getter()) if callable(getter) else None
