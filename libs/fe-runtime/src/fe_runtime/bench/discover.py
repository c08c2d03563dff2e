"""The workloads of every library that is installed or importable."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from .workload import Workload, load_target

__all__ = ["ENTRY_POINTS", "Found", "find_workloads"]

ENTRY_POINTS = "fe.operations"
"""Entry-point group; each entry names a tuple of workloads."""


@dataclass
class Found:
    """Workloads in order of library and name, and why a library could not be read, by library."""

    workloads: list[Workload] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)

    def named(self, name: str) -> Workload:
        """Return the workload called ``rmsnorm_silu`` or ``fe_norm.rmsnorm_silu``.

        Raises
        ------
        LookupError
            No workload has that name; the text lists those that exist.
        """
        for workload in self.workloads:
            if name in (workload.name, f"{workload.library}.{workload.name}"):
                return workload
        known = ", ".join(workload.name for workload in self.workloads) or "none"
        raise LookupError(f"there is no operation {name!r}; the installed libraries have: {known}")

    def of_library(self, library: str | None) -> list[Workload]:
        """Return the workloads of ``fe-norm`` or ``fe_norm``; all of them for ``None``.

        Raises
        ------
        LookupError
            No such library has workloads.
        """
        if library is None:
            return self.workloads
        chosen = [w for w in self.workloads if w.library == library.replace("-", "_")]
        if not chosen:
            known = ", ".join(sorted({w.library.replace("_", "-") for w in self.workloads})) or "none"
            raise LookupError(f"library {library!r} has no operations here; libraries with operations: {known}")
        return chosen


def find_workloads() -> Found:
    """Find every workload: those named by entry points, then those of importable ``fe_*`` packages.

    The second look serves libraries that are on the path without being installed.
    """
    found = Found()
    seen: set[str] = set()
    for library, target in (*_entry_points(), *_on_the_path()):
        if target in seen:
            continue
        seen.add(target)
        try:
            found.workloads += load_target(target)
        except Exception as error:  # a broken library must not hide the others
            found.broken[library] = f"{type(error).__name__}: {error}"
    found.workloads.sort(key=lambda workload: (workload.library, workload.name))
    return found


def _entry_points() -> Iterator[tuple[str, str]]:
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        yield entry.value.partition(".")[0], entry.value


def _on_the_path() -> Iterable[tuple[str, str]]:
    names = {m.name for m in pkgutil.iter_modules() if m.ispkg and m.name.startswith("fe_") and m.name != "fe_runtime"}
    for library in sorted(names):
        try:
            exists = importlib.util.find_spec(f"{library}.workloads") is not None
        except Exception:  # some other package that does not even import
            continue
        if exists:
            yield library, f"{library}.workloads:WORKLOADS"
