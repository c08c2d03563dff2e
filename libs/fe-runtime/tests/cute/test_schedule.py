"""The order of tiles: each tile once, neighbours in number near each other."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")

from fe_runtime.cute.schedule import TileGrid


@pytest.mark.parametrize(("rows", "columns", "batches"), [(1, 1, 1), (7, 5, 3), (16, 9, 1), (3, 40, 2), (33, 1, 2)])
@pytest.mark.parametrize("band", [1, 4, 8, 64])
def test_every_tile_once(rows: int, columns: int, batches: int, band: int) -> None:
    grid = TileGrid(rows, columns, batches, band)
    places = [grid.place(number) for number in range(grid.count)]
    assert sorted(places) == [(r, c, b) for r in range(rows) for c in range(columns) for b in range(batches)]


def test_bands_go_back_and_forth() -> None:
    grid = TileGrid(5, 3, 1, 2)
    columns = [grid.place(number)[1] for number in range(grid.count)]
    assert columns == [0, 0, 1, 1, 2, 2, 2, 2, 1, 1, 0, 0, 0, 1, 2]


def test_tiles_at_work_share_rows_and_columns() -> None:
    grid = TileGrid(64, 32, 1, 8)
    window = [grid.place(number) for number in range(160, 160 + 64)]
    assert len({row for row, _, _ in window}) == 8
    assert len({column for _, column, _ in window}) == 8
