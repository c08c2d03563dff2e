"""Values of a convolution: loads and stores of vectors, filters, the activation and its derivative."""

from __future__ import annotations

from math import gcd
from typing import Any

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, cute

from fe_runtime.cute.activation import sigmoid as fast_sigmoid
from fe_runtime.cute.memory import access_bits, load_atom, store_atom

from .setup import Setup

__all__ = ["activated", "convolved", "derivative", "filters", "keep", "load_piece", "store_piece", "widened"]


def load_piece(piece: cute.Tensor, target: cute.Tensor, alignment: int) -> None:
    """Load neighbours that start at a multiple of ``alignment`` bytes."""
    dtype = piece.element_type
    cute.copy(load_atom(dtype, access_bits(dtype, cute.size(target.shape), alignment)), piece, target)


def widened(setup: Setup, piece: cute.Tensor) -> list[Any]:
    """Return the values of neighbours in registers in the arithmetic's type."""
    count = cute.size(piece.shape)
    if piece.element_type is not BFloat16 or count % 2:
        return [setup.wide(piece[v]) for v in range(count)]
    # one instruction for each value of a pair: the compiler takes two for the upper one
    words = cute.recast_tensor(piece, Int32)
    bits = [half for w in range(count // 2) for half in (words[w] << 16, words[w] & -0x10000)]
    return [half.bitcast(Float32) for half in bits]


def store_piece(setup: Setup, values: list[Any], piece: cute.Tensor, alignment: int) -> None:
    """Round values and store them as neighbours that start at a multiple of ``alignment`` bytes."""
    dtype = piece.element_type
    wide = cute.make_rmem_tensor((len(values),), setup.wide)
    for v, value in enumerate(values):
        wide[v] = value
    items = cute.make_rmem_tensor((len(values),), dtype)
    items.store(wide.load().to(dtype))
    cute.copy(store_atom(dtype, access_bits(dtype, len(values), alignment)), items, piece)


def filters(
    setup: Setup, weight: cute.Tensor, bias: cute.Tensor | None, index: Int32, channels: int = 1
) -> tuple[list[list[Any]], list[Any] | None]:
    """Return the filters and the biases of vector ``index`` of ``channels`` neighbours, in the arithmetic's type."""
    width = setup.problem.width
    flat = cute.make_tensor(weight.iterator, cute.make_layout(weight.shape[0] * width))
    taps = _parameters(setup, flat, index, channels * width)
    rows = [taps[v * width : (v + 1) * width] for v in range(channels)]
    return rows, None if bias is None else _parameters(setup, bias, index, channels)


def _parameters(setup: Setup, values: cute.Tensor, index: Int32, count: int) -> list[Any]:
    target = cute.make_rmem_tensor((count,), values.element_type)
    size = values.element_type.width // 8
    alignment = max(size, gcd(count * size, setup.problem.parameter_alignment))  # that of the worst of weight and bias
    load_piece(cute.local_tile(values, (count,), (index,)), target, alignment)
    return [setup.wide(target[i]) for i in range(count)]


def convolved(values: list[Any], taps: list[Any], shift: Any) -> Any:
    """Return ``sum_j taps[j] * values[j] + shift``, oldest first, the shift last."""
    z = values[0] * taps[0]
    for value, tap in zip(values[1:], taps[1:], strict=True):
        z = cute.math.fma(value, tap, z)
    return z if shift is None else z + shift


def keep(condition: Boolean | bool | None, value: Any) -> Any:
    """Return ``value``, or 0 unless the condition holds; ``None`` and ``True``: it always does."""
    if condition is None or condition is True:
        return value
    kind = type(value)
    return kind(cutlass.select_(condition, value, kind(0.0)))


def sigmoid(z: Any) -> Any:
    """Return ``1 / (1 + exp(-z))``: float32 as fe_runtime's, float64 within a few ulp."""
    if isinstance(z, Float32):
        return fast_sigmoid(z)
    one = type(z)(1.0)
    return one / (one + cute.math.exp(-z))


def activated(setup: Setup, z: Any) -> Any:
    """Return ``z`` or ``silu(z)``."""
    return z * sigmoid(z) if setup.problem.activation == "silu" else z


def derivative(z: Any) -> Any:
    """Return ``silu'(z) = s + s * (z - z * s)`` with ``s = sigmoid(z)``."""
    s = sigmoid(z)
    return cute.math.fma(s, cute.math.fma(-z, s, z), s)
