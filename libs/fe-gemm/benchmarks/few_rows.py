"""Time products of a few block-scaled rows with many: every candidate of both kernels, and torch without block scales.

``python few_rows.py`` prints a line per launch: microseconds of a call by itself, with other things in the second-level
cache; microseconds of one of many in a CUDA graph, which reads other weights each time; and for the latter GB/s of
weights and their scales. The numbers are medians. ``--check`` compares results with float32 products.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from fe_gemm.planning import scaled_few_rows as hopper
from fe_gemm.planning import small_m as general
from fe_runtime import formats
from fe_runtime.compile import KernelSpec, load

FORMATS = {"mxfp8": ("float8_e4m3fn", "float8_e8m0fnu", 32), "nvfp4": ("float4_e2m1fn", "float8_e4m3fn", 16)}
REPETITIONS = 30
FLUSH_BYTES = 512 << 20
IN_GRAPH = 20
"""Calls of a graph."""
LEAST_BYTES = 300 << 20
"""Of all weights that a graph reads in turn: several times the second-level cache."""

Call = Callable[[torch.Tensor, torch.Tensor], None]
"""Takes weights and their scales."""


def main() -> None:
    """Time the products that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--shapes", nargs="+", default=["16x28672x8192"], help="MxNxK")
    parser.add_argument("--most", type=int, default=100, help="candidates of each kernel")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    for shape in arguments.shapes:
        m, n, k = map(int, shape.split("x"))
        for name in arguments.formats:
            measure(name, (m, n, k), arguments.most, arguments.check)


def measure(name: str, shape: tuple[int, int, int], most: int, check: bool) -> None:
    """Print the times of a product in a format."""
    m, n, k = shape
    tokens, weights = operand(name, m, k), [operand(name, n, k)]
    size = sum(part.numel() for part in weights[0])
    while len(weights) * size < LEAST_BYTES:
        weights.append(tuple(part.clone() for part in weights[0]))
    print(f"{name} {m} x {n} x {k}: {size / 1e6:.0f} MB of weights, {size / 4.27e6:.1f} us at 4270 GB/s")
    want = values(name, tokens) @ values(name, weights[0]).T if check else None
    for label, call, out in calls(name, shape, tokens, most):
        report(label, call, weights, size)
        if want is not None:
            call(*weights[0])
            print(f"    error {((out.float() - want).norm() / want.norm()).item():.2e}")
    if name == "mxfp8" and hasattr(torch, "_scaled_mm"):
        report("torch._scaled_mm, no block scales", scaled_mm(tokens[0]), weights, size)


def calls(
    name: str, shape: tuple[int, int, int], tokens: Sequence[torch.Tensor], most: int
) -> Iterator[tuple[str, Call, torch.Tensor]]:
    """Yield a label, the call and its result for the launches of both kernels."""
    m, n, k = shape
    count = torch.cuda.get_device_properties(0).multi_processor_count
    out = torch.empty(m, n, 1, dtype=torch.bfloat16, device="cuda")
    if m <= 64:
        problem = hopper.Problem(*FORMATS[name], tokens=-(-m // 16) * 16)
        for launch in hopper.candidates(problem, n, k, count)[:most]:
            run = kernel("fe_gemm.kernels.sm90.scaled_few_rows:build", hopper.config(problem, launch))
            sums = [torch.empty(launch.slices * m, n, device="cuda")] if launch.slices > 1 else []
            yield str(launch), partial(_run, run, tokens, [out, *sums, count]), out[..., 0]
    if m <= 32:
        element, scale, vec = FORMATS[name]
        small = general.SmallProblem(element, scale, vec, element, tokens=-(-m // 8) * 8)
        for how in general.candidates(small, "sm_90a")[:most]:
            slices = general.slices(small, how, n, k, count)
            if slices:
                run = kernel("fe_gemm.kernels.small_m_blocked:build", general.config(small, how))
                sums = [torch.empty(slices * m, n, device="cuda")]
                yield f"{how} {slices} slices", partial(_run, run, tokens, [out, *sums, slices, count]), out[..., 0]


def _run(
    run: Any, tokens: Sequence[torch.Tensor], rest: Sequence[Any], codes: torch.Tensor, scales: torch.Tensor
) -> None:
    run(tokens[0], codes, tokens[1], scales, *rest)


def kernel(builder: str, config: dict[str, Any]) -> Any:
    """Return a compiled kernel."""
    return load(KernelSpec.of("fe_gemm.few_rows", builder, "sm_90a", **config))


def operand(name: str, rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random codes (rows, bytes, 1) and scales in the blocked layout."""
    element, scale, vec = FORMATS[name]
    fp4 = element == "float4_e2m1fn"
    codes = torch.randint(0, 256, (rows, k // 2 if fp4 else k, 1), dtype=torch.uint8, device="cuda")
    if not fp4:
        codes &= 0xBF  # no NaN
    low, high = (120, 128) if scale == "float8_e8m0fnu" else (40, 72)
    scales = torch.randint(low, high, (rows, -(-k // vec)), dtype=torch.uint8).numpy()
    return codes, torch.from_numpy(formats.to_blocked(scales[None]).reshape(-1)).cuda()


def values(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what an operand stands for, in float32."""
    element, scale, vec = FORMATS[name]
    codes = parts[0][..., 0].cpu().numpy()
    rows, k = codes.shape[0], codes.shape[1] * (2 if element == "float4_e2m1fn" else 1)
    blocks = -(-k // vec)
    blocked = parts[1].cpu().numpy().reshape(formats.scale_shape(rows, blocks, 1))
    scales = formats.from_blocked(blocked, rows, blocks)[0]
    typed = codes if element == "float4_e2m1fn" else formats.typed_view(codes, element)
    return torch.from_numpy(formats.dequantize(typed, formats.typed_view(scales, scale), vec=vec)).cuda()


def scaled_mm(tokens: torch.Tensor) -> Call:
    """Return torch's product of the same codes with one scale for each operand."""
    one = torch.ones((), device="cuda")
    a = tokens[..., 0].view(torch.float8_e4m3fn)

    def call(codes: torch.Tensor, scales: torch.Tensor) -> None:
        b = codes[..., 0].view(torch.float8_e4m3fn)
        torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16)

    return call


def report(label: str, call: Call, weights: Sequence[Sequence[torch.Tensor]], size: int) -> None:
    """Print the times of a call."""
    alone, in_graph = time_alone(call, weights[0]), time_in_graph(call, weights)
    print(f"  {alone:7.1f} us alone, {in_graph:7.1f} us in a graph, {size / in_graph / 1e3:5.0f} GB/s  {label}")


def time_alone(call: Call, weights: Sequence[torch.Tensor]) -> float:
    """Return the microseconds of a call after the second-level cache has been filled with other things."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    found = []
    for _ in range(REPETITIONS):
        flush.fill_(1)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call(*weights)
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) * 1e3)
    return median(found)


def time_in_graph(call: Call, weights: Sequence[Sequence[torch.Tensor]]) -> float:
    """Return the microseconds of a call among many that take turns with different weights."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(IN_GRAPH):
            call(*weights[i % len(weights)])
    found = []
    for _ in range(REPETITIONS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) * 1e3 / IN_GRAPH)
    return median(found)


if __name__ == "__main__":
    main()
