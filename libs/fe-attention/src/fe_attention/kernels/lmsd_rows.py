"""What a thread of the gradient's kernel works on: its setup, its place among the rows, and their operands."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int8, Int32, Int64, cute

from fe_attention.planning.lmsd_backward import VECTOR, Launch, Problem
from fe_runtime.cute.memory import load_atom
from fe_runtime.cute.rounding import bf16_values
from fe_runtime.cute.row_ring import RowRing
from fe_runtime.cute.rows import RowPartition, load_vector

__all__ = [
    "BYTES",
    "NORM",
    "READ",
    "SUMS",
    "DirectRows",
    "Place",
    "Setup",
    "StagedRows",
    "U",
    "X",
    "bf16",
    "both",
    "unpacked",
]

NORM, X, U = range(3)
"""Planes of random numbers, and bits of the mask: of the product with the norm, of x, of u."""
BYTES = 16
"""At a multiple of which every row of bf16 starts."""

READ = ("dy", "x", "u", "w", "b", "mean", "rstd", "mask")
WRITTEN = ("dx", "du", "dw", "db")
SUMS = ("w_sums", "b_sums")

Operands = tuple[cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor | None]
"""dy, x, u and the mask."""


@dataclass(frozen=True, slots=True)
class Setup:
    """All that is static in a compilation."""

    arch: str
    problem: Problem
    launch: Launch

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands that are present, in order."""
        problem = self.problem
        absent = () if problem.has_dropout else ("mask", "p")
        absent += () if problem.compute_dweight else ("dw", "w_sums")
        return tuple(name for name in (*READ, *WRITTEN, *SUMS, "p", "stream") if name not in absent)

    @property
    def partition(self) -> RowPartition:
        """The share of a thread in a row."""
        how = self.launch
        return RowPartition(self.problem.columns, VECTOR, how.threads_per_row, how.chunk)

    @property
    def planes(self) -> tuple[int, ...]:
        """The parts of a row of dy, in order."""
        problem = self.problem
        return (*((U,) if problem.concat_u else ()), *((X,) if problem.concat_x else ()), NORM)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a thread works: its block, its place in the block and in its row, its group, and the group's rows.

    ``count`` is how many rows the first group of the block has; the others may have one less, and then work on the last
    row of all once more, without effect.
    """

    block: Int32
    thread: Int32
    lane: Int32
    group: Int32
    first: Int64
    step: Int64
    rows: Int64
    count: Int32

    @staticmethod
    def here(setup: Setup, x: cute.Tensor) -> Place:
        """Ask the hardware."""
        how = setup.launch
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        lane, group = thread % how.threads_per_row, thread // how.threads_per_row
        start, step, rows = Int64(block) * how.groups, Int64(blocks) * how.groups, Int64(x.shape[0])
        return Place(block, thread, lane, group, start + group, step, rows, Int32((rows - 1 - start) // step) + 1)

    def row(self, i: Int32) -> Int64:
        """Number of the group's row ``i``; past the last one if it has no such row."""
        return self.first + Int64(i) * self.step

    def clamped(self, row: Int64) -> Int64:
        """Return a row that exists."""
        return cutlass.min(row, self.rows - 1)


