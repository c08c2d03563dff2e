"""The launch rules: what is chosen for the shapes that matter, and that every choice covers its problem."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from fe_norm.launch import Launch, Problem, candidates, choose, config, is_valid, loads_parameters_late, split_config

BF16 = "bfloat16"
COLUMNS = [1, 2, 3, 7, 16, 33, 48, 96, 100, 128, 160, 255, 256, 320, 1000, 1024, 2880, 4097, 8192, 12345, 65535, 65536]
LONG = [70_000, 100_001, 1_000_000]
FORMATS = [BF16, "float32", "float8_e4m3fn", "nvfp4"]
ARCHITECTURES = ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"]


def rows_of(columns: int, dtype: str = BF16, out: str = BF16, weight: str | None = BF16, **other: object) -> Problem:
    """The problem of contiguous rows: as aligned as their length allows."""
    size = columns * (4 if dtype == "float32" else 2)
    return Problem(columns, dtype, out, weight, x_alignment=min(16, size & -size), **other)  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("out", FORMATS)
@pytest.mark.parametrize("dtype", [BF16, "float32"])
@pytest.mark.parametrize("weight", [None, BF16, "float32"])
def test_every_problem_gets_a_valid_launch(arch: str, out: str, dtype: str, weight: str | None) -> None:
    for columns in COLUMNS + LONG:
        if out == "nvfp4" and columns % 16:
            continue
        for bias in (False, True):
            problem = rows_of(columns, dtype, out, weight, has_bias=bias)
            launch = choose(problem, arch)
            assert is_valid(problem, launch, arch), (problem, launch)
            covered = launch.chunk * launch.threads_per_row * launch.vector
            assert covered >= columns or launch.tile == 1


@pytest.mark.parametrize(
    ("columns", "threads_per_row", "rows", "chunk"),
    [
        pytest.param(128, 16, 2, 1, id="two short rows per group"),
        pytest.param(96, 4, 1, 3, id="no idle threads at the end of a row"),
        pytest.param(1024, 128, 2, 1, id="a block for two rows"),
        pytest.param(8192, 512, 1, 2, id="32 bytes per thread"),
        pytest.param(32768, 512, 1, 8, id="long rows in registers"),
        pytest.param(65536, 1024, 1, 8, id="longest rows in registers"),
    ],
)
def test_measured_choices(columns: int, threads_per_row: int, rows: int, chunk: int) -> None:
    launch = choose(rows_of(columns), "sm_90a")
    assert (launch.threads_per_row, launch.rows, launch.chunk) == (threads_per_row, rows, chunk)


def test_longer_rows_are_read_twice() -> None:
    launch = choose(rows_of(100_000), "sm_90a")
    assert not launch.is_one_pass(rows_of(100_000))
    assert (launch.tile, launch.prefetch) == (1, 0)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
def test_no_prefetch_before_hopper(arch: str) -> None:
    assert choose(rows_of(8192), arch).prefetch == 0


def test_prefetch_only_whole_cache_lines() -> None:
    assert choose(rows_of(8192), "sm_90a").prefetch > 0
    assert choose(rows_of(8192 + 8), "sm_90a").prefetch == 0
    assert choose(replace(rows_of(8192), x_alignment=8), "sm_90a").prefetch == 0


def test_wide_parameters_are_loaded_late() -> None:
    narrow, wide = rows_of(8192), rows_of(32768, weight="float32", has_bias=True)
    assert not loads_parameters_late(narrow, choose(narrow, "sm_90a"))
    assert loads_parameters_late(wide, choose(wide, "sm_90a"))


@pytest.mark.parametrize("columns", [128, 320, 8192, 65536])
def test_candidates_are_valid_distinct_and_start_with_the_choice(columns: int) -> None:
    problem = rows_of(columns)
    found = candidates(problem, "sm_90a")
    assert found[0] == choose(problem, "sm_90a")
    assert len(set(found)) == len(found) > 1
    assert all(is_valid(problem, launch, "sm_90a") for launch in found)


GOOD = Launch(vector=8, threads_per_row=512, groups=1, rows=1, blocks_per_sm=4, chunk=2, prefetch=256)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"vector": 3}, id="vector does not divide the row"),
        pytest.param({"threads_per_row": 24, "chunk": 43}, id="not whole warps"),
        pytest.param({"threads_per_row": 64, "groups": 4, "chunk": 16}, id="several groups of more than a warp"),
        pytest.param({"threads_per_row": 2048}, id="too many threads"),
        pytest.param({"blocks_per_sm": 5}, id="more threads than a multiprocessor has"),
        pytest.param({"chunk": 1}, id="two passes with prefetch"),
        pytest.param({"chunk": 1, "prefetch": 0, "rows": 2}, id="two passes of two rows"),
        pytest.param({"rows": 0}, id="no rows"),
        pytest.param({"prefetch": -1}, id="negative"),
    ],
)
def test_invalid_launches(change: dict[str, int]) -> None:
    problem = rows_of(8192)
    assert is_valid(problem, GOOD, "sm_90a")
    assert not is_valid(problem, replace(GOOD, **change), "sm_90a")


def test_nvfp4_needs_pairs_of_threads_with_eight_values() -> None:
    problem = rows_of(128, out="nvfp4")
    good = choose(problem, "sm_90a")
    assert is_valid(problem, good, "sm_90a")
    assert not is_valid(problem, replace(good, vector=4, chunk=4), "sm_90a")
    assert not is_valid(problem, replace(good, threads_per_row=1, groups=128, chunk=16), "sm_90a")


def test_config_round_trip() -> None:
    problem = rows_of(320, "float32", "nvfp4", "float16", has_bias=True)
    launch = choose(problem, "sm_90a")
    assert split_config(config(problem, launch)) == (problem, launch)


def test_importing_the_rules_loads_no_kernel_language() -> None:
    code = "import sys, fe_norm.launch; assert not {'cutlass', 'torch', 'jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
