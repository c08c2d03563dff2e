"""Time the Hopper core beside torch and quack: ``python core.py bf16 fp8 few fused``, any of these.

``bf16``, ``fp8``: launches on large products. ``few``: launches for few rows, and for 128 all that keep most
multiprocessors at work. ``fused``: the plain product and the epilogues of the dense operations.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from racing import ARCH, Calls, Record, prepare

from fe_gemm.planning.launches import config
from fe_gemm.planning.problem import Problem
from fe_gemm.planning.tiles import Launch, choose, is_valid, roomy
from fe_runtime.compile.cache import load
from fe_runtime.compile.spec import KernelSpec

LARGE = ((8192, 8192, 8192), (4096, 28672, 8192), (8192, 4096, 4096))
FEW = ((16, 28672, 8192), (128, 8192, 8192), (128, 4096, 4096), (16, 8192, 8192), (64, 4096, 4096))
BYTES = Problem("float8_e4m3fn")
LAUNCHES = {
    "bf16": [Launch(128, 256, 2, 1, band=band) for band in (2, 4, 8)]
    + [Launch(256, 128, 1, 2), Launch(256, 128, 2, 1)],
    "fp8": [Launch(128, 192, 2, 1, store_buffers=3), Launch(128, 128, 2, 1), Launch(128, 128, 1, 2)],
    "few": [
        Launch(64, 256, store_buffers=1),
        Launch(64, 128, store_buffers=1),
        Launch(64, 128, cluster_k=2, store_buffers=1),
        Launch(64, 256, cluster_k=2, store_buffers=1),
        Launch(64, 256, cluster_k=4, store_buffers=1),
        Launch(128, 128, cluster_k=2, store_buffers=1),
        Launch(128, 128, cluster_k=4, store_buffers=1),
        Launch(128, 192, cluster_k=3, store_buffers=1),
        Launch(128, 256, cluster_k=4, store_buffers=1),
        Launch(128, 64, cluster_n=2, store_buffers=1),
        Launch(128, 64, cluster_n=4, store_buffers=1),
    ],
}
FUSED = {
    "plain": Problem(),
    "amax": Problem(amax=True),
    "swiglu": Problem(epilogue="swiglu", pre_dtype="bfloat16", alpha=True),
    "srelu": Problem(epilogue="srelu", pre_dtype="bfloat16", alpha=True),
    "dsrelu": Problem(epilogue="dsrelu", upstream_dtype="bfloat16", alpha=True),
}


def main() -> None:
    """Time what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=[*LAUNCHES, "fused"])
    Record.add_arguments(parser)
    arguments, record = parser.parse_args(), Record("the Hopper core beside torch and quack")
    for what in arguments.what:
        if what == "fused":
            time_fused(record)
        else:
            time_launches(what, record)
    record.write(arguments)


def time_launches(what: str, record: Record) -> None:
    """Time launches of the plain product."""
    problem = BYTES if what == "fp8" else Problem()
    for m, n, k in FEW if what == "few" else LARGE:
        tried = full_waves(problem, m, n) if what == "few" and m > 64 else LAUNCHES[what]
        launches = [launch for tile in tried if is_valid(problem, launch := roomy(problem, tile))]
        prepare([spec_of(problem, launch) for launch in launches])
        a, b, c = operand(m, k, problem), operand(n, k, problem), result(m, n)
        calls = peers(a, b, problem)
        for launch in launches:
            calls[str(launch)] = call_of(problem, launch, (a, b, c))
        record.race(f"{what} {m}x{n}x{k}", calls, 2 * m * n * k / 1e12, "TFLOP/s")


def full_waves(problem: Problem, m: int, n: int) -> list[Launch]:
    """Return the launches whose blocks keep most multiprocessors at work for one tile, or for two."""
    found = []
    count = torch.cuda.get_device_properties(0).multi_processor_count
    for tile_m, tile_n, rows, columns, parts in product((64, 128), range(64, 257, 64), (1, 2), (1, 2, 4), range(1, 9)):
        launch = Launch(tile_m, tile_n, rows, columns, parts, store_buffers=1)
        blocks = -(-m // (tile_m * rows)) * -(-n // (tile_n * columns)) * launch.cluster
        waves = -(-blocks // count)
        if tile_m * rows <= m and waves <= 2 and blocks >= 0.9 * waves * count:
            found.append(launch)
    return found


def time_fused(record: Record) -> None:
    """Time the epilogues, bf16 in and out."""
    chosen = {name: (problem, choose(problem, 8192, 8192, ARCH)) for name, problem in FUSED.items()}
    prepare([spec_of(*pair) for pair in chosen.values()])
    for m, n, k in LARGE:
        a, b, c, pre = operand(m, k, Problem()), operand(n, k, Problem()), result(m, n), result(m, n)
        prob, dprob, maximum = (torch.rand(shape, device="cuda") for shape in ((m, 1, 1), (m, 1, 1), (1,)))
        partials = torch.empty(-(-n // chosen["dsrelu"][1].group_columns), 1, m, device="cuda")
        others = {
            "plain": (c,),
            "amax": (c, maximum),
            "swiglu": (pre, result(m, n // 2), 1.0),
            "srelu": (prob, pre, c, 1.0),
            "dsrelu": (pre, prob, c, dprob, partials, 1.0),
        }
        calls = peers(a, b, Problem())
        calls |= {name: call_of(*chosen[name], (a, b, *more)) for name, more in others.items()}
        record.race(f"fused {m}x{n}x{k}", calls, 2 * m * n * k / 1e12, "TFLOP/s")


def peers(a: Any, b: Any, problem: Problem) -> Calls:
    """Return the plain products of other libraries, torch's first."""
    rows, columns = a[..., 0], b[..., 0].t()
    if problem.promotes:
        rows, columns = (x.view(torch.float8_e4m3fn) for x in (rows, columns))
        one = torch.ones((), device="cuda")
        return {
            f"torch, fast accumulation {fast}": lambda fast=fast: torch._scaled_mm(  # type: ignore[misc]
                rows, columns, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast
            )
            for fast in (True, False)
        }
    out = torch.empty(len(rows), columns.shape[1], dtype=torch.bfloat16, device="cuda")
    calls: Calls = {"torch": lambda: torch.matmul(rows, columns, out=out)}
    try:
        gemm: Any = importlib.import_module("quack.gemm_interface").gemm
    except ImportError:
        return calls
    return {**calls, "quack": lambda: gemm(rows, columns, out=out, tuned=False)}


def spec_of(problem: Problem, launch: Launch) -> KernelSpec:
    """Return the kernel of a product."""
    return KernelSpec.of("fe_gemm.gemm", "fe_gemm.kernels.sm90.gemm:build", ARCH, **config(problem, launch))


def call_of(problem: Problem, launch: Launch, arguments: tuple[Any, ...]) -> Callable[[], Any]:
    """Return a call of a product's kernel."""
    kernel = load(spec_of(problem, launch))
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    return lambda: kernel(*arguments, multiprocessors)


def operand(rows: int, depth: int, problem: Problem) -> Any:
    """Return random values (rows, depth, 1), K contiguous; 8-bit ones as bytes."""
    values = torch.randn(rows, depth, 1, device="cuda")
    return values.to(torch.float8_e4m3fn).view(torch.uint8) if problem.promotes else values.bfloat16()


def result(rows: int, columns: int) -> Any:
    """Return an array (rows, columns, 1)."""
    return torch.randn(rows, columns, 1, device="cuda").bfloat16()


if __name__ == "__main__":
    main()
