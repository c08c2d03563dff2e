"""Grouped products compile, without spills, for every tile, cluster, dtype and kind of weights."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

import fe_runtime
from fe_gemm.planning.grouped import Grouped, GroupedProblem, candidates, choose_launches, config, is_valid
from fe_gemm.planning.launches import Launches
from fe_gemm.planning.tiles import Launch
from fe_runtime.compile import KernelSpec, resource_usage

ARCH = "sm_90a"
WIDE = ("float32", "float16", "bfloat16")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    fe_runtime.configure(cache_dir=tmp_path)
    yield
    fe_runtime.configure(cache_dir=None)


def check(problem: GroupedProblem, launches: Launches | Launch, byte_addresses: bool = False) -> None:
    launches = Launches((), launches) if isinstance(launches, Launch) else launches
    assert all(is_valid(problem, launch) for launch in launches.all)
    weights = "addresses" if problem.discrete else "b"
    own = (*problem.inputs, *problem.results, *problem.scratch, *problem.scalars)
    names = ("a", "offsets", weights, *own, "maps")
    plan = Grouped(problem, launches, 132, names, byte_addresses)
    spec = KernelSpec.of("fe_gemm.grouped", "fe_gemm.kernels.sm90.grouped:build", ARCH, **config(plan))
    usage = resource_usage(spec)
    for kind in ("fe_gemm_grouped", "fe_gemm_tensor_maps"):
        assert sum(symbol.startswith(kind) for symbol in usage) == len(launches.all)
    for symbol, found in usage.items():
        assert found.frame_bytes == 0, f"{symbol} of {problem} {launches} spills {found.frame_bytes} bytes"


SAMPLE = {
    "dense": GroupedProblem(),
    "addresses, bias and both results": GroupedProblem(
        discrete=True, b_major="n", bias_dtype="bfloat16", pre_dtype="float32", c_dtype="float16"
    ),
    "swiglu": GroupedProblem(epilogue="glu", activation="swiglu", pre_dtype="bfloat16"),
    "gradient of swiglu": GroupedProblem(
        epilogue="dglu",
        activation="swiglu",
        upstream_dtype="bfloat16",
        beta=True,
        dprob="added",
        dbias="added",
        keeps=True,
    ),
}


@pytest.mark.parametrize("problem", SAMPLE.values(), ids=list(SAMPLE))
def test_sample(problem: GroupedProblem) -> None:
    launches = choose_launches(problem, 4096, 4096, 32, ARCH, 132)
    assert len(launches.all) == (2 if problem.epilogue == "dglu" else 3)
    check(problem, launches, byte_addresses=problem.discrete)


@pytest.mark.compile
@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize("b_major", ["k", "n"])
def test_every_candidate(b_major: str, discrete: bool) -> None:
    problem = GroupedProblem(b_major=b_major, discrete=discrete)
    for launch in candidates(problem, 4096, 4096, 32, ARCH, 132):
        if launch.band == 8:
            check(problem, launch)


@pytest.mark.compile
@pytest.mark.parametrize("c_dtype", WIDE)
def test_every_dtype(c_dtype: str) -> None:
    for pre_dtype, bias_dtype in product((None, *WIDE), (None, *WIDE)):
        problem = GroupedProblem(c_dtype=c_dtype, pre_dtype=pre_dtype, bias_dtype=bias_dtype)
        check(problem, choose_launches(problem, 4096, 4096, 32, ARCH, 132))


@pytest.mark.compile
@pytest.mark.parametrize("name", ["swiglu", "geglu", "situglu"])
@pytest.mark.parametrize("c_dtype", WIDE)
def test_every_gated_activation(c_dtype: str, name: str) -> None:
    for pre_dtype, bias_dtype in ((None, None), ("float32", "float32"), ("bfloat16", "float16")):
        problem = GroupedProblem(
            c_dtype=c_dtype, pre_dtype=pre_dtype, bias_dtype=bias_dtype, epilogue="glu", activation=name
        )
        check(problem, choose_launches(problem, 4096, 4096, 32, ARCH, 132))


@pytest.mark.compile
@pytest.mark.parametrize("name", ["swiglu", "geglu", "situglu"])
@pytest.mark.parametrize("c_dtype", WIDE)
@pytest.mark.parametrize("upstream_dtype", WIDE)
def test_every_gradient(upstream_dtype: str, c_dtype: str, name: str) -> None:
    for more in ({}, {"dprob": "added", "beta": True}, {"dprob": "new", "dbias": "added", "keeps": True}):
        problem = GroupedProblem(
            c_dtype=c_dtype, upstream_dtype=upstream_dtype, epilogue="dglu", activation=name, **more
        )
        check(problem, choose_launches(problem, 4096, 4096, 32, ARCH, 132))
