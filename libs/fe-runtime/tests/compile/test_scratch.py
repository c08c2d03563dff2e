"""Temporary files go away, also those of processes that died."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from fe_runtime.compile import scratch


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_swept", set())


def make_old(path: Path) -> None:
    os.utime(path, (time.time() - 90_000,) * 2, follow_symlinks=False)


def test_old_leftovers_go_and_young_ones_stay(tmp_path: Path) -> None:
    for name in ("fe-old", "fe-young", "other-old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernel.o").write_bytes(b"half")
    (tmp_path / "fe-file").touch()
    (tmp_path / "target").mkdir()
    (tmp_path / "fe-link").symlink_to(tmp_path / "target")
    for name in ("fe-old", "other-old", "fe-file", "fe-link", "target"):
        make_old(tmp_path / name)
    scratch.remove_leftovers(tmp_path, "fe-*")
    assert {path.name for path in tmp_path.iterdir()} == {"fe-young", "other-old", "target"}


def test_once_per_process(tmp_path: Path) -> None:
    scratch.remove_leftovers(tmp_path, "*")
    (tmp_path / "old").mkdir()
    make_old(tmp_path / "old")
    scratch.remove_leftovers(tmp_path, "*")
    assert (tmp_path / "old").exists()


def test_a_folder_that_does_not_exist_or_is_a_file(tmp_path: Path) -> None:
    scratch.remove_leftovers(tmp_path / "nothing", "*")
    (tmp_path / "file").touch()
    scratch.remove_leftovers(tmp_path / "file" / "folder", "*")


def test_private_file(tmp_path: Path) -> None:
    with scratch.private_file(b"bytes", ".so", tmp_path) as path:
        assert path.read_bytes() == b"bytes"
        assert path.stat().st_mode & 0o077 == 0
    assert not list(tmp_path.iterdir())
