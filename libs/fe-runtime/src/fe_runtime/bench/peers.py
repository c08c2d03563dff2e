"""Peers that any library can time its operations beside."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from .workload import Arrays, Case

__all__ = ["torch_compiled"]


def torch_compiled(plain: Callable[[Case, Arrays], Any]) -> Callable[[Case], Callable[[Arrays], Any]]:
    """Return the maker of a peer: the plain torch expression ``plain(case, arrays)`` under ``torch.compile``."""

    def make(case: Case) -> Callable[[Arrays], Any]:
        torch: Any = importlib.import_module("torch")
        torch.compiler.reset()  # else the eighth case of a run would not be compiled any more
        compiled = torch.compile(lambda arrays: plain(case, arrays), dynamic=False)
        return lambda arrays: compiled(dict(arrays))

    return make
