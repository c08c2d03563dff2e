"""Each library, built and installed alone with fe-runtime in a clean environment, does what its users expect."""

from __future__ import annotations

import ast
import importlib
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import release
import smoke
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
DOMAINS = [library for library in release.LIBRARIES if library != "fe-runtime"]
WITH_OPERATIONS = [library for library in DOMAINS if library.replace("-", "_") in smoke.OPERATIONS]

# Building and installing is slow where nothing is in uv's cache yet.
pytestmark = [pytest.mark.wheel, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive of every library."""
    folder = tmp_path_factory.mktemp("dist")
    _run("uv", "build", "--quiet", "--all-packages", "--out-dir", str(folder), cwd=ROOT)
    return folder


@pytest.mark.parametrize("library", release.LIBRARIES)
def test_archives_hold_what_a_release_needs(library: str, dist: Path) -> None:
    assert release.archive_problems(library, dist) == []


def test_archive_problems_are_found(dist: Path, tmp_path: Path) -> None:
    wheel = "fe_norm-0.1.0-py3-none-any.whl".replace("0.1.0", release.version("fe-norm"))
    with zipfile.ZipFile(dist / wheel) as good, zipfile.ZipFile(tmp_path / wheel, "w") as bad:
        for name in good.namelist():
            if not name.endswith("py.typed"):
                bad.writestr(name, good.read(name))
        bad.writestr("fe_norm/tests/test_x.py", "")
    source = wheel.replace("-py3-none-any.whl", ".tar.gz")
    assert release.archive_problems("fe-norm", tmp_path) == [f"{source} is missing"]
    (tmp_path / source).write_bytes((dist / source).read_bytes())
    assert release.archive_problems("fe-norm", tmp_path) == [
        f"{wheel} must not contain fe_norm/tests/test_x.py",
        f"{wheel} lacks fe_norm/py.typed",
    ]


@pytest.mark.parametrize("library", DOMAINS)
def test_alone_with_numpy_only(library: str, dist: Path, tmp_path: Path) -> None:
    python = _install(tmp_path, dist, library)
    listed = _run("uv", "pip", "list", "--quiet", "--format=json", "--python", str(python), cwd=tmp_path)
    installed = {entry["name"] for entry in json.loads(listed)}
    assert {name for name in installed if name.startswith("fe-")} == {library, "fe-runtime"}
    assert installed.isdisjoint({"torch", "jax", "triton", "matplotlib"})
    _smoke(python, library, "numpy", tmp_path)


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("library", WITH_OPERATIONS)
def test_alone_with_a_framework(library: str, framework: str, dist: Path, tmp_path: Path) -> None:
    python = _install(tmp_path, dist, library, extra=framework)
    _smoke(python, library, framework, tmp_path)


@pytest.mark.parametrize("library", DOMAINS)
def test_operations_are_tried(library: str) -> None:
    """A library that exports operations has a call in tools/smoke.py, so that the tests above mean something."""
    exported = set(importlib.import_module(library.replace("-", "_")).__all__) - {"__version__"}
    assert bool(exported) == (library in WITH_OPERATIONS)


@pytest.mark.parametrize("library", DOMAINS)
def test_declared_runtime_range_admits_this_runtime(library: str) -> None:
    declared = release.runtime_range(library)
    assert declared is not None, f"{library} declares no range fe-runtime>=X.Y,<X.Z"
    oldest, excluded = map(Version, declared)
    assert oldest <= Version(release.version("fe-runtime")) < excluded


@pytest.mark.parametrize("library", DOMAINS)
def test_oldest_allowed_runtime_has_every_name_that_is_used(library: str, dist: Path, tmp_path: Path) -> None:
    """A name that came with a newer runtime needs a higher floor in ``dependencies``."""
    wheel = _oldest_runtime(library, dist, tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "runtime")
    code = "\n".join(["import fe_runtime", "print(fe_runtime.__file__)", *sorted(_runtime_imports(library))])
    path = os.pathsep.join([str(tmp_path / "runtime"), str(ROOT / "libs" / library / "src")])
    printed = _run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=path)
    assert printed.startswith(str(tmp_path / "runtime"))
    command = [sys.executable, str(ROOT / "tools/smoke.py"), library.replace("-", "_"), "numpy"]
    _run(*command, cwd=tmp_path, PYTHONPATH=path)


def _oldest_runtime(library: str, dist: Path, folder: Path) -> Path:
    """The wheel of the oldest fe-runtime that a library allows, built from its tag unless it is this tree's."""
    declared = release.runtime_range(library)
    assert declared is not None
    current = release.version("fe-runtime")
    if Version(current) == Version(declared[0]):
        return dist / f"fe_runtime-{current}-py3-none-any.whl"
    oldest = declared[0] if declared[0].count(".") == 2 else f"{declared[0]}.0"
    command = ["git", "archive", f"fe-runtime-v{oldest}", "libs/fe-runtime"]
    packed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder / "tag", filter="data")
    _run("uv", "build", "--quiet", "--wheel", "--out-dir", str(folder), str(folder / "tag/libs/fe-runtime"), cwd=folder)
    return folder / f"fe_runtime-{oldest}-py3-none-any.whl"


def _runtime_imports(library: str) -> Iterator[str]:
    """One import statement for each name that a library takes from fe_runtime."""
    for path in (ROOT / "libs" / library / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "fe_runtime":
                yield from (f"from {node.module} import {alias.name}" for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from (f"import {a.name}" for a in node.names if a.name.split(".")[0] == "fe_runtime")


def _install(folder: Path, dist: Path, library: str, extra: str = "") -> Path:
    """Make an environment with one library and fe-runtime from their wheels; return its Python."""
    environment = folder / "environment"
    _run("uv", "venv", "--quiet", "--python", sys.executable, str(environment), cwd=folder)
    python = environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    wheels = []
    for name, extras in [(library, f"[{extra}]" if extra else ""), ("fe-runtime", "")]:
        wheel = dist / f"{name.replace('-', '_')}-{release.version(name)}-py3-none-any.whl"
        wheels.append(f"{name}{extras} @ {wheel.as_uri()}")
    _run("uv", "pip", "install", "--quiet", "--python", str(python), *wheels, cwd=folder)
    return python


def _smoke(python: Path, library: str, framework: str, folder: Path) -> None:
    printed = _run(str(python), str(ROOT / "tools/smoke.py"), library.replace("-", "_"), framework, cwd=folder)
    assert f"works with {framework}" in printed


def _run(*command: str, cwd: Path, **variables: str) -> str:
    env = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    done = subprocess.run(command, cwd=cwd, env=env | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout
