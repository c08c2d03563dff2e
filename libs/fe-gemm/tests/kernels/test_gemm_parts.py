"""What the parts of the Hopper matrix product decide: who sends to whom in a cluster, what is loaded when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs the kernel language (nvidia-cutlass-dsl)")

from fe_gemm.kernels.sm90 import dense_tiles, operands
from fe_gemm.kernels.sm90.block import Work, _release_target
from fe_gemm.kernels.sm90.dense_tiles import DenseTiles
from fe_gemm.kernels.sm90.operands import Loader, Operand
from fe_gemm.kernels.sm90.parts import Place, Tile
from fe_gemm.planning.tiles import Launch, Problem

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
    """Gives the coordinates back that it is indexed with, after those where it begins."""

    def __init__(self, *first: Any) -> None:
        self.first = first

    def __getitem__(self, at: Any) -> Any:
        return (*self.first, at) if self.first else at


def test_tiles_are_loaded_from_a_row_on_by_step_and_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(operands.cute, "copy", lambda *arguments, **how: calls.append((*arguments, how)))
    monkeypatch.setattr(operands, "tiles_from", lambda tiles, whole, first: Coordinates(whole, first))
    ring = SimpleNamespace(full=100, acquire=lambda at, count: calls.append((at.slot, count)))
    a, b = (Operand(name, Coordinates(), Coordinates(), name * 2, mask) for name, mask in (("a", None), ("b", 5)))
    launch = Launch(64, 128, cluster_k=2)
    tile = Tile(row=1000, column=12, batch=13, end=2000, steps=20)
    Loader(Place(launch, 1), a, b).load(ring, SimpleNamespace(slot=3), tile, step=14)
    assert calls == [
        (3, launch.slot_bytes),
        ("a", ("aa", (1000, 0, 13), (None, 0, 34, 0)), (None, 3), {"tma_bar_ptr": 103}),
        ("b", ("bb", (768, 0, 13), (None, 0, 34, 0)), (None, 3), {"tma_bar_ptr": 103, "mcast_mask": 5}),
    ]


def test_a_tile_is_loaded_with_another_map(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(operands.cute, "copy", lambda *_, **how: calls.append(how))
    monkeypatch.setattr(operands, "tiles_from", lambda *_: Coordinates())
    operand = Operand("a", Coordinates(), Coordinates(), None, None)
    operand.load_from(SimpleNamespace(full=7), SimpleNamespace(slot=1), (1, 2, 3), 4, "map")
    assert calls == [{"tma_bar_ptr": 8, "tma_desc_ptr": "map"}]


def test_a_warp_group_has_its_part_of_a_tile() -> None:
    tile = Tile(row=1000, column=12, batch=1, end=2000, steps=3)
    for launch, want in ((Launch(128, 256), (1064, 12)), (Launch(64, 256), (1000, 14))):
        work = Work(Problem(), Place(launch, 0), SimpleNamespace(), 0, 1)
        assert work.part(tile, 0) == tile
        part = work.part(tile, 1)
        assert ((part.row, part.column), part.end, part.steps) == (want, 2000, 3)


def test_tiles_of_matrices_of_equal_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block of a cluster has its own rows and columns; the numbers of a cluster's tiles are a stride apart."""
    monkeypatch.setattr(dense_tiles.cute.arch, "make_warp_uniform", lambda value: value)
    launch = Launch(128, 128, cluster_m=2, cluster_n=2, cluster_k=2)
    schedule = DenseTiles.of(Problem(), launch, (600, 300, 200, 2))
    assert (schedule.count, schedule.steps) == (3 * 2 * 2, 2)
    found = set()
    for rank in range(8):
        place = Place(launch, rank)
        for cluster in range(5):
            turn: Any = schedule.first(place, cluster, 5)
            while turn.exists():
                tile = turn.tile()
                assert (tile.end, tile.steps) == (600, 2)
                found.add((tile.row, tile.column, tile.batch, place.part))
                turn = turn.next()
    rows, columns = range(0, 3 * 256, 128), range(0, 2 * 4, 2)
    assert found == {(row, column, b, part) for row in rows for column in columns for b in (0, 1) for part in (0, 1)}
