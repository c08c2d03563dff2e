"""Tensor maps made on the device: a table in a workspace with one map per group for each of several arrays.

TMA reads and writes what a map describes: an address, extents and strides. A launch passes one map per array; what
differs between groups of rows is known on the device only. So a small kernel runs first: it copies the launch's map for
every group, replaces what differs, and writes the copies to a table, from which the main kernel takes them.

* ``ends``: the extent of a dimension becomes the end of the group along it. Loads beyond it bring zeros and stores are
  dropped, so what belongs to the next group is neither read nor written, wherever tiles begin and end.
* ``addresses``: the array begins where a list of addresses says, as for weights in allocations of their own.

How to use it, in a launcher and in a kernel::

    variations = Variation(outlet_pair, ends=0), Variation(weights_pair, addresses=pointers)
    make_tensor_maps(table, variations, offsets, stream)          # table: bytes, table_bytes(groups, 2) of them

    results, weights = (TensorMaps.of(table, groups, number) for number in range(2))
    cute.copy(atom, from_, to, ..., tma_desc_ptr=results.at(group))

The warp that starts copies calls :meth:`TensorMaps.acquire` first, once for every group that it comes to.

Along the contiguous dimension of an array a copy has to begin at a multiple of 16 bytes; elsewhere the hardware traps.
So groups along that dimension begin at such multiples, and where something is stored they end at them; along another
one they may begin and end anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.tensor_utils import TensorMapManager, TensorMapUpdateMode

from fe_gemm.planning.grouped import MAP_BYTES

__all__ = ["TensorMaps", "Variation", "fake_table", "group_end", "make_tensor_maps"]

_WORDS = MAP_BYTES // 8


@dataclass(frozen=True, slots=True)
class Variation:
    """What the maps of an array in the table have of their own.

    Parameters
    ----------
    pair
        A TMA copy and the array as TMA sees it (:func:`fe_runtime.cute.tma.load_atom`, ``store_atom``).
    ends
        The dimension of the array whose extent becomes the end of the group; ``None``: all extents stay.
    addresses
        int64 (E,), 16-byte aligned addresses; ``None``: the address stays.
    """

    pair: tuple[cute.CopyAtom, cute.Tensor]
    ends: int | None = None
    addresses: cute.Tensor | None = None

    @property
    def ordinal(self) -> int | None:
        """Number of the dimension ``ends`` in the map, whose contiguous dimension is number 0."""
        return None if self.ends is None else self.pair[1].stride[self.ends].mode[0]

    @property
    def limit(self) -> Any:
        """The array's own extent along ``ends``."""
        return 0 if self.ends is None else self.pair[1].shape[self.ends]


@dataclass(frozen=True, slots=True)
class TensorMaps:
    """The maps of one array: ``start`` is the address of that of group 0."""

    start: Int64

    @classmethod
    def of(cls, table: cute.Tensor, groups: Int32 | int, number: int) -> TensorMaps:
        """Return the maps of the ``number``-th array of a table."""
        return cls(table.iterator.toint() + Int64(groups) * (number * MAP_BYTES))

    def at(self, group: Int32) -> cute.Pointer:
        """Return the map of a group, as copies take it: ``tma_desc_ptr``."""
        manager = TensorMapManager(TensorMapUpdateMode.GMEM, MAP_BYTES)
        return manager.get_tensormap_ptr(self.pointer(group), cute.AddressSpace.generic)

    def acquire(self, group: Int32) -> None:
        """Make the map of a group, which another kernel has written, usable for the threads that call this."""
        cpasync.fence_tma_desc_acquire(self.pointer(group))

    def pointer(self, group: Int32) -> cute.Pointer:
        """Return where the map of a group lies."""
        address = self.start + Int64(group) * MAP_BYTES
        return cute.make_ptr(cutlass.Uint8, address, cute.AddressSpace.gmem, assumed_align=MAP_BYTES)


