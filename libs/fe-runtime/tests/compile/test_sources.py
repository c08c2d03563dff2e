"""The source closure: what belongs to it, what changes its hash, and that nothing is imported to find it."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fe_runtime.compile import sources
from fe_runtime.compile.sources import source_closure

FILES = {
    "fe_fake/__init__.py": "raise RuntimeError('imported')",
    "fe_fake/kernels/__init__.py": "raise RuntimeError('imported')",
    "fe_fake/kernels/op.py": (
        "import math, numpy\nimport fe_blocks.reduce\nfrom . import tile\nfrom .. import shared as s\n"
        "from fe_blocks import copy\n\ndef build(arch):\n    from .late import value\n    import fe_fake.dotted as d\n"
    ),
    "fe_fake/kernels/tile.py": "from fe_fake.kernels import op\nfrom .names import *\nimport fe_absent.thing\n",
    "fe_fake/kernels/names.py": "width = 8\n",
    "fe_fake/kernels/late.py": "value = 1\n",
    "fe_fake/kernels/other.py": "raise RuntimeError('imported')",
    "fe_fake/shared.py": "from other_library import thing\n",
    "fe_fake/dotted.py": "",
    "fe_blocks/__init__.py": "",
    "fe_blocks/reduce.py": "",
    "fe_blocks/copy/__init__.py": "",
    "other_library.py": "thing = 1\n",
}
CLOSURE = {
    "fe_fake.kernels.op",
    "fe_fake.kernels.tile",
    "fe_fake.kernels.names",
    "fe_fake.kernels.late",
    "fe_fake.shared",
    "fe_fake.dotted",
    "fe_blocks.reduce",
    "fe_blocks.copy",
}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    write(tmp_path, FILES)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith(("fe_fake", "fe_blocks")):
            del sys.modules[name]
    for name in [name for name in sources._imported if name.startswith(("fe_fake", "fe_blocks"))]:
        del sources._imported[name]


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def digest() -> str:
    return source_closure("fe_fake.kernels.op").digest


def test_members(tree: Path) -> None:
    assert set(source_closure("fe_fake.kernels.op").modules) == CLOSURE


def test_nothing_is_imported(tree: Path) -> None:
    source_closure("fe_fake.kernels.op")
    assert not [name for name in sys.modules if name.startswith(("fe_fake", "fe_blocks", "other_library"))]


@pytest.mark.parametrize("module", sorted(CLOSURE))
def test_each_member_changes_the_hash(tree: Path, module: str) -> None:
    before = digest()
    path = tree / (module.replace(".", "/") + ".py")
    path = path if path.exists() else path.with_suffix("") / "__init__.py"
    path.write_text(path.read_text() + "\n# a comment counts as well\n")
    assert digest() != before


@pytest.mark.parametrize("file", ["fe_fake/kernels/other.py", "fe_fake/__init__.py", "other_library.py"])
def test_unrelated_files_do_not(tree: Path, file: str) -> None:
    before = digest()
    (tree / file).write_text("changed = True\n")
    assert digest() == before


def test_same_size_edit_is_noticed(tree: Path) -> None:
    before = digest()
    path = tree / "fe_fake/kernels/names.py"
    path.write_text("width = 4\n")
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))
    assert digest() != before


def test_hash_does_not_depend_on_the_place(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest()
    copy = tmp_path / "elsewhere"
    write(copy, FILES)
    monkeypatch.syspath_prepend(str(copy))
    assert digest() == before
    assert source_closure("fe_fake.kernels.op").modules.keys() == CLOSURE


@pytest.mark.parametrize("hook", ["def __getattr__(name): ...\n", "__getattr__, __dir__, __all__ = lazy()\n"])
@pytest.mark.parametrize("statement", ["from fe_blocks import load_row", "import fe_blocks", "from fe_blocks import *"])
def test_lazy_package_counts_whole(tree: Path, hook: str, statement: str) -> None:
    (tree / "fe_blocks/__init__.py").write_text(hook)
    (tree / "fe_fake/kernels/op.py").write_text(statement)
    assert set(source_closure("fe_fake.kernels.op").modules) == {
        "fe_fake.kernels.op",
        "fe_blocks",
        "fe_blocks.reduce",
        "fe_blocks.copy",
    }


def test_own_package_counts_without_the_prefix(tree: Path) -> None:
    write(tree, {"theirs/op.py": "from . import helper\n", "theirs/helper.py": ""})  # a namespace package
    assert set(source_closure("theirs.op").modules) == {"theirs.op", "theirs.helper"}


def test_missing_module_is_named(tree: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"fe_fake\.kernels\.nothing"):
        source_closure("fe_fake.kernels.nothing")


def test_edit_after_import_is_noticed(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tree, {"fe_fake/__init__.py": "", "fe_fake/kernels/__init__.py": "", "fe_fake/kernels/other.py": ""})
    assert source_closure("fe_fake.kernels.other").edited_since_import() == []
    importlib.import_module("fe_fake.kernels.other")
    assert source_closure("fe_fake.kernels.other").edited_since_import() == []
    (tree / "fe_fake/kernels/other.py").write_text("changed = True\n")
    assert source_closure("fe_fake.kernels.other").edited_since_import() == ["fe_fake.kernels.other"]


@pytest.mark.parametrize(
    ("age", "edited"), [(-3600.0, []), (3600.0, ["fe_fake.kernels.names"])], ids=["older", "newer"]
)
def test_module_imported_before_the_first_look(tree: Path, age: float, edited: list[str]) -> None:
    """Only a file that is older than the process is surely the one that was imported."""
    write(tree, {"fe_fake/__init__.py": "", "fe_fake/kernels/__init__.py": ""})
    importlib.import_module("fe_fake.kernels.names")
    stamp = time.time() + age
    os.utime(tree / "fe_fake/kernels/names.py", (stamp, stamp))
    assert source_closure("fe_fake.kernels.names").edited_since_import() == edited


def test_real_kernel_modules_have_a_closure() -> None:
    """The building blocks are found where they are installed."""
    assert "fe_runtime.cute.activation" in source_closure("fe_runtime.cute.activation").modules
