"""Sums of slices of K, added in the order of the slices: the second kernel of a product that was cut along K."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from fe_runtime.cute.memory import load_atom, store_atom

__all__ = ["launch_addition"]

ADDED = 4
"""Neighbouring results of a thread."""

THREADS = 128


def launch_addition(sums: cute.Tensor, out: cute.Tensor, slices: Int32, stream: Any) -> None:
    """Launch out[m, n, 0] = sum over slices of sums[slice M + m, n]; called by a launcher.

    Rows of both start at multiples of 16 bytes.
    """
    rows, columns, _ = out.shape
    add_slices_kernel(sums, out, slices).launch(
        grid=(cute.ceil_div(columns, THREADS * ADDED), rows, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.kernel
def add_slices_kernel(sums: cute.Tensor, out: cute.Tensor, slices: Int32) -> None:
    """Add neighbours in the order of the slices."""
    thread, _, _ = cute.arch.thread_idx()
    block, row, _ = cute.arch.block_idx()
    index = block * THREADS + thread
    if index * ADDED < out.shape[1]:
        total = cute.make_rmem_tensor((ADDED,), Float32)
        total.fill(0.0)
        for slice_ in cutlass.range(slices, unroll=4):
            values = cute.make_rmem_tensor((ADDED,), Float32)
            source = sums[slice_ * out.shape[0] + row, None]
            cute.copy(load_atom(Float32, 128), cute.local_tile(source, (ADDED,), (index,)), values)
            total.store(total.load() + values.load())
        result = cute.make_rmem_tensor((ADDED,), out.element_type)
        result.store(total.load().to(out.element_type))
        target = cute.local_tile(out[row, None, 0], (ADDED,), (index,))
        cute.copy(store_atom(out.element_type, ADDED * out.element_type.width), result, target)


add_slices_kernel.set_name_prefix("fe_gemm_add_slices", remove_cutlass_symbol=True, keep_mangled_name=False)
