"""A plain kernel of ``scale_clamp``: one block a row, one thread a column."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, cute

from fe_runtime.cute.types import numeric, storage


def build(arch: str, *, dtype: str, out_dtype: str, columns: int, bias: bool) -> tuple[Any, tuple[Any, ...]]:
    rows = cute.sym_int()
    x = cute.runtime.make_fake_tensor(numeric(dtype), (rows, columns), (cute.sym_int64(), 1), assumed_align=4)
    b = cute.runtime.make_fake_compact_tensor(numeric(dtype), (columns,))
    y = cute.runtime.make_fake_compact_tensor(storage(out_dtype), (rows, columns), stride_order=(1, 0))
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    fp8 = storage(out_dtype) is cutlass.Uint8

    @cute.kernel
    def kernel(x: cute.Tensor, b: cute.Tensor | None, y: cute.Tensor, scale: Float32, limit: Float32) -> None:
        row, _, _ = cute.arch.block_idx()
        first, _, _ = cute.arch.thread_idx()
        out = cute.recast_tensor(y, cutlass.Float8E4M3FN) if cutlass.const_expr(fp8) else y
        for column in cutlass.range(first, columns, 128):
            z = x[row, column].to(Float32) * scale
            if cutlass.const_expr(b is not None):
                z = z + b[column].to(Float32)
            if z > limit:
                z = limit
            if z < -limit:
                z = -limit
            out[row, column] = z.to(out.element_type)

    @cute.jit
    def toy_scale_clamp(*operands: Any) -> None:
        if cutlass.const_expr(bias):
            given, shift, made, scale, limit, where = operands
        else:
            given, made, scale, limit, where = operands
            shift = None
        kernel(given, shift, made, scale, limit).launch(grid=[given.shape[0], 1, 1], block=[128, 1, 1], stream=where)

    operands = (x, b, y) if bias else (x, y)
    return toy_scale_clamp, (*operands, Float32(1.0), Float32(1.0), stream)
