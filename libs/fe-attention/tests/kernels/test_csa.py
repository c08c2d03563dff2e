"""The CSA compressor's kernels compile for every architecture, without spilled registers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import fe_runtime
from fe_attention.planning import csa as planning
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
    config = planning.config(problem, launch)
    usage = resource_usage(KernelSpec.of("fe_attention.csa", "fe_attention.kernels.csa_forward:build", arch, **config))
    ((name, found),) = usage.items()
    assert name.startswith("fe_attention_csa_compressor_forward")
    assert found.frame_bytes == 0, f"{name} of {problem} {launch} spills {found.frame_bytes} bytes"
    assert found.registers * launch.threads * launch.blocks_per_sm <= REGISTERS


def check_backward(problem: planning.Problem, arch: str, *, atomic: bool = False) -> None:
    launch = planning.choose_backward(problem, PROCESSORS)
    config = {**planning.config(problem, launch), "atomic": atomic}
    usage = resource_usage(KernelSpec.of("fe_attention.csa", "fe_attention.kernels.csa_backward:build", arch, **config))
    assert len(usage) == (2 if atomic else 3)
    for name, found in usage.items():
        assert name.startswith("fe_attention_csa_compressor_backward")
        assert found.frame_bytes == 0, f"{name} of {problem} {launch} spills {found.frame_bytes} bytes"


SAMPLE = [(512, 4, 2), (128, 4, 2), (512, 128, 1), (33, 2, 2), (64, 5, 2), (64, 256, 1)]


@pytest.mark.parametrize(("head_dim", "ratio", "coff"), SAMPLE)
def test_sample(head_dim: int, ratio: int, coff: int) -> None:
    check_forward(planning.Problem(head_dim, ratio, coff), "sm_90a")
    check_backward(planning.Problem(head_dim, ratio, coff), "sm_90a")


@pytest.mark.parametrize("ratio", [4, 128])
def test_sums_by_atomics(ratio: int) -> None:
    check_backward(planning.Problem(512, ratio, 2 if ratio == 4 else 1), "sm_90a", atomic=True)


@pytest.mark.parametrize("arch", [a for a in ARCHITECTURES if a != "sm_90a"])
def test_sample_of_architectures(arch: str) -> None:
    for problem in (planning.Problem(512, 4, 2), planning.Problem(512, 128, 1)):
        check_forward(problem, arch)
        check_backward(problem, arch)


WINDOWS = [
    (1, 1),
    (1, 2),
    (2, 2),
    (4, 1),
    (4, 2),
    (8, 1),
    (5, 2),
    (8, 2),
    (16, 2),
    (64, 1),
    (128, 1),
    (128, 2),
    (256, 1),
]


@pytest.mark.compile
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("ratio", "coff"), WINDOWS)
@pytest.mark.parametrize("head_dim", [1, 7, 64, 100, 128, 512, 1024])
def test_every_shape(head_dim: int, ratio: int, coff: int, arch: str) -> None:
    problem = planning.Problem(head_dim, ratio, coff)
    check_forward(problem, arch)
    check_backward(problem, arch)
    check_backward(problem, arch, atomic=True)


@pytest.mark.compile
@pytest.mark.parametrize(("head_dim", "ratio", "coff"), SAMPLE[:3])
def test_every_candidate_compiles(head_dim: int, ratio: int, coff: int) -> None:
    problem = planning.Problem(head_dim, ratio, coff)
    for forward in planning.forward_candidates(problem):
        builder, config = "fe_attention.kernels.csa_forward:build", planning.config(problem, forward)
        assert resource_usage(KernelSpec.of("fe_attention.csa", builder, "sm_90a", **config))
    for backward in planning.backward_candidates(problem, PROCESSORS):
        builder = "fe_attention.kernels.csa_backward:build"
        config = {**planning.config(problem, backward), "atomic": False}
        assert resource_usage(KernelSpec.of("fe_attention.csa", builder, "sm_90a", **config))
