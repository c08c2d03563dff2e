"""Stand-ins for the arguments of a launcher while it is compiled: what is fixed and what a call may change."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute

__all__ = ["fake_rows", "fake_stream", "fake_vector"]


def fake_rows(dtype: type[cutlass.Numeric], rows: Any, columns: int, alignment: int) -> cute.Tensor:
    """Return a matrix of any number of rows, unit inner stride, whose rows all start at ``alignment`` bytes.

    ``rows`` is a ``cute.sym_int64()``; operands that share it must have the same number of rows.
    """
    stride = cute.sym_int64(divisibility=max(1, 8 * alignment // dtype.width))
    return cute.runtime.make_fake_tensor(dtype, (rows, columns), (stride, 1), assumed_align=alignment)


def fake_vector(dtype: type[cutlass.Numeric], size: int, alignment: int) -> cute.Tensor:
    """Return a contiguous vector of fixed size."""
    return cute.runtime.make_fake_tensor(dtype, (size,), (1,), assumed_align=alignment)


def fake_stream() -> Any:
    """Return the stream of the caller's environment: a call does not pass it."""
    return cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
