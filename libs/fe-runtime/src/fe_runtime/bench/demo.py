"""The demonstration: one case of an operation on realistic activations, compared with a formula and timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .accuracy import judge
from .places import Place
from .problem import Problem
from .timing import Call
from .workload import Case, Workload

__all__ = ["DemoRow", "demo_cases", "run_case"]

REPETITIONS = 7
GPU_REPETITIONS = 30


@dataclass(frozen=True)
class DemoRow:
    """One line of the table.

    ``error`` and ``bound`` are relative (2-norm), ``worst`` is the largest share of its allowance that an element
    takes, times are medians in seconds. All are ``None`` for a case that raised; ``note`` then has the reason, and
    otherwise why no kernel ran on a GPU.
    """

    operation: str
    shape: str
    format: str
    backend: str = "failed"
    ok: bool = False
    error: float | None = None
    bound: float | None = None
    worst: float | None = None
    seconds: float | None = None
    plain_seconds: float | None = None
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the row as plain values."""
        return asdict(self)


def demo_cases(workloads: Sequence[Workload]) -> list[tuple[Workload, Case]]:
    """Return what the demonstration runs, in order."""
    return [(workload, case) for workload in workloads for case in workload.demo]


def run_case(workload: Workload, case: Case, place: Place, seed: int = 0) -> DemoRow:
    """Run one case; whatever it raises becomes a row that is not ok, so that one failure does not hide the rest."""
    try:
        return _run(workload, case, place, seed)
    except Exception as error:
        return DemoRow(workload.name, case.shape, case.format, note=f"{type(error).__name__}: {error}")


def _run(workload: Workload, case: Case, place: Place, seed: int) -> DemoRow:
    problem = Problem(workload, case, place, seed, via_host=True)
    found = judge(workload.decode(case, problem.results()), workload.expected(case, problem.host_inputs))
    calls: dict[str, Call] = {"ours": problem.ours}
    if problem.has_plain:
        calls["plain"] = problem.plain
    timings = place.timer().measure(calls, GPU_REPETITIONS if place.on_gpu else REPETITIONS)
    missing = problem.plan.missing
    return DemoRow(
        operation=workload.name,
        shape=case.shape,
        format=case.format,
        backend=problem.backend,
        ok=found.ok,
        error=found.error,
        bound=found.bound,
        worst=found.worst,
        seconds=timings["ours"].median,
        plain_seconds=timings["plain"].median if "plain" in timings else None,
        note=f"no kernel: {missing.reason}. {missing.fix}" if missing is not None else "",
    )
