"""The operation that the tests of the centre share (``support``), and stand-ins for a GPU and for compiled kernels."""

from __future__ import annotations

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
