"""What a thread of the gradients' kernels works on: its setup, its place among the rows, and their operands."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, cute

from fe_norm.launch_backward import BackwardLaunch, BackwardProblem
from fe_runtime.cute.memory import access_bits, load_atom
from fe_runtime.cute.row_ring import RowRing
from fe_runtime.cute.rows import RowPartition, load_vector

__all__ = ["READ", "LoadedRow", "Place", "Setup", "StagedRows", "Vectors"]

READ = ("dout", "dresidual", "x", "w", "bias", "rstd")
WRITTEN = ("dx", "dw", "dbias", "w_sums", "bias_sums")
OPERANDS = (*READ, *WRITTEN, "eps", "stream")


@dataclass(frozen=True, slots=True)
class Setup:
    """All that is static in a compilation."""

    arch: str
    problem: BackwardProblem
    launch: BackwardLaunch

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands that are present, in order."""
        problem = self.problem
        weight, bias = problem.weight_dtype is not None, problem.bias_dtype is not None
        optional = {
            "dresidual": problem.has_residual,
            **dict.fromkeys(("w", "dw", "w_sums"), weight),
            **dict.fromkeys(("bias", "dbias", "bias_sums"), bias),
            "rstd": problem.has_rstd,
            "eps": not problem.has_rstd,
        }
        return tuple(name for name in OPERANDS if optional.get(name, True))

    @property
    def partition(self) -> RowPartition:
        """The share of a thread in a row."""
        how = self.launch
        return RowPartition(self.problem.columns, how.vector, how.threads_per_row, how.chunk)

    @property
    def name(self) -> str:
        """The operation, for the names that profilers show."""
        return "rms_norm_backward" if self.problem.activation is None else "rmsnorm_silu_backward"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a thread works: its block, its place in the block and in its row, its group, and the group's rows.

    ``count`` is how many rows the first group of the block has; the others may have one less.
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


@dataclass(frozen=True, slots=True)
class Vectors:
    """A thread's vector of each operand, in float32."""

    dout: cute.TensorSSA
    x: cute.TensorSSA
    dresidual: cute.TensorSSA | None
    w: cute.TensorSSA | None
    bias: cute.TensorSSA | None


@dataclass(frozen=True, slots=True)
class StagedRows:
    """A group's next rows in shared memory: dout, x and dresidual, beside weight and bias."""

    sources: tuple[cute.Tensor | None, ...]
    rings: tuple[RowRing | None, ...]
    parameters: tuple[cute.Tensor | None, ...]
    lane: Int32

    @staticmethod
    def of(
        setup: Setup,
        allocator: cutlass.memory.SmemAllocator,
        place: Place,
        sources: tuple[cute.Tensor | None, ...],
        parameters: tuple[cute.Tensor | None, ...],
    ) -> StagedRows:
        """Make room for all rows, and bring the parameters."""
        how, problem = setup.launch, setup.problem
        alignments = (problem.dout_alignment, problem.x_alignment, problem.x_alignment)
        rings = tuple(
            None
            if source is None
            else RowRing.of(
                allocator, source.element_type, setup.partition, (how.threads, how.stages), place.thread, alignment
            )
            for source, alignment in zip(sources, alignments, strict=True)
        )
        rooms = [None if array is None else _parameter(setup, allocator, place, array) for array in parameters]
        cute.arch.sync_threads()
        return StagedRows(sources, rings, tuple(rooms), place.lane)

    def fetch(self, row: Int64, stage: Int32 | int) -> None:
        """Start to copy a row."""
        for source, ring in zip(self.sources, self.rings, strict=True):
            if ring is not None:
                ring.fetch(source[row, None], stage)

    def vectors(self, stage: Int32, j: int) -> Vectors:
        """Read vector ``j`` of the thread's share of a row that has arrived."""
        values = [None if ring is None else ring.slot(j, stage).load().to(Float32) for ring in self.rings]
        shares = [None if room is None else room[None, j, self.lane].load().to(Float32) for room in self.parameters]
        return Vectors(*values, *shares)

    def room(self, setup: Setup) -> cute.Tensor:
        """Return the memory of x as float32 ``(columns, groups)``, columns up to where the last thread's reach."""
        how = setup.launch
        columns = how.chunk * how.threads_per_row * how.vector
        pointer = cute.recast_ptr(self.rings[1].slots.iterator, dtype=Float32)
        return cute.make_tensor(pointer, cute.make_layout((columns, how.groups)))


@dataclass(frozen=True, slots=True)
class LoadedRow:
    """A row in global memory: dout, x and dresidual, beside weight and bias; read whenever it is needed."""

    setup: Setup
    lane: Int32
    rows: tuple[cute.Tensor | None, ...]
    parameters: tuple[cute.Tensor | None, ...]

    def vectors(self, chunk: Int32, j: int) -> Vectors:
        """Load vector ``j`` of the thread's share of a chunk."""
        problem, partition = self.setup.problem, self.setup.partition
        index = partition.index(self.lane, chunk, j)
        alignments = (problem.dout_alignment, *[problem.x_alignment] * 2, *[problem.weight_alignment] * 2)
        found = []
        for array, alignment in zip((*self.rows, *self.parameters), alignments, strict=True):
            if array is None:
                found.append(None)
                continue
            dtype = array.element_type
            atom = load_atom(dtype, access_bits(dtype, partition.vector, alignment))
            found.append(load_vector(array, index, j, partition, atom).load().to(Float32))
        return Vectors(*found)


def _parameter(setup: Setup, allocator: cutlass.memory.SmemAllocator, place: Place, array: cute.Tensor) -> cute.Tensor:
    """Bring weight or bias to shared memory ``(vector, count, threads of a row)``; the next barrier completes it."""
    partition, dtype = setup.partition, array.element_type
    vector, count, threads = partition.vector, partition.count, partition.threads
    layout = cute.make_layout((vector, count, threads), stride=(1, threads * vector, vector))
    room = allocator.allocate_tensor(dtype, layout, byte_alignment=16)
    atom = load_atom(dtype, access_bits(dtype, vector, setup.problem.weight_alignment))
    _copy_parameter(place, array, room, partition, atom)
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
