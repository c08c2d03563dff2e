"""Launches of gradients of experts' weights: every tile once, no long tail, what cannot run is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from fe_gemm.planning.dense import Operands
from fe_gemm.planning.grouped_wgrad import (
    Plan,
    Problem,
    Turns,
    candidates,
    choose,
    config,
    is_valid,
    split_config,
    workspace_bytes,
)
from fe_gemm.planning.tiles import Launch

ARCH = "sm_90a"
MXFP8 = Operands("blocks", "float8_e4m3fn", "float8_e8m0fnu", 32)
NVFP4 = Operands("blocks", "float4_e2m1fn", "float8_e4m3fn", 16)
PROBLEMS = [
    Problem(c_dtype=c_dtype, a_major=a, b_major=b, accumulates=accumulates)
    for c_dtype, a, b, accumulates in product(("bfloat16", "float32"), "km", "kn", (False, True))
]


@pytest.mark.parametrize("clusters", [1, 2, 3, 66, 132])
@pytest.mark.parametrize("tiles", [0, 1, 2, 65, 66, 67, 131, 132, 133, 1000])
def test_every_tile_has_one_turn(tiles: int, clusters: int) -> None:
    found = []
    for cluster in range(clusters):
        turns = Turns(cluster, clusters, tiles)
        numbers = [turns.number(turn) for turn in range(turns.count)]
        assert numbers == sorted(numbers)
        found += numbers
    assert sorted(found) == list(range(tiles))


SIZES = {
    "equal": [4096] * 8,
    "uneven": [2577, 446, 162, 83, 0, 0],
    "one has nearly all": [30000] + [300] * 7,
    "many": [65536 // (8 * (i + 1)) for i in range(64)],
}


def time(sizes: list[int], tiles: int, clusters: int) -> tuple[int, float]:
    """Return the time of the slowest cluster and the mean, in steps of 64 tokens, three of them for finishing."""
    costs = [max(1, -(-size // 64)) + 3 for size in sizes for _ in range(tiles)]
    turns = [Turns(cluster, clusters, len(costs)) for cluster in range(clusters)]
    sums = [sum(costs[turn.number(i)] for i in range(turn.count)) for turn in turns]
    return max(sums), sum(costs) / clusters


@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
@pytest.mark.parametrize("tiles", [96, 256, 448])
def test_nobody_works_longer_than_the_others_by_more_than_the_longest_tile(tiles: int, sizes: list[int]) -> None:
    longest, mean = time(sizes, tiles, 66)
    assert longest <= mean + max(1, -(-max(sizes) // 64)) + 3
    assert tiles < 448 or longest <= 1.03 * mean


@pytest.mark.parametrize("n", [8, 64, 128, 136, 4096, 7168])
@pytest.mark.parametrize("m", [8, 128, 136, 7168])
def test_the_choice_is_valid_and_first_among_the_candidates(m: int, n: int) -> None:
    for problem in PROBLEMS:
        launch = choose(problem, m, n, ARCH)
        assert is_valid(problem, launch)
        found = candidates(problem, m, n, ARCH)
        assert found[0] == launch
        assert len(set(found)) == len(found) > 1
        assert all(is_valid(problem, other) for other in found)


def test_large_gradients_get_the_tiles_of_large_products() -> None:
    launch = choose(Problem(), 7168, 4096, ARCH)
    assert (launch.tile_m, launch.tile_n, launch.cluster_m, launch.slots) == (128, 256, 2, 4)


def test_accumulation_costs_no_shared_memory() -> None:
    assert choose(Problem(accumulates=True), 7168, 4096, ARCH) == choose(Problem(), 7168, 4096, ARCH)


INCONSISTENT = {
    "8-bit operands as they are": {"dtype": "float8_e4m3fn", "a_major": "k", "b_major": "k"},
    "8-bit result": {"c_dtype": "float8_e4m3fn"},
    "parts along the tokens": {"operands": Operands("split", "float32")},
    "pairs across rows": {"operands": NVFP4, "a_major": "m", "b_major": "k"},
    "factors without scales": {"factors": True},
    "float16 from blocks": {"operands": MXFP8, "dtype": "float16"},
}


@pytest.mark.parametrize("change", INCONSISTENT.values(), ids=list(INCONSISTENT))
def test_inconsistent_problems_are_refused(change: dict[str, Any]) -> None:
    problem = Problem(**change)
    assert not problem.is_consistent
    assert not is_valid(problem, choose(Problem(), 4096, 4096, ARCH))


@pytest.mark.parametrize("change", [{"cluster_k": 2, "cluster_m": 1}, {"slots": 1}, {"tile_m": 32}])
def test_invalid_launches_are_refused(change: dict[str, int]) -> None:
    launch = Launch(128, 128)
    assert is_valid(Problem(), launch)
    assert not is_valid(Problem(), replace(launch, **change))


def test_the_configuration_gives_the_plan_back() -> None:
    for problem in (
        *PROBLEMS,
        Problem(discrete=True, ragged=True, a_major="k"),
        Problem(a_major="k", b_major="k", factors=True, operands=NVFP4, b_turned=True),
    ):
        plan = Plan(
            problem, choose(problem, 4096, 4096, ARCH), 132, ("a", "b", "offsets", "c", "groups"), problem.ragged
        )
        flat = config(plan)
        assert all(isinstance(value, str | int | float | bool | None) for value in flat.values())
        assert split_config(flat) == plan


def test_only_operands_with_contiguous_tokens_that_are_not_expanded_have_ragged_maps() -> None:
    assert Problem(ragged=True).ragged_maps == ()
    assert Problem(a_major="k").ragged_maps == ()
    assert Problem(a_major="k", ragged=True).ragged_maps == ("a",)
    assert Problem(a_major="k", b_major="k", ragged=True).ragged_maps == ("a", "b")
    expanded = Problem(a_major="k", b_major="k", ragged=True, operands=MXFP8)
    assert expanded.ragged_maps == ()
    assert all(how.grouped and how.ragged for how in expanded.workspaces.values())


def test_the_workspace_fits_into_that_of_the_peer() -> None:
    for experts in (1, 2, 7, 256, 1024):
        assert workspace_bytes(experts) <= 128 * 4 * experts
        assert Problem().maps == ("a", "b")
        assert Problem(discrete=True).maps == ("a", "b", "c")
