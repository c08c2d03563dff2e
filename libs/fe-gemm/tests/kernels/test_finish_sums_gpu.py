"""Epilogues of sums in float32 on a Hopper GPU, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fe_gemm.planning.few_rows import finishing_launch
from fe_gemm.planning.launches import config
from fe_gemm.planning.problem import Problem
from fe_runtime import testing
from fe_runtime.arrays import Device, capability
from fe_runtime.compile import KernelSpec, ToolchainError, load

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

SHAPES = [(1, 64, 1), (16, 192, 3), (33, 1000, 2), (64, 8192, 1)]
"""M, N, slices."""


def finish(
    problem: Problem, sums: Any, slices: int, *outputs: tuple[tuple[int, ...], str], rest: Any = ()
) -> list[Any]:
    """Run an epilogue; return its outputs as numpy arrays in float32."""
    if capability(Device("cuda", 0)) != (9, 0):
        pytest.skip("a kernel for compute capability 9.0")
    flat = config(problem, finishing_launch(problem))
    builder = "fe_gemm.kernels.sm90.finish_sums:build"
    try:
        run = load(KernelSpec.of("fe_gemm.finish_sums", builder, "sm_90a", **flat))
    except ToolchainError as error:
        pytest.skip(f"the kernel is not stored, and {error}")
    place: dict[str, Any] = {"framework": "torch", "device": "cuda"}
    given = testing.guarded(sums.shape, "float32", values=sums, name="sums", **place)
    guards = [testing.guarded(shape, dtype, name=f"output {i}", **place) for i, (shape, dtype) in enumerate(outputs)]
    run(given.array, *(guard.array for guard in guards), *rest, slices)
    torch.cuda.synchronize()
    given.check_unchanged()
    for guard in guards:
        guard.check_surroundings()
    return [guard.array.float().cpu().numpy() for guard in guards]


def random_sums(m: int, n: int, slices: int) -> tuple[Any, Any]:
    """Return sums (slices M, N), and what they add up to, in the order of the slices."""
    sums = np.random.default_rng(m + n).standard_normal((slices * m, n)).astype(np.float32)
    total = np.zeros((m, n), np.float32)
    for part in sums.reshape(slices, m, n):
        total += part
    return sums, total


def test_sums_and_amax_are_exact() -> None:
    for m, n, slices in SHAPES:
        sums, want = random_sums(m, n, slices)
        outputs = ((m, n, 1), "float32"), ((1,), "float32")
        c, amax = finish(Problem(c_dtype="float32", amax=True), sums, slices, *outputs)
        assert (c[..., 0] == want).all()
        assert amax[0] == np.abs(want).max()


def test_swiglu() -> None:
    problem = Problem(c_dtype="float32", epilogue="swiglu", pre_dtype="float32", alpha=True)
    for m, n, slices in SHAPES:
        if n % 64:
            continue
        sums, total = random_sums(m, n, slices)
        outputs = ((m, n, 1), "float32"), ((m, n // 2, 1), "float32")
        pre, c = finish(problem, sums, slices, *outputs, rest=(0.5,))
        x = 0.5 * total.astype(np.float64)
        assert (pre[..., 0] == x).all()
        up, gate = x.reshape(m, n // 64, 2, 32).transpose(2, 0, 1, 3).reshape(2, m, n // 2)
        want = up * gate / (1 + np.exp(-gate))
        assert (np.abs(c[..., 0] - want) <= 2.0**-18 * np.abs(want) + 1e-30).all()
