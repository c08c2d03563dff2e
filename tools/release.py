"""Check that what was built for a tag is what the tag says.

    python tools/release.py fe-gemm-v0.1.0 dist

A tag names one library and its version. ``dist`` holds that library's wheel and source archive. The exit status is 1
and every problem is printed unless: the tag, the library's ``_version.py``, its changelog and both archives agree on
the version; the wheel carries ``py.typed`` and the licence and nothing that is not the library; and the library's
range of ``fe-runtime`` admits the runtime of this tree.
"""

from __future__ import annotations

import email
import re
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

__all__ = ["LIBRARIES", "archive_problems", "main", "runtime_range", "tag_problems", "version", "wheel_metadata"]


ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = sorted(path.parent.name for path in ROOT.glob("libs/*/pyproject.toml"))


def main(arguments: list[str] | None = None) -> int:
    """Check one tag and its archives; print the problems and return the exit status."""
    tag, folder = sys.argv[1:] if arguments is None else arguments
    problems = tag_problems(tag)
    if not problems:
        problems = archive_problems(tag.rpartition("-v")[0], Path(folder))
    print("\n".join(problems) if problems else f"{tag}: ready to publish")
    return 1 if problems else 0


def tag_problems(tag: str) -> list[str]:
    """Return what keeps a tag from naming a release of this tree; empty if nothing does."""
    library = tag.rpartition("-v")[0]
    if library not in LIBRARIES:
        return [f"{tag}: a tag must be LIBRARY-vX.Y.Z with one of {', '.join(LIBRARIES)}"]
    problems = []
    if tag != f"{library}-v{version(library)}":
        problems.append(f"{tag}: {library} has the version {version(library)}")
    changelog = (ROOT / "libs" / library / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"^## {re.escape(version(library))}\b", changelog, re.MULTILINE):
        problems.append(f"{tag}: libs/{library}/CHANGELOG.md has no section {version(library)}")
    return problems


def archive_problems(library: str, folder: Path) -> list[str]:
    """Return what is wrong with the wheel and the source archive of a library in a folder; empty if nothing is."""
    stem = f"{library.replace('-', '_')}-{version(library)}"
    wheel, source = folder / f"{stem}-py3-none-any.whl", folder / f"{stem}.tar.gz"
    missing = [f"{path.name} is missing" for path in (wheel, source) if not path.exists()]
    return missing or [*_wheel_problems(library, wheel), *_source_problems(stem, source)]


def version(library: str) -> str:
    """Return a library's version as its ``_version.py`` states it."""
    text = (ROOT / "libs" / library / "src" / library.replace("-", "_") / "_version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise ValueError(f"{library}: _version.py states no version")
    return match[1]


def runtime_range(library: str) -> tuple[str, str] | None:
    """Return (oldest, first excluded) version of fe-runtime that a library declares; None for fe-runtime itself."""
    project = tomllib.loads((ROOT / "libs" / library / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for requirement in project["dependencies"]:
        match = re.fullmatch(r"fe-runtime>=([\d.]+),<([\d.]+)", requirement)
        if match:
            return match[1], match[2]
    return None


def wheel_metadata(wheel: Path) -> Message:
    """Return the metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def _wheel_problems(library: str, wheel: Path) -> list[str]:
    package = library.replace("-", "_")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    info = f"{package}-{version(library)}.dist-info/"
    foreign = [name for name in names if not name.startswith((f"{package}/", info))]
    foreign += [name for name in names if "/tests/" in name or name.endswith((".pyc", ".so", ".o"))]
    wanted = [f"{package}/py.typed", f"{package}/__init__.py", f"{info}licenses/LICENSE"]
    problems = [f"{wheel.name} must not contain {name}" for name in foreign]
    problems += [f"{wheel.name} lacks {name}" for name in wanted if name not in names]
    stated = wheel_metadata(wheel)["Version"]
    if stated != version(library):
        problems.append(f"{wheel.name} states the version {stated}; _version.py says {version(library)}")
    return problems


def _source_problems(stem: str, source: Path) -> list[str]:
    with tarfile.open(source) as archive:
        names = archive.getnames()
    wanted = [f"{stem}/pyproject.toml", f"{stem}/LICENSE", f"{stem}/README.md"]
    return [f"{source.name} lacks {name}" for name in wanted if name not in names]


if __name__ == "__main__":
    sys.exit(main())
