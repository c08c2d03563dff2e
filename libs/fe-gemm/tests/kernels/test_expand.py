"""The expansion compiles, without spills, for every architecture, format and major, alone and twice in one launcher."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import fe_runtime
from fe_gemm.planning.expand import Launch, Problem, candidates, choose, config, is_valid
from fe_runtime.compile import KernelSpec, resource_usage

ARCHITECTURES = ["sm_80", "sm_90a", "sm_100a", "sm_120a"]
REGISTERS = 65536  # of a multiprocessor
PROBLEMS = {
    "mxfp8": Problem(),
    "mxfp8 of columns": Problem(major="m"),
    "mxfp8 e5m2": Problem("float8_e5m2"),
    "mxfp8 e5m2 of columns": Problem("float8_e5m2", major="m"),
    "nvfp4": Problem("float4_e2m1fn", "float8_e4m3fn", 16),
    "mxfp4": Problem("float4_e2m1fn"),
    "fp4 e8m0 16": Problem("float4_e2m1fn", vec=16),
    "mxfp8 in groups": Problem(grouped=True),
    "mxfp8 of columns in groups": Problem(major="m", grouped=True),
    "nvfp4 in groups": Problem("float4_e2m1fn", "float8_e4m3fn", 16, grouped=True),
    "mxfp8 in ragged groups": Problem(grouped=True, ragged=True),
    "mxfp4 in ragged groups": Problem("float4_e2m1fn", grouped=True, ragged=True),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    fe_runtime.configure(cache_dir=tmp_path)
    yield
    fe_runtime.configure(cache_dir=None)


def check(problem: Problem, launch: Launch, arch: str) -> None:
    assert is_valid(problem, launch, arch)
    spec = KernelSpec.of("fe_gemm.expand", "fe_gemm.kernels.expand:build", arch, **config(problem, launch))
    ((symbol, usage),) = resource_usage(spec).items()
    assert symbol.startswith("fe_gemm_expand")
    assert usage.frame_bytes == 0, f"{problem} {launch} on {arch} spills {usage.frame_bytes} bytes"
    assert usage.registers * launch.threads * launch.blocks_per_sm <= REGISTERS


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8 of columns", "nvfp4", "mxfp8 of columns in groups"])
def test_sample(name: str, arch: str) -> None:
    check(PROBLEMS[name], choose(PROBLEMS[name], arch), arch)


def test_both_operands_in_one_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    spec = KernelSpec.of("fe_gemm.expand", "expand_twice_for_tests:build", "sm_90a")
    usage = resource_usage(spec)
    assert len(usage) == 2
    assert all(symbol.startswith("fe_gemm_expand") for symbol in usage)


@pytest.mark.compile
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=list(PROBLEMS))
def test_every_format(problem: Problem, arch: str) -> None:
    check(problem, choose(problem, arch), arch)
    check(problem, replace(choose(problem, arch), vector=16, across=16, blocks_per_sm=1), arch)


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8 of columns", "nvfp4"])
def test_every_candidate(name: str, arch: str) -> None:
    for launch in candidates(PROBLEMS[name], arch):
        check(PROBLEMS[name], launch, arch)
