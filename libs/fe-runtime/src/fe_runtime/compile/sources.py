"""The source files that a kernel is made of, found without importing them, and the hash of their bytes.

The closure of a builder is its own module plus, transitively, every module of an ``fe_*`` package (or of the
builder's own package) that an import statement names, wherever in the file it stands. What counts:

* ``import a.b`` and ``from a.b import name`` give ``a.b``; if ``a.b.name`` is a module, that one instead.
* A package that is named itself gives its ``__init__``; if that loads its names lazily (it defines ``__getattr__``),
  every module of the package belongs to the closure, because the statement does not tell which one is meant.
* Packages that are merely on the way (``a`` in ``a.b``) do not count: by the rules of the house they export, no more.
* Modules that code imports by a computed name are not seen. Kernels must not do that.

The hash is over module names and bytes, so it is the same wherever the same sources are.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Closure", "source_closure"]


@dataclass(frozen=True, slots=True)
class Closure:
    """The modules of a closure, by dotted name, with the digest of each file."""

    modules: dict[str, str]

    @property
    def digest(self) -> str:
        """One hash for all files."""
        lines = "".join(f"{name} {digest}\n" for name, digest in sorted(self.modules.items()))
        return hashlib.sha256(lines.encode()).hexdigest()

    def edited_since_import(self) -> list[str]:
        """Return the modules that this process imported before their file took its present form.

        Code compiled from them would be stored under the hash of sources that it was not made from.
        """
        return sorted(name for name, now in self.modules.items() if name in sys.modules and _imported[name] != now)


def source_closure(module: str) -> Closure:
    """Return the closure of a builder's module.

    Raises
    ------
    ModuleNotFoundError
        The module has no source file on the search path.
    """
    own_package = module.partition(".")[0]
    digests: dict[str, str] = {}
    waiting = [module]
    with _lock:
        while waiting:
            name = waiting.pop()
            if name in digests:
                continue
            place = _find(name)
            if place is None:
                if name == module:
                    raise ModuleNotFoundError(f"no source file for the kernel module {module!r}", name=module)
                continue
            source = _read(place.file)
            digests[name] = source.digest
            if name not in _imported:
                _imported[name] = _digest_at_import(name, place.file, source.digest)
            waiting.extend(_imports_of(name, place, source, own_package))
    return Closure(digests)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a module is: its file, and its folder if it is a package."""

    file: Path
    folder: Path | None


@dataclass(frozen=True, slots=True)
class _Statement:
    """One import statement: ``from {dots}{module} import {names}``, or ``import {module}`` with no names."""

    level: int
    module: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Source:
    stamp: tuple[int, int]
    digest: str
    statements: tuple[_Statement, ...]
    lazy: bool


_lock = threading.Lock()
_started = time.time()
_read_files: dict[Path, _Source] = {}
_imported: dict[str, str] = {}
"""Digest of the file that a module of this process was, or will be, imported from; "" when that is not known."""


def _digest_at_import(name: str, file: Path, digest: str) -> str:
    """Return ``digest`` if the module is not imported yet, or was and its file has not changed since."""
    edited = name in sys.modules and file.stat().st_mtime > _started
    return "" if edited else digest


def _imports_of(name: str, place: _Place, source: _Source, own_package: str) -> Iterator[str]:
    package = name if place.folder is not None else name.rpartition(".")[0]
    for statement in source.statements:
        module = _absolute(statement, package)
        top = module.partition(".")[0]
        if not (top.startswith("fe_") or top == own_package):
            continue
        if not statement.names:
            yield from _named(module)
        for imported in statement.names:
            submodule = f"{module}.{imported}"
            yield from [submodule] if _find(submodule) is not None else _named(module)


def _named(module: str) -> Iterator[str]:
    """Yield a module that an import names, and the whole package if its names are lazy."""
    yield module
    place = _find(module)
    if place is not None and place.folder is not None and _read(place.file).lazy:
        for file in sorted(place.folder.rglob("*.py")):
            parts = file.relative_to(place.folder).with_suffix("").parts
            yield ".".join((module, *(part for part in parts if part != "__init__")))


def _absolute(statement: _Statement, package: str) -> str:
    if statement.level == 0:
        return statement.module
    base = package.split(".")
    base = base[: len(base) - (statement.level - 1)]
    return ".".join([*base, statement.module] if statement.module else base)


def _find(name: str) -> _Place | None:
    """Find a module's source as the import system would, but run no package's ``__init__`` on the way."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # __main__ and half-made modules have no spec
        return None
    if spec is None:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    place = _place(Path(spec.origin), bool(folders)) if spec.origin and spec.origin.endswith(".py") else None
    for part in rest:
        place = next((found for folder in folders if (found := _child(folder, part))), None)
        folders = [folder / part for folder in folders if (folder / part).is_dir()]
        if place is not None:
            folders = [place.folder] if place.folder is not None else []
    return place


def _child(folder: Path, name: str) -> _Place | None:
    for file, package in ((folder / name / "__init__.py", True), (folder / f"{name}.py", False)):
        if file.is_file():
            return _place(file, package)
    return None


def _place(file: Path, package: bool) -> _Place:
    return _Place(file, file.parent if package else None)


def _read(file: Path) -> _Source:
    status = file.stat()
    stamp = (status.st_mtime_ns, status.st_size)
    known = _read_files.get(file)
    if known is None or known.stamp != stamp:
        text = file.read_bytes()
        tree = ast.parse(text, str(file))
        known = _Source(stamp, hashlib.sha256(text).hexdigest(), tuple(_statements(tree)), _is_lazy(tree))
        _read_files[file] = known
    return known


def _statements(tree: ast.Module) -> Iterator[_Statement]:
    # Imports are statements: expressions, which are most of a tree, need no look.
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (_Statement(0, alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield _Statement(node.level, node.module or "", tuple(alias.name for alias in node.names))
        for block in _BLOCKS:
            waiting += getattr(node, block, ())


_BLOCKS = ("body", "orelse", "handlers", "finalbody", "cases")
"""Fields of a statement that hold statements."""


def _is_lazy(tree: ast.Module) -> bool:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__getattr__":
            return True
        if isinstance(node, ast.Assign) and any(
            isinstance(part, ast.Name) and part.id == "__getattr__" for part in ast.walk(node)
        ):
            return True
    return False
