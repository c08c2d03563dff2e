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
    is_valid,
    shared_bytes,
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
    "K in parts, and shared operands": {"cluster_k": 2, "cluster_m": 2, "tile_n": 128},
    "K in too many parts": {"cluster_k": 9, "tile_m": 64, "tile_n": 64, "slots": 2},
    "no room for the sums of others": {"cluster_k": 2},
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


def test_sums_of_other_blocks_take_shared_memory() -> None:
    launch = Launch(64, 128, cluster_k=3)
    more = shared_bytes(Problem(), launch) - shared_bytes(Problem(), replace(launch, cluster_k=1))
    assert more == 2 * 64 * 128 * 4


def test_8_bit_operands_need_twice_the_accumulators() -> None:
    bytes_ = Problem("float8_e4m3fn")
    assert VALID.accumulators(Problem()) == 128
    assert VALID.accumulators(bytes_) == 256
    assert not is_valid(bytes_, VALID)
    assert is_valid(bytes_, Launch(128, 192, store_buffers=3))
    assert not is_valid(replace(bytes_, b_major="n"), Launch(128, 128))


def test_shared_memory() -> None:
    """Four slots of 48 KB, two buffers of 8 KB for each warp group, two barriers per slot and two more, and the
    alignment."""
    assert shared_bytes(Problem(), VALID) == 4 * 49152 + 4 * 8192 + 4 * 16 + 16 + 1024 <= MOST_SHARED_BYTES