def fake_table() -> cute.Tensor:
    """Return the stand-in for a table: bytes, :func:`fe_gemm.planning.grouped.table_bytes` of them."""
    return cute.runtime.make_fake_tensor(cutlass.Uint8, (cute.sym_int64(),), (1,), assumed_align=MAP_BYTES)


def make_tensor_maps(table: cute.Tensor, variations: tuple[Variation, ...], offsets: cute.Tensor, stream: Any) -> None:
    """Launch the kernel that fills a table; ``offsets``: int32 (E,), the ends of the groups.

    The extent that replaces another is never 0: what begins at the end of an empty group at 0 must not be read.
    """
    changes = tuple((variation.ordinal, variation.addresses is not None) for variation in variations)
    lists = tuple(variation.addresses for variation in variations if variation.addresses is not None)
    limits = tuple(Int32(variation.limit) for variation in variations)
    atoms = tuple(variation.pair[0] for variation in variations)
    tensor_maps_kernel.set_name_prefix("fe_gemm_tensor_maps", remove_cutlass_symbol=True, keep_mangled_name=False)
    tensor_maps_kernel(changes, atoms, limits, lists, table, offsets).launch(
        grid=(offsets.shape[0], 1, 1), block=(32, 1, 1), stream=stream
    )


@cute.kernel
def tensor_maps_kernel(
    changes: cutlass.Constexpr[tuple[tuple[int | None, bool], ...]],
    atoms: tuple[cute.CopyAtom, ...],
    limits: tuple[Int32, ...],
    lists: tuple[cute.Tensor, ...],
    table: cute.Tensor,
    offsets: cute.Tensor,
) -> None:
    """Make the maps of the group that has the block's number; a block is a warp."""
    lane, (group, _, _) = cute.arch.lane_idx(), cute.arch.block_idx()
    count = len(changes) * _WORDS
    drafts = cutlass.memory.SmemAllocator().allocate_array(Int64, count, byte_alignment=MAP_BYTES)
    # A copy fills only the half of a map in which something is.
    for i in cutlass.range(lane, count, 32):
        cute.make_tensor(drafts, cute.make_layout(count))[i] = Int64(0)
    cute.arch.sync_warp()
    end, following = group_end(offsets, group, lane), iter(lists)
    for number, (ordinal, addressed) in enumerate(changes):
        address = next(following)[group] if cutlass.const_expr(addressed) else None
        extent = cutlass.max(cutlass.min(end, limits[number]), 1)
        _write_draft(atoms[number], drafts + number * _WORDS, ordinal, extent, address)
        cute.arch.sync_warp()
        finished = TensorMaps.of(table, offsets.shape[0], number).pointer(group)
        cpasync.cp_fence_tma_desc_release(finished, drafts + number * _WORDS)


@cute.jit
def group_end(offsets: cute.Tensor, group: Int32, lane: Int32) -> Int32:
    """Return the end of a group, called by a warp: the largest offset up to it, and not below 0."""
    end = Int32(0)
    for i in cutlass.range(lane, group + 1, 32, unroll=4):
        end = cutlass.max(end, offsets[i])
    return cute.arch.warp_reduction(end, cutlass.max)


@cute.jit
def _write_draft(
    atom: cute.CopyAtom,
    draft: cute.Pointer,
    ordinal: cutlass.Constexpr[int | None],
    extent: Int32,
    address: Int64 | None,
) -> None:
    """Copy a map to shared memory and replace what differs, in one thread."""
    with cute.arch.elect_one():
        cpasync.copy_tensormap(atom, draft)
        if cutlass.const_expr(ordinal is not None):
            cute.arch.inline_ptx(
                f"tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [{{$r0}}], {ordinal}, {{$r1}};",
                read_only_args=[draft.toint(), extent],
            )
        if cutlass.const_expr(address is not None):
            cute.arch.inline_ptx(
                "tensormap.replace.tile.global_address.shared::cta.b1024.b64 [{$r0}], {$r1};",
                read_only_args=[draft.toint(), address],
            )
