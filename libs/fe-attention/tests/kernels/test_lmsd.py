"""The kernels of LMSD compile, without spills, for every architecture, row length and set of flags."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fe_runtime
from fe_attention.planning import lmsd as forward
from fe_attention.planning import lmsd_backward as backward
from fe_runtime.compile import KernelSpec, resource_usage

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
REGISTERS = 65536  # of a multiprocessor, to be shared by the blocks that are asked for
PROCESSORS = 132


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    fe_runtime.configure(cache_dir=tmp_path)
    yield
    fe_runtime.configure(cache_dir=None)


def usage_of(way: str, module: Any, problem: Any, launch: Any, arch: str) -> Any:
    builder = f"fe_attention.kernels.lmsd_{way}:build"
    return resource_usage(
        KernelSpec.of(f"fe_attention.hstu_lmsd_{way}", builder, arch, **module.config(problem, launch))
    )


def check(columns: int, arch: str, **flags: bool) -> None:
    problem = forward.Problem(columns, **flags)
    launch = forward.choose(problem, arch)
    ((symbol, used),) = usage_of("forward", forward, problem, launch, arch).items()
    assert symbol.startswith("fe_attention_lmsd_forward")
    assert used.frame_bytes == 0, f"{problem} {launch} spills {used.frame_bytes} bytes"
    assert used.registers * launch.threads * launch.blocks_per_sm <= REGISTERS


def check_backward(columns: int, arch: str, **flags: bool) -> None:
    if columns > backward.most_columns(arch):
        return
    problem = backward.Problem(columns, **flags)
    launch = backward.choose(problem, arch, PROCESSORS)
    usage = usage_of("backward", backward, problem, launch, arch)
    assert len(usage) == 2
    for symbol, used in usage.items():
        assert symbol.startswith("fe_attention_lmsd_backward")
        assert used.frame_bytes == 0, f"{symbol}: {problem} {launch} spills {used.frame_bytes} bytes"
        if "_sums" not in symbol:
            assert used.registers * launch.threads * launch.blocks_per_sm <= REGISTERS


SAMPLE = {
    "a warp for a row": (512, {}),
    "short rows": (64, {}),
    "rows that do not fill their threads": (1016, {}),
    "long rows": (8192, {}),
    "no dropout": (512, {"has_dropout": False}),
    "product only": (256, {"concat_u": False, "concat_x": False, "apply_u_silu": False}),
}


@pytest.mark.parametrize(("columns", "flags"), SAMPLE.values(), ids=list(SAMPLE))
def test_sample(columns: int, flags: dict[str, bool]) -> None:
    check(columns, "sm_90a", **flags)
    check_backward(columns, "sm_90a", **flags)


@pytest.mark.parametrize("arch", [a for a in ARCHITECTURES if a != "sm_90a"])
def test_sample_of_architectures(arch: str) -> None:
    check(512, arch)
    check_backward(512, arch)


def test_without_the_gradient_of_the_weight() -> None:
    check_backward(512, "sm_90a", compute_dweight=False)


COLUMNS = (8, 24, 64, 128, 200, 256, 264, 512, 520, 768, 1000, 1016, 1024, 1536, 2048, 3072, 4096, 4104, 6144, 8192)


@pytest.mark.compile
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_every_row_length(columns: int, arch: str) -> None:
    for has_dropout in (True, False):
        check(columns, arch, has_dropout=has_dropout)
        check_backward(columns, arch, has_dropout=has_dropout)


@pytest.mark.compile
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("columns", [256, 512, 1016, 8192])
def test_every_set_of_flags(columns: int, arch: str) -> None:
    names = ("apply_u_silu", "concat_u", "concat_x", "has_dropout")
    for values in itertools.product([True, False], repeat=4):
        flags = dict(zip(names, values, strict=True))
        check(columns, arch, **flags)
        check_backward(columns, arch, **flags)
        check_backward(columns, arch, **flags, compute_dweight=False)


@pytest.mark.compile
@pytest.mark.parametrize("columns", [128, 512, 1024])
def test_every_candidate_compiles(columns: int) -> None:
    problem, back = forward.Problem(columns), backward.Problem(columns)
    for launch in forward.candidates(problem, "sm_90a"):
        assert usage_of("forward", forward, problem, launch, "sm_90a")
    for other in backward.candidates(back, "sm_90a", PROCESSORS):
        assert usage_of("backward", backward, back, other, "sm_90a")
