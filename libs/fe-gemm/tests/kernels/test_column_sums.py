"""Sums of columns: which thread adds what, and where it leaves it, with numpy in the place of 128 threads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="needs the kernel language (nvidia-cutlass-dsl)")

from fe_gemm.kernels.sm90 import rope_values
from fe_gemm.kernels.sm90.epilogue import column_sums
from fe_gemm.kernels.sm90.epilogue.column_sums import ColumnSums

THREADS = np.arange(128)
ROWS = THREADS // 32 * 16 + THREADS % 32 // 4
"""The first of the two rows of a thread's accumulators, and the first of its two columns of every eight."""
COLUMNS = THREADS % 4 * 2


class Memory:
    """Shared memory that all threads write at once."""

    def __init__(self, start: Any, values: Any) -> None:
        self.start = start
        self.values = values

    def __add__(self, offset: Any) -> Memory:
        return Memory(self.start + offset, self.values)

    def __setitem__(self, i: int, value: Any) -> None:
        assert len(set(self.start)) == len(THREADS), "two threads write to one place"
        self.values[self.start + i] = value


class Fragment:
    """A cell (64, 64) as the threads hold it: (side, half, block)."""

    def __init__(self, cell: Any) -> None:
        self.cell = cell

    def __getitem__(self, at: tuple[int, int, int]) -> Any:
        side, half, block = at
        return self.cell[ROWS + 8 * half, 8 * block + COLUMNS + side]


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("rows", [0, 1, 9, 40, 64])
def test_each_warp_adds_up_its_rows_of_every_column(rows: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(condition: Any, value: Any, otherwise: Any) -> Any:
        return np.where(condition, value, otherwise)

    cute = SimpleNamespace(
        arch=SimpleNamespace(shuffle_sync_bfly=lambda values, distance: values[THREADS ^ distance]),
        size=lambda *_, mode: 8,
        make_tensor=lambda place, layout: place,
        make_layout=lambda size: size,
    )
    for module in (rope_values, column_sums):
        monkeypatch.setattr(module, "cute", cute)
    monkeypatch.setattr(rope_values, "chosen", chosen)
    monkeypatch.setattr(column_sums, "_if", lambda condition, value: np.where(condition, value, 0.0))
    cell = np.random.default_rng(rows).standard_normal((64, 64))
    inside = ROWS < rows, ROWS + 8 < rows
    memory = np.full(2 * 4 * 64, np.nan)
    ColumnSums(None, Memory(np.zeros(128, int), memory), THREADS).offer(Fragment(cell), inside, number)  # type: ignore[arg-type]
    found = memory.reshape(2, 4, 64)
    assert np.isnan(found[(number + 1) % 2]).all()
    cell[rows:] = 0
    np.testing.assert_allclose(found[number % 2], cell.reshape(4, 16, 64).sum(1), atol=1e-12)
