"""Plans of the dense products: every legal call has a Hopper kernel, with the right arguments, forms and scratch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from dense_plans import CALLS, E2M1, E4M3, E8M0, FEW_ROWS, OPERATIONS, SAMPLE, Call, K, L, M, N, on_gpu

from fe_gemm.dense import swiglu
from fe_gemm.planning.dense import Dense, config, split_config
from fe_gemm.planning.tiles import is_valid
from fe_runtime import workspace
from fe_runtime.plan import HOPPER, Kernel, NoKernel, Target
from fe_runtime.tensor_desc import TensorDesc


def dense_of(kernel: Kernel) -> Dense:
    return split_config(dict(kernel.spec.config))


def check(call: Call) -> None:
    plan = call.plan()
    assert isinstance(plan, Kernel), (call, plan)
    dense, bound = dense_of(plan), call.bound()
    assert dense.operands == call.operands, call
    assert dense.arguments == call.arguments, call
    assert dense.problem.dtype == (call.element if call.operands.way == "direct" else "bfloat16"), call
    assert (dense.problem.a_major, dense.problem.b_major, dense.problem.c_major) == (*call.majors, call.major), call
    assert all(is_valid(dense.problem, launch) for launch in dense.launches.all), call
    assert (plan.spec.operation, plan.spec.arch) == (f"fe_gemm.gemm_{call.operation}", "sm_90a")
    counts = [len(plan.form.scratch), len(plan.form.scalars), sum(shape is not None for shape in plan.form.outputs)]
    counts += [len(bound.arrays), sum(spec is not None and bool(spec.accumulate) for spec in bound.outputs)]
    assert sum(counts) == len(dense.arguments), call
    if call.operands.way != "direct":
        sides = zip((call.m, N), call.majors, strict=True)
        assert list(plan.form.scratch[:2]) == [call.workspace(rows, major) for rows, major in sides], call


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_legal_combination_has_a_kernel(name: str) -> None:
    assert len(CALLS[name]) > 100
    for call in CALLS[name]:
        check(call)


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_two_combinations_share_a_kernel(name: str) -> None:
    specs: dict[Any, Call] = {}
    for call in CALLS[name]:
        plan = call.plan()
        assert isinstance(plan, Kernel)
        other = specs.setdefault(plan.spec, call)
        same_bytes = {call.results, other.results} == {("float4_e2m1fn_x2",), ("uint8",)}
        assert other == call or (same_bytes and replace(other, results=call.results) == call), (call, other)


@pytest.mark.parametrize("call", [*SAMPLE, *FEW_ROWS], ids=str)
def test_the_same_kernel_serves_any_rows(call: Call) -> None:
    plans = [replace(call, m=m).plan() for m in (16, M, 128, 4096, 1_000_000)]
    assert all(isinstance(plan, Kernel) for plan in plans)
    assert len({plan.spec for plan in plans if isinstance(plan, Kernel)}) == 1


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("call", SAMPLE, ids=str)
def test_other_gpus_have_no_kernel(call: Call, capability: tuple[int, int]) -> None:
    plan = call.plan(Target(capability, 132))
    assert isinstance(plan, NoKernel)
    assert plan.supported == ((9, 0),)
    assert "Hopper" in plan.reason


def test_forms_are_what_a_kernel_sees() -> None:
    plan = Call("dsrelu", E2M1, E8M0, 32, "kk", ("bfloat16", E4M3)).plan()
    assert isinstance(plan, Kernel)
    rows, columns = (K // 2, L), (2 * 2 * 512, 2 * 2 * 2 * 512)
    assert plan.form.inputs[:3] == ((M, *rows), (N, *rows), (M, N, L))
    assert plan.form.inputs[3:5] == ((columns[0],), (columns[1],))
    assert plan.form.inputs[5:] == ((M, 1, L), (1,))
    assert plan.form.outputs == ((M, N, L), (M, 1, L), None, (2 * 2 * 512,))
    assert plan.form.scalars == ("alpha",)
    group = dense_of(plan).launches.many.group_columns
    assert plan.form.scratch[2] == ((-(-N // group), L, M), "float32")


def test_depth_of_a_split_product_counts_for_its_tiles() -> None:
    """Few rows take K in parts only where it is long; that of a split product is three times as long."""
    parts = {}
    for element in ("bfloat16", "float32"):
        shapes = (on_gpu(element, (16, 512, 1)), on_gpu(element, (128, 512, 1)))
        plan = swiglu.find_kernel(swiglu.OPERATION.bind((*shapes, None, None, None), {}), HOPPER)
        assert isinstance(plan, Kernel)
        parts[element] = max(launch.cluster_k for launch in dense_of(plan).launches.all)
    assert parts == {"bfloat16": 1, "float32": 2}


@pytest.mark.parametrize("call", [*SAMPLE, *FEW_ROWS], ids=str)
def test_configuration_is_reversible(call: Call) -> None:
    plan = call.plan()
    assert isinstance(plan, Kernel)
    dense = dense_of(plan)
    assert split_config(dict(config(dense))) == dense


def test_results_of_the_callers_own_do_not_change_the_kernel() -> None:
    """Pitches are dynamic, and so is what lies between the lines of operands."""
    call = SAMPLE[3]
    wide = (
        TensorDesc.of("float32", (M, K, L), (1, M + 4, (M + 4) * K + 8), device="cuda"),
        on_gpu("float32", (N, K, L)),
    )
    plans = [call.plan(), swiglu.find_kernel(swiglu.OPERATION.bind((*wide, None, None, None), call.options), HOPPER)]
    assert all(isinstance(plan, Kernel) for plan in plans)
    assert plans[0] == plans[1]


# --- few rows -------------------------------------------------------------------------------------------------------


def test_few_rows_of_every_legal_combination_may_do_without_expansion() -> None:
    for calls in CALLS.values():
        for call in calls:
            deep = replace(call, k=512, m=112)
            check(deep)
            plan = deep.plan()
            assert isinstance(plan, Kernel)
            dense = dense_of(plan)
            assert bool(dense.few_rows.sums) == deep.has_few_rows, call
            if dense.few_rows.finish is not None:
                assert is_valid(dense.problem, dense.few_rows.finish), call
                assert [sums.rows for sums in dense.few_rows.sums] == limits(call), call


def limits(call: Call) -> list[int]:
    """Return the most rows of each kernel for few rows."""
    return [16, 32] if call.element == E2M1 and call.scale == E8M0 else [16, 32, 64]


@pytest.mark.parametrize("call", FEW_ROWS, ids=str)
@pytest.mark.parametrize("batches", [1, 2])
def test_workspaces_are_those_of_the_way_that_the_rows_take(call: Call, batches: int) -> None:
    few = batches == 1
    for m in (16, 32, 48, 64, 80, 4096):
        asked = replace(call, m=m, batches=batches)
        plan = asked.plan()
        assert isinstance(plan, Kernel)
        dense = dense_of(plan)
        names = [name for name in dense.arguments if name in ("a_values", "b_values", "sums", "partials")]
        scratch = dict(zip(names, plan.form.scratch, strict=True))
        if few and m <= limits(call)[-1]:
            slices = next(sums.slices for sums in dense.few_rows.sums if m <= sums.rows)
            assert scratch["sums"] == ((slices * m, N), "float32")
            assert scratch["a_values"] == scratch["b_values"] == ((1, 8), "bfloat16")
            launch = dense.few_rows.finish
        else:
            assert scratch["sums"] == ((1, 8), "float32")
            assert [scratch["a_values"], scratch["b_values"]] == [asked.workspace(rows, "k") for rows in (m, N)]
            launch = dense.launches.many
        if "partials" in names:
            assert launch is not None
            assert scratch["partials"] == ((-(-N // launch.group_columns), batches, m), "float32")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        pytest.param({"majors": "mk"}, "K is not contiguous", id="columns of A"),
        pytest.param({"majors": "kn"}, "K is not contiguous", id="columns of B"),
        pytest.param({"k": 240}, "a short K", id="short"),
    ],
)
def test_a_plan_says_why_few_rows_are_expanded(change: dict[str, Any], why: str) -> None:
    plan = replace(FEW_ROWS[0], **change).plan()
    assert isinstance(plan, Kernel)
    words = dict(plan.spec.config)["few_rows"]
    assert words.startswith("expanded: ")
    assert why in words
    assert dense_of(plan).few_rows.sums == ()
    plan = FEW_ROWS[0].plan()
    assert isinstance(plan, Kernel)
    assert dict(plan.spec.config)["few_rows"] == "up to 16, 32, 64 without expansion, one batch"


def test_fewer_rows_never_need_more_memory() -> None:
    """So the workspace of an object is large enough for whatever has fewer rows than its sample."""
    for call in FEW_ROWS:
        for k in (256, 1024, 4096, 32768):
            needed = [0]
            for m in (16, 32, 64, 80, 128):
                plan = replace(call, m=m, k=k).plan()
                assert isinstance(plan, Kernel)
                needed.append(workspace.size(plan.form.scratch))
            assert needed == sorted(needed), (call, k)
