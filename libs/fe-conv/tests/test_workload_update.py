"""What the ``fe`` command runs of ``causal_conv1d_update`` is right, by naive loops."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from fe_conv.workload_update import CAUSAL_CONV1D_UPDATE, PEERS
from fe_runtime.bench.accuracy import judge
from fe_runtime.bench.places import JaxPlace, NumpyPlace, Place, TorchPlace
from fe_runtime.bench.problem import Problem, plan_case
from fe_runtime.bench.workload import Arrays, Case
from fe_runtime.plan import HOPPER

WORKLOAD = CAUSAL_CONV1D_UPDATE
EVERY = [
    *WORKLOAD.demo,
    *WORKLOAD.bench,
    WORKLOAD.host,
    *itertools.chain(*WORKLOAD.presets.values()),
]
SMALL = [dataclasses.replace(case, dims={**case.dims, "N": 5, "D": 16}) for case in WORKLOAD.demo]


def _name(case: Case) -> str:
    return f"{case.shape} {case.format}"


def naive(case: Case, inputs: Arrays) -> Any:
    """One Python float at a time."""
    values = {name: np.asarray(array).astype(float).tolist() for name, array in inputs.items()}
    rows, channels, length, width = case.dims.values()
    out = np.zeros((rows, channels))
    for n, d in itertools.product(range(rows), range(channels)):
        line = values["conv_state"][int(values.get("conv_state_indices", range(rows))[n])][d]
        at = int(values["cache_seqlens"][n]) % length if "cache_seqlens" in values else 0
        history = [*line[at:], *line[:at], values["x"][n][d]][-width:]
        z = math.fsum(w * h for w, h in zip(values["weight"][d], history, strict=True))
        z += values["bias"][d] if "bias" in values else 0.0
        out[n, d] = z / (1 + math.exp(-z)) if case.options else z
    return out


def test_it_is_named_after_its_operation() -> None:
    assert (WORKLOAD.library, WORKLOAD.name) == ("fe_conv", "causal_conv1d_update")
    assert WORKLOAD.load_operation().name == WORKLOAD.name
    assert WORKLOAD.load_wrapper().__name__ == WORKLOAD.name


def test_declaring_it_loads_no_framework() -> None:
    code = "import sys, fe_conv.workload_update; print([n for n in ('torch', 'jax', 'cutlass') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("case", SMALL, ids=_name)
def test_expected_is_the_formula(case: Case) -> None:
    inputs = WORKLOAD.inputs(case, NumpyPlace().source(3))
    np.testing.assert_allclose(WORKLOAD.expected(case, inputs).values, naive(case, inputs), rtol=1e-12, atol=1e-14)
    operands = WORKLOAD.operands(case)
    assert {name: (a.shape, a.dtype.name) for name, a in inputs.items()} == dict(operands)


@pytest.mark.parametrize("place", [NumpyPlace(), TorchPlace("cpu"), JaxPlace("cpu")], ids=str)
@pytest.mark.parametrize("case", SMALL, ids=_name)
def test_results_are_within_what_is_allowed(case: Case, place: Place) -> None:
    problem = Problem(WORKLOAD, case, place, seed=4, via_host=True)
    expected = WORKLOAD.expected(case, problem.host_inputs)
    result = WORKLOAD.decode(case, problem.results())
    found = judge(result, expected)
    assert found.ok
    assert found.error > found.bound / 1000
    assert not judge(result * 1.3, expected).ok
    plain = WORKLOAD.plain[place.framework](case, {n: place.put(a.copy()) for n, a in problem.host_inputs.items()})
    assert judge(place.get(plain), expected).error < 3 * found.bound


@pytest.mark.parametrize("place", [NumpyPlace(), TorchPlace("cpu")], ids=str)
@pytest.mark.parametrize("case", SMALL, ids=_name)
def test_the_plain_expression_moves_the_state_too(case: Case, place: Place) -> None:
    inputs = WORKLOAD.inputs(case, NumpyPlace().source(5))
    ours, plain = ({name: place.put(array.copy()) for name, array in inputs.items()} for _ in range(2))
    update = importlib.import_module("fe_conv").causal_conv1d_update
    update(**ours, **case.options)
    WORKLOAD.plain[place.framework](case, plain)
    np.testing.assert_array_equal(place.get(ours["conv_state"]), place.get(plain["conv_state"]))


@pytest.mark.parametrize("place", [NumpyPlace(), TorchPlace("cpu")], ids=str)
def test_the_class_form(place: Place) -> None:
    Problem(WORKLOAD, SMALL[1], place).class_call()()


@pytest.mark.parametrize("case", EVERY, ids=_name)
def test_every_case_has_a_kernel(case: Case) -> None:
    kernel = plan_case(WORKLOAD, case, HOPPER).kernel
    assert kernel is not None
    layout = dict(kernel.spec.config)["layout"]
    assert layout == ("any" if "cache_seqlens" in case.optional else "row")


def test_the_shape_of_the_target_is_measured() -> None:
    assert WORKLOAD.bench[0].dims == {"N": 512, "D": 8192, "L": 4, "W": 4}


def test_peers_call_their_public_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Fake:
        class compiler:  # noqa: N801
            reset = staticmethod(lambda: None)

        @staticmethod
        def compile(function: Any, dynamic: bool) -> Any:
            return lambda arrays: ("compiled", dynamic)

        @staticmethod
        def causal_conv1d_update(*arguments: Any, **keywords: Any) -> Any:
            calls.append((arguments, keywords))
            return ("result", None)

    Fake.ops = Fake  # type: ignore[attr-defined]
    monkeypatch.setattr(importlib, "import_module", lambda name: Fake)
    arrays = {"x": "x", "conv_state": "s", "weight": "w", "bias": "b"}
    for peer in PEERS:
        assert peer.make(WORKLOAD.bench[0])(arrays) is not None
    assert calls == [
        (("x", "s", None, "w", "b", "silu"), {}),
        (("x", "s", "w", "b", "silu"), {}),
        (("x", "s", "w", "b", "silu"), {}),
    ]
    with pytest.raises(NotImplementedError):
        PEERS[1].make(WORKLOAD.demo[1])
