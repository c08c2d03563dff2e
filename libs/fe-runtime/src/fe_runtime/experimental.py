"""Loggers, and the note that an API is experimental: once per name and process, through logging."""

from __future__ import annotations

import logging
import threading

from fe_runtime import env

__all__ = ["class_logger", "warn_experimental"]

_noted: set[str] = set()
_lock = threading.Lock()


def class_logger(class_name: str) -> logging.Logger:
    """Return the logger of an operation class, which has the class's name. No handlers are installed."""
    return logging.getLogger(class_name)


def warn_experimental(class_name: str) -> None:
    """Log once per process, at WARNING, that ``class_name`` is an experimental API.

    ``FE_SILENCE_EXPERIMENTAL=1`` or ``configure(silence_experimental=True)`` mutes it; a muted call does not count as
    the one time.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: runtime conventions, logging and environment report.
    """
    if class_name in _noted or env.silence_experimental():
        return
    with _lock:
        if class_name in _noted:
            return
        _noted.add(class_name)
    class_logger(class_name).warning("%s is an experimental API", class_name)


def _reset_experimental_api_warning_registry() -> None:
    """Forget which names were noted (for tests)."""
    with _lock:
        _noted.clear()
