"""Calls on a GPU timed in turn, and a table of them: used by the scripts beside this file.

A GPU at its power limit slows down while it is measured. So everything is timed in turn, round after round, and what
counts is the ratio to the first call within a round, of which the median is printed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from fe_runtime.bench.machine import run_record
from fe_runtime.bench.places import find_place
from fe_runtime.compile.ahead import compile_many
from fe_runtime.compile.spec import KernelSpec

__all__ = ["ARCH", "Calls", "Record", "prepare"]

ARCH = "sm_90a"
ROUNDS = 20
LINES = 12
"""Of a table."""

Calls = dict[str, Callable[[], Any]]


class Record:
    """What a script has timed; ``--json`` writes it, with the machine and the versions."""

    def __init__(self, benchmark: str) -> None:
        self.benchmark = benchmark
        self.races: list[dict[str, Any]] = []

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Let the command line ask for a record."""
        parser.add_argument("--json", type=Path, help="write the record")
        parser.add_argument("--commit", help="recorded instead of the repository's")

    def write(self, arguments: argparse.Namespace) -> None:
        """Write the record, if it was asked for."""
        if arguments.json:
            record = run_record(self.benchmark, arguments.commit, ("fe-gemm", "quack-kernels")) | {"races": self.races}
            arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    def race(self, title: str, calls: Calls, amount: float, unit: str) -> None:
        """Time calls and print a line for each of the fastest and for the first, which the others are compared with.

        ``amount``: what a call does, in ``unit`` times a second.
        """
        found = _timed(calls)
        first = next(iter(calls))
        self.races.append({"race": title, "ratio_to": first, "unit": unit, "calls": found})
        print(f"--- {title}: speed beside {first}", flush=True)
        for place, (name, how) in enumerate(found.items()):
            how["rate"] = amount / how["us"] * 1e6
            if place < LINES or name == first:
                print(f"  {how['ratio']:6.3f}  {how['us']:8.1f} us  {how['rate']:7.1f} {unit}  {name}", flush=True)


def _timed(calls: Calls) -> dict[str, dict[str, float]]:
    """Return median microseconds and the ratio to the first call, the fastest first."""
    found = find_place("torch").timer().measure({name: _in_rounds(call) for name, call in calls.items()}, ROUNDS)
    base = found[next(iter(calls))].seconds
    ratios = {name: median(b / t for b, t in zip(base, timing.seconds, strict=True)) for name, timing in found.items()}
    ranked = sorted(ratios, key=lambda name: -ratios[name])
    return {name: {"us": found[name].median * 1e6, "ratio": ratios[name]} for name in ranked}


def prepare(specs: Sequence[KernelSpec]) -> None:
    """Compile kernels, in parallel."""
    for spec, outcome in compile_many(list(specs)):
        if isinstance(outcome, Exception):
            raise RuntimeError(f"{spec.config}") from outcome


def _in_rounds(call: Callable[[], Any]) -> Callable[[int], Any]:
    """Return a call that takes the number of its round and does the same in each."""
    return lambda _: call()
