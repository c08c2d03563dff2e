"""Dense operations hold kernels for few block-scaled rows beside the core, none of which spills."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from dense_plans import E2M1, FEW_ROWS, Call

import fe_runtime
from fe_gemm.kernels.sm90.dense_few_rows import FewRowsProduct
from fe_gemm.planning import scaled_few_rows, small_m
from fe_gemm.planning.few_rows import Sums, choose_few_rows
from fe_gemm.planning.problem import Problem
from fe_runtime.compile import KernelSpec, resource_usage
from fe_runtime.plan import Kernel

ARCH = "sm_90a"
FORMS = (*scaled_few_rows.FORMATS, (E2M1, "float8_e8m0fnu", 32), (E2M1, "float8_e8m0fnu", 16))
WEIGHTS = [
    (28672, 8192),
    (8192, 28672),
    (8192, 8192),
    (4096, 4096),
    (6144, 4096),
    (14336, 4096),
    (1024, 8192),
    (320, 544),
]
"""N and K."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    fe_runtime.configure(cache_dir=tmp_path)
    yield
    fe_runtime.configure(cache_dir=None)


def kernels_of(spec: KernelSpec) -> list[str]:
    """Return the names of the kernels without their numbers, none of which spills."""
    usage = resource_usage(spec)
    for symbol, found in usage.items():
        assert found.frame_bytes == 0, f"{symbol} of {spec.config} spills {found.frame_bytes} bytes"
    return [symbol.rstrip("_0123456789") for symbol in usage]


def check(call: Call) -> None:
    plan = call.plan()
    assert isinstance(plan, Kernel)
    names = kernels_of(plan.spec)
    is_small = call.element == E2M1 and call.scale == "float8_e8m0fnu"
    sums = ["fe_gemm_small_m"] * 2 if is_small else ["fe_gemm_few_rows"] * 3
    wanted = [*sums, "fe_gemm_finish", "fe_gemm_expand", "fe_gemm_expand", "fe_gemm"]
    wanted += ["fe_gemm_row_sums"] * 2 if call.operation == "dsrelu" else []
    assert {name: names.count(name) for name in wanted if name != "fe_gemm"} == {
        name: wanted.count(name) for name in wanted if name != "fe_gemm"
    }
    assert set(names) == set(wanted)


@pytest.mark.parametrize("call", [FEW_ROWS[0], FEW_ROWS[-1]], ids=str)
def test_sample(call: Call) -> None:
    check(call)


@pytest.mark.compile
@pytest.mark.parametrize("call", FEW_ROWS, ids=str)
def test_every_format_and_epilogue(call: Call) -> None:
    check(call)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_launcher_takes_the_way_that_scratch_was_planned_for(form: tuple[str, str, int]) -> None:
    problem = Problem(amax=True)
    few = choose_few_rows(problem, form, 8192, 8192, ARCH, 132)
    product = FewRowsProduct.of(ARCH, problem, few)
    assert product is not None
    for m in range(1, 80):
        for batches in (1, 2):
            serves = product.serves(SimpleNamespace(shape=(m, 8192, batches)))
            assert bool(serves.value) == (few.of(m, batches) is not None), (m, batches)


def spec_of(sums: Sums) -> KernelSpec:
    if isinstance(sums.problem, small_m.SmallProblem) and isinstance(sums.launch, small_m.SmallLaunch):
        flat = small_m.config(sums.problem, sums.launch)
        return KernelSpec.of("fe_gemm.small_m", "fe_gemm.kernels.small_m_blocked:build", ARCH, **flat)
    assert isinstance(sums.problem, scaled_few_rows.Problem)
    assert isinstance(sums.launch, scaled_few_rows.Launch)
    flat = scaled_few_rows.config(sums.problem, sums.launch)
    return KernelSpec.of("fe_gemm.few_rows", "fe_gemm.kernels.sm90.scaled_few_rows:build", ARCH, **flat)


@pytest.mark.compile
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_is_chosen_for_common_weights(form: tuple[str, str, int]) -> None:
    found = {
        spec_of(sums) for n, k in WEIGHTS for sums in choose_few_rows(Problem(amax=True), form, n, k, ARCH, 132).sums
    }
    for spec in found:
        kernels_of(spec)
