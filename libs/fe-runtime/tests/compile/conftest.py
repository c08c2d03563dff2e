"""What every test of the compiled-kernel cache needs: an empty cache and the builders on the search path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fe_runtime import compile as kernels
from fe_runtime.compile import store, toolchain


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache on disk and in memory; ``kernels_for_tests`` can be imported."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FE_CACHE_DIR", str(folder))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # for processes that are killed and cannot tidy up
    for name in ("FE_NO_JIT", "FE_CACHE_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    kernels.cache_clear()
    toolchain.current.cache_clear()
    store._warned.clear()
    yield folder
    kernels.cache_clear()
    toolchain.current.cache_clear()


@pytest.fixture
def outside() -> dict[str, str]:
    """Environment of a fresh interpreter that sees the builders of these tests."""
    return {"PYTHONPATH": str(Path(__file__).parent)}
