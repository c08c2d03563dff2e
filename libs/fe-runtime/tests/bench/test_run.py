from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from fe_runtime.bench import run as module
from fe_runtime.bench import timing
from fe_runtime.bench.limits import Limit
from fe_runtime.bench.places import NumpyPlace, Place, TorchPlace
from fe_runtime.bench.problem import Problem
from fe_runtime.bench.run import SCHEMA, BenchmarkError, Settings, run_benchmark
from fe_runtime.bench.timing import HostTimer, Timing
from fe_runtime.bench.workload import Workload
from fe_runtime.plan import HOPPER, Kernel, Plan

LIMIT = Limit("bytes", 1e9, "a copy")
FAST = Settings(peers=True, repetitions=20)


@pytest.fixture(autouse=True)
def _no_large_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "copy_limit", lambda _place: LIMIT)


def _record(scale: Workload, place: Place, settings: Settings = FAST, steps: list[str] | None = None) -> dict[str, Any]:
    seen: list[str] = [] if steps is None else steps
    return json.loads(json.dumps(run_benchmark(scale, scale.demo, place, settings, lambda _, text: seen.append(text))))


def test_the_record_holds_everything_that_a_reader_needs(scale: Workload) -> None:
    steps: list[str] = []
    record = _record(scale, NumpyPlace(), steps=steps)
    assert record["schema"] == SCHEMA
    assert record["operation"] == "scale"
    for key in ("date", "commit", "machine", "gpu", "versions", "method", "limit", "host", "results"):
        assert key in record
    assert record["gpu"] is None
    assert record["host"] is None
    assert record["method"]["clock"] == "host clock"
    assert record["versions"]["numpy"]
    assert steps[-2:] == ["3x16 fp32", "5x8 bf16, factor=3.0"]


def test_rates_and_ratios_follow_from_the_medians(scale: Workload) -> None:
    result = _record(scale, NumpyPlace())["results"][0]
    assert result["bytes"] == 2 * 3 * 16 * 4
    assert result["kernel"] is None
    assert result["backend"] == "reference"
    ours, plain = result["entries"]
    assert (ours["name"], plain["name"]) == ("fe", "plain")
    assert ours["ours_is_faster"] == 1
    assert plain["ours_is_faster"] == pytest.approx(plain["median_us"] / ours["median_us"], rel=1e-2)
    for entry in (ours, plain):
        assert entry["repetitions"] == 20
        assert entry["p10_us"] <= entry["median_us"] <= entry["p90_us"]
        assert entry["per_second"] == pytest.approx(result["bytes"] / entry["median_us"] * 1e6, rel=1e-2)
        assert entry["share_of_limit"] == pytest.approx(entry["per_second"] / LIMIT.per_second, abs=1e-3)


class SlowTimer:
    """Says that every call takes a second, and remembers how many it was asked to time."""

    label = "host clock"

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def measure(self, calls: Any, repetitions: int) -> dict[str, Timing]:
        return {name: Timing((self.seconds,) * repetitions) for name in calls}


@pytest.mark.parametrize(
    ("seconds", "asked", "timed", "said"),
    [
        (0.01, None, 50, ""),
        (0.5, None, 10, "3x16 fp32: 10 repetitions, about 10.0 s. --repetitions N chooses."),
        (60.0, None, 3, "3x16 fp32: 3 repetitions, about 360 s. --repetitions N chooses."),
        (0.5, 20, 20, "3x16 fp32: 20 repetitions, about 20.0 s. --repetitions N chooses."),
    ],
)
def test_slow_cases_on_a_cpu_are_timed_fewer_times_and_announced(
    scale: Workload, monkeypatch: pytest.MonkeyPatch, seconds: float, asked: int | None, timed: int, said: str
) -> None:
    monkeypatch.setattr(NumpyPlace, "timer", lambda _place: SlowTimer(seconds))
    notes: list[str] = []
    settings = Settings(repetitions=asked)
    record = run_benchmark(scale, scale.demo[:1], NumpyPlace(), settings, say=notes.append)
    assert {entry["repetitions"] for entry in record["results"][0]["entries"]} == {timed}
    assert notes == ([said] if said else [])


def test_peers_that_cannot_run_are_reported_with_the_reason(scale: Workload) -> None:
    result = _record(scale, TorchPlace("cpu"))["results"][0]
    reason = "ModuleNotFoundError: No module named 'a_library_that_nobody_has'"
    assert result["unavailable"] == {"absent (the same)": reason}
    work = {entry["name"]: entry["same_work"] for entry in result["entries"]}
    assert work == {"fe": True, "twice (the same)": True, "nothing (nothing)": False}


