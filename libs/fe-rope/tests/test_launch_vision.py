"""The launch rules of ``vision_rope_backward``."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fe_rope.launch_vision import (
    COLUMNS,
    ROWS,
    SCATTERED,
    Launch,
    Problem,
    candidates,
    choose,
    config,
    is_valid,
    split_config,
)

NATIVE = Problem(16, 64)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("form", [ROWS, COLUMNS, SCATTERED])
def test_every_problem_gets_a_valid_launch(arch: str, form: str) -> None:
    for heads in (1, 3, 16, 100):
        for channels in (2, 6, 8, 64, 72, 80, 96, 128, 250, 256, 1024, 8192):
            if form == COLUMNS and channels > 1024:
                continue
            problem = Problem(heads, channels, form, form, form, packed=False)
            launch = choose(problem, arch)
            assert is_valid(problem, launch, arch), (problem, launch)
            assert launch.rounds(problem) <= 4 or channels > 1024


def test_the_native_layout() -> None:
    launch = choose(NATIVE, "sm_90a")
    assert (launch.threads, launch.tokens, launch.rounds(NATIVE)) == (256, 64, 1)
    assert (launch.heads, launch.prefetch) == (1, 0)
    assert launch.shared_bytes(NATIVE) == launch.heads * 64 * 64 * 2


def test_prefetch_needs_the_native_layout_and_hopper() -> None:
    assert choose(NATIVE, "sm_80").prefetch == 0
    for change in ({"packed": False}, {"k": ROWS}, {"q_alignment": 8}, {"channels": 6}):
        assert choose(replace(NATIVE, **change), "sm_90a").prefetch == 0


def test_candidates_are_valid_distinct_and_start_with_the_choice() -> None:
    found = candidates(NATIVE, "sm_90a")
    assert found[0] == choose(NATIVE, "sm_90a")
    assert len(set(found)) == len(found) > 5
    assert all(is_valid(NATIVE, launch, "sm_90a") for launch in found)


GOOD = Launch(threads=256, tokens=64, heads=2, blocks_per_sm=4, prefetch=80)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"threads": 250}, id="not whole warps"),
        pytest.param({"tokens": 48}, id="no power of two"),
        pytest.param({"tokens": 4}, id="less than an access along the tokens"),
        pytest.param({"heads": 17}, id="more heads than there are"),
        pytest.param({"heads": 8}, id="more shared memory than there is"),
        pytest.param({"blocks_per_sm": 9}, id="more threads than a multiprocessor has"),
        pytest.param({"prefetch": -1}, id="negative"),
    ],
)
def test_invalid_launches(change: dict[str, int]) -> None:
    assert is_valid(NATIVE, GOOD, "sm_90a")
    assert not is_valid(NATIVE, replace(GOOD, **change), "sm_90a")


def test_config_round_trip() -> None:
    problem = Problem(3, 72, SCATTERED, ROWS, COLUMNS, stored=True)
    launch = choose(problem, "sm_90a")
    assert split_config(config(problem, launch)) == (problem, launch)
