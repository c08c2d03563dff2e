"""The conversion on a GPU, bit for bit: every FP8 code, hard float32 numbers, tails, gaps, lines far apart."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from split_floats import hard_floats, parts

from fe_gemm.planning.convert import DTYPES, Launch, Problem, choose, config, is_valid, workspace_shape
from fe_runtime import compile as kernels
from fe_runtime import testing
from fe_runtime.arrays import Device, capability
from fe_runtime.compile import KernelSpec, ToolchainError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]

PROBLEMS = [Problem(dtype, major) for dtype in DTYPES for major in "km"] + [Problem("float32", "k", "b")]
every_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=str)
LAUNCHES = [Launch(8, 8, 64, 1), Launch(16, 64, 128, 3), Launch(4, 128, 256, 8), Launch(4, 16, 32, 5)]
FP8 = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}


def kernel(problem: Problem, launch: Launch | None = None) -> Any:
    launch = launch or choose(problem)
    assert is_valid(problem, launch)
    arch, flat = kernels.arch_for(capability(Device("cuda", 0))), config(problem, launch)
    try:
        return kernels.load(KernelSpec.of("fe_gemm.convert", "fe_gemm.kernels.convert_operand:build", arch, **flat))
    except ToolchainError as error:
        pytest.skip(f"the kernel is not stored, and {error}")


def random_values(problem: Problem, shape: tuple[int, int, int], seed: int = 0) -> Any:
    """Return values (R, C, L) of every kind, FP8 as bytes."""
    rng = np.random.default_rng([seed, *shape])
    return rng.integers(0, 256, shape, np.uint8) if problem.bits == 8 else hard_floats(rng, shape)


def expected(problem: Problem, values: Any) -> Any:
    """Return the bf16 matrices, parts side by side along their columns."""
    if problem.bits == 32:
        return np.concatenate(parts(values, problem.parts), axis=1)
    with np.errstate(invalid="ignore"):
        return values.view(FP8[problem.dtype]).astype(ml_dtypes.bfloat16)


def guarded_operand(problem: Problem, values: Any, pad: int) -> testing.Guarded:
    """Return the operand as the kernel takes it, ``pad`` bytes after each line, and after each matrix as well."""
    rows, columns, _ = values.shape
    lines, length = (rows, columns) if problem.major == "k" else (columns, rows)
    line = length + pad // values.itemsize
    matrix = line * lines + pad // values.itemsize
    stride = (line, 1, matrix) if problem.major == "k" else (1, line, matrix)
    place = {"framework": "torch", "device": "cuda", "name": "operand"}
    return testing.guarded(values.shape, values.dtype.name, stride=stride, values=values, **place)


def convert(problem: Problem, values: Any, launch: Launch | None = None, pad: int = 0) -> Any:
    """Convert an operand, check what surrounds the result, and return its bits, (R, C of all parts, L)."""
    rows, columns, batches = values.shape
    lines, length = workspace_shape(problem, rows, columns, batches)
    used = len(problem.parts) * columns if problem.major == "k" else rows
    place = {"framework": "torch", "device": "cuda", "name": "workspace"}
    workspace = testing.guarded((lines, length + pad), "bfloat16", **place)
    operand = guarded_operand(problem, values, pad)
    kernel(problem, launch)(operand.array, workspace.array)
    torch.cuda.synchronize()
    operand.check_unchanged()
    workspace.check_surroundings()
    got = workspace.array.view(torch.int16).cpu().numpy().view(np.uint16)
    assert (got[:, used:] == 0xFFFF).all(), "written beyond the end of a line"
    by_batch = got[:, :used].reshape(batches, lines // batches, used)
    return by_batch.transpose((1, 2, 0) if problem.major == "k" else (2, 1, 0))


def check(problem: Problem, values: Any, **how: Any) -> None:
    got, want = convert(problem, values, **how), expected(problem, values)
    right = np.where(np.isnan(want), (got & 0x7FFF) > 0x7F80, got == want.view(np.uint16))
    where = np.argwhere(~right)
    assert not len(where), (
        f"{problem} {values.shape} {how}: {len(where)} of {got.size} values are wrong, first "
        f"{where[0]}: {got[tuple(where[0])]:#06x}, not {want.view(np.uint16)[tuple(where[0])]:#06x}"
    )


@pytest.mark.parametrize("major", ["k", "m"])
@pytest.mark.parametrize("dtype", FP8)
def test_every_code(dtype: str, major: str) -> None:
    check(Problem(dtype, major), np.arange(256, dtype=np.uint8).reshape(16, 16, 1))


@every_problem
@pytest.mark.parametrize("pad", [0, 16, 48])
def test_shapes(pad: int, problem: Problem) -> None:
    unit = 16 // (problem.bits // 8)
    for lines, vectors, batches in ((1, 1, 1), (33, 5, 2), (301, 67, 3), (7, 513, 1), (1000, 2, 1)):
        rows, columns = (lines, vectors * unit) if problem.major == "k" else (vectors * unit, lines)
        check(problem, random_values(problem, (rows, columns, batches)), pad=pad)


@every_problem
@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_launches(launch: Launch, problem: Problem) -> None:
    if is_valid(problem, launch):
        check(problem, random_values(problem, (304, 528, 2)), launch=launch)


@pytest.mark.gpu(exclusive=True)
@pytest.mark.parametrize("problem", [Problem(), Problem(major="m"), Problem("float32")], ids=str)
def test_lines_far_apart(problem: Problem) -> None:
    """The last line lies beyond 2^31 elements."""
    values = random_values(problem, (48, 48, 1))[:3] if problem.major == "k" else random_values(problem, (48, 3, 1))
    apart = 2**30 + 64
    memory = torch.empty(2 * apart + 48, dtype=torch.uint8 if problem.bits == 8 else torch.float32, device="cuda")
    stride = (apart, 1, 3 * apart) if problem.major == "k" else (1, apart, 3 * apart)
    operand = memory.as_strided(values.shape, stride)
    operand.copy_(torch.from_numpy(np.ascontiguousarray(values)))
    workspace = torch.empty(workspace_shape(problem, *values.shape), dtype=torch.bfloat16, device="cuda")
    kernel(problem)(operand, workspace)
    got = workspace.view(torch.int16).cpu().numpy().view(np.uint16)
    want = expected(problem, values)[..., 0]
    want = want if problem.major == "k" else want.T
    got = got[:, : want.shape[1]]
    assert np.where(np.isnan(want), (got & 0x7FFF) > 0x7F80, got == np.ascontiguousarray(want).view(np.uint16)).all()


@pytest.mark.gpu(exclusive=True)
@pytest.mark.parametrize("major", ["k", "m"])
def test_results_beyond_2_to_the_31(major: str) -> None:
    """A workspace of more than 2^31 elements: it starts and ends with the right values, and lacks none."""
    problem, (lines, length) = Problem("float32", major), (180_000, 4096)
    shape = (lines, length, 1) if major == "k" else (length, lines, 1)
    memory = torch.randn(lines, length, device="cuda")
    workspace = torch.full(workspace_shape(problem, *shape), torch.nan, dtype=torch.bfloat16, device="cuda")
    stride = (length, 1, lines * length) if major == "k" else (1, length, lines * length)
    assert workspace.numel() > 2**31
    kernel(problem)(memory.as_strided(shape, stride), workspace)
    found = workspace.view(lines, 3, length) if major == "k" else workspace.view(3, lines, length).transpose(0, 1)
    for start in range(0, lines, 20_000):
        x = memory[start : start + 20_000]
        head = x.bfloat16()
        tail = (x - head.float()).bfloat16()
        for number, part in enumerate((head, head, tail)):
            assert torch.equal(found[start : start + 20_000, number], part)
