"""Epilogues of sums in float32 compile without spills."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import fe_runtime
from fe_gemm.planning.few_rows import finishing_launch
from fe_gemm.planning.launches import config
from fe_gemm.planning.problem import Problem
from fe_runtime.compile import KernelSpec, resource_usage

PROBLEMS = {
    "amax": Problem(c_dtype="float32", amax=True),
    "swiglu": Problem(epilogue="swiglu", pre_dtype="bfloat16", alpha=True, amax=True),
    "srelu": Problem(epilogue="srelu", pre_dtype="bfloat16", alpha=True),
    "dsrelu": Problem(epilogue="dsrelu", upstream_dtype="bfloat16", alpha=True),
    "quantised": Problem(c_dtype="float8_e4m3fn", scale_dtype="float8_e8m0fnu", epilogue="swiglu", pre_dtype="float16"),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    fe_runtime.configure(cache_dir=tmp_path)
    yield
    fe_runtime.configure(cache_dir=None)


def check(problem: Problem) -> None:
    flat = config(problem, finishing_launch(problem))
    usage = resource_usage(
        KernelSpec.of("fe_gemm.finish_sums", "fe_gemm.kernels.sm90.finish_sums:build", "sm_90a", **flat)
    )
    assert any(symbol.startswith("fe_gemm_finish") for symbol in usage)
    for symbol, found in usage.items():
        assert found.frame_bytes == 0, f"{symbol} for {problem} spills {found.frame_bytes} bytes"


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=list(PROBLEMS))
def test_sample(problem: Problem) -> None:
    check(problem)


@pytest.mark.compile
@pytest.mark.parametrize("c_dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float4_e2m1fn"])
def test_every_dtype(c_dtype: str) -> None:
    for problem in (PROBLEMS["amax"], PROBLEMS["swiglu"], PROBLEMS["srelu"]):
        check(replace(problem, c_dtype=c_dtype))
