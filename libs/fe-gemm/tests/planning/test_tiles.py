"""How a product is cut and spread: what is chosen is valid, what cannot run is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from fe_gemm.planning.tiles import (
    MOST_SHARED_BYTES,
    Launch,
    Problem,
    candidates,
    cells,
    choose,
    finishers,
    finishing,
    is_valid,
    roomy,
    shared_bytes,
    split_bytes,
)

ARCH = "sm_90a"
PROBLEMS = [
    Problem(dtype, c_dtype, *majors)
    for dtype, c_dtype in (("bfloat16", "bfloat16"), ("float16", "float16"), ("float16", "bfloat16"))
    for majors in product("km", "kn", "nm")
]
COLUMNS = (8, 64, 128, 136, 256, 4096, 28672)
DEPTHS = (8, 64, 72, 4096, 8192)
VALID = Launch(128, 256)


@pytest.mark.parametrize("n", COLUMNS)
@pytest.mark.parametrize("k", DEPTHS)
def test_the_choice_is_valid(n: int, k: int) -> None:
    for problem in PROBLEMS:
        launch = choose(problem, n, k, ARCH)
        assert is_valid(problem, launch)
        assert not is_valid(problem, replace(launch, slots=launch.slots + 1)) or launch.slots == 8


@pytest.mark.parametrize("n", COLUMNS)
def test_narrow_products_get_narrow_tiles(n: int) -> None:
    launch = choose(Problem(), n, 4096, ARCH)
    assert launch.tile_n == (128 if n <= 128 else 256)


@pytest.mark.parametrize("n", COLUMNS)
@pytest.mark.parametrize("k", DEPTHS)
def test_candidates_are_valid_and_distinct_and_start_with_the_choice(n: int, k: int) -> None:
    for problem in PROBLEMS:
        found = candidates(problem, n, k, ARCH)
        assert found[0] == choose(problem, n, k, ARCH)
        assert len(set(found)) == len(found) > 1
        assert all(is_valid(problem, launch) for launch in found)


INVALID = {
    "tile too low": {"tile_m": 32},
    "tile of an odd height": {"tile_m": 192},
    "tile too narrow": {"tile_n": 32},
    "tile of an odd width": {"tile_n": 224},
    "tile too wide": {"tile_n": 320},
    "accumulators do not fit": {"tile_m": 256, "slots": 2},
    "nothing is under way": {"slots": 1},
    "too many slots": {"slots": 5},
    "no rows of blocks": {"cluster_m": 0},
    "cluster too high": {"cluster_m": 4},
    "cluster too wide": {"cluster_n": 8},
    "cluster of an odd width": {"cluster_n": 3},
    "cluster too large": {"cluster_m": 2, "cluster_n": 4},
    "no buffers": {"store_buffers": 0},
    "too many blocks in a cluster": {"cluster_k": 3, "cluster_n": 4, "tile_m": 64, "tile_n": 128, "slots": 8},
    "K in too many parts": {"cluster_k": 9, "tile_m": 64, "tile_n": 64, "slots": 2},
    "no room for the sums of others": {"cluster_k": 8},
    "no registers for the sums of others": {"tile_m": 256, "tile_n": 192, "cluster_k": 3, "slots": 3},
    "too many buffers": {"store_buffers": 4},
    "no band": {"band": 0},
}


@pytest.mark.parametrize("change", INVALID.values(), ids=list(INVALID))
def test_what_cannot_run_is_refused(change: dict[str, int | bool]) -> None:
    assert is_valid(Problem(), VALID)
    assert not is_valid(Problem(), replace(VALID, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(("tile", "count"), [((128, 256), 4), ((256, 128), 4), ((128, 192), 3), ((256, 192), 6)])
def test_cells_cover_the_tile(tile: tuple[int, int], count: int) -> None:
    """Of two warp groups, each stores half of the tile in cells of 64 x 64."""
    assert cells(Problem(), Launch(*tile)) == count
    assert 2 * count * 64 * 64 == tile[0] * tile[1]


SPLITS = {
    "quarters": (Problem(), Launch(128, 256, cluster_k=4), 4, 3 * 128 * 64 * 4),
    "halves": (Problem(), Launch(128, 128, cluster_k=2), 2, 128 * 64 * 4),
    "halves of the columns of each warp group": (Problem(), Launch(64, 256, cluster_k=2), 2, 64 * 128 * 4),
    "thirds": (Problem(), Launch(128, 192, cluster_k=3), 3, 2 * 128 * 64 * 4),
    "three strips, two blocks": (Problem(), Launch(128, 192, cluster_k=2), 1, 128 * 192 * 4),
    "two strips, three blocks": (Problem(), Launch(128, 128, cluster_k=3), 2, 2 * 128 * 64 * 4),
    "four strips, six blocks": (Problem(), Launch(128, 256, cluster_k=6), 4, 5 * 128 * 64 * 4),
    "one strip": (Problem(), Launch(64, 128, cluster_k=5), 1, 4 * 64 * 128 * 4),
    "strips of two cells": (Problem(epilogue="swiglu"), Launch(128, 256, cluster_k=4), 2, 3 * 128 * 128 * 4),
}


@pytest.mark.parametrize(("problem", "launch", "count", "sums"), SPLITS.values(), ids=list(SPLITS))
def test_blocks_finish_equal_parts_of_a_tile(problem: Problem, launch: Launch, count: int, sums: int) -> None:
    """Each consists of whole strips; there is room for what the others send where the operands were."""
    launch = roomy(problem, launch)
    assert is_valid(problem, launch)
    assert finishers(problem, launch) == count
    part = finishing(problem, launch)
    assert part == replace(launch, tile_n=launch.tile_n // count, cluster_k=1)
    assert part.group_columns * count == launch.group_columns
    assert cells(problem, part) * count == cells(problem, launch)
    assert split_bytes(problem, launch) == sums <= launch.slots * launch.slot_bytes
    assert shared_bytes(problem, launch) == shared_bytes(problem, replace(launch, cluster_k=1))


def test_a_tile_with_all_of_k_is_finished_by_its_block() -> None:
    for launch in candidates(Problem(), 4096, 4096, ARCH):
        assert (finishers(Problem(), launch), split_bytes(Problem(), launch)) == (1, 0)
        assert finishing(Problem(), launch) == launch


def test_sums_over_rows_need_all_columns_of_a_tile() -> None:
    """Their workspace has a line for those of each warp group."""
    problem, launch = Problem(epilogue="dsrelu", upstream_dtype="bfloat16"), Launch(128, 128, slots=3)
    assert is_valid(problem, launch)
    assert not is_valid(problem, replace(launch, cluster_k=2))


@pytest.mark.parametrize("cluster", [(2, 1, 2), (1, 2, 2), (2, 1, 4), (2, 2, 2), (1, 4, 2)], ids=str)
def test_blocks_may_share_operands_and_parts_of_k(cluster: tuple[int, int, int]) -> None:
    launch = Launch(64, 128, *cluster, slots=4)
    assert is_valid(Problem(), launch)
    assert launch.cluster == launch.sharing * cluster[2] <= 8


def test_8_bit_operands_need_twice_the_accumulators() -> None:
    bytes_ = Problem("float8_e4m3fn")
    assert VALID.accumulators(Problem()) == 128
    assert VALID.accumulators(bytes_) == 256
    assert not is_valid(bytes_, VALID)
    assert is_valid(bytes_, Launch(128, 192, store_buffers=3))
    assert not is_valid(replace(bytes_, b_major="n"), Launch(128, 128))


def test_shared_memory() -> None:
    """Four slots of 48 KB, two buffers of 8 KB for each warp group, two barriers per slot and three more, and
    the alignment."""
    assert shared_bytes(Problem(), VALID) == 4 * 49152 + 4 * 8192 + 4 * 16 + 24 + 1024 <= MOST_SHARED_BYTES
