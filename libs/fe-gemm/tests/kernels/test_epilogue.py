"""The Hopper matrix product with every epilogue compiles without spills."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

import fe_runtime
from fe_gemm.planning.launches import config
from fe_gemm.planning.problem import Problem
from fe_gemm.planning.tiles import Launch, choose, is_valid
from fe_runtime.compile import KernelSpec, resource_usage

ARCH = "sm_90a"
THREADS = 384
REGISTERS = 65536  # of a multiprocessor; a block takes one

STORED = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
FP8 = STORED[3:]
AMAX = Problem(c_dtype="float32", amax=True)
SWIGLU = Problem(epilogue="swiglu", pre_dtype="bfloat16", alpha=True)
SRELU = Problem(epilogue="srelu", pre_dtype="bfloat16", alpha=True)
DSRELU = Problem(epilogue="dsrelu", upstream_dtype="bfloat16", alpha=True)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    fe_runtime.configure(cache_dir=tmp_path)
    yield
    fe_runtime.configure(cache_dir=None)


def check(problem: Problem, launch: Launch | None = None) -> None:
    launch = choose(problem, 4096, 4096, ARCH) if launch is None else launch
    assert is_valid(problem, launch)
    spec = KernelSpec.of("fe_gemm.gemm", "fe_gemm.kernels.sm90.gemm:build", ARCH, **config(problem, launch))
    usage = resource_usage(spec)
    for symbol, used in usage.items():
        assert symbol.startswith("fe_gemm")
        assert used.frame_bytes == 0, f"{problem} {launch} {symbol} spills {used.frame_bytes} bytes"
    assert max(used.registers for used in usage.values()) * THREADS <= REGISTERS
    before = problem.amax and not problem.accumulates
    assert len(usage) == 1 + before + (problem.epilogue == "dsrelu")


def quantised(problem: Problem, c_dtype: str, scale_dtype: str, vector: int) -> Problem:
    return replace(problem, c_dtype=c_dtype, scale_dtype=scale_dtype, scale_vector=vector)


SAMPLE = {
    "amax": AMAX,
    "swiglu": replace(SWIGLU, amax=True),
    "srelu quantised": quantised(SRELU, "float8_e4m3fn", "float8_e8m0fnu", 32),
    "dsrelu": replace(DSRELU, amax=True),
}


@pytest.mark.parametrize("problem", SAMPLE.values(), ids=list(SAMPLE))
def test_sample(problem: Problem) -> None:
    check(problem)


@pytest.mark.compile
@pytest.mark.parametrize("major", ["n", "m"])
@pytest.mark.parametrize("c_dtype", [*STORED, "float4_e2m1fn"])
def test_every_result_of_amax(c_dtype: str, major: str) -> None:
    if (c_dtype, major) != ("float4_e2m1fn", "m"):
        check(replace(AMAX, c_dtype=c_dtype, c_major=major))


@pytest.mark.compile
@pytest.mark.parametrize("major", ["n", "m"])
@pytest.mark.parametrize(("pre_dtype", "c_dtype"), list(product(STORED, STORED)))
@pytest.mark.parametrize("problem", [SWIGLU, SRELU], ids=["swiglu", "srelu"])
def test_every_pair_of_results(problem: Problem, pre_dtype: str, c_dtype: str, major: str) -> None:
    check(replace(problem, pre_dtype=pre_dtype, c_dtype=c_dtype, c_major=major))


@pytest.mark.compile
@pytest.mark.parametrize("major", ["n", "m"])
@pytest.mark.parametrize("upstream", STORED[:3])
@pytest.mark.parametrize("c_dtype", STORED)
def test_every_result_of_dsrelu(c_dtype: str, upstream: str, major: str) -> None:
    check(replace(DSRELU, c_dtype=c_dtype, upstream_dtype=upstream, c_major=major, amax=True))


@pytest.mark.compile
@pytest.mark.parametrize("major", ["n", "m"])
@pytest.mark.parametrize("c_dtype", FP8)
@pytest.mark.parametrize(
    ("scale_dtype", "vector"), [("float8_e8m0fnu", 32), ("float8_e8m0fnu", 16), ("float8_e4m3fn", 16)]
)
@pytest.mark.parametrize("problem", [SWIGLU, SRELU, DSRELU], ids=["swiglu", "srelu", "dsrelu"])
def test_every_quantised_result(problem: Problem, scale_dtype: str, vector: int, c_dtype: str, major: str) -> None:
    check(replace(quantised(problem, c_dtype, scale_dtype, vector), c_major=major))


@pytest.mark.compile
@pytest.mark.parametrize("tile", [(128, 128), (128, 256), (256, 128)], ids=str)
@pytest.mark.parametrize("buffers", [1, 2, 3])
@pytest.mark.parametrize("problem", [AMAX, SWIGLU, SRELU, DSRELU], ids=["amax", "swiglu", "srelu", "dsrelu"])
def test_every_tile(problem: Problem, buffers: int, tile: tuple[int, int]) -> None:
    check(problem, Launch(*tile, cluster_m=2, slots=2, store_buffers=buffers))


@pytest.mark.compile
@pytest.mark.parametrize(
    "problem",
    [
        replace(AMAX, accumulates=True),
        replace(DSRELU, accumulates=True),
        replace(SWIGLU, gate_first=True),
        replace(SWIGLU, pre_dtype=None, alpha=False),
        Problem(alpha=True),
    ],
    ids=["amax joined", "dprob joined", "gate first", "nothing but C", "only a factor"],
)
def test_every_switch(problem: Problem) -> None:
    check(problem)
