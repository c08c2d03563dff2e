"""What fe-gemm declares for the ``fe`` command about ``mhc_projection_backward`` is right, by formulas written here."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from fe_gemm.workloads.mhc import MHC_PROJECTION_BACKWARD as WORKLOAD
from fe_runtime.bench.accuracy import judge
from fe_runtime.bench.places import JaxPlace, NumpyPlace, Place, TorchPlace
from fe_runtime.bench.problem import Problem, describe_case, minimum_bytes, plan_case
from fe_runtime.bench.workload import Case
from fe_runtime.device import Device
from fe_runtime.plan import HOPPER

PLACES = [NumpyPlace(), TorchPlace("cpu"), JaxPlace("cpu")]
EVERY_CASE = [
    *WORKLOAD.demo,
    *WORKLOAD.bench,
    WORKLOAD.host,
    *(case for cases in WORKLOAD.presets.values() for case in cases),
]
SMALL = [
    dataclasses.replace(case, dims={name: min(extent, 40) for name, extent in case.dims.items()})
    for case in WORKLOAD.demo
]


def test_declaring_it_loads_no_framework() -> None:
    code = "import sys, fe_gemm.workloads.mhc; print([n for n in ('torch', 'jax', 'cutlass') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_expected_is_the_formula() -> None:
    case = Case({"M": 3, "N": 2, "Kc": 8}, "bfloat16", {"allow_tf32": True})
    inputs = WORKLOAD.inputs(case, NumpyPlace().source(3))
    x, w, p, grad_r, r = (inputs[n].astype(float).tolist() for n in ("x", "weight", "grad_proj", "grad_r", "r"))
    want = [
        math.fsum([grad_r[m][0] / (r[m][0] * 8) * x[m][k], *(p[m][j] * w[j][k] for j in range(2))])
        for m in range(3)
        for k in range(8)
    ]
    want += [math.fsum(p[m][j] * x[m][k] for m in range(3)) for j in range(2) for k in range(8)]
    np.testing.assert_allclose(WORKLOAD.expected(case, inputs).values, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.shape)
def test_what_is_allowed_leaves_room_for_rounding_and_for_little_else(case: Case) -> None:
    problem = Problem(WORKLOAD, case, NumpyPlace(), seed=4, via_host=True)
    expected = WORKLOAD.expected(case, problem.host_inputs)
    result = WORKLOAD.decode(case, problem.results())
    found = judge(result, expected)
    assert found.ok
    assert found.error > found.bound / 100
    assert not judge(result * 1.02, expected).ok


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.shape)
def test_the_plain_expression_computes_the_operation(case: Case, place: Place) -> None:
    inputs = WORKLOAD.inputs(case, NumpyPlace().source(5))
    result = WORKLOAD.plain[place.framework](case, {name: place.put(array) for name, array in inputs.items()})
    outputs: dict[str, Any] = dict(zip(("dx", "dweight"), map(place.get, result), strict=True))
    assert judge(WORKLOAD.decode(case, outputs), WORKLOAD.expected(case, inputs)).ok


@pytest.mark.parametrize("case", EVERY_CASE, ids=lambda case: case.shape)
def test_every_case_meets_the_contract_and_has_a_kernel(case: Case) -> None:
    describe_case(WORKLOAD, case, Device("cuda", 0))
    assert plan_case(WORKLOAD, case, HOPPER).kernel is not None


@pytest.mark.parametrize("place", PLACES[:2], ids=str)
def test_the_class_takes_the_arrays_of_a_case(place: Place) -> None:
    Problem(WORKLOAD, SMALL[-1], place, seed=1).class_call()()


def test_minimum_bytes() -> None:
    case = Case({"M": 4096, "N": 24, "Kc": 20480}, "bfloat16", {"allow_tf32": True})
    elements = 4096 * 20480 * 4 + 2 * 24 * 20480 * 4 + 4096 * (24 + 2) * 4
    assert minimum_bytes(describe_case(WORKLOAD, case, Device("cpu"))) == elements


def test_the_shape_of_the_target_is_measured() -> None:
    assert WORKLOAD.bench[0].shape == "4096x24x20480"
