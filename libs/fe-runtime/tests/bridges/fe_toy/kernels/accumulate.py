"""Two launchers in the form of ``fe_runtime.jax.call``, for one block of 32 threads."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute


@cute.kernel
def _double(x: cute.Tensor, y: cute.Tensor) -> None:
    thread, _, _ = cute.arch.thread_idx()
    y[thread] = x[thread] + x[thread]


@cute.kernel
def _add(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor, factor: cutlass.Constexpr[int]) -> None:
    thread, _, _ = cute.arch.thread_idx()
    y[thread] = y[thread] + x[thread]
    z[thread] = z[thread] + x[thread] * factor


@cute.jit
def double(stream: Any, x: cute.Tensor, y: cute.Tensor) -> None:
    """y = 2 x"""
    _double(x, y).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)


@cute.jit
def add(stream: Any, x: cute.Tensor, y: cute.Tensor, z: cute.Tensor, *, factor: cutlass.Constexpr[int]) -> None:
    """y += x, z += factor x"""
    _add(x, y, z, factor).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)
