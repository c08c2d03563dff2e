"""Temporary files of this package, and removal of what processes that died left of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["private_file", "remove_leftovers", "temporary_folder"]

_PREFIX = "fe-compile-"
_DAY = 86400.0
_swept: set[tuple[Path, str]] = set()


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder in the system's temporary folder, for as long as the block lasts."""
    remove_leftovers(Path(tempfile.gettempdir()), f"{_PREFIX}*")
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder:
        yield Path(folder)


@contextlib.contextmanager
def private_file(data: bytes, suffix: str, folder: Path) -> Iterator[Path]:
    """Write a file with a fresh name that only this user can read, for as long as the block lasts."""
    handle, name = tempfile.mkstemp(suffix, _PREFIX, folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        yield Path(name)
    finally:
        os.unlink(name)


def remove_leftovers(folder: Path, pattern: str) -> None:
    """Remove what matches and is older than a day, when nobody is still writing it; once per process and folder."""
    if (folder, pattern) in _swept:
        return
    _swept.add((folder, pattern))
    with contextlib.suppress(OSError):
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):
                if time.time() - path.lstat().st_mtime < _DAY:
                    continue
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()
