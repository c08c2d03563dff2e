"""Compiled kernels on disk: written whole or not at all, verified before use.

::

    <cache_dir>/v1/<arch>/<operation>/<key>/<toolchain>/   meta.json  kernel.o  kernel.so
    <cache_dir>/v1/<arch>/<operation>/<key>/<toolchain>.lock
    <cache_dir>/v1/tmp/                                    entries being written

The key covers the spec, the hash of its sources and the entry format. The toolchain is a folder below it, so that a
machine without a compiler can pick among what others made.

An entry is written in ``tmp``, ``meta.json`` last, and renamed into place under the key's lock. ``meta.json`` holds
the digest of every file and of itself, and the spec in clear. Reading returns bytes that match their digests; the
loader works on those bytes, so a file that changes after the check does no harm. Whatever is wrong with an entry, it
counts as missing and the next compile replaces it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .scratch import remove_leftovers
from .spec import KernelSpec
from .toolchain import Toolchain

__all__ = ["ENTRY_FORMAT", "FUNCTION", "LIBRARY", "OBJECT", "Entry", "Slot", "Store", "make_entry"]

ENTRY_FORMAT = 1
"""Goes up when the layout of entries or the way kernels are compiled changes."""

FUNCTION = "run"
"""Name under which every kernel is exported."""

OBJECT, LIBRARY, META = "kernel.o", "kernel.so", "meta.json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """A compiled kernel in memory: verified bytes by file name, and what is known about them.

    ``meta`` has ``format``, ``key``, ``spec``, ``toolchain``, ``resources``, ``seconds`` and ``files`` (digests).
    ``files`` holds the object, and the shared library unless the machine that compiled it had no linker.
    """

    meta: dict[str, Any]
    files: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one kernel is stored: its spec, the hash of its sources, and the toolchain here."""

    spec: KernelSpec
    sources: str
    toolchain: Toolchain

    @property
    def key(self) -> str:
        """Hash of everything but the toolchain."""
        text = json.dumps([ENTRY_FORMAT, self.spec.identity, self.sources])
        return hashlib.sha256(text.encode()).hexdigest()[:40]


def make_entry(
    slot: Slot,
    files: Mapping[str, bytes],
    resources: Mapping[str, Mapping[str, int]],
    seconds: Mapping[str, float],
) -> Entry:
    """Return the entry of a kernel that was just compiled."""
    meta = {
        "format": ENTRY_FORMAT,
        "key": slot.key,
        "spec": json.loads(slot.spec.identity),
        "toolchain": slot.toolchain.facts,
        "resources": {name: dict(numbers) for name, numbers in resources.items()},
        "seconds": dict(seconds),
        "files": {name: _digest(data) for name, data in files.items()},
    }
    return Entry(meta, dict(files))


