"""The launches of the CSA compressor's kernels: what is chosen is valid, and so is every alternative."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fe_attention.planning.csa import (
    MOST_ENTRIES,
    Problem,
    backward_candidates,
    choose_backward,
    choose_forward,
    config,
    forward_candidates,
    is_valid,
    partial_rows,
    split_config,
)

PROCESSORS = 132
WINDOWS = [
    (1, 1),
    (1, 2),
    (2, 2),
    (4, 1),
    (4, 2),
    (8, 1),
    (5, 2),
    (8, 2),
    (16, 2),
    (64, 1),
    (128, 1),
    (128, 2),
    (256, 1),
]


@pytest.mark.parametrize(("ratio", "coff"), WINDOWS)
@pytest.mark.parametrize("head_dim", [1, 2, 7, 33, 64, 100, 128, 512, 1024, 4096])
def test_what_is_chosen_is_valid_and_first_among_the_candidates(head_dim: int, ratio: int, coff: int) -> None:
    problem = Problem(head_dim, ratio, coff)
    forward, backward = choose_forward(problem), choose_backward(problem, PROCESSORS)
    assert is_valid(problem, forward)
    assert is_valid(problem, backward)
    assert forward_candidates(problem)[0] == forward
    assert backward_candidates(problem, PROCESSORS)[0] == backward
    assert forward.splits == 0 < backward.splits
    for launch in (forward, backward):
        assert launch.groups * launch.share(problem) >= problem.entries
        assert launch.tiles(problem) * launch.across * launch.vector >= head_dim
        assert split_config(config(problem, launch)) == (problem, launch)


def test_the_models_they_are_for() -> None:
    csa, hca = Problem(512, 4, 2), Problem(512, 128, 1)
    assert choose_forward(csa).groups == choose_backward(csa, PROCESSORS).groups == 1
    assert choose_forward(hca).threads == 256
    for problem in (csa, hca):
        launch = choose_backward(problem, PROCESSORS)
        assert launch.splits * launch.tiles(problem) <= launch.blocks_per_sm * PROCESSORS  # all blocks at once


def test_partial_rows() -> None:
    launch = choose_backward(Problem(512, 4, 2), PROCESSORS)
    assert [partial_rows(launch, rows) for rows in (0, 1, launch.rows + 1, 10**6)] == [1, 1, 2, launch.splits]


def test_what_is_not_valid() -> None:
    csa, hca = Problem(512, 4, 2), Problem(512, 128, 1)
    for change in ({"vector": 3}, {"rows": 0}, {"blocks_per_sm": 100}, {"splits": -1}, {"groups": 3}):
        assert not is_valid(csa, replace(choose_forward(csa), **change))
    assert not is_valid(hca, replace(choose_forward(hca), groups=8))  # too many entries for a thread
    assert not is_valid(Problem(512, MOST_ENTRIES + 1, 1), choose_forward(hca))
