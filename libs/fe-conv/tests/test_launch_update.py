"""The launch rules of ``causal_conv1d_update``: what is chosen for the layouts that matter, and what is valid."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from fe_conv.launch_update import Launch, Problem, candidates, choose, config, general, is_valid, split_config

BF16 = "bfloat16"
ROW = Problem(
    BF16, 4, "silu", BF16, layout="row", length=4, channels=8,
    x_alignment=16, state_alignment=8, weight_alignment=8, bias_alignment=16, out_alignment=16,
)  # fmt: skip
PLANE = replace(ROW, layout="plane", length=3, state_alignment=16)


@pytest.mark.parametrize(
    ("problem", "vector", "rows"),
    [
        pytest.param(ROW, 1, 1, id="8 bytes per channel"),
        pytest.param(replace(ROW, state_alignment=16), 2, 1, id="16 bytes per pair of channels"),
        pytest.param(replace(ROW, length=3, state_alignment=16), 2, 1, id="12 bytes per pair of channels"),
        pytest.param(replace(ROW, length=3, state_alignment=2), 1, 1, id="6 bytes per channel"),
        pytest.param(replace(ROW, state_alignment=16, channels=1), 1, 1, id="an odd number of channels"),
        pytest.param(PLANE, 8, 1, id="16 bytes of each plane"),
        pytest.param(replace(PLANE, x_alignment=4), 2, 1, id="as wide as the narrowest operand"),
        pytest.param(replace(PLANE, dtype="float32", weight_dtype="float32"), 4, 1, id="16 bytes of float32"),
    ],
)
def test_choices(problem: Problem, vector: int, rows: int) -> None:
    launch = choose(problem, "sm_90a")
    assert (launch.vector, launch.rows) == (vector, rows)
    assert is_valid(problem, launch, "sm_90a")


def test_the_general_kernel_takes_one_channel_of_one_row() -> None:
    for problem in (ROW, PLANE, replace(ROW, tokens=True, ring=True, width=32)):
        whole = general(problem)
        launch = choose(whole, "sm_90a")
        assert (launch.vector, launch.rows) == (1, 1)
        assert is_valid(whole, choose(whole, "sm_90a"), "sm_90a")
    assert general(ROW) == general(replace(ROW, length=7, layout="any", channels=1, x_alignment=4))


@pytest.mark.parametrize("problem", [ROW, PLANE, general(ROW)], ids=["row", "plane", "general"])
def test_candidates_are_valid_distinct_and_start_with_the_choice(problem: Problem) -> None:
    found = candidates(problem, "sm_90a")
    assert found[0] == choose(problem, "sm_90a")
    assert len(set(found)) == len(found) > 1
    assert all(is_valid(problem, launch, "sm_90a") for launch in found)


@pytest.mark.parametrize(
    ("problem", "launch"),
    [
        pytest.param(ROW, Launch(3, 128, 1), id="vector does not divide the channels"),
        pytest.param(replace(ROW, channels=1), Launch(2, 128, 1), id="vector of an odd number of channels"),
        pytest.param(ROW, Launch(1, 100, 1), id="no whole warps"),
        pytest.param(ROW, Launch(1, 2048, 1), id="too many threads"),
        pytest.param(ROW, Launch(1, 128, 0), id="no rows"),
        pytest.param(replace(ROW, width=6), Launch(1, 128, 1), id="slot shorter than the history"),
        pytest.param(replace(ROW, width=1), Launch(1, 128, 1), id="no history"),
        pytest.param(replace(ROW, length=9), Launch(1, 128, 1), id="slot too long"),
        pytest.param(replace(ROW, ring=True), Launch(1, 128, 1), id="ring"),
        pytest.param(replace(ROW, tokens=True), Launch(1, 128, 1), id="several tokens"),
        pytest.param(replace(PLANE, length=8), Launch(8, 128, 8), id="too many registers"),
        pytest.param(ROW, Launch(1, 128, 1, 16), id="more blocks than there are registers for"),
        pytest.param(general(ROW), Launch(2, 128, 1), id="general kernel with two channels"),
        pytest.param(general(replace(ROW, width=33)), Launch(1, 128, 1), id="too many taps"),
    ],
)
def test_invalid_launches(problem: Problem, launch: Launch) -> None:
    assert not is_valid(problem, launch, "sm_90a")


def test_config_round_trip() -> None:
    launch = choose(PLANE, "sm_90a")
    assert split_config(config(PLANE, launch)) == (PLANE, launch)


def test_importing_the_rules_loads_no_kernel_language() -> None:
    code = "import sys, fe_conv.launch_update; assert not {'cutlass', 'torch', 'jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
