"""What the library declares for the ``fe`` command about ``rms_norm`` and the gradients is right."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import numpy as np
import pytest
import torch

from fe_norm.workloads import WORKLOADS
from fe_norm.workloads_rms_norm import RMS_NORM, RMS_NORM_BACKWARD, RMSNORM_SILU_BACKWARD
from fe_runtime.bench.accuracy import judge
from fe_runtime.bench.places import JaxPlace, NumpyPlace, Place, TorchPlace
from fe_runtime.bench.problem import Problem, describe_case, minimum_bytes, plan_case
from fe_runtime.bench.workload import Case, Workload
from fe_runtime.device import Device
from fe_runtime.plan import HOPPER

OURS = (RMS_NORM, RMS_NORM_BACKWARD, RMSNORM_SILU_BACKWARD)
SMALL = [
    (workload, dataclasses.replace(case, dims={"M": 6, "N": min(case.dims["N"], 128)}))
    for workload in OURS
    for case in workload.demo
]
EVERY = [
    (workload, case)
    for workload in OURS
    for case in (
        *workload.demo,
        *workload.bench,
        workload.host,
        *(case for cases in workload.presets.values() for case in cases),
    )
]


def _name(value: Any) -> str:
    return value.name if isinstance(value, Workload) else f"{value.shape} {value.format}"


def test_the_library_declares_them() -> None:
    assert all(workload in WORKLOADS for workload in OURS)
    assert [workload.name for workload in OURS] == ["rms_norm", "rms_norm_backward", "rmsnorm_silu_backward"]


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


def slopes(workload: Workload, inputs: Any) -> list[Any]:
    """The gradients by torch's own operations in float64."""
    wide = {name: torch.tensor(np.float64(array), requires_grad=True) for name, array in inputs.items()}
    short = {name.removesuffix("_tensor"): tensor for name, tensor in wide.items()}
    x, weight = short["x"], short.get("weight", short.get("w"))
    out = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-5) + short.get("bias", 0.0)
    out = torch.nn.functional.silu(out) if workload is RMSNORM_SILU_BACKWARD else out
    loss = (out * short.get("dout", short.get("do"))).sum() + (x * short.get("dresidual_out", 0.0)).sum()
    leaves = [tensor for tensor in (x, weight, short.get("bias")) if tensor is not None]
    return [grad.numpy() for grad in torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize(("workload", "case"), [pair for pair in SMALL if pair[0] is not RMS_NORM], ids=_name)
def test_expected_gradients_are_torchs(workload: Workload, case: Case) -> None:
    inputs = workload.inputs(case, NumpyPlace().source(3))
    values = workload.expected(case, inputs).values
    want = np.concatenate([array.ravel() for array in slopes(workload, inputs)])
    np.testing.assert_allclose(values, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", [case for workload, case in SMALL if workload is RMS_NORM], ids=_name)
@pytest.mark.parametrize("place", [NumpyPlace(), TorchPlace("cpu"), JaxPlace("cpu")], ids=str)
def test_the_plain_expression_computes_the_operation(place: Place, case: Case) -> None:
    inputs = RMS_NORM.inputs(case, NumpyPlace().source(5))
    result = RMS_NORM.plain[place.framework](case, {name: place.put(array) for name, array in inputs.items()})
    out = place.get(result[0] if isinstance(result, tuple) else result)
    found = judge(RMS_NORM.decode(case, {"out": out}), RMS_NORM.expected(case, inputs))
    assert found.error < 3 * found.bound  # torch rounds between the steps


@pytest.mark.parametrize(("workload", "case"), EVERY, ids=_name)
def test_every_case_has_a_kernel(workload: Workload, case: Case) -> None:
    kernel = plan_case(workload, case, HOPPER).kernel
    assert kernel is not None
    assert dict(kernel.spec.config)["columns"] == case.dims["N"]


@pytest.mark.parametrize(("workload", "case"), SMALL, ids=_name)
def test_inputs_are_what_the_operands_say(workload: Workload, case: Case) -> None:
    inputs = workload.inputs(case, NumpyPlace().source(0))
    assert {name: (a.shape, a.dtype.name) for name, a in inputs.items()} == workload.operands(case)


@pytest.mark.parametrize(
    ("workload", "optional", "rows", "vectors"),
    [
        pytest.param(RMS_NORM, (), 2, 1, id="forward"),
        pytest.param(RMS_NORM, ("residual",), 4, 1, id="forward with residual"),
        pytest.param(RMS_NORM_BACKWARD, (), 3, 2, id="backward"),
        pytest.param(RMS_NORM_BACKWARD, ("dresidual_out",), 4, 2, id="backward with residual"),
    ],
)
def test_minimum_bytes(workload: Workload, optional: tuple[str, ...], rows: int, vectors: int) -> None:
    case = Case({"M": 100, "N": 64}, "bfloat16", {}, optional)
    found = minimum_bytes(describe_case(workload, case, Device("cpu")))
    assert found == 2 * (rows * 100 * 64 + vectors * 64) + 4 * 100


@pytest.mark.parametrize(("workload", "case"), [pair for pair in SMALL if pair[0] is not RMS_NORM], ids=_name)
def test_peers_run_backward_again_and_again(workload: Workload, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's own norm in the place of a library's."""

    class Quack:
        @staticmethod
        def rmsnorm(
            x: Any, w: Any, bias: Any = None, residual: Any = None, eps: float = 0.0, prenorm: bool = False
        ) -> Any:
            h = x if residual is None else x + residual
            out = torch.nn.functional.rms_norm(h, h.shape[-1:], w, eps)
            out = out if bias is None else out + bias
            return (out, h) if prenorm else out

    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name: Quack if name == "quack" else real(name))
    (peer,) = [peer for peer in workload.peers if peer.name == "quack-kernels"]
    place = TorchPlace("cpu")
    host = workload.inputs(case, NumpyPlace().source(7))
    arrays = {name: place.put(array) for name, array in host.items()}
    call = peer.make(case)
    first, second = call(arrays), call(arrays)
    want = slopes(workload, host)
    for got, again, exact in zip(first, second, want, strict=False):
        assert torch.equal(got, again)
        np.testing.assert_allclose(got.double().numpy(), exact, rtol=0.02, atol=0.05 * np.abs(exact).max())
