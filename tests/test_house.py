"""The rules of the house: who may import whom, how long a file may be, and what no file may mention."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import release
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = {library.replace("-", "_"): ROOT / "libs" / library / "src" for library in release.LIBRARIES}
DOMAINS = [package for package in LIBRARIES if package != "fe_runtime"]
DSL = {"cutlass", "cuda", "tvm_ffi"}
ARRAYS = {"numpy", "ml_dtypes", "array_api_compat"}
FACTS = "fe_runtime.architecture"  # it imports nothing
FRAMEWORKS = {"torch", "jax", "jaxlib", "jax_tvm_ffi"}
LONGEST_FILE = 700
LARGEST_FILE = 1_000_000


# ---- who may import whom


@pytest.mark.parametrize("package", DOMAINS)
def test_kernels_know_device_building_blocks_only(package: str) -> None:
    """Beside them, only modules of their library that need nothing but each other and the standard library: problems,
    tiles and launches."""
    allowed = (f"{package}.kernels", "fe_runtime.cute", FACTS, *_plain(package))
    found = _outside(_modules(package, "kernels"), allowed, others=DSL)
    assert found == []


@pytest.mark.parametrize("package", DOMAINS)
def test_references_know_arrays_and_formats_only(package: str) -> None:
    allowed = (f"{package}.reference", "fe_runtime.formats")
    found = _outside(_modules(package, "reference"), allowed, others=ARRAYS)
    assert found == []


@pytest.mark.parametrize("package", DOMAINS)
def test_a_front_door_is_imported_by_init_and_compat_only(package: str) -> None:
    doors = _front_doors(package)
    found = [
        f"{module} imports {name}"
        for module, path in _modules(package)
        if path.name not in ("__init__.py", "compat.py")
        for name, _ in _imports(module, path)
        if any(_within(name, door) for door in doors) and not any(_within(module, door) for door in doors)
    ]
    assert found == []


@pytest.mark.parametrize("package", DOMAINS)
def test_a_library_knows_no_other_librarys_inside(package: str) -> None:
    """Another domain library is reached through its public names, from its top."""
    others = [other for other in DOMAINS if other != package]
    found = [
        f"{module} imports {name}"
        for module, path in _modules(package)
        for name, _ in _imports(module, path)
        if any(_within(name, other) and name.count(".") > 1 for other in others)
    ]
    assert found == []


def test_runtime_knows_no_domain() -> None:
    found = [
        f"{module} imports {name}"
        for module, path in _modules("fe_runtime")
        for name, _ in _imports(module, path)
        if name.split(".")[0] in DOMAINS
    ]
    assert found == []


@pytest.mark.parametrize("package", LIBRARIES)
def test_only_device_code_and_the_compiler_import_the_dsl(package: str) -> None:
    allowed = (f"{package}.kernels", "fe_runtime.cute", "fe_runtime.compile", "fe_runtime.jax")
    found = [
        f"{module} imports {name}"
        for module, path in _modules(package)
        if not any(_within(module, home) for home in allowed)
        for name, _ in _imports(module, path)
        if name.split(".")[0] == "cutlass"
    ]
    assert found == []


@pytest.mark.parametrize("package", LIBRARIES)
def test_no_framework_at_the_top_of_a_module(package: str) -> None:
    """A framework is imported inside the function that needs it, or by a module that is named after it."""
    found = [
        f"{module} imports {name}"
        for module, path in _modules(package)
        if {"torch", "jax", "xla"}.isdisjoint(re.split(r"[._]", module))
        for name, at_top in _imports(module, path)
        if at_top and name.split(".")[0] in FRAMEWORKS
    ]
    assert found == []


@pytest.mark.parametrize("package", LIBRARIES)
def test_every_import_is_a_declared_dependency(package: str) -> None:
    library = package.replace("_", "-")
    known = {library, *_declared(library), *_declared("fe-runtime")}  # what the runtime brings is there too
    dsl, ffi = "nvidia-cutlass-dsl", "apache-tvm-ffi"
    provided = {"cutlass": dsl, "cuda": dsl, "tvm_ffi": ffi, "jaxlib": "jax", "triton": "torch"}
    found = [
        f"{module} imports {name}"
        for module, path in _modules(package)
        for name, _ in _imports(module, path)
        if (top := name.split(".")[0]) not in sys.stdlib_module_names
        and provided.get(top, top.replace("_", "-")) not in known
        and not (top in ("hypothesis", "pytest") and _within(module, "fe_runtime.testing"))
    ]
    assert found == []


# ---- how files look


def test_files_are_short() -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for path in _files()
        if path.suffix == ".py" and (lines := len(path.read_text(encoding="utf-8").splitlines())) > LONGEST_FILE
    }
    assert found == {}


def test_no_large_file_is_tracked() -> None:
    found = [str(path.relative_to(ROOT)) for path in _files() if path.stat().st_size > LARGEST_FILE]
    assert found == []


def test_library_code_does_not_print() -> None:
    talks = ("fe_runtime.cli", "fe_runtime.collect_env")
    found = [
        f"{module}:{node.lineno}"
        for package in LIBRARIES
        for module, path in _modules(package)
        if not any(_within(module, home) for home in talks)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
        if not any(keyword.arg == "file" for keyword in node.keywords)
    ]
    assert found == []


def test_own_environment_variables_are_read_in_one_module() -> None:
    found = [
        f"{module} mentions {name}"
        for package in LIBRARIES
        for module, path in _modules(package)
        if module not in ("fe_runtime.env", "fe_runtime.collect_env")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.getenv", "os.environ.get")
        for name in [ast.unparse(node.args[0])]
        if "FE_" in name
    ]
    assert found == []


def test_docstrings_cite_no_document_that_is_not_here() -> None:
    """A source is public, a standard or the contract of another library's release, or a file of this repository."""
    here = {path.name for path in _files()}
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in _files()
        if path.suffix == ".py"
        for name in re.findall(r"\b([\w-]+\.md) sections?\b", path.read_text(encoding="utf-8"))
        if name not in here
    ]
    assert found == []


