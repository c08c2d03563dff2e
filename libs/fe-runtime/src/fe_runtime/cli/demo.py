"""``fe demo``: run every operation on realistic activations, compare with a formula, time it, draw it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .support import NO_DRAWING, can_draw, find_operations, place_for
from .terminal import Column, Terminal

if TYPE_CHECKING:
    from fe_runtime.bench.demo import DemoRow
    from fe_runtime.bench.places import Place

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "run every operation on realistic data, compare it with a float64 formula, and time it"

COLUMNS = (
    Column("operation"),
    Column("shape"),
    Column("format"),
    Column("backend", rank=2),
    Column("error", right=True),
    Column("bound", right=True),
    Column("result"),
    Column("time of fe", right=True, rank=1),
    Column("plain expression", right=True, rank=3),
)
SPEED = Column("fe is", right=True, rank=1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--framework",
        nargs="+",
        choices=["numpy", "torch", "jax"],
        default=[None],
        help="frameworks to use (default: torch or jax if it sees a GPU, else numpy)",
    )
    parser.add_argument("--output", type=Path, default=Path("fe-demo.png"), metavar="PNG", help="picture to write")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table as JSON")
    parser.add_argument("--seed", type=int, default=0, help="of the random data")


def run(options: argparse.Namespace) -> int:
    """Run the demonstration; status 1 if any error is above its bound."""
    from fe_runtime.bench.machine import machine_record, today, versions
    from fe_runtime.bench.problem import CPU_REFERENCE, ON_THE_CPU

    terminal = Terminal()
    rows = _run_all(terminal, [place_for(framework) for framework in options.framework], options.seed)
    for place, lines in rows.items():
        _print_table(terminal, place, lines)
    every = [row for lines in rows.values() for row in lines]
    for note in sorted({f"{row.operation} {row.format}: {row.note}" for row in every if row.note}):
        terminal.print(note, "note")
    if all(row.backend == CPU_REFERENCE for row in every):
        terminal.print(ON_THE_CPU, "note")
    if options.json:
        record: dict[str, Any] = {"date": today(), "machine": machine_record(), "versions": versions()}
        record["rows"] = {name: [row.as_json() for row in lines] for name, lines in rows.items()}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    picture = f"no picture: it needs {NO_DRAWING}"
    if can_draw():
        from fe_runtime.bench.pictures import draw_demo

        draw_demo(rows, options.output)
        picture = f"picture: {options.output}"
    wrong = sum(not row.ok for row in every)
    if wrong:
        terminal.print(f"{wrong} of {len(every)} results are not right; {picture}", "bad")
        return 1
    terminal.print(f"all {len(every)} results are within their bound; {picture}", "good")
    return 0


def _run_all(terminal: Terminal, places: list[Place], seed: int) -> dict[str, list[DemoRow]]:
    """Run every case in every place, showing progress."""
    from fe_runtime.bench.demo import demo_cases, run_case

    cases = demo_cases(find_operations().workloads)
    rows: dict[str, list[DemoRow]] = {}
    done = 0
    with terminal.progress(len(cases) * len(places)) as show:
        for place in places:
            lines = rows.setdefault(str(place), [])
            for workload, case in cases:
                show(done, f"{workload.name} {case.shape} {case.format} ({place})")
                lines.append(run_case(workload, case, place, seed))
                done += 1
    return rows


def _print_table(terminal: Terminal, place: str, rows: list[DemoRow]) -> None:
    """Print the rows of a place; with the speed where a kernel ran, for the reference is not made to be fast."""
    from fe_runtime.bench.problem import CPU_REFERENCE

    title = f"fe demo: {place} (relative error against a float64 formula; median times)"
    timed = any(row.backend != CPU_REFERENCE for row in rows)
    cells = [[*_cells(row), *([_speed(row)] if timed else [])] for row in rows]
    terminal.table(title, [*COLUMNS, *([SPEED] if timed else [])], cells)


def _cells(row: DemoRow) -> list[str]:
    from fe_runtime.bench.timing import time_text

    errors = ("-" if value is None else f"{value:.2e}" if value else "exact" for value in (row.error, row.bound))
    times = ("-" if value is None else time_text(value) for value in (row.seconds, row.plain_seconds))
    return [row.operation, row.shape, row.format, row.backend, *errors, "ok" if row.ok else "WRONG", *times]


def _speed(row: DemoRow) -> str:
    from fe_runtime.bench.problem import CPU_REFERENCE

    if row.backend == CPU_REFERENCE or not row.plain_seconds or not row.seconds:
        return "-"
    return f"{row.plain_seconds / row.seconds:.2f}x as fast"
