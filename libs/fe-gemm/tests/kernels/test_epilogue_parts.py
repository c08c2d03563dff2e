"""Where an epilogue puts values: cells in shared memory, cells of matrices, scales; when buffers are used again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs the kernel language (nvidia-cutlass-dsl)")

from fe_gemm.kernels.sm90.epilogue import Epilogue, cells, finisher, quantise, stage, upstream
from fe_gemm.planning.problem import Problem, Sheet
from fe_gemm.planning.tiles import UPSTREAM_BUFFERS, Launch
from fe_runtime import formats

PRODUCT = Problem(alpha=True, epilogue="srelu", pre_dtype="bfloat16")


def sheets() -> list[Sheet]:
    narrow = [Sheet("c", dtype, major) for dtype in ("float8_e4m3fn", "float8_e5m2") for major in "nm"]
    wide = [Sheet("c", "float32", major, cell_columns=columns) for columns in (32, 64) for major in "nm"]
    return [*narrow, *wide, Sheet("c", "float4_e2m1fn", "n")]


def byte_of(sheet: Sheet, row: int, column: int) -> int:
    """Where TMA expects a value: lines one after the other in parts of 128 bytes, 16-byte pieces permuted.

    The permutation joins the number of a piece by exclusive or with that of the line, of every second line or of every
    fourth one, if lines have eight pieces, four or two.
    """
    bits, line = sheet.bits, sheet.line_bytes
    number, along, lines = (row, column, 64) if sheet.major == "n" else (column, row, sheet.cell_columns)
    part, byte = divmod(along * bits // 8, line)
    pieces = line // 16
    piece = (byte // 16) ^ (number // (8 // pieces)) % pieces
    return (part * lines + number) * line + piece * 16 + byte % 16


@pytest.mark.parametrize("sheet", sheets(), ids=lambda s: f"{s.dtype}-{s.major}-{s.cell_columns}")
def test_values_lie_where_tma_expects_them(sheet: Sheet) -> None:
    seen = set()
    for thread in range(128):
        start = cells.thread_offset(sheet, thread)
        for block in range(sheet.cell_columns // 8):
            for half in range(2):
                for side in range(2):
                    row = thread // 32 * 16 + thread % 32 // 4 + 8 * half
                    column = 8 * block + thread % 4 * 2 + side
                    where = cells.Place.of(sheet, side, half, block)(start)
                    assert where == byte_of(sheet, row, column), (thread, side, half, block)
                    seen.add((row, column))
    assert len(seen) == 64 * sheet.cell_columns


@pytest.mark.parametrize("major", ["n", "m"])
def test_matrices_of_16_bit_values_lie_where_tma_expects_them(major: str) -> None:
    """Lane 8 q + j addresses line j of matrix q: rows 8 (q & 1), columns 8 (q >> 1) of 16 x 16 values of a warp."""
    sheet = Sheet("c", "bfloat16", major)
    for thread in range(128):
        warp, matrix, line = thread // 32, thread % 32 // 8, thread % 8
        start = cells.thread_offset(sheet, thread)
        for pair in range(4):
            row, column = 16 * warp + 8 * (matrix & 1), 16 * pair + 8 * (matrix >> 1)
            first = (row + line, column) if major == "n" else (row, column + line)
            assert cells.Place.of_matrices(sheet, pair)(start) == byte_of(sheet, *first)


def banks(address: int, size: int) -> set[int]:
    return {(address + byte) // 4 % 32 for byte in range(size)}


@pytest.mark.parametrize("sheet", sheets(), ids=lambda s: f"{s.dtype}-{s.major}-{s.cell_columns}")
def test_a_warp_writes_without_bank_conflicts(sheet: Sheet) -> None:
    """Lanes touch different words or the same one; pairs of float32 come in two parts, of which each may take two."""
    size = {"n": 2, "m": 1}[sheet.major] * sheet.bits // 8 or 1
    words: dict[int, set[int]] = {}
    for lane in range(32):
        address = cells.thread_offset(sheet, lane)
        for byte in range(0, size, 4) if size > 4 else (0,):
            words.setdefault((address + byte) // 4 % 32, set()).add((address + byte) // 4)
    assert max(len(word) for word in words.values()) <= (2 if size == 8 else 1)


@pytest.mark.parametrize(("rows", "scales", "batches"), [(300, 5, 2), (128, 4, 1), (1, 1, 3)])
def test_scales_lie_where_the_layout_says(rows: int, scales: int, batches: int) -> None:
    row_atoms, scale_atoms = -(-rows // 128), -(-scales // 4)
    for batch in range(batches):
        for row in range(rows):
            for scale in range(scales):
                offset = quantise.scale_offset(row, scale, batch, row_atoms, scale_atoms)
                assert offset == formats.scale_offset(row, scale, batch, rows=rows, scales=scales)


@pytest.mark.parametrize("stores", range(1, 9))
@pytest.mark.parametrize("buffers", range(1, 5))
def test_a_buffer_is_used_again_once_its_copy_is_done(buffers: int, stores: int) -> None:
    """Copies end in their order; as many as the stage allows may be under way."""
    how = stage.Stage(buffers, stores, 0, True)
    started: list[int] = []
    for _ in range(3):
        for index in range(stores):
            younger = how._younger(index)
            assert younger >= 0
            assert index % buffers not in started[len(started) - younger :]
            started.append(index % buffers)


class Coordinates:
    """Gives the coordinates back that it is indexed with."""

    def __getitem__(self, at: Any) -> Any:
        return at


@pytest.mark.parametrize(("count", "tiles"), [(1, 4), (2, 3), (3, 3), (4, 2)])
def test_every_cell_of_an_upstream_matrix_is_awaited_in_its_turn(
    count: int, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer's barrier ends a phase with each cell, so the waits for it alternate between parities 0 and 1."""
    waits: dict[int, list[int]] = {buffer: [] for buffer in range(UPSTREAM_BUFFERS)}
    monkeypatch.setattr(upstream.cute.arch, "mbarrier_wait", lambda at, parity: waits[at].append(parity))
    monkeypatch.setattr(upstream, "read", lambda sheet, start: start)
    monkeypatch.setattr(upstream, "made_here", lambda start: start)
    sheet = Sheet("upstream", "bfloat16", "n")
    places = tuple((0, i) for i in range(count))
    inlet = upstream.Inlet(sheet, places, None, None, Coordinates(), None, 0, 0, True, [0])  # type: ignore[arg-type]
    for _ in range(tiles):
        for index in range(count):
            assert inlet.read(index) == index % UPSTREAM_BUFFERS * sheet.cell_bytes
        inlet.end()
    for parities in waits.values():
        assert parities == [i & 1 for i in range(len(parities))]


@pytest.mark.parametrize(
    ("problem", "launch"),
    [
        (PRODUCT, Launch(128, 256)),
        (PRODUCT, Launch(256, 128)),
        (replace(PRODUCT, epilogue="swiglu"), Launch(128, 256)),
        (replace(PRODUCT, epilogue="swiglu", c_dtype="float32"), Launch(128, 128)),
        (replace(PRODUCT, pre_dtype="float32"), Launch(128, 64)),
    ],
)
def test_every_cell_of_every_matrix_is_stored_once(problem: Problem, launch: Launch) -> None:
    for sheet in problem.outputs:
        found = []
        for right in sorted({right for _, right in Epilogue(problem, launch).places}):
            pieces = problem.strip * sheet.columns // sheet.cell_columns
            found += [finisher._cell_column(sheet, right, piece) for piece in range(pieces)]
        columns = launch.tile_n * sheet.columns // 64 // sheet.cell_columns
        assert found == list(range(columns))
