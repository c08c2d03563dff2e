"""The launch rules of the gradients: what is chosen for the shapes that matter, and that every choice is possible."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from fe_norm.launch_backward import (
    BackwardLaunch,
    BackwardProblem,
    candidates,
    choose,
    config,
    is_valid,
    partial_rows,
    shared_bytes,
    split_config,
)

BF16 = "bfloat16"
SIZE = {BF16: 2, "float16": 2, "float32": 4}
COLUMNS = [1, 2, 3, 7, 16, 33, 48, 96, 100, 128, 255, 256, 320, 1000, 1024, 2880, 4097, 8192, 12345, 16384, 65535]
ARCHITECTURES = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"]
PROCESSORS = 132


def rows_of(
    columns: int, x: str = BF16, dout: str = BF16, weight: str | None = BF16, **other: object
) -> BackwardProblem:
    """The problem of contiguous rows: as aligned as their length allows."""
    x_bytes, dout_bytes = columns * SIZE[x], columns * SIZE[dout]
    alignments = {"x_alignment": min(16, x_bytes & -x_bytes), "dout_alignment": min(16, dout_bytes & -dout_bytes)}
    return BackwardProblem(columns, x, dout, weight, **{**alignments, **other})  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("x", [BF16, "float32"])
@pytest.mark.parametrize("dout", [BF16, "float32"])
def test_every_problem_gets_a_valid_launch(arch: str, x: str, dout: str) -> None:
    for columns in [*COLUMNS, 70_000, 1_000_000]:
        for weight, bias in ((None, None), (BF16, None), ("float32", "float32"), (None, BF16)):
            for kind in ({}, {"has_residual": True}, {"activation": "silu", "has_rstd": False}):
                problem = rows_of(columns, x, dout, weight, bias_dtype=bias, **kind)
                launch = choose(problem, arch, PROCESSORS)
                assert is_valid(problem, launch, arch), (problem, launch)
                assert launch.blocks == launch.blocks_per_sm * PROCESSORS
                # what the block adds up at its end takes the place of x
                assert launch.stages * SIZE[x] >= 4 or launch.groups == 1


@pytest.mark.parametrize(
    ("columns", "threads", "groups", "chunk"),
    [
        pytest.param(128, 16, 16, 1, id="short rows side by side"),
        pytest.param(1024, 32, 8, 4, id="a warp for a row"),
        pytest.param(2048, 128, 1, 2, id="a block for a row"),
        pytest.param(4096, 512, 1, 1, id="two wide blocks"),
        pytest.param(8192, 512, 1, 2, id="one wide block"),
        pytest.param(16384, 512, 1, 4, id="longest rows in shared memory"),
    ],
)
def test_choices(columns: int, threads: int, groups: int, chunk: int) -> None:
    launch = choose(rows_of(columns), "sm_90a", PROCESSORS)
    assert (launch.threads_per_row, launch.groups, launch.chunk) == (threads, groups, chunk)
    assert launch.overlap
    under_way = (launch.stages - 1) * launch.groups * rows_of(columns).row_bytes * launch.blocks_per_sm
    assert under_way >= 64 << 10


def test_longer_rows_keep_their_sums_in_memory() -> None:
    problem = rows_of(100_000)
    launch = choose(problem, "sm_90a", PROCESSORS)
    assert not launch.is_one_pass(problem)
    assert (launch.groups, launch.blocks) == (1, PROCESSORS)


def test_shared_memory_with_the_gradient_of_the_sum() -> None:
    problem = rows_of(8192, has_residual=True)
    launch = choose(problem, "sm_90a", PROCESSORS)
    assert (launch.blocks_per_sm, launch.stages) == (1, 3)
    assert shared_bytes(problem, launch) == 3 * 3 * 16384 + 16384 + 256


def test_the_second_kernel_starts_early_from_hopper_on() -> None:
    assert choose(rows_of(4096), "sm_90a", PROCESSORS).overlap
    assert not choose(rows_of(4096), "sm_80", PROCESSORS).overlap


@pytest.mark.parametrize("columns", [128, 320, 4096, 8192])
def test_candidates_are_valid_distinct_and_start_with_the_choice(columns: int) -> None:
    problem = rows_of(columns)
    found = candidates(problem, "sm_90a", PROCESSORS)
    assert found[0] == choose(problem, "sm_90a", PROCESSORS)
    assert len(set(found)) == len(found) > 8
    assert all(is_valid(problem, launch, "sm_90a") for launch in found)
    assert {launch.overlap for launch in found} == {False, True}


GOOD = BackwardLaunch(8, 256, 1, 4, 2, 2, 2 * PROCESSORS)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"vector": 3}, id="vector does not divide the row"),
        pytest.param({"threads_per_row": 24, "chunk": 43}, id="not whole warps"),
        pytest.param({"threads_per_row": 64, "groups": 4, "chunk": 16}, id="several groups of more than a warp"),
        pytest.param({"threads_per_row": 2048, "chunk": 1}, id="too many threads"),
        pytest.param({"stages": 1}, id="nothing under way"),
        pytest.param({"stages": 4}, id="too much shared memory"),
        pytest.param({"blocks_per_sm": 9}, id="more threads than a multiprocessor has"),
        pytest.param({"chunk": 1, "threads_per_row": 32, "groups": 8}, id="sums in memory of several rows at once"),
        pytest.param({"blocks": 0}, id="no blocks"),
    ],
)
def test_invalid_launches(change: dict[str, int]) -> None:
    problem = rows_of(8192)
    assert is_valid(problem, GOOD, "sm_90a")
    assert not is_valid(problem, replace(GOOD, **change), "sm_90a")


def test_only_hopper_and_later_start_the_second_kernel_early() -> None:
    problem, early = rows_of(4096), replace(GOOD, chunk=2, overlap=True)
    assert is_valid(problem, early, "sm_90a")
    assert not is_valid(problem, early, "sm_80")
    assert not any(launch.overlap for launch in candidates(problem, "sm_80", PROCESSORS))


def test_rows_of_sums() -> None:
    assert [partial_rows(GOOD, rows) for rows in (0, 1, 263, 264, 265, 10**9)] == [1, 1, 263, 264, 264, 264]
    several = replace(GOOD, groups=16)
    assert [partial_rows(several, rows) for rows in (1, 16, 17, 10**6)] == [1, 1, 2, 264]


def test_config_round_trip() -> None:
    problem = rows_of(320, "float32", BF16, "float16", bias_dtype="float16", activation="silu", has_rstd=False)
    launch = choose(problem, "sm_90a", PROCESSORS)
    assert split_config(config(problem, launch)) == (problem, launch)


def test_importing_the_rules_loads_no_kernel_language() -> None:
    code = "import sys, fe_norm.launch_backward; assert not {'cutlass', 'torch', 'jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
