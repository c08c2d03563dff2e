"""The demonstration and the benchmark of LMSD on a GPU: right results, by kernels."""

from __future__ import annotations

import pytest

from fe_attention.workloads.lmsd import HSTU_LMSD_BACKWARD, HSTU_LMSD_FORWARD
from fe_runtime.bench.demo import run_case
from fe_runtime.bench.places import JaxPlace, Place, TorchPlace
from fe_runtime.bench.run import Settings, run_benchmark
from fe_runtime.bench.workload import Case, Workload

pytestmark = pytest.mark.gpu

OURS = (HSTU_LMSD_FORWARD, HSTU_LMSD_BACKWARD)
DEMO = [(workload, case) for workload in OURS for case in workload.demo]


def _name(value: object) -> str:
    return value.name if isinstance(value, Workload) else f"{value.shape} {value.format}"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("workload", "case"), DEMO, ids=_name)
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_demo_is_right_and_runs_kernels(framework: str, workload: Workload, case: Case) -> None:
    place: Place = TorchPlace("cuda:0") if framework == "torch" else JaxPlace("cuda:0")
    row = run_case(workload, case, place)
    assert row.ok, row
    assert row.backend.endswith("kernel")


@pytest.mark.parametrize("workload", OURS, ids=_name)
def test_the_benchmark_measures_kernels_and_peers(workload: Workload) -> None:
    case = Case({"N": 8192, "D": 512}, "bfloat16")
    settings = Settings(peers=True, repetitions=20, host_calls=500)
    record = run_benchmark(workload, [case], TorchPlace("cuda:0"), settings)
    (result,) = record["results"]
    assert result["kernel"]["columns"] == 512
    assert result["difference_from_reference"] < 2**-7
    names = {entry["name"] for entry in result["entries"]} | set(result["unavailable"])
    assert {peer.label for peer in workload.peers} <= names
    assert 0.2 < result["entries"][0]["share_of_limit"] < 1.5
