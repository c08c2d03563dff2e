"""The launch rules of LMSD: what is chosen for the shapes that matter, and that every choice is possible."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest

from fe_attention.planning import lmsd as forward
from fe_attention.planning import lmsd_backward as backward

COLUMNS = [8, 16, 24, 64, 72, 128, 256, 264, 512, 520, 1016, 1024, 2048, 4096, 5000, 8192]
ARCHITECTURES = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"]
PROCESSORS = 132


def flags() -> list[dict[str, Any]]:
    names = ("apply_u_silu", "concat_u", "concat_x", "has_dropout")
    return [dict(zip(names, values, strict=True)) for values in itertools.product([True, False], repeat=4)]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_every_problem_gets_a_valid_launch(columns: int, arch: str) -> None:
    for known in flags():
        problem = forward.Problem(columns, **known)
        assert forward.is_valid(problem, forward.choose(problem, arch), arch)
        if columns > backward.most_columns(arch):
            continue
        for compute_dweight in (True, False):
            back = backward.Problem(columns, **known, compute_dweight=compute_dweight)
            launch = backward.choose(back, arch, PROCESSORS)
            assert backward.is_valid(back, launch, arch), (back, launch)
            assert launch.blocks == launch.blocks_per_sm * PROCESSORS
            assert launch.blocks <= 64 * PROCESSORS  # the peer's size of workspaces suffices
            assert launch.groups == 1 or launch.stages >= 2  # what the groups add up takes the place of x


@pytest.mark.parametrize(
    ("columns", "threads", "groups", "chunk"),
    [
        pytest.param(128, 8, 16, 2, id="short rows side by side"),
        pytest.param(512, 32, 4, 2, id="a warp for a row"),
        pytest.param(1024, 64, 1, 2, id="two warps"),
        pytest.param(8192, 512, 1, 2, id="a large block"),
    ],
)
def test_choices(columns: int, threads: int, groups: int, chunk: int) -> None:
    launch = forward.choose(forward.Problem(columns), "sm_90a")
    assert (launch.threads_per_row, launch.groups, launch.chunk) == (threads, groups, chunk)
    back = backward.choose(backward.Problem(columns), "sm_90a", PROCESSORS)
    assert back.overlap
    assert back.threads_per_row * back.chunk == threads * chunk
    assert back.threads * back.blocks_per_sm >= 448


def test_bytes_under_way_in_the_gradient() -> None:
    for columns in (256, 512, 1024, 2048, 4096, 8192):
        problem = backward.Problem(columns)
        launch = backward.choose(problem, "sm_90a", PROCESSORS)
        assert (launch.stages - 1) * launch.groups * problem.row_bytes * launch.blocks_per_sm >= 44 << 10


def test_shared_memory_of_a_block() -> None:
    problem = backward.Problem(512)
    launch = backward.Launch(32, 4, 2, 2, 4, 528)
    assert backward.shared_bytes(problem, launch) == 2 * 4 * 512 * 11 + 4 * 512 + 512
    direct = backward.Launch(512, 1, 2, 0, 1, 132)
    assert backward.shared_bytes(backward.Problem(8192), direct) == 512


def test_rows_that_do_not_fit_into_shared_memory_are_read_directly() -> None:
    assert backward.choose(backward.Problem(6144), "sm_120a", 188).stages == 0
    assert backward.choose(backward.Problem(8192), "sm_90a", 132).stages == 2


def test_partial_rows() -> None:
    launch = backward.Launch(32, 4, 2, 2, 4, 528)
    assert [backward.partial_rows(launch, rows) for rows in (0, 1, 4, 5, 2112, 10**6)] == [1, 1, 1, 2, 528, 528]


@pytest.mark.parametrize(
    "wrong",
    [
        {"threads_per_row": 16},  # too few for the row
        {"chunk": 1},
        {"groups": 64},  # more threads than a block may have
        {"blocks_per_sm": 17},
        {"rows": 0},
    ],
    ids=str,
)
def test_what_is_not_valid(wrong: dict[str, int]) -> None:
    problem = forward.Problem(512)
    good = {"threads_per_row": 32, "groups": 4, "rows": 4, "chunk": 2, "blocks_per_sm": 5}
    assert forward.is_valid(problem, forward.Launch(**good), "sm_90a")
    assert not forward.is_valid(problem, forward.Launch(**{**good, **wrong}), "sm_90a")


def test_candidates_begin_with_the_choice_and_are_valid() -> None:
    for columns in (64, 512, 1024, 8192):
        problem, back = forward.Problem(columns), backward.Problem(columns)
        found, others = forward.candidates(problem, "sm_90a"), backward.candidates(back, "sm_90a", PROCESSORS)
        assert found[0] == forward.choose(problem, "sm_90a")
        assert others[0] == backward.choose(back, "sm_90a", PROCESSORS)
        assert len(found) == len(set(found)) > 5
        assert len(others) == len(set(others)) > 1


def test_config_and_back() -> None:
    for module, problem in ((forward, forward.Problem(512, concat_x=False)), (backward, backward.Problem(512))):
        launch = module.choose(problem, "sm_90a", *([] if module is forward else [PROCESSORS]))  # type: ignore[attr-defined]
        assert module.split_config(module.config(problem, launch)) == (problem, launch)  # type: ignore[attr-defined]


def test_planning_needs_nothing_but_the_standard_library() -> None:
    code = "import sys, fe_attention.planning.lmsd_backward; "
    code += "print([n for n in ('numpy', 'torch', 'jax', 'cutlass') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
