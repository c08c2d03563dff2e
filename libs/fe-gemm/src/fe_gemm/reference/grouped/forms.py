"""The two forms of every operand, (M, X) and (M, X, 1), brought to one and back; packed FP4 as bytes; scales."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from array_api_compat import array_namespace

from fe_runtime import formats
from fe_runtime.formats import _backend as backend

__all__ = ["as_given", "depth", "matrix", "plain_scales", "row_offsets", "scales_as_given", "stored", "values"]

Array: TypeAlias = Any


def stored(x: Array) -> Array:
    """Return an operand with packed e2m1 as ``uint8``, on which every framework can do everything."""
    return formats.byte_view(x) if backend.dtype_name(x) == "float4_e2m1fn_x2" else x


def matrix(x: Array) -> Array:
    """Return (M, X) or (M, X, 1) as (M, X), packed e2m1 as bytes."""
    x = stored(x)
    return x[:, :, 0] if x.ndim == 3 else x


def depth(elements: Array, vec: int) -> int:
    """Return how many scales there are along the last dimension of stored elements."""
    columns: int = elements.shape[-1]
    return formats.scales_per_row(2 * columns if backend.dtype_name(elements) == "uint8" else columns, vec)


def values(x: Array, scales: Array, vec: int) -> Array:
    """Return the values of an operand (M, K[, 1]) with or without scales, (M, K) float32."""
    elements = matrix(x)
    if scales is None:
        return formats.decode(elements)
    plain = plain_scales(scales, elements.shape[0], depth(elements, vec))
    return formats.dequantize(elements, plain[0], vec=vec)


def plain_scales(scales: Array, rows: int, count: int, batch: int = 1) -> Array:
    """Return scales in the blocked layout as (batch, rows, count).

    Parameters
    ----------
    scales
        The logical view, or any contiguous array of the layout's bytes in order.
    """
    xp = array_namespace(scales)
    shape = tuple(scales.shape)
    if len(shape) == 6 and (shape[0], shape[1], shape[3]) == (32, 4, 4):
        return formats.from_blocked(scales, rows, count)
    physical = formats.scale_shape(rows, count, batch)
    if math.prod(shape) != math.prod(physical):
        raise ValueError(f"scales of {rows} rows need {math.prod(physical)} bytes; got shape {shape}.")
    name = backend.dtype_name(scales)
    typed = formats.typed_view(xp.reshape(formats.byte_view(scales), physical), name)
    return formats.from_blocked(typed, rows, count)


def as_given(x: Array, a: Array) -> Array:
    """Return (M, X), or the numbers (M,) of rows, in the form of A: rank 3 or 2, or one number a row."""
    if a.ndim == 2:
        return x
    return x[:, :, None] if x.ndim == 2 else x[:, None, None]


def scales_as_given(blocked: Array, a: Array) -> Array:
    """Return scales (1, RT, CT, 32, 4, 4) in the form of A; JAX has the physical form only."""
    logical = a.ndim == 3 and backend.framework_of(blocked) != "jax"
    return formats.blocked_view(blocked, "logical") if logical else blocked


def row_offsets(offsets: Array, rows: int, single_group: bool) -> Array:
    """Return the offsets that count: the given ones, or with ``single_group`` all rows, whatever is given."""
    return array_namespace(offsets).full_like(offsets, rows) if single_group else offsets
