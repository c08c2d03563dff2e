"""The order in which the tiles of a matrix product are computed: plain integer arithmetic, on the device or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass

__all__ = ["TileGrid"]


@dataclass(frozen=True, slots=True)
class TileGrid:
    """The tiles of a batch of matrices, numbered so that tiles with neighbouring numbers share rows and columns.

    Bands of ``band`` rows of tiles are treated one after the other; within a band the number runs down the rows first,
    then along the columns, forward in even bands and backward in odd ones, so that the next band starts with the
    columns that the last one ended with. Blocks that work at the same time on W neighbouring tiles thus read about
    ``band`` tiles of rows and W / ``band`` tiles of columns.

    Parameters
    ----------
    rows, columns, batches
        Numbers of tiles: integers, or integers of the device.
    band
        Rows of tiles in a band.
    """

    rows: Any
    columns: Any
    batches: Any
    band: int

    @property
    def count(self) -> Any:
        """How many tiles there are."""
        return self.rows * self.columns * self.batches

    def place(self, number: Any) -> tuple[Any, Any, Any]:
        """Return (row, column, batch) of a tile."""
        per_matrix = self.rows * self.columns
        batch = number // per_matrix
        rest = number - batch * per_matrix
        band = rest // (self.columns * self.band)
        rest = rest - band * (self.columns * self.band)
        first = band * self.band
        height = cutlass.min(self.rows - first, self.band)
        column = rest // height
        row = first + rest - column * height
        backward = band & 1
        column = column + backward * (self.columns - 1 - 2 * column)
        return row, column, batch
