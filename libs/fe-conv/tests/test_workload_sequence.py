"""What the ``fe`` command runs of ``causal_conv1d`` is right, by naive loops."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import subprocess
import sys
from typing import Any

import conv_oracle as oracle
import numpy as np
import pytest

from fe_conv.workload_sequence import BACKWARD_PEERS, CAUSAL_CONV1D, CAUSAL_CONV1D_BACKWARD, PEERS
from fe_conv.workloads import WORKLOADS
from fe_runtime.api_base import APIBase
from fe_runtime.bench.accuracy import judge
from fe_runtime.bench.discover import find_workloads
from fe_runtime.bench.places import JaxPlace, NumpyPlace, Place, TorchPlace
from fe_runtime.bench.problem import Problem, describe_case, minimum_bytes, plan_case
from fe_runtime.bench.workload import Arrays, Case
from fe_runtime.device import Device
from fe_runtime.plan import HOPPER
from fe_runtime.testing import to_numpy

BOTH = (CAUSAL_CONV1D, CAUSAL_CONV1D_BACKWARD)
PLACES = (NumpyPlace(), TorchPlace("cpu"), JaxPlace("cpu"))


def _small(case: Case) -> Case:
    return dataclasses.replace(case, dims={**case.dims, "T": 19 if case.dims["B"] == 1 else 9, "D": 16})


def _every(workload: Any) -> list[Case]:
    cases = [*workload.demo, *workload.bench, workload.host, *itertools.chain(*workload.presets.values())]
    return list({(case.shape, case.format): case for case in cases}.values())


SMALL = [pytest.param(w, _small(c), id=f"{w.name} {c.format}") for w in BOTH for c in w.demo]
EVERY = [pytest.param(w, c, id=f"{w.name} {c.shape} {c.format}") for w in BOTH for c in _every(w)]
PLAIN = [
    pytest.param(w, _small(c), place, id=f"{w.name} {c.format} {place}")
    for w in BOTH
    for c in w.demo
    for place in PLACES
    if place.framework in w.plain
]


def known(case: Case, inputs: Arrays) -> dict[str, Any]:
    """Return the operands by the oracle's names."""
    given = {"x": inputs["x"].swapaxes(1, 2), "weight": inputs["weight"], "bias": inputs.get("bias")}
    given |= {"states": inputs.get("initial_states"), "activation": case.options.get("activation", "identity")}
    return given | ({"offsets": inputs["cu_seqlens"]} if "cu_seqlens" in inputs else {})


def test_the_library_declares_its_operations() -> None:
    assert {"causal_conv1d", "causal_conv1d_backward"} <= {workload.name for workload in WORKLOADS}
    for workload in BOTH:
        assert workload in WORKLOADS
        assert workload.library == "fe_conv"
        assert workload.load_operation().qualified_name.startswith("fe_conv.causal_conv1d_channel_last")
    assert CAUSAL_CONV1D.load_wrapper().__doc__ == importlib.import_module("fe_conv").causal_conv1d.__doc__


def test_the_fe_command_finds_them() -> None:
    found = find_workloads()
    assert "fe_conv" not in found.broken
    assert found.named("causal_conv1d").operation == CAUSAL_CONV1D.operation
    assert len(found.of_library("fe-conv")) == len(WORKLOADS)


def test_declaring_them_loads_no_framework() -> None:
    code = "import sys, fe_conv.workloads; print([n for n in ('torch', 'jax', 'cutlass', 'fla') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(("workload", "case"), SMALL)
def test_expected_is_the_naive_loop(workload: Any, case: Case) -> None:
    inputs = workload.inputs(case, NumpyPlace().source(3))
    values = workload.expected(case, inputs).values
    if workload is CAUSAL_CONV1D:
        y, _ = oracle.forward(**known(case, inputs))
        want = y.swapaxes(1, 2)
    else:
        found = oracle.backward(inputs["dy"].swapaxes(1, 2), None, **known(case, inputs))
        parts = [found["x"].swapaxes(1, 2), found["weight"], *([found["bias"]] if "bias" in inputs else [])]
        want = np.concatenate([part.ravel() for part in parts])
    np.testing.assert_allclose(values, want, rtol=1e-11, atol=1e-11 * np.abs(want).max())


