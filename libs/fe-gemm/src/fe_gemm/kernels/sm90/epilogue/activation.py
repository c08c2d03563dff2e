"""The activations: fragments of X, and what goes with it, to fragments of C, in float32 and in the stated order."""

from __future__ import annotations

import cutlass
from cutlass import Float32, cute

from fe_runtime.cute.activation import silu

from .cells import fragment

__all__ = ["biased", "dsrelu", "larger_or_nan", "relu", "rounded", "scaled", "srelu", "swiglu", "weighted"]


def scaled(values: cute.Tensor, alpha: Float32) -> None:
    """Multiply a fragment by alpha."""
    for at in _places(values):
        values[at] = values[at] * alpha


def rounded(values: cute.Tensor, dtype: type[cutlass.Numeric]) -> None:
    """Round a fragment to a dtype, and keep it in float32."""
    values.store(values.load().to(dtype).to(Float32))


def weighted(values: cute.Tensor, prob: tuple[Float32, Float32]) -> cute.Tensor:
    """Return a fragment times the prob of each of the two rows."""
    products = fragment(cute.size(values, mode=[2]))
    for at in _places(values):
        products[at] = values[at] * prob[at[1]]
    return products


def biased(values: cute.Tensor, bias: cute.Tensor, prob: tuple[Float32, Float32] | None) -> None:
    """Add the bias (side, block) of each column to a fragment, times the prob of the row if there is one."""
    for side, half, block in _places(values):
        addend = bias[side, block] if prob is None else bias[side, block] * prob[half]
        values[side, half, block] = values[side, half, block] + addend


def swiglu(x: cute.Tensor, gate_first: bool) -> cute.Tensor:
    """Return ``up * silu(gate)`` of neighbouring halves, 4 blocks each, of the cells in a fragment.

    The error of ``silu`` is that of :func:`fe_runtime.cute.activation.sigmoid`; beyond |gate| = 4, where it exceeds
    2^-20, an error of the accumulators within their bound weighs 32 times as much.
    """
    count = cute.size(x, mode=[2]) // 2
    values = fragment(count)
    for side, half, block in _places(values):
        first = block // 4 * 8 + block % 4
        up, gate = (first + 4, first) if gate_first else (first, first + 4)
        values[side, half, block] = x[side, half, up] * silu(x[side, half, gate])
    return values


def srelu(x: cute.Tensor, prob: tuple[Float32, Float32]) -> cute.Tensor:
    """Return ``relu(x)^2 * prob``, with the prob of each of the two rows."""
    values = fragment(cute.size(x, mode=[2]))
    for side, half, block in _places(values):
        positive = relu(x[side, half, block])
        values[side, half, block] = positive * positive * prob[half]
    return values


def dsrelu(x: cute.Tensor, upstream: cute.Tensor, prob: tuple[Float32, Float32]) -> tuple[cute.Tensor, cute.Tensor]:
    """Return ``(relu(x) * 2) * (upstream * prob)`` and ``relu(x)^2 * upstream``."""
    values, terms = (fragment(cute.size(x, mode=[2])) for _ in range(2))
    for at in _places(values):
        positive = relu(x[at])
        values[at] = (positive * Float32(2.0)) * (upstream[at] * prob[at[1]])
        terms[at] = positive * positive * upstream[at]
    return values, terms


def relu(value: Float32) -> Float32:
    """Return the value if it is positive or NaN, otherwise +0."""
    return larger_or_nan(value, Float32(0.0))


def larger_or_nan(a: Float32, b: Float32) -> Float32:
    """Return the larger value, or NaN if there is one."""
    return cute.arch.inline_ptx("max.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def _places(values: cute.Tensor) -> list[tuple[int, int, int]]:
    """Return (side, half, block) of all values of a fragment."""
    return [(s, h, b) for b in range(cute.size(values, mode=[2])) for h in range(2) for s in range(2)]
