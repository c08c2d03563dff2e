"""The machine, the versions and the commit, as a record keeps them. No host name and no path: records are published."""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["commit_record", "gpu_record", "machine_record", "run_record", "today", "versions"]

PACKAGES = (
    "fe-runtime",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "torch",
    "triton",
    "jax",
    "jax-tvm-ffi",
    "numpy",
    "ml-dtypes",
)

_GPU_FIELDS = {
    "name": "name",
    "driver": "driver_version",
    "sm_clock_mhz": "clocks.sm",
    "sm_clock_max_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_draw_w": "power.draw",
    "power_limit_w": "power.limit",
    "memory_mib": "memory.total",
}


def machine_record() -> dict[str, Any]:
    """Return processor, cores, operating system and Python."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def gpu_record() -> dict[str, Any] | None:
    """Return name, driver, clocks and power of the first GPU as they are now; ``None`` where no tool tells."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = f"--query-gpu={','.join(_GPU_FIELDS.values())}"
    answer = _run([tool, query, "--format=csv,noheader,nounits", "--id=0"])
    if answer is None:
        return None
    values = [_number(value.strip()) for value in answer.strip().split("\n")[0].split(",")]
    return dict(zip(_GPU_FIELDS, values, strict=False))


def versions(more: Sequence[str] = ()) -> dict[str, str]:
    """Return the versions of the packages that matter, and of ``more``, if they are here."""
    found = {}
    for name in (*PACKAGES, *more):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = _version_on_the_path(name) if name.startswith("fe-") else None
            if version is not None:
                found[name] = version
    return found


def commit_record(folder: Path | None = None) -> dict[str, Any] | None:
    """Return the commit of the repository that ``folder`` (default: the current one) is in, and if it was changed."""
    git = shutil.which("git")
    if git is None:
        return None
    where = [git, "-C", str(folder or Path.cwd())]
    commit = _run([*where, "rev-parse", "HEAD"])
    if commit is None:
        return None
    return {"id": commit.strip(), "changed": bool((_run([*where, "status", "--porcelain"]) or "").strip())}


def run_record(benchmark: str, commit: str | None, packages: Sequence[str]) -> dict[str, Any]:
    """Return what a script that times something records beside its figures.

    ``commit``: ``None`` for the repository's. ``packages``: those whose versions matter besides the usual ones.
    """
    return {
        "benchmark": benchmark,
        "date": today(),
        "commit": commit_record() if commit is None else {"id": commit},
        "machine": machine_record(),
        "gpu": gpu_record(),
        "versions": versions(packages),
    }


def today() -> str:
    """Return the date and time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _run(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _number(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def _cpu_name() -> str:
    try:
        described = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or "unknown"
    name = re.search(r"^model name\s*:\s*(.+)$", described, re.MULTILINE)
    return name[1].strip() if name else platform.processor() or "unknown"


def _version_on_the_path(name: str) -> str | None:
    try:
        module = importlib.import_module(name.replace("-", "_"))
    except ImportError:
        return None
    return getattr(module, "__version__", None)
