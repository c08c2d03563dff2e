"""``fe bench``: time one operation beside the plain expression and its peers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .support import CommandError, find_operations, place_for, require_drawing
from .terminal import Column, Terminal

if TYPE_CHECKING:
    from fe_runtime.bench.workload import Case, Workload

__all__ = ["SUMMARY", "add_arguments", "chosen_cases", "print_record", "run"]

SUMMARY = "time one operation: median and spread, share of what the machine can reach, ratio to others"

COLUMNS = (
    Column("what"),
    Column("median", right=True),
    Column("p10 to p90", right=True, rank=2),
    Column("rate", right=True, rank=1),
    Column("of the limit", right=True, rank=3),
)
SPEED = Column("fe is", right=True)

SMALL_CASES = (
    "Without a GPU, the small cases of fe demo are timed; a GPU's would take minutes each. --shape chooses others."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("operation", metavar="OP", help="for example rmsnorm_silu")
    several: dict[str, Any] = {"nargs": "+", "action": "extend"}  # given twice, both count
    parser.add_argument("--shape", **several, metavar="AxB", help="extents, for example 16384x8192 (default: presets)")
    parser.add_argument("--dtype", **several, metavar="DTYPE", help="for example bf16 fp16 float32")
    parser.add_argument(
        "--option", **several, default=[], metavar="NAME=VALUE", help="for example out_dtype=nvfp4; with --shape"
    )
    parser.add_argument("--framework", choices=["numpy", "torch", "jax"], help="default: as fe demo")
    parser.add_argument("--peers", action="store_true", help="time other libraries beside it, where installed")
    parser.add_argument(
        "--repetitions",
        type=int,
        metavar="N",
        help="timed calls of each, at least 20 (default: 50; fewer for slow cases on a CPU)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random data")
    parser.add_argument("--commit", metavar="ID", help="recorded instead of the repository's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the record")


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write what was asked for."""
    if options.png:
        require_drawing()
    from fe_runtime.bench.run import BenchmarkError, Settings, run_benchmark

    terminal = Terminal()
    try:
        workload = find_operations().named(options.operation)
        settings = Settings(options.peers, options.repetitions, seed=options.seed, commit=options.commit)
    except (LookupError, ValueError) as error:
        raise CommandError(str(error).strip('"')) from error
    place = place_for(options.framework)
    cases = chosen_cases(workload, options.shape, options.dtype, options.option, place.on_gpu)
    _check(workload, cases)
    if options.shape is None and not place.on_gpu:
        terminal.print(SMALL_CASES, "note")
    with terminal.progress(len(cases) + 2) as show:
        try:
            record = run_benchmark(workload, cases, place, settings, show, terminal.note)
        except BenchmarkError as error:
            raise CommandError(str(error)) from error
    print_record(terminal, record)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.png:
        from fe_runtime.bench.pictures import draw_record

        draw_record(record, options.png)
    return 0


def chosen_cases(
    workload: Workload, shapes: list[str] | None, dtypes: list[str] | None, settings: list[str], on_gpu: bool
) -> list[Case]:
    """Return the cases that the options name; the workload's own (small ones on the CPU) without ``--shape``."""
    from fe_runtime.bench.workload import DTYPE_NAMES, Case

    wanted = [DTYPE_NAMES.get(dtype, dtype) for dtype in dtypes or []]
    own = workload.bench if on_gpu else workload.demo
    if shapes is None:
        if settings:
            raise CommandError("--option needs --shape")
        cases = [case for case in own if not wanted or case.dtype in wanted]
        if not cases:
            raise CommandError(f"no case of {workload.name} has dtype {', '.join(wanted)}; give a --shape too")
        return cases
    values = dict(_setting(text) for text in settings)
    return [
        Case(_extents(workload, shape), dtype, values)
        for shape in shapes
        for dtype in wanted or [workload.bench[0].dtype]
    ]


def _check(workload: Workload, cases: list[Case]) -> None:
    """Let the contract judge every case before anything is measured."""
    from fe_runtime.bench.problem import describe_case
    from fe_runtime.device import Device

    for case in cases:
        try:
            describe_case(workload, case, Device("cpu"))
        except (TypeError, ValueError) as error:
            raise CommandError(str(error)) from error


def _extents(workload: Workload, shape: str) -> dict[str, int]:
    parts = shape.lower().split("x")
    if len(parts) != len(workload.dims) or not all(part.isdigit() for part in parts):
        raise CommandError(f"--shape of {workload.name} must be {'x'.join(workload.dims)}; got {shape!r}")
    return dict(zip(workload.dims, map(int, parts), strict=True))


def _setting(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals:
        raise CommandError(f"--option must be NAME=VALUE; got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def print_record(terminal: Terminal, record: dict[str, Any]) -> None:
    """Print a record as a table with a group of lines for each case, after what it was measured on."""
    from fe_runtime.bench.limits import rate_text
    from fe_runtime.bench.problem import ON_THE_CPU
    from fe_runtime.bench.timing import time_text

    limit, gpu, on_cpu = record["limit"], record["gpu"], record["device"] == "cpu"
    machine = f"{gpu['name']}, driver {gpu['driver']}" if gpu else f"CPU: {record['machine']['cpu']}"
    terminal.wrapped(f"{machine}; {record['framework']}; {record['method']['clock']}")
    terminal.wrapped(f"limit: {rate_text(limit['kind'], limit['per_second'])} ({limit['what']})")
    if record["host"]:
        host = record["host"]
        times = ", ".join(f"{name} {time_text(host[name]['median_us'] * 1e-6)}" for name in ("wrapper", "execute"))
        terminal.wrapped(f"host time of a warm call, quietest round: {times} ({host['case']})")
    terminal.print()
    columns = COLUMNS if on_cpu else (*COLUMNS, SPEED)  # the reference is not made to be fast: no ratio
    rows: list[Sequence[str] | str] = []
    for result in record["results"]:
        rows.append(f"{result['shape']} {result['format']} ({result['backend']})")
        rows += [_cells(limit["kind"], entry)[: len(columns)] for entry in result["entries"]]
    terminal.table(f"{record['operation']}: {record['summary']}", columns, rows)
    if on_cpu:
        terminal.print(ON_THE_CPU, "note")
    for label, reason in _unavailable(record).items():
        terminal.wrapped(f"{label}: not available: {reason}")


def _cells(kind: str, entry: dict[str, Any]) -> list[str]:
    from fe_runtime.bench.limits import rate_text
    from fe_runtime.bench.timing import span_text, time_text

    speed = "" if entry["name"] == "fe" else f"{entry['ours_is_faster']:.2f}x as fast"
    median, p10, p90 = (entry[f"{name}_us"] * 1e-6 for name in ("median", "p10", "p90"))
    return [
        f"  {entry['name']}" + ("" if entry["same_work"] else ", less work"),
        time_text(median),
        span_text(p10, p90),
        rate_text(kind, entry["per_second"]),
        f"{entry['share_of_limit'] * 100:.1f} %",
        speed if entry["same_work"] else f"({speed})",
    ]


def _unavailable(record: dict[str, Any]) -> dict[str, str]:
    """Return why peers could not run, each reason once with the cases that it holds for, unless it holds for all."""
    cases: dict[tuple[str, str], list[str]] = {}
    for result in record["results"]:
        for label, reason in result["unavailable"].items():
            cases.setdefault((label, reason), []).append(f"{result['shape']} {result['format']}")
    every = len(record["results"])
    return {
        label if len(where) == every else f"{label} ({', '.join(where)})": reason
        for (label, reason), where in cases.items()
    }
