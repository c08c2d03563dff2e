"""How long calls take: median and spread, by CUDA events with a cold L2 cache, or by the host's clock.

Calls that are compared are timed in turns, one call of each per round, so that a drifting clock frequency or a busy
machine meets all of them alike. A call gets the number of its round, to take its arrays from a rotating set.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import quantiles
from typing import Any, Protocol

__all__ = ["Call", "EventTimer", "Gpu", "HostTimer", "Timer", "Timing", "host_time", "span_text", "time_text"]

Call = Callable[[int], object]

WARM_UP = 3
"""Untimed calls of each candidate; the first of them may compile."""


HIDDEN_SECONDS = 250e-6
"""Host time that is hidden at least: a call that comes after another library's takes several times its usual time."""

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


@dataclass(frozen=True)
class Timing:
    """Durations of one call in seconds, one for each repetition."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median."""
        return self._decile(5)

    @property
    def p10(self) -> float:
        """A tenth of the calls are faster."""
        return self._decile(1)

    @property
    def p90(self) -> float:
        """A tenth of the calls are slower."""
        return self._decile(9)

    def _decile(self, number: int) -> float:
        if len(self.seconds) == 1:
            return self.seconds[0]
        return quantiles(self.seconds, n=10, method="inclusive")[number - 1]

    def as_json(self) -> dict[str, float | int]:
        """Return the summary that records keep, in microseconds."""
        in_us = {name: round(getattr(self, name) * 1e6, 3) for name in ("median", "p10", "p90")}
        return {**{f"{name}_us": value for name, value in in_us.items()}, "repetitions": len(self.seconds)}


class Timer(Protocol):
    """A clock for calls of one kind of device."""

    label: str

    def measure(self, calls: Mapping[str, Call], repetitions: int) -> dict[str, Timing]:
        """Time each call ``repetitions`` times, in turns, after a warm-up."""


class Gpu(Protocol):
    """What :class:`EventTimer` needs of a GPU."""

    def record(self) -> Any:
        """Record an event in the current stream."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the time between two events that have happened."""

    def flush(self) -> None:
        """Enqueue a write of more than the L2 cache holds."""

    def wait(self) -> None:
        """Wait for the GPU."""


class EventTimer:
    """Times calls on a GPU by events around each call.

    Before each call the L2 cache is overwritten. That leaves dirty lines behind whose write-back falls into the timed
    call, in exchange for the call's own last lines, which leave the cache after it: the bytes that reach memory
    within the timed span are those of the call.

    The overwriting also keeps the GPU busy while the host enqueues the call, so that launch gaps between the kernels
    of a slow host expression are not counted as GPU time. It is repeated where once is too short for that.
    """

    label = "CUDA events, L2 overwritten before each call"

    def __init__(self, gpu: Gpu, clock: Callable[[], float] = time.perf_counter) -> None:
        self._gpu = gpu
        self._clock = clock

    def measure(self, calls: Mapping[str, Call], repetitions: int) -> dict[str, Timing]:
        """Time each call ``repetitions`` times, in turns, after a warm-up."""
        flushes = {name: self._flushes_for(call) for name, call in calls.items()}
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for round_number in range(repetitions):
            for name, call in calls.items():
                seconds[name].append(self._time(call, round_number, flushes[name]))
        return {name: Timing(tuple(values)) for name, values in seconds.items()}

    def _time(self, call: Call, round_number: int, flushes: int) -> float:
        for _ in range(flushes):
            self._gpu.flush()
        start = self._gpu.record()
        result = call(round_number)
        end = self._gpu.record()
        self._gpu.wait()
        del result
        return self._gpu.seconds(start, end)

    def _flushes_for(self, call: Call) -> int:
        """Warm up; return how many overwritings hide twice the host time of the call, and :data:`HIDDEN_SECONDS`."""
        for _ in range(WARM_UP):
            call(0)
        self._gpu.wait()
        began = self._clock()
        call(0)
        host = self._clock() - began
        self._gpu.wait()
        start = self._gpu.record()
        self._gpu.flush()
        end = self._gpu.record()
        self._gpu.wait()
        return min(50, max(1, math.ceil(max(2 * host, HIDDEN_SECONDS) / max(self._gpu.seconds(start, end), 1e-6))))


class HostTimer:
    """Times calls by the host's clock, from the call until its result is there."""

    label = "host clock"

    def __init__(
        self, wait: Callable[[object], None] = lambda _result: None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._wait = wait
        self._clock = clock

    def measure(self, calls: Mapping[str, Call], repetitions: int) -> dict[str, Timing]:
        """Time each call ``repetitions`` times, in turns, after one warm-up call."""
        for call in calls.values():
            self._time(call, 0)
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for round_number in range(repetitions):
            for name, call in calls.items():
                seconds[name].append(self._time(call, round_number))
        return {name: Timing(tuple(values)) for name, values in seconds.items()}

    def _time(self, call: Call, round_number: int) -> float:
        began = self._clock()
        result = call(round_number)
        self._wait(result)
        return self._clock() - began


WARM_UP_SECONDS = 0.25


def host_time(
    call: Callable[[], object],
    wait: Callable[[], None],
    calls: int = 5000,
    batch: int = 50,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Time what the host spends in a call that only enqueues work.

    The GPU is waited for between batches, outside the timed spans, so that a full launch queue never blocks the host;
    the garbage collector is off. Untimed calls come first, until the processor runs at its usual clock.
    """
    began = clock()
    while clock() - began < WARM_UP_SECONDS:
        for _ in range(batch):
            call()
        wait()
    seconds = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for number in range(calls):
            if number % batch == 0:
                wait()
            began = clock()
            call()
            seconds.append(clock() - began)
    finally:
        if collecting:
            gc.enable()
        wait()
    return Timing(tuple(seconds))


def time_text(seconds: float) -> str:
    """Return a duration in s, ms or us, to three digits."""
    size, unit = _unit(seconds)
    return f"{_digits(seconds / size)} {unit}"


def span_text(first: float, last: float) -> str:
    """Return two durations in one unit, ``"3.89 to 4.07 ms"``."""
    size, unit = _unit(last)
    return f"{_digits(first / size)} to {_digits(last / size)} {unit}"


def _unit(seconds: float) -> tuple[float, str]:
    return next(((size, unit) for size, unit in _UNITS if seconds >= 0.9995 * size), _UNITS[-1])


def _digits(value: float) -> str:
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"
