"""The peer's name for the choice of a backend."""

from __future__ import annotations

__all__ = ["resolved"]


def resolved(backend: str) -> str:
    """Return the runtime's name of a backend: the peer's only one, ``"frost"``, means ``"auto"``."""
    return "auto" if isinstance(backend, str) and backend == "frost" else backend
