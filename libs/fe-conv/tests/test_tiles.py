"""The launch rules: what is chosen for the shapes that matter, and that every choice covers its problem."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest

from fe_conv.tiles import (
    Launch,
    Problem,
    candidates,
    choose,
    config,
    halo,
    is_valid,
    partials_shape,
    shared_bytes,
    split_config,
    tiles_of,
    walk_tokens,
)

BF16, FP32, FP64 = "bfloat16", "float32", "float64"
ARCHITECTURES = ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"]
CHANNELS = [1, 2, 3, 7, 16, 33, 64, 77, 96, 256, 1000, 4096, 5376, 10240, 32768]
FORWARD = Problem(backward=False, channel_last=True, x_dtype=BF16, weight_dtype=BF16, width=4)
BACKWARD = replace(FORWARD, backward=True)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [BF16, "float16", FP32, FP64])
@pytest.mark.parametrize("backward", [False, True])
def test_every_problem_gets_a_valid_launch(backward: bool, dtype: str, arch: str) -> None:
    modes: list[dict[str, object]] = [{}, {"has_labels": True}, {"offsets": "int32", "has_initial": True}]
    for channels, width, last, mode in product(CHANNELS, (2, 3, 4, 5, 128), (False, True), modes):
        problem = replace(Problem(backward, last, dtype, dtype, width), **mode)  # type: ignore[arg-type]
        launch = choose(problem, channels, arch)
        assert is_valid(problem, launch, channels, arch), (problem, launch)


@pytest.mark.parametrize(
    ("problem", "kernel"),
    [
        pytest.param(FORWARD, "rows", id="channel last"),
        pytest.param(replace(FORWARD, offsets="int64", has_initial=True), "rows", id="packed"),
        pytest.param(replace(FORWARD, has_labels=True), "rows", id="labels"),
        pytest.param(replace(FORWARD, channel_last=False), "runs", id="channel first"),
        pytest.param(replace(FORWARD, channel_last=False, offsets="int32"), "any", id="packed channel first"),
        pytest.param(replace(FORWARD, width=5), "any", id="wide filter"),
        pytest.param(replace(FORWARD, x_dtype=FP64, weight_dtype=FP64), "any", id="float64"),
    ],
)
def test_which_kernel(problem: Problem, kernel: str) -> None:
    for backward in (False, True):
        assert choose(replace(problem, backward=backward), 4096, "sm_90a").kernel == kernel


@pytest.mark.parametrize(("channels", "vector"), [(4096, 4), (256, 4), (77, 1), (1002, 2)])
@pytest.mark.parametrize("problem", [FORWARD, BACKWARD])
def test_vectors_are_as_wide_as_the_channels_allow(problem: Problem, channels: int, vector: int) -> None:
    assert choose(problem, channels, "sm_90a").vector == vector


def test_partial_sums_cost_little() -> None:
    launch = choose(BACKWARD, 4096, "sm_90a")
    rows, columns = partials_shape(BACKWARD, launch, 8, 8192, 4096)
    assert rows * columns * 4 * 2 < 0.02 * 8 * 8192 * 4096 * 6  # written and read again, against x, dy and dx


EXTENTS = [(1, 1, 8), (3, 2, 64), (1, 31, 64), (3, 257, 64), (1, 2048, 2048), (2, 5000, 640), (8, 8192, 4096)]
EXTENTS += [(1, 1 << 21, 4096), (1, 1 << 21, 8), (70_000, 1, 8), (1 << 20, 3, 64)]
WALKS = [choose(BACKWARD, 4096, "sm_90a"), Launch("rows", 4, 32, 4, 8, 32, 8), Launch("rows", 8, 128, 1, 4, 1024, 1, 3)]


@pytest.mark.parametrize("launch", WALKS, ids=str)
@pytest.mark.parametrize(("batch", "tokens", "channels"), EXTENTS)
def test_tiles_cover_the_tokens_with_walks_of_bounded_length(
    launch: Launch, batch: int, tokens: int, channels: int
) -> None:
    tiles = tiles_of(launch, batch, tokens, channels)
    length = -(-tokens // (tiles * launch.groups * launch.unroll)) * launch.unroll  # as the launcher computes it
    assert tiles >= 1
    assert tiles * launch.groups * length >= tokens
    assert length <= launch.tokens
    assert length >= min(32, launch.tokens // 2) or tiles == 1
    assert partials_shape(BACKWARD, launch, batch, tokens, channels) == (batch * tiles, 4 * channels)


def test_long_walks_fill_the_multiprocessors_evenly() -> None:
    launch = choose(BACKWARD, 4096, "sm_90a")
    tiles = tiles_of(launch, 8, 8192, 4096)
    turns = 8 * (4096 // launch.width) * tiles / (132 * launch.blocks_per_sm)
    assert turns / -(-turns // 1) > 0.9


def test_short_problems_get_more_and_shorter_walks() -> None:
    backward, forward = (choose(problem, 2048, "sm_90a") for problem in (BACKWARD, FORWARD))
    assert tiles_of(backward, 1, 2048, 2048) * 2048 // backward.width >= 132
    length = walk_tokens(forward, 1, 2048, 2048)
    assert 2048 // (length * forward.groups) * (2048 // forward.width) >= 4 * 132
    assert walk_tokens(forward, 8, 8192, 4096) == forward.tokens


@pytest.mark.parametrize("launch", WALKS, ids=str)
@pytest.mark.parametrize(("batch", "tokens", "channels"), EXTENTS)
def test_walks_of_the_convolution_are_whole_chunks(launch: Launch, batch: int, tokens: int, channels: int) -> None:
    length = walk_tokens(launch, batch, tokens, channels)
    assert length % launch.unroll == 0
    assert max(1, launch.stages) * launch.unroll <= length <= launch.tokens


@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 1000])
def test_partial_sums_of_runs_have_a_row_for_each_tile(tokens: int) -> None:
    problem = replace(BACKWARD, has_bias=True, channel_last=False)
    launch = choose(problem, 64, "sm_90a")
    rows, columns = partials_shape(problem, launch, 3, tokens, 64)
    assert (rows - 3) // 3 * launch.tokens < tokens <= rows // 3 * launch.tokens
    assert columns == 5 * 64


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_what_is_under_way_covers_the_latency_of_memory(arch: str) -> None:
    launch = choose(BACKWARD, 4096, arch)
    ahead = 2 * (launch.stages - 1) * launch.unroll * launch.threads * launch.vector * 2 * launch.blocks_per_sm
    assert ahead >= 32 << 10
    assert launch.blocks_per_sm * shared_bytes(BACKWARD, launch) <= 227 << 10


def test_narrow_vectors_are_not_copied_ahead() -> None:
    assert choose(BACKWARD, 77, "sm_90a").stages == 0
    assert choose(replace(BACKWARD, load_alignment=2), 4096, "sm_90a").stages == 0
    assert choose(replace(BACKWARD, load_alignment=4), 4096, "sm_90a").stages > 0


@pytest.mark.parametrize("width", [2, 3, 4])
def test_halo_holds_the_tokens_next_to_a_vector(width: int) -> None:
    piece = halo(replace(FORWARD, width=width))
    assert width - 1 <= piece < 2 * (width - 1) + 1
    assert 8 % piece == 0


@pytest.mark.parametrize(
    "problem", [FORWARD, BACKWARD, replace(FORWARD, channel_last=False), replace(FORWARD, width=9)]
)
def test_candidates_are_valid_distinct_and_start_with_the_choice(problem: Problem) -> None:
    for channels in (77, 4096):
        found = candidates(problem, channels, "sm_90a")
        assert found[0] == choose(problem, channels, "sm_90a")
        assert len(set(found)) == len(found)
        assert len(found) > 1 or problem.width == 9
        assert all(is_valid(problem, launch, channels, "sm_90a") for launch in found)


GOOD = choose(BACKWARD, 4096, "sm_90a")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"kernel": "runs"}, id="runs of channels"),
        pytest.param({"kernel": "other"}, id="unknown kernel"),
        pytest.param({"vector": 16}, id="wider than a load"),
        pytest.param({"vector": 3}, id="not a power of two"),
        pytest.param({"lanes": 48}, id="not whole warps"),
        pytest.param({"groups": 64}, id="too many threads"),
        pytest.param({"blocks_per_sm": 17, "stages": 0}, id="more threads than a multiprocessor has"),
        pytest.param({"unroll": 2}, id="history longer than a chunk"),
        pytest.param({"tokens": 514}, id="not whole chunks"),
        pytest.param({"tokens": 0}, id="no tokens"),
        pytest.param({"vector": 8, "groups": 32, "blocks_per_sm": 2, "stages": 0}, id="more sums than there is room"),
        pytest.param({"stages": 8}, id="more stages than there is room"),
        pytest.param({"stages": 1}, id="no stage ahead"),
        pytest.param({"stages": -1}, id="negative"),
    ],
)
def test_invalid_launches(change: dict[str, object]) -> None:
    assert is_valid(BACKWARD, GOOD, 4096, "sm_90a")
    assert not is_valid(BACKWARD, replace(GOOD, **change), 4096, "sm_90a")  # type: ignore[arg-type]


def test_vectors_divide_the_channels() -> None:
    assert not is_valid(BACKWARD, GOOD, 4098, "sm_90a")


def test_only_dense_problems_share_loads_between_tokens() -> None:
    problem = replace(FORWARD, width=9)
    launch = choose(problem, 64, "sm_90a")
    assert launch.unroll > 1
    assert not is_valid(replace(problem, has_labels=True), launch, 64, "sm_90a")


def test_config_round_trip() -> None:
    problem = replace(BACKWARD, has_bias=True, offsets="int64", has_initial=True, weight_dtype=FP32)
    launch = choose(problem, 4096, "sm_90a")
    assert split_config(config(problem, launch)) == (problem, launch)
    assert isinstance(launch, Launch)


def test_importing_the_rules_loads_no_kernel_language() -> None:
    code = "import sys, fe_conv.tiles; assert not {'cutlass', 'torch', 'jax', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
