from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from fe_runtime.bench import discover
from fe_runtime.bench.demo import DemoRow
from fe_runtime.bench.workload import Arrays, Case, Expected, Workload
from fe_runtime.cli import demo, main
from fe_runtime.cli.terminal import Terminal


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: Workload) -> None:
    monkeypatch.chdir(tmp_path)


def test_table_picture_and_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--framework", "numpy", "--json", "demo.json"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("reference on the CPU") == 2
    assert "5x8" in printed
    assert "bf16, factor=3.0" in printed
    assert "all 2 results are within their bound; picture: fe-demo.png" in printed
    assert imread(tmp_path / "fe-demo.png").shape[1] == 1800
    record = json.loads((tmp_path / "demo.json").read_text())
    rows = record["rows"]["numpy on cpu"]
    assert [row["ok"] for row in rows] == [True, True]
    assert record["machine"]["cpu"]


def test_no_speed_is_claimed_for_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--framework", "numpy"]) == 0
    printed = capsys.readouterr().out
    assert "time of fe" in printed
    assert "as fast" not in printed
    assert "faster" not in printed


def test_the_speed_of_a_kernel_says_who_is_how_fast(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        DemoRow("scale", "3x16", "bf16", "sm90 kernel", True, 1e-3, 2e-3, 0.9, 2e-5, 6e-5),
        DemoRow("scale", "3x16", "fp32", "sm90 kernel", True, 0.0, 1e-7, 0.0, 4e-5, 2e-5),
    ]
    demo._print_table(Terminal(140, False), "torch on cuda:0", rows)
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert first.split("  ")[-1] == "3.00x as fast"
    assert "20.0 us" in first
    assert "60.0 us" in first
    assert second.split("  ")[-1] == "0.50x as fast"
    assert "exact" in second


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_fits_with_every_cell_whole(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["demo", "--framework", "numpy"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines()[:-2])) <= width
    for cell in ("3x16", "5x8", "fp32", "bf16, factor=3.0", "reference on the CPU", "exact", "bound", "ok"):
        assert cell in printed


def test_several_frameworks_get_a_table_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--framework", "numpy", "torch", "--output", "two.png"]) == 0
    printed = capsys.readouterr().out
    assert "fe demo: numpy on cpu" in printed
    assert "fe demo: torch on" in printed
    assert Path("two.png").stat().st_size > 10_000


def test_an_error_above_its_bound_is_status_1(
    scale: Workload, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def expected(_case: Case, inputs: Arrays) -> Expected:
        x = inputs["x_tensor"].astype(np.float64)
        return Expected(x * 2, np.abs(x) * 1e-3)  # the second case has factor 3

    wrong = dataclasses.replace(scale, expected=expected)
    monkeypatch.setattr(discover, "load_target", lambda _target: (wrong,))
    assert main(["demo", "--framework", "numpy"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("WRONG") == 1
    assert "1 of 2 results are not right" in printed


def test_a_library_that_does_not_import_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = [("fe_example", "fe_example.workloads:WORKLOADS"), ("fe_gone", "fe_gone.workloads:WORKLOADS")]
    monkeypatch.setattr(discover, "_on_the_path", lambda: both)
    assert main(["demo", "--framework", "numpy"]) == 0
    assert "fe_gone is left out: ModuleNotFoundError" in capsys.readouterr().err
