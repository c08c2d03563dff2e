"""Time gradients of experts' weights beside torch: ``python grouped_wgrad.py even uneven``, any of these.

``even``: experts with equally many tokens. ``uneven``: sizes that leave a long tail to a bad schedule. Launches with
tiles by a plan and with tiles from a counter, in bf16, token-major operands.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from racing import ARCH, Calls, Record, prepare

from fe_gemm.planning.grouped_wgrad import Plan, Problem, config, is_valid, workspace_bytes
from fe_gemm.planning.tiles import Launch, roomy
from fe_runtime.arrays import Device, sm_count
from fe_runtime.compile.cache import load
from fe_runtime.compile.spec import KernelSpec

ARGUMENTS = ("a", "b", "offsets", "c", "groups")
SIZES = {
    "even": [[4096] * 8, [1024] * 8, [256] * 64],
    "uneven": [[162, 0, 2577, 446, 0, 83], [30000] + [300] * 7, [65536 // (8 * (i + 1)) for i in range(64)]],
}
EXTENTS = ((7168, 4096), (2048, 7168))
LAUNCHES = [
    *(Launch(128, 256, 2, 1, band=band) for band in (4, 8, 16)),
    Launch(128, 256, 1, 1),
    Launch(128, 256, 1, 2),
    Launch(256, 128, 2, 1),
    Launch(256, 128, 1, 2),
]


def main() -> None:
    """Time what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=list(SIZES))
    Record.add_arguments(parser)
    arguments, record = parser.parse_args(), Record("gradients of the experts' weights beside torch")
    problem = Problem()
    plans = [
        Plan(problem, roomy(problem.product, launch), sm_count(Device("cuda", 0)), ARGUMENTS, dynamic)
        for launch in LAUNCHES
        for dynamic in (False, True)
    ]
    plans = [plan for plan in plans if is_valid(problem, plan.launch)]
    prepare([spec(plan) for plan in plans])
    for what in arguments.what:
        for sizes in SIZES[what]:
            for m, n in EXTENTS:
                time_sizes(record, what, plans, sizes, (m, n))
    record.write(arguments)


def time_sizes(record: Record, what: str, plans: list[Plan], sizes: list[int], extents: tuple[int, int]) -> None:
    """Time all plans for some sizes of groups."""
    (m, n), tokens = extents, sum(sizes)
    a, b = (torch.randn(tokens, extent, dtype=torch.bfloat16, device="cuda") for extent in (m, n))
    offsets = torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)
    calls: Calls = {"torch, one product for each": looped(a, b, sizes)}
    if hasattr(torch, "_grouped_mm") and all(sizes):
        calls["torch, grouped"] = lambda: torch._grouped_mm(a.T, b, offs=offsets)
    for plan in plans:
        calls[f"{'dynamic' if plan.dynamic else 'planned'} {plan.launch}"] = call_of(plan, a, b, offsets)
    few = f"{sizes[:4]}..." if len(sizes) > 4 else str(sizes)
    record.race(f"{what} {m}x{n}, {len(sizes)} experts, tokens {few}", calls, 2e-12 * m * n * tokens, "TFLOP/s")


def looped(a: Any, b: Any, sizes: list[int]) -> Any:
    """Return a call of one product for each expert with tokens."""
    out = torch.empty(len(sizes), a.shape[1], b.shape[1], dtype=a.dtype, device="cuda")
    parts = [part for part in zip(a.split(sizes), b.split(sizes), out, strict=True) if len(part[0])]

    def run() -> None:
        for left, right, w in parts:
            torch.matmul(left.T, right, out=w)

    return run


def spec(plan: Plan) -> KernelSpec:
    """Return what a plan compiles."""
    builder = "fe_gemm.kernels.sm90.grouped_wgrad:build"
    return KernelSpec.of("fe_gemm.grouped_gemm_wgrad", builder, ARCH, **config(plan))


def call_of(plan: Plan, a: Any, b: Any, offsets: Any) -> Any:
    """Return a call of a plan's kernel."""
    run, experts = load(spec(plan)), len(offsets)
    c = torch.empty(experts, a.shape[1], b.shape[1], dtype=a.dtype, device="cuda")
    groups = torch.empty(workspace_bytes(experts), dtype=torch.uint8, device="cuda")
    return lambda: run(a.T, b, offsets, c, groups)


if __name__ == "__main__":
    main()
