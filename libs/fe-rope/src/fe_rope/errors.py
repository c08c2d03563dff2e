"""The exception for a layout that no kernel reads."""

from __future__ import annotations

from fe_runtime.errors import InvalidArgumentError, NotSupportedError

__all__ = ["LayoutError"]


class LayoutError(NotSupportedError, InvalidArgumentError):
    """Strides that an operation does not take.

    The peer says ``NotImplementedError`` when an operation is declared and ``ValueError`` when it runs: it is both.
    """
