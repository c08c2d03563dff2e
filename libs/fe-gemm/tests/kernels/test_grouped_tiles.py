"""Tiles of groups of rows, as the warps find them: every tile of every group once, whatever the offsets are."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="needs the kernel language (nvidia-cutlass-dsl)")

from fe_gemm.kernels.sm90 import grouped_tiles
from fe_gemm.kernels.sm90.grouped_tiles import GroupedTiles, GroupedTurn, Window
from fe_gemm.kernels.sm90.parts import Place
from fe_gemm.planning.tiles import Launch

LAUNCHES = [Launch(128, 256, cluster_m=2), Launch(64, 128), Launch(128, 128, cluster_n=2, band=3), Launch(256, 128)]
SIZES = {
    "uneven": [162, 0, 2577, 446, 0, 83],
    "one group": [1000],
    "256 groups": [(7 * e) % 300 for e in range(256)],
    "1024 groups": [e % 3 for e in range(1024)],
    "exactly 32 groups": [65] * 32,
    "33 groups, all in the last": [0] * 32 + [513],
    "all empty": [0] * 40,
    "first empty": [0, 0, 300, 1],
    "middle empty": [5, 0, 0, 0, 5],
    "last empty": [300, 256, 0],
    "99 % in one": [3, 0, 1, 9900, 40, 0, 56],
    "64 empty ones in between": [10, *[0] * 64, 500],
    "nothing": [0],
}


@dataclass(frozen=True)
class Emulated:
    """What 32 threads do together, as arrays of their values."""

    offsets: Any
    own = np.arange(32)

    def offset(self, group: Any) -> Any:
        padded = np.append(self.offsets, 0)
        return padded[np.minimum(group, len(self.offsets))]

    def below(self, value: Any, distance: int, otherwise: Any) -> Any:
        value = np.broadcast_to(value, 32)
        shifted = np.concatenate([value[:distance], value[:-distance]])
        return np.where(self.own >= distance, shifted, otherwise)

    def of(self, value: Any, lane: Any) -> int:
        return int(np.broadcast_to(value, 32)[lane % 32])

    def count(self, condition: Any) -> int:
        return int(np.sum(condition))

    def larger(self, a: Any, b: Any) -> Any:
        return np.maximum(a, b)

    def smaller(self, a: Any, b: Any) -> Any:
        return np.minimum(a, b)


def tiles(offsets: Any, rows: int, columns: int, launch: Launch) -> GroupedTiles:
    return GroupedTiles(launch, Emulated(np.asarray(offsets, np.int64)), len(offsets), rows, columns, 1)


def walk(schedule: GroupedTiles, cluster: int, clusters: int) -> list[tuple[int, ...]]:
    """Return (group, start, end, row, column) of the tiles of a cluster, as its warps find them."""
    found, window, number = [], Window._at(schedule, 0, 0, 0), cluster
    while True:
        while window.is_behind(number):
            window = window.next()
        if number >= window.total:
            return found
        found.append(tuple(map(int, window.place(number))))
        number += clusters


def naive(ends: list[int], columns: int, height: int) -> Counter[tuple[int, ...]]:
    found: Counter[tuple[int, ...]] = Counter()
    for group, (start, end) in enumerate(pairwise([0, *ends])):
        for row in range(-(-(end - start) // height)):
            found.update((group, start, end, row, column) for column in range(columns))
    return found


def clamped(offsets: list[int], rows: int) -> list[int]:
    ends, last = [], 0
    for entry in offsets:
        last = min(max(entry, last), rows)
        ends.append(last)
    return ends


def check(offsets: list[int], rows: int, columns: int, launch: Launch, clusters: int) -> None:
    schedule = tiles(offsets, rows, columns, launch)
    walks = [walk(schedule, cluster, clusters) for cluster in range(clusters)]
    want = naive(clamped(offsets, rows), columns, schedule.height)
    assert Counter(tile for part in walks for tile in part) == want
    assert sum(want.values()) <= schedule.most
    in_order = [part[turn] for turn in range(max(map(len, walks))) for part in walks if turn < len(part)]
    groups = [tile[0] for tile in in_order]
    assert groups == sorted(groups), "the tiles of a group are not neighbours"


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda how: f"{how.tile_m}x{how.tile_n}, {how.cluster_m} rows")
@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
def test_every_tile_once(sizes: list[int], launch: Launch) -> None:
    offsets = np.cumsum(sizes).tolist()
    for columns, clusters, tail in ((1, 132, 0), (3, 66, 77), (2, 1, 1)):
        check(offsets, offsets[-1] + tail, columns, launch, clusters)


MALFORMED = {
    "decreasing": [100, 50, 300, 200, 400],
    "negative": [-5, 10, -1, 20],
    "beyond the rows": [100, 5000, 200, 10**9],
    "all beyond the rows": [2**31 - 1] * 40,
    "lowest": [-(2**31)] * 33,
    "decreasing across 32 groups": [700] * 32 + [10, 699, 800],
}


@pytest.mark.parametrize("offsets", MALFORMED.values(), ids=list(MALFORMED))
def test_malformed_offsets_leave_no_row_and_write_none_twice(offsets: list[int]) -> None:
    for rows in (1, 450, 1000):
        check(offsets, rows, 3, LAUNCHES[0], 5)
        check(offsets, rows, 2, LAUNCHES[1], 132)


def test_random_sizes() -> None:
    random = np.random.default_rng(0)
    for _ in range(30):
        groups = int(random.integers(1, 140))
        sizes = random.integers(0, 400, groups) * (random.random(groups) < random.random())
        offsets = np.cumsum(sizes).tolist()
        rows = offsets[-1] + int(random.integers(0, 50))
        check(
            offsets, rows, int(random.integers(1, 9)), LAUNCHES[int(random.integers(4))], int(random.integers(1, 140))
        )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_block_of_a_cluster_has_its_own_rows_of_the_group(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster of two rows whose second one lies beyond the group: the tile is there, but ends before it begins."""
    monkeypatch.setattr(grouped_tiles.cute.arch, "make_warp_uniform", lambda value: value)
    launch = Launch(128, 256, cluster_m=2)
    schedule = tiles([10, 10 + 300], 310, 2, launch)
    turns = [GroupedTurn(schedule, Place(launch, rank), Window._at(schedule, 0, 0, 0), i, 1) for i in range(6)]
    found = [(t.row, t.column, t.batch, t.end, t.steps) for t in (turn.tile() for turn in turns)]
    down = 128 * rank
    assert sorted(found) == sorted(
        (start + down, column, group, end, 1)
        for group, start, end in ((0, 0, 10), (1, 10, 310), (1, 266, 310))
        for column in (0, 4)
    )
    assert [turn.exists() for turn in turns] == [True] * 6
    assert not GroupedTurn(schedule, Place(launch, rank), Window._at(schedule, 0, 0, 0), 6, 1).exists()
