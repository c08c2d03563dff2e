"""The expansion on a GPU: every code with every scale, both majors, tails, padding of all kinds; bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from blocked_operands import BlockedOperand, Numbers, random_operand

from fe_gemm.planning.expand import Launch, Problem, choose, config, is_valid, workspace_shape
from fe_runtime import compile as kernels
from fe_runtime import testing
from fe_runtime.arrays import Device, capability
from fe_runtime.compile import KernelSpec, ToolchainError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]

PROBLEMS = {
    "mxfp8": Problem(),
    "mxfp8 of columns": Problem(major="m"),
    "mxfp8 e5m2": Problem("float8_e5m2"),
    "mxfp8 e5m2 of columns": Problem("float8_e5m2", major="m"),
    "nvfp4": Problem("float4_e2m1fn", "float8_e4m3fn", 16),
    "mxfp4": Problem("float4_e2m1fn"),
    "fp4 e8m0 16": Problem("float4_e2m1fn", vec=16),
}
every_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=list(PROBLEMS))
LAUNCHES = [Launch(16, 16, 128, 1, 2), Launch(8, 16, 512, 1, 1), Launch(8, 64, 128, 4, 2), Launch(32, 8, 64, 1, 2)]


def operand_of(problem: Problem, rows: int, columns: int, batches: int) -> BlockedOperand:
    return random_operand(problem.element, problem.scale, problem.vec, (rows, columns, batches))


def all_pairs(problem: Problem) -> BlockedOperand:
    """Row ``i`` has scale ``i`` everywhere and every code."""
    codes = np.arange(256, dtype=np.uint8) & ((1 << problem.bits) - 1)
    codes = np.stack([np.roll(codes, row) for row in range(256)])[..., None]
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 256 // problem.vec, axis=1)[..., None]
    scales &= 0x7F if problem.scale == "float8_e4m3fn" else 0xFF  # the sign of a scale is not in the contract
    return BlockedOperand(problem.element, problem.scale, problem.vec, codes, scales)


def guarded_codes(operand: BlockedOperand, by_row: bool, pad: int) -> testing.Guarded:
    """Codes as the kernel takes them, ``pad`` bytes after each line."""
    codes = operand.packed
    rows, held, _ = codes.shape
    line = (held if by_row else rows) + pad
    stride = (line, 1, line * rows) if by_row else (1, line, line * held)
    return testing.guarded(
        codes.shape, "uint8", stride=stride, values=codes, framework="torch", device="cuda", name="codes"
    )


def kernel(problem: Problem, launch: Launch | None) -> Any:
    arch = kernels.arch_for(capability(Device("cuda", 0)))
    launch = launch or choose(problem, arch)
    assert is_valid(problem, launch, arch)
    flat = config(problem, launch)
    try:
        return kernels.load(KernelSpec.of("fe_gemm.expand", "fe_gemm.kernels.expand:build", arch, **flat))
    except ToolchainError as error:
        pytest.skip(f"the kernel is not stored, and {error}")


def expand(problem: Problem, operand: BlockedOperand, launch: Launch | None = None, pad: int = 0) -> Numbers:
    """Expand an operand, check what surrounds the result, and return its bits, (R, C, L)."""
    rows, columns, batches = operand.codes.shape
    lines, length = workspace_shape(problem, rows, columns, batches)
    place = {"framework": "torch", "device": "cuda", "name": "workspace"}
    workspace = testing.guarded((lines, length + pad), "bfloat16", **place)
    codes = guarded_codes(operand, problem.major == "k", pad)
    scales = torch.from_numpy(operand.blocked_scales).cuda()
    kernel(problem, launch)(codes.array, scales, workspace.array)
    torch.cuda.synchronize()
    codes.check_unchanged()
    workspace.check_surroundings()
    got: Numbers = workspace.array.view(torch.int16).cpu().numpy().view(np.uint16)
    assert (got[:, length:] == 0xFFFF).all(), "written beyond the end of a line"
    by_batch = got[:, :length].reshape(batches, lines // batches, length)
    return by_batch.transpose((1, 2, 0) if problem.major == "k" else (2, 1, 0))


def check(problem: Problem, operand: BlockedOperand, **how: Any) -> None:
    got = expand(problem, operand, **how)
    with np.errstate(over="ignore", invalid="ignore"):
        values = operand.values.astype(ml_dtypes.bfloat16)
    want, small = values.view(np.uint16), np.abs(values.astype(np.float32)) < 2.0**-126
    right = got == want
    right |= small & (got == want & 0x8000)  # may be flushed
    right = np.where(np.isnan(values), (got & 0x7FFF) > 0x7F80, right)
    where = np.argwhere(~right)
    assert not len(where), (
        f"{problem} {operand.codes.shape} {how}: {len(where)} of {got.size} values are wrong, first "
        f"{where[0]}: {got[tuple(where[0])]:#06x}, not {want[tuple(where[0])]:#06x}"
    )


@every_problem
def test_every_code_with_every_scale(problem: Problem) -> None:
    check(problem, all_pairs(problem))


SHAPES = [(16, 32, 1), (128, 128, 1), (304, 544, 3), (144, 4128, 1), (2064, 96, 2)]
UNEVEN = [(1, 32, 1), (33, 1056, 2), (301, 544, 3)]


@every_problem
@pytest.mark.parametrize("pad", [0, 16])
def test_shapes(pad: int, problem: Problem) -> None:
    by_column = problem.major == "m"
    for shape in SHAPES + [(columns, rows, n) if by_column else (rows, columns, n) for rows, columns, n in UNEVEN]:
        check(problem, operand_of(problem, *shape), pad=pad)


@every_problem
@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_launches(launch: Launch, problem: Problem) -> None:
    arch = kernels.arch_for(capability(Device("cuda", 0)))
    if is_valid(problem, launch, arch):
        check(problem, operand_of(problem, 304, 544, 2), launch=launch)


@every_problem
def test_a_nan_scale_stays_in_its_block(problem: Problem) -> None:
    clean = operand_of(problem, 144, 160, 2)
    calm = replace(clean, codes=clean.codes & 7, scales=np.full_like(clean.scales, 60))
    scales = calm.scales.copy()
    scales[131, 3, 1] = 0x7F if problem.scale == "float8_e4m3fn" else 0xFF
    got, want = expand(problem, replace(calm, scales=scales)), expand(problem, calm)
    block = np.zeros(got.shape, bool)
    block[131, 3 * problem.vec : 4 * problem.vec, 1] = True
    assert ((got[block] & 0x7FFF) > 0x7F80).all()
    assert (got[~block] == want[~block]).all()
    assert ((want & 0x7FFF) < 0x7F80).all()
