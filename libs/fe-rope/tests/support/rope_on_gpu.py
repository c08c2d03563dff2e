"""Operands on a GPU for the tests of fe_rope, and comparison of bits."""

from __future__ import annotations

from typing import Any

import torch


def bfloats(shape: tuple[int, ...], kind: str = "normal", seed: int = 0) -> Any:
    """bf16 on the GPU: ``normal``, or ``bits``, finite patterns of every size with some zeros of either sign."""
    generator = torch.Generator("cuda").manual_seed(seed)
    if kind == "normal":
        return torch.randn(shape, device="cuda", generator=generator).bfloat16()
    pattern = torch.randint(-(1 << 15), 1 << 15, shape, device="cuda", generator=generator, dtype=torch.int16)
    special = (pattern & 0x7F80) == 0x7F80
    pattern = torch.where(special, pattern & -0x4001, pattern)
    zeros = torch.rand(shape, device="cuda", generator=generator) < 0.05
    return torch.where(zeros, pattern & -0x8000, pattern).view(torch.bfloat16)


def tables(shape: tuple[int, ...], kind: str = "normal", seed: int = 1) -> tuple[Any, Any]:
    """Cosines and sines on the GPU; ``bits``: any finite fp32 numbers of magnitude below 2."""
    generator = torch.Generator("cuda").manual_seed(seed)
    if kind == "normal":
        angle = torch.rand(shape, device="cuda", generator=generator) * 20 - 10
        return angle.cos(), angle.sin()
    made = [
        torch.randint(-(1 << 31), 1 << 31, shape, device="cuda", generator=generator, dtype=torch.int64).int()
        for _ in range(2)
    ]
    return tuple((pattern & -0x40000001).view(torch.float32) for pattern in made)  # type: ignore[return-value]


def bits(x: Any) -> Any:
    return x.contiguous().view(torch.int16)


def assert_same(got: Any, want: Any) -> None:
    """Every bit alike, but that NaN may have any payload."""
    assert got.shape == want.shape
    differ = (bits(got) != bits(want)) & ~(got.contiguous().isnan() & want.contiguous().isnan())
    count = int(differ.sum())
    if count:
        at = tuple(int(i) for i in differ.nonzero()[0])
        raise AssertionError(f"{count} of {differ.numel()} values differ, first at {at}: {got[at]} for {want[at]}")


def compiles() -> int:
    """Kernels that were compiled or read from disk so far."""
    from fe_runtime.compile import cache_info

    return sum(entry.compiles + entry.disk_hits for entry in cache_info().values())


def produced_late(x: Any) -> tuple[Any, Any]:
    """Return a side stream and a copy of x that only appears on it after a while; until then it is NaN."""
    side, late = torch.cuda.Stream(), torch.full_like(x, float("nan"))
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(x)
    return side, late
