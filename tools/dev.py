"""Install what is missing, then run the demo, the tests or the checks. Needs Python 3.11+ and pip, nothing else.

    python tools/dev.py demo [ARGUMENTS of fe demo]
    python tools/dev.py test [ARGUMENTS of pytest]
    python tools/dev.py check

Everything goes into two folders of the repository, ``.venv`` and (where the machine has no recent uv) ``.tools``; the
system's Python is not touched. ``--dry-run`` before the command prints what would run.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import lock

__all__ = ["CHECKS", "environment", "find_uv", "main", "sync_command"]

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / ".tools"
UV_FLOOR = (0, 8)

CHECKS = {
    "lint": ["ruff", "check", "--quiet", "."],
    "format": ["ruff", "format", "--check", "--quiet", "."],
    "types": ["mypy"],
    "spelling": ["codespell"],
    "lock": ["python", "tools/lock.py", "--check"],
    "docs": ["python", "tools/docs.py", "--check"],
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command of the module's docstring and return its exit status."""
    parser = argparse.ArgumentParser(description="Install what is missing, then run the demo, the tests or the checks.")
    parser.add_argument("--dry-run", action="store_true", help="print the commands instead of running them")
    parser.add_argument("command", choices=["demo", "test", "check"])
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="handed to fe demo or pytest")
    options = parser.parse_args(arguments)
    if sys.version_info < (3, 11):  # noqa: UP036 - this file runs before anything is installed
        raise SystemExit(f"tools/dev.py needs Python 3.11 or newer; this is {sys.version.split()[0]}")
    if options.dry_run:
        for command in [sync_command("uv", options.command), *_commands("uv", options.command, options.rest).values()]:
            print(" ".join(command))
        return 0
    uv = find_uv()
    env = environment(uv)
    _install(sync_command(uv, options.command), env)
    failed = []
    for name, command in _commands(uv, options.command, options.rest).items():
        status = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
        if options.command == "check":
            print(f"{name}: {'failed' if status else 'ok'}", flush=True)
        if status:
            failed.append(status)
    return failed[0] if failed else 0


def find_uv() -> str:
    """Return a uv that is recent enough, installing one into ``.tools`` with pip where there is none."""
    found = shutil.which("uv")
    if found and _version(found) >= UV_FLOOR:
        return found
    private = shutil.which("uv", path=str(TOOLS / "bin"))
    if private and _version(private) >= UV_FLOOR:
        return private
    floor = ".".join(map(str, UV_FLOOR))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    install = [*pip, "install", "--root-user-action=ignore", "--no-user", "--upgrade", "--target", str(TOOLS)]
    status = subprocess.run([*install, f"uv>={floor}"], check=False).returncode
    private = shutil.which("uv", path=str(TOOLS / "bin"))
    if status or private is None:
        raise SystemExit(f"pip could not install uv (see above). Install uv {floor} or newer and run this again.")
    return private


def environment(uv: str) -> dict[str, str]:
    """Return the environment that the commands run in: this Python, this uv, and the index that is set up here."""
    env = dict(os.environ)
    env["PATH"] = os.pathsep.join([str(Path(uv).parent), env.get("PATH", "")])
    env.pop("VIRTUAL_ENV", None)  # the workspace's own environment is meant, whichever is active
    env.setdefault("UV_PYTHON_DOWNLOADS", "never")
    if not (ROOT / ".venv").exists():
        env.setdefault("UV_PYTHON", sys.executable)
    if TOOLS in Path(uv).parents:  # a machine that came with uv has it set up; here only pip is
        for variable, value in _pip_settings().items():
            env.setdefault(variable, value)
    return env


def sync_command(uv: str, command: str) -> list[str]:
    """Return the command that installs what ``command`` needs and removes nothing."""
    quiet = ["--quiet"] if os.environ.get("CI") else []
    if command != "demo":
        return [uv, "sync", "--inexact", *quiet]
    groups = ["demo", "frameworks"] if _has_gpu() else ["demo"]  # kernels are launched through torch or JAX
    wanted = [part for group in groups for part in ("--group", group)]
    return [uv, "sync", "--inexact", "--no-default-groups", *wanted, *quiet]


def _install(command: list[str], env: dict[str, str]) -> None:
    """Run the sync and put the lock back, into which uv writes the addresses of this machine's index."""
    path = ROOT / "uv.lock"
    before = path.read_text(encoding="utf-8")
    try:
        status = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
    finally:
        path.write_text(lock.neutral(before), encoding="utf-8")
    if status:
        raise SystemExit(f"could not install what is missing (see above): {' '.join(command)}")


def _commands(uv: str, command: str, rest: list[str]) -> dict[str, list[str]]:
    run = [uv, "run", "--no-sync"]
    if command == "check":
        return {name: [*run, *check] for name, check in CHECKS.items()}
    return {command: [*run, *(["fe", "demo"] if command == "demo" else ["pytest"]), *rest]}


def _has_gpu() -> bool:
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True, check=False).returncode == 0


def _version(uv: str) -> tuple[int, ...]:
    printed = subprocess.run([uv, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"(\d+)\.(\d+)", printed)
    return (int(match[1]), int(match[2])) if match else (0,)


def _pip_settings() -> dict[str, str]:
    """Return pip's index and certificate settings under the names that uv reads."""
    printed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    names = {"index-url": "UV_DEFAULT_INDEX", "cert": "SSL_CERT_FILE"}
    settings = {}
    for key, value in re.findall(r"^\S+\.([a-z-]+)=(.+)$", printed.stdout, re.MULTILINE):
        if key in names:
            settings[names[key]] = str(ast.literal_eval(value))
    return settings


if __name__ == "__main__":
    sys.exit(main())
