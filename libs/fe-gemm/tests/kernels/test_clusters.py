"""Who shares what in a cluster of the Hopper matrix product whose blocks share operands and parts of K."""

from __future__ import annotations

from itertools import product

import pytest

pytest.importorskip("cutlass", reason="needs the kernel language (nvidia-cutlass-dsl)")

from fe_gemm.kernels.sm90.block import _release_target
from fe_gemm.kernels.sm90.parts import Place
from fe_gemm.planning.tiles import Launch

CLUSTERS = [(m, n, k) for m, n, k in product((1, 2), (1, 2, 4), range(1, 9)) if m * n * k <= 8]
every_cluster = pytest.mark.parametrize("cluster", CLUSTERS, ids=str)


def places_of(cluster: tuple[int, int, int]) -> list[Place]:
    launch = Launch(64, 64, *cluster)
    return [Place(launch, rank) for rank in range(launch.cluster)]


def members(mask: int) -> set[int]:
    return {rank for rank in range(32) if mask >> rank & 1}


@every_cluster
def test_ranks_run_down_the_rows_then_along_the_columns_then_along_k(cluster: tuple[int, int, int]) -> None:
    m, n, k = cluster
    found = [(place.row, place.column, place.part) for place in places_of(cluster)]
    assert found == [(row, column, part) for part in range(k) for column in range(n) for row in range(m)]


@every_cluster
def test_blocks_with_the_same_part_of_k_share_operands(cluster: tuple[int, int, int]) -> None:
    places = places_of(cluster)
    for place in places:
        beside = {p.rank for p in places if (p.row, p.part) == (place.row, place.part)}
        below = {p.rank for p in places if (p.column, p.part) == (place.column, place.part)}
        assert (members(place.same_row), members(place.same_column)) == (beside, below)
        assert place.first == min(p.rank for p in places if p.part == place.part)


@every_cluster
def test_a_slot_is_released_to_all_that_fill_it(cluster: tuple[int, int, int]) -> None:
    m, n, _ = cluster
    for place in places_of(cluster):
        lanes = [_release_target(place, lane) for lane in range(32)]
        told = [target for target, arrives in lanes if arrives]
        if m * n == 1:
            assert told == [None]
            continue
        assert set(told) == members(place.same_row) | members(place.same_column)
        assert len(told) == m + n - 1  # the arrivals that empty a slot, per warp and block
        assert all(target < place.launch.cluster for target, _ in lanes)
