"""What the library declares for the ``fe`` command about the Engram gate is right."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from fe_attention.workloads import WORKLOADS
from fe_attention.workloads.engram import ENGRAM_GATE, ENGRAM_GATE_BACKWARD
from fe_runtime.bench.accuracy import judge
from fe_runtime.bench.places import JaxPlace, NumpyPlace, Place, TorchPlace
from fe_runtime.bench.problem import Problem, plan_case
from fe_runtime.bench.workload import Case, Workload
from fe_runtime.plan import HOPPER

OURS = (ENGRAM_GATE, ENGRAM_GATE_BACKWARD)
SMALL = [
    (
        workload,
        dataclasses.replace(case, dims={**case.dims, "N": min(case.dims["N"], 20), "D": 64 + case.dims["D"] % 2}),
    )
    for workload in OURS
    for case in workload.demo
]
EVERY = [
    (workload, case)
    for workload in OURS
    for case in (*workload.demo, *workload.bench, workload.host, *sum(workload.presets.values(), ()))
]


def _name(value: Any) -> str:
    return value.name if isinstance(value, Workload) else f"{value.shape} {value.format}"


def test_the_library_declares_them() -> None:
    assert all(workload in WORKLOADS for workload in OURS)


@pytest.mark.parametrize(("workload", "case"), SMALL, ids=_name)
@pytest.mark.parametrize("place", [NumpyPlace(), TorchPlace("cpu"), JaxPlace("cpu")], ids=str)
def test_results_are_within_what_is_allowed_and_wrong_ones_are_not(
    place: Place, workload: Workload, case: Case
) -> None:
    problem = Problem(workload, case, place, seed=4, via_host=True)
    expected = workload.expected(case, problem.host_inputs)
    result = np.asarray(workload.decode(case, problem.results()), np.float64)
    found = judge(result, expected)
    assert found.ok, found
    assert not judge(result * 1.3, expected).ok


@pytest.mark.parametrize(("workload", "case"), EVERY, ids=_name)
def test_every_case_has_a_kernel(workload: Workload, case: Case) -> None:
    kernel = plan_case(workload, case, HOPPER).kernel
    assert kernel is not None
    assert dict(kernel.spec.config)["width"] == case.dims["D"]


@pytest.mark.parametrize(("workload", "case"), SMALL, ids=_name)
def test_inputs_are_what_the_operands_say(workload: Workload, case: Case) -> None:
    inputs = workload.inputs(case, NumpyPlace().source(0))
    assert {name: (a.shape, a.dtype.name) for name, a in inputs.items()} == workload.operands(case)


@pytest.mark.parametrize("case", [case for workload, case in SMALL if workload is ENGRAM_GATE], ids=_name)
@pytest.mark.parametrize("place", [NumpyPlace(), TorchPlace("cpu"), JaxPlace("cpu")], ids=str)
def test_the_plain_expression_computes_the_operation(place: Place, case: Case) -> None:
    inputs = ENGRAM_GATE.inputs(case, NumpyPlace().source(5))
    result = ENGRAM_GATE.plain[place.framework](case, {name: place.put(array) for name, array in inputs.items()})
    outputs = {str(number): place.get(array) for number, array in enumerate(result)}
    found = judge(ENGRAM_GATE.decode(case, outputs), ENGRAM_GATE.expected(case, inputs))
    assert found.error < 3 * found.bound


def test_expected_gradients_are_torchs() -> None:
    case = Case({"N": 5, "H": 4, "D": 16}, "bfloat16")
    inputs = dict(ENGRAM_GATE_BACKWARD.inputs(case, NumpyPlace().source(3)))
    wide = {n: torch.tensor(np.float64(inputs[n]), requires_grad=True) for n in ("x", "kv", "weight")}
    x, key, value = wide["x"], wide["kv"][:, :64].reshape(-1, 4, 16), wide["kv"][:, None, 64:]
    rx, rk = ((a.square().mean(-1) + 1e-20).rsqrt() for a in (x, key))
    dot = (x * wide["weight"] * key).sum(-1) * rx * rk / 4
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
    inputs["saved"] = torch.stack([gate, dot, rx, rk], -1).detach().numpy()
    (x + gate[..., None] * value).backward(torch.tensor(np.float64(inputs["grad_out"])))
    want = np.concatenate([leaf.grad.numpy().ravel() for leaf in wide.values()])  # type: ignore[union-attr]
    np.testing.assert_allclose(ENGRAM_GATE_BACKWARD.expected(case, inputs).values, want, rtol=1e-9, atol=1e-9)


def test_the_peer_runs_backward_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The expression as it is: compiling it takes long."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    case = Case({"N": 5, "H": 4, "D": 16}, "bfloat16")
    place = TorchPlace("cpu")
    arrays = ENGRAM_GATE_BACKWARD.inputs(case, place.source(3))
    call = ENGRAM_GATE_BACKWARD.peers[0].make(case)
    for first, second in zip(call(arrays), call(arrays), strict=True):
        assert torch.equal(first, second)
