"""The committed lock pins everything, names no index, and is kept by uv as a set of preferences."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import lock
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PROJECTS = [ROOT / "pyproject.toml", *sorted(ROOT.glob("libs/*/pyproject.toml"))]

# What uv writes, shortened, and the neutral form of it. The address is not a real one.
WRITTEN = """version = 1

[manifest]
members = ["one"]

[[package]]
name = "one"
source = { editable = "libs/one" }
dependencies = [
    { name = "two", version = "2.0", source = { registry = "scheme://index.invalid/simple" }, marker = "x" },
]

[package.metadata]
requires-dist = [{ name = "two", specifier = ">=1" }]
provides-extras = ["x"]

[package.metadata.requires-dev]
dev = [
    { name = "two" },
]

[[package]]
name = "two"
version = "2.0"
source = { registry = "scheme://index.invalid/simple" }
sdist = { url = "scheme://files.invalid/two.tar.gz", hash = "sha256:0", size = 1 }
wheels = [
    { url = "scheme://files.invalid/two.whl", hash = "sha256:1", size = 1 },
]
"""
NEUTRAL = """version = 1

[manifest]
members = ["one"]

[[package]]
name = "one"
source = { editable = "libs/one" }
dependencies = [
    { name = "two", version = "2.0", source = { registry = "index" }, marker = "x" },
]

[[package]]
name = "two"
version = "2.0"
source = { registry = "index" }
"""


def test_committed_lock_is_neutral_and_complete() -> None:
    assert lock.problems(lock.committed()) == []


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_every_requirement_has_a_pin_that_satisfies_it(path: Path) -> None:
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    project = table["project"]
    groups = [project.get("dependencies", []), *project.get("optional-dependencies", {}).values()]
    groups += table.get("dependency-groups", {}).values()
    pins = lock.pins(lock.committed())
    unpinned = [
        entry
        for group in groups
        for entry in group
        if isinstance(entry, str) and not any(_satisfies(Requirement(entry), *pin) for pin in pins)
    ]
    assert unpinned == []


def test_neutral_form() -> None:
    assert lock.neutral(WRITTEN) == NEUTRAL
    assert lock.neutral(NEUTRAL) == NEUTRAL


def test_problems_name_what_is_wrong() -> None:
    assert lock.problems(NEUTRAL) == []
    assert any("scheme://files.invalid" in problem for problem in lock.problems(WRITTEN))
    without = NEUTRAL[: NEUTRAL.rindex("[[package]]")].rstrip() + "\n"
    assert lock.problems(without) == ["one needs two, which is not pinned"]


def test_uv_keeps_the_pins() -> None:
    """An older version than the newest allowed stays, and everything else stays with it."""
    text = lock.committed()
    older = re.sub(r'(name = "platformdirs"\nversion = )"[^"]+"', r'\1"4.3.6"', text)
    assert older != text
    resolved = lock.resolve(start=older)
    assert lock.pins(resolved) == lock.pins(older)
    assert lock.problems(lock.neutral(resolved)) == []


def _satisfies(requirement: Requirement, name: str, version: str) -> bool:
    own = version == ""  # a member of the workspace
    return name == requirement.name.lower().replace("_", "-") and (own or requirement.specifier.contains(version))
