"""``causal_conv1d_update`` compiles, without spilling registers, for every architecture, dtype, layout and width."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import fe_runtime
from fe_conv.launch_update import MAX_LENGTH, Launch, Problem, candidates, choose, config, general, is_valid
from fe_runtime.compile import KernelSpec, resource_usage

BF16 = "bfloat16"
FLOATS = (BF16, "float16", "float32")
ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
REGISTERS = 65536  # of a multiprocessor, to be shared by the blocks that are asked for


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    fe_runtime.configure(cache_dir=tmp_path)
    yield
    fe_runtime.configure(cache_dir=None)


def check(problem: Problem, arch: str = "sm_90a", launch: Launch | None = None) -> None:
    launch = launch or choose(problem, arch)
    assert is_valid(problem, launch, arch)
    spec = KernelSpec.of(
        "fe_conv.causal_conv1d_update", "fe_conv.kernels.update:build", arch, **config(problem, launch)
    )
    usage = resource_usage(spec)
    (symbol,) = usage
    assert symbol.startswith("fe_conv_update_step" if problem.is_fast else "fe_conv_update_walk")
    assert usage[symbol].frame_bytes == 0, f"{problem} {launch} spills {usage[symbol].frame_bytes} bytes"
    assert usage[symbol].registers * launch.threads * launch.blocks_per_sm <= REGISTERS


def row(length: int = 4, dtype: str = BF16, width: int = 4, **other: object) -> Problem:
    """Contiguous operands of many channels, as aligned as contract and layout make them."""
    size = 4 if dtype == "float32" else 2
    state, weight = (min(16, (n * size) & -(n * size)) for n in (length, width))
    known = {"x_alignment": 16, "out_alignment": 16, "bias_alignment": 16, "channels": 8}
    known |= {"state_alignment": state, "weight_alignment": weight}
    return Problem(dtype, width, "silu", dtype, layout="row", length=length, **(known | other))  # type: ignore[arg-type]


def plane(length: int = 3, dtype: str = BF16, width: int = 4, **other: object) -> Problem:
    return replace(row(length, dtype, width, **other), layout="plane", state_alignment=16)


SAMPLE = {
    "row of 4": row(),
    "row of 4, aligned slots": row(state_alignment=16, indexed=True, bias_dtype=BF16),
    "row of 3": row(3),
    "row of 3, aligned slots": row(3, state_alignment=16),
    "plane": plane(indexed=True),
    "unaligned": row(x_alignment=2, state_alignment=2, weight_alignment=2, out_alignment=2),
    "general": general(row()),
    "general, all operands": general(
        replace(row(), tokens=True, ring=True, indexed=True, bias_dtype="float32", weight_dtype="float32")
    ),
}


@pytest.mark.parametrize("problem", SAMPLE.values(), ids=list(SAMPLE))
def test_sample(problem: Problem) -> None:
    check(problem)


@pytest.mark.parametrize("arch", [a for a in ARCHITECTURES if a != "sm_90a"])
def test_sample_of_architectures(arch: str) -> None:
    check(row(), arch)


@pytest.mark.compile
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [2, 3, 4, 8])
def test_every_layout_and_dtype(width: int, dtype: str, arch: str) -> None:
    for length in {width - 1, width, MAX_LENGTH}:
        for biased in (None, dtype):
            check(row(length, dtype, width, bias_dtype=biased), arch)
            check(row(length, dtype, width, bias_dtype=biased, state_alignment=16), arch)
            check(plane(length, dtype, width, bias_dtype=biased, indexed=True), arch)


@pytest.mark.compile
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_general_kernel(dtype: str, arch: str) -> None:
    for width in (1, 4, 8, 32):
        for tokens in (False, True):
            for ring in (False, True):
                problem = replace(row(4, dtype, width), tokens=tokens, ring=ring, indexed=ring, bias_dtype="float32")
                check(general(replace(problem, weight_dtype="float32")), arch)


@pytest.mark.compile
@pytest.mark.parametrize("weight_dtype", FLOATS)
@pytest.mark.parametrize("alignment", [2, 4, 8, 16])
def test_every_alignment(alignment: int, weight_dtype: str) -> None:
    known = {"x_alignment": alignment, "state_alignment": alignment, "out_alignment": alignment}
    known |= {"bias_alignment": max(alignment, 4), "weight_alignment": max(alignment, 4)}
    for problem in (row(4, **known), row(3, **known), plane(3, **known)):
        check(replace(problem, weight_dtype=weight_dtype, bias_dtype=weight_dtype))


@pytest.mark.compile
@pytest.mark.parametrize("name", ["row of 4", "row of 4, aligned slots", "row of 3, aligned slots", "plane"])
def test_every_candidate_compiles(name: str) -> None:
    for launch in candidates(SAMPLE[name], "sm_90a"):
        spec = KernelSpec.of(
            "fe_conv.causal_conv1d_update", "fe_conv.kernels.update:build", "sm_90a", **config(SAMPLE[name], launch)
        )
        assert resource_usage(spec)
