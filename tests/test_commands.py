"""What README.md and CONTRIBUTING.md tell people to run does work, also on a machine that has only Python and pip."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import dev
import lock
import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "CONTRIBUTING.md"]


def test_readme_states_the_two_commands() -> None:
    assert re.findall(r"^python tools/dev.py .*$", _page("README.md"), re.MULTILINE) == [
        "python tools/dev.py demo",
        "python tools/dev.py test",
    ]


def test_ci_calls_the_test_command() -> None:
    assert "python3 tools/dev.py test" in (ROOT / ".ci/run").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_links_and_files_exist(page: str) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", _page(page))
    files = re.findall(r"(?:python3?|bash) ([\w./-]+\.py|\.ci/run)", _page(page))
    assert [name for name in [*links, *files] if not (ROOT / name).exists()] == []


def test_python_in_the_readme_runs() -> None:
    """With numpy alone, also where frameworks are installed."""
    (code,) = re.findall(r"```python\n(.*?)```", _page("README.md"), re.DOTALL)
    code += "import sys\nprint(sorted({'torch', 'jax', 'cutlass'} & set(sys.modules)))\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(4, 256) (4, 128) (4, 16)\n[]\n"


def test_the_demo_installs_no_framework_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(dev, "_has_gpu", lambda: False)
    assert " ".join(dev.sync_command("uv", "demo")) == "uv sync --inexact --no-default-groups --group demo"
    monkeypatch.setattr(dev, "_has_gpu", lambda: True)
    assert dev.sync_command("uv", "demo")[-2:] == ["--group", "frameworks"]


@pytest.mark.parametrize(("printed", "taken"), [("uv 0.13.9 (abc)", True), ("uv 0.7.22", False), ("", False)])
def test_an_old_uv_is_not_taken(
    printed: str, taken: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_uv: Callable[[Path, str], Path]
) -> None:
    there = fake_uv(tmp_path / "bin", printed)
    private = fake_uv(tmp_path / "tools/bin", "uv 0.9.0")
    monkeypatch.setenv("PATH", str(there.parent), prepend=os.pathsep)
    monkeypatch.setattr(dev, "TOOLS", tmp_path / "tools")
    assert dev.find_uv() == str(there if taken else private)


def test_pips_index_is_handed_to_the_uv_that_pip_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_uv: Callable[[Path, str], Path], python_with_pip: str
) -> None:
    monkeypatch.setattr(sys, "executable", python_with_pip)
    monkeypatch.setattr(dev, "TOOLS", tmp_path / "tools")
    monkeypatch.setenv("PIP_INDEX_URL", "scheme://index.invalid/simple")
    monkeypatch.delenv("UV_DEFAULT_INDEX", raising=False)
    own = dev.environment(str(fake_uv(tmp_path / "tools/bin", "uv 0.9.0")))
    assert own["UV_DEFAULT_INDEX"] == "scheme://index.invalid/simple"
    assert "UV_DEFAULT_INDEX" not in dev.environment(str(fake_uv(tmp_path / "bin", "uv 0.9.0")))


@pytest.mark.wheel
@pytest.mark.timeout(900)
def test_both_commands_on_a_machine_with_python_and_pip_only(tmp_path: Path, python_with_pip: str) -> None:
    _copy_repository(tmp_path)
    env = _environment_without_uv()
    shown = _run(python_with_pip, "tools/dev.py", "demo", cwd=tmp_path, env=env)
    assert "rmsnorm_silu" in shown
    assert (tmp_path / "fe-demo.png").stat().st_size > 0
    packages = next((tmp_path / ".venv").rglob("site-packages"))
    assert (packages / "numpy").is_dir()
    assert not (packages / "torch").exists()
    shown = _run(python_with_pip, "tools/dev.py", "test", "libs/fe-rope", cwd=tmp_path, env=env)
    assert re.search(r"\d+ passed", shown)
    left = (tmp_path / "uv.lock").read_text(encoding="utf-8")
    assert lock.problems(left) == []
    assert lock.pins(left) == lock.pins(lock.committed())


@pytest.fixture(scope="module")
def python_with_pip() -> str:
    """The Python that this environment was made from, as a user of a fresh machine has it."""
    python = str(getattr(sys, "_base_executable", sys.executable))
    if subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode:
        pytest.skip("the Python behind this environment has no pip")
    return python


@pytest.fixture
def fake_uv() -> Callable[[Path, str], Path]:
    """Make a program called uv in a folder that prints one line whatever it is asked."""

    def make(folder: Path, printed: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        program = folder / "uv"
        program.write_text(f"#!/bin/sh\necho '{printed}'\n")
        program.chmod(0o755)
        return program

    return make


def _page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _environment_without_uv() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("VIRTUAL_ENV", "UV_", "PYTHON"))}
    folders = env["PATH"].split(os.pathsep)
    env["PATH"] = os.pathsep.join(folder for folder in folders if shutil.which("uv", path=folder) is None)
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_CACHE_DIR"):  # how this machine reaches packages stays
        if name in os.environ:
            env[name] = os.environ[name]
    return env


def _copy_repository(target: Path) -> None:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode("utf-8")
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    (target / "uv.lock").write_text(lock.committed(), encoding="utf-8")


def _run(*command: str, cwd: Path, env: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout
