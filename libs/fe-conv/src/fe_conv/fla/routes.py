"""Which way the last call of each replaced function went, for diagnosis and tests.

A route is ``None`` before any call, ``"native"``, ``"fallback:<reason>"`` or ``"error:<ExceptionName>"``. The records
are of the process, not of a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

__all__ = [
    "GATED_DELTA_RULE",
    "GATED_MLP",
    "KDA",
    "SHORT_CONV",
    "Route",
    "kda_last_path",
    "last_path",
    "mlp_last_path",
    "routed",
    "short_conv_last_path",
]

DECLINES = (NotImplementedError, ImportError)
"""What the native operation raises to say that it does not serve a call, or is not installed."""

Decision = str | Callable[[], Any]
"""The reason for the original function, or the native call."""


class Route:
    """The route of a function's last call."""

    def __init__(self) -> None:
        self.last: str | None = None

    def native(self) -> None:
        """Record that the call was served natively."""
        self.last = "native"

    def fallback(self, reason: str) -> None:
        """Record that the original served the call, and why."""
        self.last = f"fallback:{reason}"

    def error(self, error: BaseException) -> None:
        """Record what the native call raised."""
        self.last = f"error:{type(error).__name__}"


GATED_DELTA_RULE, KDA, GATED_MLP, SHORT_CONV = Route(), Route(), Route(), Route()


def last_path() -> str | None:
    """Return the route of the last call of ``chunk_gated_delta_rule``."""
    return GATED_DELTA_RULE.last


def kda_last_path() -> str | None:
    """Return the route of the last call of ``chunk_kda``."""
    return KDA.last


def mlp_last_path() -> str | None:
    """Return the route of the last call of ``GatedMLP.forward``."""
    return GATED_MLP.last


def short_conv_last_path() -> str | None:
    """Return the route of the last call of ``causal_conv1d_update``."""
    return SHORT_CONV.last


def routed(
    original: Callable[..., Any],
    route: Route,
    decide: Callable[..., Decision],
    errors: type[Exception] | tuple[type[Exception], ...] = Exception,
) -> Callable[..., Any]:
    """Return a function that serves a call natively or by ``original``, as ``decide`` says, and records the route.

    Parameters
    ----------
    original
        Gets exactly the caller's arguments. The result carries its name and documentation, and ``__wrapped__``.
    route
        Where to record.
    decide
        Gets the caller's arguments; returns the reason for ``original``, or the native call. It raises ``TypeError``
        for arguments that do not fit, which ``original`` shall reject itself.
    errors
        Exceptions of the native call that are recorded before they reach the caller. Any other leaves the route
        ``"native"``: activation checkpointing stops a call by an exception of its own.
    """

    # Without ``updated``: the attributes of the original would tell the compiler to look through this function.
    @wraps(original, updated=())
    def function(*arguments: Any, **keywords: Any) -> Any:
        try:
            decision = decide(*arguments, **keywords)
        except TypeError:
            decision = "arguments"
        if isinstance(decision, str):
            route.fallback(decision)
            return original(*arguments, **keywords)
        route.native()
        try:
            return decision()
        except DECLINES as declined:
            route.fallback(type(declined).__name__)
        except errors as error:
            route.error(error)
            raise
        return original(*arguments, **keywords)

    return function
