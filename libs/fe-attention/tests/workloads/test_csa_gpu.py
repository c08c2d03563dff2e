"""The demonstration and the benchmark of the CSA compressor on a GPU: right results, by kernels."""

from __future__ import annotations

from typing import Any

import pytest

from fe_attention.workloads.csa import CSA_COMPRESSOR, CSA_COMPRESSOR_BACKWARD
from fe_runtime.bench.demo import run_case
from fe_runtime.bench.places import JaxPlace, Place, TorchPlace
from fe_runtime.bench.run import Settings, run_benchmark
from fe_runtime.bench.workload import Case, Workload

pytestmark = pytest.mark.gpu

OURS = (CSA_COMPRESSOR, CSA_COMPRESSOR_BACKWARD)
DEMO = [(workload, case) for workload in OURS for case in workload.demo]


def _name(value: Any) -> str:
    return value.name if isinstance(value, Workload) else f"{value.shape} {value.format}"


@pytest.mark.parametrize(("workload", "case"), DEMO, ids=_name)
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_demo_is_right_and_runs_kernels(framework: str, workload: Workload, case: Case) -> None:
    place: Place = TorchPlace("cuda:0") if framework == "torch" else JaxPlace("cuda:0")
    row = run_case(workload, case, place)
    assert row.ok, row
    assert row.backend.endswith("kernel")


@pytest.mark.parametrize("workload", OURS, ids=_name)
def test_the_benchmark_measures_kernels_and_peers(workload: Workload) -> None:
    case = workload.bench[0]
    settings = Settings(peers=True, repetitions=20, host_calls=500)
    record = run_benchmark(workload, [case], TorchPlace("cuda:0"), settings)
    (result,) = record["results"]
    assert result["kernel"]["head_dim"] == 512
    assert result["difference_from_reference"] < 2**-7
    names = {entry["name"] for entry in result["entries"]} | set(result["unavailable"])
    assert {peer.label for peer in workload.peers} <= names
    assert 0.2 < result["entries"][0]["share_of_limit"] < 1.5
