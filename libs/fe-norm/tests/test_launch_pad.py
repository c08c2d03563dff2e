"""The launch rules of ``rmsnorm_silu_pad``: what is chosen, and that every choice covers its pixels."""

from __future__ import annotations

import pytest

from fe_norm.launch_pad import Launch, Problem, candidates, choose, config, is_valid, split_config


def pixels_of(channels: int) -> Problem:
    size = 2 * channels
    return Problem(channels, pixel_alignment=min(16, size & -size))


@pytest.mark.parametrize("channels", [1, 2, 7, 16, 48, 64, 96, 160, 161, 320, 384, 640, 1000, 1024, 4096, 8192, 24576])
def test_every_number_of_channels_gets_a_valid_launch(channels: int) -> None:
    problem = pixels_of(channels)
    found = candidates(problem)
    assert found[0] == choose(problem)
    assert all(is_valid(problem, launch) for launch in found)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("channels", "threads_per_pixel", "pixels", "chunk"),
    [
        pytest.param(128, 8, 16, 2, id="32 bytes per thread"),
        pytest.param(160, 4, 32, 5, id="no idle threads at the end of a pixel"),
        pytest.param(1024, 64, 1, 2, id="a block for a pixel"),
        pytest.param(7, 4, 32, 2, id="odd channels one by one"),
    ],
)
def test_choices(channels: int, threads_per_pixel: int, pixels: int, chunk: int) -> None:
    assert choose(pixels_of(channels)) == Launch(threads_per_pixel, pixels, chunk)


@pytest.mark.parametrize("channels", [24584, 65536, 8191])
def test_too_many_channels_for_the_registers_of_a_block(channels: int) -> None:
    assert choose(pixels_of(channels)) is None


@pytest.mark.parametrize(
    "launch",
    [
        pytest.param(Launch(4, 32, 4), id="too few vectors"),
        pytest.param(Launch(24, 4, 5), id="no part of a warp"),
        pytest.param(Launch(64, 2, 5), id="several groups of more than a warp"),
        pytest.param(Launch(4, 4, 5), id="half a warp"),
        pytest.param(Launch(1024, 1, 1), id="too many threads"),
        pytest.param(Launch(4, 0, 5), id="no pixel"),
    ],
)
def test_invalid_launches(launch: Launch) -> None:
    assert not is_valid(pixels_of(160), launch)


def test_config_round_trip() -> None:
    problem = Problem(160, True, True, True, True, True, 8, 4)
    launch = choose(problem)
    assert launch is not None
    assert split_config(config(problem, launch)) == (problem, launch)
