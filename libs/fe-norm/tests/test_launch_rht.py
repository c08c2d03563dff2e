"""The launch rules of ``rmsnorm_rht_amax``: what is chosen, and that every choice covers its problem."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from fe_norm.launch_rht import Launch, Problem, candidates, choose, config, folded_rows, is_valid, split_config

COLUMNS = [16, 32, 48, 96, 128, 528, 1024, 2048, 2880, 4096, 5120, 7168, 8192, 12288, 16384, 32768, 100_000, 131_072]
ARCHITECTURES = ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"]
DTYPES = ["bfloat16", "float32"]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.parametrize("weight", DTYPES)
@pytest.mark.parametrize("group", [1, 2, 3, 7, 8, 12, 16])
def test_every_problem_gets_a_valid_launch(group: int, weight: str, x: str, arch: str) -> None:
    for columns in COLUMNS:
        problem = Problem(columns, group, x_dtype=x, weight_dtype=weight)
        launch = choose(problem, arch)
        assert is_valid(problem, launch, arch), (problem, launch)
        assert launch.teams <= group
        assert launch.ahead == 0 or group > launch.teams  # nothing comes after a team's only row


def test_narrow_rows_need_more_registers() -> None:
    narrow, wide = (choose(Problem(8192, 8, x_alignment=alignment), "sm_90a") for alignment in (2, 16))
    assert narrow.chunk <= wide.chunk


@pytest.mark.parametrize(
    ("columns", "group", "threads_per_row", "teams", "groups"),
    [
        pytest.param(4096, 8, 128, 8, 1, id="four warps for a row, a block for a group"),
        pytest.param(8192, 8, 256, 4, 1, id="half a group at a time"),
        pytest.param(4096, 3, 256, 1, 1, id="a block for a row: three rows are no power of two"),
        pytest.param(1024, 8, 32, 8, 1, id="a warp for a row, a block for a group"),
        pytest.param(1024, 2, 32, 2, 4, id="four groups in a block"),
        pytest.param(128, 8, 8, 8, 4, id="four rows in a warp"),
        pytest.param(1024, 3, 32, 1, 8, id="three rows are no power of two"),
        pytest.param(16, 1, 2, 1, 128, id="two threads for a row"),
    ],
)
def test_choices(columns: int, group: int, threads_per_row: int, teams: int, groups: int) -> None:
    launch = choose(Problem(columns, group), "sm_90a")
    assert (launch.threads_per_row, launch.teams, launch.groups) == (threads_per_row, teams, groups)


def test_longer_rows_are_read_twice() -> None:
    problem = Problem(131_072, 8)
    launch = choose(problem, "sm_90a")
    assert not launch.is_one_pass(problem)
    assert (launch.teams, launch.groups, launch.ahead, launch.prefetch) == (1, 1, 0, 0)


@pytest.mark.parametrize(
    ("rows", "folded"), [(1, 1), (3, 3), (16, 16), (17, 1), (18, 9), (32, 16), (34, 2), (100, 10), (2**20, 16)]
)
def test_folded_rows_divide_the_group(rows: int, folded: int) -> None:
    assert folded_rows(rows) == folded
    assert rows % folded == 0


def test_prefetch_only_whole_cache_lines_from_hopper_on() -> None:
    assert choose(Problem(4096, 8), "sm_90a").prefetch > 0
    assert choose(Problem(4096, 8), "sm_80").prefetch == 0
    assert choose(Problem(4096 + 16, 8), "sm_90a").prefetch == 0
    assert choose(Problem(4096, 8, x_alignment=8), "sm_90a").prefetch == 0


@pytest.mark.parametrize("columns", [128, 2048, 4096, 16384])
def test_candidates_are_valid_distinct_and_start_with_the_choice(columns: int) -> None:
    problem = Problem(columns, 8)
    found = candidates(problem, "sm_90a")
    assert found[0] == choose(problem, "sm_90a")
    assert len(set(found)) == len(found) > 4
    assert all(is_valid(problem, launch, "sm_90a") for launch in found)


GOOD = Launch(threads_per_row=32, teams=8, groups=1, chunk=4, blocks_per_sm=3, prefetch=64)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"threads_per_row": 1, "chunk": 128}, id="half a block of 16 per thread"),
        pytest.param({"threads_per_row": 48}, id="no whole warps"),
        pytest.param({"threads_per_row": 64, "groups": 2}, id="more teams of several warps than barriers"),
        pytest.param({"teams": 16}, id="more teams than rows"),
        pytest.param({"groups": 3}, id="groups that are no power of two"),
        pytest.param({"groups": 8}, id="too many threads"),
        pytest.param({"blocks_per_sm": 9}, id="more threads than a multiprocessor has"),
        pytest.param({"chunk": 2, "prefetch": 0}, id="two passes of several teams"),
        pytest.param({"ahead": -1}, id="negative"),
        pytest.param({"ahead": 2}, id="two rows ahead"),
        pytest.param({"lead": 2}, id="beyond the first rows of the next block"),
    ],
)
def test_invalid_launches(change: dict[str, int]) -> None:
    problem = Problem(1024, 8)
    assert is_valid(problem, GOOD, "sm_90a")
    assert not is_valid(problem, replace(GOOD, **change), "sm_90a")


def test_config_round_trip() -> None:
    problem = Problem(320, 4, True, "float16", "float32", 8, 4, 4)
    launch = choose(problem, "sm_90a")
    assert split_config(config(problem, launch)) == (problem, launch)


def test_importing_the_rules_loads_no_kernel_language() -> None:
    code = "import sys, fe_norm.launch_rht; assert not {'cutlass', 'torch', 'jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
