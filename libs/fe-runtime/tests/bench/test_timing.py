from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest

from fe_runtime.bench.timing import EventTimer, HostTimer, Timing, host_time, span_text, time_text


class FakeClock:
    """A clock that only moves when something takes time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def taking(self, seconds: float) -> Callable[[int], str]:
        def call(_round_number: int) -> str:
            self.now += seconds
            return "result"

        return call


class FakeGpu:
    """A GPU that runs what was enqueued one after another, beside a host that enqueues."""

    def __init__(self, host: FakeClock, flush_seconds: float) -> None:
        self.host, self.flush_seconds = host, flush_seconds
        self.free_at = 0.0  # when the GPU has done all that was enqueued
        self.flushes = 0

    def enqueue(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.host.now) + seconds

    def record(self) -> float:
        self.enqueue(0.0)
        return self.free_at

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def flush(self) -> None:
        self.flushes += 1
        self.enqueue(self.flush_seconds)

    def wait(self) -> None:
        self.host.now = max(self.host.now, self.free_at)


def test_median_and_spread_are_numpys_percentiles() -> None:
    seconds = tuple(np.random.default_rng(0).random(23))
    timing = Timing(seconds)
    found = (timing.p10, timing.median, timing.p90)
    np.testing.assert_allclose(found, np.percentile(seconds, [10, 50, 90]), rtol=1e-12)


def test_a_single_repetition_is_its_own_summary() -> None:
    assert Timing((0.5,)).as_json() == {"median_us": 5e5, "p10_us": 5e5, "p90_us": 5e5, "repetitions": 1}


def test_host_timer_waits_for_each_result_and_takes_turns() -> None:
    clock, seen = FakeClock(), []

    def wait(result: object) -> None:
        assert result == "result"
        clock.now += 1.0

    def counted(name: str, seconds: float) -> Callable[[int], str]:
        call = clock.taking(seconds)
        return lambda number: (seen.append((name, number)), call(number))[1]

    timings = HostTimer(wait, clock).measure({"a": counted("a", 2.0), "b": counted("b", 5.0)}, 3)
    assert timings["a"].seconds == (3.0, 3.0, 3.0)
    assert timings["b"].seconds == (6.0, 6.0, 6.0)
    turns = [(name, number) for number in range(3) for name in "ab"]
    assert seen == [("a", 0), ("b", 0), *turns]  # the first two warm up


def test_event_timer_counts_gpu_time_not_launch_gaps() -> None:
    host = FakeClock()
    gpu = FakeGpu(host, flush_seconds=60e-6)

    def three_slow_launches(_round_number: int) -> None:
        for _ in range(3):
            host.now += 50e-6
            gpu.enqueue(10e-6)

    timings = EventTimer(gpu, host).measure({"eager": three_slow_launches}, 20)
    assert len(timings["eager"].seconds) == 20
    assert timings["eager"].median == pytest.approx(30e-6)


def test_event_timer_flushes_before_every_call() -> None:
    host = FakeClock()
    gpu = FakeGpu(host, flush_seconds=300e-6)
    EventTimer(gpu, host).measure({"a": lambda _: gpu.enqueue(1e-6), "b": lambda _: gpu.enqueue(1e-6)}, 25)
    assert gpu.flushes == 2 * (1 + 25)  # one of each to learn how long a flush takes


def test_event_timer_hides_a_call_that_takes_longer_than_in_its_warm_up() -> None:
    host, calls = FakeClock(), [0]
    gpu = FakeGpu(host, flush_seconds=30e-6)

    def slower_later(_round_number: int) -> None:
        calls[0] += 1
        host.now += 15e-6 if calls[0] <= 5 else 120e-6
        gpu.enqueue(10e-6)

    assert EventTimer(gpu, host).measure({"fe": slower_later}, 20)["fe"].median == pytest.approx(10e-6)


def test_host_time_leaves_waiting_out_and_the_collector_off() -> None:
    clock, waits = FakeClock(), []

    def call() -> None:
        assert not gc.isenabled() or not waits
        clock.now += 7e-6

    def wait() -> None:
        waits.append(clock.now)
        clock.now += 1.0

    timing = host_time(call, wait, calls=120, batch=50, clock=clock)
    assert timing.median == pytest.approx(7e-6)
    assert timing.p90 == pytest.approx(7e-6)
    assert len(timing.seconds) == 120
    assert len(waits) == 5  # once to warm up, before calls 0, 50 and 100, and at the end
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 us"),
        (3.4e-6, "3.40 us"),
        (57.84e-6, "57.8 us"),
        (999.7e-6, "1.00 ms"),
        (9.996e-3, "10.0 ms"),
        (0.1201, "120 ms"),
        (36.04, "36.0 s"),
        (4000.0, "4000 s"),
    ],
)
def test_durations_have_three_digits_and_a_fitting_unit(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def test_the_ends_of_a_span_share_a_unit() -> None:
    assert span_text(0.9e-3, 1.2e-3) == "0.90 to 1.20 ms"
