"""Where ``vision_rope_backward`` keeps a tile that it transposes: each value once, and few threads at the same bank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs the kernel language (nvidia-cutlass-dsl)")

from fe_rope.kernels.vision_rope_backward import RUN, _slot
from fe_rope.launch_vision import COLUMNS, Launch, Problem, choose

BANKS = 32  # of four bytes


def tile(problem: Problem) -> tuple[Any, Launch]:
    launch = choose(problem, "sm_90a")
    return SimpleNamespace(setup=SimpleNamespace(problem=problem, launch=launch)), launch


@pytest.mark.parametrize("channels", [2, 6, 24, 64, 72, 128, 250, 1024])
def test_every_value_has_its_own_place(channels: int) -> None:
    problem = Problem(3, channels, COLUMNS, COLUMNS, COLUMNS, packed=False)
    known, launch = tile(problem)
    runs = launch.tokens // RUN
    places = {
        _slot(known, stage, channel, run)
        for stage in range(problem.staged * launch.heads)
        for channel in range(channels)
        for run in range(runs)
    }
    assert places == set(range(problem.staged * launch.heads * channels * runs))
    assert len(places) * RUN * 2 == launch.shared_bytes(problem)


def test_a_warp_reads_the_native_tile_without_conflicts() -> None:
    """Lanes of one read take a token's value of different vectors, for 8 tokens: each bank serves one word."""
    known, _ = tile(Problem(16, 64))
    for start in range(0, 256, 32):
        for half in range(2):
            for i in range(8):
                words = set()
                for thread in range(start, start + 32):
                    local, chunk = thread // 4, thread % 4
                    slot = _slot(known, 0, (half * 4 + chunk) * 8 + i, local // RUN)
                    words.add((slot * RUN + local % RUN) // 2)
                assert len({word % BANKS for word in words}) == len(words)


def test_a_quarter_of_a_warp_writes_to_all_banks() -> None:
    """Accesses of 16 bytes go in quarters of a warp."""
    known, launch = tile(Problem(16, 64))
    runs = launch.tokens // RUN
    for start in range(0, 512, 8):
        spots = {_slot(known, 0, index // runs, index % runs) % 8 for index in range(start, start + 8)}
        assert len(spots) == 8
