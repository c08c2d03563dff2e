"""How grouped products are cut and spread: what is chosen is valid, what cannot run is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from fe_gemm.planning.grouped import (
    Grouped,
    GroupedProblem,
    candidates,
    choose_launches,
    config,
    is_valid,
    line_of,
    split_config,
    table_bytes,
)
from fe_gemm.planning.tiles import Launch

ARCH = "sm_90a"
WIDE = ("float32", "float16", "bfloat16")
PROBLEMS = [
    GroupedProblem(c_dtype=c_dtype, pre_dtype=pre_dtype, b_major=b_major, discrete=discrete)
    for c_dtype, pre_dtype in product(WIDE, (None, *WIDE))
    for b_major, discrete in (("k", False), ("n", True))
]
EXTENTS = [(8, 8, 1), (64, 64, 8), (4096, 7168, 8), (7168, 2048, 256), (28672, 4096, 8), (1536, 2048, 128)]
"""N, K, groups."""


@pytest.mark.parametrize("extents", EXTENTS, ids=str)
def test_the_choice_is_valid(extents: tuple[int, int, int]) -> None:
    for problem in PROBLEMS:
        launches = choose_launches(problem, *extents, ARCH, 132)
        assert all(is_valid(problem, launch) for launch in launches.all)
        assert [rows for rows, _ in launches.few] == sorted({rows for rows, _ in launches.few})


@pytest.mark.parametrize("extents", EXTENTS, ids=str)
def test_candidates_are_valid_and_distinct_and_start_with_the_choice(extents: tuple[int, int, int]) -> None:
    for problem in PROBLEMS[:4]:
        found = candidates(problem, *extents, ARCH, 132)
        assert found[0] == choose_launches(problem, *extents, ARCH, 132).many
        assert len(set(found)) == len(found) > 1
        assert all(is_valid(problem, launch) for launch in found)


def test_few_rows_get_low_tiles_that_give_every_multiprocessor_work() -> None:
    rows, launch = choose_launches(GroupedProblem(), 4096, 7168, 32, ARCH, 132).few[0]
    assert (rows, launch.tile_m, launch.tile_n) == (64, 64, 256)
    _, launch = choose_launches(GroupedProblem(), 4096, 7168, 4, ARCH, 132).few[0]
    assert (launch.tile_m, launch.tile_n) == (64, 128)


def test_many_rows_get_wide_tiles() -> None:
    for problem in PROBLEMS:
        launch = choose_launches(problem, 4096, 7168, 8, ARCH, 132).many
        assert (launch.tile_m, launch.tile_n, launch.cluster) == (128, 256, 1)


def test_what_cannot_run_is_refused() -> None:
    launch = Launch(64, 128, slots=4)
    assert is_valid(GroupedProblem(), launch)
    assert not is_valid(GroupedProblem(), replace(launch, cluster_k=2))
    for change in (
        {"dtype": "float8_e4m3fn"},
        {"c_dtype": "float8_e4m3fn"},
        {"pre_dtype": "float4_e2m1fn"},
        {"bias_dtype": "float8_e5m2"},
        {"epilogue": "none"},
        {"a_major": "m"},
        {"c_major": "m"},
        {"alpha": True},
    ):
        assert not is_valid(replace(GroupedProblem(), **change), launch)  # type: ignore[arg-type]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"{p.c_dtype}-{p.pre_dtype}-{p.b_major}")
def test_a_configuration_holds_everything(problem: GroupedProblem) -> None:
    for bias_dtype, bytes_ in product((None, "float16"), (False, True)):
        own = replace(problem, bias_dtype=bias_dtype)
        names = ("a", "b", *own.inputs, *own.results, "maps")
        plan = Grouped(own, choose_launches(own, 4096, 4096, 8, ARCH, 132), 132, names, bytes_)
        flat = config(plan)
        assert all(isinstance(value, str | int | bool | None) for value in flat.values())
        assert split_config(flat) == plan


def test_names_of_what_a_kernel_reads_and_writes() -> None:
    plain = GroupedProblem()
    assert (plain.inputs, plain.results, plain.scratch, plain.scalars) == (("alpha", "prob"), ("c",), (), ())
    full = GroupedProblem(pre_dtype="float16", bias_dtype="float32", discrete=True)
    assert (full.inputs, full.results) == (("alpha", "bias", "prob"), ("pre", "c"))
    assert (plain.maps, full.maps) == (("c",), ("pre", "c", "b"))


def test_a_call_has_a_map_for_each_group_of_each_array() -> None:
    plan = Grouped(PROBLEMS[1], choose_launches(PROBLEMS[1], 64, 64, 7, ARCH, 132), 132, ())
    assert plan.scratch(7, 100, 64) == {"maps": ((table_bytes(7, len(PROBLEMS[1].maps)),), "uint8")}


def gradient(**how: Any) -> GroupedProblem:
    return GroupedProblem(epilogue="dglu", activation="geglu", upstream_dtype="bfloat16", **how)


def test_gradients() -> None:
    problem = gradient(beta=True, dprob="added", dbias="new")
    assert problem.inputs == ("upstream", "alpha", "beta", "prob")
    assert problem.results == ("c", "dprob", "dbias")
    assert problem.scalars == ("linear_offset", "geglu_alpha", "glu_clamp_max", "glu_clamp_min")
    assert (problem.adds_dprob, problem.adds_dbias) == (True, False)
    assert [(sheet.name, sheet.columns) for sheet in problem.outputs] == [("c", 128)]
    launches = choose_launches(problem, 4096, 4096, 32, ARCH, 132)
    assert {launch.group_columns for launch in launches.all} == {launches.many.group_columns}
    plan = Grouped(problem, launches, 132, (*problem.inputs, *problem.results, *problem.scratch, "maps"))
    assert split_config(config(plan)) == plan
    scratch = plan.scratch(32, 1000, 4096)
    assert scratch["partials"] == ((4096 // launches.many.group_columns, 1000), "float32")
    assert scratch["column_partials"] == ((1000 // 64 + 32, 8192), "float32")
    assert tuple(scratch) == (*problem.scratch, "maps")


def test_an_activation_is_kept_last() -> None:
    problem = gradient(keeps=True, dprob="new")
    assert problem.results == ("c", "dprob", "act")
    assert [sheet.name for sheet in problem.outputs] == ["c", "act"]
    assert problem.maps == ("c", "act")
    assert not replace(GroupedProblem(), keeps=True).is_consistent


def test_inconsistent_epilogues() -> None:
    assert gradient().is_consistent
    for change in (
        {"bias_dtype": "float32"},
        {"pre_dtype": "float32"},
        {"upstream_dtype": None},
        {"activation": None},
        {"dprob": "twice"},
        {"dbias": ""},
        {"c_dtype": "float8_e4m3fn"},
    ):
        assert not replace(gradient(), **change).is_consistent  # type: ignore[arg-type]
    for change in ({"beta": True}, {"dprob": "new"}, {"dbias": "new"}, {"rounds": True}, {"weighted": False}):
        assert not replace(GroupedProblem(), **change).is_consistent  # type: ignore[arg-type]
    assert not GroupedProblem(epilogue="glu").is_consistent
    assert GroupedProblem(epilogue="glu", activation="swiglu", weighted=False).is_consistent


@pytest.mark.parametrize("sizes", [[100, 0, 28, 64, 65, 0, 1], [1] * 200, [64] * 9, [0, 0, 63, 2, 127]])
def test_lines_of_sums_of_columns_do_not_meet(sizes: list[int]) -> None:
    """A line for each cell of 64 rows of each group, the lines of a group one after the other, all in the workspace."""
    found, start = [], 0
    for group, size in enumerate(sizes):
        lines = [line_of(row, group) for row in range(start, start + size, 64)]
        assert lines == list(range(start // 64 + group, start // 64 + group + len(lines)))
        found += lines
        start += size
    assert len(set(found)) == len(found)
    assert max(found) < sum(sizes) // 64 + len(sizes)


def test_float32_results_of_gated_activations_with_a_bias_get_narrower_tiles() -> None:
    for bias_dtype, most in ((None, 128), ("float16", 96)):
        problem = GroupedProblem(c_dtype="float32", bias_dtype=bias_dtype, epilogue="glu", activation="swiglu")
        launches = choose_launches(problem, 4096, 4096, 32, ARCH, 132)
        assert all(is_valid(problem, launch) for launch in launches.all)
        assert max(launch.accumulators(problem) for launch in launches.all) <= most
        assert is_valid(problem, Launch(128, 256)) == (most == 128)
