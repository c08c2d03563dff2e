"""Every example runs on a machine without a GPU, in less than two minutes, and ends with status 0."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert [path.name for path in EXAMPLES] == ["gated_mlp.py"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_on_the_cpu(path: Path) -> None:
    _run(path, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_on_a_gpu(path: Path) -> None:
    _run(path, "cuda")


def _run(path: Path, device: str) -> None:
    command = [sys.executable, str(path), "--device", device]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
