"""The demonstration and the benchmark of this library on a GPU: right results, by kernels, with sensible times."""

from __future__ import annotations

import pytest

from fe_norm.workloads import PEERS, RMSNORM_SILU
from fe_runtime.bench.demo import run_case
from fe_runtime.bench.places import JaxPlace, Place, TorchPlace
from fe_runtime.bench.run import OURS, Settings, run_benchmark
from fe_runtime.bench.workload import Case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", RMSNORM_SILU.demo, ids=lambda case: f"{case.shape} {case.format}")
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_demo_is_right_and_runs_kernels(framework: str, case: Case) -> None:
    place: Place = TorchPlace("cuda:0") if framework == "torch" else JaxPlace("cuda:0")
    row = run_case(RMSNORM_SILU, case, place)
    assert row.ok, row.note
    assert row.backend.endswith("kernel")


def test_the_benchmark_measures_kernels_and_peers() -> None:
    case = Case({"T": 8192, "C": 1024}, "bfloat16")
    settings = Settings(peers=True, repetitions=20, host_calls=500)
    record = run_benchmark(RMSNORM_SILU, [case], TorchPlace("cuda:0"), settings)
    (result,) = record["results"]
    assert result["kernel"]["columns"] == 1024
    assert result["difference_from_reference"] < 2**-8
    names = {entry["name"] for entry in result["entries"]} | set(result["unavailable"])
    assert names == {OURS, "plain", *(peer.label for peer in PEERS)}
    ours = result["entries"][0]
    assert 0.3 < ours["share_of_limit"] < 1.5
    assert record["host"]["execute"]["median_us"] < record["host"]["wrapper"]["median_us"] < 1000
    assert record["gpu"]["name"]
