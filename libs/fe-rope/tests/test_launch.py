"""The launch rules: what is chosen for the shapes that matter, and that every choice covers its problem."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from fe_rope.launch import Launch, Problem, candidates, choose, config, is_valid, split_config

ARCHITECTURES = ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"]
HEADS = [1, 2, 3, 7, 16, 32, 48, 64, 100, 128, 1000]
COLUMNS = [64, 66, 68, 96, 128, 192, 256, 512, 576, 1026, 2052, 4096, 20000, 65536]


def rows_of(heads: int, columns: int, mode: str | None = None) -> Problem:
    """The problem of contiguous rows: as aligned as their length allows."""
    size = 2 * columns
    alignment = min(16, size & -size)
    return Problem(heads, columns, x_alignment=alignment, out_alignment=alignment, mode=mode)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("mode", [None, "fp4/32/ue8m0"])
def test_every_problem_gets_a_valid_launch(arch: str, mode: str | None) -> None:
    for heads in HEADS:
        for columns in COLUMNS:
            if mode and columns % 32:
                continue
            for problem in (rows_of(heads, columns, mode), replace(rows_of(heads, columns, mode), x_alignment=2)):
                launch = choose(problem, arch)
                assert is_valid(problem, launch, arch), (problem, launch)
                assert launch.threads * launch.count < 1.5 * launch.tile + 32 * launch.count


@pytest.mark.parametrize(
    ("heads", "columns", "tokens", "part"),
    [
        pytest.param(64, 512, 1, 4, id="some heads of a token"),
        pytest.param(8, 128, 2, 8, id="two tokens"),
        pytest.param(1, 512, 4, 1, id="single heads"),
        pytest.param(48, 512, 1, 4, id="heads in equal parts"),
        pytest.param(17, 128, 1, 9, id="heads in nearly equal parts"),
    ],
)
def test_tiles_of_32_bytes_a_thread(heads: int, columns: int, tokens: int, part: int) -> None:
    launch = choose(rows_of(heads, columns), "sm_90a")
    assert (launch.tokens, launch.heads) == (tokens, part)
    assert launch.count == 2 or heads == 17


def test_long_rows_are_shared_by_blocks() -> None:
    problem = rows_of(2, 20000)
    launch = choose(problem, "sm_90a")
    assert (launch.tokens, launch.heads, launch.vector_tiles(problem)) == (1, 1, 10)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
def test_no_prefetch_before_hopper(arch: str) -> None:
    assert choose(rows_of(64, 512), arch).prefetch == 0


def test_prefetch_only_long_aligned_runs() -> None:
    problem = rows_of(64, 512)
    assert choose(problem, "sm_90a").prefetch > 0
    for change in ({"x_alignment": 8}, {"packed": False}, {"heads": 17}):
        assert choose(replace(problem, **change), "sm_90a").prefetch == 0
    assert choose(rows_of(1, 128), "sm_90a").prefetch == 0


@pytest.mark.parametrize(("heads", "columns"), [(64, 512), (32, 128), (1, 512)])
@pytest.mark.parametrize("mode", [None, "fp8/32/ue8m0"])
def test_candidates_are_valid_distinct_and_start_with_the_choice(heads: int, columns: int, mode: str | None) -> None:
    problem = rows_of(heads, columns, mode)
    found = candidates(problem, "sm_90a")
    assert found[0] == choose(problem, "sm_90a")
    assert len(set(found)) == len(found) > 1
    assert all(is_valid(problem, launch, "sm_90a") for launch in found)


GOOD = Launch(threads=256, count=4, tokens=1, heads=16, vectors=64, blocks_per_sm=6, prefetch=256)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"threads": 250}, id="not whole warps"),
        pytest.param({"threads": 2048, "blocks_per_sm": 1}, id="too many threads"),
        pytest.param({"count": 3}, id="does not cover its tile"),
        pytest.param({"heads": 65, "vectors": 8}, id="more heads than there are"),
        pytest.param({"tokens": 2, "heads": 8}, id="several tokens without all heads"),
        pytest.param({"vectors": 32}, id="several heads without whole rows"),
        pytest.param({"heads": 1, "vectors": 30, "prefetch": 0}, id="groups cut in two"),
        pytest.param({"blocks_per_sm": 9}, id="more threads than a multiprocessor has"),
        pytest.param({"heads": 15}, id="prefetch beyond a token"),
        pytest.param({"prefetch": -1}, id="negative"),
    ],
)
def test_invalid_launches(change: dict[str, int]) -> None:
    problem = rows_of(64, 512)
    assert is_valid(problem, GOOD, "sm_90a")
    assert not is_valid(problem, replace(GOOD, **change), "sm_90a")


def test_config_round_trip() -> None:
    problem = rows_of(3, 96, "fp4/16/e4m3")
    launch = choose(problem, "sm_90a")
    flat = config(problem, launch)
    assert split_config({**flat, "position_dtype": "int32"}) == (problem, launch)


def test_importing_the_rules_loads_no_kernel_language() -> None:
    code = (
        "import sys, fe_rope.launch, fe_rope.launch_vision; assert not {'cutlass', 'torch', 'jax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
