"""What serves few rows of block-scaled operands: for any extents, reversibly, and small products all alike."""

from __future__ import annotations

from itertools import product

import pytest

from fe_gemm.planning import scaled_few_rows, small_m
from fe_gemm.planning.few_rows import FewRows, choose_few_rows, config, finishing_launch, split_config
from fe_gemm.planning.problem import Problem
from fe_gemm.planning.scaled_few_rows import Problem as HopperProblem
from fe_gemm.planning.small_m import SmallLaunch, SmallProblem
from fe_gemm.planning.tiles import is_valid

FORMS = {
    "mxfp8": ("float8_e4m3fn", "float8_e8m0fnu", 32),
    "mxfp8 e5m2": ("float8_e5m2", "float8_e8m0fnu", 32),
    "nvfp4": ("float4_e2m1fn", "float8_e4m3fn", 16),
    "mxfp4": ("float4_e2m1fn", "float8_e8m0fnu", 32),
    "e8m0 for 16": ("float4_e2m1fn", "float8_e8m0fnu", 16),
}
PROBLEMS = [
    Problem(c_dtype="float32", amax=True),
    Problem(epilogue="swiglu", pre_dtype="bfloat16", alpha=True),
    Problem(epilogue="srelu", c_dtype="float8_e4m3fn", scale_dtype="float8_e8m0fnu", alpha=True),
    Problem(epilogue="dsrelu", upstream_dtype="float32", alpha=True),
]
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))


def chosen(form: tuple[str, str, int], n: int = 8192, k: int = 8192, multiprocessors: int = 132) -> FewRows:
    return choose_few_rows(PROBLEMS[0], form, n, k, "sm_90a", multiprocessors)


@every_form
@pytest.mark.parametrize(("n", "k"), list(product((16, 320, 4096, 28672), (256, 1024, 1056, 8192, 100_000))))
def test_what_is_chosen_is_valid(form: tuple[str, str, int], n: int, k: int) -> None:
    few = chosen(form, n, k)
    assert few.sums
    for sums in few.sums:
        assert (sums.problem.element, sums.problem.scale, sums.problem.vec) == form
        if isinstance(sums.problem, HopperProblem) and isinstance(sums.launch, scaled_few_rows.Launch):
            assert scaled_few_rows.is_valid(sums.problem, sums.launch)
            assert sums.slices == sums.launch.slices
        else:
            assert isinstance(sums.problem, SmallProblem)
            assert isinstance(sums.launch, SmallLaunch)
            assert small_m.is_valid(sums.problem, sums.launch, "sm_90a")
            steps = -(-k // sums.problem.depth)
            assert -(-steps // sums.slices) <= sums.launch.slice_steps  # the tokens of a slice have room
            assert sums.slices <= 132


@every_form
def test_the_number_of_rows_and_of_batches_decides(form: tuple[str, str, int]) -> None:
    few = chosen(form)
    most = few.sums[-1].rows
    for rows in range(1, most + 1):
        sums = few.of(rows, 1)
        assert sums is not None
        assert sums.rows - 16 < rows <= sums.rows or sums.rows == 64
        assert few.of(rows, 2) is None
    assert few.of(most + 1, 1) is None
    assert FewRows().of(1, 1) is None


@every_form
def test_small_products_are_launched_alike(form: tuple[str, str, int]) -> None:
    small = {chosen(form, n, k) for n, k in product((8, 192, 1000, 4096), (256, 272, 1000, 1024))}
    assert len(small) == 1
    assert chosen(form, 28672) not in small


@every_form
def test_a_configuration_keeps_everything(form: tuple[str, str, int]) -> None:
    for n, k in ((320, 512), (28672, 8192), (8192, 28672)):
        few = chosen(form, n, k)
        assert split_config(dict(config(few)), form) == few
    columns = choose_few_rows(Problem(a_major="m"), form, 8192, 8192, "sm_90a", 132)
    assert not columns.sums
    assert split_config(dict(config(columns)), form) == columns


def test_too_few_multiprocessors_for_a_long_k() -> None:
    few = chosen(FORMS["mxfp4"], 4096, 1_000_000, multiprocessors=16)
    assert not few.sums
    assert "multiprocessors" in few.why_not


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_sums_are_finished_in_narrow_tiles(problem: Problem) -> None:
    launch = finishing_launch(problem)
    assert is_valid(problem, launch)
    assert (launch.cluster, launch.tile_m) == (1, 128 if problem.scale_dtype else 64)
