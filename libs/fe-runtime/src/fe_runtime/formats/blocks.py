"""Cutting an array into blocks along one dimension, and the largest magnitude of each block."""

from __future__ import annotations

from dataclasses import dataclass

from fe_runtime.errors import InvalidArgumentError, explain
from fe_runtime.formats import _backend as backend
from fe_runtime.formats._backend import Array

__all__ = ["Blocks", "cut"]


@dataclass(frozen=True, slots=True)
class Blocks:
    """An fp32 array cut along ``axis``: its dimension of ``extent`` became ``(S, V)``, padded with zeros.

    What belongs to blocks (scales, factors) keeps a dimension of 1 in place of ``V`` until :meth:`per_block`.
    """

    values: Array
    axis: int
    extent: int

    def amax(self, *, propagate_nan: bool = False) -> Array:
        """Return the largest magnitude of each block. NaN is left out (0 if there is nothing else), or wins."""
        xp = backend.namespace(self.values)
        # Magnitudes are ordered as their bit patterns are, and XLA does not flush integers.
        bits = backend.bits_of(self.values) & 0x7FFFFFFF
        if not propagate_nan:
            bits = xp.where(bits > 0x7F800000, 0, bits)
        return backend.float_of_bits(xp.max(bits, axis=self.axis + 1, keepdims=True))

    def join(self, values: Array) -> Array:
        """Return values of the blocks in the shape of the array that was cut."""
        shape = values.shape
        whole = shape[self.axis] * shape[self.axis + 1]
        joined = backend.namespace(values).reshape(values, (*shape[: self.axis], whole, *shape[self.axis + 2 :]))
        return joined[(*(slice(None),) * self.axis, slice(0, self.extent))]

    def per_block(self, values: Array) -> Array:
        """Return one value per block, without the dimension of 1."""
        shape = values.shape
        return backend.namespace(values).reshape(values, (*shape[: self.axis + 1], *shape[self.axis + 2 :]))


def cut(operation: str, x: Array, vec: int, axis: int) -> Blocks:
    """Cut ``x``, taken as fp32, into blocks of ``vec`` along ``axis``.

    Raises
    ------
    InvalidArgumentError
        No such axis, or ``vec < 1``.
    """
    axis = backend.axis_of(operation, x, axis)
    if vec < 1:
        raise InvalidArgumentError(explain(operation, "vec", "be >= 1", vec))
    extent = x.shape[axis]
    count = -(-extent // vec)
    padded = backend.pad(backend.as_float32(x), axis, count * vec)
    shape = (*padded.shape[:axis], count, vec, *padded.shape[axis + 1 :])
    return Blocks(backend.namespace(padded).reshape(padded, shape), axis, extent)
