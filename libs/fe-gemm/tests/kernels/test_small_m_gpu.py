"""The product of a few block-scaled rows with many on a GPU, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from blocked_operands import BlockedOperand, Numbers, random_operand

from fe_gemm.planning.small_m import SmallLaunch, SmallProblem, candidates, choose, config, slices
from fe_runtime import compile as kernels
from fe_runtime import testing
from fe_runtime.arrays import Device, capability, sm_count
from fe_runtime.compile import KernelSpec, ToolchainError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

MXFP8 = SmallProblem()
NVFP4 = SmallProblem("float4_e2m1fn", "float8_e4m3fn", 16, "float4_e2m1fn")
PROBLEMS = {
    "mxfp8": MXFP8,
    "mxfp8 e5m2": replace(MXFP8, element="float8_e5m2"),
    "nvfp4": NVFP4,
    "mxfp4": SmallProblem("float4_e2m1fn", "float8_e8m0fnu", 32, "float4_e2m1fn"),
    "fp4 e8m0 16": SmallProblem("float4_e2m1fn", "float8_e8m0fnu", 16, "float4_e2m1fn"),
}
every_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=list(PROBLEMS))
UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}


def arch() -> str:
    return kernels.arch_for(capability(Device("cuda", 0)))


def kernel(problem: SmallProblem, launch: SmallLaunch) -> Any:
    flat = config(problem, launch)
    try:
        return kernels.load(KernelSpec.of("fe_gemm.small_m", "fe_gemm.kernels.small_m_blocked:build", arch(), **flat))
    except ToolchainError as error:
        pytest.skip(f"the kernel is not stored, and {error}")


def operands(problem: SmallProblem, m: int, n: int, k: int) -> tuple[BlockedOperand, BlockedOperand]:
    """Tokens and weights of finite values whose products stay far from the ends of the dtype they are rounded to."""
    scales = (48, 72) if problem.out_dtype == "float16" else (100, 127)
    made = []
    for seed, (element, rows) in enumerate(((problem.token_element, m), (problem.element, n))):
        operand = random_operand(element, problem.scale, problem.vec, (rows, k, 1), scales=scales, seed=seed)
        codes = operand.codes if problem.bits == 4 else operand.codes & 0xBF  # no NaN, no infinity
        made.append(replace(operand, codes=codes))
    return made[0], made[1]


def multiply(
    problem: SmallProblem,
    a: BlockedOperand,
    b: BlockedOperand,
    launch: SmallLaunch | None = None,
    multiprocessors: int | None = None,
    count: int | None = None,
) -> Numbers:
    """Run a product twice; return (M, N) after everything but the values has been checked."""
    launch = launch or choose(problem, arch())
    m, n, k = a.codes.shape[0], *b.codes.shape[:2]
    multiprocessors = multiprocessors or sm_count(Device("cuda", 0))
    count = count or slices(problem, launch, n, k, multiprocessors)
    place: dict[str, Any] = {"framework": "torch", "device": "cuda"}
    codes = [testing.guarded(x.packed.shape, "uint8", values=x.packed, name="codes", **place) for x in (a, b)]
    scales = [torch.from_numpy(x.blocked_scales).cuda() for x in (a, b)]
    run, results = kernel(problem, launch), []
    for _ in range(2):
        out = testing.guarded((m, n, 1), problem.out_dtype, name="out", **place)
        sums = testing.guarded((count * m, n), "float32", name="sums", **place)
        run(*(x.array for x in codes), *scales, out.array, sums.array, count, multiprocessors)
        torch.cuda.synchronize()
        for guard in (out, sums):
            guard.check_surroundings()
        results.append(out.array[..., 0])
    for guard in codes:
        guard.check_unchanged()
    assert torch.equal(*(x.contiguous().view(torch.uint8) for x in results)), "two runs differ"
    found: Numbers = results[0].double().cpu().numpy()
    return found


def check(problem: SmallProblem, shape: tuple[int, int, int], **how: Any) -> None:
    a, b = operands(problem, *shape)
    got = multiply(problem, a, b, **how)
    left, right = (x.values[..., 0].astype(np.float64) for x in (a, b))
    want, terms = left @ right.T, np.abs(left) @ np.abs(right).T
    allowed = UNIT[problem.out_dtype] * np.abs(want) + (2.0**-18 + shape[2] * 2.0**-28) * terms
    wrong = ~(np.abs(got - want) <= allowed + 2.0**-25 * (problem.out_dtype == "float16"))
    assert not wrong.any(), f"{problem} {shape} {how}: {wrong.sum()} of {wrong.size}, first {np.argwhere(wrong)[0]}"


SHAPES = [(16, 128, 512), (1, 8, 32), (5, 304, 1056), (16, 2056, 4128), (13, 1000, 96), (16, 4096, 8192)]


@every_problem
def test_shapes(problem: SmallProblem) -> None:
    for shape in SHAPES:
        check(problem, shape)


@pytest.mark.parametrize("tokens", [8, 24, 32])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_numbers_of_tokens(name: str, tokens: int) -> None:
    problem = replace(PROBLEMS[name], tokens=tokens)
    for m in (1, tokens - 1, tokens):
        check(problem, (m, 264, 1056))


@pytest.mark.parametrize("out_dtype", ["float16", "float32"])
def test_dtypes_of_the_product(out_dtype: str) -> None:
    check(replace(NVFP4, out_dtype=out_dtype), (16, 264, 1056))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_few_blocks_and_other_slices(name: str) -> None:
    problem = PROBLEMS[name]
    check(problem, (16, 1000, 3168), multiprocessors=5, count=5)
    check(problem, (16, 1000, 3168), multiprocessors=7, count=3)
    check(problem, (16, 200, 96), multiprocessors=4, count=4)  # more slices than steps


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_every_candidate(name: str) -> None:
    problem = PROBLEMS[name]
    for launch in candidates(problem, arch()):
        check(problem, (16, 520, 4128), launch=launch)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_nan_scales_reach_their_row_or_column_only(name: str) -> None:
    problem = PROBLEMS[name]
    a, b = operands(problem, 9, 200, 1056)
    nan = 0x7F if problem.scale == "float8_e4m3fn" else 0xFF
    for operand, row in ((a, 3), (b, 131)):
        operand.scales[row, 7] = nan
    got = np.isnan(multiply(problem, a, b))
    want = np.zeros_like(got)
    want[3], want[:, 131] = True, True
    assert (got == want).all()
