"""The Hopper matrix product compiles, without spills, for every tile, cluster and layout."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

import fe_runtime
from fe_gemm.planning.launches import choose_launches, config
from fe_gemm.planning.tiles import Launch, Problem, candidates, choose, is_valid, roomy
from fe_runtime.compile import KernelSpec, resource_usage

ARCH = "sm_90a"
THREADS = 384
REGISTERS = 65536  # of a multiprocessor; a block takes one
TRANSPOSED = Problem(a_major="m", b_major="n", c_major="m")
SWIGLU = Problem(epilogue="swiglu", pre_dtype="bfloat16", alpha=True)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    fe_runtime.configure(cache_dir=tmp_path)
    yield
    fe_runtime.configure(cache_dir=None)


def check(problem: Problem, launch: Launch) -> None:
    assert is_valid(problem, launch)
    spec = KernelSpec.of("fe_gemm.gemm", "fe_gemm.kernels.sm90.gemm:build", ARCH, **config(problem, launch))
    ((symbol, usage),) = resource_usage(spec).items()
    assert symbol.startswith("fe_gemm")
    assert usage.frame_bytes == 0, f"{problem} {launch} spills {usage.frame_bytes} bytes"
    assert usage.registers * THREADS <= REGISTERS


SAMPLE = {
    "wide": (Problem(), choose(Problem(), 4096, 4096, ARCH)),
    "narrow, transposed": (TRANSPOSED, choose(TRANSPOSED, 128, 4096, ARCH)),
    "float16, cluster of four": (Problem("float16", "float16", b_major="n"), Launch(256, 128, 2, 2)),
    "8 bits": (Problem("float8_e4m3fn"), choose(Problem("float8_e4m3fn"), 4096, 4096, ARCH)),
    "few rows": (Problem(), Launch(64, 128, cluster_k=2)),
    "shared operands, K in parts": (Problem(), Launch(128, 64, 1, 2, 2)),
    "quarters of a tile": (Problem(), Launch(128, 256, cluster_k=4, store_buffers=1)),
}


@pytest.mark.parametrize(("problem", "launch"), SAMPLE.values(), ids=list(SAMPLE))
def test_sample(problem: Problem, launch: Launch) -> None:
    check(problem, launch)


TILES = [(64, 128), (64, 256), (128, 64), (128, 128), (128, 192), (128, 256), (256, 64), (256, 128), (256, 192)]


@pytest.mark.compile
@pytest.mark.parametrize("cluster", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile(tile: tuple[int, int], cluster: tuple[int, int]) -> None:
    for problem in (Problem(), TRANSPOSED):
        check(problem, Launch(*tile, *cluster, slots=3, store_buffers=1))


@pytest.mark.compile
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("c_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("majors", list(product("km", "kn", "nm")), ids="".join)
def test_every_layout(majors: tuple[str, str, str], c_dtype: str, dtype: str) -> None:
    problem = Problem(dtype, c_dtype, *majors)
    for n in (128, 4096):
        check(problem, choose(problem, n, 4096, ARCH))


def test_launches_for_few_and_many_rows() -> None:
    for problem in (Problem(), Problem("float8_e4m3fn")):
        launches = choose_launches(problem, 8192, 8192, ARCH, 132)
        assert len(launches.all) == 3
        spec = KernelSpec.of("fe_gemm.gemm", "fe_gemm.kernels.sm90.gemm:build", ARCH, **config(problem, launches))
        assert [usage.frame_bytes for usage in resource_usage(spec).values()] == [0, 0, 0]


@pytest.mark.compile
@pytest.mark.parametrize("parts", [2, 3, 4, 6])
@pytest.mark.parametrize("tile", [tile for tile in TILES if tile[0] < 256], ids=str)
def test_every_number_of_parts_of_k(tile: tuple[int, int], parts: int) -> None:
    """Also of blocks that share operands, if there are few enough."""
    several = [(problem, (1, 1)) for problem in (Problem(), TRANSPOSED, Problem("float8_e5m2"), SWIGLU)]
    several += [(Problem(), (2, 1)), (Problem(), (1, 2))]
    launches = [
        (problem, roomy(problem, Launch(*tile, *cluster, parts, store_buffers=1))) for problem, cluster in several
    ]
    valid = [(problem, launch) for problem, launch in launches if is_valid(problem, launch)]
    assert (Problem(), launches[0][1]) in valid
    for problem, launch in valid:
        check(problem, launch)


@pytest.mark.compile
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_every_candidate(dtype: str) -> None:
    problem = Problem(dtype)
    for launch in candidates(problem, 4096, 4096, ARCH):
        check(problem, launch)
