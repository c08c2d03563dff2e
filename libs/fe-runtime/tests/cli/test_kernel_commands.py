"""``fe compile`` and ``fe warmup``, with the compiler replaced: which kernels they choose, and what they say."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from fe_runtime import arrays
from fe_runtime.bench.workload import Workload
from fe_runtime.cli import main, selection
from fe_runtime.cli.support import CommandError
from fe_runtime.compile import ahead, cache
from fe_runtime.compile.spec import KernelSpec
from fe_runtime.compile.toolchain import ToolchainError
from fe_runtime.plan import HOPPER


class Compiler:
    """Stands for ``compile_many`` and ``warmup``: remembers what it was asked for, fails for chosen architectures."""

    def __init__(self) -> None:
        self.asked: list[KernelSpec] = []
        self.jobs: int | None = None
        self.failing: str = ""
        self.stored: set[str] = set()

    def compile_many(self, specs: Iterable[KernelSpec], jobs: int | None = None, progress: Any = None) -> None:
        self.asked, self.jobs = list(specs), jobs
        for number, spec in enumerate(self.asked, 1):
            failed = spec.arch == self.failing
            progress(number, len(self.asked), spec, RuntimeError("it spills") if failed else 1.5)

    def warmup(self, specs: Iterable[KernelSpec], progress: Any = None) -> list[tuple[KernelSpec, float]]:
        self.asked = list(specs)
        for number, spec in enumerate(self.asked, 1):
            progress(number, len(self.asked), spec, 0.002)
        return [(spec, 0.002) for spec in self.asked]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scale: Workload) -> Compiler:
    made = Compiler()
    monkeypatch.setenv("FE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(arrays, "cuda_is_available", lambda: False)
    monkeypatch.setattr(ahead, "compile_many", made.compile_many)
    monkeypatch.setattr(ahead, "warmup", made.warmup)
    monkeypatch.setattr(cache, "is_stored", lambda spec: spec.identity in made.stored)
    return made


def _columns(specs: Iterable[KernelSpec]) -> list[object]:
    return [dict(spec.config)["columns"] for spec in specs]


def test_the_default_preset_is_compiled_once_per_kernel(compiler: Compiler, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "fe-example", "--jobs", "1"]) == 0
    assert _columns(compiler.asked) == [64, 128]  # two cases differ only in rows
    assert {spec.arch for spec in compiler.asked} == {"sm_90a"}
    assert compiler.jobs == 1
    assert "2 kernels compiled, 0 were there already, 0 failed" in capsys.readouterr().out


def test_every_architecture_and_every_preset(compiler: Compiler) -> None:
    assert main(["compile", "--arch", "sm_80", "sm_100a", "--preset", "all"]) == 0
    assert _columns(compiler.asked) == [64, 64, 128, 128, 256, 256]  # 7 columns have no kernel
    assert {spec.arch for spec in compiler.asked} == {"sm_80", "sm_100a"}


def test_a_failure_is_named_and_is_status_1(compiler: Compiler, capsys: pytest.CaptureFixture[str]) -> None:
    compiler.failing = "sm_120a"
    assert main(["compile", "--arch", "sm_90a", "sm_120a"]) == 1
    printed = capsys.readouterr().out
    assert "failed: fe_example.scale sm_120a (columns=64): it spills" in printed
    assert "2 kernels compiled, 0 were there already, 2 failed" in printed


def test_a_missing_compiler_is_one_clear_error(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*_arguments: object, **_keywords: object) -> None:
        raise ToolchainError("no compiler. Run: pip install it")

    monkeypatch.setattr(ahead, "compile_many", missing)
    assert main(["compile"]) == 2
    assert capsys.readouterr().err == "fe compile: no compiler. Run: pip install it\n"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["fe-none"], "library 'fe-none' has no operations here; libraries with operations: fe-example"),
        (["--preset", "huge"], "unknown preset 'huge'; there are default, odd and all"),
        (["--arch", "hopper"], "unknown architecture 'hopper'"),
        (["--arch", "sm_90"], "kernels for 'sm_90' are compiled as 'sm_90a'; use that name"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.parametrize("command", ["compile", "warmup"])
def test_a_wrong_request_is_one_clear_error(
    compiler: Compiler, command: str, arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *arguments]) == 2
    assert problem in capsys.readouterr().err
    assert compiler.asked == []


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"])
def test_targets_are_of_their_architecture(arch: str, compiler: Compiler) -> None:
    assert selection.target_for(arch).arch == arch


def test_the_gpu_that_is_here_is_the_target(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    from fe_runtime.plan import Target

    here = Target((9, 0), 114)
    monkeypatch.setattr(selection, "_target_here", lambda: here)
    assert selection.target_for("sm_90a") == here
    assert selection.target_for("sm_80") != here
    assert selection.kernel_specs([], [HOPPER], "default") == []


def test_warmup_loads_what_is_stored_and_names_the_rest(compiler: Compiler, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile"]) == 0
    every = compiler.asked
    compiler.stored = {every[0].identity}
    assert main(["warmup", "fe-example"]) == 1
    assert compiler.asked == every[:1]
    printed = capsys.readouterr().out
    assert "1 of 2 kernels loaded in 2 ms" in printed
    assert "1 are missing. Build them: fe compile fe-example" in printed
    compiler.stored = {spec.identity for spec in every}
    assert main(["warmup"]) == 0


def test_an_architecture_needs_digits() -> None:
    with pytest.raises(CommandError, match="sm_x"):
        selection.target_for("sm_x")
