"""The launches of the Engram kernels: what is chosen is valid, and so is every alternative."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fe_attention.planning.engram import (
    MOST_STREAMS,
    Backward,
    Forward,
    Problem,
    backward_candidates,
    choose_backward,
    choose_forward,
    choose_whole,
    config,
    forward_candidates,
    is_valid_backward,
    is_valid_forward,
    partial_rows,
    shared_bytes,
    split_config,
)

WIDTHS = (1, 2, 7, 8, 33, 128, 1000, 1024, 2048, 4096, 5120, 7168, 8192, 16384, 20001, 100_000)
PROCESSORS = 132


@pytest.mark.parametrize("streams", [1, 2, 3, 4, 8, MOST_STREAMS])
@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_chosen_is_valid_and_first_among_the_candidates(width: int, streams: int) -> None:
    problem = Problem(streams, width)
    forward, backward = choose_forward(problem), choose_backward(problem, PROCESSORS)
    assert is_valid_forward(problem, forward)
    assert is_valid_backward(problem, backward)
    assert forward_candidates(problem)[0] == forward
    assert backward_candidates(problem, PROCESSORS)[0] == backward
    assert width % problem.vector == 0
    assert problem.vector % backward.vector == 0


def test_the_model_it_is_for() -> None:
    problem = Problem(4, 5120)
    assert choose_forward(problem) == Forward(threads=128, chunk=5, tokens=4, blocks_per_sm=4)
    backward = choose_backward(problem, PROCESSORS)
    tiles = 5120 // (backward.vector * backward.threads)
    assert backward.splits * tiles <= backward.blocks_per_sm * PROCESSORS  # all blocks at once


def test_odd_streams_have_narrow_vectors() -> None:
    assert [Problem(4, width).vector for width in (5120, 12, 6, 33)] == [8, 4, 2, 1]


def test_long_streams_are_read_twice() -> None:
    launch = choose_forward(Problem(4, 100_000))
    assert launch.threads * launch.chunk * 8 < 100_000


def test_config_and_back() -> None:
    problem = Problem(4, 5120)
    for launch in (choose_forward(problem), choose_backward(problem, PROCESSORS)):
        assert split_config(config(problem, launch), type(launch)) == (problem, launch)


def test_partial_rows() -> None:
    launch = choose_backward(Problem(4, 5120), PROCESSORS)
    assert [partial_rows(launch, tokens) for tokens in (0, 1, 5, 10**6)] == [1, 1, 5, launch.splits]


def test_what_is_not_valid() -> None:
    problem = Problem(4, 5120)
    forward, backward = choose_forward(problem), choose_backward(problem, PROCESSORS)
    for change in ({"threads": 48}, {"threads": 2048}, {"chunk": 0}, {"tokens": 0}, {"blocks_per_sm": 17}):
        assert not is_valid_forward(problem, replace(forward, **change))
    for change in ({"threads": 48}, {"sum_threads": 2048}, {"vector": 3}, {"splits": 0}, {"blocks_per_sm": 17}):
        assert not is_valid_backward(problem, replace(backward, **change))
    assert not is_valid_backward(replace(problem, streams=MOST_STREAMS + 1), backward)
    assert isinstance(backward, Backward)


def test_whole_tokens_where_they_fit() -> None:
    problem = Problem(4, 5120)
    whole = choose_whole(problem, "sm_90a", PROCESSORS)
    assert whole is not None
    assert (whole.threads, whole.blocks) == (640, PROCESSORS)
    assert shared_bytes(problem) <= 227 << 10
    assert split_config(config(problem, whole), type(whole)) == (problem, whole)
    assert [partial_rows(whole, tokens) for tokens in (0, 1, 131, 10**6)] == [1, 1, 131, PROCESSORS]
    assert choose_whole(problem, "sm_80", 108) is None  # less shared memory
    assert choose_whole(problem, "sm_120a", 188) is None
    for other in (Problem(4, 5124), Problem(4, 7168), Problem(5, 1024)):
        assert choose_whole(other, "sm_90a", PROCESSORS) is None
    small = choose_whole(Problem(4, 1024), "sm_90a", PROCESSORS)
    assert small is not None
    assert small.blocks == small.blocks_per_sm * PROCESSORS
    assert small.blocks_per_sm * (shared_bytes(Problem(4, 1024)) + 1024) <= 228 << 10
