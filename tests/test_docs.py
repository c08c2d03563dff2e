"""The pages in docs/ say what the contracts say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import docs
from fe_runtime.bench.discover import find_workloads

ROOT = Path(__file__).resolve().parents[1]


def test_pages_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "tools/docs.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_a_stale_page_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs, "DOCS", tmp_path)
    (tmp_path / "gone.md").write_text("an operation that no longer exists")
    monkeypatch.setattr(sys, "argv", ["docs.py", "--check"])
    assert docs.main() == 1
    monkeypatch.setattr(sys, "argv", ["docs.py"])
    assert docs.main() == 0
    public = {f"{workload.name}.md" for workload in find_workloads().workloads if workload.is_public}
    assert {path.name for path in tmp_path.iterdir()} == public
    assert "causal_conv1d.md" in public
    assert "causal_conv1d_backward.md" not in public
