"""What the kernels of the Engram gate share: how operands look to them, and a stream of a token as vectors."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from fe_attention.planning.engram import Problem
from fe_runtime.cute.memory import access_bits, load_atom, store_atom

__all__ = ["FLOOR", "atom_of", "fake_floats", "fake_streams", "stream_of", "writer_of"]

FLOOR = 1e-6
"""Least magnitude of which the gate takes the root."""


def fake_streams(dtype: type[cutlass.Numeric], tokens: Any, streams: int, width: int, alignment: int) -> cute.Tensor:
    """Return (tokens, streams, width), contiguous within a token."""
    stride = cute.sym_int64(divisibility=max(1, 8 * alignment // dtype.width))
    shape = (tokens, streams, width)
    return cute.runtime.make_fake_tensor(dtype, shape, (stride, width, 1), assumed_align=alignment)


def fake_floats(streams: int, width: int, alignment: int) -> cute.Tensor:
    """Return (streams, width), float32, contiguous."""
    return cute.runtime.make_fake_tensor(Float32, (streams, width), (width, 1), assumed_align=alignment)


def stream_of(kv: cute.Tensor, token: Int64, number: Int32 | int, width: int) -> cute.Tensor:
    """Return a key of a token or, numbered last, its value: (width,)."""
    return cute.local_tile(kv[token, None], (width,), (number,))


def atom_of(values: cute.Tensor, problem: Problem, vector: int) -> cute.CopyAtom:
    """Return the load of ``vector`` neighbours."""
    dtype = values.element_type
    return load_atom(dtype, access_bits(dtype, vector, problem.vector * dtype.width // 8))


def writer_of(values: cute.Tensor, problem: Problem, vector: int) -> cute.CopyAtom:
    """Return the store of ``vector`` neighbours."""
    dtype = values.element_type
    return store_atom(dtype, access_bits(dtype, vector, problem.vector * dtype.width // 8))
