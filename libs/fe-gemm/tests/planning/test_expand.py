"""How an expansion is launched: every element has one thread, invalid launches are refused, choices are valid."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from fe_gemm.planning.expand import (
    FORMATS,
    GROUP,
    TILE,
    Launch,
    Problem,
    candidates,
    choose,
    config,
    is_valid,
    split_config,
    workspace_shape,
)
from fe_runtime.formats import BLOCK_FORMATS

ARCHITECTURES = ["sm_80", "sm_90a", "sm_100a", "sm_120a"]
MXFP8, MXFP8_COLUMNS = Problem(), Problem("float8_e5m2", major="m")
NVFP4 = Problem("float4_e2m1fn", "float8_e4m3fn", 16)
PROBLEMS = [MXFP8, MXFP8_COLUMNS, NVFP4, Problem("float4_e2m1fn"), Problem("float4_e2m1fn", vec=16)]


def test_formats_are_those_of_the_runtime() -> None:
    assert set(FORMATS) == {(known.element, known.scale, known.vec) for known in BLOCK_FORMATS}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_choice_and_candidates_are_valid(problem: Problem, arch: str) -> None:
    found = candidates(problem, arch)
    assert found[0] == choose(problem, arch)
    assert len(found) == len(set(found)) > 10
    assert all(is_valid(problem, launch, arch) for launch in found)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_each_line_of_a_tile_has_one_owner(problem: Problem) -> None:
    for launch in candidates(problem, "sm_90a"):
        owners = Counter(
            (part * launch.repeats + repeat) * launch.groups + group + TILE // GROUP * q
            for part in range(launch.parts)
            for repeat in range(launch.repeats)
            for group in range(launch.groups)
            for q in range(GROUP)
        )
        assert owners == dict.fromkeys(range(TILE), 1), launch


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(replace(MXFP8, vec=16), id="8-bit elements in blocks of 16"),
        pytest.param(replace(MXFP8, scale="float8_e4m3fn"), id="8-bit elements with e4m3 scales"),
        pytest.param(replace(NVFP4, vec=32), id="e4m3 scales of 32 elements"),
        pytest.param(replace(NVFP4, major="m"), id="pairs along the rows"),
        pytest.param(replace(MXFP8, major="n"), id="unknown major"),
        pytest.param(replace(MXFP8, element="bfloat16"), id="wide elements"),
    ],
)
def test_other_operands_are_refused(problem: Problem) -> None:
    assert not is_valid(problem, Launch(), "sm_90a")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        pytest.param({"vector": 4}, MXFP8, id="vector narrower than a store"),
        pytest.param({"vector": 32}, MXFP8, id="vector that a line may end in"),
        pytest.param({"vector": 32}, NVFP4, id="vector wider than a block"),
        pytest.param({"across": 24}, MXFP8, id="threads that no line has"),
        pytest.param({"threads": 1024, "across": 16}, MXFP8, id="more lines than a tile has"),
        pytest.param({"repeats": 3}, MXFP8, id="part of a tile"),
        pytest.param({"threads": 2048}, MXFP8, id="block too large"),
        pytest.param({"blocks_per_sm": 9}, MXFP8, id="more threads than fit"),
        pytest.param({"blocks_per_sm": 0}, MXFP8, id="no block"),
    ],
)
def test_other_launches_are_refused(change: dict[str, int], problem: Problem) -> None:
    assert is_valid(problem, Launch(), "sm_90a")
    assert not is_valid(problem, replace(Launch(), **change), "sm_90a")


def test_workspace_keeps_the_major_and_rounds_the_pitch() -> None:
    assert workspace_shape(MXFP8, 300, 528, 2) == (600, 528)
    assert workspace_shape(MXFP8_COLUMNS, 528, 300, 2) == (600, 528)
    assert workspace_shape(NVFP4, 3, 33, 1) == (3, 40)


def test_configuration_is_reversible() -> None:
    for problem in PROBLEMS:
        launch = choose(problem, "sm_90a")
        assert split_config(dict(config(problem, launch))) == (problem, launch)
