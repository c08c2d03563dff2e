"""The product of a few block-scaled rows with many compiles without spills, for every number of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import fe_runtime
from fe_gemm.planning.small_m import SmallLaunch, SmallProblem, candidates, choose, config, is_valid
from fe_runtime.compile import KernelSpec, resource_usage

ARCHITECTURES = ["sm_80", "sm_90a", "sm_100a", "sm_120a"]
MXFP8 = SmallProblem()
NVFP4 = SmallProblem("float4_e2m1fn", "float8_e4m3fn", 16, "float4_e2m1fn")
MXFP4 = SmallProblem("float4_e2m1fn", "float8_e8m0fnu", 32, "float4_e2m1fn")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    fe_runtime.configure(cache_dir=tmp_path)
    yield
    fe_runtime.configure(cache_dir=None)


def check(problem: SmallProblem, launch: SmallLaunch, arch: str) -> None:
    assert is_valid(problem, launch, arch)
    spec = KernelSpec.of("fe_gemm.small_m", "fe_gemm.kernels.small_m_blocked:build", arch, **config(problem, launch))
    usage = resource_usage(spec)
    assert {symbol.rstrip("_0123456789") for symbol in usage} == {"fe_gemm_small_m", "fe_gemm_add_slices"}
    for symbol, found in usage.items():
        assert found.frame_bytes == 0, f"{symbol} for {problem} {launch} on {arch} spills {found.frame_bytes} bytes"


def test_sample_with_many_warps() -> None:
    check(NVFP4, SmallLaunch(4, 3, 8, quarters=2), "sm_90a")


@pytest.mark.parametrize(("problem", "arch"), [(MXFP8, "sm_90a"), (NVFP4, "sm_90a"), (MXFP8, "sm_80")], ids=str)
def test_sample(problem: SmallProblem, arch: str) -> None:
    check(problem, choose(problem, arch), arch)


@pytest.mark.compile
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("problem", [MXFP8, NVFP4, MXFP4, replace(MXFP8, element="float8_e5m2")], ids=str)
def test_every_number_of_tokens(problem: SmallProblem, arch: str) -> None:
    for tokens in (8, 16, 24, 32):
        sized = replace(problem, tokens=tokens)
        check(sized, choose(sized, arch), arch)


@pytest.mark.compile
@pytest.mark.parametrize("problem", [MXFP8, NVFP4], ids=str)
def test_every_candidate(problem: SmallProblem) -> None:
    for launch in candidates(problem, "sm_90a"):
        check(problem, launch, "sm_90a")
