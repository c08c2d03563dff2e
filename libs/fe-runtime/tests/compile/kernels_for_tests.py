"""Small kernels that the tests of the compiled-kernel cache build."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32


@cute.kernel
def scale_kernel(x: cute.Tensor, out: cute.Tensor, factor: Float32) -> None:
    thread, _, _ = cute.arch.thread_idx()
    if thread < x.shape[0]:
        out[thread] = x[thread] * factor


@cute.kernel
def indexed_kernel(x: cute.Tensor, out: cute.Tensor) -> None:
    """Reads a local array at an index known only at run time: it lives in the frame, not in registers."""
    thread, _, _ = cute.arch.thread_idx()
    values = cute.make_rmem_tensor((64,), Float32)
    for i in range(64):
        values[i] = x[thread + i]
    total = Float32(0.0)
    for i in cutlass.range(thread):
        total = total + values[(i * 7) % 64]
    out[thread] = total


def scale(arch: str, threads: int = 128) -> tuple[Any, tuple[Any, ...]]:
    """out = x * factor for at most ``threads`` elements."""

    @cute.jit
    def test_scale(x: cute.Tensor, out: cute.Tensor, factor: Float32, stream: Any) -> None:
        scale_kernel(x, out, factor).launch(grid=[1, 1, 1], block=[threads, 1, 1], stream=stream)

    return test_scale, (_vector(), _vector(), Float32(1.0), _stream())


def indexed(arch: str) -> tuple[Any, tuple[Any, ...]]:
    """Two GPU kernels: one with a stack frame, one without."""

    @cute.jit
    def test_indexed(x: cute.Tensor, out: cute.Tensor, factor: Float32, stream: Any) -> None:
        indexed_kernel(x, out).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)
        scale_kernel(x, out, factor).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)

    return test_indexed, (_vector(), _vector(), Float32(1.0), _stream())


def first_hangs(arch: str, folder: str) -> tuple[Any, tuple[Any, ...]]:
    """As ``scale``, but the first process that gets here writes its number into ``folder`` and hangs."""
    mark = Path(folder, "hanging")
    try:
        handle = os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return scale(arch)
    os.write(handle, str(os.getpid()).encode())
    os.close(handle)
    time.sleep(300)
    raise AssertionError("nobody ended the hanging process")


def broken(arch: str) -> tuple[Any, tuple[Any, ...]]:
    """Fails while the kernel is traced."""
    raise RuntimeError("this kernel has no such tile")


def crashing(arch: str) -> tuple[Any, tuple[Any, ...]]:
    """Takes the whole process down."""
    os._exit(42)


def _vector() -> Any:
    return cute.runtime.make_fake_compact_tensor(Float32, (cute.sym_int(),), assumed_align=16)


def _stream() -> Any:
    return cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
