"""The Engram kernels compile for every architecture, without spilled registers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import fe_runtime
from fe_attention.planning import engram as planning
from fe_runtime.compile import KernelSpec, resource_usage

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
REGISTERS = 65536  # of a multiprocessor
PROCESSORS = 132


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    fe_runtime.configure(cache_dir=tmp_path)
    yield
    fe_runtime.configure(cache_dir=None)


def check_forward(problem: planning.Problem, arch: str) -> None:
    launch = planning.choose_forward(problem)
    builder = "fe_attention.kernels.engram_forward:build"
    config = planning.config(problem, launch)
    usage = resource_usage(KernelSpec.of("fe_attention.gate", builder, arch, **config))
    ((name, found),) = usage.items()
    assert name.startswith("fe_attention_engram_gate_saved_forward")
    assert found.frame_bytes == 0
    assert found.registers * launch.threads * launch.blocks_per_sm <= REGISTERS


def check_backward(problem: planning.Problem, arch: str) -> None:
    launch = planning.choose_backward(problem, PROCESSORS)
    builder = "fe_attention.kernels.engram_backward:build"
    config = planning.config(problem, launch)
    usage = resource_usage(KernelSpec.of("fe_attention.gate", builder, arch, **config))
    assert len(usage) == 3
    for name, found in usage.items():
        assert name.startswith("fe_attention_engram_gate_saved_backward")
        assert found.frame_bytes == 0, f"{name} of {problem} {launch} spills {found.frame_bytes} bytes"


def check_whole(problem: planning.Problem, arch: str) -> bool:
    launch = planning.choose_whole(problem, arch, PROCESSORS)
    if launch is None:
        return False
    builder = "fe_attention.kernels.engram_whole:build"
    config = planning.config(problem, launch)
    usage = resource_usage(KernelSpec.of("fe_attention.gate", builder, arch, **config))
    assert len(usage) == 2
    for name, found in usage.items():
        assert name.startswith("fe_attention_engram_gate_saved_backward_whole")
        assert found.frame_bytes == 0, f"{name} of {problem} {launch} spills {found.frame_bytes} bytes"
    return True


SAMPLE = [(4, 5120), (4, 33), (4, 100_000), (16, 96), (1, 8192)]


@pytest.mark.parametrize(("streams", "width"), SAMPLE)
def test_sample(streams: int, width: int) -> None:
    check_forward(planning.Problem(streams, width), "sm_90a")
    check_backward(planning.Problem(streams, width), "sm_90a")


@pytest.mark.parametrize(("streams", "width"), [(4, 5120), (4, 8), (4, 1000), (1, 5120)])
def test_whole_tokens(streams: int, width: int) -> None:
    assert check_whole(planning.Problem(streams, width), "sm_90a")


def test_whole_tokens_of_architectures() -> None:
    assert check_whole(planning.Problem(4, 2048), "sm_80")
    assert check_whole(planning.Problem(4, 5120), "sm_100a")
    assert check_whole(planning.Problem(4, 1024), "sm_120a")


@pytest.mark.parametrize("arch", [a for a in ARCHITECTURES if a != "sm_90a"])
def test_sample_of_architectures(arch: str) -> None:
    check_forward(planning.Problem(4, 5120), arch)
    check_backward(planning.Problem(4, 5120), arch)


@pytest.mark.compile
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("streams", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("width", [1, 2, 7, 12, 33, 96, 256, 1000, 1024, 2048, 4096, 5120, 7168, 8192, 20001, 100_000])
def test_every_shape(width: int, streams: int, arch: str) -> None:
    check_forward(planning.Problem(streams, width), arch)
    check_backward(planning.Problem(streams, width), arch)
    check_whole(planning.Problem(streams, width), arch)


@pytest.mark.compile
def test_every_candidate_compiles() -> None:
    problem = planning.Problem(4, 5120)
    for forward in planning.forward_candidates(problem):
        builder = "fe_attention.kernels.engram_forward:build"
        assert resource_usage(
            KernelSpec.of("fe_attention.gate", builder, "sm_90a", **planning.config(problem, forward))
        )
    for backward in planning.backward_candidates(problem, PROCESSORS):
        builder = "fe_attention.kernels.engram_backward:build"
        config = planning.config(problem, backward)
        assert resource_usage(KernelSpec.of("fe_attention.gate", builder, "sm_90a", **config))
