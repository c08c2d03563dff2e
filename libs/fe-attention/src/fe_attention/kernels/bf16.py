"""Values in registers, rounded to bf16."""

from __future__ import annotations

from cutlass import BFloat16, Float32, cute

__all__ = ["narrowed", "rounded_bf16"]


def rounded_bf16(results: list[Float32]) -> cute.Tensor:
    """Return values rounded to bf16."""
    wide = cute.make_rmem_tensor((len(results),), Float32)
    for i, result in enumerate(results):
        wide[i] = result
    return narrowed(wide)


def narrowed(values: cute.Tensor) -> cute.Tensor:
    """Return float32 registers rounded to bf16."""
    items = cute.make_rmem_tensor(values.shape, BFloat16)
    items.store(values.load().to(BFloat16))
    return items
