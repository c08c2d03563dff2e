"""Public names that are imported on first use, so that ``import fe_<lib>`` stays free of frameworks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType

__all__ = ["lazy_exports"]


def lazy_exports(
    module_name: str, exports: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return ``(__getattr__, __dir__, __all__)`` for a module that loads its public names on first use.

    Parameters
    ----------
    module_name
        ``__name__`` of the module that exports.
    exports
        Public name to ``"module:attribute"`` (or ``"module"`` for a submodule itself).

    Notes
    -----
    A loaded name is stored in the module, so the second access is an ordinary attribute look-up. A name that a
    submodule shares always yields the exported object, whatever was imported first: see :class:`_ExportingModule`.
    """
    module = sys.modules[module_name]
    objects = frozenset(name for name, target in exports.items() if ":" in target)
    module.__class__ = _ExportingModule
    module.__dict__["_fe_exported_objects"] = objects
    for name in objects:  # submodules that were imported before this call
        if isinstance(module.__dict__.get(name), ModuleType):
            del module.__dict__[name]

    def __getattr__(name: str) -> object:  # noqa: N807 - the module hook's own name
        if name not in exports:
            raise AttributeError(f"module {module_name!r} has no attribute {name!r}")
        value = _load(module_name, name, exports[name])
        module.__dict__[name] = value
        return value

    def __dir__() -> list[str]:  # noqa: N807 - the module hook's own name
        return sorted({*module.__dict__, *exports})

    return __getattr__, __dir__, sorted(exports)


class _ExportingModule(ModuleType):
    """A module whose exported objects are not hidden by the import of a submodule of the same name."""

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, ModuleType) and name in self.__dict__.get("_fe_exported_objects", ()):
            return  # the import system binds a submodule here; the export wins
        super().__setattr__(name, value)


def _load(module_name: str, name: str, target: str) -> object:
    path, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(path)
    except ImportError as error:
        from fe_runtime._requirements import import_problem

        problem = import_problem(f"{module_name}.{name}", error)
        if problem is None:
            raise
        raise ImportError(problem, name=error.name) from error
    return getattr(module, attribute) if attribute else module
