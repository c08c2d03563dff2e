"""``rms_norm`` and ``rmsnorm_silu`` compile, without spills, for every architecture, dtype, format and kind of row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import fe_runtime
from fe_norm.launch import Launch, Problem, candidates, choose, config
from fe_runtime.compile import KernelSpec, resource_usage

BUILDER = "fe_norm.kernels.rms_rows:build"
BF16, FP8, NVFP4 = "bfloat16", "float8_e4m3fn", "nvfp4"
FLOATS = (BF16, "float16", "float32")
SIZE = {BF16: 2, "float16": 2, "float32": 4, FP8: 1, NVFP4: 0.5}  # bytes of a value
ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
REGISTERS = 65536  # of a multiprocessor, to be shared by the blocks that are asked for


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    fe_runtime.configure(cache_dir=tmp_path)
    yield
    fe_runtime.configure(cache_dir=None)


def check(problem: Problem, arch: str, launch: Launch | None = None) -> None:
    launch = launch or choose(problem, arch)
    usage = resource_usage(KernelSpec.of("fe_norm.rows", BUILDER, arch, **config(problem, launch)))
    (symbol,) = usage
    assert symbol.startswith("fe_norm_rms_norm" if problem.activation is None else "fe_norm_rmsnorm_silu")
    assert ("two_pass" in symbol) == (not launch.is_one_pass(problem))
    assert usage[symbol].frame_bytes == 0, f"{problem} {launch} spills {usage[symbol].frame_bytes} bytes"
    assert usage[symbol].registers * launch.threads * launch.blocks_per_sm <= REGISTERS


def contiguous(columns: int, x: str = BF16, out: str = BF16, weight: str | None = BF16, bias: bool = False) -> Problem:
    sizes = [int(columns * SIZE[dtype]) for dtype in (x, out)]
    x_alignment, o_alignment = (min(16, size & -size) for size in sizes)
    return Problem(columns, x, out, weight, bias, out == FP8 and bias, x_alignment, o_alignment, activation="silu")


def norm(columns: int, x: str = BF16, out: str = BF16, residual: bool = False, **other: object) -> Problem:
    plain = contiguous(columns, x, out, **other)  # type: ignore[arg-type]
    return replace(plain, activation=None, has_residual=residual, has_rstd=True)


SAMPLE = {
    "long row": contiguous(8192),
    "short rows": contiguous(128),
    "odd row": contiguous(33),
    "two passes": contiguous(100_000),
    "fp8": contiguous(1024, out=FP8, weight="float32", bias=True),
    "nvfp4": contiguous(320, "float32", NVFP4),
    "unaligned nvfp4": Problem(
        96, BF16, NVFP4, BF16, x_alignment=2, o_alignment=1, weight_alignment=2, activation="silu"
    ),
    "norm": norm(8192),
    "norm of a sum": norm(4096, residual=True),
    "norm of short sums": norm(128, residual=True),
    "norm of odd sums": norm(33, residual=True, bias=True),
    "norm of sums in two passes": norm(100_000, residual=True, bias=True),
}


@pytest.mark.parametrize("problem", SAMPLE.values(), ids=list(SAMPLE))
def test_sample(problem: Problem) -> None:
    check(problem, "sm_90a")


@pytest.mark.parametrize("arch", [a for a in ARCHITECTURES if a != "sm_90a"])
@pytest.mark.parametrize("out", [BF16, FP8, NVFP4])
def test_sample_of_architectures(arch: str, out: str) -> None:
    check(contiguous(1024, out=out), arch)


def test_bias_without_weight_has_its_own_dtype() -> None:
    check(Problem(256, BF16, BF16, None, has_bias=True, bias_dtype="float16", activation="silu"), "sm_90a")


COLUMNS = (1, 7, 16, 48, 64, 96, 128, 160, 255, 256, 320, 512, 640, 1000, 1024, 2048, 2880, 4096, 5120, 7168, 8192)
LONG = (12288, 12345, 16384, 32768, 65535, 65536, 100_000, 1_000_000)


@pytest.mark.compile
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("out", [*FLOATS, FP8, NVFP4])
@pytest.mark.parametrize("columns", COLUMNS + LONG)
def test_every_row_length(columns: int, out: str, arch: str) -> None:
    if out == NVFP4 and columns % 16:
        columns = -(-columns // 16) * 16
    for bias in (False, True):
        check(contiguous(columns, out=out, bias=bias), arch)


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("out", [*FLOATS, FP8, NVFP4])
@pytest.mark.parametrize("weight", [None, *FLOATS])
@pytest.mark.parametrize("x", FLOATS)
def test_every_dtype(x: str, weight: str | None, out: str, arch: str) -> None:
    for columns in (320, 8192, 65536):
        for bias in (False, True):
            check(contiguous(columns, x, out, weight, bias), arch)


@pytest.mark.compile
@pytest.mark.parametrize("alignment", [2, 4, 8])
@pytest.mark.parametrize("out", [BF16, FP8, NVFP4])
@pytest.mark.parametrize("columns", [256, 8192])
def test_every_alignment(columns: int, out: str, alignment: int) -> None:
    check(Problem(columns, BF16, out, BF16, x_alignment=alignment, activation="silu"), "sm_90a")
    narrow = alignment // 2 if out != BF16 else alignment
    check(Problem(columns, BF16, out, BF16, o_alignment=narrow, activation="silu"), "sm_90a")
    check(Problem(columns, BF16, out, BF16, weight_alignment=alignment, activation="silu"), "sm_90a")


@pytest.mark.compile
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("x", FLOATS)
@pytest.mark.parametrize("columns", COLUMNS + LONG)
def test_every_norm(columns: int, x: str, arch: str) -> None:
    for residual in (False, True):
        for bias in (False, True):
            check(norm(columns, x, x, residual, bias=bias, weight="float32" if bias else x), arch)


@pytest.mark.compile
@pytest.mark.parametrize("columns", [64, 128, 320, 1024, 8192, 16384])
def test_every_candidate_compiles(columns: int) -> None:
    problem = contiguous(columns)
    for launch in candidates(problem, "sm_90a"):
        assert resource_usage(KernelSpec.of("fe_norm.rows", BUILDER, "sm_90a", **config(problem, launch)))
