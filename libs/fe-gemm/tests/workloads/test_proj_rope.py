"""What this library declares for the ``fe`` command about ``gemm_proj_rope_mxfp8``, by formulas written here."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import naive_proj_rope as naive
import numpy as np
import pytest

from fe_gemm.workloads.proj_rope import GEMM_PROJ_ROPE_MXFP8 as WORKLOAD
from fe_runtime.bench.accuracy import judge
from fe_runtime.bench.demo import run_case
from fe_runtime.bench.places import JaxPlace, NumpyPlace, Place, TorchPlace
from fe_runtime.bench.problem import Problem, describe_case, minimum_bytes, plan_case
from fe_runtime.bench.workload import Case
from fe_runtime.device import Device
from fe_runtime.plan import HOPPER

CASES = [*WORKLOAD.demo, *WORKLOAD.bench, WORKLOAD.host, *WORKLOAD.presets["default"]]
PLACES = [NumpyPlace(), TorchPlace("cpu"), JaxPlace("cpu")]


def name(value: object) -> str | None:
    return f"{value.shape} {value.format}" if isinstance(value, Case) else None


def small(case: Case) -> Case:
    return dataclasses.replace(case, dims={"T": 32, "K": 64, "H": 2})


every_demo = pytest.mark.parametrize("case", [small(case) for case in WORKLOAD.demo], ids=name)


def test_declaring_it_loads_no_framework() -> None:
    code = "import sys, fe_gemm.workloads.proj_rope; "
    code += "print([n for n in ('torch', 'jax', 'cutlass') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@every_demo
def test_expected_is_the_formula(case: Case) -> None:
    arrays = WORKLOAD.inputs(case, NumpyPlace().source(3))
    x, w, cos, sin = naive.Inputs(**arrays).exact
    want = naive.rotated(naive.sums(x, w), cos, sin)
    expected = WORKLOAD.expected(case, arrays)
    np.testing.assert_allclose(expected.values, np.stack([want, want]), rtol=1e-9, atol=1e-9)
    assert np.abs(want).max() < 1e4


@every_demo
def test_what_is_allowed_leaves_room_for_rounding_and_for_little_else(case: Case) -> None:
    problem = Problem(WORKLOAD, case, NumpyPlace(), seed=4, via_host=True)
    expected = WORKLOAD.expected(case, problem.host_inputs)
    result = WORKLOAD.decode(case, problem.results())
    found = judge(result, expected)
    assert found.ok
    assert found.error > found.bound / 100
    assert not judge(result * 1.3, expected).ok
    assert not judge(np.roll(result, 1, axis=3), expected).ok


@pytest.mark.parametrize("place", PLACES, ids=str)
@every_demo
def test_the_plain_expression_computes_the_operation(case: Case, place: Place) -> None:
    inputs = WORKLOAD.inputs(case, NumpyPlace().source(5))
    result = WORKLOAD.plain[place.framework](case, {key: place.put(array) for key, array in inputs.items()})
    outputs: dict[str, Any] = dict(zip(WORKLOAD.load_operation().output_names, map(place.get, result), strict=True))
    assert judge(WORKLOAD.decode(case, outputs), WORKLOAD.expected(case, inputs)).ok


@pytest.mark.parametrize("case", CASES, ids=name)
def test_every_case_meets_the_contract_and_has_a_kernel(case: Case) -> None:
    describe_case(WORKLOAD, case, Device("cuda", 0))
    assert plan_case(WORKLOAD, case, HOPPER).kernel is not None


@every_demo
def test_inputs_are_what_the_operands_say(case: Case) -> None:
    inputs = WORKLOAD.inputs(case, NumpyPlace().source(0))
    found = {key: (array.shape, array.dtype.name) for key, array in inputs.items()}
    assert found == dict(WORKLOAD.operands(case))


@every_demo
@pytest.mark.parametrize("place", [TorchPlace("cpu"), JaxPlace("cpu")], ids=str)
def test_the_demo_is_right(case: Case, place: Place) -> None:
    row = run_case(WORKLOAD, case, place)
    assert row.ok, row.note


@every_demo
def test_the_class_form_runs(case: Case) -> None:
    Problem(WORKLOAD, case, TorchPlace("cpu")).class_call()()


def test_minimum_bytes() -> None:
    case = Case({"T": 2048, "K": 1536, "H": 128}, "bfloat16")
    features = 128 * 192
    want = 2 * 1536 * (2048 + features) + 2 * 2 * 64 * 2048 + 2 * 2048 * features + 2048 * features // 16
    assert minimum_bytes(describe_case(WORKLOAD, case, Device("cpu"))) == want
    assert WORKLOAD.flops is not None
    assert WORKLOAD.flops(case) == 2 * 2048 * 1536 * features
