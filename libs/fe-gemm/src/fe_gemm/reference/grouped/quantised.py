"""Results quantised in both directions: blocks of 32 columns for one product, blocks of 32 rows for the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from array_api_compat import array_namespace

from fe_runtime import formats
from fe_runtime.formats import _backend as backend

from . import forms
from .groups import scale_atoms

__all__ = ["BLOCK", "BothWays", "both_ways", "by_expert", "of_all_experts"]

Array: TypeAlias = Any

BLOCK = 32
"""Elements of a scale."""
TILE = 4 * BLOCK
"""Rows whose scales an atom holds."""


@dataclass(frozen=True)
class BothWays:
    """D with scales by row, and D with scales by column, in the form of A."""

    d: Array
    d_col: Array
    sfd_row: Array
    sfd_col: Array


def both_ways(
    x: Array, dtype: str, norm_const: Array, offsets: Array, a: Array, *, norm_first: bool, discrete_col_sfd: bool
) -> BothWays:
    """Quantise (M, X) float32 along its rows and along its columns, both from the unrounded numbers.

    Parameters
    ----------
    x
        Rows of the tail are 0.
    dtype
        An fp8 type, or float16, bfloat16, float32, which the scales bring to at most 1 and which do not saturate.
    norm_const
        (1,) float32.
    norm_first
        The backward operations' order of the factors of column scales: ``amax * (RCP * n)``.
    discrete_col_sfd
        Each expert's column scales are a blocked layout of their own: what the weight gradient takes. Offsets but the
        last are multiples of 128. A block of rows is ``m // 32`` either way.

    Notes
    -----
    NaN wins: its block has scale byte 0xFF and codes of NaN.
    """
    d, rows = formats.quantize_nc(x, dtype, norm_const, axis=1, vec=BLOCK, propagate_nan=True)
    d_col, columns = formats.quantize_nc(
        x, dtype, norm_const, axis=0, vec=BLOCK, propagate_nan=True, norm_first=norm_first
    )
    turned = array_namespace(columns).permute_dims(formats.byte_view(columns), (1, 0))
    by_column = formats.to_blocked(turned)
    if discrete_col_sfd and x.shape[0]:
        by_column = by_expert(by_column, offsets, x.shape[0])
    by_column = formats.typed_view(by_column, backend.dtype_name(columns))
    return BothWays(
        forms.as_given(d, a),
        forms.as_given(d_col, a),
        forms.scales_as_given(formats.to_blocked(rows), a),
        forms.scales_as_given(by_column, a),
    )


def by_expert(blocked: Array, offsets: Array, extent: int, tile: int = TILE) -> Array:
    """Return bytes of scales along all tokens, one layout, as one layout for each expert; the same shape."""
    xp = array_namespace(blocked)
    atoms = xp.reshape(blocked, (-1, 512))
    place = xp.reshape(scale_atoms(offsets, extent, tile, blocked.shape[1]), (-1,))
    return xp.reshape(xp.take(atoms, xp.argsort(place), axis=0), blocked.shape)


def of_all_experts(packed: Array, offsets: Array, rows: int, extent: int, tile: int = TILE) -> Array:
    """Return bytes of scales in one layout for each expert as one layout (1, RT, CT, 32, 4, 4) along all tokens."""
    xp = array_namespace(packed)
    shape = formats.scale_shape(rows, 4 * -(-extent // tile))
    place = scale_atoms(offsets, extent, tile, shape[1])
    atoms = xp.reshape(packed, (-1, 512))
    return xp.reshape(xp.take(atoms, xp.reshape(place, (-1,)), axis=0), shape)
