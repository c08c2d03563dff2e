from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fe_runtime._version import __version__
from fe_runtime.cli import COMMANDS, main

FOLDER = Path(__file__).parents[1] / "bench"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert all(f"\n    {command} " in printed for command in COMMANDS)


def test_without_a_command_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "usage: fe" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"fe-runtime {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"usage: fe {command}" in capsys.readouterr().out


def test_help_loads_no_framework_and_draws_nothing() -> None:
    code = (
        "import sys\nfrom fe_runtime.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = ['torch', 'jax', 'cutlass', 'numpy', 'matplotlib', 'rich']\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_module_runs_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fe_runtime.cli", "plot", "nothing.json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("fe plot: nothing.json cannot be read")


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from fe_runtime.cli import doctor

    def interrupted(_options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupted)
    assert main(["doctor"]) == 130


@pytest.mark.parametrize("arguments", [["bench", "scale", "--png", "a.png"], ["plot", "a.json"]], ids=" ".join)
def test_pictures_without_matplotlib_are_one_clear_error(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fe_runtime.cli import support

    monkeypatch.setattr(support.importlib.util, "find_spec", lambda _name: None)
    assert main(arguments) == 2
    said = "it needs matplotlib, which is not installed. Run: pip install matplotlib"
    assert capsys.readouterr().err == f"fe {arguments[0]}: {said}\n"


PLAIN_INSTALL = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})

class Absent:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("torch", "jax", "jaxlib"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
sys.modules["matplotlib"] = None
from fe_runtime.bench import discover, limits, run
discover._entry_points = lambda: iter(())
discover._on_the_path = lambda: [("fe_example", "fe_example.workloads:WORKLOADS")]
run.copy_limit = lambda place: limits.Limit("bytes", 1e9, "a copy")  # it takes seconds, and has tests of its own
from fe_runtime.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["doctor"], "how the operations run here"),
        (["warmup"], "0 of 2 kernels loaded"),
        (["demo"], "all 2 results are within their bound; no picture: it needs matplotlib"),
        (["bench", "scale", "--shape", "2x8", "--repetitions", "20"], "2x8 bf16 (reference)"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_plain_install_has_every_command_but_pictures(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLAIN_INSTALL, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "FE_CACHE_DIR": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert said in done.stdout, done.stderr
    assert done.returncode == (1 if arguments[0] == "warmup" else 0), done.stderr


def test_a_closed_pipe_is_no_traceback() -> None:
    code = "import sys; from fe_runtime.cli import main; sys.exit(main(['doctor']))"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_library_at_all_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fe_runtime.bench import discover

    monkeypatch.setattr(discover, "_entry_points", lambda: iter(()))
    monkeypatch.setattr(discover, "_on_the_path", list)
    assert main(["compile"]) == 2
    said = "no operation is installed. In a clone of fe, run: pip install ./libs/fe-runtime ./libs/fe-norm"
    assert said in capsys.readouterr().err
