"""Which tests run where, and the recorded run. Each test here runs pytest in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fe_runtime._version import __version__
from fe_runtime.testing import record

SUITE = """
import pytest

@pytest.mark.gpu
def test_on_gpu():
    pass

@pytest.mark.gpu
def test_failing():
    assert 1 == 2, "numbers differ"

@pytest.mark.gpu
def test_skipping():
    pytest.skip("no reason")

@pytest.mark.gpu(exclusive=True)
def test_alone(broken):
    pass

@pytest.fixture
def broken():
    raise OSError("no disk")

@pytest.mark.compile
def test_compiling():
    pass

def test_anywhere():
    pass
"""

CONFIGURATION = """
[pytest]
addopts = --strict-markers
markers =
    gpu: needs a GPU
    compile: slow
"""

FAKE_GPU = """
pytest_plugins = ("fe_runtime.testing.plugin",)

from fe_runtime.testing import plugin

plugin.cuda_is_available = lambda: True
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text(CONFIGURATION)
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "conftest.py").write_text('pytest_plugins = ("fe_runtime.testing.plugin",)\n')
    return tmp_path


def run(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False).stdout


def test_without_a_gpu_its_tests_are_skipped_visibly(suite: Path) -> None:
    text = run(suite)
    assert "1 passed, 4 skipped, 1 deselected" in text
    assert "SKIPPED [4]" in text or text.count("needs a CUDA GPU") >= 1
    assert "gpu: none" in text


def test_compile_tests_run_when_asked_for(suite: Path) -> None:
    assert "1 passed, 5 deselected" in run(suite, "-m", "compile")
    assert "1 passed, 5 deselected" in run(suite, "-m", "not gpu")


def test_the_record_of_a_run(suite: Path) -> None:
    (suite / "conftest.py").write_text(FAKE_GPU)
    text = run(suite, "--gpu-report", "out/gpu.json", "--gpu-report-commit", "abc1234-dirty")
    assert "recorded 4 gpu tests in out/gpu.json" in text
    found: dict[str, Any] = json.loads((suite / "out" / "gpu.json").read_text())
    assert (found["commit"], found["dirty"]) == ("abc1234", True)
    assert found["counts"] == {"passed": 1, "failed": 2, "skipped": 1}
    assert found["versions"]["python"] == sys.version.split()[0]
    assert found["versions"]["fe-runtime"] == __version__
    assert {"numpy", "torch", "jax"} <= set(found["versions"])
    assert set(found) == {"commit", "dirty", "date", "versions", "gpus", "driver", "counts", "tests"}
    tests = found["tests"]
    assert {name.partition("::")[2]: test["outcome"] for name, test in tests.items()} == {
        "test_on_gpu": "passed",
        "test_failing": "failed",
        "test_skipping": "skipped",
        "test_alone": "failed",
    }
    assert all(test["seconds"] >= 0 for test in tests.values())
    assert "numbers differ" in tests["test_suite.py::test_failing"]["error"]
    assert tests["test_suite.py::test_skipping"]["reason"] == "Skipped: no reason"
    assert "no disk" in tests["test_suite.py::test_alone"]["error"]


def test_the_commit_of_a_repository(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert record.describe_run(tmp_path)["commit"] is None
    git("init", "-q")
    (tmp_path / "file").write_text("a")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    run_of = record.describe_run(tmp_path)
    assert (run_of["commit"], run_of["dirty"]) == (git("rev-parse", "HEAD"), False)
    (tmp_path / "file").write_text("b")
    assert record.describe_run(tmp_path)["dirty"] is True
    assert record.describe_run(tmp_path, "v1-2-gabc")["commit"] == "v1-2-gabc"


@pytest.mark.gpu
def test_the_record_names_the_gpu() -> None:
    found = record.describe_run(Path.cwd())
    assert found["gpus"]
    assert found["driver"]


def test_hypothesis_has_no_deadline() -> None:
    from hypothesis import settings

    assert settings.default is not None
    assert settings.default.deadline is None
