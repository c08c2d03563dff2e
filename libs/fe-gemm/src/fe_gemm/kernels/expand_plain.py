"""Expansion of an e4m3 matrix with plain rows of e8m0 scales to bf16 in memory, for a matrix product that follows.

The floor is each byte once: a code, 1/32 of a scale, and two bytes for each element written. Value times scale is exact
in bf16, but for results below 2^-126.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import BFloat16, Int32, Int64, Uint8, Uint32, cute

from fe_runtime.cute.convert import bf16_products, e4m3_to_bf16, e8m0_to_bf16
from fe_runtime.cute.memory import load_atom, store_atom

__all__ = ["launch_expand"]

VECTOR = 16
"""Neighbouring elements that a thread treats: half of a block along a row."""

THREADS = 256
BLOCK = 32


def launch_expand(codes: cute.Tensor, scales: cute.Tensor, out: cute.Tensor, axis: int, stream: Any) -> None:
    """Launch the expansion of a matrix; called by a launcher.

    Parameters
    ----------
    codes
        (R, C) bytes, C a multiple of 16 (of 32 for ``axis`` 1); rows start at multiples of 16 bytes.
    scales
        (R, C / 32) bytes for ``axis`` 1, (R / 32, C) for ``axis`` 0, anywhere in memory.
    out
        (R, C) bf16; rows start at multiples of 16 bytes.
    axis
        The dimension that is cut into blocks.
    """
    rows, columns = codes.shape
    expand_kernel.set_name_prefix("fe_gemm_expand_plain", remove_cutlass_symbol=True, keep_mangled_name=False)
    expand_kernel(codes, scales, out, axis).launch(
        grid=(Int32(cute.ceil_div(Int64(rows) * (columns // VECTOR), THREADS)), 1, 1),
        block=(THREADS, 1, 1),
        stream=stream,
        preferred_smem_carveout=-1,  # the driver's choice; without it the compiler would ask a GPU
    )


@cute.kernel
def expand_kernel(codes: cute.Tensor, scales: cute.Tensor, out: cute.Tensor, axis: cutlass.Constexpr[int]) -> None:
    """One vector to a thread; 2^32 of them would be more than a GPU's memory."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    vectors = Uint32(codes.shape[1] // VECTOR)
    number = Uint32(block) * THREADS + Uint32(thread)
    quotient = number // vectors
    row, index = Int64(quotient), Int32(number - quotient * vectors)
    if row < codes.shape[0]:
        _expand(codes[row, None], scales, out[row, None], row, index, axis)


def _expand(codes: cute.Tensor, scales: cute.Tensor, out: cute.Tensor, row: Int64, index: Int32, axis: int) -> None:
    """Load, multiply and store vector ``index`` of a row."""
    packed = cute.make_rmem_tensor((VECTOR,), Uint8)
    cute.copy(load_atom(Uint8, 128), cute.local_tile(codes, (VECTOR,), (index,)), packed)
    words = cute.recast_tensor(packed, Int32)
    factors = _factors(scales, row, index, axis)
    values = cute.make_rmem_tensor((VECTOR,), BFloat16)
    target = cute.recast_tensor(values, Int32)
    for i in range(VECTOR // 4):
        for half, pair in enumerate(e4m3_to_bf16(words[i], True)):
            target[2 * i + half] = bf16_products(pair, factors[2 * i + half])
    cute.copy(store_atom(BFloat16, 128), values, cute.local_tile(out, (VECTOR,), (index,)))


def _factors(scales: cute.Tensor, row: Int64, index: Int32, axis: int) -> list[Int32]:
    """Return the scales of a vector's elements as eight words of two bf16."""
    if axis == 1:
        one, _ = e8m0_to_bf16(Int32(scales[row, index * VECTOR // BLOCK]) * 0x0101)
        return [one] * (VECTOR // 2)
    bytes_ = [Int32(scales[row // BLOCK, index * VECTOR + i]) for i in range(VECTOR)]
    words = [bytes_[i] | bytes_[i + 1] << 8 | bytes_[i + 2] << 16 | bytes_[i + 3] << 24 for i in range(0, VECTOR, 4)]
    return [factor for word in words for factor in e8m0_to_bf16(word)]
