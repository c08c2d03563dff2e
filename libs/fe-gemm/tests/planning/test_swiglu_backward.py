"""Launches of the gradients of ``gemm_swiglu``: all valid, one kernel for any rows, and the plan of a checked call."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from fe_gemm.dense.swiglu_backward import OPERATION, find_kernel
from fe_gemm.planning import tiles
from fe_gemm.planning.swiglu_backward import (
    Launch,
    Problem,
    candidates,
    choose,
    config,
    is_valid,
    pass_config,
    plan,
    split_config,
    split_pass_config,
    workspace_shape,
)
from fe_runtime.compile import KernelSpec
from fe_runtime.plan import HOPPER, Kernel, NoKernel, Target

ARCH = "sm_90a"
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
PROBLEMS = [
    Problem(),
    Problem("float16", "bfloat16", "float32", "float32", "m", "n", "m", "n", "m"),
    Problem(ab12_dtype="float8_e4m3fn", dab12_dtype="float8_e5m2"),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_choice_and_candidates_are_valid(problem: Problem) -> None:
    for arch in ("sm_80", ARCH, "sm_120a"):
        found = candidates(problem, arch)
        assert found[0] == choose(problem, arch)
        assert all(is_valid(problem, launch, arch) for launch in found)
    assert not is_valid(Problem(major="m"), Launch(vector=16), ARCH)  # rows come in multiples of 8
    assert not is_valid(Problem("float32"), Launch(), ARCH)


@pytest.mark.parametrize(("n", "k"), list(product((64, 128, 192, 28672), (8, 512, 4096))))
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_products_are_valid(problem: Problem, n: int, k: int) -> None:
    how = plan(problem, n, k, ARCH, 132)
    assert all(tiles.is_valid(problem.da, launch) for launch in how.da.all)
    assert all(tiles.is_valid(problem.db, launch) for launch in how.db.all)
    (of_db,) = how.db.all
    assert of_db.cluster_k == 1  # M, the length of its sum, is not known
    assert split_config(config(how)) == how
    assert split_config(dict(KernelSpec.of("o", "m:b", ARCH, **config(how)).config)) == how
    assert split_pass_config(pass_config(problem, how.launch)) == (problem, how.launch)


def strided(shape: tuple[int, int, int], dtype: Any, major: str) -> Any:
    """A tensor (M, N, L) with its columns ("n") or its rows contiguous."""
    rows, columns, batches = shape
    if major == "n":
        return torch.zeros((batches, rows, columns), dtype=dtype).permute(1, 2, 0)
    return torch.zeros((batches, columns, rows), dtype=dtype).permute(2, 1, 0)


def planned(
    m: int = 24, majors: str = "nnnnn", with_dab12: bool = True, dtype: Any = BF16, target: Target = HOPPER
) -> Any:
    n, k, batches = 128, 40, 2
    shapes = {"dc": (m, n // 2), "dab12": (m, n), "a": (m, k), "b": (n, k), "ab12": (m, n)}
    dtypes = (BF16, F32, dtype, dtype, F32)
    arrays: list[Any] = [
        strided((*shape, batches), kind, major)
        for shape, kind, major in zip(shapes.values(), dtypes, majors, strict=True)
    ]
    if not with_dab12:
        arrays[1] = None
    return find_kernel(OPERATION.bind(arrays, {"alpha": 0.5}), target)


def test_a_plan_names_majors_and_the_workspace() -> None:
    found = planned()
    assert isinstance(found, Kernel)
    assert found.form.scratch == (((48, 128), "bfloat16"),)
    assert found.form.scalars == ("alpha",)
    how = split_config(dict(found.spec.config))
    assert how.problem == Problem(ab12_dtype="float32", dab12_dtype="float32")
    assert how.problem.arguments == ("dc", "dab12", "a", "b", "ab12", "da", "db", "dx", "alpha")
    other = planned(majors="mnmmm")
    assert other.form.scratch == (((256, 24), "bfloat16"),)
    want = Problem(ab12_dtype="float32", dab12_dtype="float32", a_major="m", b_major="n", major="m", ab12_major="m")
    assert split_config(dict(other.spec.config)).problem == want
    assert (want.da.a_major, want.da.b_major, want.da.c_major) == ("m", "k", "m")
    assert (want.db.a_major, want.db.b_major, want.db.c_major) == ("k", "k", "m")


def test_any_rows_are_one_kernel() -> None:
    assert len({planned(m).spec for m in (1, 8, 24, 1000)}) == 1
    assert planned(with_dab12=False).spec != planned().spec
    assert len(planned(with_dab12=False).form.inputs) == 4


def test_why_there_is_no_kernel() -> None:
    found = planned(target=Target((10, 0), 148))
    assert isinstance(found, NoKernel)
    assert found.supported == ((9, 0),)
    found = planned(dtype=F32)
    assert isinstance(found, NoKernel)
    assert "float32 operands" in found.reason


def test_the_workspace_has_whole_lines() -> None:
    assert workspace_shape(Problem(), 5, 128, 3) == (15, 128)
    assert workspace_shape(Problem(major="m"), 8, 128, 3) == (384, 8)
