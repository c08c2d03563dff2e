"""What this library declares for the ``fe`` command about the dense products is right, by formulas written here."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from naive_gemm import E2M1, E4M3, VALUES, unblocked, unpack

from fe_gemm.workloads import WORKLOADS as ALL_WORKLOADS
from fe_gemm.workloads.dense import GEMM_AMAX, GEMM_DSRELU, GEMM_SRELU, GEMM_SWIGLU
from fe_runtime.bench.accuracy import judge
from fe_runtime.bench.places import JaxPlace, NumpyPlace, Place, TorchPlace
from fe_runtime.bench.problem import Problem, describe_case, plan_case
from fe_runtime.bench.workload import Case, Workload
from fe_runtime.device import Device
from fe_runtime.plan import HOPPER, NoKernel

WORKLOADS = (GEMM_AMAX, GEMM_SWIGLU, GEMM_SRELU, GEMM_DSRELU)
PLACES = [NumpyPlace(), TorchPlace("cpu"), JaxPlace("cpu")]


def _every_case(workload: Workload) -> list[Case]:
    presets = [case for cases in workload.presets.values() for case in cases]
    return list(
        {f"{c.shape} {c.format}": c for c in [*workload.demo, *workload.bench, workload.host, *presets]}.values()
    )


def _small(case: Case) -> Case:
    limits = {"M": 33, "N": 64, "K": 64}
    return dataclasses.replace(case, dims={name: min(extent, limits[name]) for name, extent in case.dims.items()})


EVERY_CASE = [(workload, case) for workload in WORKLOADS for case in _every_case(workload)]
SMALL = [(workload, _small(case)) for workload in WORKLOADS for case in workload.demo]


def _name(value: object) -> str | None:
    return f"{value.shape} {value.format}" if isinstance(value, Case) else getattr(value, "name", None)


def _operand(case: Case, inputs: Any, side: str) -> Any:
    """Return an operand (rows, K) in float64, by the decoders of the tests."""
    elements = inputs[f"{side}_tensor"]
    if case.dtype == "bfloat16":
        return elements[..., 0].astype(np.float64)
    if case.dtype == E4M3:
        return VALUES[E4M3][elements[..., 0].view(np.uint8)]
    values = VALUES[E2M1][unpack(elements, 1)] if case.dtype != "mxfp8" else VALUES[E4M3][elements.view(np.uint8)]
    vec = 16 if case.dtype == "nvfp4" else 32
    scales = inputs[f"sf{side}_tensor"]
    name = E4M3 if case.dtype == "nvfp4" else "float8_e8m0fnu"
    codes, _ = unblocked(scales, values.shape[0], values.shape[1] // vec)
    return values[..., 0] * np.repeat(VALUES[name][codes[..., 0]], vec, axis=1)


def _exact(workload: Workload, case: Case, inputs: Any) -> list[float]:
    """Return the results, one Python float after the other."""
    x = _operand(case, inputs, "a") @ _operand(case, inputs, "b").T
    rows = [[float(v) for v in row] for row in x]
    if workload is GEMM_AMAX:
        return [v for row in rows for v in row] + [max(abs(v) for row in rows for v in row)]
    if workload is GEMM_SWIGLU:
        blocks = [n for n in range(len(rows[0])) if n % 64 < 32]
        c = [row[n] * row[n + 32] / (1 + math.exp(-row[n + 32])) for row in rows for n in blocks]
        return [v for row in rows for v in row] + c + ([max(map(abs, c))] if case.dtype == "nvfp4" else [])
    prob = [float(p) for p in inputs["prob_tensor"].ravel()]
    if workload is GEMM_SRELU:
        d = [max(v, 0.0) ** 2 * p for row, p in zip(rows, prob, strict=True) for v in row]
        return [v for row in rows for v in row] + d + ([max(d)] if case.dtype == "nvfp4" else [])
    upstream = inputs["c_tensor"][..., 0].astype(float).tolist()
    pairs = list(zip(rows, upstream, strict=True))
    d = [2 * max(v, 0.0) * u * p for (row, c), p in zip(pairs, prob, strict=True) for v, u in zip(row, c, strict=True)]
    dprob = [math.fsum(max(v, 0.0) ** 2 * u for v, u in zip(row, c, strict=True)) for row, c in pairs]
    return d + dprob + ([max(map(abs, d))] if case.dtype == "nvfp4" else [])


def test_the_library_declares_them() -> None:
    assert set(map(id, WORKLOADS)) <= set(map(id, ALL_WORKLOADS))


def test_declaring_them_loads_no_framework() -> None:
    code = "import sys, fe_gemm.workloads; "
    code += "print([n for n in ('torch', 'jax', 'cutlass', 'quack') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(("workload", "case"), SMALL, ids=_name)
def test_what_is_expected_is_the_formula(workload: Workload, case: Case) -> None:
    inputs = workload.inputs(case, NumpyPlace().source(3))
    want = _exact(workload, case, inputs)
    got = workload.expected(case, inputs)
    np.testing.assert_allclose(got.values, want, rtol=1e-9, atol=1e-9)
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
    ours = Problem(workload, case, NumpyPlace(), seed=5, via_host=True).results()
    assert set(made) == set(ours)
    for name, result in made.items():
        got, want = (np.asarray(x).astype(np.float64) for x in (place.get(result), ours[name]))
        assert got.shape == want.shape
        assert np.linalg.norm(got - want) <= 2.0**-6 * np.linalg.norm(want), name


@pytest.mark.parametrize(("workload", "case"), EVERY_CASE, ids=_name)
def test_every_case_meets_the_contract(workload: Workload, case: Case) -> None:
    describe_case(workload, case, Device("cuda", 0))
    plan = plan_case(workload, case, HOPPER)
    assert plan.kernel is not None or isinstance(plan.missing, NoKernel)


@pytest.mark.parametrize("place", PLACES[:2], ids=str)
@pytest.mark.parametrize(("workload", "case"), SMALL, ids=_name)
def test_the_class_takes_the_arrays_of_a_case(workload: Workload, case: Case, place: Place) -> None:
    Problem(workload, case, place, seed=1).class_call()()


def test_work_is_counted_in_operations() -> None:
    for workload in WORKLOADS:
        assert workload.flops is not None
        assert workload.flops(Case({"M": 2, "N": 3, "K": 5}, "mxfp8")) == 60


@pytest.mark.parametrize("workload", WORKLOADS, ids=_name)
def test_the_shapes_of_the_targets_are_measured(workload: Workload) -> None:
    shapes = {case.shape for case in workload.bench}
    assert {"8192x8192x8192", "4096x28672x8192", "8192x4096x4096", "16x28672x8192", "128x8192x8192"} <= shapes


def test_peers_that_cannot_run_say_so() -> None:
    peers = {peer.does: peer for peer in GEMM_SWIGLU.peers}
    with pytest.raises(NotImplementedError, match="fp8"):
        peers["fp8 product, then the compiled activation"].make(GEMM_SWIGLU.host)
    with pytest.raises(NotImplementedError, match="format"):
        peers["product and SwiGLU of neighbouring columns"].make(Case({"M": 8, "N": 64, "K": 32}, "mxfp8"))


def test_the_peer_without_an_epilogue_multiplies() -> None:
    case, place = _small(GEMM_SRELU.demo[0]), TorchPlace("cpu")
    peer = next(peer for peer in GEMM_SRELU.peers if not peer.same_work)
    call = peer.make(case)
    for seed in (1, 2, 1):
        inputs = GEMM_SRELU.inputs(case, NumpyPlace().source(seed))
        arrays = {name: place.put(array) for name, array in inputs.items()}
        want = _operand(case, inputs, "a") @ _operand(case, inputs, "b").T
        got = place.get(call(arrays)).astype(np.float64)
        assert np.linalg.norm(got - want) <= 2.0**-7 * np.linalg.norm(want)
