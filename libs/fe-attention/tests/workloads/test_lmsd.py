"""What this library declares for the ``fe`` command about LMSD is right, by formulas written here."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from fe_attention.reference.philox import keep
from fe_attention.workloads import WORKLOADS as ALL_WORKLOADS
from fe_attention.workloads.lmsd import HSTU_LMSD_BACKWARD, HSTU_LMSD_FORWARD
from fe_runtime.bench.accuracy import judge
from fe_runtime.bench.places import JaxPlace, NumpyPlace, Place, TorchPlace
from fe_runtime.bench.problem import Problem, describe_case, minimum_bytes, plan_case
from fe_runtime.bench.workload import Case, Workload
from fe_runtime.device import Device
from fe_runtime.plan import HOPPER

WORKLOADS = (HSTU_LMSD_FORWARD, HSTU_LMSD_BACKWARD)
PLACES = [NumpyPlace(), TorchPlace("cpu"), JaxPlace("cpu")]
NO_DROPOUT = Case({"N": 9, "D": 64}, "bfloat16", {"dropout_ratio": 0.0})


def _every_case(workload: Workload) -> list[Case]:
    presets = [case for cases in workload.presets.values() for case in cases]
    return [*workload.demo, *workload.bench, workload.host, *presets]


def _small(case: Case) -> Case:
    return dataclasses.replace(case, dims={"N": min(case.dims["N"], 9), "D": min(case.dims["D"], 64)})


EVERY_CASE = [(workload, case) for workload in WORKLOADS for case in _every_case(workload)]
SMALL = [(workload, _small(case)) for workload in WORKLOADS for case in workload.demo[:2]]


def _name(value: object) -> str | None:
    return f"{value.shape} {value.format}" if isinstance(value, Case) else getattr(value, "name", None)


def test_the_library_declares_them() -> None:
    assert set(map(id, WORKLOADS)) <= set(map(id, ALL_WORKLOADS))


def test_declaring_them_loads_no_framework() -> None:
    code = "import sys, fe_attention.workloads; "
    code += "print([n for n in ('torch', 'jax', 'cutlass') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_expected_is_the_formula(ratio: float) -> None:
    case = Case({"N": 3, "D": 16}, "bfloat16", {"dropout_ratio": ratio})
    inputs = HSTU_LMSD_FORWARD.inputs(case, NumpyPlace().source(3))
    x, u, w, b = (inputs[f"{name}_tensor"].astype(float).tolist() for name in ("x", "u", "weight", "bias"))
    kept = [keep(np.empty((3, 16)), plane, 0, ratio) if ratio else np.ones((3, 16), bool) for plane in range(3)]
    means = [math.fsum(row) / 16 for row in x]
    rstds = [
        1 / math.sqrt(math.fsum((v - mean) ** 2 for v in row) / 16 + 1e-6) for row, mean in zip(x, means, strict=True)
    ]
    want: list[float] = []
    for i in range(3):
        a = [v / (1 + math.exp(-v)) for v in u[i]]
        product = [((x[i][j] - means[i]) * rstds[i] * w[j] + b[j]) * a[j] for j in range(16)]
        for plane, values in ((2, a), (1, x[i]), (0, product)):
            want += [v / (1 - float(np.float32(ratio))) * kept[plane][i, j] for j, v in enumerate(values)]
    want += means + rstds
    if ratio:
        want += sum(plane * (1 << number) for number, plane in enumerate(kept)).ravel().tolist()  # type: ignore[union-attr]
    np.testing.assert_allclose(HSTU_LMSD_FORWARD.expected(case, inputs).values, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("workload", "case"), SMALL, ids=_name)
def test_what_is_allowed_leaves_room_for_rounding_and_for_little_else(workload: Workload, case: Case) -> None:
    problem = Problem(workload, case, NumpyPlace(), seed=4, via_host=True)
    expected = workload.expected(case, problem.host_inputs)
    result = workload.decode(case, problem.results())
    found = judge(result, expected)
    assert found.ok
    assert found.error > found.bound / 100
    assert not judge(result * 1.3, expected).ok


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_the_plain_expression_computes_the_operation(place: Place) -> None:
    inputs = HSTU_LMSD_FORWARD.inputs(NO_DROPOUT, NumpyPlace().source(5))
    given = {name: place.put(array) for name, array in inputs.items()}
    (y,) = HSTU_LMSD_FORWARD.plain[place.framework](NO_DROPOUT, given)
    want = HSTU_LMSD_FORWARD.expected(NO_DROPOUT, inputs).values[: y.size if place.framework != "torch" else y.numel()]
    got = np.asarray(place.get(y), np.float64).ravel()
    assert np.linalg.norm(got - want) <= 2.0**-7 * np.linalg.norm(want)


@pytest.mark.parametrize("place", PLACES[:2], ids=str)
def test_the_plain_expression_drops_as_many(place: Place) -> None:
    case = Case({"N": 500, "D": 64}, "bfloat16")
    inputs = HSTU_LMSD_FORWARD.inputs(case, NumpyPlace().source(5))
    (y,) = HSTU_LMSD_FORWARD.plain[place.framework](case, {name: place.put(a) for name, a in inputs.items()})
    assert abs(float((place.get(y) == 0).mean()) - 0.1) < 0.01


@pytest.mark.parametrize(("workload", "case"), EVERY_CASE, ids=_name)
def test_every_case_meets_the_contract_and_has_a_kernel(workload: Workload, case: Case) -> None:
    describe_case(workload, case, Device("cuda", 0))
    assert plan_case(workload, case, HOPPER).kernel is not None


@pytest.mark.parametrize(("workload", "case"), SMALL, ids=_name)
@pytest.mark.parametrize("place", PLACES[:2], ids=str)
def test_the_class_takes_the_arrays_of_a_case(place: Place, workload: Workload, case: Case) -> None:
    Problem(workload, case, place, seed=1).class_call()()


def test_gradient_of_the_plain_expression_is_that_of_the_operation() -> None:
    import torch

    place: Any = TorchPlace("cpu")
    inputs = HSTU_LMSD_BACKWARD.inputs(NO_DROPOUT, NumpyPlace().source(5))
    given = {name: place.put(array) for name, array in inputs.items()}
    leaves = [given[f"{name}_tensor"].double().requires_grad_() for name in ("x", "u", "weight", "bias")]
    names = ("x_tensor", "u_tensor", "weight_tensor", "bias_tensor")
    (y,) = HSTU_LMSD_FORWARD.plain["torch"](NO_DROPOUT, dict(zip(names, leaves, strict=True)))
    grads = torch.autograd.grad(y, leaves, given["dy_tensor"].double())
    want = HSTU_LMSD_BACKWARD.expected(NO_DROPOUT, inputs).values
    np.testing.assert_allclose(np.concatenate([g.numpy().ravel() for g in grads]), want, rtol=1e-4, atol=1e-5)


def test_minimum_bytes() -> None:
    case = Case({"N": 1000, "D": 512}, "bfloat16")
    forward = describe_case(HSTU_LMSD_FORWARD, case, Device("cpu"))
    assert minimum_bytes(forward) == 1000 * 512 * 11 + 1000 * 8 + 2 * 512 * 2
    backward = describe_case(HSTU_LMSD_BACKWARD, case, Device("cpu"))
    assert minimum_bytes(backward) == 1000 * 512 * 15 + 1000 * 8 + 4 * 512 * 2
