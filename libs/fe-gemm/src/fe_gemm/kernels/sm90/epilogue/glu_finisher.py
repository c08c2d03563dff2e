"""What becomes of the accumulators of a tile that are gradients of a gated activation: gradients of gates and ups.

A cell of accumulators belongs to two cells of what was saved, and to two of the result. They are treated one after the
other, with 32 columns of accumulators each, so that little is in registers at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from cutlass import BFloat16, Boolean, Int32, cute

from fe_gemm.kernels.sm90.parts import Tile
from fe_gemm.kernels.sm90.tensor_maps import TensorMaps
from fe_gemm.planning.problem import CELL
from fe_gemm.planning.tiles import UPSTREAM_BUFFERS
from fe_runtime.cute.wgmma import fragment_row

from .activation import rounded, scaled
from .cells import BLOCK, fragment
from .column_sums import ColumnSums
from .finisher import CELL_BLOCKS, Finisher, region_of, strip_of
from .glu import PAIR_BLOCKS
from .groups import GroupFactor
from .static import Epilogue, Shared

__all__ = ["GluFinisher"]

PARTS = CELL_BLOCKS // PAIR_BLOCKS
"""Cells of the result for one of accumulators."""


@dataclass(frozen=True, slots=True)
class GluFinisher(Finisher):
    """One thread's view: what a :class:`Finisher` has, a factor of what was saved, and sums of columns."""

    saved_scale: GroupFactor | None = None
    column_sums: ColumnSums | None = None

    @classmethod
    def of(
        cls,
        how: Epilogue,
        shared: Shared,
        parameters: tuple[Any, ...],
        group: Int32,
        thread: Int32,
        maps: Mapping[str, TensorMaps] | None = None,
    ) -> GluFinisher:
        """Return the view of a thread of a warp group; ``maps``: those of the groups' results, by name."""
        plain = Finisher.of(how, shared, parameters, group, thread, maps)
        given = dict(zip(how.names, parameters, strict=True))
        sums = None
        if "column_partials" in given:
            memory = shared.sums + group * how.problem.sum_bytes
            sums = ColumnSums.of(given["column_partials"], memory, thread)
        return cls(
            **{field.name: getattr(plain, field.name) for field in fields(Finisher)},
            saved_scale=GroupFactor.of(given["beta"]) if "beta" in given else None,
            column_sums=sums,
        )

    def begin(self, tile: Tile) -> None:
        """Start reading what goes with a tile."""
        self.inlet.begin(tile.row, tile.column * PARTS, 0)
        if self.factors is not None:
            self.factors.begin(tile.row + fragment_row(self.thread), tile.batch)
        self.scale.begin(tile.batch)
        if self.saved_scale is not None:
            self.saved_scale.begin(tile.batch)
        self.stage.begin(self.outlets, tile.batch)

    def _strip(
        self, accumulator: cute.Tensor, index: int, tile: Tile, own_row: Int32, inside: tuple[Boolean, Boolean]
    ) -> None:
        """Finish the ``index``-th cell of accumulators of a tile."""
        del own_row
        kept = fragment(CELL_BLOCKS)  # the activation: its cells are as wide as those of accumulators
        for part in range(PARTS):
            acts = self._part(accumulator, index * PARTS + part, tile, inside)
            cute.local_tile(kept, (2, 2, PAIR_BLOCKS), (0, 0, part)).store(acts.load())
        if self.how.problem.keeps:
            down, right = self.how.places[index]
            last, row = (index + 1) * self._stores - 1, tile.row + down * CELL
            self.stage.store(self.outlets[1], kept, last, row, tile.column + right, tile.batch)

    @property
    def _stores(self) -> int:
        """Cells that leave for one of accumulators."""
        return self.stage.stores // len(self.how.places)

    def _part(self, accumulator: cute.Tensor, number: int, tile: Tile, inside: tuple[Boolean, Boolean]) -> cute.Tensor:
        """Finish what belongs to the ``number``-th cell of the result of a tile; return its activation."""
        down, right = self.how.upstream_places[number]
        row, column = tile.row + down * CELL, tile.column * PARTS + right
        values, terms, acts = self._gradient(accumulator, number, down, right)
        if self.sums is not None:
            width = CELL // PARTS
            self.sums.add(terms, region_of(inside, self.columns // PARTS - column * width, self.thread))
        if self.column_sums is not None:
            self.column_sums.offer(values, inside, number)
        self._store(values, number, tile, row, column)
        if self.column_sums is not None:
            self.column_sums.finish(row, tile.end, tile.batch, column * CELL, number)
        return acts

    def _gradient(
        self, accumulator: cute.Tensor, number: int, down: int, right: int
    ) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        """Return a fragment of the result as wide as a cell, and of what dprob sums and of the activation."""
        r = strip_of(accumulator, down, right * PAIR_BLOCKS, PAIR_BLOCKS)
        scaled(r, self.scale.value)
        if self.how.problem.rounds:
            rounded(r, BFloat16)
        saved = self.inlet.read(number)
        if self.saved_scale is not None:
            scaled(saved, self.saved_scale.value)
        return self.glu.gradient(r, saved, None if self.factors is None else self.factors.of_cell(down))

    def _store(self, values: cute.Tensor, number: int, tile: Tile, row: Int32, column: Int32) -> None:
        """Store a cell of the result, and start to fetch what comes into the buffer that has been read for it."""
        outlet = self.outlets[0]
        width = outlet.sheet.cell_columns
        count = CELL // width
        first = number // PARTS * self._stores + number % PARTS * count
        for piece in range(count):
            part = cute.local_tile(values, (2, 2, width // BLOCK), (0, 0, piece))
            self.stage.store(outlet, part, first + piece, row, column * count + piece, tile.batch)
            if piece == 0:  # all threads have come past a barrier since they read
                self.inlet.fetch(number + UPSTREAM_BUFFERS, tile.row, tile.column * PARTS, 0)
