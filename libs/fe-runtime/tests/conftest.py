"""The operation that the tests of the centre share (``support``), stand-ins for a GPU and for compiled kernels, and the
library that the benchmark's and the command's tests find."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SUPPORT = str(Path(__file__).parent / "support")

if SUPPORT not in sys.path:
    sys.path.append(SUPPORT)


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A :class:`fe_dummy.StandInLoader` in the place of ``fe_runtime.compile.cache.load``."""
    from fe_dummy import StandInLoader

    from fe_runtime.compile import cache

    stand_in = StandInLoader()
    monkeypatch.setattr(cache, "load", stand_in)
    return stand_in


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch, loader: Any) -> Iterator[Any]:
    """Every array counts as one on a Hopper GPU; returns the stand-in loader."""
    import torch
    from fe_dummy import OPERATION, OnPretendedGpu

    from fe_runtime.operation import Operation

    pretend = OnPretendedGpu(Operation.plan)
    monkeypatch.setattr(Operation, "plan", lambda self, *rest, **named: pretend(self, *rest, **named))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _tensor: True))
    OPERATION._prepared.clear()
    yield loader
    OPERATION._prepared.clear()


@pytest.fixture
def fallback_not_yet_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fallback was warned of in this process, and ``FE_STRICT`` is not set."""
    from fe_runtime import plan

    monkeypatch.setattr(plan, "_warned", set())
    monkeypatch.delenv("FE_STRICT", raising=False)


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The workload of ``fe_example``, a library that is importable, not installed, and the only one that is found."""
    from fe_runtime.bench import discover

    monkeypatch.syspath_prepend(str(Path(__file__).parent / "bench"))
    monkeypatch.setattr(discover, "_entry_points", lambda: iter(()))
    monkeypatch.setattr(discover, "_on_the_path", lambda: [("fe_example", "fe_example.workloads:WORKLOADS")])
    yield importlib.import_module("fe_example.workloads").SCALE
    for name in [name for name in sys.modules if name.partition(".")[0] == "fe_example"]:
        del sys.modules[name]
