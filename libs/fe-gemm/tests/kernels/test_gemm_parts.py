"""What the parts of the Hopper matrix product decide: who sends to whom in a cluster, what is loaded when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs the kernel language (nvidia-cutlass-dsl)")

from fe_gemm.kernels.sm90 import operands
from fe_gemm.kernels.sm90.block import _release_target
from fe_gemm.kernels.sm90.operands import Loader, Operand, Place
from fe_gemm.planning.tiles import Launch

CLUSTERS = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)]


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


def test_blocks_that_share_a_tile_along_k_release_their_own_slots() -> None:
    for rank in range(4):
        place = Place(Launch(64, 128, cluster_k=4), rank)
        assert (place.row, place.column, place.part) == (0, 0, rank)
        assert [_release_target(place, lane) for lane in range(2)] == [(None, True), (None, False)]


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
