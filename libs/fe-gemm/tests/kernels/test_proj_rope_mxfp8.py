"""The kernel of ``gemm_proj_rope_mxfp8`` compiles, without spills, for every kind of input, layout of w and launch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import fe_runtime
from fe_gemm.planning.proj_rope import Launch, Problem, candidates, choose, config, is_valid
from fe_runtime.compile import KernelSpec, resource_usage

ARCH = "sm_90a"
THREADS = 384
REGISTERS = 65536  # of a multiprocessor; a block takes one


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    fe_runtime.configure(cache_dir=tmp_path)
    yield
    fe_runtime.configure(cache_dir=None)


def check(problem: Problem, launch: Launch) -> None:
    assert is_valid(problem, launch)
    place = "fe_gemm.kernels.sm90.proj_rope_mxfp8:build"
    spec = KernelSpec.of("fe_gemm.gemm_proj_rope_mxfp8", place, ARCH, **config(problem, launch, 132))
    usage = resource_usage(spec)
    (main,) = [symbol for symbol in usage if symbol.startswith("fe_gemm_proj_rope")]
    others = [symbol for symbol in usage if symbol != main]
    assert len(others) == 2 * problem.scaled
    assert all(symbol.startswith("fe_gemm_expand_plain") for symbol in others)
    for symbol, used in usage.items():
        assert used.frame_bytes == 0, f"{symbol} {problem} {launch} spills {used.frame_bytes} bytes"
    assert usage[main].registers * THREADS <= REGISTERS


SAMPLE = {
    "bf16": Problem(),
    "bf16, in-out": Problem("n"),
    "e4m3": Problem(scaled=True),
    "e4m3, in-out": Problem("n", True),
}


@pytest.mark.parametrize("problem", SAMPLE.values(), ids=list(SAMPLE))
def test_sample(problem: Problem) -> None:
    check(problem, choose(problem, 128, 1536, ARCH))


@pytest.mark.compile
@pytest.mark.parametrize("w_major", ["k", "n"])
def test_every_candidate(w_major: str) -> None:
    problem = Problem(w_major)
    for launch in candidates(problem, 128, 1536, ARCH):
        check(problem, launch)


@pytest.mark.compile
@pytest.mark.parametrize("cluster", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
def test_every_cluster(cluster: tuple[int, int]) -> None:
    for problem in SAMPLE.values():
        check(problem, Launch(128, 192, *cluster, slots=3, store_buffers=1))
