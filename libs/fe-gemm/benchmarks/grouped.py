"""Time grouped products beside torch: ``python grouped.py large small decode fused``, any of these.

``large``, ``small``, ``decode``: launches for groups of many, of some hundred and of few rows, all tiles of
:func:`fe_gemm.planning.grouped.candidates` among them, beside one dense product of as many rows (torch) and torch's own
grouped product, if it has one. ``decode`` counts bytes of weights. ``fused``: the epilogues beside the plain product.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from racing import ARCH, Calls, Record, prepare

from fe_gemm.planning.grouped import Grouped, GroupedProblem, candidates, choose_launches, config
from fe_gemm.planning.launches import Launches
from fe_runtime.compile.cache import load
from fe_runtime.compile.spec import KernelSpec

CASES = {
    "large": [(8, 4096, 4096, 7168), (32, 1024, 4096, 7168), (8, 4096, 7168, 2048)],
    "small": [(64, 256, 4096, 2048), (128, 512, 1536, 2048)],
    "decode": [(256, 32, 4096, 7168), (32, 8, 4096, 7168)],
}
"""Groups, rows of each on average, N, K."""

PLAIN = GroupedProblem()
GRADIENT = {"epilogue": "dglu", "upstream_dtype": "bfloat16", "beta": True, "dprob": "added"}
FUSED = {
    "plain": PLAIN,
    "addresses": GroupedProblem(discrete=True),
    "bias, two results": GroupedProblem(bias_dtype="bfloat16", pre_dtype="bfloat16"),
    "swiglu": GroupedProblem(epilogue="glu", activation="swiglu", pre_dtype="bfloat16"),
    "geglu, bias": GroupedProblem(epilogue="glu", activation="geglu", bias_dtype="bfloat16"),
    "gradient of swiglu": GroupedProblem(activation="swiglu", **GRADIENT),
    "gradient of swiglu, dbias": GroupedProblem(activation="swiglu", dbias="new", **GRADIENT),
}
SCALARS = {"linear_offset": 1.0, "geglu_alpha": 1.702, "glu_clamp_max": 7.0, "glu_clamp_min": -7.0}


def main() -> None:
    """Time what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=[*CASES, "fused"])
    Record.add_arguments(parser)
    arguments, record = parser.parse_args(), Record("grouped products beside torch")
    for what in arguments.what:
        for groups, rows, n, k in CASES["large" if what == "fused" else what]:
            arrays = operands(groups, rows, n, k)
            if what == "fused":
                plans = {name: plan(problem, chosen(problem, groups, n, k)) for name, problem in FUSED.items()}
                calls: Calls = {}
            else:
                tried = candidates(PLAIN, n, k, groups, ARCH, multiprocessors())
                plans = {"chosen": plan(PLAIN, chosen(PLAIN, groups, n, k))}
                plans |= {str(launch): plan(PLAIN, Launches((), launch)) for launch in tried}
                calls = peers(arrays)
            prepare([spec_of(how) for how in plans.values()])
            calls |= {name: call_of(how, arrays) for name, how in plans.items()}
            amount, unit = 2 * groups * rows * n * k / 1e12, "TFLOP/s"
            if what == "decode":
                amount, unit = 2 * groups * n * k / 1e9, "GB/s"
            record.race(f"{what}: {groups} groups of {rows} rows, {n}x{k}", calls, amount, unit)
    record.write(arguments)


def operands(groups: int, rows: int, n: int, k: int) -> dict[str, Any]:
    """Return the arrays of all kernels; the groups have from half to one and a half times as many rows."""
    sizes = torch.linspace(0.5, 1.5, groups).mul(rows).round().int()
    sizes[-1] += groups * rows - sizes.sum()
    m = groups * rows
    made = {
        name: torch.randn(shape, device="cuda").bfloat16() for name, shape in (("a", (m, k)), ("b", (groups, n, k)))
    }
    b = made["b"]
    step = b.stride(0) * b.element_size()
    return {
        **made,
        "offsets": sizes.cumsum(0).int().cuda(),
        "addresses": torch.tensor([b.data_ptr() + e * step for e in range(groups)], device="cuda"),
        "alpha": torch.ones(groups, device="cuda"),
        "beta": torch.ones(groups, device="cuda"),
        "prob": torch.rand(m, device="cuda"),
        "bias": torch.randn(groups, n, device="cuda").bfloat16(),
    }


def results(how: Grouped, arrays: dict[str, Any]) -> dict[str, Any]:
    """Return what a kernel writes, its workspaces, and what comes in beside the product."""
    problem, (groups, n, _), m = how.problem, arrays["b"].shape, arrays["a"].shape[0]
    found = {
        "pre": torch.empty(m, n, dtype=torch.bfloat16, device="cuda"),
        "c": torch.empty(m, n * problem.result_columns // 64, dtype=torch.bfloat16, device="cuda"),
        "dprob": torch.zeros(m, device="cuda"),
        "dbias": torch.empty(groups, 2 * n, dtype=torch.bfloat16, device="cuda"),
    }
    if problem.upstream_dtype is not None:
        found["upstream"] = torch.randn(m, 2 * n, device="cuda").bfloat16()
    for name, (shape, dtype) in how.scratch(groups, m, n).items():
        found[name] = torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
    return found


def peers(arrays: dict[str, Any]) -> Calls:
    """Return a dense product of as many rows, and torch's grouped product."""
    a, b, offsets = (arrays[name] for name in ("a", "b", "offsets"))
    calls: Calls = {"torch, dense": lambda: torch.matmul(a, b[0].t())}
    grouped = getattr(torch, "_grouped_mm", None)
    if grouped is not None:
        calls["torch, grouped"] = lambda: grouped(a, b.transpose(1, 2), offs=offsets)
    return calls


def plan(problem: GroupedProblem, launches: Launches) -> Grouped:
    """Return a plan of a kernel."""
    weights = "addresses" if problem.discrete else "b"
    own = (*problem.inputs, *problem.results, *problem.scratch, *problem.scalars)
    return Grouped(problem, launches, multiprocessors(), ("a", "offsets", weights, *own, "maps"))


def chosen(problem: GroupedProblem, groups: int, n: int, k: int) -> Launches:
    """Return the launches that are chosen for a problem."""
    return choose_launches(problem, n, k, groups, ARCH, multiprocessors())


def spec_of(how: Grouped) -> KernelSpec:
    """Return the kernel of a plan."""
    return KernelSpec.of("fe_gemm.grouped", "fe_gemm.kernels.sm90.grouped:build", ARCH, **config(how))


def call_of(how: Grouped, arrays: dict[str, Any]) -> Callable[[], Any]:
    """Return a call of a plan's kernel."""
    kernel, given = load(spec_of(how)), {**arrays, **results(how, arrays), **SCALARS}
    arguments = [given[name] for name in how.arguments]
    return lambda: kernel(*arguments)


def multiprocessors() -> int:
    """Return how many the GPU has."""
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


if __name__ == "__main__":
    main()
