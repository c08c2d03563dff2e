from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from fe_runtime.bench import pictures
from fe_runtime.bench.demo import DemoRow

RIGHT = DemoRow("scale", "3x16", "bf16", "sm90 kernel", True, 1e-3, 2e-3, 0.9, 1e-4, 4e-4)
EXACT = DemoRow("scale", "3x16", "fp32", "sm90 kernel", True, 0.0, 1e-7, 0.0, 1e-4, None)
WRONG = DemoRow("scale", "3x16", "fp16", "sm90 kernel", False, float("inf"), 1e-3, float("inf"), 2e-4, 1e-4)
FAILED = DemoRow("scale", "3x16", "fp8", note="RuntimeError: no")


def _entry(name: str, rate: float, same_work: bool = True) -> dict[str, Any]:
    return {"name": name, "does": "", "same_work": same_work, "per_second": rate}


def _record(kind: str, gpu: bool, cases: int) -> dict[str, Any]:
    result = {
        "shape": "16384x8192",
        "format": "bf16",
        "entries": [_entry("fe", 4.0e12), _entry("plain", 1e12), _entry("quack (norm only)", 3.9e12, False)],
    }
    return {
        "operation": "scale",
        "summary": "factor * x",
        "date": "2026-01-02T03:04:05+00:00",
        "gpu": {"name": "NVIDIA H200"} if gpu else None,
        "machine": {"cpu": "a CPU"},
        "limit": {"kind": kind, "per_second": 4.2e12},
        "results": [result] * cases,
    }


def _check(path: Path, rows: int, wide: float) -> np.ndarray[Any, Any]:
    picture = imread(path)
    height, width, _ = picture.shape
    assert width == round(wide * pictures.DPI)
    assert height == pytest.approx((1.9 + 0.46 * max(rows, 2)) * pictures.DPI, abs=1)
    assert (picture[..., :3].mean(axis=-1) < 0.5).mean() > 0.003  # there is ink on it
    return picture


@pytest.mark.parametrize("rows", [[RIGHT], [RIGHT, EXACT, WRONG, FAILED], [FAILED]], ids=["one", "all kinds", "failed"])
def test_the_demo_is_drawn_whatever_came_out(rows: list[DemoRow], tmp_path: Path) -> None:
    path = tmp_path / "folder" / "demo.png"
    pictures.draw_demo({"torch on cuda:0": rows}, path)
    _check(path, len(rows), 12.0)


def test_several_places_share_one_picture(tmp_path: Path) -> None:
    pictures.draw_demo({"numpy on cpu": [RIGHT], "torch on cpu": [RIGHT]}, tmp_path / "demo.png")
    _check(tmp_path / "demo.png", 2, 12.0)


def test_a_wrong_row_is_red(tmp_path: Path) -> None:
    def red(rows: list[DemoRow]) -> int:
        pictures.draw_demo({"numpy on cpu": rows}, tmp_path / "demo.png")
        colour = imread(tmp_path / "demo.png")[..., :3]
        wanted = np.array([0xD1, 0x24, 0x2F]) / 255
        return int((np.abs(colour - wanted).max(axis=-1) < 0.02).sum())

    assert red([RIGHT]) == 0
    assert red([RIGHT, WRONG]) > 50


@pytest.mark.parametrize(("kind", "gpu", "cases"), [("bytes", True, 14), ("flops", True, 1), ("bytes", False, 3)])
def test_a_record_is_drawn(kind: str, gpu: bool, cases: int, tmp_path: Path) -> None:
    pictures.draw_record(_record(kind, gpu, cases), tmp_path / "bench.png")
    _check(tmp_path / "bench.png", cases if cases > 1 else 3, 9.5)  # a single case has a row for each implementation


def test_an_exact_result_is_marked_not_measured() -> None:
    _, (axes,) = pictures._figure(2, (1.0,))
    pictures._draw_errors(axes, [RIGHT, EXACT], ["right", "exact"])
    (label,) = [text for text in axes.texts if text.get_text()]
    assert label.get_text() == "exact"
    found = [line for line in axes.lines if line.get_marker() == "o"]
    assert [line.get_ydata()[0] for line in found] == [0]  # no dot where nothing was measured


def test_a_single_case_says_its_rates() -> None:
    _, (axes,) = pictures._figure(3, (1.0,))
    (result,) = _record("bytes", True, 1)["results"]
    limit = {"kind": "bytes", "per_second": 4.0e12}
    pictures._draw_bars(axes, result, limit, 1e9, dict.fromkeys(("fe", "plain", "quack (norm only)"), "#1f6feb"))
    texts = [text.get_text() for text in axes.texts]
    assert texts[:2] == ["4000 GB/s, 100.0% of the limit", "1000 GB/s, 25.0% of the limit"]
    assert axes.get_yticklabels()[2].get_text() == "quack (norm only): less work"


def test_long_names_keep_off_the_edge(tmp_path: Path) -> None:
    long = DemoRow("a_long_operation_name", "1560x1024", "bf16 -> nvfp4 + bias", "x", True, 1e-3, 2e-3, 0.9, 1e-4, 4e-4)
    pictures.draw_demo({"torch on cuda:0": [long]}, tmp_path / "demo.png")
    edge = imread(tmp_path / "demo.png")[:, : round(pictures.DPI * pictures.MARGIN * 0.9), :3]
    assert edge.min() > 0.99


def test_no_display_and_no_pyplot_are_needed(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from fe_runtime.bench import pictures; "
        "from fe_runtime.bench.demo import DemoRow; "
        f"pictures.draw_demo({{'numpy on cpu': [DemoRow('a', 'b', 'c')]}}, Path({str(tmp_path / 'a.png')!r})); "
        "print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
