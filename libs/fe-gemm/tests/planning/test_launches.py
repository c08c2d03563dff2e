"""Launches by the number of rows: few rows give all multiprocessors work, and a configuration keeps everything."""

from __future__ import annotations

from itertools import product

import pytest

from fe_gemm.planning.launches import Launches, choose_launches, config, split_config
from fe_gemm.planning.problem import Problem
from fe_gemm.planning.tiles import candidates, choose, is_valid
from fe_runtime.compile import KernelSpec

ARCH = "sm_90a"
PROBLEMS = [
    Problem(),
    Problem("float16", "float16", "m", "n", "m"),
    Problem("float8_e4m3fn"),
    Problem(c_dtype="float32", amax=True),
    Problem(epilogue="swiglu", pre_dtype="float32", c_dtype="float16", alpha=True),
    Problem(epilogue="srelu", c_dtype="float8_e4m3fn", scale_dtype="float8_e8m0fnu", alpha=True),
    Problem(epilogue="dsrelu", upstream_dtype="bfloat16", alpha=True),
]


def blocks(launches: Launches, rows: int, n: int) -> int:
    """How many blocks have work for so many rows."""
    how = next((launch for limit, launch in launches.few if rows <= limit), launches.many)
    return -(-rows // how.tile_m) * -(-n // how.tile_n) * how.cluster_k


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize(("n", "k"), list(product((8, 128, 1024, 4096, 8192, 28672), (16, 512, 8192))))
def test_all_launches_are_valid_and_for_more_and_more_rows(problem: Problem, n: int, k: int) -> None:
    launches = choose_launches(problem, n, k, ARCH, 132)
    assert launches.many == choose(problem, n, k, ARCH)
    assert all(is_valid(problem, launch) for launch in launches.all)
    assert [rows for rows, _ in launches.few] == sorted({rows for rows, _ in launches.few})
    assert all(rows <= launch.tile_m * launch.cluster_m for rows, launch in launches.few)


@pytest.mark.parametrize("n", [4096, 8192, 28672])
@pytest.mark.parametrize("rows", [1, 16, 64, 128])
def test_few_rows_occupy_the_multiprocessors_better(rows: int, n: int) -> None:
    launches = choose_launches(Problem(), n, 8192, ARCH, 132)
    many = Launches((), launches.many)
    assert blocks(launches, rows, n) >= (112 if n == 28672 else 2 * blocks(many, rows, n))
    assert blocks(launches, rows, n) >= 64


def test_a_short_k_is_not_cut() -> None:
    launches = choose_launches(Problem(), 4096, 512, ARCH, 132)
    assert {launch.cluster_k for launch in launches.all} == {1}


def test_sums_over_rows_have_one_width_of_tiles() -> None:
    assert choose_launches(PROBLEMS[-1], 8192, 8192, ARCH, 132).few == ()


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_a_configuration_keeps_everything(problem: Problem) -> None:
    several = choose_launches(problem, 8192, 8192, ARCH, 132)
    for launches in (several, *(Launches((), launch) for launch in candidates(problem, 4096, 4096, ARCH))):
        assert split_config(config(problem, launches)) == (problem, launches)
        spec = KernelSpec.of("fe_gemm.gemm", "fe_gemm.kernels.sm90.gemm:build", ARCH, **config(problem, launches))
        assert split_config(dict(spec.config)) == (problem, launches)


def test_one_launch_is_one_for_any_number_of_rows() -> None:
    launch = choose(Problem(), 4096, 4096, ARCH)
    assert config(Problem(), launch) == config(Problem(), Launches((), launch))
