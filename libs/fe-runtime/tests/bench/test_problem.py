from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fe_runtime.bench.places import JaxPlace, NumpyPlace, Place, TorchPlace
from fe_runtime.bench.problem import Problem, describe_case, minimum_bytes, plan_case
from fe_runtime.bench.workload import Case, Workload
from fe_runtime.contract import Contract, Input, bind
from fe_runtime.device import Device
from fe_runtime.plan import HOPPER


def test_results_are_those_of_the_wrapper_by_name(scale: Workload) -> None:
    problem = Problem(scale, scale.demo[1], NumpyPlace(), via_host=True)
    results = problem.results()
    assert list(results) == ["o_tensor"]
    expected = problem.host_inputs["x_tensor"].astype(np.float32) * 3
    np.testing.assert_array_equal(results["o_tensor"], expected.astype(results["o_tensor"].dtype))


def test_sets_rotate(scale: Workload) -> None:
    problem = Problem(scale, scale.demo[0], NumpyPlace(), sets=2)
    first, second, third = (problem.ours(number)["o_tensor"] for number in range(3))
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(first, third)


@pytest.mark.parametrize("place", [NumpyPlace(), TorchPlace("cpu")], ids=str)
def test_the_class_call_writes_what_the_wrapper_returns(scale: Workload, place: NumpyPlace | TorchPlace) -> None:
    problem = Problem(scale, scale.demo[0], place)
    assert problem.class_call()() is None
    assert place.difference(problem.wrapper_call()()["o_tensor"], problem.ours()["o_tensor"]) == 0


def test_operation_without_a_class_gets_a_plain_one(scale: Workload) -> None:
    problem = Problem(replace(scale, make_class=None), scale.demo[1], NumpyPlace())
    problem.class_call()()
    assert problem.class_call()() is None


def test_bytes_of_a_mutated_input_count_twice() -> None:
    contract = Contract("op", (Input("x", "N", ("float32",), mutated=True),), ())
    assert minimum_bytes(bind(contract, (np.zeros(8, np.float32),), {})) == 2 * 8 * 4


@pytest.mark.parametrize("place", [NumpyPlace(), TorchPlace("cpu")], ids=str)
def test_host_inputs_are_not_what_an_operation_writes_into(scale: Workload, place: Place) -> None:
    in_place = replace(scale, operation="fe_example.scale:IN_PLACE")
    problem = Problem(in_place, scale.demo[0], place, via_host=True)
    before = problem.host_inputs["x_tensor"].copy()
    problem.operation.run((problem.sets[0]["x_tensor"],), {})
    np.testing.assert_array_equal(problem.host_inputs["x_tensor"], before)
    np.testing.assert_allclose(place.get(problem.sets[0]["x_tensor"]), 2 * before)


@pytest.mark.parametrize("place", [NumpyPlace(), TorchPlace("cpu"), JaxPlace("cpu")], ids=str)
def test_outputs_of_an_operation_that_writes_leave_its_inputs(scale: Workload, place: Place) -> None:
    problem = Problem(replace(scale, operation="fe_example.scale:IN_PLACE"), scale.demo[0], place)
    before = place.get(problem.sets[0]["x_tensor"]).copy()
    (changed,) = problem.outputs()
    np.testing.assert_allclose(place.get(changed), 2 * before)
    np.testing.assert_array_equal(place.get(problem.sets[0]["x_tensor"]), before)


def test_plain_exists_only_where_it_was_declared(scale: Workload) -> None:
    assert Problem(scale, scale.demo[0], NumpyPlace()).has_plain
    assert not Problem(scale, scale.demo[0], TorchPlace("cpu")).has_plain


def test_bytes_count_each_operand_once(scale: Workload) -> None:
    bound = describe_case(scale, Case({"T": 3, "C": 16}, "bfloat16"), Device("cpu"))
    assert minimum_bytes(bound) == 2 * 3 * 16 * 2


def test_a_case_is_planned_without_arrays_and_without_a_gpu(scale: Workload) -> None:
    plan = plan_case(scale, Case({"T": 1 << 40, "C": 64}, "float32"), HOPPER)
    assert plan.kernel is not None
    assert plan.kernel.spec.arch == "sm_90a"
    assert dict(plan.kernel.spec.config) == {"columns": 64}
    without = plan_case(scale, Case({"T": 4, "C": 7}, "float32"), HOPPER)
    assert without.missing is not None
    assert "multiple of 8" in without.missing.reason
    assert plan_case(scale, Case({"T": 4, "C": 64}, "float32"), None).backend == "reference"


def test_jax_arrays_are_made_where_jax_is(scale: Workload) -> None:
    made = scale.inputs(scale.demo[0], JaxPlace("cpu").source(0))["x_tensor"]
    assert type(made).__module__.startswith("jax")
