"""Type checkers and editors see what the public names are, although they load on first use."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import release

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = [library.replace("-", "_") for library in release.LIBRARIES]


@pytest.fixture(scope="module")
def revealed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The type of every public name, by ``package.name``, as a user's strict mypy sees it."""
    folder = tmp_path_factory.mktemp("types")
    names = [f"{package}.{name}" for package in PACKAGES for name in importlib.import_module(package).__all__]
    lines = [f"import {package}" for package in PACKAGES] + [f"reveal_type({name})" for name in names]
    (folder / "use.py").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "use.py"]
    path = ":".join(str(ROOT / "libs" / library / "src") for library in release.LIBRARIES)
    done = subprocess.run(command, cwd=folder, env={"MYPYPATH": path}, capture_output=True, text=True, check=False)
    shown = re.findall(r'use\.py:(\d+): note: Revealed type is "(.*)"', done.stdout)
    first = len(PACKAGES) + 1
    assert len(shown) == len(names), done.stdout
    return {names[int(line) - first]: text for line, text in shown}


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_have_types(package: str, revealed: dict[str, str]) -> None:
    vague = [
        name
        for name, text in revealed.items()
        if name.startswith(f"{package}.") and text.removeprefix("builtins.") in ("object", "Any")
    ]
    assert vague == []
