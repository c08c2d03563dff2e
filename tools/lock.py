"""Keep ``uv.lock`` registry-neutral: it pins versions and names no package index and no download address.

Every user sits behind a different index, so the committed lock says which versions belong together and nothing about
where to get them. uv takes each pin of the neutral form as a preference and resolves against the index that is
configured on the machine; while it works it rewrites the file with the addresses of that index.

    python tools/lock.py            resolve (keeping the pins), then write the neutral form
    python tools/lock.py --upgrade  the same with the newest allowed versions
    python tools/lock.py --check    exit 1 unless the lock is neutral, complete and up to date; writes nothing
    python tools/lock.py --restore  only rewrite the file to the neutral form; no network
    python tools/lock.py --install-filter  let git see the neutral form whatever uv wrote (once per clone)
    python tools/lock.py --filter   standard input to standard output; what that git filter runs
"""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["ROOT", "committed", "main", "neutral", "pins", "problems", "resolve"]

ROOT = Path(__file__).resolve().parents[1]

_REGISTRY = re.compile(r'registry = "[^"]*"')
_NEUTRAL_REGISTRY = 'registry = "index"'
_FILTER = "fe-lock"


def main(arguments: list[str] | None = None) -> int:
    """Run one of the commands of the module's docstring and return the exit status."""
    parser = argparse.ArgumentParser(description="Keep uv.lock registry-neutral.")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--upgrade", action="store_true", help="take the newest allowed versions")
    choice.add_argument("--check", action="store_true", help="fail unless neutral, complete and up to date")
    choice.add_argument("--restore", action="store_true", help="rewrite the file to the neutral form, offline")
    choice.add_argument("--install-filter", action="store_true", help="set up the git filter of this clone")
    choice.add_argument("--filter", action="store_true", help="neutral form of standard input")
    options = parser.parse_args(arguments)
    if options.filter:
        sys.stdout.write(neutral(sys.stdin.read()))
        return 0
    if options.install_filter:
        return _install_filter()
    if options.check:
        return _check()
    path = ROOT / "uv.lock"
    text = path.read_text(encoding="utf-8") if options.restore else resolve(upgrade=options.upgrade)
    path.write_text(neutral(text), encoding="utf-8")
    return 0


def neutral(text: str) -> str:
    """Return a lock file's text without indexes, addresses, hashes and the members' requirement metadata.

    The last are left out because uv trusts a lock whose metadata matches the project, and would then look for the
    addresses; without them it resolves again and takes the pins as preferences.
    """
    kept: list[str] = []
    skip_until: str | None = None  # "]" inside a list of wheels, "[" inside a table that is left out
    for line in text.splitlines():
        if skip_until == "]":
            skip_until = None if line == "]" else skip_until
            continue
        if skip_until == "[":
            if not line.startswith("[") or line.startswith("[package.metadata"):
                continue
            skip_until = None
        if line.startswith("[package.metadata"):
            skip_until = "["
        elif line == "wheels = [":
            skip_until = "]"
        elif not line.startswith(("sdist = ", "wheels = ")):
            kept.append(_REGISTRY.sub(_NEUTRAL_REGISTRY, line))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).rstrip("\n") + "\n"


def committed() -> str:
    """Return the lock as git has it, or, where git does not track it, the neutral form of the file."""
    shown = subprocess.run(["git", "show", ":uv.lock"], cwd=ROOT, capture_output=True, check=False)
    if shown.returncode == 0:
        return shown.stdout.decode("utf-8")
    return neutral((ROOT / "uv.lock").read_text(encoding="utf-8"))


def pins(text: str) -> set[tuple[str, str]]:
    """Return the (name, version) pairs of a lock file's text; the workspace's own members have the version ``""``."""
    import tomllib

    return {(package["name"], package.get("version", "")) for package in tomllib.loads(text).get("package", [])}


def problems(text: str) -> list[str]:
    """Return what makes a lock file's text not neutral or not complete; empty if nothing does."""
    import tomllib  # not at the top: the git filter runs under whatever Python 3 there is

    found = [
        f"line {n} names an address: {line.strip()}" for n, line in enumerate(text.splitlines(), 1) if "://" in line
    ]
    if text != neutral(text):
        found.append("the text is not in the neutral form")
    packages = tomllib.loads(text).get("package", [])
    versions = {package["name"] for package in packages if "version" in package or "editable" in package["source"]}
    for package in packages:
        needed = [*package.get("dependencies", [])]
        for group in ("optional-dependencies", "dev-dependencies"):
            for entries in package.get(group, {}).values():
                needed += entries
        missing = sorted({entry["name"] for entry in needed} - versions)
        found += [f"{package['name']} needs {name}, which is not pinned" for name in missing]
    return found


def resolve(*, upgrade: bool = False, start: str | None = None) -> str:
    """Return what ``uv lock`` writes for this workspace, computed in a temporary copy of the project files."""
    uv = shutil.which("uv")
    if uv is None:
        raise SystemExit("tools/lock.py needs uv on the PATH. Run: python -m pip install uv")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for path in [ROOT / "pyproject.toml", *sorted(ROOT.glob("libs/*/pyproject.toml"))]:
            target = copy / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        for path in ROOT.glob("libs/*/src/*/_version.py"):
            target = copy / path.relative_to(ROOT)
            target.parent.mkdir(parents=True)
            shutil.copy(path, target)
        for path in [*ROOT.glob("libs/*/README.md"), *ROOT.glob("libs/*/LICENSE")]:
            shutil.copy(path, copy / path.relative_to(ROOT))
        lock = copy / "uv.lock"
        lock.write_text((ROOT / "uv.lock").read_text(encoding="utf-8") if start is None else start, encoding="utf-8")
        command = [uv, "lock", "--quiet", "--project", str(copy), *(["--upgrade"] if upgrade else [])]
        subprocess.run(command, cwd=copy, check=True)
        return lock.read_text(encoding="utf-8")


def _check() -> int:
    text = committed()
    found = problems(text) or _difference(text, neutral(resolve(start=text)))
    for line in found:
        print(line)
    if found:
        print("uv.lock is not neutral, complete and up to date. Run: python tools/lock.py")
    return 1 if found else 0


def _difference(old: str, new: str) -> list[str]:
    """What a resolution removes and adds: every line, or only the pins if the uv here writes another revision."""
    before, after = pins(old), pins(new)
    found = [f"- {name} {version}" for name, version in sorted(before - after)]
    found += [f"+ {name} {version}" for name, version in sorted(after - before)]
    if not found and old.splitlines()[:2] == new.splitlines()[:2]:  # the format's version and revision
        changed = difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm="")
        found = [line for line in changed if not line.startswith(("---", "+++", "@@"))]
    return found


def _install_filter() -> int:
    settings = {"clean": "python3 tools/lock.py --filter", "smudge": "cat", "required": "true"}
    for key, value in settings.items():
        subprocess.run(["git", "config", f"filter.{_FILTER}.{key}", value], cwd=ROOT, check=True)
    print("git now sees the neutral form of uv.lock in this clone.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
