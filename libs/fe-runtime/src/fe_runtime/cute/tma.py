"""Tiles between global and shared memory by TMA, in the swizzled layouts that wgmma reads (sm_90).

A tile of 128-byte rows is stored with its 16-byte pieces permuted: piece p of row r lies at p ^ (r & 7). So eight rows
that are read or written at the same piece touch all banks, and TMA, wgmma and :func:`swizzled_offset` agree on it.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind, make_smem_layout_atom

__all__ = ["SWIZZLE_BYTES", "load_atom", "store_atom", "swizzled_layout", "swizzled_offset", "tiles_from"]

SWIZZLE_BYTES = 128
"""Bytes of a row of a swizzled tile."""


def swizzled_layout(
    dtype: type[cutlass.Numeric], shape: tuple[int, int], second_is_contiguous: bool, slots: int
) -> cute.ComposedLayout:
    """Return the layout (first, second, slots) of tiles whose contiguous extent is a multiple of 128 bytes.

    A tile that is wider than 128 bytes consists of columns of 128-byte rows, one after the other.
    """
    kind = SmemLayoutAtomKind.K_SW128 if second_is_contiguous else SmemLayoutAtomKind.MN_SW128
    order = (0, 1, 2) if second_is_contiguous else (1, 0, 2)
    return cute.tile_to_shape(make_smem_layout_atom(kind, dtype), (*shape, slots), order=order)


def swizzled_offset(row: Int32, piece: Int32) -> Int32:
    """Return the byte offset of a 16-byte piece of a 128-byte row."""
    return row * SWIZZLE_BYTES + ((piece ^ (row & 7)) << 4)


def load_atom(
    array: cute.Tensor, layout: cute.ComposedLayout, tile: tuple[int, int], multicast: int
) -> tuple[cute.CopyAtom, cute.Tensor]:
    """Return the copy of tiles of ``array`` into slots of ``layout``, and the array as TMA sees it.

    What lies outside the array arrives as zeros. With ``multicast`` above 1, that many blocks of a cluster load a part
    each and send it to all of them.
    """
    op = cpasync.CopyBulkTensorTileG2SOp() if multicast == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
    return _pair(cpasync.make_tiled_tma_atom(op, array, layout, tile, multicast))


def store_atom(
    array: cute.Tensor, layout: cute.ComposedLayout, tile: tuple[int, int]
) -> tuple[cute.CopyAtom, cute.Tensor]:
    """Return the copy of slots of ``layout`` into tiles of ``array``; what lies outside the array is not written."""
    return _pair(cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), array, layout, tile))


def tiles_from(tiles: cute.Tensor, array: cute.Layout, first: tuple[Any, ...]) -> cute.Tensor:
    """Return tiles that begin ``first`` values (a coordinate of the array) further than those of a partition.

    ``tiles`` is the partition and ``array`` the layout of the array as TMA sees it. So tiles may begin anywhere.
    """
    further = cute.crd2idx(first, array)
    return cute.make_tensor(tuple(a + b for a, b in zip(tiles.iterator, further, strict=True)), tiles.layout)


def _pair(info: Any) -> tuple[cute.CopyAtom, cute.Tensor]:
    return info.atom, info.tma_tensor
