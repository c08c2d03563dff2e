"""Matrices as arguments of a launcher: stand-ins while it is compiled, and strides that TMA can use."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int64, cute

__all__ = ["aligned", "fake_matrices"]

ALIGNMENT = 16
"""Bytes of which the start of every line of a matrix is a multiple."""


def fake_matrices(
    dtype: type[cutlass.Numeric], first: Any, second: Any, batches: Any, second_is_contiguous: bool
) -> cute.Tensor:
    """Return matrices that are contiguous along one dimension, with any strides along the others."""
    line, matrix = cute.sym_int64(), cute.sym_int64()
    stride = (line, 1, matrix) if second_is_contiguous else (1, line, matrix)
    return cute.runtime.make_fake_tensor(dtype, (first, second, batches), stride, assumed_align=ALIGNMENT)


def aligned(array: cute.Tensor, second_is_contiguous: bool) -> cute.Tensor:
    """Return matrices with strides that are known to be multiples of 16 bytes.

    The caller has checked that. But what a framework says of a dimension of extent 1 means nothing: its stride is
    replaced.
    """
    first, second, batches = array.shape
    step = 8 * ALIGNMENT // array.element_type.width
    lines, length = (first, second) if second_is_contiguous else (second, first)
    given = array.stride[0 if second_is_contiguous else 1]
    line = _unless_one(lines, given, (Int64(length) + (step - 1)) // step * step)
    matrix = _unless_one(batches, array.stride[2], line * lines)
    line, matrix = (cute.assume(stride, divby=step) for stride in (line, matrix))
    stride = (line, 1, matrix) if second_is_contiguous else (1, line, matrix)
    return cute.make_tensor(array.iterator, cute.make_layout(array.shape, stride=stride))


def _unless_one(extent: Any, stride: Any, otherwise: Int64) -> Int64:
    one = Int64(extent == 1)
    return Int64(stride) * (1 - one) + otherwise * one
