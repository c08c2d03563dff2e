"""What the ``fe`` command runs, checks, times and compiles of this library."""

from __future__ import annotations

from typing import Any

from .csa import CSA_COMPRESSOR, CSA_COMPRESSOR_BACKWARD
from .engram import ENGRAM_GATE, ENGRAM_GATE_BACKWARD
from .lmsd import HSTU_LMSD_BACKWARD, HSTU_LMSD_FORWARD

__all__ = [
    "CSA_COMPRESSOR",
    "CSA_COMPRESSOR_BACKWARD",
    "ENGRAM_GATE",
    "ENGRAM_GATE_BACKWARD",
    "HSTU_LMSD_BACKWARD",
    "HSTU_LMSD_FORWARD",
    "WORKLOADS",
]

WORKLOADS: tuple[Any, ...] = (
    HSTU_LMSD_FORWARD,
    HSTU_LMSD_BACKWARD,
    ENGRAM_GATE,
    ENGRAM_GATE_BACKWARD,
    CSA_COMPRESSOR,
    CSA_COMPRESSOR_BACKWARD,
)
