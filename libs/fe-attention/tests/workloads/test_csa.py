"""What the library declares for the ``fe`` command about the CSA compressor is right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fe_attention.workloads import WORKLOADS
from fe_attention.workloads.csa import CSA_COMPRESSOR, CSA_COMPRESSOR_BACKWARD, lengths_of
from fe_runtime.bench.accuracy import judge
from fe_runtime.bench.places import JaxPlace, NumpyPlace, Place, TorchPlace
from fe_runtime.bench.problem import Problem, plan_case
from fe_runtime.bench.workload import Case, Workload
from fe_runtime.plan import HOPPER

OURS = (CSA_COMPRESSOR, CSA_COMPRESSOR_BACKWARD)
SMALL = [(workload, case) for workload in OURS for case in workload.demo]
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
    assert dict(kernel.spec.config)["head_dim"] == case.dims["D"]


@pytest.mark.parametrize(("workload", "case"), SMALL, ids=_name)
def test_inputs_are_what_the_operands_say(workload: Workload, case: Case) -> None:
    inputs = workload.inputs(case, NumpyPlace().source(0))
    assert {name: (a.shape, a.dtype.name) for name, a in inputs.items()} == workload.operands(case)


@pytest.mark.parametrize("case", [case for workload, case in SMALL if workload is CSA_COMPRESSOR], ids=_name)
@pytest.mark.parametrize("place", [NumpyPlace(), TorchPlace("cpu"), JaxPlace("cpu")], ids=str)
def test_the_plain_expression_computes_the_operation(place: Place, case: Case) -> None:
    inputs = CSA_COMPRESSOR.inputs(case, NumpyPlace().source(5))
    result = CSA_COMPRESSOR.plain[place.framework](case, {name: place.put(array) for name, array in inputs.items()})
    outputs = {str(number): place.get(array) for number, array in enumerate(result)}
    found = judge(CSA_COMPRESSOR.decode(case, outputs), CSA_COMPRESSOR.expected(case, inputs))
    assert found.error < 3 * found.bound


@pytest.mark.parametrize("case", CSA_COMPRESSOR_BACKWARD.demo, ids=_name)
def test_expected_gradients_are_torchs(case: Case) -> None:
    inputs = dict(CSA_COMPRESSOR_BACKWARD.inputs(case, NumpyPlace().source(3)))
    arrays = {name: torch.tensor(np.float64(array)) for name, array in inputs.items()}
    leaves = {name: arrays[name].float().requires_grad_() for name in ("kv", "score", "ape")}
    cu = {name: arrays[name].int() for name in ("cu_seqlens", "cu_seqlens_comp")}
    out = CSA_COMPRESSOR.plain["torch"](case, {**leaves, **cu})
    out.backward(arrays["grad_out"].float())
    want = np.concatenate([leaf.grad.numpy().ravel() for leaf in leaves.values()])  # type: ignore[union-attr]
    values = CSA_COMPRESSOR_BACKWARD.expected(case, inputs).values
    np.testing.assert_allclose(values, want, rtol=1e-4, atol=1e-4)


def test_lengths_fill_the_tokens() -> None:
    for _, case in EVERY:
        lengths = lengths_of(case)
        assert (len(lengths), sum(lengths)) == (case.dims["B"], case.dims["T"])


def test_the_peer_runs_backward_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The expression as it is: compiling it takes long."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    case = CSA_COMPRESSOR_BACKWARD.demo[1]
    arrays = CSA_COMPRESSOR_BACKWARD.inputs(case, TorchPlace("cpu").source(3))
    call = CSA_COMPRESSOR_BACKWARD.peers[0].make(case)
    for first, second in zip(call(arrays), call(arrays), strict=True):
        assert torch.equal(first, second)
