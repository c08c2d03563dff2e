from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from fe_runtime.bench import discover
from fe_runtime.bench.workload import Workload

EXAMPLE = Path(__file__).parent


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No library but what the test adds to the path."""
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not _may_hold_libraries(entry)])
    return monkeypatch


def _may_hold_libraries(entry: str) -> bool:
    return any(Path(entry).glob("fe_*"))


def _drop(name: str) -> None:
    for loaded in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[loaded]


def test_a_library_that_is_only_on_the_path_is_found(clean: pytest.MonkeyPatch) -> None:
    clean.setattr(sys, "path", [str(EXAMPLE), *sys.path])
    found = discover.find_workloads()
    assert [workload.name for workload in found.workloads] == ["scale"]
    assert found.broken == {}
    _drop("fe_example")


def test_a_library_that_is_also_an_entry_point_is_found_once(clean: pytest.MonkeyPatch) -> None:
    clean.setattr(sys, "path", [str(EXAMPLE), *sys.path])
    entry = importlib.metadata.EntryPoint("example", "fe_example.workloads:WORKLOADS", discover.ENTRY_POINTS)
    clean.setattr(importlib.metadata, "entry_points", lambda group: [entry] if group == "fe.operations" else [])
    assert len(discover.find_workloads().workloads) == 1
    _drop("fe_example")


def test_a_broken_library_hides_no_other(clean: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for library, code in (("fe_broken", "import a_module_that_nobody_has"), ("fe_bare", "")):
        (tmp_path / library).mkdir()
        (tmp_path / library / "__init__.py").touch()
        if code:
            (tmp_path / library / "workloads.py").write_text(code)
    clean.setattr(sys, "path", [str(EXAMPLE), str(tmp_path), *sys.path])
    found = discover.find_workloads()
    assert [workload.name for workload in found.workloads] == ["scale"]
    assert list(found.broken) == ["fe_broken"]
    assert "a_module_that_nobody_has" in found.broken["fe_broken"]
    _drop("fe_example")


def test_operations_are_known_by_short_and_full_name(scale: Workload) -> None:
    found = discover.find_workloads()
    assert found.named("scale") is found.named("fe_example.scale")
    with pytest.raises(LookupError, match="no operation 'skale'; the installed libraries have: scale"):
        found.named("skale")


def test_libraries_are_known_by_distribution_and_import_name(scale: Workload) -> None:
    found = discover.find_workloads()
    assert found.of_library("fe-example") == found.of_library("fe_example") == found.of_library(None)
    with pytest.raises(LookupError, match="libraries with operations: fe-example"):
        found.of_library("fe-none")