@pytest.mark.parametrize(("workload", "case"), SMALL)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_what_is_allowed_leaves_room_for_rounding_and_for_little_else(workload: Any, case: Case, place: Place) -> None:
    problem = Problem(workload, case, place, seed=4, via_host=True)
    expected = workload.expected(case, problem.host_inputs)
    result = workload.decode(case, problem.results())
    found = judge(result, expected)
    assert found.ok
    assert found.error > found.bound / 100
    assert not judge(result * 1.3, expected).ok
    moved = np.roll(result.ravel(), 16).reshape(result.shape)  # one token late
    assert not judge(moved, expected).ok


@pytest.mark.parametrize(("workload", "case", "place"), PLAIN)
def test_the_plain_expression_computes_the_operation(workload: Any, case: Case, place: Place) -> None:
    inputs = workload.inputs(case, NumpyPlace().source(5))
    result = workload.plain[place.framework](case, {name: place.put(array) for name, array in inputs.items()})
    outputs = result if isinstance(result, dict) else {"y": place.get(result)}
    found = judge(workload.decode(case, outputs), workload.expected(case, inputs))
    # torch rounds to the dtype of x before the activation too, so its output is off by up to three roundings
    assert found.error < 3 * found.bound


@pytest.mark.parametrize(("workload", "case"), EVERY)
def test_every_case_meets_the_contract_and_has_a_kernel(workload: Any, case: Case) -> None:
    bound = describe_case(workload, case, Device("cuda", 0))
    assert tuple(bound.arrays["x"].shape) == tuple(case.dims[letter] for letter in "BTD")
    assert plan_case(workload, case, HOPPER).kernel is not None


def test_inputs_are_what_the_operands_say() -> None:
    for workload in BOTH:
        for case in map(_small, workload.demo):
            inputs = workload.inputs(case, NumpyPlace().source(0))
            assert {name: (a.shape, a.dtype.name) for name, a in inputs.items()} == workload.operands(case)


def test_packed_cases_have_uneven_and_empty_members() -> None:
    (case,) = [case for case in CAUSAL_CONV1D.demo if "cu_seqlens" in case.optional]
    lengths = np.diff(CAUSAL_CONV1D.inputs(case, NumpyPlace().source(0))["cu_seqlens"])
    assert (lengths >= 0).all()
    assert lengths.sum() == case.dims["T"]
    assert 0 in lengths
    assert len(set(lengths)) > 3


def test_minimum_bytes_are_two_and_three_arrays() -> None:
    case = Case({"B": 2, "T": 100, "D": 64, "W": 4}, "bfloat16", {"activation": "silu"})
    one, weight = 2 * 100 * 64 * 2, 64 * 4 * 2
    assert minimum_bytes(describe_case(CAUSAL_CONV1D, case, Device("cpu"))) == 2 * one + weight
    assert minimum_bytes(describe_case(CAUSAL_CONV1D_BACKWARD, case, Device("cpu"))) == 3 * one + 2 * weight


def test_the_shape_of_the_targets_is_measured() -> None:
    for workload in BOTH:
        first = workload.bench[0]
        assert (first.shape, first.format) == ("8x8192x4096x4", "bf16, activation=silu")


