"""Importing a library is cheap and clean: no framework, no compiler, only the names that are meant."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import release

PACKAGES = [library.replace("-", "_") for library in release.LIBRARIES]
HEAVY = ["torch", "jax", "jaxlib", "cutlass", "cuda", "triton", "tvm_ffi", "jax_tvm_ffi", "matplotlib", "rich"]
BUDGET_SECONDS = 0.150


@pytest.mark.parametrize("package", PACKAGES)
def test_import_loads_no_framework(package: str) -> None:
    loaded = _python(f"import sys, {package}; print(sorted(set({HEAVY}) & set(sys.modules)))")
    assert loaded == "[]"


@pytest.mark.parametrize("package", PACKAGES)
def test_import_is_fast(package: str) -> None:
    """The best of several runs counts: a busy machine slows single ones."""
    code = f"from time import perf_counter as now; start = now(); import {package}; print(now() - start)"
    best = float("inf")
    for _ in range(8):
        best = min(best, float(_python(code)))
        if best < BUDGET_SECONDS:
            return
    assert best < BUDGET_SECONDS


@pytest.mark.parametrize("package", PACKAGES)
def test_every_exported_name_exists(package: str) -> None:
    code = f"""
import json, {package} as module
listed = set(dir(module))
first = {{name: getattr(module, name) for name in module.__all__}}
again = [name for name in module.__all__ if getattr(module, name) is not first[name]]
print(json.dumps([[name for name in module.__all__ if name not in listed], again]))
"""
    not_listed, changed = json.loads(_python(code))
    assert not_listed == []
    assert changed == []


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_public_leaks(package: str) -> None:
    """A public name is in ``__all__``, or a submodule that was loaded on the way, or a mark for type checkers."""
    code = f"""
import json, types, {package} as module
allowed = {{*module.__all__, "annotations", "TYPE_CHECKING"}}
public = [name for name in vars(module) if not name.startswith("_") and name not in allowed]
own = lambda value: isinstance(value, types.ModuleType) and value.__name__.startswith("{package}.")
print(json.dumps([name for name in public if not own(vars(module)[name])]))
"""
    assert json.loads(_python(code)) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_unknown_name_is_an_attribute_error(package: str) -> None:
    code = f"import {package} as module\ntry: module.no_such_name\nexcept AttributeError as error: print(error)"
    assert "no_such_name" in _python(code)


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
