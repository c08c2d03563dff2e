"""The conversion compiles, without spills, for every architecture, dtype, major and side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import fe_runtime
from fe_gemm.planning.convert import DTYPES, Launch, Problem, candidates, choose, config, is_valid
from fe_runtime.compile import KernelSpec, resource_usage

ARCHITECTURES = ["sm_80", "sm_90a", "sm_100a", "sm_120a"]
REGISTERS = 65536  # of a multiprocessor
BUSY_THREADS = 1024
PROBLEMS = [Problem(dtype, major) for dtype in DTYPES for major in "km"] + [Problem("float32", "k", "b")]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    fe_runtime.configure(cache_dir=tmp_path)
    yield
    fe_runtime.configure(cache_dir=None)


def check(problem: Problem, launch: Launch, arch: str) -> int:
    """Check a kernel's resources; return its registers."""
    assert is_valid(problem, launch)
    spec = KernelSpec.of("fe_gemm.convert", "fe_gemm.kernels.convert_operand:build", arch, **config(problem, launch))
    ((symbol, usage),) = resource_usage(spec).items()
    assert symbol.startswith("fe_gemm_convert")
    assert usage.frame_bytes == 0, f"{problem} {launch} on {arch} spills {usage.frame_bytes} bytes"
    return usage.registers


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("problem", [Problem(major="m"), Problem("float32", "k", "b")], ids=str)
def test_sample(problem: Problem, arch: str) -> None:
    assert check(problem, choose(problem), arch) * BUSY_THREADS <= REGISTERS


@pytest.mark.compile
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_every_operand(problem: Problem, arch: str) -> None:
    assert check(problem, choose(problem), arch) * BUSY_THREADS <= REGISTERS


@pytest.mark.compile
@pytest.mark.parametrize("problem", [Problem(major="m"), Problem("float32")], ids=str)
def test_every_candidate(problem: Problem) -> None:
    for launch in candidates(problem):
        check(problem, launch, "sm_90a")
