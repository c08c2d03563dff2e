"""Where in the user's code a warning should point."""

from __future__ import annotations

import sys

__all__ = ["user_stacklevel"]


def user_stacklevel() -> int:
    """Return the ``stacklevel`` with which the caller's ``warnings.warn`` names the first frame outside our libraries.

    Frames of torch and jax between an operation and its caller (dispatcher, tracing) are passed over too.
    """
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(str(frame.f_globals.get("__name__", ""))):
        frame = frame.f_back
        level += 1
    return level


def _is_ours(module: str) -> bool:
    root = module.partition(".")[0]
    return root.startswith("fe_") or root in ("torch", "jax", "jaxlib")
