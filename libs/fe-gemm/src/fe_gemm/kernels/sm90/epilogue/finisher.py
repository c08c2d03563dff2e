"""What becomes of the accumulators of a tile, as a thread sees it; the static side is :mod:`.static`.

A tile is finished strip by strip, one cell of accumulators or two that lie side by side: X is scaled, stored if it is
wanted, activated; the result is counted, quantised and stored. Nothing of a strip outlives it but a few sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cutlass import Boolean, Float32, Int32, cute

from fe_gemm.kernels.sm90.parts import Tile
from fe_gemm.kernels.sm90.tensor_maps import TensorMaps
from fe_gemm.planning.problem import CELL, Problem, Sheet
from fe_gemm.planning.tiles import CELL_BYTES, UPSTREAM_BUFFERS, cells
from fe_runtime.cute.wgmma import fragment_column, fragment_row

from .activation import biased, dsrelu, scaled, srelu, swiglu, weighted
from .amax import Amax
from .cells import BLOCK, fragment
from .factors import RowFactors
from .glu import Glu
from .groups import Bias, GroupFactor
from .quantise import Quantiser
from .region import Region
from .row_sums import RowSums
from .stage import Outlet, Stage
from .static import Arrays, Epilogue, Shared
from .upstream import Inlet

__all__ = ["CELL_BLOCKS", "Finisher", "region_of", "strip_of"]

CELL_BLOCKS = CELL // BLOCK
"""Blocks of accumulators in a cell."""
BIAS_BLOCKS = {4: 2, 2: 4}
"""Blocks of columns whose bias is in registers at once, by the bytes of a value."""


@dataclass(frozen=True, slots=True)
class Finisher:
    """One thread's view. ``thread`` is its number in its warp group.

    See :class:`fe_gemm.kernels.sm90.parts.Finisher`.
    """

    how: Epilogue
    thread: Int32
    columns: Int32
    alpha: Float32 | None
    factors: RowFactors | None
    stage: Stage
    outlets: tuple[Outlet, ...]
    inlet: Inlet | None
    amax: Amax | None
    quantiser: Quantiser | None
    sums: RowSums | None
    scale: GroupFactor | None = None
    bias: Bias | None = None
    glu: Glu | None = None

    @classmethod
    def of(
        cls,
        how: Epilogue,
        shared: Shared,
        parameters: tuple[Any, ...],
        group: Int32,
        thread: Int32,
        maps: Mapping[str, TensorMaps] | None = None,
    ) -> Finisher:
        """Return the view of a thread of a warp group; ``maps``: those of the groups' results, by name."""
        problem, buffers = how.problem, how.launch.store_buffers
        given = dict(zip(how.names, parameters, strict=True))
        memory = shared.outgoing + group * (buffers * CELL_BYTES)
        outlets = tuple(
            Outlet.of(sheet, given[sheet.name], memory, buffers, thread, (maps or {}).get(sheet.name))
            for sheet in problem.outputs
        )
        rows, stored, _ = given["c"][1].shape
        columns = stored * (2 if problem.c_dtype == "float4_e2m1fn" else 1)
        issues = cute.arch.make_warp_uniform(thread // 32) == 0
        return cls(
            how,
            thread,
            columns,
            None if problem.grouped else given.get("alpha"),
            RowFactors.of(given["prob"], how.launch.group_rows // CELL) if "prob" in given else None,
            Stage(buffers, cells(problem, how.launch), group, issues),
            outlets,
            _inlet(how, shared, given, group, thread),
            Amax.of(given["amax"]) if problem.amax else None,
            _quantiser(problem, given, rows, columns),
            RowSums.of(given["partials"]) if "partials" in given else None,
            GroupFactor.of(given["alpha"], problem.epilogue == "dglu") if problem.grouped else None,
            Bias(given["bias"], problem.bias_dtype) if "bias" in given else None,
            None if problem.activation is None else Glu.of(problem.activation, given),
        )

    def begin(self, tile: Tile) -> None:
        """Start reading what goes with a tile."""
        if self.inlet is not None:
            self.inlet.begin(tile.row, tile.column, tile.batch)
        if self.factors is not None:
            self.factors.begin(tile.row + fragment_row(self.thread), tile.batch)
        if self.scale is not None:
            self.scale.begin(tile.batch)
            self.stage.begin(self.outlets, tile.batch)

    def finish(self, accumulator: cute.Tensor, tile: Tile) -> None:
        """Finish the accumulators of a tile."""
        per_row = self.how.launch.group_columns // (CELL * self.how.problem.strip)
        for down in range(self.how.launch.group_rows // CELL):
            own_row = tile.row + down * CELL + fragment_row(self.thread)
            inside = (own_row < tile.end, own_row + 8 < tile.end)
            if self.sums is not None:
                self.sums.begin()
            for strip in range(per_row):
                self._strip(accumulator, down * per_row + strip, tile, own_row, inside)
            if self.sums is not None:
                part = tile.column // (self.how.launch.group_columns // CELL)
                self.sums.finish(own_row, part, tile.batch, inside, self.thread % 4 == 0)
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
        tile: Tile,
        own_row: Int32,
        inside: tuple[Boolean, Boolean],
    ) -> None:
        """Finish the ``index``-th strip of a tile."""
        problem = self.how.problem
        down, right = self.how.places[index]
        row, column, batch = tile.row + down * CELL, tile.column + right, tile.batch
        region = region_of(inside, self.columns - column * problem.result_columns, self.thread)
        x = strip_of(accumulator, down, right * CELL_BLOCKS, problem.strip * CELL_BLOCKS)
        if self.alpha is not None:
            scaled(x, self.alpha)
        if self.scale is not None:
            self._grouped(x, tile, down, column)
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
                self.inlet.fetch(index + UPSTREAM_BUFFERS, tile.row, tile.column, batch)

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
        if problem.epilogue == "glu":
            return self.glu.of_fragment(x, None if self.factors is None else self.factors.of_cell(down))
        if problem.epilogue == "unfused" and self.bias is None:
            return weighted(x, self.factors.of_cell(down))
        return x

    def _grouped(self, x: cute.Tensor, tile: Tile, down: int, column: Int32) -> None:
        """Apply what the rows of a group have in common to a strip of accumulators from a ``column`` of cells on."""
        scaled(x, self.scale.value)
        if self.bias is None:
            return
        gated = self.how.problem.epilogue == "glu"  # then columns come in blocks of 32
        prob = None if gated else self.factors.of_cell(down)
        count = BIAS_BLOCKS[self.bias.array.element_type.width // 8]
        for block in range(0, cute.size(x, mode=[2]), count):
            first = column * CELL + block * BLOCK + fragment_column(self.thread)
            part = cute.local_tile(x, (2, 2, count), (0, 0, block // count))
            biased(part, self.bias.of_blocks(tile.batch, first, count, gated), prob)


def region_of(inside: tuple[Boolean, Boolean], columns: Int32, thread: Int32) -> Region:
    """Return the region under a fragment from whose first column on there are so many in the matrix."""
    return Region(inside, columns, columns - fragment_column(thread))


def strip_of(accumulator: cute.Tensor, down: int, first: int, blocks: int) -> cute.Tensor:
    """Return the fragment of so many blocks of accumulators from the ``first`` one on, in a row of cells."""
    values = fragment(blocks)
    for block in range(blocks):
        for half in range(2):
            for side in range(2):
                values[side, half, block] = accumulator[((side, half, first + block), down, 0)]
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
    return Inlet.of(sheet, how.upstream_places, given["upstream"], memory, full, thread)


def _quantiser(problem: Problem, given: Arrays, rows: Int32, columns: Int32) -> Quantiser | None:
    if problem.scale_dtype is None:
        return None
    norm = given["norm_const"][0]
    return Quantiser(problem.c_dtype, problem.scale_dtype, problem.scale_vector, given["scales"], norm, rows, columns)
