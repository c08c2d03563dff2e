from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from fe_runtime.bench import run as bench_run
from fe_runtime.bench.limits import Limit
from fe_runtime.bench.workload import Workload
from fe_runtime.cli import main
from fe_runtime.cli.bench import chosen_cases, print_record
from fe_runtime.cli.support import CommandError
from fe_runtime.cli.terminal import Terminal


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scale: Workload) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_run, "copy_limit", lambda _place: Limit("bytes", 30e9, "numpy copy"))


def test_record_table_and_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "scale", "--shape", "8x64", "--repetitions", "20", "--framework", "torch", "--peers"]
    assert main([*command, "--json", "a.json", "--png", "a.png", "--commit", "abc"]) == 0
    printed = capsys.readouterr().out
    for part in (
        "limit: 30 GB/s",
        "Kernels need a GPU",
        "8x64 bf16",
        "twice (the same)",
        "less work",
    ):
        assert part in printed
    assert "absent (the same): not available: ModuleNotFoundError" in printed
    assert "as fast" not in printed  # nobody measured a kernel
    record = json.loads(Path("a.json").read_text())
    assert record["results"][0]["dims"] == {"T": 8, "C": 64}
    assert main(["plot", "a.json", "--output", "b.png"]) == 0
    assert imread("a.png").shape == imread("b.png").shape


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_fits_with_every_cell_whole(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    print_record(Terminal(interactive=False), _gpu_record())
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= width
    fe, plain, peer = printed.splitlines()[-3:]
    assert fe.split()[:3] == ["fe", "180", "us"]
    assert plain.endswith("1.73x as fast")
    assert peer.startswith("  liger-kernel (norm, then torch silu), less work")
    assert peer.endswith("(0.94x as fast)")
    assert ("175 to 190 us" in fe) == (width == 140)


def test_without_a_gpu_it_says_which_cases_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scale", "--repetitions", "20", "--framework", "numpy"]) == 0
    assert capsys.readouterr().out.startswith("Without a GPU, the small cases of fe demo are timed")


def _gpu_record() -> dict[str, Any]:
    def entry(name: str, median: float, faster: float, same_work: bool = True) -> dict[str, Any]:
        times = {"median_us": median, "p10_us": median - 5, "p90_us": median + 10, "repetitions": 50}
        rates = {"per_second": 3e12, "share_of_limit": 0.75, "ours_is_faster": faster}
        return {"name": name, "does": "", "same_work": same_work, **times, **rates}

    entries = [entry("fe", 180, 1), entry("plain", 311, 1.73)]
    entries.append(entry("liger-kernel (norm, then torch silu)", 169, 0.94, same_work=False))
    return {
        "operation": "scale",
        "summary": "factor * x",
        "gpu": {"name": "NVIDIA H200", "driver": "570"},
        "device": "cuda:0",
        "framework": "torch",
        "method": {"clock": "CUDA events"},
        "limit": {"kind": "bytes", "per_second": 4e12, "what": "a copy"},
        "host": None,
        "results": [
            {"shape": "16384x8192", "format": "bf16", "backend": "sm90", "entries": entries, "unavailable": {}}
        ],
    }


def test_an_option_given_twice_counts_twice() -> None:
    shapes = ["--shape", "2x8", "--shape", "4x8", "2x16"]
    assert main(["bench", "scale", *shapes, "--repetitions", "20", "--json", "c.json"]) == 0
    assert [result["shape"] for result in json.loads(Path("c.json").read_text())["results"]] == ["2x8", "4x8", "2x16"]


def test_plot_writes_beside_the_record(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scale", "--shape", "2x8", "--repetitions", "20", "--json", "c.json"]) == 0
    assert main(["plot", "c.json"]) == 0
    assert Path("c.png").stat().st_size > 10_000
    assert capsys.readouterr().out.endswith("c.png\n")


@pytest.mark.parametrize(
    ("text", "problem"),
    [(None, "cannot be read"), ("{", "cannot be read"), ("[]", "is no record"), ('{"schema": "x"}', "is no record")],
)
def test_plot_rejects_what_is_no_record(text: str | None, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    if text is not None:
        Path("bad.json").write_text(text)
    assert main(["plot", "bad.json"]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["skale"], "there is no operation 'skale'; the installed libraries have: scale"),
        (["scale", "--repetitions", "3"], "repetitions must be at least 20; got 3"),
        (["scale", "--shape", "8"], "--shape of scale must be TxC; got '8'"),
        (["scale", "--shape", "8xa"], "--shape of scale must be TxC; got '8xa'"),
        (["scale", "--dtype", "fp16"], "no case of scale has dtype float16; give a --shape too"),
        (["scale", "--shape", "2x8", "--option", "factor"], "--option must be NAME=VALUE; got 'factor'"),
        (["scale", "--option", "factor=2.0"], "--option needs --shape"),
        (["scale", "--shape", "2x8", "--dtype", "fp16"], "x_tensor must have dtype"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_request_is_one_clear_error(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert problem in capsys.readouterr().err


def test_without_shape_the_workload_chooses_large_cases_for_a_gpu_and_small_ones_for_a_cpu(scale: Workload) -> None:
    assert chosen_cases(scale, None, None, [], on_gpu=True) == list(scale.bench)
    assert chosen_cases(scale, None, None, [], on_gpu=False) == list(scale.demo)
    assert chosen_cases(scale, None, ["bf16"], [], on_gpu=False) == [scale.demo[1]]


def test_every_shape_meets_every_dtype(scale: Workload) -> None:
    cases = chosen_cases(scale, ["2x8", "4X16"], ["bf16", "float32"], ["factor=0.5"], on_gpu=True)
    assert [(case.shape, case.dtype) for case in cases] == [
        ("2x8", "bfloat16"),
        ("2x8", "float32"),
        ("4x16", "bfloat16"),
        ("4x16", "float32"),
    ]
    assert all(case.options == {"factor": 0.5} for case in cases)


def test_text_options_stay_text(scale: Workload) -> None:
    (case,) = chosen_cases(scale, ["2x8"], None, ["out_dtype=nvfp4", "causal=true"], on_gpu=True)
    assert case.options == {"out_dtype": "nvfp4", "causal": True}


def test_an_unknown_dtype_is_left_to_the_contract(scale: Workload) -> None:
    (case,) = chosen_cases(scale, ["2x8"], ["nonsense"], [], on_gpu=True)
    assert case.dtype == "nonsense"


def test_a_missing_framework_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from fe_runtime.bench import places
    from fe_runtime.cli.support import place_for

    def missing(_framework: str | None) -> None:
        raise ImportError

    monkeypatch.setattr(places, "find_place", missing)
    with pytest.raises(CommandError, match=r"torch is not installed. Run: pip install 'fe-runtime\[torch\]'"):
        place_for("torch")
