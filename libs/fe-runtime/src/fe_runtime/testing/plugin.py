"""pytest plugin: which tests run where, the GPU lock, and the recorded GPU run.

* ``gpu`` tests are skipped, with the reason, where there is no CUDA GPU. They share the machine's GPU lock;
  ``@pytest.mark.gpu(exclusive=True)`` takes it alone.
* ``compile`` tests run only when ``-m`` asks for them.
* ``--gpu-report PATH`` writes the outcome of the ``gpu`` tests, with everything that it depends on, as JSON.
* hypothesis gives an example as long as it takes: on a loaded machine a deadline fails tests that are right.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fe_runtime.arrays import cuda_is_available

from .gpu import gpu_lock, release_gpu_memory
from .record import describe_run, gpu_names

__all__ = ["GpuReport"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the recorded run."""
    group = parser.getgroup("fe")
    group.addoption("--gpu-report", metavar="PATH", type=Path, help="write the outcome of the gpu tests as JSON")
    group.addoption("--gpu-report-commit", metavar="COMMIT", help="commit to record where the tree has no git folder")


def pytest_configure(config: pytest.Config) -> None:
    """Set hypothesis up; start the record in the process that sees all reports (not in a worker of pytest-xdist)."""
    with contextlib.suppress(ImportError):
        from hypothesis import settings

        settings.register_profile("fe", deadline=None)
        settings.load_profile("fe")
    # JAX would take most of the GPU's memory for itself; torch and other workers need some too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    path = config.getoption("--gpu-report")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(GpuReport(config, path), "fe-gpu-report")


def pytest_report_header() -> str:
    """Name the GPUs that the run sees."""
    return f"gpu: {', '.join(gpu_names()) or 'none'}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip ``gpu`` tests, with the reason, where there is no GPU, and leave out ``compile`` tests unless asked for."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not cuda_is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
    if "compile" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("compile")]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """Hold the GPU lock while a ``gpu`` test runs, its fixtures included."""
    mark = item.get_closest_marker("gpu")
    if mark is None or not cuda_is_available():
        return (yield)
    with gpu_lock(exclusive=bool(mark.kwargs.get("exclusive", False))):
        try:
            return (yield)
        finally:
            release_gpu_memory()


class GpuReport:
    """Collects the outcome of each ``gpu`` test and writes the record at the end of the run."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config = config
        self._path = path
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcome of a test: the worst of its three phases, and the sum of their durations."""
        if "gpu" not in report.keywords:
            return
        test = self._tests.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        test["seconds"] = round(test["seconds"] + report.duration, 4)
        if report.failed:
            test["outcome"] = "failed"
            crash = getattr(report.longrepr, "reprcrash", None)
            test["error"] = str(report.longrepr if crash is None else crash.message)[:500]
        elif report.skipped and test["outcome"] == "passed":
            test["outcome"] = "skipped"
            test["reason"] = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)[:500]

    def pytest_sessionfinish(self) -> None:
        """Write the record."""
        run = describe_run(self._config.rootpath, self._config.getoption("--gpu-report-commit"))
        outcomes = [test["outcome"] for test in self._tests.values()]
        counts = {name: outcomes.count(name) for name in ("passed", "failed", "skipped")}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        record = {**run, "counts": counts, "tests": self._tests}
        self._path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say where the record is."""
        terminalreporter.write_line(f"recorded {len(self._tests)} gpu tests in {self._path}")
