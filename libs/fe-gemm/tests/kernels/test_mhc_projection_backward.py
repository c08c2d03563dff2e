"""``mhc_projection_backward`` compiles for every architecture and number of coefficients, without spilled registers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import fe_runtime
from fe_gemm.planning.mhc import Launch, Problem, candidates, choose, config, is_valid
from fe_runtime.compile import KernelSpec, resource_usage

NAME = "mhc_projection_backward"
ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
REGISTERS = 65536  # of a multiprocessor, to be shared by the blocks that are asked for


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    fe_runtime.configure(cache_dir=tmp_path)
    yield
    fe_runtime.configure(cache_dir=None)


def check(problem: Problem, arch: str, launch: Launch | None = None) -> None:
    launch = launch or choose(problem, arch, 132)
    assert is_valid(problem, launch, arch)
    spec = KernelSpec.of(f"fe_gemm.{NAME}", f"fe_gemm.kernels.{NAME}:build", arch, **config(problem, launch))
    usage = resource_usage(spec)
    assert sorted(symbol.rstrip("_0123456789") for symbol in usage) == [f"fe_gemm_{NAME}", f"fe_gemm_{NAME}_sum"]
    for symbol, used in usage.items():
        assert used.frame_bytes == 0, f"{symbol} {problem} {launch} spills {used.frame_bytes} bytes"
    (walk,) = (used for symbol, used in usage.items() if "_sum" not in symbol)
    assert walk.registers * launch.threads * launch.blocks_per_sm <= REGISTERS


SAMPLE = {
    "four streams": Problem(24, 20480),
    "two streams": Problem(8, 4096),
    "most coefficients of eight columns a thread": Problem(32, 1000),
    "most coefficients": Problem(64, 16384),
    "least": Problem(1, 8),
}


@pytest.mark.parametrize("problem", SAMPLE.values(), ids=list(SAMPLE))
def test_sample(problem: Problem) -> None:
    check(problem, "sm_90a")


@pytest.mark.parametrize("arch", [a for a in ARCHITECTURES if a != "sm_90a"])
def test_sample_of_architectures(arch: str) -> None:
    check(Problem(24, 20480), arch)


@pytest.mark.compile
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("coefficients", range(1, 65))
def test_every_number_of_coefficients(coefficients: int, arch: str) -> None:
    check(Problem(coefficients, 4096), arch)


@pytest.mark.compile
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("columns", [8, 16, 120, 256, 264, 7168, 16384, 20480, 28672])
def test_every_width(columns: int, arch: str) -> None:
    for coefficients in (8, 24, 48):
        check(Problem(coefficients, columns), arch)


@pytest.mark.compile
@pytest.mark.parametrize("coefficients", [8, 24, 48])
def test_every_candidate(coefficients: int) -> None:
    seen = set()
    for launch in candidates(Problem(coefficients, 20480), "sm_90a", 132):
        shape = replace(launch, splits=1, stages=2)
        if shape not in seen:  # the numbers of splits and stages make no other code
            seen.add(shape)
            check(Problem(coefficients, 20480), "sm_90a", launch)
