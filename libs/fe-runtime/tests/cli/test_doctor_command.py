from __future__ import annotations

import json
from pathlib import Path

import pytest

from fe_runtime.bench.workload import Workload
from fe_runtime.cli import doctor, main
from fe_runtime.compile import toolchain
from fe_runtime.plan import HOPPER


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scale: Workload) -> None:
    from fe_runtime import arrays, collect_env

    monkeypatch.setattr(arrays, "cuda_is_available", lambda: False)
    monkeypatch.setattr(collect_env, "collect_env_info", lambda: {"python": {"version": "3"}})
    monkeypatch.setenv("FE_CACHE_DIR", str(tmp_path / "cache"))


def test_the_report_has_all_its_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", str(tmp_path / "doctor.json")]) == 0
    printed = capsys.readouterr().out
    for part in ("version: 3", "kernel compiler", "kernel cache", "0 kernels", "how the operations run here (no GPU)"):
        assert part in printed
    assert printed.startswith("how the operations run here (no GPU)\n  fe_example.scale: ")
    assert printed.endswith("version: 3\n")  # the long part comes last
    report = json.loads((tmp_path / "doctor.json").read_text())
    assert list(report) == ["operations", "compiler", "cache", "environment"]
    first = report["operations"][0]
    assert first["operation"] == "fe_example.scale"
    assert first["runs"] == "reference"
    assert first["why"] == "no GPU here; on sm_90a a kernel, compiled on first use"


@pytest.mark.parametrize("width", [80, 140])
def test_formats_that_run_alike_share_a_line_that_fits(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    lines = lines[: lines.index("")]
    assert max(map(len, lines)) <= width
    assert lines[1:] == [
        "  fe_example.scale: bf16; fp32; bf16, factor=3.0",
        "    reference: no GPU here; on sm_90a a kernel, compiled on first use",
    ]


def test_kernels_in_the_cache_are_counted(tmp_path: Path) -> None:
    for number, arch in enumerate(("sm_90a", "sm_90a", "sm_100a")):
        entry = tmp_path / "cache" / "v1" / arch / "fe_example.scale" / f"key{number}" / "tools"
        entry.mkdir(parents=True)
        (entry / "meta.json").write_text("{}")
        (entry / "kernel.so").write_bytes(bytes(1000))
    found = doctor._cache()
    assert found["kernels"] == {"fe_example.scale sm_90a": 2, "fe_example.scale sm_100a": 1}
    assert found["bytes"] == 3006


def test_an_unreadable_cache_is_reported_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_arguments: object) -> None:
        raise PermissionError("no access")

    monkeypatch.setattr(Path, "glob", denied)
    assert doctor._cache()["problem"] == "PermissionError: no access"


def test_a_missing_compiler_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing() -> None:
        raise toolchain.ToolchainError("the compiler is not installed. Run: pip install it")

    monkeypatch.setattr(toolchain, "check_toolchain", missing)
    assert main(["doctor"]) == 0  # nothing is wrong with a machine that has no GPU
    printed = capsys.readouterr().out
    assert "the compiler is not installed" in printed
    assert "not in the cache, and it cannot be compiled here" in printed


def test_on_a_gpu_the_kernel_and_the_reason_against_it_are_shown(scale: Workload) -> None:
    served = doctor._how(scale, scale.presets["default"][0], HOPPER, True)
    assert served == {"runs": "sm90 kernel", "why": "sm_90a, compiled on first use"}
    odd = doctor._how(scale, scale.presets["odd"][0], HOPPER, True)
    assert odd == {"runs": "reference", "why": "C is no multiple of 8. Pad the columns."}