def test_peers_need_torch(scale: Workload) -> None:
    result = _record(scale, NumpyPlace())["results"][0]
    assert len(result["unavailable"]) == 3
    assert all("--framework torch" in reason for reason in result["unavailable"].values())


def test_peers_are_left_out_unless_asked_for(scale: Workload) -> None:
    result = _record(scale, NumpyPlace(), Settings(repetitions=20))["results"][0]
    assert result["unavailable"] == {}


@pytest.mark.parametrize("known", [None, {"id": "def", "changed": True}], ids=["no repository", "another commit"])
def test_a_given_commit_is_recorded(scale: Workload, monkeypatch: pytest.MonkeyPatch, known: Any) -> None:
    monkeypatch.setattr(module, "commit_record", lambda: known)
    assert _record(scale, NumpyPlace(), Settings(repetitions=20, commit="abc"))["commit"] == {"id": "abc"}


def test_fewer_than_twenty_repetitions_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 20; got 19"):
        Settings(repetitions=19)


class FakeGpuPlace(NumpyPlace):
    """numpy arrays that claim to be on a GPU."""

    device = "cuda:0"


def test_a_case_without_a_kernel_is_refused_before_anything_is_timed(
    scale: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr(module.cache, "load", loaded.append)
    cases: Sequence[Any] = (*scale.presets["default"][:1], *scale.presets["odd"])
    with pytest.raises(BenchmarkError, match="4x7 fp32 would not run a kernel: C is no multiple of 8"):
        run_benchmark(scale, cases, FakeGpuPlace(), FAST)
    assert [spec.operation for spec in loaded] == ["fe_example.scale"]


def test_a_case_that_ran_the_reference_on_a_gpu_is_refused(scale: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.cache, "load", lambda _spec: None)
    with pytest.raises(BenchmarkError, match="ran the reference, not a kernel"):
        run_benchmark(scale, scale.demo, FakeGpuPlace(), FAST)


class PretendGpu(TorchPlace):
    """torch on the CPU that passes for a GPU."""

    on_gpu = True

    def __init__(self) -> None:
        super().__init__("cpu")

    def keep_busy(self) -> None:
        pass

    def wait(self, result: object = None) -> None:
        pass

    def timer(self) -> HostTimer:
        return HostTimer()


def _with_kernels(scale: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every plan name a kernel, while the reference computes."""
    monkeypatch.setattr(module.cache, "load", lambda _spec: None)
    monkeypatch.setattr(Problem, "class_call", lambda problem: problem.wrapper_call())

    made = Problem.__init__

    def init(self: Problem, *arguments: Any, **keywords: Any) -> None:
        made(self, *arguments, **keywords)
        kernel = self.operation.find_kernel(self.bound, HOPPER)
        assert isinstance(kernel, Kernel)
        self.plan = Plan("scale", "sm90", kernel)

    monkeypatch.setattr(Problem, "__init__", init)


def test_on_a_gpu_the_record_names_the_kernel_and_the_host_times(
    scale: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_kernels(scale, monkeypatch)
    monkeypatch.setattr(timing, "WARM_UP_SECONDS", 0.0)
    settings = Settings(peers=True, repetitions=20, host_calls=60)
    record = json.loads(json.dumps(run_benchmark(scale, scale.demo, PretendGpu(), settings)))
    result = record["results"][1]
    assert result["kernel"] == {"arch": "sm_90a", "columns": 8}
    assert result["backend"] == "sm90"
    assert result["difference_from_reference"] == 0
    assert record["host"]["case"] == "2x8 fp32"
    for name in ("wrapper", "execute"):
        assert record["host"][name]["repetitions"] == 5
        rounds = record["host"][name]["round_medians_us"]
        assert len(rounds) == 12
        assert record["host"][name]["median_us"] == pytest.approx(min(rounds), abs=0.01)


def test_a_kernel_that_differs_from_the_reference_is_not_timed(
    scale: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_kernels(scale, monkeypatch)
    right = Problem.outputs

    def outputs(self: Problem, backend: str = "auto") -> tuple[Any, ...]:
        factor = 1.0 if backend == "reference" else 1.02
        return tuple(array * factor for array in right(self, "reference"))

    monkeypatch.setattr(Problem, "outputs", outputs)
    with pytest.raises(BenchmarkError, match=r"differs from the reference by 0\.02; nothing was timed"):
        run_benchmark(scale, scale.demo, PretendGpu(), Settings(repetitions=20, host_calls=0))
