"""Kernels of ``gemm_swiglu_backward``: a pass makes dX in a workspace, then the Hopper core dA = dX B and dB = dX^T A.

Neither product needs a transposed copy: the tensor cores take 16-bit operands along either dimension. The sum of dB is
over M; where M is no multiple of a tile's depth, what lies beyond it arrives as zeros in both operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cutlass import Float32, cute

from fe_gemm.kernels import swiglu_gradient
from fe_gemm.planning.swiglu_backward import Plan, Problem, split_config
from fe_runtime.cute.arguments import fake_stream
from fe_runtime.cute.types import numeric, storage

from .arguments import aligned, fake_matrices
from .gemm import Product

__all__ = ["build"]


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments.

    In order: dc (M, N/2, L), dab12 (M, N, L)?, a (M, K, L), b (N, K, L), ab12 (M, N, L), da, db, workspace, alpha,
    stream. ``config`` is what :func:`fe_gemm.planning.swiglu_backward.config` returns.
    """
    plan = split_config(config)

    @cute.jit
    def gemm_swiglu_backward(*arguments: Any) -> None:
        *values, stream = arguments
        _launch(arch, plan, dict(zip(plan.problem.arguments, values, strict=True)), stream)

    return gemm_swiglu_backward, _fake_arguments(plan.problem)


def _launch(arch: str, plan: Plan, arrays: dict[str, Any], stream: Any) -> None:
    problem = plan.problem
    a, b, alpha = arrays["a"], arrays["b"], arrays["alpha"]
    dc = aligned(arrays["dc"], problem.major == "n")
    ab12 = aligned(arrays["ab12"], problem.ab12_major == "n")
    dab12 = arrays.get("dab12")
    if dab12 is not None:
        dab12 = aligned(dab12, problem.dab12_major == "n")
    dx = swiglu_gradient.workspace_matrices(problem, ab12.shape, arrays["dx"])
    setup = swiglu_gradient.Setup.of(arch, problem, plan.launch)
    swiglu_gradient.launch_gradient(setup, dc, dab12, ab12, dx, stream)
    for product, left, right, result in (
        (Product(problem.da, plan.da), dx, _turned(b), arrays["da"]),
        (Product(problem.db, plan.db), _turned(dx), _turned(a), arrays["db"]),
    ):
        product.launch(left, right, {"c": result, "alpha": alpha}, plan.multiprocessors, stream)


def _turned(matrices: cute.Tensor) -> cute.Tensor:
    """Return the transposed matrices, which are the same memory."""
    return cute.make_tensor(matrices.iterator, cute.select(matrices.layout, mode=[1, 0, 2]))


def _fake_arguments(problem: Problem) -> tuple[Any, ...]:
    dtype = numeric(problem.dtype)
    a, b = (dtype, problem.a_major == "k"), (dtype, problem.b_major == "k")
    matrices = {
        "dc": (storage(problem.dc_dtype), problem.major == "n"),
        "dab12": (storage(problem.dab12_dtype or ""), problem.dab12_major == "n"),
        "ab12": (storage(problem.ab12_dtype), problem.ab12_major == "n"),
        **{"a": a, "b": b, "da": a, "db": b},
    }
    found = []
    for name in problem.arguments:
        if name in matrices:
            element, second_is_contiguous = matrices[name]
            extents = (cute.sym_int() for _ in range(3))
            found.append(fake_matrices(element, *extents, second_is_contiguous))
    return (*found, swiglu_gradient.fake_workspace(problem), Float32(1.0), fake_stream())
