"""What this library declares for the ``fe`` command about the grouped products is right, by formulas written here."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from naive_gemm import E4M3, E8M0, VALUES, unblocked
from naive_grouped import by_row, columns, forward, product, slopes

from fe_gemm.workloads import WORKLOADS as ALL_WORKLOADS
from fe_gemm.workloads.grouped import GROUPED_GEMM, GROUPED_GEMM_DGLU, GROUPED_GEMM_GLU, GROUPED_GEMM_WGRAD
from fe_runtime.bench.accuracy import judge
from fe_runtime.bench.places import JaxPlace, NumpyPlace, Place, TorchPlace
from fe_runtime.bench.problem import Problem, describe_case, plan_case
from fe_runtime.bench.workload import Case, Workload
from fe_runtime.device import Device
from fe_runtime.plan import HOPPER

WORKLOADS = (GROUPED_GEMM, GROUPED_GEMM_GLU, GROUPED_GEMM_DGLU, GROUPED_GEMM_WGRAD)
PLACES = [NumpyPlace(), TorchPlace("cpu"), JaxPlace("cpu")]
SMALL = [(workload, case) for workload in WORKLOADS for case in workload.demo]


def _name(value: object) -> str | None:
    return f"{value.shape} {value.format}" if isinstance(value, Case) else getattr(value, "name", None)


def _values(case: Case, inputs: Any, side: str) -> Any:
    x = inputs[f"{side}_tensor"]
    if case.dtype == "bfloat16":
        return x.astype(np.float64)
    rows, count = x.shape[-2], x.shape[-1] // 32
    codes, _ = unblocked(inputs[f"sf{side}_tensor"], rows, count)
    factors = np.repeat(VALUES[E8M0][codes], 32, axis=1)
    values = VALUES[E4M3][x.view(np.uint8)]
    return values * (factors[..., 0] if x.ndim == 2 else factors.transpose(2, 0, 1))


def _exact(workload: Workload, case: Case, inputs: Any) -> Any:
    if workload is GROUPED_GEMM_WGRAD:
        a, b, m = inputs["a_tensor"].astype(float), inputs["b_tensor"].astype(float), case.dims["M"]
        experts = [slice(e * m, e * m + m) for e in range(case.dims["E"])]
        return np.ravel([np.einsum("it,tj->ij", a[:, tokens], b[tokens]) for tokens in experts])
    off, prob = inputs["padded_offsets"], inputs["prob_tensor"].astype(float)[:, None]
    acc = product(_values(case, inputs, "a"), _values(case, inputs, "b"), off)
    alpha = by_row(inputs["alpha_tensor"], off, len(acc))[:, None]
    x = alpha * acc
    if workload is GROUPED_GEMM:
        return np.ravel(x * prob)
    if workload is GROUPED_GEMM_GLU:
        gates, ups = columns(x.shape[1] // 2)
        d = forward("swiglu", x[:, gates], x[:, ups]) * prob
        m = case.dims["M"]
        amax = [abs(d[e * m : e * m + m]).max() for e in range(case.dims["E"])] if case.dtype == "mxfp8" else []
        return np.concatenate([x.ravel(), d.ravel(), np.asarray(amax)])
    h = by_row(inputs["beta_tensor"], off, len(acc))[:, None] * inputs["c_tensor"].astype(float)
    gates, ups = columns(x.shape[1])
    by_gate, by_up = slopes("swiglu", h[:, gates], h[:, ups])
    d = np.zeros(h.shape)
    d[:, gates], d[:, ups] = alpha * x * prob * by_gate, alpha * x * prob * by_up
    return np.concatenate([d.ravel(), (alpha * x * forward("swiglu", h[:, gates], h[:, ups])).sum(1)])


def test_the_library_declares_them() -> None:
    assert set(map(id, WORKLOADS)) <= set(map(id, ALL_WORKLOADS))


@pytest.mark.parametrize(("workload", "case"), SMALL, ids=_name)
def test_what_is_expected_is_the_formula(workload: Workload, case: Case) -> None:
    inputs = workload.inputs(case, NumpyPlace().source(3))
    got = workload.expected(case, inputs)
    np.testing.assert_allclose(got.values, _exact(workload, case, inputs), rtol=1e-6, atol=1e-7)
    assert got.allowed.shape == got.values.shape


@pytest.mark.parametrize(("workload", "case"), SMALL, ids=_name)
def test_what_is_allowed_leaves_room_for_rounding_and_for_little_else(workload: Workload, case: Case) -> None:
    problem = Problem(workload, case, NumpyPlace(), seed=4, via_host=True)
    expected = workload.expected(case, problem.host_inputs)
    result = workload.decode(case, problem.results())
    assert judge(result, expected).ok
    assert not judge(result * 1.1, expected).ok


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize(("workload", "case"), SMALL, ids=_name)
def test_the_plain_expression_computes_the_operation(workload: Workload, case: Case, place: Place) -> None:
    inputs = workload.inputs(case, NumpyPlace().source(5))
    made = workload.plain[place.framework](case, {name: place.put(array) for name, array in inputs.items()})
    expected = workload.expected(case, inputs)
    order = list(Problem(workload, case, NumpyPlace(), seed=5, via_host=True).results())
    assert set(made) == set(order)
    result = workload.decode(case, {name: place.get(made[name]) for name in order})
    difference = np.abs(result - expected.values)
    assert (difference <= 2.0**-6 * np.abs(expected.values) + 2.0**-5 * np.abs(expected.values).max()).all()


@pytest.mark.parametrize("place", PLACES[:2], ids=str)
@pytest.mark.parametrize(("workload", "case"), SMALL, ids=_name)
def test_the_class_form_is_made_and_executes(workload: Workload, case: Case, place: Place) -> None:
    Problem(workload, case, place).class_call()()


@pytest.mark.parametrize("workload", WORKLOADS, ids=_name)
def test_descriptions_are_what_the_arrays_are(workload: Workload) -> None:
    for case in workload.demo:
        arrays = workload.inputs(case, NumpyPlace().source(0))
        described = workload.operands(case)
        assert set(arrays) == set(described)
        for name, array in arrays.items():
            assert (array.shape, str(array.dtype)) == (described[name][0], described[name][1])
        bound = describe_case(workload, case, Device("cpu"))
        for name, stride in (workload.strides(case) if workload.strides else {}).items():
            assert bound.arrays[name].stride == stride


@pytest.mark.parametrize("workload", WORKLOADS, ids=_name)
def test_every_case_can_be_planned(workload: Workload) -> None:
    for case in (*workload.bench, *workload.presets["default"], workload.host):
        plan = plan_case(workload, case, HOPPER)
        assert plan.kernel is not None or plan.missing is not None
        assert workload.flops is not None
        assert workload.flops(case) > 0
        assert dataclasses.is_dataclass(case)
