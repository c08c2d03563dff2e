"""What becomes of the accumulators of a tile: the static side, :class:`Epilogue`, and a thread's, :class:`Finisher`.

A tile is finished strip by strip, one cell of accumulators or two that lie side by side: X is scaled, stored if it is
wanted, activated; the result is counted, quantised and stored. Nothing of a strip outlives it but a few sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint8, cute

from fe_gemm.kernels.sm90.arguments import fake_matrices
from fe_gemm.planning.problem import CELL, Problem, Sheet
from fe_gemm.planning.tiles import CELL_BYTES, CONSUMERS, UPSTREAM_BUFFERS, Launch, cells
from fe_runtime.cute.types import numeric, storage
from fe_runtime.cute.wgmma import fragment_column, fragment_row

from . import amax, row_sums
from .activation import dsrelu, scaled, srelu, swiglu
from .amax import Amax
from .cells import BLOCK, fragment
from .factors import RowFactors
from .quantise import Quantiser
from .region import Region
from .row_sums import RowSums
from .stage import Outlet, Stage, outlet_atom
from .upstream import Inlet, inlet_atom

__all__ = ["Arrays", "Epilogue", "Finisher", "Shared"]

Arrays = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shared:
    """What an epilogue has in shared memory: buffers of all warp groups for what leaves, and for what comes in."""

    outgoing: cute.Pointer
    incoming: cute.Pointer | None
    full: cute.Pointer | None


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

    def fake_arguments(self, m: Any, n: Any, batches: Any) -> tuple[Any, ...]:
        """Return stand-ins for what :attr:`names` lists, for matrices of the extents that the symbols stand for."""
        return tuple(_fake(self, name, m, n, batches) for name in self.names)

    def prepare(self, arrays: Arrays, stream: Any) -> None:
        """Launch what has to run before the product."""
        if self.problem.amax and not self.problem.accumulates:
            amax.preset(arrays["amax"], stream)

    def complete(self, arrays: Arrays, stream: Any) -> None:
        """Launch what has to run after the product."""
        if self.problem.epilogue == "dsrelu":
            row_sums.add_up(arrays["partials"], arrays["dprob"], self.problem.accumulates, stream)

    def parameters(self, arrays: Arrays) -> tuple[Any, ...]:
        """Return what the kernel needs, entry by entry of :attr:`names`: of matrices a TMA copy and what it sees."""
        return tuple(self._parameter(name, arrays[name]) for name in self.names)

    def allocate(self, allocator: Any) -> Shared:
        """Return the shared memory; :meth:`initialise` makes it usable."""
        upstream = self.problem.upstream
        outgoing = allocator.allocate(CONSUMERS * self.launch.store_buffers * CELL_BYTES, 1024)
        if upstream is None:
            return Shared(outgoing, None, None)
        incoming = allocator.allocate(CONSUMERS * UPSTREAM_BUFFERS * upstream.cell_bytes, 1024)
        return Shared(outgoing, incoming, allocator.allocate_array(Int64, CONSUMERS * UPSTREAM_BUFFERS))

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


@dataclass(frozen=True, slots=True)
class Finisher:
    """One thread's view. ``thread`` is its number in its warp group.

    For each tile of C, in the order of the calls: :meth:`begin` before the product, :meth:`finish` after it; and
    :meth:`finish_all` in the end. All threads of the warp group call them.
    """

    how: Epilogue
    thread: Int32
    rows: Int32
    columns: Int32
    alpha: Float32 | None
    factors: RowFactors | None
    stage: Stage
    outlets: tuple[Outlet, ...]
    inlet: Inlet | None
    amax: Amax | None
    quantiser: Quantiser | None
    sums: RowSums | None

    @classmethod
    def of(cls, how: Epilogue, shared: Shared, parameters: tuple[Any, ...], group: Int32, thread: Int32) -> Finisher:
        """Return the view of a thread of a warp group."""
        problem, buffers = how.problem, how.launch.store_buffers
        given = dict(zip(how.names, parameters, strict=True))
        memory = shared.outgoing + group * (buffers * CELL_BYTES)
        outlets = tuple(Outlet.of(sheet, given[sheet.name], memory, buffers, thread) for sheet in problem.outputs)
        rows, stored, _ = given["c"][1].shape
        columns = stored * (2 if problem.c_dtype == "float4_e2m1fn" else 1)
        issues = cute.arch.make_warp_uniform(thread // 32) == 0
        return cls(
            how,
            thread,
            rows,
            columns,
            given.get("alpha"),
            RowFactors.of(given["prob"], how.launch.group_rows // CELL) if "prob" in given else None,
            Stage(buffers, cells(problem, how.launch), group, issues),
            outlets,
            _inlet(how, shared, given, group, thread),
            Amax.of(given["amax"]) if problem.amax else None,
            _quantiser(problem, given, rows, columns),
            RowSums.of(given["partials"]) if problem.epilogue == "dsrelu" else None,
        )

    def begin(self, row: Int32, column: Int32, batch: Int32) -> None:
        """Start reading what goes with the tile whose first cell of accumulators is (``row``, ``column``)."""
        if self.inlet is not None:
            self.inlet.begin(row, column, batch)
        if self.factors is not None:
            self.factors.begin(row * CELL + fragment_row(self.thread), batch)

    def finish(self, accumulator: cute.Tensor, row: Int32, column: Int32, batch: Int32) -> None:
        """Finish the accumulators whose first cell is (``row``, ``column``)."""
        per_row = self.how.launch.group_columns // (CELL * self.how.problem.strip)
        for down in range(self.how.launch.group_rows // CELL):
            own_row = (row + down) * CELL + fragment_row(self.thread)
            inside = (own_row < self.rows, own_row + 8 < self.rows)
            if self.sums is not None:
                self.sums.begin()
            for strip in range(per_row):
                self._strip(accumulator, down * per_row + strip, (row, column, batch), own_row, inside)
            if self.sums is not None:
                part = column // (self.how.launch.group_columns // CELL)
                self.sums.finish(own_row, part, batch, inside, self.thread % 4 == 0)
        if self.inlet is not None:
            self.inlet.end()

    def finish_all(self) -> None:
        """Finish what is left when all tiles are done."""
        if self.amax is not None:
            self.amax.finish(self.thread % 32)
        self.stage.drain()

    def _strip(
        self,
        accumulator: cute.Tensor,
        index: int,
        first: tuple[Int32, Int32, Int32],
        own_row: Int32,
        inside: tuple[Boolean, Boolean],
    ) -> None:
        """Finish the ``index``-th strip of the tile with the ``first`` cell of accumulators (row, column, batch)."""
        problem = self.how.problem
        down, right = self.how.places[index]
        row, column, batch = first[0] + down, first[1] + right, first[2]
        region = _region(inside, self.columns - column * problem.result_columns, self.thread)
        x = _strip_of(accumulator, down, right, problem.strip)
        if self.alpha is not None:
            scaled(x, self.alpha)
        result = self._activated(x, index, region)
        if self.amax is not None:
            self.amax.add(result, region)
        if self.quantiser is not None:
            cell = column * problem.result_columns // CELL
            self.quantiser.quantise(result, own_row, cell, batch, self.thread % 4 == 0)
        leaving = {"pre": x, "c": result}
        pieces = [(outlet, part) for outlet in self.outlets for part in _pieces(outlet.sheet, leaving, problem.strip)]
        for number, (outlet, (piece, values)) in enumerate(pieces):
            target = _cell_column(outlet.sheet, column, piece)
            self.stage.store(outlet, values, index * len(pieces) + number, row, target, batch)
            if self.inlet is not None and number == 0:  # all threads have come past a barrier since they read
                self.inlet.fetch(index + UPSTREAM_BUFFERS, *first)

    def _activated(self, x: cute.Tensor, index: int, region: Region) -> cute.Tensor:
        """Return the result of the ``index``-th strip; on the way, add up what there is to add."""
        problem, (down, _) = self.how.problem, self.how.places[index]
        if problem.epilogue == "swiglu":
            return swiglu(x, problem.gate_first)
        if problem.epilogue == "srelu":
            return srelu(x, self.factors.of_cell(down))
        if problem.epilogue == "dsrelu":
            result, terms = dsrelu(x, self.inlet.read(index), self.factors.of_cell(down))
            self.sums.add(terms, region)
            return result
        return x


def _region(inside: tuple[Boolean, Boolean], columns: Int32, thread: Int32) -> Region:
    return Region(inside, columns, columns - fragment_column(thread))


def _strip_of(accumulator: cute.Tensor, down: int, right: int, strip: int) -> cute.Tensor:
    """Return the fragment of a strip of accumulators."""
    blocks = CELL // BLOCK
    values = fragment(strip * blocks)
    for block in range(strip * blocks):
        for half in range(2):
            for side in range(2):
                values[side, half, block] = accumulator[((side, half, right * blocks + block), down, 0)]
    return values


def _pieces(sheet: Sheet, leaving: dict[str, cute.Tensor], strip: int) -> list[tuple[int, cute.Tensor]]:
    """Return number and fragment of the cells that a strip gives a matrix."""
    values, count = leaving[sheet.name], strip * sheet.columns // sheet.cell_columns
    shape = (2, 2, sheet.cell_columns // BLOCK)
    return [(piece, cute.local_tile(values, shape, (0, 0, piece))) for piece in range(count)]


def _cell_column(sheet: Sheet, column: Int32, piece: int) -> Int32:
    """Return the column, in cells of the matrix, of a piece of the strip at a ``column`` in cells of accumulators."""
    if sheet.columns < sheet.cell_columns:
        return column // (sheet.cell_columns // sheet.columns) + piece
    return column * (sheet.columns // sheet.cell_columns) + piece


def _inlet(how: Epilogue, shared: Shared, given: Arrays, group: Int32, thread: Int32) -> Inlet | None:
    sheet = how.problem.upstream
    if sheet is None:
        return None
    memory = shared.incoming + group * (UPSTREAM_BUFFERS * sheet.cell_bytes)
    full = shared.full + group * UPSTREAM_BUFFERS
    return Inlet.of(sheet, how.places, given["upstream"], memory, full, thread)


def _quantiser(problem: Problem, given: Arrays, rows: Int32, columns: Int32) -> Quantiser | None:
    if problem.scale_dtype is None:
        return None
    norm = given["norm_const"][0]
    return Quantiser(problem.c_dtype, problem.scale_dtype, problem.scale_vector, given["scales"], norm, rows, columns)


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
