"""What this library declares for the ``fe`` command about rotation and padding is right, by formulas written here."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from fe_norm.workloads import WORKLOADS as ALL_WORKLOADS
from fe_norm.workloads_pad import RMSNORM_SILU_PAD
from fe_norm.workloads_rht import RMSNORM_RHT_AMAX
from fe_runtime.bench.accuracy import judge
from fe_runtime.bench.places import JaxPlace, NumpyPlace, Place, TorchPlace
from fe_runtime.bench.problem import Problem, describe_case, minimum_bytes, plan_case
from fe_runtime.bench.workload import Case, Workload
from fe_runtime.device import Device
from fe_runtime.plan import HOPPER

WORKLOADS = (RMSNORM_RHT_AMAX, RMSNORM_SILU_PAD)


def _every_case(workload: Workload) -> list[Case]:
    presets = [case for cases in workload.presets.values() for case in cases]
    return [*workload.demo, *workload.bench, workload.host, *presets]


def _small(case: Case) -> Case:
    dims = {
        name: min(extent, {"M": 6, "N": 320, "H": 4, "W": 5, "C": 64}.get(name, extent))
        for name, extent in case.dims.items()
    }
    return dataclasses.replace(case, dims=dims)


EVERY_CASE = [(workload, case) for workload in WORKLOADS for case in _every_case(workload)]
SMALL = [(workload, _small(case)) for workload in WORKLOADS for case in workload.demo]
PLACES = [NumpyPlace(), TorchPlace("cpu"), JaxPlace("cpu")]


def _name(value: object) -> str | None:
    return f"{value.shape} {value.format}" if isinstance(value, Case) else getattr(value, "name", None)


def test_the_library_declares_them() -> None:
    assert set(map(id, WORKLOADS)) <= set(map(id, ALL_WORKLOADS))


def test_declaring_them_loads_no_framework() -> None:
    code = "import sys, fe_norm.workloads_rht, fe_norm.workloads_pad; "
    code += "print([n for n in ('torch', 'jax', 'cutlass', 'quack') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_expected_rotation_is_the_formula() -> None:
    case = Case({"M": 3, "N": 32}, "bfloat16")
    inputs = RMSNORM_RHT_AMAX.inputs(case, NumpyPlace().source(3))
    x, w = (inputs[name].astype(float).tolist() for name in ("x_tensor", "w_tensor"))
    want: list[float] = []
    for row in x:
        rms = math.sqrt(math.fsum(v * v for v in row) / len(row) + 1e-5)
        y = [v / rms * gain for v, gain in zip(row, w, strict=True)]
        for n in range(32):
            signs = ((-1) ** ((n % 16) & j).bit_count() for j in range(16))
            want.append(math.fsum(sign * y[n - n % 16 + j] for j, sign in enumerate(signs)) / 4)
    want += [max(abs(v) for v in want[32 * m : 32 * m + 32]) for m in range(3)]
    np.testing.assert_allclose(RMSNORM_RHT_AMAX.expected(case, inputs).values, want, rtol=1e-10, atol=1e-12)


def test_expected_padding_is_the_formula() -> None:
    case = Case({"N": 1, "T": 1, "H": 1, "W": 2, "C": 3}, "bfloat16", optional=("previous",))
    inputs = RMSNORM_SILU_PAD.inputs(case, NumpyPlace().source(3))
    x, gamma, previous = (inputs[name].astype(float) for name in ("input", "gamma", "previous"))
    padded = np.zeros((1, 3, 3, 4, 3))
    padded[0, :2, 1, 1:3] = previous[0, :, 0]
    for w, c in np.ndindex(2, 3):
        v = x[0, 0, 0, w]
        g = v[c] / math.sqrt(math.fsum(v * v)) * math.sqrt(3) * gamma[c]
        padded[0, 2, 1, 1 + w, c] = g / (1 + math.exp(-g))
    want = np.concatenate([padded.ravel(), padded[:, 1:, 1:2, 1:3].ravel()])
    np.testing.assert_allclose(RMSNORM_SILU_PAD.expected(case, inputs).values, want, rtol=1e-12)


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
@pytest.mark.parametrize(("workload", "case"), SMALL, ids=_name)
def test_the_plain_expression_computes_the_operation(workload: Workload, case: Case, place: Place) -> None:
    inputs = workload.inputs(case, NumpyPlace().source(5))
    result = workload.plain[place.framework](case, {name: place.put(array) for name, array in inputs.items()})
    names = workload.load_operation().output_names
    outputs: dict[str, Any] = dict(zip(names, map(place.get, result), strict=False))
    found = judge(workload.decode(case, outputs), workload.expected(case, inputs))
    assert found.error < 3 * found.bound


@pytest.mark.parametrize(("workload", "case"), EVERY_CASE, ids=_name)
def test_every_case_meets_the_contract_and_has_a_kernel(workload: Workload, case: Case) -> None:
    describe_case(workload, case, Device("cuda", 0))
    kernel = plan_case(workload, case, HOPPER).kernel
    assert kernel is not None


@pytest.mark.parametrize("workload", WORKLOADS, ids=_name)
def test_the_class_takes_the_arrays_of_a_case(workload: Workload) -> None:
    Problem(workload, _small(workload.demo[-1]), NumpyPlace(), seed=1).class_call()()


def test_minimum_bytes() -> None:
    rotation = describe_case(RMSNORM_RHT_AMAX, Case({"M": 16384, "N": 4096}, "bfloat16"), Device("cpu"))
    assert minimum_bytes(rotation) == 16384 * 4096 * 4 + 4096 * 2 + 16384 // 8 * 4
    case = Case({"N": 1, "T": 4, "H": 6, "W": 8, "C": 160}, "bfloat16")
    pixels = 4 * 6 * 8 + 1 / 160 * 160 + 6 * 8 * 10 + 2 * 6 * 8
    assert minimum_bytes(describe_case(RMSNORM_SILU_PAD, case, Device("cpu"))) == pixels * 160 * 2


def test_the_shape_of_the_target_is_measured() -> None:
    assert RMSNORM_RHT_AMAX.bench[0].shape == "16384x4096"
