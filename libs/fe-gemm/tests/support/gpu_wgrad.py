"""Calls of the kernel of gradients of experts' weights on a GPU, with numbers around and behind everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from naive_gemm import HALF_SUBNORMAL, STORED, U, accumulation_share

from fe_gemm.planning.expand import workspace_shape
from fe_gemm.planning.grouped_wgrad import Plan, Problem, choose, config, is_valid, workspace_bytes
from fe_gemm.planning.tiles import Launch
from fe_runtime import testing
from fe_runtime.arrays import Device, capability, sm_count
from fe_runtime.compile import KernelSpec, ToolchainError, load

DEVICE = "cuda"


@dataclass
class Case:
    """A call.

    Parameters
    ----------
    problem, sizes, m, n
        What is computed, and extents: tokens of each expert, rows of A, columns of B.
    tail
        Tokens behind those of all experts, which hold NaN.
    pad
        Values between lines of operands.
    whole
        Small whole numbers, whose sums are exact in float32.
    dynamic
        Clusters take tiles from a counter.
    """

    problem: Problem
    sizes: list[int]
    m: int = 200
    n: int = 328
    tail: int = 70
    pad: int = 0
    whole: bool = False
    launch: Launch | None = None
    multiprocessors: int | None = None
    dynamic: bool = False
    seed: int = 0

    @property
    def ends(self) -> Any:
        return np.cumsum(self.sizes).astype(np.int32)

    @property
    def tokens(self) -> int:
        """T: where tokens are contiguous, a multiple of 8."""
        least = int(self.ends[-1]) + self.tail
        return -(-least // 8) * 8 if "k" in (self.problem.a_major, self.problem.b_major) else max(1, least)

    @property
    def plan(self) -> Plan:
        launch = self.launch or choose(self.problem, self.m, self.n, "sm_90a")
        assert is_valid(self.problem, launch)
        count = self.multiprocessors or sm_count(Device("cuda", 0))
        return Plan(self.problem, launch, count, arguments(self.problem), self.dynamic)

    def values(self) -> tuple[Any, Any]:
        """Return A (M, T) and B (T, N) in the operands' dtype."""
        random = np.random.default_rng([self.seed, self.m, self.n, self.tokens])
        found = []
        for rows in (self.m, self.n):
            shape = (rows, self.tokens)
            drawn = random.integers(-2, 3, shape) if self.whole else random.standard_normal(shape, np.float32)
            drawn = np.asarray(drawn, np.float32).astype(STORED[self.problem.dtype])
            drawn[:, self.ends[-1] :] = np.nan
            found.append(drawn)
        return found[0], found[1].T


def arguments(problem: Problem) -> tuple[str, ...]:
    """Return the names of a kernel's arguments in the runtime's order."""
    scaled = list(problem.workspaces)
    inputs = ["a", "b", *(f"sf{name}" for name in scaled), "offsets"]
    inputs += ["addresses"] if problem.discrete else ["old_c"] if problem.accumulates else []
    inputs += ["scale_a", "scale_b"] if problem.factors else []
    return (*inputs, *([] if problem.discrete else ["c"]), "groups", *(f"{name}_values" for name in scaled))


def kernel(plan: Plan) -> Any:
    if capability(Device("cuda", 0))[0] != 9:
        pytest.skip("needs a Hopper GPU")
    builder = "fe_gemm.kernels.sm90.grouped_wgrad:build"
    try:
        return load(KernelSpec.of("fe_gemm.grouped_gemm_wgrad", builder, "sm_90a", **config(plan)))
    except ToolchainError as error:
        pytest.skip(f"the kernel is not stored, and {error}")


def in_blocks(x: Any, ends: Any) -> Any:
    """Return (R, T) with each expert's tokens, and the tail, as a compact matrix, one after the other."""
    parts = np.split(x, ends, axis=1)
    return np.concatenate([np.ascontiguousarray(part).reshape(-1) for part in parts]).reshape(x.shape)


