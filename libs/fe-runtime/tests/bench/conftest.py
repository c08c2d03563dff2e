"""Fixture: the library ``fe_example``, importable but not installed, and the only one that is found."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fe_runtime.bench import discover
from fe_runtime.bench.workload import Workload

FOLDER = Path(__file__).parents[1] / "bench"


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workload]:
    """The workload of the example operation."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(discover, "_entry_points", lambda: iter(()))
    monkeypatch.setattr(discover, "_on_the_path", lambda: [("fe_example", "fe_example.workloads:WORKLOADS")])
    yield importlib.import_module("fe_example.workloads").SCALE
    for name in [name for name in sys.modules if name.partition(".")[0] == "fe_example"]:
        del sys.modules[name]
