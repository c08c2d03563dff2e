"""What must hold of the installed flash-linear-attention package before its module functions are replaced.

Their replacements rely on more than a signature, so they are made for known releases and look at what they find.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from typing import Any

__all__ = ["gated_mlp", "installed_version", "is_known_version", "short_conv"]

OLDEST, TOO_NEW = (0, 5, 2), (0, 7)
DISTRIBUTIONS = ("flash-linear-attention", "fla-core")


def installed_version() -> str | None:
    """Return the version of the installed package, or of its core alone."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def is_known_version() -> bool:
    """Whether the replacements of module functions were made for the installed version."""
    version = installed_version()
    if version is None:
        return False
    release = tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
    return OLDEST <= release < TOO_NEW


def gated_mlp(module: Any) -> None:
    """Raise ``ImportError`` unless ``GatedMLP.forward`` is the package's own."""
    _check_version()
    kind = module.GatedMLP
    forward = vars(kind).get("forward")
    _check(kind.__module__ == module.__name__, "GatedMLP is not defined there")
    is_own = getattr(forward, "__module__", None) == module.__name__
    _check(is_own and getattr(forward, "__qualname__", "") == "GatedMLP.forward", "GatedMLP.forward is not its own")
    _check(not hasattr(forward, "__wrapped__"), "GatedMLP.forward is wrapped already")
    _check(isinstance(getattr(module, "SwiGLULinear", None), type), "it has no class SwiGLULinear")


def short_conv(module: Any) -> None:
    """Raise ``ImportError`` unless ``causal_conv1d_update`` is the package's own, hidden from torch's compiler."""
    _check_version()
    name = "causal_conv1d_update"
    function = getattr(module, name)
    home = sys.modules.get(getattr(function, "__module__", ""))  # the path that we know may be an alias
    _check(
        getattr(function, "__name__", "") == name and home is module and vars(module).get(name) is function,
        f"{name} is not defined there",
    )
    _check(
        getattr(function, "_torchdynamo_disable", False),
        f"{name} is not hidden from torch.compile (FLA_DISABLE_BACKEND_DISPATCH=1 does that)",
    )


def _check_version() -> None:
    found = installed_version() or "no version"
    _check(is_known_version(), f"it is made for flash-linear-attention >= 0.5.2, < 0.7; {found} is installed")


def _check(holds: bool, reason: str) -> None:
    if not holds:
        raise ImportError(reason)
