"""From the verified bytes of an entry to a callable, without the kernel compiler.

The bytes are written to a file of our own with a fresh name, loaded, and the file is removed. Loading the cache's own
file would leave a moment in which another process could replace it after the check, and the dynamic loader would
take a second library of the same name for the first.

A loaded library stays loaded: launches may be in flight, and captured graphs refer to its kernels. Loading the same
bytes again returns the same function.
"""

from __future__ import annotations

import ctypes
import importlib
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .link import link
from .scratch import private_file
from .store import FUNCTION, LIBRARY, OBJECT, Entry
from .toolchain import INSTALL, ToolchainError, current

__all__ = ["load_entry"]


def load_entry(entry: Entry, scratch: Sequence[Path]) -> Callable[..., Any]:
    """Return the compiled function of an entry.

    Parameters
    ----------
    entry
        Verified bytes.
    scratch
        Folders to use when the system's temporary folder does not allow executable files.

    Raises
    ------
    ToolchainError
        The FFI or the runtime library is missing.
    RuntimeError
        The library does not load, for example because the runtime library lacks a symbol.
    """
    identity = entry.meta["files"][OBJECT]
    with _lock:
        if identity not in _functions:
            _functions[identity] = _load(entry, scratch)
        return _functions[identity]


_lock = threading.Lock()
_functions: dict[str, Callable[..., Any]] = {}
_kept: list[Any] = []
"""Modules and runtime libraries that must never be unloaded."""


def _load(entry: Entry, scratch: Sequence[Path]) -> Callable[..., Any]:
    tvm_ffi = _import_tvm_ffi()
    _load_runtime_library()
    library = entry.files.get(LIBRARY) or link(entry.files[OBJECT])
    if library is None:
        return _load_object(entry)
    failures = []
    for folder in (Path(tempfile.gettempdir()), *scratch):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with private_file(library, ".so", folder) as path:
                function: Callable[..., Any] = tvm_ffi.load_module(str(path))[FUNCTION]
                return function
        except (OSError, RuntimeError) as error:
            failures.append(error)
    raise failures[0]


def _load_object(entry: Entry) -> Callable[..., Any]:
    """Load an entry without a linker: the compiler can read the object file as it is."""
    from . import build

    with private_file(entry.files[OBJECT], ".o", Path(tempfile.gettempdir())) as path:
        module = build.load_object(path)
    _kept.append(module)
    function: Callable[..., Any] = module[FUNCTION]
    return function


def _import_tvm_ffi() -> Any:
    try:
        return importlib.import_module("tvm_ffi")
    except ImportError as error:
        raise ToolchainError(
            f"apache-tvm-ffi, which loads kernels, does not import: {error}. Run: {INSTALL}"
        ) from error


def _load_runtime_library() -> None:
    """Make the symbols of the compiler's runtime library visible to the libraries that are loaded after it."""
    if _runtime_loaded.is_set():
        return
    path = current().runtime_library
    if path is None:
        raise ToolchainError(f"libcute_dsl_runtime.so of nvidia-cutlass-dsl was not found. Run: {INSTALL}")
    _kept.append(ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL))
    _runtime_loaded.set()


_runtime_loaded = threading.Event()
