"""Every environment variable of the fe libraries, read when used, each with a twin in the API.

| variable | meaning | twin |
|---|---|---|
| ``FE_STRICT`` | a missing kernel raises instead of running the reference | ``fe_runtime.configure(strict=True)`` |
| ``FE_CACHE_DIR`` | folder of the on-disk kernel cache | ``configure(cache_dir=...)`` |
| ``FE_CACHE_SIZE`` | compiled kernels kept in memory per operation (default 256) | ``configure(cache_size=...)`` |
| ``FE_NO_JIT`` | never compile at run time | ``configure(no_jit=True)`` |
| ``FE_CHECK_DEVICE_VALUES`` | check offsets, indices, positions on the host | ``configure(check_device_values=True)`` |
| ``FE_SILENCE_EXPERIMENTAL`` | mute the experimental-API warning | ``configure(silence_experimental=True)`` |

A value set through :func:`configure` wins over the environment until it is set back to ``None``.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = [
    "DEFAULT_CACHE_SIZE",
    "cache_dir",
    "cache_size",
    "check_device_values",
    "configure",
    "no_jit",
    "silence_experimental",
    "strict",
    "switch",
    "text",
]

DEFAULT_CACHE_SIZE = 256

_FLAGS = ("strict", "no_jit", "check_device_values", "silence_experimental")
_NAMES = (*_FLAGS, "cache_dir", "cache_size")
_overrides: dict[str, object] = {}


def configure(**settings: object) -> None:
    """Set options for this process; ``None`` hands an option back to its environment variable.

    Parameters
    ----------
    **settings
        ``strict``, ``no_jit``, ``check_device_values``, ``silence_experimental`` (bool),
        ``cache_dir`` (path), ``cache_size`` (int >= 1, entries per operation).

    Raises
    ------
    TypeError
        An unknown option, or a value of the wrong kind; nothing is set then.
    ValueError
        ``cache_size`` below 1.
    """
    unknown = sorted(set(settings) - set(_NAMES))
    if unknown:
        raise TypeError(f"configure: unknown option {unknown[0]!r}; the options are {', '.join(sorted(_NAMES))}")
    for name, value in settings.items():
        _check(name, value)
    for name, value in settings.items():
        if value is None:
            _overrides.pop(name, None)
        else:
            _overrides[name] = value


def strict() -> bool:
    """Whether a CUDA problem without a kernel raises instead of running the reference."""
    return _flag("strict")


def no_jit() -> bool:
    """Whether compiling at run time is forbidden."""
    return _flag("no_jit")


def check_device_values() -> bool:
    """Whether offsets, indices and positions are checked on the host (blocking)."""
    return _flag("check_device_values")


def silence_experimental() -> bool:
    """Whether the experimental-API warning is muted."""
    return _flag("silence_experimental")


def switch(name: str) -> bool:
    """Whether a variable of another library that ours honours is set to something other than off."""
    return _is_on(os.environ.get(name, ""))


def text(name: str) -> str:
    """Return the value of a variable of another library that ours honours, ``""`` where it is not set."""
    return os.environ.get(name, "").strip()


def cache_size() -> int:
    """Compiled kernels kept in memory per operation, at least 1."""
    value = _overrides.get("cache_size", os.environ.get("FE_CACHE_SIZE", DEFAULT_CACHE_SIZE))
    try:
        return max(1, int(str(value)))
    except ValueError:
        return DEFAULT_CACHE_SIZE


def cache_dir() -> Path:
    """Folder of the on-disk kernel cache (it need not exist)."""
    value = _overrides.get("cache_dir") or os.environ.get("FE_CACHE_DIR")
    if value:
        return Path(str(value)).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("fe", appauthor=False))


def _check(name: str, value: object) -> None:
    kinds, words = _KINDS.get(name, ((bool,), "a bool"))
    if value is None:
        return
    if not isinstance(value, kinds) or (name == "cache_size" and isinstance(value, bool)):
        raise TypeError(f"configure: {name} must be {words} or None; got {type(value).__name__} {value!r}")
    if name == "cache_size" and isinstance(value, int) and value < 1:
        raise ValueError(f"configure: cache_size must be at least 1; got {value}")


_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "cache_dir": ((str, os.PathLike), "a path"),
    "cache_size": ((int,), "an int"),
}


def _flag(name: str) -> bool:
    if name in _overrides:
        return bool(_overrides[name])
    return _is_on(os.environ.get("FE_" + name.upper(), ""))


def _is_on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off")
