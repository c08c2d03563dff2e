"""The demonstration and the benchmark of this library on a GPU: right results, by kernels, with sensible times."""

from __future__ import annotations

import pytest

from fe_rope.workloads import WORKLOADS
from fe_runtime.bench.demo import run_case
from fe_runtime.bench.places import JaxPlace, Place, TorchPlace
from fe_runtime.bench.run import OURS, Settings, run_benchmark
from fe_runtime.bench.workload import Case, Workload

pytestmark = pytest.mark.gpu

CASES = [
    pytest.param(framework, workload, case, id=f"{workload.name} {case.shape} {case.format} {framework}")
    for workload in WORKLOADS
    for case in workload.demo
    for framework in ("torch", "jax")
]


@pytest.mark.parametrize(("framework", "workload", "case"), CASES)
def test_the_demo_is_right_and_runs_kernels(framework: str, workload: Workload, case: Case) -> None:
    place: Place = TorchPlace("cuda:0") if framework == "torch" else JaxPlace("cuda:0")
    row = run_case(workload, case, place)
    assert row.ok, row.note
    assert row.backend.endswith("kernel")


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_the_benchmark_measures_kernels_and_peers(workload: Workload) -> None:
    settings = Settings(peers=True, repetitions=20, host_calls=500)
    record = run_benchmark(workload, [workload.bench[-2]], TorchPlace("cuda:0"), settings)
    (result,) = record["results"]
    assert result["kernel"] is not None
    names = {entry["name"] for entry in result["entries"]} | set(result["unavailable"])
    assert names == {OURS, "plain", *(peer.label for peer in workload.peers)}
    assert record["host"]["execute"]["median_us"] < 1000
