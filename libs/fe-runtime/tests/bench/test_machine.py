from __future__ import annotations

import json
import platform
import shutil
import subprocess
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from fe_runtime._version import __version__
from fe_runtime.bench import machine

GIT = shutil.which("git")


def test_a_record_names_neither_host_nor_folder() -> None:
    text = json.dumps(machine.machine_record())
    assert platform.node() not in text
    assert str(Path.home()) not in text
    assert set(machine.machine_record()) == {"cpu", "cores", "system", "python"}


def test_versions_include_our_own_also_without_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise machine.importlib.metadata.PackageNotFoundError(name)

    assert machine.versions()["fe-runtime"] == __version__
    monkeypatch.setattr(machine.importlib.metadata, "version", absent)
    assert machine.versions(("fe-unknown",)) == {"fe-runtime": __version__}


@pytest.mark.skipif(GIT is None, reason="needs git")
def test_the_commit_says_if_the_tree_was_changed(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            [str(GIT), *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert machine.commit_record(tmp_path) is None
    git("init")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "first")
    assert machine.commit_record(tmp_path) == {"id": git("rev-parse", "HEAD"), "changed": False}
    (tmp_path / "file").write_text("two")
    assert machine.commit_record(tmp_path) == {"id": git("rev-parse", "HEAD"), "changed": True}


def test_the_gpu_is_read_from_the_management_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "NVIDIA H200, 580.1, 1980, 1980, 3201, 512.3, 700.00, 143771"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = machine.gpu_record()
    assert found is not None
    assert found["name"] == "NVIDIA H200"
    assert found["sm_clock_mhz"] == 1980
    assert found["power_draw_w"] == 512.3


def test_a_machine_without_the_tool_has_no_gpu_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.gpu_record() is None


def test_the_date_is_utc_to_the_second() -> None:
    assert datetime.fromisoformat(machine.today()).utcoffset().total_seconds() == 0  # type: ignore[union-attr]


def test_a_record_says_what_ran_where() -> None:
    record = machine.run_record("a race", "abc1234", ("numpy",))
    assert record["benchmark"] == "a race"
    assert record["commit"] == {"id": "abc1234"}
    assert record["machine"] == machine.machine_record()
    assert record["versions"]["numpy"] == np.__version__
    assert machine.run_record("a race", None, ())["commit"] == machine.commit_record()