def guarded_operand(case: Case, name: str, values: Any) -> testing.Guarded:
    """Return A (M, T), or B as (N, T), in its major on the GPU; ``values``: (R, T), pairs as bytes."""
    tokens_contiguous = case.problem.majors[name] == "k"
    if case.problem.ragged and tokens_contiguous:
        values = in_blocks(values, case.ends * values.shape[1] // case.tokens)
    pad = 0 if case.problem.ragged and tokens_contiguous else case.pad
    rows, tokens = values.shape
    stride = (tokens + pad, 1) if tokens_contiguous else (1, rows + pad)
    return testing.guarded(
        values.shape, str(values.dtype), stride=stride, values=values, name=name, framework="torch", device=DEVICE
    )


def results(case: Case, old: Any = None) -> list[testing.Guarded]:
    """Return arrays for W with canaries around them and, without ``old`` (E, M, N), inside: one, or one per expert."""
    dtype, experts = case.problem.c_dtype, len(case.sizes)
    if case.problem.discrete:
        made = []
        for e in np.random.default_rng(case.seed).permutation(experts):  # addresses in no order
            made.append(
                (
                    e,
                    testing.guarded(
                        (case.m, case.n),
                        dtype,
                        values=None if old is None else old[e],
                        framework="torch",
                        device=DEVICE,
                    ),
                )
            )
        return [w for _, w in sorted(made, key=lambda pair: pair[0])]
    return [testing.guarded((experts, case.m, case.n), dtype, values=old, name="w", framework="torch", device=DEVICE)]


def stacked(found: list[testing.Guarded]) -> Any:
    """Return W (E, M, N)."""
    return found[0].array if found[0].array.ndim == 3 else torch.stack([w.array for w in found])


class Call:
    """A call that can be repeated."""

    def __init__(self, case: Case, a: Any, b: Any, scales: tuple[Any, ...] = (), old: Any = None) -> None:
        """``a`` (M, T), ``b`` (N, T), ``scales``: bytes of both, then the factors of both."""
        self.case = case
        self.operands = [guarded_operand(case, name, x) for name, x in (("a", a), ("b", b))]
        self.w = results(case, old)
        plan, problem = case.plan, case.problem
        first, second = (x.array for x in self.operands)
        self.arrays = {
            "a": first,
            "b": second if problem.b_turned else second.T,
            "offsets": torch.from_numpy(case.ends).to(DEVICE),
            "groups": torch.full((workspace_bytes(len(case.sizes)),), 0xFF, dtype=torch.uint8, device=DEVICE),
        }
        if problem.discrete:
            self.arrays["addresses"] = torch.tensor([w.array.data_ptr() for w in self.w], device=DEVICE)
        else:
            self.arrays["c"] = self.arrays["old_c"] = self.w[0].array
        for name, given in zip(("sfa", "sfb", "scale_a", "scale_b"), scales, strict=False):
            self.arrays[name] = torch.from_numpy(given).to(DEVICE)
        for (name, how), rows in zip(problem.workspaces.items(), (case.m, case.n), strict=False):
            shape = workspace_shape(how, rows, case.tokens, 1)
            self.arrays[f"{name}_values"] = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=DEVICE)
        self.names, self.run_kernel = plan.arguments, kernel(plan)

    def run(self) -> None:
        self.run_kernel(*(self.arrays[name] for name in self.names))

    def check_memory(self) -> None:
        torch.cuda.synchronize()
        for w in self.w:
            w.check_surroundings()
        for operand in self.operands:
            operand.check_unchanged()

    def result(self) -> Any:
        """Return W (E, M, N) after a run, checked to have written nothing else."""
        self.run()
        self.check_memory()
        return stacked(self.w).clone()


def compute(case: Case, old: Any = None) -> Any:
    """Return W of two runs that agree bit for bit."""
    a, b = case.values()
    first, again = (Call(case, a, np.ascontiguousarray(b.T), old=old).result() for _ in range(2))
    assert torch.equal(bits(first), bits(again)), "two runs differ"
    return first


def bits(x: Any) -> Any:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def expected(case: Case, a: Any, b: Any) -> tuple[Any, Any]:
    """Return W in float64 by a loop over the experts, and the sums of magnitudes; (M, T) and (T, N) in."""
    a, b = (torch.from_numpy(np.ascontiguousarray(x).astype(np.float64)).to(DEVICE) for x in (a, b))
    sums, sizes, start = [], [], 0
    for stop in case.ends.tolist():
        left, right = a[:, start:stop], b[start:stop]
        sums.append(left @ right)
        sizes.append(left.abs() @ right.abs())
        start = stop
    return torch.stack(sums), torch.stack(sizes)


def assert_close(case: Case, found: Any, want: Any, terms: Any, roundings: Any = None) -> None:
    """Compare W with float64: the sums of each expert's tokens, rounded once to its dtype; then ``roundings`` more."""
    dtype = case.problem.c_dtype
    share = torch.tensor([accumulation_share(size) for size in case.sizes], dtype=torch.float64, device=DEVICE)
    allowed = U[dtype] * want.abs() + share[:, None, None] * terms + HALF_SUBNORMAL[dtype]
    if roundings is not None:
        allowed = allowed + roundings
    wrong = ~((found.double() - want).abs() <= allowed)  # NaN is wrong too
    where = wrong.nonzero()
    assert not len(where), (
        f"{case}: {len(where)} of {wrong.numel()} values are wrong, between {where.amin(0).tolist()} and "
        f"{where.amax(0).tolist()}; first {found[tuple(where[0])].item()}, not {want[tuple(where[0])].item()}"
    )
    empty = [e for e, size in enumerate(case.sizes) if size == 0]
    if not case.problem.accumulates:
        assert not bits(found[empty]).any(), "an expert without tokens has other bits than +0"


def check(case: Case) -> None:
    """Compute and compare with float64."""
    a, b = case.values()
    assert_close(case, compute(case), *expected(case, a, b))
