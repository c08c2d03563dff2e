"""Grouped products on a GPU: operands with NaN around them and behind the last group, and the products in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from grouped_numbers import SCALARS

from fe_gemm.planning.grouped import Grouped, GroupedProblem, choose_launches, config, is_valid
from fe_gemm.planning.launches import Launches
from fe_gemm.planning.tiles import Launch
from fe_runtime import testing
from fe_runtime.arrays import Device, capability, sm_count
from fe_runtime.compile import KernelSpec, ToolchainError, load

UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
"""Relative error of a rounding."""
FLOAT = 2.0**-23
"""What an operation in float32 may add."""
TINY = {"bfloat16": 2.0**-134, "float16": 2.0**-25, "float32": 2.0**-140}
SMALL = 2.0**-24

PLACE: dict[str, Any] = {"framework": "torch", "device": "cuda"}


def sum_share(k: int) -> float:
    """Return the share of the sum of absolute values by which the tensor cores may be off: they cut off what they add
    up in float32, 2^-18 for the additions of one instruction and 2^-28 for each of K products."""
    return 2.0**-18 + k * 2.0**-28


@dataclass
class Call:
    """A call's operands and results.

    ``given`` and ``results`` are guarded arrays by their names in a kernel; ``order``: where the weights of each group
    lie, which are in other places in memory than their numbers say if they have addresses.
    """

    problem: GroupedProblem
    sizes: list[int]
    n: int
    k: int
    given: dict[str, testing.Guarded]
    results: dict[str, testing.Guarded]
    order: Any
    offsets: Any
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return int(sum(self.sizes))

    def arguments(self, plan: Grouped) -> list[Any]:
        """Return the arguments of a kernel in its order."""
        found = {
            **{name: guard.array for name, guard in (self.given | self.results).items()},
            "offsets": self.offsets,
            **workspaces(plan, len(self.sizes), self.given["a"].array.shape[0], self.n),
            **self.others,
        }
        if plan.problem.discrete:
            found["addresses"] = addresses(self)
            if plan.byte_addresses:
                found["addresses"] = found["addresses"].view(torch.uint8)
        return [found[name] for name in plan.arguments]

    def value(self, name: str) -> Any:
        """Return an operand in float64 on the GPU."""
        return self.given[name].array.double()

    def weight(self, group: int) -> Any:
        """Return (N, K) of a group."""
        return self.given["b"].array[int(self.order[group])].double()

    def ranges(self) -> list[tuple[int, int, int]]:
        """Return (group, start, end) of the groups with rows."""
        ends = np.cumsum(self.sizes)
        return [
            (e, int(end - size), int(end)) for e, (size, end) in enumerate(zip(self.sizes, ends, strict=True)) if size
        ]


def workspaces(plan: Grouped, groups: int, m: int, n: int) -> dict[str, Any]:
    """Return workspaces full of NaN."""
    found = {}
    for name, (shape, dtype) in plan.scratch(groups, m, n).items():
        found[name] = torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
        found[name].view(torch.uint8).fill_(0xFF)
    return found


def addresses(call: Call) -> Any:
    b = call.given["b"].array
    step = b.stride(0) * b.element_size()
    return torch.tensor([b.data_ptr() + int(e) * step for e in call.order], dtype=torch.int64, device="cuda")


def plan(
    problem: GroupedProblem,
    launches: Launches | Launch,
    byte_addresses: bool = False,
    multiprocessors: int | None = None,
) -> Grouped:
    """Return a plan with all arguments that the problem has, in some order."""
    if isinstance(launches, Launch):
        launches = Launches((), launches)
    assert all(is_valid(problem, launch) for launch in launches.all)
    weights = "addresses" if problem.discrete else "b"
    own = (*problem.inputs, *problem.results, *problem.scratch, *problem.scalars)
    names = ("a", "offsets", weights, *own, "maps")
    count = sm_count(Device("cuda", 0)) if multiprocessors is None else multiprocessors
    return Grouped(problem, launches, count, names, byte_addresses)


def kernel(how: Grouped) -> Any:
    if capability(Device("cuda", 0)) != (9, 0):
        pytest.skip("a kernel for compute capability 9.0")
    builder = "fe_gemm.kernels.sm90.grouped:build"
    try:
        return load(KernelSpec.of("fe_gemm.grouped", builder, "sm_90a", **config(how)))
    except ToolchainError as error:
        pytest.skip(f"the kernel is not stored, and {error}")


def chosen(problem: GroupedProblem, n: int, k: int, groups: int) -> Launches:
    return choose_launches(problem, n, k, groups, "sm_90a", sm_count(Device("cuda", 0)))


def make(
    problem: GroupedProblem, sizes: list[int], n: int, k: int, tail: int = 37, whole: bool = False, seed: int = 0
) -> Call:
    """Make a call's operands: numbers of about 1, small whole ones if ``whole``; results are NaN."""
    random, groups, valid = np.random.default_rng([seed, n, k, *sizes[:8]]), len(sizes), sum(sizes)
    m = valid + tail

    def numbers(*shape: int) -> Any:
        return random.integers(-2, 3, shape) if whole else random.standard_normal(shape)

    order = np.arange(groups) if not problem.discrete else random.permutation(groups) // 2
    a, prob = numbers(m, k).astype(np.float64), numbers(m).astype(np.float64)
    a[valid:], prob[valid:] = np.nan, np.nan
    values = {
        "a": (a, problem.dtype),
        "b": (numbers(groups, n, k), problem.dtype),
        "alpha": (numbers(groups), "float32"),
    }
    if problem.weighted:
        values["prob"] = (prob, "float32")
    if problem.bias_dtype is not None:
        values["bias"] = (numbers(groups, n), problem.bias_dtype)
    if problem.upstream_dtype is not None:
        saved = numbers(m, 2 * n).astype(np.float64)
        saved[valid:] = np.nan
        values["upstream"] = (saved, problem.upstream_dtype)
    if problem.beta:
        values["beta"] = (numbers(groups), "float32")
    given = {
        name: guarded(name, x, dtype, name == "b" and problem.b_major == "n") for name, (x, dtype) in values.items()
    }
    shapes = result_shapes(problem, m, n)
    results = {name: testing.guarded(*shape, name=name, **PLACE) for name, shape in shapes.items()}
    for name, how, shape, dtype in (
        ("dprob", problem.dprob, (m,), "float32"),
        ("dbias", problem.dbias, (groups, 2 * n), "bfloat16"),
    ):
        if how is not None:
            there = numbers(*shape) if how == "added" else None
            results[name] = testing.guarded(shape, dtype, values=there, name=name, **PLACE)
    offsets = torch.tensor(np.cumsum(sizes), dtype=torch.int32, device="cuda")
    scalars = {name: SCALARS[name] for name in problem.scalars}
    return Call(problem, sizes, n, k, given, results, order, offsets, scalars)


