"""What this library declares for the ``fe`` command is right, by formulas written here."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import naive_rope
import numpy as np
import pytest

from fe_rope.workloads import ROPE_QDQ, TAIL_ROPE, VISION_ROPE_BACKWARD, WORKLOADS
from fe_runtime.bench.accuracy import judge
from fe_runtime.bench.demo import run_case
from fe_runtime.bench.places import JaxPlace, NumpyPlace, Place, TorchPlace
from fe_runtime.bench.problem import Problem, describe_case, minimum_bytes, plan_case
from fe_runtime.bench.workload import Case, Workload
from fe_runtime.device import Device
from fe_runtime.plan import HOPPER
from fe_runtime.strides import contiguous_stride

Pair = tuple[Workload, Case]


def cases(*kinds: str) -> list[Any]:
    """Every workload with its cases of these kinds."""
    found = [
        (workload, case)
        for workload in WORKLOADS
        for kind in kinds
        for case in ([workload.host] if kind == "host" else getattr(workload, kind))
    ]
    found += [(w, case) for w in WORKLOADS if "presets" in kinds for part in w.presets.values() for case in part]
    found = [(w, case) for w, case in found if isinstance(case, Case)]
    return [pytest.param(*pair, id=f"{pair[0].name} {pair[1].shape} {pair[1].format}") for pair in found]


def small(workload: Workload, case: Case) -> Case:
    """The case with few tokens."""
    first = workload.dims[0]
    return dataclasses.replace(case, dims={**case.dims, first: min(3, case.dims[first]), "H": min(4, case.dims["H"])})


def test_the_library_declares_its_operations() -> None:
    assert [workload.name for workload in WORKLOADS] == ["tail_rope", "rope_qdq", "vision_rope_backward"]
    assert all(callable(workload.load_wrapper()) for workload in WORKLOADS)
    assert {workload.library for workload in WORKLOADS} == {"fe_rope"}


def test_declaring_them_loads_no_framework() -> None:
    code = "import sys, fe_rope.workloads; print([n for n in ('torch', 'jax', 'cutlass') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(("workload", "case"), cases("demo"))
def test_expected_is_close_to_the_naive_loop(workload: Workload, case: Case) -> None:
    case = small(workload, case)
    inputs = {name: np.ascontiguousarray(x) for name, x in workload.inputs(case, NumpyPlace().source(3)).items()}
    if workload is TAIL_ROPE:
        want = naive_rope.tail_rope(*inputs.values())
    elif workload is ROPE_QDQ:
        options = {"group_size": 32, "scale_format": "ue8m0", **case.options}
        want = naive_rope.rope_qdq(*inputs.values(), **options)
    else:
        tables = [inputs.pop(name)[:, 0] for name in ("cosine", "sine")]
        want = naive_rope.vision_rope_backward(*inputs.values(), *tables)
        inputs |= {name: table[:, None] for name, table in zip(("cosine", "sine"), tables, strict=True)}
    assert judge(want, workload.expected(case, inputs)).ok


@pytest.mark.parametrize(("workload", "case"), cases("demo"))
def test_what_is_allowed_leaves_room_for_rounding_and_for_little_else(workload: Workload, case: Case) -> None:
    case = small(workload, case)
    problem = Problem(workload, case, NumpyPlace(), seed=4, via_host=True)
    inputs = {name: array.copy() for name, array in problem.host_inputs.items()}
    expected = workload.expected(case, inputs)
    result = workload.decode(case, problem.results())
    found = judge(result, expected)
    assert found.ok
    assert found.error > found.bound / 100
    assert not judge(result * 1.3, expected).ok
    assert not judge(-result, expected).ok


@pytest.mark.parametrize("place", [NumpyPlace(), TorchPlace("cpu"), JaxPlace("cpu")], ids=str)
@pytest.mark.parametrize(("workload", "case"), cases("demo"))
def test_the_plain_expression_computes_the_operation(workload: Workload, case: Case, place: Place) -> None:
    case = small(workload, case)
    inputs = {name: np.ascontiguousarray(x) for name, x in workload.inputs(case, NumpyPlace().source(5)).items()}
    expected = workload.expected(case, inputs)
    result = workload.plain[place.framework](case, {name: place.put(array.copy()) for name, array in inputs.items()})
    assert judge(place.get(result).astype(np.float64), expected).ok


@pytest.mark.parametrize(("workload", "case"), cases("demo", "bench", "host", "presets"))
def test_every_case_meets_the_contract_and_has_a_kernel(workload: Workload, case: Case) -> None:
    describe_case(workload, case, Device("cuda", 0))
    assert plan_case(workload, case, HOPPER).kernel is not None


def test_inputs_are_what_the_operands_say() -> None:
    for workload in WORKLOADS:
        for case in workload.demo:
            inputs = workload.inputs(case, NumpyPlace().source(0))
            strides = workload.strides(case) if workload.strides else {}
            for name, (shape, dtype) in workload.operands(case).items():
                array, stride = inputs[name], strides.get(name, contiguous_stride(shape))
                assert (array.shape, array.dtype.name) == (shape, dtype)
                assert tuple(step // array.itemsize for step in array.strides) == stride
            assert set(inputs) == set(workload.operands(case))


def test_the_benchmark_reads_gradients_as_attention_leaves_them() -> None:
    case = VISION_ROPE_BACKWARD.host
    inputs = VISION_ROPE_BACKWARD.inputs(case, TorchPlace("cpu").source(0))
    tokens = case.dims["T"]
    assert inputs["grad_q"].stride() == inputs["grad_v"].stride() == (64, 64 * tokens, 1)
    assert inputs["grad_k"].stride() == (1, 64 * tokens, tokens)


def test_minimum_bytes() -> None:
    """x is read and written, the rest read once."""
    qdq = Case({"N": 100, "H": 4, "D": 128}, "bfloat16", {"quantization": "fp4"})
    assert minimum_bytes(describe_case(ROPE_QDQ, qdq, Device("cpu"))) == 100 * (4 * 128 * 4 + 2 * 256 + 4)
    tail = Case({"T": 100, "H": 8, "D": 512}, "bfloat16")
    assert minimum_bytes(describe_case(TAIL_ROPE, tail, Device("cpu"))) == 100 * (8 * 512 * 4 + 256)
    vision = Case({"T": 100, "H": 16, "D": 64}, "bfloat16")
    assert minimum_bytes(describe_case(VISION_ROPE_BACKWARD, vision, Device("cpu"))) == 100 * (12 * 1024 + 256)


def test_the_shapes_of_the_targets_are_measured() -> None:
    assert "8192x64x512" in {case.shape for case in TAIL_ROPE.bench}
    assert {"16384x32x128", "4x16384x512"} <= {case.shape for case in ROPE_QDQ.bench}
    assert "65536x16x64" in {case.shape for case in VISION_ROPE_BACKWARD.bench}


@pytest.mark.parametrize("place", [TorchPlace("cpu"), JaxPlace("cpu")], ids=str)
@pytest.mark.parametrize(("workload", "case"), cases("host"))
def test_the_demo_is_right(workload: Workload, case: Case, place: Place) -> None:
    row = run_case(workload, small(workload, case), place)
    assert row.ok, row.note


@pytest.mark.parametrize(("workload", "case"), cases("host"))
def test_the_class_form_runs(workload: Workload, case: Case) -> None:
    Problem(workload, case, TorchPlace("cpu")).class_call()()


@pytest.mark.parametrize("workload", [ROPE_QDQ], ids=lambda workload: workload.name)
def test_torch_compile_of_the_plain_expression_agrees(workload: Workload) -> None:
    case = small(workload, workload.demo[0])
    place = TorchPlace("cpu")
    inputs = workload.inputs(case, place.source(0))
    copies = [{name: array.clone() for name, array in inputs.items()} for _ in range(2)]
    (peer,) = workload.peers
    try:
        compiled = peer.make(case)(copies[0])
    except Exception as error:
        if "compiler" not in str(error).lower():
            raise
        pytest.skip(f"torch.compile has no C++ compiler here: {error}")
    assert place.difference(compiled, workload.plain["torch"](case, copies[1])) < 2**-5
