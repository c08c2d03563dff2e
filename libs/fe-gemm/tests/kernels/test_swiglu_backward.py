"""The kernels of the gradients of ``gemm_swiglu`` compile without spills: the pass anywhere, all on Hopper."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

import fe_runtime
from fe_gemm.kernels import swiglu_gradient
from fe_gemm.planning.swiglu_backward import Launch, Problem, candidates, choose, config, is_valid, pass_config, plan
from fe_runtime.compile import KernelSpec, resource_usage

ARCHITECTURES = ["sm_80", "sm_90a", "sm_100a", "sm_120a"]
REGISTERS = 65536  # of a multiprocessor
WIDE = Problem("float16", "bfloat16", "float32", "float32", "m", "n", "m", "n", "m")
BYTES = Problem("float16", "float16", "float8_e4m3fn", "float8_e5m2")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    fe_runtime.configure(cache_dir=tmp_path)
    yield
    fe_runtime.configure(cache_dir=None)


def check_pass(problem: Problem, launch: Launch, arch: str) -> None:
    assert is_valid(problem, launch, arch)
    place = "fe_gemm.kernels.swiglu_gradient:build"
    spec = KernelSpec.of("fe_gemm.swiglu_gradient", place, arch, **pass_config(problem, launch))
    ((symbol, usage),) = resource_usage(spec).items()
    assert symbol.startswith("fe_gemm_swiglu_gradient")
    assert usage.frame_bytes == 0, f"{problem} {launch} on {arch} spills {usage.frame_bytes} bytes"
    assert usage.registers * launch.threads * launch.blocks_per_sm <= REGISTERS


def check_all(problem: Problem, n: int, k: int) -> None:
    place = "fe_gemm.kernels.sm90.swiglu_backward:build"
    how = plan(problem, n, k, "sm_90a", 132)
    usage = resource_usage(KernelSpec.of("fe_gemm.gemm_swiglu_backward", place, "sm_90a", **config(how)))
    assert len(usage) == 1 + len(how.da.all) + 1
    assert [one.frame_bytes for one in usage.values()] == [0] * len(usage)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("problem", [Problem(), WIDE, BYTES], ids=str)
def test_pass(problem: Problem, arch: str) -> None:
    check_pass(problem, choose(problem, arch), arch)


@pytest.mark.parametrize(("problem", "n", "k"), [(Problem(), 28672, 4096), (WIDE, 64, 16)], ids=str)
def test_sample(problem: Problem, n: int, k: int) -> None:
    check_all(problem, n, k)


def test_codes_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the arrays come as views, whose element type has forgotten that bytes have no sign."""
    decoded = []
    for name in ("e4m3_to_bf16", "e5m2_to_bf16"):
        decode = getattr(swiglu_gradient, name)
        monkeypatch.setattr(
            swiglu_gradient, name, lambda *a, decode=decode, name=name: decoded.append(name) or decode(*a)
        )
    check_all(BYTES, 64, 16)
    assert decoded == 4 * ["e4m3_to_bf16"] + 4 * ["e5m2_to_bf16"]  # eight of up and of gate, by fours


@pytest.mark.compile
@pytest.mark.parametrize("dab12_dtype", [None, "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("ab12_dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_every_dtype_and_major_of_the_pass(ab12_dtype: str, dab12_dtype: str | None) -> None:
    for dtypes in product(("float16", "bfloat16"), repeat=2):
        for majors in product("nm", repeat=3):
            problem = Problem(*dtypes, ab12_dtype, dab12_dtype, "k", "k", *majors)
            check_pass(problem, choose(problem, "sm_90a"), "sm_90a")


@pytest.mark.compile
@pytest.mark.parametrize("problem", [Problem(), WIDE, BYTES], ids=str)
def test_every_candidate_of_the_pass(problem: Problem) -> None:
    for launch in candidates(problem, "sm_90a"):
        check_pass(problem, launch, "sm_90a")


@pytest.mark.compile
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("majors", list(product("km", "kn", "nm")), ids="".join)
def test_every_major_of_the_products(majors: tuple[str, str, str], dtype: str) -> None:
    a_major, b_major, major = majors
    problem = Problem(dtype, a_major=a_major, b_major=b_major, major=major, ab12_major=major)
    for n, k in ((64, 64), (4096, 4096)):
        check_all(problem, n, k)
