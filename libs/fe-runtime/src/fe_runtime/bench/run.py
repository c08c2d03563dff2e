"""The benchmark of one operation: every case beside the plain expression and the peers, as a record for JSON.

A record (schema ``fe-bench/1``) has the keys

``schema, operation, summary, date, commit, machine, gpu, versions, framework, device``
    what ran where (``gpu`` is read under load; ``None`` without a GPU)
``method``
    the clock, the number of repetitions (slow cases on the CPU may have fewer) and of rotating array sets
``limit``
    ``kind`` (``"bytes"`` or ``"flops"``), ``per_second`` as measured in this run, ``what`` was measured
``host``
    host time of a warm wrapper call and of the class's ``execute`` in the quietest of some rounds, since other load on
    the machine only adds to it, and the medians of all rounds; ``None`` where the CPU computes
``results``
    one entry per case: ``shape``, ``format``, ``dims``, ``dtype``, ``options``, ``bytes``, ``flops``, ``backend``,
    ``kernel`` (architecture and configuration, or ``None``), ``difference_from_reference``, ``entries``, and
    ``unavailable``: the peers that could not run, with the reason

Each of ``entries`` has ``name``, ``does``, ``same_work``, ``median_us``, ``p10_us``, ``p90_us``, ``repetitions``,
``per_second`` (bytes or operations), ``share_of_limit`` and ``ours_is_faster`` (its median over ours).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fe_runtime.arrays import Device
from fe_runtime.compile import cache
from fe_runtime.plan import Target

from .limits import Limit, copy_limit, matmul_limit
from .machine import commit_record, gpu_record, machine_record, today, versions
from .places import Place, TorchPlace
from .problem import Problem, minimum_bytes, plan_case
from .timing import Call, Timing, host_time, time_text
from .workload import Case, Workload

__all__ = ["OURS", "PLAIN", "SCHEMA", "BenchmarkError", "Settings", "run_benchmark"]

SCHEMA = "fe-bench/1"
OURS, PLAIN = "fe", "plain"
REPETITIONS = 50
MIN_REPETITIONS = 20
FEWEST = 3
"""Repetitions of a slow case on the CPU, where nobody asked for a number."""
LONG = 10.0
"""Seconds that timing one case on the CPU should not take, and not take without saying so before."""

MAX_DIFFERENCE = 0.01
"""Of a kernel from the reference: relative, or the share of codes. Wide: it catches garbage, tests check accuracy."""


class BenchmarkError(RuntimeError):
    """A measurement that would not be of what it claims to be of."""


HOST_ROUNDS = 12


@dataclass(frozen=True)
class Settings:
    """How to measure.

    ``repetitions`` of ``None`` are 50, fewer for slow cases on the CPU. ``host_calls`` of 0 leaves the host times out;
    ``commit`` is recorded instead of the repository's, which may not be at hand or lag behind the files.
    """

    peers: bool = False
    repetitions: int | None = None
    sets: int = 3
    host_calls: int = 5000
    seed: int = 0
    commit: str | None = None

    def __post_init__(self) -> None:
        if self.repetitions is not None and self.repetitions < MIN_REPETITIONS:
            raise ValueError(f"repetitions must be at least {MIN_REPETITIONS}; got {self.repetitions}")


def run_benchmark(
    workload: Workload,
    cases: Sequence[Case],
    place: Place,
    settings: Settings,
    step: Callable[[int, str], None] = lambda _done, _text: None,
    say: Callable[[str], None] = lambda _text: None,
) -> dict[str, Any]:
    """Measure the cases and return the record described above.

    ``step(done, what)`` is told how many of the ``len(cases) + 2`` steps are done and what comes next; ``say`` what a
    user should know beforehand: that a case takes long, or is timed fewer times.

    Raises
    ------
    BenchmarkError
        A case on a GPU would not run a kernel, or a kernel's result differs from the reference.
    """
    if place.on_gpu:
        step(0, "loading kernels")
        for case in cases:  # before any peer is imported: some of them change the compiler that both use
            _load_kernel(workload, case)
    step(0, "measuring the limit of this machine")
    limit = matmul_limit(place) if workload.flops else copy_limit(place)
    step(1, "host time")
    record = _head(workload, place, settings, limit)
    for number, case in enumerate(cases):
        step(number + 2, f"{case.shape} {case.format}")
        record["results"].append(_result(workload, case, place, settings, limit, say))
    return record


def _head(workload: Workload, place: Place, settings: Settings, limit: Limit) -> dict[str, Any]:
    if place.on_gpu and isinstance(place, TorchPlace):
        place.keep_busy()
    gpu = gpu_record() if place.on_gpu else None
    place.wait()
    return {
        "schema": SCHEMA,
        "operation": workload.name,
        "summary": workload.summary,
        "date": today(),
        "commit": {"id": settings.commit} if settings.commit else commit_record(),
        "machine": machine_record(),
        "gpu": gpu,
        "versions": versions((workload.library.replace("_", "-"), *(peer.name for peer in workload.peers))),
        "framework": place.framework,
        "device": place.device,
        "method": {
            "clock": place.timer().label,
            "repetitions": settings.repetitions or REPETITIONS,
            "array_sets": settings.sets,
            "data": "random, realistic activations",
        },
        "limit": limit.as_json(),
        "host": _host_times(workload, place, settings),
        "results": [],
    }


def _load_kernel(workload: Workload, case: Case) -> None:
    plan = plan_case(workload, case, Target.of(Device("cuda", 0)))
    if plan.kernel is None:
        reason = plan.missing.reason if plan.missing else "the plan is the reference"
        raise BenchmarkError(f"{workload.name} {case.shape} {case.format} would not run a kernel: {reason}")
    cache.load(plan.kernel.spec)


def _host_times(workload: Workload, place: Place, settings: Settings) -> dict[str, Any] | None:
    if not settings.host_calls or not (place.on_gpu and isinstance(place, TorchPlace)):
        return None
    problem = Problem(workload, workload.host, place, settings.seed)
    calls = {"wrapper": problem.wrapper_call(), "execute": problem.class_call()}
    rounds = [
        {name: host_time(call, place.wait, settings.host_calls // HOST_ROUNDS) for name, call in calls.items()}
        for _ in range(HOST_ROUNDS)
    ]
    found: dict[str, Any] = {"case": f"{workload.host.shape} {workload.host.format}"}
    for name in calls:
        timings = [timing[name] for timing in rounds]
        quietest = min(timings, key=lambda timing: timing.median)
        found[name] = {**quietest.as_json(), "round_medians_us": [round(t.median * 1e6, 2) for t in timings]}
    return found


def _result(
    workload: Workload, case: Case, place: Place, settings: Settings, limit: Limit, say: Callable[[str], None]
) -> dict[str, Any]:
    problem = Problem(workload, case, place, settings.seed, settings.sets)
    kernel = problem.plan.kernel
    if place.on_gpu and kernel is None:
        raise BenchmarkError(f"{workload.name} {case.shape} {case.format} ran the reference, not a kernel")
    difference = _difference(problem) if kernel is not None else None
    calls: dict[str, Call] = {OURS: problem.ours}
    about = {OURS: (workload.summary, True)}
    if problem.has_plain:
        calls[PLAIN] = problem.plain
        about[PLAIN] = (f"plain {place.framework} expression", True)
    unavailable = _add_peers(workload, problem, calls, about) if settings.peers else {}
    repetitions = _repetitions(f"{case.shape} {case.format}", calls, place, settings, say)
    timings = place.timer().measure(calls, repetitions)
    size, flops = minimum_bytes(problem.bound), workload.flops(case) if workload.flops else None
    entries = [
        {
            "name": name,
            "does": about[name][0],
            "same_work": about[name][1],
            **_rates(timings, name, flops or size, limit),
        }
        for name in calls
    ]
    return {
        "shape": case.shape,
        "format": case.format,
        "dims": dict(case.dims),
        "dtype": case.dtype,
        "options": dict(case.options),
        "bytes": size,
        "flops": flops,
        "backend": problem.plan.backend,
        "kernel": None if kernel is None else {"arch": kernel.spec.arch, **dict(kernel.spec.config)},
        "difference_from_reference": difference,
        "entries": entries,
        "unavailable": unavailable,
    }


def _repetitions(
    what: str, calls: dict[str, Call], place: Place, settings: Settings, say: Callable[[str], None]
) -> int:
    """Return how often to time each call; say it where that takes long, or is less often than usual."""
    wanted = settings.repetitions or REPETITIONS
    if place.on_gpu:
        return wanted
    once = sum(timing.median for timing in place.timer().measure(calls, 1).values())
    if once * wanted <= LONG:
        return wanted
    if settings.repetitions is None:
        wanted = max(FEWEST, int(LONG / once))
    say(f"{what}: {wanted} repetitions, about {time_text(once * wanted)}. --repetitions N chooses.")
    return wanted


def _difference(problem: Problem) -> float:
    results, references = problem.outputs(), problem.outputs("reference")
    worst = max(
        problem.place.difference(result, reference)
        for result, reference in zip(results, references, strict=True)
        if result is not None
    )
    if not worst <= MAX_DIFFERENCE:
        what = f"{problem.workload.name} {problem.case.shape} {problem.case.format}"
        raise BenchmarkError(f"{what}: the kernel differs from the reference by {worst:.3g}; nothing was timed")
    return worst


def _add_peers(
    workload: Workload, problem: Problem, calls: dict[str, Call], about: dict[str, tuple[str, bool]]
) -> dict[str, str]:
    """Add the peers that work here to ``calls``; return the reasons of the others."""
    unavailable = {}
    for peer in workload.peers:
        if not isinstance(problem.place, TorchPlace):
            unavailable[peer.label] = "peers run on torch tensors; add --framework torch"
            continue
        try:
            made = peer.make(problem.case)
            made(problem.sets[0])
            problem.place.wait()
        except Exception as error:  # whatever a foreign library raises
            unavailable[peer.label] = f"{type(error).__name__}: {str(error).strip() or 'no text'}".split("\n")[0]
            continue
        calls[peer.label] = lambda number, made=made: made(problem.sets[number % len(problem.sets)])  # type: ignore[misc]
        about[peer.label] = (peer.does, peer.same_work)
    return unavailable


def _rates(timings: dict[str, Timing], name: str, work: int, limit: Limit) -> dict[str, Any]:
    median = timings[name].median
    rate = work / median
    return {
        **timings[name].as_json(),
        "per_second": rate,
        "share_of_limit": round(rate / limit.per_second, 4),
        "ours_is_faster": round(median / timings[OURS].median, 4),
    }
