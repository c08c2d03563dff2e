"""What the ``fe`` command runs, checks, times and compiles of this library."""

from __future__ import annotations

from .workload_rope_qdq import ROPE_QDQ
from .workload_tail_rope import TAIL_ROPE
from .workload_vision import VISION_ROPE_BACKWARD

__all__ = ["ROPE_QDQ", "TAIL_ROPE", "VISION_ROPE_BACKWARD", "WORKLOADS"]

WORKLOADS = (TAIL_ROPE, ROPE_QDQ, VISION_ROPE_BACKWARD)
