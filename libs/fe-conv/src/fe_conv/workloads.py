"""What the ``fe`` command runs, checks, times and compiles of this library."""

from __future__ import annotations

from .workload_sequence import CAUSAL_CONV1D, CAUSAL_CONV1D_BACKWARD
from .workload_update import CAUSAL_CONV1D_UPDATE

__all__ = ["CAUSAL_CONV1D", "CAUSAL_CONV1D_BACKWARD", "CAUSAL_CONV1D_UPDATE", "WORKLOADS"]

WORKLOADS = (CAUSAL_CONV1D, CAUSAL_CONV1D_BACKWARD, CAUSAL_CONV1D_UPDATE)
