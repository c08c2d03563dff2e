"""A launcher that copies boxes of 64 x 64 values by tensor maps out of a table, one group after the other."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import BFloat16, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

from fe_gemm.kernels.sm90.arguments import aligned, fake_matrices
from fe_gemm.kernels.sm90.tensor_maps import TensorMaps, Variation, fake_table, make_tensor_maps
from fe_runtime.cute.arguments import fake_stream
from fe_runtime.cute.pipeline import Position, Ring
from fe_runtime.cute.tma import load_atom, store_atom, swizzled_layout

BOX = 64


def build(arch: str, mode: str, rows_contiguous: bool) -> tuple[Any, tuple[Any, ...]]:
    """Return a launcher of source (M, K, 1), target (X, K, E or 1), offsets, addresses, table.

    ``mode``: ``"loads"``: box e of the target is what is loaded from the start of group e on, up to its end.
    ``"stores"``: box e of the source, which lies at address e, is stored from the start of group e on, up to its end.
    """
    del arch

    @cute.jit
    def copies(
        source: cute.Tensor,
        target: cute.Tensor,
        offsets: cute.Tensor,
        addresses: cute.Tensor,
        table: cute.Tensor,
        stream: Any,
    ) -> None:
        source, target = (aligned(array, rows_contiguous) for array in (source, target))
        layout = swizzled_layout(BFloat16, (BOX, BOX), rows_contiguous, 1)
        into, out = load_atom(source, layout, (BOX, BOX), 1), store_atom(target, layout, (BOX, BOX))
        if cutlass.const_expr(mode == "loads"):
            variations = (Variation(into, ends=0),)
        else:
            variations = (Variation(into, addresses=addresses), Variation(out, ends=0))
        make_tensor_maps(table, variations, offsets, stream)
        copies_kernel(mode, rows_contiguous, into, out, offsets, table).launch(
            grid=(1, 1, 1), block=(32, 1, 1), stream=stream
        )

    m, k, x, e = (cute.sym_int() for _ in range(4))
    make = cute.runtime.make_fake_tensor
    return copies, (
        fake_matrices(BFloat16, m, k, cute.sym_int(), rows_contiguous),
        fake_matrices(BFloat16, x, k, cute.sym_int(), rows_contiguous),
        make(Int32, (e,), (1,), assumed_align=4),
        make(Int64, (e,), (1,), assumed_align=8),
        fake_table(),
        fake_stream(),
    )


@cute.kernel
def copies_kernel(
    mode: cutlass.Constexpr[str],
    rows_contiguous: cutlass.Constexpr[bool],
    into: tuple[Any, ...],
    out: tuple[Any, ...],
    offsets: cute.Tensor,
    table: cute.Tensor,
) -> None:
    """Copy the boxes of all groups, the last one first: what goes too far destroys what is there."""
    allocator = cutlass.memory.SmemAllocator()
    layout = swizzled_layout(BFloat16, (BOX, BOX), rows_contiguous, 1)
    box = allocator.allocate_tensor(BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner)
    ring = Ring.allocate(allocator, 1)
    ring.initialise(1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    groups = offsets.shape[0]
    loads, stores = TensorMaps.of(table, groups, 0), TensorMaps.of(table, groups, 1)
    at = Position.of_reader(1)
    for number in cutlass.range(groups, unroll=1):
        group = groups - 1 - number
        start = Int32(0)
        if group > 0:
            start = offsets[group - 1]
        columns = into[1].shape[1] // BOX
        if offsets[group] == start:  # a group without rows has no tiles
            columns = 0
        for column in cutlass.range(columns, unroll=1):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ring.full, 2 * BOX * BOX)
            loads.acquire(group)
            first = start if cutlass.const_expr(mode == "loads") else Int32(0)
            to, from_ = _parts(into, box, first, column)
            cute.copy(into[0], from_[None, 0], to[None, 0], tma_bar_ptr=ring.full, tma_desc_ptr=loads.at(group))
            ring.wait(at)
            at = at.next()
            if cutlass.const_expr(mode == "loads"):
                from_, to = _parts(out, box, Int32(0), column)
                cute.copy(out[0], from_[None, 0], to[None, group])
            else:
                stores.acquire(group)
                from_, to = _parts(out, box, start, column)
                cute.copy(out[0], from_[None, 0], to[None, 0], tma_desc_ptr=stores.at(group))
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=False)


def _parts(pair: tuple[Any, ...], box: cute.Tensor, row: Int32, column: Int32) -> tuple[cute.Tensor, cute.Tensor]:
    """Return the box in shared memory (copy, 0), and the boxes from an element row on in the array (copy, batch)."""
    atom, array = pair
    array = cute.domain_offset((row, 0, 0), array)
    parts = cute.local_tile(array, (BOX, BOX), (0, column, None))
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(box, 0, 2), cute.group_modes(parts, 0, 2)
    )