def guarded(name: str, values: Any, dtype: str, by_columns: bool) -> testing.Guarded:
    stride = None
    if by_columns:
        _, n, k = values.shape
        stride = (n * k, 1, n)
    return testing.guarded(values.shape, dtype, stride=stride, values=np.asarray(values), name=name, **PLACE)


def result_shapes(problem: GroupedProblem, m: int, n: int) -> dict[str, tuple[tuple[int, ...], str]]:
    return {sheet.name: ((m, n * sheet.columns // 64), sheet.dtype) for sheet in problem.outputs}


def run(call: Call, how: Grouped) -> None:
    """Run a kernel; check that nothing but the rows of groups has been written."""
    before = {name: guard.array.clone() for name, guard in call.results.items()}
    kernel(how)(*call.arguments(how))
    torch.cuda.synchronize()
    for guard in call.given.values():
        guard.check_unchanged()
    for name, guard in call.results.items():
        guard.check_surroundings()
        if name == "dbias":
            continue
        rest, want = (x[call.rows :].contiguous() for x in (guard.array, before[name]))
        if name == "dprob" and call.problem.dprob == "new":
            want = torch.zeros_like(want)
        message = f"{name}: rows behind the last group have been written"
        assert torch.equal(rest.view(torch.uint8), want.view(torch.uint8)), message


def compare(name: str, got: Any, want: Any, allowed: Any, dtype: str) -> None:
    """Compare a part of a result with float64; NaN is wrong."""
    wrong = ~((got.double() - want).abs() <= allowed + UNIT[dtype] * want.abs() + TINY[dtype])
    where = wrong.nonzero()
    assert not len(where), (
        f"{name}: {len(where)} of {got.numel()} values are wrong, "
        f"between {where.amin(0).tolist()} and {where.amax(0).tolist()}; first: got "
        f"{got[tuple(where[0])].item()}, want {want[tuple(where[0])].item()}"
    )


def activation(name: str, gate: Any, up: Any) -> Any:
    """Return a gated activation of float64 arrays; its slope where a clamp begins to cut is that inside."""
    how = SCALARS
    if name == "geglu":
        below = clamped(gate, -math.inf, how["glu_clamp_max"])
        shifted = clamped(up, how["glu_clamp_min"], how["glu_clamp_max"]) + how["linear_offset"]
        return shifted * below * torch.sigmoid(how["geglu_alpha"] * below)
    if name == "situglu":
        first, second = how["situ_beta1"], how["situ_beta2"]
        return first * torch.tanh(gate / first) * torch.sigmoid(gate) * second * torch.tanh(up / second)
    return up * gate * torch.sigmoid(gate)


def clamped(x: Any, floor: float, ceiling: float) -> Any:
    """Return values between two bounds. (The slope of torch's own at the bounds is another one.)"""
    x = torch.where(x > ceiling, ceiling, x)
    return torch.where(x < floor, floor, x)


def separated(x: Any) -> tuple[Any, Any]:
    """Return gates and ups of columns that alternate in blocks of 32."""
    pairs = x.reshape(x.shape[0], -1, 2, 32)
    return tuple(pairs[:, :, part].reshape(x.shape[0], -1) for part in (0, 1))  # type: ignore[return-value]


def interleaved(gate: Any, up: Any) -> Any:
    """Return columns of gates and ups that alternate in blocks of 32."""
    parts = [part.reshape(part.shape[0], -1, 32) for part in (gate, up)]
    return torch.stack(parts, dim=2).reshape(gate.shape[0], -1)
