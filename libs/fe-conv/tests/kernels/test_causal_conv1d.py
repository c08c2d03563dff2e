"""``causal_conv1d`` and its gradient compile, without spilling registers, for every architecture and kind of call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import fe_runtime
from fe_conv.launch import kernel_spec
from fe_conv.tiles import Launch, Problem, candidates, choose
from fe_runtime.compile import resource_usage

BF16, FP16, FP32, FP64 = "bfloat16", "float16", "float32", "float64"
ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
REGISTERS = 65536  # of a multiprocessor, to be shared by the blocks that are asked for
DTYPES = ((BF16, BF16), (BF16, FP32), (FP16, FP16), (FP32, FP32), (FP64, FP64))
MODES: dict[str, dict[str, object]] = {
    "dense": {},
    "states": {"has_initial": True, "has_final": True, "has_bias": True},
    "packed": {"offsets": "int32", "has_initial": True, "has_final": True, "has_bias": True},
    "packed without states": {"offsets": "int64"},
    "labels": {"has_labels": True, "has_bias": True},
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    fe_runtime.configure(cache_dir=tmp_path)
    yield
    fe_runtime.configure(cache_dir=None)


def problem_of(
    backward: bool, channel_last: bool, mode: str = "dense", x: str = BF16, weight: str = "", width: int = 4
) -> Problem:
    problem = Problem(backward, channel_last, x, weight or x, width)
    return replace(problem, **MODES[mode])  # type: ignore[arg-type]


def check(problem: Problem, arch: str = "sm_90a", channels: int = 4096, launch: Launch | None = None) -> set[str]:
    """Compile, check what the kernels occupy, and return their names."""
    launch = launch or choose(problem, channels, arch)
    usage = resource_usage(kernel_spec(problem, launch, arch))
    for symbol, resources in usage.items():
        assert resources.frame_bytes == 0, f"{symbol} {problem} {launch} spills {resources.frame_bytes} bytes"
    assert max(u.registers for u in usage.values()) * launch.threads * launch.blocks_per_sm <= REGISTERS
    return {symbol.removeprefix("fe_conv_").rstrip("_0123456789") for symbol in usage}


@pytest.mark.parametrize(
    ("problem", "kernels"),
    [
        pytest.param(problem_of(False, True), {"forward_rows"}, id="rows"),
        pytest.param(
            problem_of(True, True, "packed"), {"backward_rows", "sum", "initial_gradient"}, id="packed gradient"
        ),
        pytest.param(problem_of(False, False, "states"), {"forward_runs", "final_states"}, id="runs with states"),
        pytest.param(problem_of(True, False), {"backward_runs", "sum"}, id="runs gradient"),
        pytest.param(
            problem_of(True, False, "labels", FP64), {"any_forward", "any_dx", "any_sums", "sum"}, id="any gradient"
        ),
    ],
)
def test_sample(problem: Problem, kernels: set[str]) -> None:
    assert check(problem) == kernels


@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch != "sm_90a"])
def test_sample_of_architectures(arch: str) -> None:
    check(problem_of(False, True), arch)
    check(problem_of(True, True), arch)


@pytest.mark.compile
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("x", "weight"), DTYPES)
@pytest.mark.parametrize("channel_last", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_every_dtype_and_width(backward: bool, channel_last: bool, x: str, weight: str, mode: str) -> None:
    for width in (2, 3, 4, 5, 128):
        check(problem_of(backward, channel_last, mode, x, weight, width))


@pytest.mark.compile
@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch != "sm_90a"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("channel_last", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_every_architecture(backward: bool, channel_last: bool, mode: str, arch: str) -> None:
    for x in (BF16, FP32, FP64):
        check(problem_of(backward, channel_last, mode, x), arch)


@pytest.mark.compile
@pytest.mark.parametrize("channels", [1, 77, 1002, 100, 5376, 256])
@pytest.mark.parametrize("backward", [False, True])
def test_every_vector(backward: bool, channels: int) -> None:
    for mode in MODES:
        problem = replace(problem_of(backward, True, mode), load_alignment=2, store_alignment=2, parameter_alignment=2)
        check(problem, channels=channels)


@pytest.mark.compile
@pytest.mark.parametrize("alignment", [2, 4, 8])
@pytest.mark.parametrize("channel_last", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_every_alignment(backward: bool, channel_last: bool, alignment: int) -> None:
    problem = problem_of(backward, channel_last)
    check(replace(problem, load_alignment=alignment))
    check(replace(problem, store_alignment=alignment))
    check(replace(problem, parameter_alignment=alignment))


@pytest.mark.compile
@pytest.mark.parametrize("activation", ["identity", "silu"])
@pytest.mark.parametrize("backward", [False, True])
def test_identity(backward: bool, activation: str) -> None:
    for channel_last in (False, True):
        check(replace(problem_of(backward, channel_last), activation=activation))


@pytest.mark.compile
@pytest.mark.parametrize("channel_last", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_every_candidate_compiles(backward: bool, channel_last: bool) -> None:
    problem = problem_of(backward, channel_last)
    for launch in candidates(problem, 4096, "sm_90a"):
        assert resource_usage(kernel_spec(problem, launch, "sm_90a"))
