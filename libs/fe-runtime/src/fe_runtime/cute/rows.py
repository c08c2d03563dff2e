"""How the threads of a group share one row, and how a row moves between memory and registers."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, cute

__all__ = ["RowPartition", "load_share", "load_vector", "narrow_again", "store_vector"]


@dataclass(frozen=True, slots=True)
class RowPartition:
    """The share of each thread of a group in a row of ``columns`` values.

    A row is cut into chunks of ``count * threads`` vectors of ``vector`` neighbours. Vector ``j`` of thread ``lane``
    in a chunk is number ``(chunk * count + j) * threads + lane`` of the row, so that neighbouring threads touch
    neighbouring memory. ``vector`` divides ``columns``.
    """

    columns: int
    vector: int
    threads: int
    count: int

    @property
    def vectors(self) -> int:
        """Vectors in the row."""
        return self.columns // self.vector

    @property
    def chunks(self) -> int:
        """Chunks in the row, the last of them possibly past its end."""
        return -(-self.vectors // (self.threads * self.count))

    def index(self, lane: Int32, chunk: Int32 | int, j: int) -> Int32:
        """Number in the row of vector ``j`` of thread ``lane`` in a chunk."""
        return lane + (chunk * self.count + j) * self.threads

    def inside(self, index: Int32, j: int) -> Boolean | bool:
        """Whether vector ``j`` with this number lies in the row; ``True`` where it does for every thread and chunk."""
        whole = ((self.chunks - 1) * self.count + j + 1) * self.threads <= self.vectors
        return True if whole else index < self.vectors


def load_share(
    row: cute.Tensor, lane: Int32, chunk: Int32 | int, partition: RowPartition, atom: cute.CopyAtom
) -> cute.Tensor:
    """Load a thread's share of a chunk into registers ``(vector, count)``; what lies past the end of the row is 0.

    All loads are issued before the first result is needed.
    """
    share = cute.make_rmem_tensor((partition.vector, partition.count), row.element_type)
    for j in range(partition.count):
        _load(share[None, j], row, partition.index(lane, chunk, j), j, partition, atom)
    return share


def load_vector(row: cute.Tensor, index: Int32, j: int, partition: RowPartition, atom: cute.CopyAtom) -> cute.Tensor:
    """Load vector ``j`` of a thread's share, number ``index`` of the row, or 0 past its end."""
    values = cute.make_rmem_tensor((partition.vector,), row.element_type)
    _load(values, row, index, j, partition, atom)
    return values


@cute.jit
def _load(
    values: cute.Tensor,
    row: cute.Tensor,
    index: Int32,
    j: cutlass.Constexpr[int],
    partition: cutlass.Constexpr[RowPartition],
    atom: cute.CopyAtom,
) -> None:
    inside = partition.inside(index, j)
    if cutlass.const_expr(inside is True):
        cute.copy(atom, _vector(row, index, partition), values)
    else:
        values.fill(0.0)
        if inside:
            cute.copy(atom, _vector(row, index, partition), values)


@cute.jit
def store_vector(
    values: cute.Tensor,
    row: cute.Tensor,
    index: Int32,
    inside: Boolean | bool,
    partition: cutlass.Constexpr[RowPartition],
    atom: cute.CopyAtom,
) -> None:
    """Store vector ``index`` of a row if it is ``inside`` (a ``bool`` decides while compiling)."""
    if cutlass.const_expr(isinstance(inside, bool)):
        if cutlass.const_expr(inside):
            cute.copy(atom, values, _vector(row, index, partition))
    else:
        if inside:
            cute.copy(atom, values, _vector(row, index, partition))


@cute.jit
def narrow_again(values: cute.Tensor) -> cute.Tensor:
    """Return 16-bit registers unchanged, but so that the compiler cannot see that they are the same.

    Otherwise it keeps the float32 form of a row from its first use to its last, which takes twice the registers.
    """
    if cutlass.const_expr(values.element_type.width != 16 or cute.size(values.shape) % 2 != 0):
        hidden = values
    else:
        hidden = cute.make_rmem_tensor(values.shape, values.element_type)
        source, target = cute.recast_tensor(values, Int32), cute.recast_tensor(hidden, Int32)
        for i in cutlass.range_constexpr(cute.size(source.shape)):
            target[i] = cute.arch.inline_ptx(
                "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[source[i]]
            )
    return hidden


def _vector(row: cute.Tensor, index: Int32, partition: RowPartition) -> cute.Tensor:
    return cute.local_tile(row, (partition.vector,), (index,))
