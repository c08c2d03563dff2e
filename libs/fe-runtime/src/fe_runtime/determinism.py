"""Whether an operation must take its deterministic path: the per-call keyword and torch's global switch.

An operation is non-deterministic when floating-point results of several thread blocks meet in atomics.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

from fe_runtime._callers import user_stacklevel
from fe_runtime.errors import DeterminismError, NotSupportedError, explain

__all__ = ["resolve"]


def resolve(
    operation: str,
    deterministic: bool | None,
    *,
    has_path: bool,
    default: bool | None = None,
    framework: str = "torch",
    output: str = "the result",
    reason: str = "it is accumulated with atomics",
) -> bool:
    """Return whether to take the deterministic path.

    Parameters
    ----------
    operation
        Name for error texts.
    deterministic
        The caller's keyword: True demands, False declines, None leaves it to torch's switch.
    has_path
        Whether the operation has a deterministic path for this problem.
    default
        The keyword's default in the operation's signature. Where it is False, a False cannot be told from
        "not given" and torch's switch decides.
    framework
        Framework of the operands; only torch has a global switch.
    output, reason
        Which output is not deterministic, and why, for error texts.

    Raises
    ------
    NotSupportedError
        ``deterministic=True`` without a path.
    DeterminismError
        torch demands determinism, the caller left the choice open, and there is no path.
    TypeError
        ``deterministic`` is neither a bool nor None.

    Warns
    -----
    RuntimeWarning
        As for ``DeterminismError``, when torch was told to warn only.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: runtime conventions, determinism.
    """
    if deterministic is not None and not isinstance(deterministic, bool):
        raise TypeError(explain(operation, "deterministic", "be True, False or None", repr(deterministic)))
    if deterministic:
        if not has_path:
            because = f"{output} has no deterministic path for this problem: {reason}"
            rule = "be None or False"
            raise NotSupportedError(explain(operation, "deterministic", rule, True, f"{because}."), reason=because)
        return True
    declined = deterministic is False and default is not False
    if declined or framework != "torch":
        return False
    demanded, warn_only = _torch_switch()
    if not demanded or has_path:
        return demanded
    text = f"{operation}: {output} is not deterministic ({reason}) while torch.use_deterministic_algorithms is on."
    if not warn_only:
        raise DeterminismError(f"{text} Turn the switch off, use warn_only=True, or {_opt_out(default)}.")
    warnings.warn(text, RuntimeWarning, stacklevel=user_stacklevel())
    return False


def _torch_switch() -> tuple[bool, bool]:
    """Return whether torch demands deterministic algorithms, and whether it only warns."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.are_deterministic_algorithms_enabled():
        return False, False
    return True, torch.is_deterministic_algorithms_warn_only_enabled()


def _opt_out(default: bool | None) -> str:
    return "pass deterministic=False" if default is not False else "choose another operation"
