"""Kernels that apply one building block to each value of an array, for tests on a GPU."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from fe_runtime.cute.activation import sigmoid, silu, tanh
from fe_runtime.cute.arguments import fake_stream
from fe_runtime.cute.convert import (
    bf16_products,
    block_quotients,
    e2m1_to_bf16,
    e2m1_word,
    e4m3_code,
    e4m3_pair,
    e4m3_to_bf16,
    e5m2_to_bf16,
    e8m0_to_bf16,
    nvfp4_scale,
)

THREADS = 256
OUT = {"sigmoid": Float32, "silu": Float32, "tanh": Float32, "nvfp4_scale": Float32, "quotient": Float32}


def build(arch: str, block: str) -> tuple[Any, tuple[Any, ...]]:
    """Return a launcher of ``out[i] = block(x[i])``; blocks over several values take that many rows of x."""

    @cute.jit
    def apply(x: cute.Tensor, out: cute.Tensor, stream: Any) -> None:
        blocks = cute.ceil_div(out.shape[0], THREADS)
        apply_kernel(block, x, out).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)

    count = cute.sym_int64()
    x = cute.runtime.make_fake_tensor(Float32, (count, rows_of(block)), (rows_of(block), 1), assumed_align=4)
    out = cute.runtime.make_fake_tensor(OUT.get(block, Int32), (count,), (1,), assumed_align=4)
    return apply, (x, out, fake_stream())


def rows_of(block: str) -> int:
    """Values that a block takes at once."""
    return {"e2m1": 8, "quotient": 2, "e4m3_hardware": 2}.get(block, 1)


@cute.kernel
def apply_kernel(block: cutlass.Constexpr[str], x: cute.Tensor, out: cute.Tensor) -> None:
    thread, _, _ = cute.arch.thread_idx()
    group, _, _ = cute.arch.block_idx()
    i = group * THREADS + thread
    if i < out.shape[0]:
        values = [x[i, j] for j in range(rows_of(block))]
        out[i] = one(block, values)


def one(block: str, values: list[Float32]) -> Any:
    """Apply a block to the values of one element."""
    if block == "e4m3_hardware":
        return Int32(e4m3_pair(values[0], values[1], True))
    if block == "e4m3_software":
        return e4m3_code(values[0])
    if block == "e2m1":
        return e2m1_word(values, values)
    if block == "quotient":
        return block_quotients([values[0]], values[1])[0]
    return {"sigmoid": sigmoid, "silu": silu, "tanh": tanh, "nvfp4_scale": nvfp4_scale}[block](values[0])


def build_widening(arch: str, block: str) -> tuple[Any, tuple[Any, ...]]:
    """Return a launcher of ``out[i, :] = block(codes[i])``, words of codes to words of two bf16."""

    @cute.jit
    def widen(codes: cute.Tensor, out: cute.Tensor, stream: Any) -> None:
        blocks = cute.ceil_div(out.shape[0], THREADS)
        widen_kernel(block, codes, out).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)

    count = cute.sym_int64()
    codes = cute.runtime.make_fake_tensor(Int32, (count,), (1,), assumed_align=4)
    words = 4 if block == "e2m1" else 2
    out = cute.runtime.make_fake_tensor(Int32, (count, words), (words, 1), assumed_align=4)
    return widen, (codes, out, fake_stream())


@cute.kernel
def widen_kernel(block: cutlass.Constexpr[str], codes: cute.Tensor, out: cute.Tensor) -> None:
    thread, _, _ = cute.arch.thread_idx()
    group, _, _ = cute.arch.block_idx()
    i = group * THREADS + thread
    if i < out.shape[0]:
        for j, word in enumerate(WIDENING[block](codes[i])):
            out[i, j] = word


WIDENING = {
    "e4m3_hardware": lambda codes: e4m3_to_bf16(codes, True),
    "e4m3_software": lambda codes: e4m3_to_bf16(codes, False),
    "e5m2": e5m2_to_bf16,
    "e2m1": e2m1_to_bf16,
    "e8m0": e8m0_to_bf16,
    "product": lambda codes: [bf16_products(*e8m0_to_bf16(codes)), codes],  # low by high half of the codes
}