def test_each_library_carries_the_licence() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    different = [
        library
        for library in release.LIBRARIES
        if (ROOT / "libs" / library / "LICENSE").read_text(encoding="utf-8") != text
    ]
    assert different == []


def test_no_file_names_a_machine_or_a_package_index() -> None:
    """Everybody sits behind a different index and in a different folder. A ``~`` hides the words from this test."""
    hosts = ["py~pi.org", "python~hosted", "download.py~torch", "py~pi.nvidia", "registry.n~pm", "dev~pi/"]
    folders = ["/wo~rk/", "/ro~ot/", "/ho~me/", "/Us~ers/", "/opt/wh~eels", "/opt/py~pi"]
    hosts, folders = ([re.escape(word.replace("~", "")) for word in words] for words in (hosts, folders))
    pattern = re.compile("|".join([*hosts, *(rf"(?<![\w./*-]){folder}" for folder in folders)]))
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in _files()
        if path != ROOT / "uv.lock"  # git has its neutral form: tests/test_lock.py
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="ignore").splitlines(), 1)
        if (match := pattern.search(line))
    ]
    assert found == []


# ---- helpers


def _modules(package: str, inside: str = "") -> list[tuple[str, Path]]:
    """The (dotted name, path) pairs of a package's modules."""
    root = LIBRARIES[package]
    paths = sorted((root / package / inside).rglob("*.py"))
    return [(".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"), path) for path in paths]


def _imports(module: str, path: Path) -> Iterator[tuple[str, bool]]:
    """The (dotted name, whether it runs when the module is imported) pairs that a module imports, of any form."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    later = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _is_type_checking(node)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        at_top = node not in later
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = _home(module, path, node)
            yield from ((f"{home}.{alias.name}", at_top) for alias in node.names)


def _home(module: str, path: Path, node: ast.ImportFrom) -> str:
    """The full name of the module that a ``from ... import`` names, relative or not."""
    if not node.level:
        return str(node.module)
    parts = module.split(".") + ([""] if path.name == "__init__.py" else [])
    return ".".join([*parts[: -node.level], *([node.module] if node.module else [])])


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _plain(package: str) -> set[str]:
    """The modules of a package that need nothing but each other and the standard library."""
    plain: set[str] = set()
    while True:
        homes = (FACTS, *plain)
        found = {name for name, path in _modules(package) if not _outside([(name, path)], homes, others=set())}
        if found - {package} == plain:
            return plain
        plain = found - {package}


def _outside(modules: list[tuple[str, Path]], allowed: tuple[str, ...], others: set[str]) -> list[str]:
    """The imports that are neither in the standard library, nor within ``allowed``, nor of the ``others``."""
    return [
        f"{module} imports {name}"
        for module, path in modules
        for name, _ in _imports(module, path)
        if not any(_within(name, home) for home in allowed)
        and name.split(".")[0] not in (others | set(sys.stdlib_module_names))
    ]


def _within(name: str, home: str) -> bool:
    return name == home or name.startswith(f"{home}.")


def _front_doors(package: str) -> set[str]:
    """The modules that make an operation public: they hold an ``Operation(...)``."""
    return {
        module
        for module, path in _modules(package)
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call)
        if ast.unparse(node.value.func).split(".")[-1] == "Operation"
    }


def _declared(library: str) -> set[str]:
    """The names of a library's dependencies, those of its extras included."""
    project = tomllib.loads((ROOT / "libs" / library / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
    return {Requirement(entry).name for group in groups for entry in group}


def _files() -> list[Path]:
    """The files that git tracks or would track; without git, everything that is not hidden."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if listed.returncode == 0:
        paths = [ROOT / name for name in listed.stdout.decode("utf-8").split("\0") if name]
    else:
        paths = [path for path in ROOT.rglob("*") if not any(part.startswith(".") for part in path.parts)]
    return [path for path in paths if path.is_file()]
