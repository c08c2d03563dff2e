"""What is static about an epilogue: which arrays, in which order, with which shared memory, and what runs around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, cute

from fe_gemm.kernels.sm90.arguments import fake_matrices
from fe_gemm.planning.problem import CELL, Problem, Sheet
from fe_gemm.planning.tiles import CELL_BYTES, CONSUMERS, UPSTREAM_BUFFERS, Launch
from fe_runtime.cute.types import numeric, storage

from . import amax, column_sums, row_sums
from .stage import outlet_atom
from .upstream import inlet_atom

__all__ = ["Arrays", "Epilogue", "Shared"]

Arrays = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shared:
    """What an epilogue has in shared memory: buffers of all warp groups for what leaves, and for what comes in, with
    barriers; and room for sums of columns."""

    outgoing: cute.Pointer
    incoming: cute.Pointer | None
    full: cute.Pointer | None
    sums: cute.Pointer | None = None


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What is static: which arrays, in which order, with which shared memory."""

    problem: Problem
    launch: Launch

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all arrays and scalars besides A and B, in the order of a kernel's arguments."""
        how = self.problem
        return (*how.inputs, *how.results, *how.scratch, *how.scalars)

    @property
    def sheets(self) -> dict[str, Sheet]:
        """The matrices that TMA moves."""
        upstream = self.problem.upstream
        return {sheet.name: sheet for sheet in (*self.problem.outputs, *([] if upstream is None else [upstream]))}

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The (row, column) of the first cell of each strip of a warp group's tile, in their order."""
        rows, columns = self.launch.group_rows // CELL, self.launch.group_columns // CELL
        return tuple((down, right) for down in range(rows) for right in range(0, columns, self.problem.strip))

    @property
    def upstream_places(self) -> tuple[tuple[int, int], ...]:
        """The (row, column) of each cell of a tile in the matrix that comes in, in the order of the strips."""
        upstream = self.problem.upstream
        count = 1 if upstream is None else upstream.columns // CELL
        return tuple((down, right * count + i) for down, right in self.places for i in range(count))

    def fake_arguments(self, m: Any, n: Any, batches: Any) -> tuple[Any, ...]:
        """Return stand-ins for what :attr:`names` lists, for matrices of the extents that the symbols stand for."""
        return tuple(_fake(self, name, m, n, batches) for name in self.names)

    def prepare(self, arrays: Arrays, stream: Any) -> None:
        """Launch what has to run before the product."""
        if self.problem.amax and not self.problem.accumulates:
            amax.preset(arrays["amax"], stream)

    def complete(self, arrays: Arrays, stream: Any) -> None:
        """Launch what has to run after the product; of groups of rows ``arrays`` has the ``offsets`` too."""
        offsets = arrays.get("offsets")
        if "partials" in self.names:
            row_sums.add_up(arrays["partials"], arrays["dprob"], self.problem.adds_dprob, stream, offsets)
        if "dbias" in self.names:
            rows, adds = Int32(arrays["c"].shape[0]), self.problem.adds_dbias
            column_sums.add_up(arrays["column_partials"], arrays["dbias"], offsets, rows, adds, stream)

    def parameters(self, arrays: Arrays) -> tuple[Any, ...]:
        """Return what the kernel needs, entry by entry of :attr:`names`: of matrices a TMA copy and what it sees."""
        return tuple(self._parameter(name, arrays[name]) for name in self.names)

    def allocate(self, allocator: Any) -> Shared:
        """Return the shared memory; :meth:`initialise` makes it usable."""
        upstream, sums = self.problem.upstream, None
        outgoing = allocator.allocate(CONSUMERS * self.launch.store_buffers * CELL_BYTES, 1024)
        if self.problem.sum_bytes:
            sums = allocator.allocate(CONSUMERS * self.problem.sum_bytes, 16)
        if upstream is None:
            return Shared(outgoing, None, None, sums)
        incoming = allocator.allocate(CONSUMERS * UPSTREAM_BUFFERS * upstream.cell_bytes, 1024)
        return Shared(outgoing, incoming, allocator.allocate_array(Int64, CONSUMERS * UPSTREAM_BUFFERS), sums)

    @cute.jit
    def initialise(self, shared: Shared) -> None:
        """Set the barriers up; called by one warp, with a fence and a barrier over the block before any other use."""
        if cutlass.const_expr(shared.full is not None):
            with cute.arch.elect_one():
                for i in range(CONSUMERS * UPSTREAM_BUFFERS):
                    cute.arch.mbarrier_init(shared.full + i, 1)

    def _parameter(self, name: str, array: Any) -> Any:
        sheet = self.sheets.get(name)
        if sheet is None:
            return array
        return inlet_atom(sheet, array) if name == "upstream" else outlet_atom(sheet, array)


def _fake(how: Epilogue, name: str, m: Any, n: Any, batches: Any) -> Any:
    """Return the stand-in for an array or a scalar."""
    if name in how.sheets:
        sheet = how.sheets[name]
        halved = sheet.columns < CELL or sheet.bits < 8
        return fake_matrices(storage(sheet.dtype), m, cute.sym_int() if halved else n, batches, sheet.major == "n")
    if name == "alpha":
        return Float32(1.0)
    make, real = cute.runtime.make_fake_tensor, numeric("float32")
    if name in ("prob", "dprob"):
        return make(real, (m, 1, batches), tuple(cute.sym_int64() for _ in range(3)), assumed_align=4)
    if name == "partials":
        line, matrix = cute.sym_int64(), cute.sym_int64()
        return make(real, (cute.sym_int(), batches, m), (matrix, line, 1), assumed_align=4)
    if name == "scales":
        return make(Uint8, (cute.sym_int64(),), (1,), assumed_align=16)
    return make(real, (1,), (1,), assumed_align=4)
