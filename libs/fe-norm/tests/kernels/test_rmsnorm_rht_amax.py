"""``rmsnorm_rht_amax`` compiles, without spilling registers, for every architecture, dtype and kind of row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import fe_runtime
from fe_norm.launch_rht import Launch, Problem, candidates, choose, config
from fe_runtime.compile import KernelSpec, resource_usage

FLOATS = ("bfloat16", "float16", "float32")
ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
REGISTERS = 65536  # of a multiprocessor, to be shared by the blocks that are asked for


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    fe_runtime.configure(cache_dir=tmp_path)
    yield
    fe_runtime.configure(cache_dir=None)


def spec_of(problem: Problem, launch: Launch, arch: str) -> KernelSpec:
    name = "rmsnorm_rht_amax"
    return KernelSpec.of(f"fe_norm.{name}", f"fe_norm.kernels.{name}:build", arch, **config(problem, launch))


def check(problem: Problem, arch: str, launch: Launch | None = None) -> None:
    launch = launch or choose(problem, arch)
    usage = resource_usage(spec_of(problem, launch, arch))
    main = [symbol for symbol in usage if "fold" not in symbol]
    assert len(main) == 1
    assert len(usage) == 1 + problem.has_partials
    assert all(symbol.startswith("fe_norm_rmsnorm_rht_amax") for symbol in usage)
    assert ("two_pass" in main[0]) == (not launch.is_one_pass(problem))
    for symbol, used in usage.items():
        assert used.frame_bytes == 0, f"{symbol} {problem} {launch} spills {used.frame_bytes} bytes"
    assert usage[main[0]].registers * launch.threads * launch.blocks_per_sm <= REGISTERS


SAMPLE = {
    "a row a block": Problem(4096, 8),
    "a row a warp": Problem(1024, 8),
    "rows of a quarter warp": Problem(128, 2),
    "partial maxima": Problem(4096, 16, True),
    "two passes": Problem(131_072, 8),
    "float32": Problem(5120, 8, x_dtype="float32", weight_dtype="float32"),
    "unaligned": Problem(2880, 3, x_alignment=2, o_alignment=4, weight_alignment=2),
}
TEAMS = Launch(threads_per_row=128, teams=2, groups=1, chunk=4, ahead=1, blocks_per_sm=3, prefetch=396, lead=2)


@pytest.mark.parametrize("problem", SAMPLE.values(), ids=list(SAMPLE))
def test_sample(problem: Problem) -> None:
    check(problem, "sm_90a")


def test_teams_of_several_warps() -> None:
    check(Problem(4096, 8), "sm_90a", TEAMS)


@pytest.mark.parametrize("arch", [a for a in ARCHITECTURES if a != "sm_90a"])
def test_sample_of_architectures(arch: str) -> None:
    check(Problem(4096, 8), arch)


COLUMNS = (16, 32, 48, 96, 128, 256, 512, 528, 768, 1024, 1536, 2048, 2880, 4096, 5120, 7168, 8192)
LONG = (12288, 16384, 32768, 65536, 131_072)


@pytest.mark.compile
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("columns", COLUMNS + LONG)
def test_every_row_length(columns: int, arch: str) -> None:
    for group in (1, 3, 8):
        check(Problem(columns, group), arch)
    check(Problem(columns, 16, True), arch)


@pytest.mark.compile
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("x", FLOATS)
@pytest.mark.parametrize("weight", FLOATS)
def test_every_dtype(weight: str, x: str, arch: str) -> None:
    for columns in (96, 1024, 2880, 8192, 32768):
        for group in (1, 3, 8):
            check(Problem(columns, group, x_dtype=x, weight_dtype=weight), arch)


@pytest.mark.compile
@pytest.mark.parametrize("alignment", [2, 4, 8])
@pytest.mark.parametrize("columns", [256, 2048, 8192, 32768])
def test_every_alignment(columns: int, alignment: int) -> None:
    check(Problem(columns, 8, x_alignment=alignment), "sm_90a")
    check(Problem(columns, 8, o_alignment=alignment), "sm_90a")
    check(Problem(columns, 8, weight_alignment=alignment), "sm_90a")


@pytest.mark.compile
@pytest.mark.parametrize("columns", [128, 1024, 2048, 4096, 8192, 16384])
def test_a_sample_of_the_candidates_compiles(columns: int) -> None:
    problem = Problem(columns, 8)
    for launch in candidates(problem, "sm_90a")[::9]:
        assert resource_usage(spec_of(problem, launch, "sm_90a"))
