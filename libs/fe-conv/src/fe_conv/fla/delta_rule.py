"""The replacements of ``chunk_gated_delta_rule`` and ``chunk_kda``: no native kernel yet, so the originals serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .routes import GATED_DELTA_RULE, KDA, routed
from .tracing import hidden_from_compiler

__all__ = ["gated_delta_rule", "kda"]

Function = Callable[..., Any]


def gated_delta_rule(original: Function, _holder: Any) -> Function:
    """Return the replacement of ``chunk_gated_delta_rule``; it declines every call as ``"unsupported-op"``."""
    return hidden_from_compiler(routed(original, GATED_DELTA_RULE, _decline), original)


def kda(original: Function, _holder: Any) -> Function:
    """Return the replacement of ``chunk_kda``; it declines every call as ``"unsupported-op"``."""
    return hidden_from_compiler(routed(original, KDA, _decline), original)


def _decline(*_arguments: Any, **_keywords: Any) -> str:
    return "unsupported-op"
