"""A launcher that expands two operands one after the other, as a matrix product does first."""

from __future__ import annotations

from typing import Any

from cutlass import cute

from fe_gemm.kernels import expand
from fe_gemm.planning.expand import Problem, choose, config

PROBLEMS = Problem(), Problem("float8_e5m2", major="m")


def build(arch: str) -> tuple[Any, tuple[Any, ...]]:
    """Return a launcher of codes, scales and workspace of A, then of B."""
    setups = [expand.Setup.of(arch, problem, choose(problem, arch)) for problem in PROBLEMS]

    @cute.jit
    def twice(
        a: cute.Tensor,
        sfa: cute.Tensor,
        a_out: cute.Tensor,
        b: cute.Tensor,
        sfb: cute.Tensor,
        b_out: cute.Tensor,
        stream: Any,
    ) -> None:
        for setup, (codes, scales, out) in zip(setups, ((a, sfa, a_out), (b, sfb, b_out)), strict=True):
            matrices = expand.expanded_matrices(setup.problem, codes, out)
            expand.launch_expand(setup, codes, scales, matrices, stream)

    arguments: list[Any] = []
    for setup in setups:
        arguments += expand.build(arch, **config(setup.problem, setup.launch))[1][:-1]
    return twice, (*arguments, expand.fake_stream())
