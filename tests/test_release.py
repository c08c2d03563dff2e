"""The libraries are released the same way: metadata, changelogs, tags and workflows agree."""

from __future__ import annotations

import importlib
import re
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import release

ROOT = Path(__file__).resolve().parents[1]
DOMAINS = [library for library in release.LIBRARIES if library != "fe-runtime"]
CHANGES = {"Added", "Changed", "Deprecated", "Removed", "Fixed"}

every_library = pytest.mark.parametrize("library", release.LIBRARIES)


@every_library
def test_version_has_one_source(library: str) -> None:
    stated = release.version(library)
    assert re.fullmatch(r"\d+\.\d+\.\d+", stated)
    assert importlib.import_module(library.replace("-", "_")).__version__ == version(library) == stated


@every_library
def test_metadata_is_complete(library: str) -> None:
    project = _table(library)["project"]
    assert project["name"] == library
    assert project["requires-python"] == ">=3.11"
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    assert "Typing :: Typed" in project["classifiers"]
    assert project["description"]


@pytest.mark.parametrize("library", DOMAINS)
def test_every_library_has_the_extras_of_the_runtime(library: str) -> None:
    names = set(_table("fe-runtime")["project"]["optional-dependencies"])
    extras = _table(library)["project"]["optional-dependencies"]
    assert {name: extras.get(name) for name in names} == {name: [f"fe-runtime[{name}]"] for name in names}


@pytest.mark.parametrize("library", DOMAINS)
def test_the_command_line_finds_every_librarys_workloads(library: str) -> None:
    package = library.replace("-", "_")
    points = _table(library)["project"].get("entry-points", {}).get("fe.operations", {})
    source = ROOT / "libs" / library / "src" / package
    exists = (source / "workloads.py").exists() or (source / "workloads").exists()
    assert points == ({library: f"{package}.workloads:WORKLOADS"} if exists else {})


@every_library
def test_changelog_lists_unreleased_and_released_changes(library: str) -> None:
    text = (ROOT / "libs" / library / "CHANGELOG.md").read_text(encoding="utf-8")
    assert text.startswith(f"# Changelog of {library}\n")
    versions = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert versions[0] == "Unreleased"
    assert all(re.match(r"\d+\.\d+\.\d+\b", name) for name in versions[1:])
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= CHANGES


@every_library
def test_release_workflow_is_the_same_for_every_library(library: str) -> None:
    text = _workflow(f"release-{library}.yml")
    assert text == _workflow("release-fe-runtime.yml").replace("fe-runtime", library)
    assert f'tags: ["{library}-v*"]' in text


@every_library
def test_ci_tries_every_library_in_its_own_environment(library: str) -> None:
    listed = re.search(r"library: \[(.+)\]", _workflow("ci.yml"))
    assert listed is not None
    assert library in listed[1].split(", ")


def test_a_tag_names_a_library_and_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "libs/fe-norm/src/fe_norm"
    package.mkdir(parents=True)
    (package / "_version.py").write_text('__version__ = "1.2.3"\n')
    changelog = tmp_path / "libs/fe-norm/CHANGELOG.md"
    changelog.write_text("# Changelog\n\n## Unreleased\n")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    assert release.tag_problems("fe-norm-v1.2.3") == [
        "fe-norm-v1.2.3: libs/fe-norm/CHANGELOG.md has no section 1.2.3",
    ]
    changelog.write_text("# Changelog\n\n## Unreleased\n\n## 1.2.3 (2030-01-01)\n")
    assert release.tag_problems("fe-norm-v1.2.3") == []
    assert release.tag_problems("fe-norm-v1.2.4") == ["fe-norm-v1.2.4: fe-norm has the version 1.2.3"]
    assert "a tag must be" in release.tag_problems("v1.2.3")[0]


@pytest.mark.parametrize("library", DOMAINS)
def test_readme_says_when_nothing_is_built(library: str) -> None:
    exported = set(importlib.import_module(library.replace("-", "_")).__all__) - {"__version__"}
    text = (ROOT / "libs" / library / "README.md").read_text(encoding="utf-8")
    assert ("No operation of this library is built yet" in text) == (not exported)


def _table(library: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / "libs" / library / "pyproject.toml").read_text(encoding="utf-8"))


def _workflow(name: str) -> str:
    return (ROOT / ".github/workflows" / name).read_text(encoding="utf-8")