class Store:
    """The entries below one cache folder, which need not exist or be writable."""

    def __init__(self, folder: Path) -> None:
        self._root = folder / f"v{ENTRY_FORMAT}"

    @property
    def scratch(self) -> Path:
        """Folder for files that are about to be renamed or loaded."""
        return self._root / "tmp"

    def read(self, slot: Slot) -> Entry | None:
        """Return the entry if there is one that is whole and made for this place.

        Without a compiler here, the entry of the newest one.
        """
        folder = self._folder(slot)
        if slot.toolchain.dsl:
            return _read_entry(folder / slot.toolchain.label, slot)
        candidates = [meta for meta in map(_read_meta, _subfolders(folder)) if meta and _fits(meta[1], slot)]
        candidates.sort(key=lambda candidate: _dsl_version(candidate[1]), reverse=True)
        return next((entry for path, _ in candidates if (entry := _read_entry(path, slot))), None)

    @contextlib.contextmanager
    def locked(self, slot: Slot) -> Iterator[bool]:
        """Hold the lock of a slot's place. Yields False when the folder cannot hold a lock."""
        lock = self._acquire(slot)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                lock.release()

    def write(self, slot: Slot, entry: Entry) -> bool:
        """Store an entry, replacing whatever is in its place; call it under the lock. False if it cannot be stored."""
        made = self.scratch / uuid.uuid4().hex
        try:
            remove_leftovers(self.scratch, "*")
            made.mkdir(parents=True)
            for name, data in entry.files.items():
                (made / name).write_bytes(data)
            (made / META).write_text(_meta_text(entry.meta))
            self._move_into_place(made, self._folder(slot) / slot.toolchain.label)
        except OSError as error:
            _warn_unwritable(self._root, error)
            return False
        finally:
            shutil.rmtree(made, ignore_errors=True)
        return True

    def _folder(self, slot: Slot) -> Path:
        return self._root / slot.spec.arch / slot.spec.operation / slot.key

    def _acquire(self, slot: Slot) -> Any | None:
        import filelock  # only a miss needs it

        folder = self._folder(slot)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(folder / f"{slot.toolchain.label}.lock", timeout=_LOCK_TIMEOUT)
            lock.acquire()
        except (OSError, NotImplementedError) as error:
            _warn_unwritable(self._root, error)
            return None
        return lock

    def _move_into_place(self, made: Path, place: Path) -> None:
        """Rename ``made`` to ``place``; what stood there goes away whole, never file by file."""
        old = made.with_suffix(".old")
        with contextlib.suppress(FileNotFoundError):
            os.rename(place, old)
        os.rename(made, place)
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.unlink(missing_ok=True)


_LOCK_TIMEOUT = 900.0
"""Seconds to wait for another process that compiles the same kernel. After that this process compiles for itself."""

_warned: set[Path] = set()


def _read_entry(folder: Path, slot: Slot) -> Entry | None:
    found = _read_meta(folder)
    if found is None or not _fits(found[1], slot):
        return None
    files = {}
    for name, digest in found[1]["files"].items():
        data = _read_bytes(folder / name)
        if data is None or _digest(data) != digest:
            logger.warning("%s is damaged and is not used", folder / name)
            return None
        files[name] = data
    return Entry(found[1], files)


def _read_meta(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the folder and its metadata if they are whole."""
    data = _read_bytes(folder / META)
    if data is None:
        return None
    try:
        outer = json.loads(data)
        meta = outer["entry"]
        whole = outer["digest"] == _meta_digest(meta) and OBJECT in meta["files"]
    except (ValueError, TypeError, KeyError, RecursionError):
        whole = False
    if not whole:
        logger.warning("%s is damaged and is not used", folder / META)
        return None
    return folder, meta


def _fits(meta: Mapping[str, Any], slot: Slot) -> bool:
    """Whether an entry is the one that was asked for; a copied or renamed folder is not."""
    return (
        meta.get("format") == ENTRY_FORMAT
        and meta["key"] == slot.key
        and set(meta["files"]) <= {OBJECT, LIBRARY}
        and slot.toolchain.accepts(meta["toolchain"])
    )


def _meta_text(meta: Mapping[str, Any]) -> str:
    return json.dumps({"digest": _meta_digest(meta), "entry": meta}, indent=1)


def _meta_digest(meta: Mapping[str, Any]) -> str:
    return _digest(json.dumps(meta, sort_keys=True).encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read_bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []


def _dsl_version(meta: Mapping[str, Any]) -> tuple[int, ...]:
    versions = meta["toolchain"].get("dsl", {}).values()
    return max((tuple(map(int, re.findall(r"\d+", version))) for version in versions), default=())


def _warn_unwritable(root: Path, error: Exception) -> None:
    """Say once per folder that kernels are compiled but not kept."""
    if root not in _warned:
        _warned.add(root)
        logger.warning(
            "The kernel cache %s cannot be written (%s). Kernels are compiled for this process only; "
            "set FE_CACHE_DIR to a writable folder to keep them.",
            root.parent,
            error,
        )
