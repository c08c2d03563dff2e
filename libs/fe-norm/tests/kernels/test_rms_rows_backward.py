"""The gradients of the row operations compile, without spills, for every architecture, dtype and kind of row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import fe_runtime
from fe_norm.launch_backward import BackwardLaunch, BackwardProblem, candidates, choose, config
from fe_runtime.compile import KernelSpec, resource_usage

BF16 = "bfloat16"
FLOATS = (BF16, "float16", "float32")
SIZE = {BF16: 2, "float16": 2, "float32": 4}
ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
REGISTERS = 65536  # of a multiprocessor
PROCESSORS = 132


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    fe_runtime.configure(cache_dir=tmp_path)
    yield
    fe_runtime.configure(cache_dir=None)


def check(problem: BackwardProblem, arch: str, launch: BackwardLaunch | None = None) -> None:
    launch = launch or choose(problem, arch, PROCESSORS)
    builder = "fe_norm.kernels.rms_rows_backward:build"
    usage = resource_usage(KernelSpec.of("fe_norm.rows", builder, arch, **config(problem, launch)))
    name = "fe_norm_rms_norm_backward" if problem.activation is None else "fe_norm_rmsnorm_silu_backward"
    rows = [symbol for symbol in usage if "_sums" not in symbol]
    assert len(rows) == 1
    assert len(usage) == 1 + (problem.sums > 0)
    assert all(symbol.startswith(name) for symbol in usage)
    assert ("long_rows" in rows[0]) == (not launch.is_one_pass(problem))
    for symbol, found in usage.items():
        assert found.frame_bytes == 0, f"{symbol} of {problem} {launch} spills {found.frame_bytes} bytes"
    assert usage[rows[0]].registers * launch.threads * launch.blocks_per_sm <= REGISTERS


def contiguous(
    columns: int, x: str = BF16, dout: str = BF16, weight: str | None = BF16, bias: str | None = None, **other: object
) -> BackwardProblem:
    x_alignment, dout_alignment = (min(16, size & -size) for size in (columns * SIZE[x], columns * SIZE[dout]))
    alignments = {"x_alignment": x_alignment, "dout_alignment": dout_alignment}
    return BackwardProblem(columns, x, dout, weight, bias, **{**alignments, **other})  # type: ignore[arg-type]


SILU = {"activation": "silu", "has_rstd": False}

SAMPLE = {
    "usual row": contiguous(4096),
    "long row": contiguous(8192),
    "with the gradient of the sum": contiguous(8192, has_residual=True),
    "short rows": contiguous(128),
    "rows of a warp": contiguous(1024, bias=BF16),
    "odd row": contiguous(33, bias="float32"),
    "sums in memory": contiguous(100_000, bias=BF16, has_residual=True),
    "silu": contiguous(2048, bias=BF16, **SILU),
    "silu, sums in memory": contiguous(100_000, **SILU),
    "neither weight nor bias": contiguous(512, weight=None),
    "statistics again": contiguous(512, has_rstd=False),
    "unaligned": contiguous(4096, x_alignment=2, dout_alignment=4, weight_alignment=8),
}


@pytest.mark.parametrize("problem", SAMPLE.values(), ids=list(SAMPLE))
def test_sample(problem: BackwardProblem) -> None:
    check(problem, "sm_90a")


@pytest.mark.parametrize("arch", [a for a in ARCHITECTURES if a != "sm_90a"])
def test_sample_of_architectures(arch: str) -> None:
    check(contiguous(4096), arch)
    check(contiguous(1024, bias=BF16, **SILU), arch)


def test_the_second_kernel_may_start_early() -> None:
    problem = contiguous(4096)
    early = replace(choose(problem, "sm_90a", PROCESSORS), overlap=True)
    assert early in candidates(problem, "sm_90a", PROCESSORS)
    check(problem, "sm_90a", early)


COLUMNS = (1, 7, 16, 33, 48, 64, 96, 128, 255, 256, 320, 512, 1000, 1024, 2048, 2880, 4096, 5120, 7168, 8192)
LONG = (12288, 12345, 16384, 32768, 65535, 65536, 1_000_000)


@pytest.mark.compile
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("x", FLOATS)
@pytest.mark.parametrize("columns", COLUMNS + LONG)
def test_every_row_length(columns: int, x: str, arch: str) -> None:
    check(contiguous(columns, x, x, x), arch)
    check(contiguous(columns, x, x, x, x, has_residual=True), arch)
    check(contiguous(columns, x, x, x, x, **SILU), arch)


@pytest.mark.compile
@pytest.mark.parametrize("weight", [None, *FLOATS])
@pytest.mark.parametrize("dout", FLOATS)
@pytest.mark.parametrize("x", FLOATS)
def test_every_dtype(x: str, dout: str, weight: str | None) -> None:
    for columns in (320, 8192, 65536):
        check(contiguous(columns, x, dout, weight), "sm_90a")
        check(contiguous(columns, x, dout, weight, weight or "float16", has_residual=True), "sm_90a")
        check(contiguous(columns, x, dout, weight, weight or "float16", **SILU), "sm_90a")


@pytest.mark.compile
@pytest.mark.parametrize("alignment", [2, 4, 8])
@pytest.mark.parametrize("columns", [256, 8192])
def test_every_alignment(columns: int, alignment: int) -> None:
    for name in ("x_alignment", "dout_alignment", "weight_alignment"):
        check(contiguous(columns, bias=BF16, has_residual=True, **{name: alignment}), "sm_90a")


@pytest.mark.compile
@pytest.mark.parametrize("columns", [128, 1024, 4096, 8192])
def test_every_candidate_compiles(columns: int) -> None:
    problem = contiguous(columns)
    builder = "fe_norm.kernels.rms_rows_backward:build"
    for launch in candidates(problem, "sm_90a", PROCESSORS):
        assert resource_usage(KernelSpec.of("fe_norm.rows", builder, "sm_90a", **config(problem, launch)))
