"""The exceptions every operation raises, and the one sentence each of them says.

A message names the operation, the argument, the rule, what was given and the fix::

    rms_norm: w_tensor must have shape (C,) = (4096,); got (4095,). Pass None to skip the scaling.

Each class also derives from the builtin that users of the peer library catch.
"""

from __future__ import annotations

__all__ = [
    "DeterminismError",
    "DtypeError",
    "FallbackWarning",
    "FeDeprecationWarning",
    "InvalidArgumentError",
    "NotCompiledError",
    "NotSupportedError",
    "explain",
    "renamed",
]


class InvalidArgumentError(ValueError):
    """A shape, stride, dtype, value, device, alias or presence that breaks the contract."""


class DtypeError(TypeError):
    """A dtype mismatch, where an operation's contract promises ``TypeError`` for it."""


class NotSupportedError(NotImplementedError):
    """A meaningful request that this build, device or backend does not serve.

    ``reason`` is the constraint that failed. For architectures, ``found`` and ``supported`` hold
    compute capabilities such as ``(8, 0)``.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        found: tuple[int, int] | None = None,
        supported: tuple[tuple[int, int], ...] = (),
    ) -> None:
        super().__init__(message)
        self.reason = reason or message
        self.found = found
        self.supported = supported


class NotCompiledError(RuntimeError, ValueError):
    """A kernel is needed now but was not compiled before, and compiling here is not allowed."""


class DeterminismError(RuntimeError):
    """The framework demands deterministic algorithms and this operation has none for the problem."""


class FallbackWarning(UserWarning):
    """A CUDA problem runs the reference because no kernel serves it. ``FE_STRICT=1`` makes it an error."""


class FeDeprecationWarning(FutureWarning):
    """A name or option of an fe library that a later release removes."""


def explain(operation: str, argument: str, rule: str, given: object, fix: str = "") -> str:
    """Return the library's one error sentence: operation, argument, rule, what was given, the fix.

    Parameters
    ----------
    operation, argument
        Names as the user wrote them.
    rule
        Completes "<argument> must ...", for example ``"have shape (C,) = (4096,)"``.
    given
        What was found.
    fix
        A sentence that tells what to do; may be empty.

    Examples
    --------
    >>> explain("rms_norm", "eps", "be a finite number >= 0", -1.0, "Use eps=1e-5.")
    'rms_norm: eps must be a finite number >= 0; got -1.0. Use eps=1e-5.'
    """
    sentence = f"{operation}: {argument} must {rule}; got {given}."
    return f"{sentence} {fix}" if fix else sentence


def renamed(error: TypeError | ValueError, operation: str) -> TypeError | ValueError:
    """Return a helper's error (from :func:`explain`) as the error of the operation that the user called."""
    _, _, text = str(error).partition(": ")
    return type(error)(f"{operation}: {text}")