@pytest.mark.parametrize("workload", BOTH, ids=lambda workload: workload.name)
def test_the_class_form_computes_what_the_wrapper_does(workload: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = _small(workload.demo[1])
    problem = Problem(workload, case, TorchPlace("cpu"), seed=6)
    made: list[Any] = []
    monkeypatch.setattr(APIBase, "_execute", _keeping(APIBase._execute, made))
    problem.class_call()()
    for output, want in zip(made[0], problem.ours().values(), strict=False):
        if want is not None:
            np.testing.assert_array_equal(to_numpy(output), to_numpy(want))


def _keeping(execute: Any, made: list[Any]) -> Any:
    def kept(self: Any, arrays: Any, outputs: Any, stream: object = None) -> None:
        made.append(outputs)
        execute(self, arrays, outputs, stream)

    return kept


# --- peers -----------------------------------------------------------------------------------------------------------


def test_peers_call_their_public_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        def __init__(self, **names: Any) -> None:
            self.__dict__.update(names)

    class X:
        def transpose(self, *_dims: int) -> Any:
            return ("turned", self)

    class Turned(tuple):  # what a peer with the channels first returns
        __slots__ = ()

        def transpose(self, *_dims: int) -> Any:
            return ("back", *self)

    fla = Module(causal_conv1d=lambda x, w, b, activation: (("fla", x, w, b, activation), None))
    dao = Module(causal_conv1d_fn=lambda x, w, b, activation: Turned(("dao", x, w, b, activation)))
    frontend = Module(ops=Module(causal_conv1d=lambda x, w, b, activation: Turned(("frontend", x, w, b, activation))))
    fakes = {"fla.modules.convolution": fla, "causal_conv1d": dao, "cudnn": frontend}
    monkeypatch.setattr(importlib, "import_module", fakes.__getitem__)
    x = X()
    arrays: Arrays = {"x": x, "weight": "w", "bias": "b"}
    called = [peer.make(CAUSAL_CONV1D.bench[0])(arrays) for peer in PEERS[1:]]
    turned = ("turned", x)
    assert called == [
        ("fla", x, "w", "b", "silu"),
        ("back", "dao", turned, "w", "b", "silu"),
        ("back", "frontend", turned, "w", "b", "silu"),
    ]
    assert all(peer.same_work for peer in (*PEERS, *BACKWARD_PEERS))


def test_peers_say_that_they_are_timed_on_plain_rows_only() -> None:
    (packed,) = [case for case in CAUSAL_CONV1D.demo if "cu_seqlens" in case.optional]
    for peer in PEERS:
        with pytest.raises(NotImplementedError, match="plain rows only"):
            peer.make(packed)


def test_gradient_only_peers_give_the_gradients() -> None:
    case, place = _small(CAUSAL_CONV1D_BACKWARD.demo[0]), TorchPlace("cpu")
    inputs = CAUSAL_CONV1D_BACKWARD.inputs(case, NumpyPlace().source(7))
    arrays = {name: place.put(array) for name, array in inputs.items()}
    expected = CAUSAL_CONV1D_BACKWARD.expected(case, inputs)
    run = BACKWARD_PEERS[0].make(case)
    for _ in range(2):  # the graph is kept
        names = ("dx", "dweight", "dbias")
        outputs = {name: place.get(array) for name, array in zip(names, run(arrays), strict=True)}
        assert (
            judge(CAUSAL_CONV1D_BACKWARD.decode(case, outputs), expected).error
            < 4 * judge(expected.values, expected).bound
        )


@pytest.mark.parametrize("number", [0, 1], ids=["forward", "gradient"])
def test_torch_compile_agrees(number: int) -> None:
    workload, peer = BOTH[number], (PEERS[0], BACKWARD_PEERS[1])[number]
    case, place = _small(workload.demo[1 - number]), TorchPlace("cpu")
    inputs = workload.inputs(case, NumpyPlace().source(8))
    try:
        run = peer.make(case)
        result = run({name: place.put(array) for name, array in inputs.items()})
    except Exception as error:
        if "compiler" not in str(error).lower():
            raise
        pytest.skip(f"torch.compile has no C++ compiler here: {error}")
    names = ("dx", "dweight", "dbias") if number else ("y",)
    arrays = result if isinstance(result, tuple) else (result,)
    outputs = {name: place.get(array) for name, array in zip(names, arrays, strict=True)}
    found = judge(workload.decode(case, outputs), workload.expected(case, inputs))
    assert found.error < 4 * found.bound