@dataclass(frozen=True, slots=True)
class StagedRows:
    """A group's next rows in shared memory, beside weight and bias."""

    setup: Setup
    lane: Int32
    sources: Operands
    rings: dict[str, RowRing]
    parameters: dict[str, cute.Tensor]

    @staticmethod
    def of(
        setup: Setup,
        allocator: cutlass.memory.SmemAllocator,
        place: Place,
        sources: Operands,
        parameters: tuple[cute.Tensor, cute.Tensor],
    ) -> StagedRows:
        """Make room for all rows, and bring the parameters."""
        how = setup.launch
        shape = how.threads, how.stages
        names = ["x", "u", *(f"dy{plane}" for plane in setup.planes)]
        rings = {name: RowRing.of(allocator, BFloat16, setup.partition, shape, place.thread, BYTES) for name in names}
        if setup.problem.has_dropout:
            rings["mask"] = RowRing.of(allocator, Int8, setup.partition, shape, place.thread, VECTOR)
        rooms = {
            name: _parameter(setup, allocator, place, array) for name, array in zip(("w", "b"), parameters, strict=True)
        }
        cute.arch.sync_threads()
        return StagedRows(setup, place.lane, sources, rings, rooms)

    def fetch(self, row: Int64, stage: Int32 | int) -> None:
        """Start to copy a row."""
        dy, x, u, mask = (None if source is None else source[row, None] for source in self.sources)
        self.rings["x"].fetch(x, stage)
        self.rings["u"].fetch(u, stage)
        for number, plane in enumerate(self.setup.planes):
            self.rings[f"dy{plane}"].fetch(dy, stage, number * self.setup.partition.vectors)
        if mask is not None:
            self.rings["mask"].fetch(mask, stage)

    def values(self, name: str, _row: Int64, stage: Int32, j: int) -> list[Float32]:
        """Return vector ``j`` of the thread's share of an operand, in float32."""
        if name in self.parameters:
            return unpacked(self.parameters[name][None, j, self.lane])
        return unpacked(self.rings[name].slot(j, stage))

    def mask(self, _row: Int64, stage: Int32, j: int) -> list[Int32]:
        """Return the mask of vector ``j`` as two words."""
        words = cute.recast_tensor(self.rings["mask"].slot(j, stage), Int32)
        return [words[n] for n in range(VECTOR // 4)]

    def room(self, setup: Setup) -> cute.Tensor:
        """Return the memory of x as float32 ``(columns, groups)``, columns up to where the last thread's reach."""
        how = setup.launch
        columns = how.chunk * how.threads_per_row * VECTOR
        pointer = cute.recast_ptr(self.rings["x"].slots.iterator, dtype=Float32)
        return cute.make_tensor(pointer, cute.make_layout((columns, how.groups)))


@dataclass(frozen=True, slots=True)
class DirectRows:
    """Rows in global memory, read whenever they are needed: for those that do not fit into shared memory."""

    setup: Setup
    lane: Int32
    sources: Operands
    parameters: tuple[cute.Tensor, cute.Tensor]

    @staticmethod
    def of(
        setup: Setup,
        _allocator: cutlass.memory.SmemAllocator,
        place: Place,
        sources: Operands,
        parameters: tuple[cute.Tensor, cute.Tensor],
    ) -> DirectRows:
        """Keep the arrays."""
        return DirectRows(setup, place.lane, sources, parameters)

    def values(self, name: str, row: Int64, _stage: Int32, j: int) -> list[Float32]:
        """Return vector ``j`` of the thread's share of an operand, in float32."""
        dy, x, u, _ = self.sources
        skipped = 0
        if name in ("w", "b"):
            source = self.parameters[name == "b"]
        elif name in ("x", "u"):
            source = (x if name == "x" else u)[row, None]
        else:
            source = dy[row, None]
            skipped = self.setup.planes.index(int(name.removeprefix("dy"))) * self.setup.partition.vectors
        source = cute.domain_offset((skipped * VECTOR,), source) if skipped else source
        return unpacked(self._load(source, j, BYTES))

    def mask(self, row: Int64, _stage: Int32, j: int) -> list[Int32]:
        """Return the mask of vector ``j`` as two words."""
        words = cute.recast_tensor(self._load(self.sources[3][row, None], j, VECTOR), Int32)
        return [words[n] for n in range(VECTOR // 4)]

    def _load(self, source: cute.Tensor, j: int, size: int) -> cute.Tensor:
        partition = self.setup.partition
        atom = load_atom(source.element_type, 8 * size)
        return load_vector(source, partition.index(self.lane, 0, j), j, partition, atom)


def unpacked(vector: cute.Tensor) -> list[Float32]:
    """Return a vector of bf16 in float32, with one instruction for each value."""
    words = cute.recast_tensor(vector, Int32).load()
    return [value for n in range(cute.size(words.shape)) for value in bf16_values(words[n])]


def bf16(results: list[Float32]) -> cute.Tensor:
    """Return values in bf16 registers, rounded to nearest even."""
    wide = cute.make_rmem_tensor((len(results),), Float32)
    for n, result in enumerate(results):
        wide[n] = result
    items = cute.make_rmem_tensor((len(results),), BFloat16)
    items.store(wide.load().to(BFloat16))
    return items


def both(a: Boolean | bool, b: Boolean | bool) -> Boolean | bool:
    """Return ``a and b``, decided while compiling where one is a ``bool``."""
    if isinstance(a, bool):
        return b if a else False
    if isinstance(b, bool):
        return a if b else False
    return a & b


def _parameter(setup: Setup, allocator: cutlass.memory.SmemAllocator, place: Place, array: cute.Tensor) -> cute.Tensor:
    """Bring weight or bias to shared memory ``(vector, count, threads of a row)``; the next barrier completes it."""
    partition = setup.partition
    vector, count, threads = partition.vector, partition.count, partition.threads
    layout = cute.make_layout((vector, count, threads), stride=(1, threads * vector, vector))
    room = allocator.allocate_tensor(BFloat16, layout, byte_alignment=16)
    _copy_parameter(place, array, room, partition, load_atom(BFloat16, 8 * BYTES))
    return room


@cute.jit
def _copy_parameter(
    place: cutlass.Constexpr[Place],
    array: cute.Tensor,
    room: cute.Tensor,
    partition: cutlass.Constexpr[RowPartition],
    atom: cute.CopyAtom,
) -> None:
    if place.group == 0:
        for j in cutlass.range_constexpr(partition.count):
            values = load_vector(array, partition.index(place.lane, 0, j), j, partition, atom)
            room[None, j, place.lane].store(values.load())
