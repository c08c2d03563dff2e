"""The demonstration and the benchmark of ``causal_conv1d`` on a GPU: right results, by kernels, with sensible times."""

from __future__ import annotations

from typing import Any

import pytest

from fe_conv.workload_sequence import CAUSAL_CONV1D, CAUSAL_CONV1D_BACKWARD
from fe_runtime.bench.demo import run_case
from fe_runtime.bench.places import JaxPlace, Place, TorchPlace
from fe_runtime.bench.run import OURS, Settings, run_benchmark
from fe_runtime.bench.workload import Case

pytestmark = pytest.mark.gpu

BOTH = (CAUSAL_CONV1D, CAUSAL_CONV1D_BACKWARD)


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize(
    ("workload", "case"), [pytest.param(w, c, id=f"{w.name} {c.format}") for w in BOTH for c in w.demo]
)
def test_the_demo_is_right_and_runs_kernels(workload: Any, case: Case, framework: str) -> None:
    place: Place = TorchPlace("cuda:0") if framework == "torch" else JaxPlace("cuda:0")
    row = run_case(workload, case, place)
    assert row.ok, row.note
    assert row.backend.endswith("kernel")


@pytest.mark.parametrize("workload", BOTH, ids=lambda workload: workload.name)
def test_the_benchmark_measures_kernels_and_peers(workload: Any) -> None:
    case = Case({"B": 2, "T": 4096, "D": 2048, "W": 4}, "bfloat16", {"activation": "silu"})
    settings = Settings(peers=True, repetitions=20, host_calls=500)
    record = run_benchmark(workload, [case], TorchPlace("cuda:0"), settings)
    (result,) = record["results"]
    assert result["kernel"]["width"] == 4
    assert result["difference_from_reference"] < 2**-8
    names = {entry["name"] for entry in result["entries"]} | set(result["unavailable"])
    assert {OURS, *(peer.label for peer in workload.peers)} <= names
    assert 0.2 < result["entries"][0]["share_of_limit"] < 1.5
    assert record["host"]["execute"]["median_us"] < 1000
    assert record["host"]["wrapper"]["median_us"] < 1000
