"""The product of a few block-scaled rows on Hopper compiles without spills, for every number of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import fe_runtime
from fe_gemm.planning.scaled_few_rows import Launch, Problem, candidates, choose, config, is_valid
from fe_runtime.compile import KernelSpec, resource_usage

ARCH = "sm_90a"
REGISTERS = 65536  # of a multiprocessor; a block takes one
MXFP8 = Problem()
NVFP4 = Problem("float4_e2m1fn", "float8_e4m3fn", 16)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    fe_runtime.configure(cache_dir=tmp_path)
    yield
    fe_runtime.configure(cache_dir=None)


def check(problem: Problem, launch: Launch) -> None:
    assert is_valid(problem, launch)
    builder = "fe_gemm.kernels.sm90.scaled_few_rows:build"
    usage = resource_usage(KernelSpec.of("fe_gemm.scaled_few_rows", builder, ARCH, **config(problem, launch)))
    names = {symbol.rstrip("_0123456789") for symbol in usage}
    assert names == {"fe_gemm_few_rows", *(["fe_gemm_add_slices"] if launch.slices > 1 else [])}
    for symbol, found in usage.items():
        assert found.frame_bytes == 0, f"{symbol} for {problem} {launch} spills {found.frame_bytes} bytes"
    assert max(found.registers for found in usage.values()) * launch.threads <= REGISTERS


@pytest.mark.parametrize("problem", [MXFP8, NVFP4, replace(MXFP8, tokens=64)], ids=str)
def test_sample(problem: Problem) -> None:
    check(problem, choose(problem, 28672, 8192, 132))


def test_sample_with_slices() -> None:
    check(MXFP8, Launch(64, 4, 2, 4, 2, slices=3))


@pytest.mark.compile
@pytest.mark.parametrize("tokens", [16, 32, 48, 64])
@pytest.mark.parametrize("problem", [MXFP8, NVFP4, replace(MXFP8, element="float8_e5m2")], ids=str)
def test_every_candidate(problem: Problem, tokens: int) -> None:
    problem = replace(problem, tokens=tokens)
    launches = {launch for n in (28672, 8192, 1024) for launch in candidates(problem, n, 8192, 132)}
    for launch in {replace(launch, slots=launch.converters) for launch in launches}:
        if is_valid(problem, launch):
            check(problem, launch)


@pytest.mark.compile
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
def test_every_dtype_of_the_product(out_dtype: str) -> None:
    for problem in (MXFP8, NVFP4):
        check(replace(problem, out_dtype=out_dtype), Launch())
        check(replace(problem, out_dtype=out_dtype), Launch(64, 4, 4, 4, slices=2))
