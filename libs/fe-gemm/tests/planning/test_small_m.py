"""How K is cut for a few rows, and which launches fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fe_gemm.planning.small_m import (
    SmallLaunch,
    SmallProblem,
    candidates,
    choose,
    config,
    is_valid,
    shared_bytes,
    slices,
    split_config,
)

ARCHITECTURES = {
    "sm_80": 163,
    "sm_90a": 227,
    "sm_100a": 227,
    "sm_120a": 99,
}  # KB of shared memory that a block may have
MXFP8 = SmallProblem()
NVFP4 = SmallProblem("float4_e2m1fn", "float8_e4m3fn", 16, "float4_e2m1fn")


@pytest.mark.parametrize("tokens", [8, 16, 24, 32])
@pytest.mark.parametrize("problem", [MXFP8, NVFP4], ids=str)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_candidates_fit(arch: str, problem: SmallProblem, tokens: int) -> None:
    problem = replace(problem, tokens=tokens)
    found = candidates(problem, arch)
    assert found[0] == choose(problem, arch)
    assert len(found) == len(set(found))
    assert all(shared_bytes(problem, launch) <= ARCHITECTURES[arch] * 1024 for launch in found)


def test_shared_memory_of_the_usual_launch() -> None:
    """Three stages of 10 vectors, tokens of 2048 of K in bf16, sums of 128 rows for each of four warps."""
    assert choose(MXFP8, "sm_90a") == SmallLaunch(4, 3, 32)
    assert choose(NVFP4, "sm_90a") == SmallLaunch(4, 3, 16)
    assert shared_bytes(MXFP8, SmallLaunch(4, 3, 32)) == 3 * 256 * 160 + 16 * 2048 * 2 + 4 * 128 * 16 * 4


def test_warps_with_half_the_rows_take_half_the_memory() -> None:
    half, whole = SmallLaunch(4, 2, 1, quarters=2), SmallLaunch(4, 2, 1)
    assert half.threads == 2 * whole.threads == 512
    assert shared_bytes(MXFP8, half) - shared_bytes(MXFP8, whole) == 2 * 256 * 32  # each copies the scales
    assert any(launch.quarters == 2 and launch.threads == 512 for launch in candidates(NVFP4, "sm_90a"))
    assert not is_valid(MXFP8, replace(whole, quarters=3), "sm_90a")


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(replace(MXFP8, tokens=12), id="tokens that no instruction has"),
        pytest.param(replace(MXFP8, tokens=64), id="many tokens"),
        pytest.param(replace(MXFP8, token_element="float4_e2m1fn"), id="elements of different widths"),
        pytest.param(replace(MXFP8, vec=16), id="unknown format"),
        pytest.param(replace(MXFP8, out_dtype="float8_e4m3fn"), id="narrow product"),
    ],
)
def test_other_products_are_refused(problem: SmallProblem) -> None:
    assert not is_valid(problem, SmallLaunch(), "sm_90a")


@pytest.mark.parametrize(
    ("n", "k", "multiprocessors", "count"),
    [
        pytest.param(28672, 8192, 132, 4, id="as many as the tokens need"),
        pytest.param(128, 2048, 132, 4, id="few rows: two steps for each warp"),
        pytest.param(1024, 8192, 132, 16, id="few rows: nearly all multiprocessors are busy"),
        pytest.param(128, 64, 132, 1, id="a single step"),
        pytest.param(128, 8192, 3, 0, id="no room"),
    ],
)
def test_slices(n: int, k: int, multiprocessors: int, count: int) -> None:
    assert slices(MXFP8, SmallLaunch(), n, k, multiprocessors) == count


def test_slices_have_room() -> None:
    launch = choose(MXFP8, "sm_90a")
    for k in range(32, 40000, 1184):
        steps = -(-k // MXFP8.depth)
        count = slices(MXFP8, launch, 1000, k, 132)
        assert -(-steps // count) <= launch.slice_steps


def test_configuration_is_reversible() -> None:
    assert split_config(dict(config(NVFP4, SmallLaunch(2)))) == (NVFP4, SmallLaunch(2))
