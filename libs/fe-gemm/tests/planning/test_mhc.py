"""The launch rules of ``mhc_projection_backward``: what is chosen, and that every choice covers its problem."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from fe_gemm.planning.mhc import Launch, Problem, candidates, choose, config, is_valid, shared_bytes, split_config

ARCHITECTURES = ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"]
COLUMNS = [8, 16, 64, 120, 264, 4096, 7168, 16384, 20480, 28672, 100_000]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("coefficients", [1, 7, 8, 24, 32, 33, 48, 63, 64])
def test_every_problem_gets_a_valid_launch(coefficients: int, arch: str) -> None:
    for columns in COLUMNS:
        for sm_count in (1, 40, 108, 132, 148):
            problem = Problem(coefficients, columns)
            launch = choose(problem, arch, sm_count)
            assert is_valid(problem, launch, arch), (problem, launch)
            assert launch.strips(problem) * launch.strip >= columns
            assert launch.overlap == (arch in ("sm_90a", "sm_100a", "sm_120a"))


@pytest.mark.parametrize(
    ("columns", "splits"),
    [
        pytest.param(20480, 3, id="80 strips, 264 places: 240 blocks"),
        pytest.param(16384, 4, id="64 strips: 256 blocks"),
        pytest.param(4096, 15, id="16 strips: 240 blocks"),
        pytest.param(28672, 7, id="112 strips: three rounds of nearly 264"),
    ],
)
def test_blocks_come_in_whole_rounds(columns: int, splits: int) -> None:
    assert choose(Problem(24, columns), "sm_90a", 132).splits == splits


def test_one_strip_is_split_as_far_as_it_goes() -> None:
    assert choose(Problem(24, 8), "sm_90a", 132).splits == 32


def test_many_coefficients_leave_a_thread_fewer_columns() -> None:
    assert [choose(Problem(n, 4096), "sm_90a", 132).vector for n in (1, 32, 33, 64)] == [8, 8, 4, 4]


def test_candidates_are_valid_and_start_with_the_choice() -> None:
    problem = Problem(24, 20480)
    found = candidates(problem, "sm_90a", 132)
    assert found[0] == choose(problem, "sm_90a", 132)
    assert len(set(found)) == len(found) > 20
    assert all(is_valid(problem, launch, "sm_90a") for launch in found)
    assert {launch.warps for launch in found} >= {2, 4, 8}


@pytest.mark.parametrize(
    "change",
    [
        {"vector": 16},
        {"warps": 3},
        {"stages": 1},
        {"chunk": 48},
        {"warps": 1, "chunk": 64},
        {"blocks_per_sm": 0},
        {"blocks_per_sm": 4},
        {"splits": 0},
        {"stages": 16},
    ],
    ids=str,
)
def test_invalid_launches(change: dict[str, int]) -> None:
    problem = Problem(24, 20480)
    good = Launch(8, 4, 4, 32, 2, 3)
    assert is_valid(problem, good, "sm_90a")
    assert not is_valid(problem, replace(good, **change), "sm_90a")  # type: ignore[arg-type]


@pytest.mark.parametrize("problem", [Problem(0, 8), Problem(65, 8), Problem(8, 0), Problem(8, 12)], ids=str)
def test_invalid_problems(problem: Problem) -> None:
    assert not is_valid(problem, Launch(4, 4, 2, 32, 1, 1), "sm_90a")


def test_the_second_kernel_starts_early_on_hopper_only() -> None:
    problem, launch = Problem(24, 4096), Launch(8, 4, 4, 32, 2, 3, overlap=True)
    assert [is_valid(problem, launch, arch) for arch in ARCHITECTURES] == [False, False, True, True, True]


def test_shared_memory() -> None:
    # Four steps of 16 rows and 256 columns of bf16; twice two steps, with 24 words for each of 32 lanes, and 32 scales.
    assert shared_bytes(Problem(24, 20480), Launch(8, 4, 4, 32, 2, 3)) == 4 * 16 * 256 * 2 + 2 * (2 * 24 * 32 * 4 + 128)


def test_configuration_and_back() -> None:
    problem = Problem(24, 20480)
    launch = choose(problem, "sm_90a", 132)
    assert split_config(config(problem, launch)) == (problem, launch)


def test_imports_no_framework() -> None:
    code = (
        "import sys, fe_gemm.planning.mhc; print([n for n in ('torch', 'jax', 'cutlass', 'numpy') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
