"""``rmsnorm_silu_pad`` compiles, without spilling registers, for every architecture and set of operands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import fe_runtime
from fe_norm.launch_pad import Launch, Problem, candidates, choose, config
from fe_runtime.compile import KernelSpec, resource_usage

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
ALL = {name: True for name in ("has_input_bias", "has_previous", "has_residual", "has_residual_bias", "has_sum")}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    fe_runtime.configure(cache_dir=tmp_path)
    yield
    fe_runtime.configure(cache_dir=None)


def check(problem: Problem, arch: str, launch: Launch | None = None) -> None:
    launch = launch or choose(problem)
    assert launch is not None
    name = "rmsnorm_silu_pad"
    spec = KernelSpec.of(f"fe_norm.{name}", f"fe_norm.kernels.{name}:build", arch, **config(problem, launch))
    usage = resource_usage(spec)
    (symbol,) = usage
    assert symbol.startswith("fe_norm_rmsnorm_silu_pad")
    assert usage[symbol].frame_bytes == 0, f"{problem} {launch} spills {usage[symbol].frame_bytes} bytes"


@pytest.mark.parametrize("problem", [Problem(160), Problem(640, **ALL), Problem(7, pixel_alignment=2)], ids=str)
def test_sample(problem: Problem) -> None:
    check(problem, "sm_90a")


@pytest.mark.compile
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("channels", [1, 7, 16, 48, 96, 128, 160, 320, 384, 640, 1000, 1024, 4096, 8192, 24576])
def test_every_number_of_channels(channels: int, arch: str) -> None:
    alignment = min(16, 2 * channels & -(2 * channels))
    for there in ({}, ALL):
        check(Problem(channels, pixel_alignment=alignment, **there), arch)


@pytest.mark.compile
@pytest.mark.parametrize("name", ALL)
def test_every_operand_alone(name: str) -> None:
    for channels in (160, 1024):
        check(replace(Problem(channels), **{name: True, "has_residual": name.startswith("has_residual")}), "sm_90a")


@pytest.mark.compile
@pytest.mark.parametrize("alignment", [2, 4, 8])
def test_every_alignment(alignment: int) -> None:
    check(Problem(320, pixel_alignment=alignment, **ALL), "sm_90a")
    check(Problem(320, channel_alignment=alignment, **ALL), "sm_90a")


@pytest.mark.compile
@pytest.mark.parametrize("channels", [160, 320, 640])
def test_every_candidate_compiles(channels: int) -> None:
    for launch in candidates(Problem(channels, **ALL)):
        check(Problem(channels, **ALL), "sm_90a", launch)
