"""The product of a few block-scaled rows on a Hopper GPU, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from blocked_operands import BlockedOperand, Numbers, random_operand

from fe_gemm.planning.scaled_few_rows import Launch, Problem, candidates, choose, config
from fe_runtime import compile as kernels
from fe_runtime import testing
from fe_runtime.arrays import Device, capability, sm_count
from fe_runtime.compile import KernelSpec, ToolchainError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

MXFP8 = Problem()
E5M2 = replace(MXFP8, element="float8_e5m2")
NVFP4 = Problem("float4_e2m1fn", "float8_e4m3fn", 16)
PROBLEMS = {"mxfp8": MXFP8, "mxfp8 e5m2": E5M2, "nvfp4": NVFP4}
every_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=list(PROBLEMS))
UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
NEAR_ONE = (100, 127)
"""Scale bytes with which products stay far from the ends of float32."""


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    if capability(Device("cuda", 0)) != (9, 0):
        pytest.skip("a kernel for compute capability 9.0")


def kernel(problem: Problem, launch: Launch) -> Any:
    builder = "fe_gemm.kernels.sm90.scaled_few_rows:build"
    try:
        return kernels.load(KernelSpec.of("fe_gemm.scaled_few_rows", builder, "sm_90a", **config(problem, launch)))
    except ToolchainError as error:
        pytest.skip(f"the kernel is not stored, and {error}")


def finite_operand(problem: Problem, rows: int, k: int, scales: tuple[int, int], seed: int) -> BlockedOperand:
    operand = random_operand(problem.element, problem.scale, problem.vec, (rows, k, 1), scales=scales, seed=seed)
    codes = operand.codes if problem.bits == 4 else operand.codes & 0xBF  # no NaN, no infinity
    return replace(operand, codes=codes)


def operands(
    problem: Problem,
    shape: tuple[int, int, int],
    a_scales: tuple[int, int] = NEAR_ONE,
    b_scales: tuple[int, int] = NEAR_ONE,
) -> tuple[BlockedOperand, BlockedOperand]:
    m, n, k = shape
    return finite_operand(problem, m, k, a_scales, 0), finite_operand(problem, n, k, b_scales, 1)


def multiply(
    problem: Problem,
    a: BlockedOperand,
    b: BlockedOperand,
    launch: Launch | None = None,
    multiprocessors: int | None = None,
) -> Numbers:
    """Run a product twice; return (M, N) after everything but the values has been checked."""
    multiprocessors = multiprocessors or sm_count(Device("cuda", 0))
    m, n, k = a.codes.shape[0], *b.codes.shape[:2]
    launch = launch or choose(problem, n, k, multiprocessors)
    place: dict[str, Any] = {"framework": "torch", "device": "cuda"}
    codes = [testing.guarded(x.packed.shape, "uint8", values=x.packed, name="codes", **place) for x in (a, b)]
    scales = [torch.from_numpy(x.blocked_scales).cuda() for x in (a, b)]
    run, results = kernel(problem, launch), []
    for _ in range(2):
        guards = [testing.guarded((m, n, 1), problem.out_dtype, name="out", **place)]
        if launch.slices > 1:
            guards.append(testing.guarded((launch.slices * m, n), "float32", name="sums", **place))
        run(*(x.array for x in codes), *scales, *(guard.array for guard in guards), multiprocessors)
        torch.cuda.synchronize()
        for guard in guards:
            guard.check_surroundings()
        results.append(guards[0].array[..., 0])
    for guard in codes:
        guard.check_unchanged()
    assert torch.equal(*(x.contiguous().view(torch.uint8) for x in results)), "two runs differ"
    found: Numbers = results[0].double().cpu().numpy()
    return found


def check(problem: Problem, shape: tuple[int, int, int], **how: Any) -> None:
    a, b = operands(problem, shape)
    compare(problem, a, b, multiply(problem, a, b, **how), f"{problem} {shape} {how}")


def compare(problem: Problem, a: BlockedOperand, b: BlockedOperand, got: Numbers, what: str) -> None:
    left, right = (x.values[..., 0].astype(np.float64) for x in (a, b))
    want, terms = left @ right.T, np.abs(left) @ np.abs(right).T
    allowed = UNIT[problem.out_dtype] * np.abs(want) + (2.0**-18 + left.shape[1] * 2.0**-28) * terms
    wrong = ~(np.abs(got - want) <= allowed + 2.0**-25 * (problem.out_dtype == "float16"))
    assert not wrong.any(), f"{what}: {wrong.sum()} of {wrong.size}, first {np.argwhere(wrong)[0]}"


SHAPES = [(16, 128, 512), (1, 8, 32), (5, 304, 1056), (16, 2056, 4128), (13, 1000, 96), (16, 28672, 1024)]


@every_problem
def test_shapes(problem: Problem) -> None:
    for shape in SHAPES:
        check(problem, shape)


@every_problem
@pytest.mark.parametrize("tokens", [32, 48, 64])
def test_numbers_of_tokens(problem: Problem, tokens: int) -> None:
    problem = replace(problem, tokens=tokens)
    for m in (1, tokens - 15, tokens):
        check(problem, (m, 264, 1056))
    check(problem, (tokens, 30000, 544))


@pytest.mark.parametrize("problem", [MXFP8, NVFP4], ids=str)
def test_dtypes_of_the_product(problem: Problem) -> None:
    check(replace(problem, out_dtype="float32"), (16, 264, 1056))
    problem = replace(problem, out_dtype="float16")
    scales = (30, 50) if problem.folds else (115, 125)
    a, b = operands(problem, (16, 264, 1056), scales, scales)
    compare(problem, a, b, multiply(problem, a, b), "float16")


@pytest.mark.parametrize("problem", [MXFP8, NVFP4], ids=str)
def test_few_blocks(problem: Problem) -> None:
    for launch in (Launch(slots=4), Launch(64, 4, 4, 4, slices=3), Launch(96, 6, 2, 3, slices=2)):
        for multiprocessors in (1, 5):
            check(problem, (16, 1000, 3168), multiprocessors=multiprocessors, launch=launch)


@pytest.mark.parametrize("problem", [MXFP8, NVFP4], ids=str)
def test_every_candidate(problem: Problem) -> None:
    for launch in {launch for n in (28672, 8192) for launch in candidates(problem, n, 8192, 132)}:
        check(problem, (16, 520, 4128), launch=launch)


@pytest.mark.parametrize("problem", [MXFP8, NVFP4], ids=str)
def test_nan_scales_reach_their_row_or_column_only(problem: Problem) -> None:
    a, b = operands(problem, (9, 200, 1056))
    for operand, row in ((a, 3), (b, 131)):
        operand.scales[row, 7] = 0x7F if problem.folds else 0xFF
    got = np.isnan(multiply(problem, a, b))
    want = np.zeros_like(got)
    want[3], want[:, 131] = True, True
    assert (got == want).all()


@pytest.mark.parametrize("problem", [MXFP8, E5M2], ids=str)
def test_nan_codes_reach_their_row_or_column_only(problem: Problem) -> None:
    a, b = operands(problem, (9, 200, 1056))
    for operand, row in ((a, 3), (b, 131)):
        operand.codes[row, 77] = 0xFF
    got = np.isnan(multiply(problem, a, b))
    want = np.zeros_like(got)
    want[3], want[:, 131] = True, True
    assert (got == want).all()


@pytest.mark.parametrize("problem", [MXFP8, E5M2], ids=str)
@pytest.mark.parametrize(
    ("a_scales", "b_scales"),
    [((0, 30), (225, 255)), ((225, 255), (0, 30)), ((185, 200), (50, 60)), ((0, 3), (120, 255)), ((0, 40), (180, 200))],
)
def test_scales_far_from_one(problem: Problem, a_scales: tuple[int, int], b_scales: tuple[int, int]) -> None:
    """Every scale counts exactly, whatever the other one is; both ways of the kernel are taken."""
    problem = replace(problem, out_dtype="float32")
    a, b = operands(problem, (7, 504, 544), a_scales, b_scales)
    compare(problem, a, b, multiply(problem, a, b), f"{a_scales} {b_scales}")


def test_values_beyond_float32_are_infinite() -> None:
    problem = replace(MXFP8, out_dtype="float32")
    a, b = operands(problem, (4, 64, 128), (20, 21))
    a.codes[:], b.codes[:, :, 0] = 0x38, 0x38  # one
    b.codes[9, 40], b.scales[9, 1] = 0x7E, 254  # 448 * 2^127
    got = multiply(problem, a, b)
    want = np.zeros_like(got, bool)
    want[:, 9] = True
    assert (np.isinf(got) == want).all()


def test_zero_blocks() -> None:
    problem = replace(MXFP8, out_dtype="float32")
    a, b = operands(problem, (16, 304, 544))
    for operand in (a, b):
        operand.codes[::2, 64:128], operand.scales[::2, 2:4] = 0, 0
    a.codes[5], a.scales[5] = 0, 0
    got = multiply(problem, a, b)
    compare(problem, a, b, got, "zero blocks")
    assert not got[5].any()
