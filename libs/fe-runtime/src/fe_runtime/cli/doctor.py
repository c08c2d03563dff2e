"""``fe doctor``: how each operation runs here, the compiler, the cache, and the environment."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .support import find_operations
from .terminal import Terminal

if TYPE_CHECKING:
    from fe_runtime.bench.workload import Case, Workload
    from fe_runtime.plan import Target

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "report which operations run how on this machine, the cache, the GPU and the versions"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the report; status 1 if the kernel compiler has a problem on a machine with a GPU."""
    from fe_runtime.arrays import Device, cuda_is_available
    from fe_runtime.collect_env import collect_env_info, format_report
    from fe_runtime.plan import Target

    terminal = Terminal()
    target = Target.of(Device("cuda", 0)) if cuda_is_available() else None
    compiler = _compiler()
    report: dict[str, Any] = {
        "operations": _operations(target, compiler["works"]),
        "compiler": compiler,
        "cache": _cache(),
        "environment": collect_env_info(),
    }
    _print_operations(terminal, report["operations"], target)
    _print_tools(terminal, compiler, report["cache"])
    terminal.print()
    terminal.print(format_report(report["environment"]))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1, default=str) + "\n")
    return int(target is not None and not report["compiler"]["works"])


def _compiler() -> dict[str, Any]:
    from fe_runtime.compile.toolchain import ToolchainError, check_toolchain

    try:
        facts = check_toolchain().facts
    except ToolchainError as error:
        return {"works": False, "problem": str(error)}
    return {"works": True, **facts}


def _cache() -> dict[str, Any]:
    """Count the kernels in the cache folder by operation and architecture, from the names of its folders."""
    from fe_runtime import env

    folder = env.cache_dir()
    counts: Counter[str] = Counter()
    size = 0
    try:
        for meta in sorted(folder.glob("v*/sm_*/*/*/*/meta.json")):
            arch, operation = meta.relative_to(folder).parts[1:3]
            counts[f"{operation} {arch}"] += 1
            size += sum(file.stat().st_size for file in meta.parent.iterdir())
    except OSError as error:
        return {"folder": str(folder), "problem": f"{type(error).__name__}: {error}"}
    return {"folder": str(folder), "kernels": dict(counts), "bytes": size}


def _operations(target: Target | None, compiler_works: bool) -> list[dict[str, str]]:
    return [
        {
            "operation": f"{workload.library}.{workload.name}",
            "format": case.format,
            **_how(workload, case, target, compiler_works),
        }
        for workload in find_operations().workloads
        for case in _one_per_format(workload)
    ]


def _one_per_format(workload: Workload) -> list[Case]:
    return list({case.format: case for case in (*workload.bench, *workload.demo)}.values())


def _how(workload: Workload, case: Case, target: Target | None, compiler_works: bool) -> dict[str, str]:
    from fe_runtime.bench.problem import plan_case
    from fe_runtime.compile.cache import is_stored
    from fe_runtime.plan import HOPPER

    plan = plan_case(workload, case, target or HOPPER)
    if plan.kernel is None:
        reason = f"{plan.missing.reason}. {plan.missing.fix}" if plan.missing else "this is its plan"
        return {"runs": "reference", "why": reason}
    if is_stored(plan.kernel.spec):
        stored = "in the cache"
    else:
        stored = "compiled on first use" if compiler_works else "not in the cache, and it cannot be compiled here"
    if target is None:
        return {"runs": "reference", "why": f"no GPU here; on {plan.kernel.spec.arch} a kernel, {stored}"}
    return {"runs": f"{plan.backend} kernel", "why": f"{plan.kernel.spec.arch}, {stored}"}


def _print_operations(terminal: Terminal, rows: list[dict[str, str]], target: Target | None) -> None:
    """Print one line for the formats of an operation that run alike."""
    where = f"compute capability {target.capability[0]}.{target.capability[1]}" if target else "no GPU"
    terminal.print(f"how the operations run here ({where})", "strong")
    alike: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        alike.setdefault((row["operation"], row["runs"], row["why"]), []).append(row["format"])
    for (operation, runs, why), formats in alike.items():
        terminal.wrapped(f"{operation}: {'; '.join(formats)}", indent="  ")
        terminal.wrapped(f"{runs}: {why}", indent="    ")
    terminal.print()


def _print_tools(terminal: Terminal, compiler: dict[str, Any], cache: dict[str, Any]) -> None:
    terminal.print("kernel compiler", "strong")
    if compiler["works"]:
        version = compiler["dsl"].get("nvidia-cutlass-dsl", "unknown")
        terminal.print(f"  works: nvidia-cutlass-dsl {version}, apache-tvm-ffi {compiler['tvm_ffi']}", "good")
    else:
        terminal.print(f"  {compiler['problem']}", "note")
    terminal.print()
    terminal.print("kernel cache", "strong")
    terminal.print(f"  {cache['folder']}")
    if "problem" in cache:
        terminal.print(f"  {cache['problem']}", "note")
        return
    kernels = cache["kernels"]
    terminal.print(f"  {sum(kernels.values())} kernels, {cache['bytes'] / 2**20:.1f} MiB")
    for name, count in kernels.items():
        terminal.print(f"  {count:4d}  {name}")
