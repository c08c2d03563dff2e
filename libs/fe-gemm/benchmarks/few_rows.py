"""Time products of a few block-scaled rows with many: operations, the kernels that they may use, and torch in bf16.

``python few_rows.py`` prints a table for each format and shape: how fast beside torch's product of bf16 matrices,
microseconds, GB/s of weights and their scales. ``--most 12`` times as many launches of each kernel, by expected time;
these leave bf16 sums, without an epilogue. ``--check`` compares what they leave with float32 products.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from racing import ARCH, Calls, Record, prepare

from fe_gemm import gemm_amax_wrapper, gemm_swiglu_wrapper
from fe_gemm.planning import scaled_few_rows as hopper
from fe_gemm.planning import small_m as general
from fe_runtime import formats
from fe_runtime.compile import KernelSpec, load

FORMATS = {
    "mxfp8": ("float8_e4m3fn", "float8_e8m0fnu", 32),
    "nvfp4": ("float4_e2m1fn", "float8_e4m3fn", 16),
    "mxfp4": ("float4_e2m1fn", "float8_e8m0fnu", 32),
}
SHAPES = ("16x28672x8192", "16x8192x8192", "32x28672x8192", "64x28672x8192", "128x28672x8192")
SUMS = {"hopper": "fe_gemm.kernels.sm90.scaled_few_rows:build", "general": "fe_gemm.kernels.small_m_blocked:build"}


def main() -> None:
    """Time the products that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["mxfp8", "nvfp4"])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="MxNxK")
    parser.add_argument("--most", type=int, default=2, help="launches of each kernel")
    parser.add_argument("--check", action="store_true")
    Record.add_arguments(parser)
    arguments, record = parser.parse_args(), Record("few block-scaled rows beside torch in bf16")
    for shape in arguments.shapes:
        m, n, k = map(int, shape.split("x"))
        for name in arguments.formats:
            measure(record, Operand(name, m, k), Operand(name, n, k), arguments.most, arguments.check)
    record.write(arguments)


@dataclass
class Operand:
    """Random codes (rows, bytes of K, 1) and scales in the blocked layout."""

    name: str
    rows: int
    k: int

    def __post_init__(self) -> None:
        element, scale, vec = FORMATS[self.name]
        held = self.k // 2 if element == "float4_e2m1fn" else self.k
        self.codes = torch.randint(0, 256, (self.rows, held, 1), dtype=torch.uint8, device="cuda")
        if held == self.k:
            self.codes &= 0xBF  # no NaN
        low, high = (120, 128) if scale == "float8_e8m0fnu" else (40, 72)
        scales = torch.randint(low, high, (1, self.rows, -(-self.k // vec)), dtype=torch.uint8)
        self.scales = torch.from_numpy(formats.to_blocked(scales.numpy())).cuda()

    @property
    def size(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.numel() + self.scales.numel()

    @property
    def typed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales as the operations take them; bytes of codes are pairs of e2m1."""
        element, scale, _ = FORMATS[self.name]
        codes = self.codes if element == "float4_e2m1fn" else self.codes.view(torch.float8_e4m3fn)
        return codes, self.scales.view(torch.float8_e4m3fn) if scale == "float8_e4m3fn" else self.scales

    @cached_property
    def values(self) -> torch.Tensor:
        """What the operand stands for, in float32."""
        element, scale, vec = FORMATS[self.name]
        codes = self.codes[..., 0].cpu().numpy()
        scales = formats.from_blocked(self.scales.cpu().numpy(), self.rows, -(-self.k // vec))[0]
        typed = codes if element == "float4_e2m1fn" else formats.typed_view(codes, element)
        return torch.from_numpy(formats.dequantize(typed, formats.typed_view(scales, scale), vec=vec)).cuda()


def measure(record: Record, tokens: Operand, weights: Operand, most: int, check: bool) -> None:
    """Print the table of a product in a format."""
    name = tokens.name
    a, b = (torch.randn(side.rows, side.k, device="cuda").bfloat16() for side in (tokens, weights))
    calls: Calls = {"torch, bf16": lambda: a @ b.T, **operations(name, tokens, weights)}
    sums = list(kernels(name, tokens, weights, most))
    prepare([spec for _, spec, _, _ in sums])
    for label, spec, out, rest in sums:
        calls[label] = partial(load(spec), tokens.codes, weights.codes, flat(tokens), flat(weights), out, *rest)
        if check:
            calls[label]()
            want = tokens.values @ weights.values.T
            print(f"error {((out[..., 0].float() - want).norm() / want.norm()).item():.2e}  {label}")
    record.race(f"{name} {tokens.rows}x{weights.rows}x{tokens.k}", calls, weights.size / 1e9, "GB/s")


def operations(name: str, tokens: Operand, weights: Operand) -> Calls:
    """Return calls of operations with bf16 results."""
    (a, sfa), (b, sfb) = tokens.typed, weights.typed
    vec = FORMATS[name][2]
    return {
        "gemm_amax": lambda: gemm_amax_wrapper(a, b, sfa, sfb, c_dtype=torch.bfloat16, sf_vec_size=vec),
        "gemm_swiglu": lambda: gemm_swiglu_wrapper(
            a,
            b,
            sfa_tensor=sfa,
            sfb_tensor=sfb,
            ab12_dtype=torch.bfloat16,
            c_dtype=torch.bfloat16,
            sf_vec_size=vec,
        ),
    }


def kernels(
    name: str, tokens: Operand, weights: Operand, most: int
) -> Iterator[tuple[str, KernelSpec, torch.Tensor, list[Any]]]:
    """Yield label, kernel, result and further arguments for launches of the kernels for few rows."""
    m, n, k = tokens.rows, weights.rows, tokens.k
    count = torch.cuda.get_device_properties(0).multi_processor_count
    out = torch.empty(m, n, 1, dtype=torch.bfloat16, device="cuda")
    if m <= 64 and FORMATS[name] in hopper.FORMATS:
        problem = hopper.Problem(*FORMATS[name], tokens=-(-m // 16) * 16)
        for launch in hopper.candidates(problem, n, k, count)[:most]:
            sums = [torch.empty(launch.slices * m, n, device="cuda")] if launch.slices > 1 else []
            yield str(launch), spec_of("hopper", hopper.config(problem, launch)), out, [*sums, count]
    if m <= 32:
        element, scale, vec = FORMATS[name]
        small = general.SmallProblem(element, scale, vec, element, tokens=-(-m // 8) * 8)
        for how in general.candidates(small, ARCH)[:most]:
            slices = general.slices(small, how, n, k, count)
            if slices:
                rest = [torch.empty(slices * m, n, device="cuda"), slices, count]
                yield f"{how} {slices} slices", spec_of("general", general.config(small, how)), out, rest


def spec_of(which: str, config: dict[str, Any]) -> KernelSpec:
    """Return a kernel for few rows."""
    return KernelSpec.of("fe_gemm.few_rows", SUMS[which], ARCH, **config)


def flat(operand: Operand) -> torch.Tensor:
    """Return the scales of an operand as the kernels see them."""
    return operand.scales.reshape(-1)


if __name__ == "__main__":
    main()
