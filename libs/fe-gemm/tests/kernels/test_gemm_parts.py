"""What the parts of the Hopper matrix product decide: who sends to whom in a cluster, where values wait to leave."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs the kernel language (nvidia-cutlass-dsl)")

from fe_gemm.kernels.sm90 import operands
from fe_gemm.kernels.sm90.gemm import _release_target
from fe_gemm.kernels.sm90.operands import Loader, Operand, Place
from fe_gemm.kernels.sm90.store import _lane_offset
from fe_gemm.tiles import CELL_BYTES, Launch

CLUSTERS = [(1, 1), (2, 1), (1, 2), (2, 2)]


def members(mask: int) -> set[int]:
    return {rank for rank in range(32) if mask >> rank & 1}


@pytest.mark.parametrize(("rows", "columns"), CLUSTERS)
def test_ranks_run_down_the_rows(rows: int, columns: int) -> None:
    launch = Launch(cluster_m=rows, cluster_n=columns)
    places = [Place(launch, rank) for rank in range(launch.cluster)]
    assert [(p.row, p.column) for p in places] == [(r, c) for c in range(columns) for r in range(rows)]


@pytest.mark.parametrize(("rows", "columns"), CLUSTERS)
def test_masks_name_the_blocks_that_share_a_tile(rows: int, columns: int) -> None:
    launch = Launch(cluster_m=rows, cluster_n=columns)
    places = [Place(launch, rank) for rank in range(launch.cluster)]
    for place in places:
        assert members(place.same_row) == {p.rank for p in places if p.row == place.row}
        assert members(place.same_column) == {p.rank for p in places if p.column == place.column}


@pytest.mark.parametrize(("rows", "columns"), CLUSTERS[1:])
def test_a_slot_is_released_to_all_that_fill_it(rows: int, columns: int) -> None:
    launch = Launch(cluster_m=rows, cluster_n=columns)
    for place in (Place(launch, rank) for rank in range(launch.cluster)):
        lanes = [_release_target(place, lane) for lane in range(32)]
        told = [target for target, arrives in lanes if arrives]
        assert set(told) == members(place.same_row) | members(place.same_column)
        assert len(told) == rows + columns - 1  # the arrivals that empty a slot, per warp and block


def test_without_a_cluster_one_lane_releases_a_slot() -> None:
    place = Place(Launch(), 0)
    assert [_release_target(place, lane) for lane in range(3)] == [(None, True), (None, False), (None, False)]


class Coordinates:
    """Gives the coordinates back that it is indexed with."""

    def __getitem__(self, at: Any) -> Any:
        return at


def test_tiles_are_loaded_by_row_step_and_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(operands.cute, "copy", lambda *arguments, **how: calls.append((*arguments, how)))
    ring = SimpleNamespace(full=100, acquire=lambda at, count: calls.append((at.slot, count)))
    a, b = (Operand(name, Coordinates(), Coordinates(), mask) for name, mask in (("a", None), ("b", 5)))
    launch = Launch(128, 256)
    Loader(launch, a, b).load(ring, SimpleNamespace(slot=3), row=11, column=12, batch=13, step=14)
    assert calls == [
        (3, launch.slot_bytes),
        ("a", (None, 11, 14, 13), (None, 3), {"tma_bar_ptr": 103}),
        ("b", (None, 12, 14, 13), (None, 3), {"tma_bar_ptr": 103, "mcast_mask": 5}),
    ]


def piece_address(first: int, second: int) -> int:
    """Byte offset of value (first, second) of a 64 x 64 cell, second contiguous, 16-byte pieces permuted."""
    return first * 128 + ((second // 8) ^ (first % 8)) * 16 + second % 8 * 2


@pytest.mark.parametrize("transposes", [False, True])
def test_values_wait_where_the_store_expects_them(transposes: bool) -> None:
    """Lane 8 q + j addresses line j of matrix q: rows 8 (q & 1), columns 8 (q >> 1) of 16 x 16 values of a warp."""
    seen = set()
    for thread in range(128):
        warp, matrix, line = thread // 32, thread % 32 // 8, thread % 8
        for pair in range(4):
            row, column = 16 * warp + 8 * (matrix & 1), 16 * pair + 8 * (matrix >> 1)
            offset = _lane_offset(thread, transposes)
            if transposes:
                offset += pair * 16 * 128
                assert offset == piece_address(column + line, row)
            else:
                offset ^= pair << 5
                assert offset == piece_address(row + line, column)
            seen.add(offset)
    assert seen == set(range(0, CELL_BYTES, 16))
