"""What the references of the dense products share: dequantised operands, the accumulator, and the ways of storing.

Inside, everything has the batch in front, ``(L, M, N)``: then the columns are side by side in memory, blocks of
columns are blocks of the last dimension, and a result moved to ``(M, N, L)`` has the strides of an n-major output.
"""

from __future__ import annotations

import math
import sys
from typing import Any, TypeAlias

import numpy as np
from array_api_compat import array_namespace

from fe_runtime import formats
from fe_runtime.formats import _backend as backend

__all__ = [
    "FP4",
    "FP8",
    "accumulator",
    "batched",
    "dequantised",
    "is_fp4",
    "largest_magnitude",
    "quiet",
    "relu",
    "scaled",
    "stored",
    "stored_or_quantised",
    "unbatched",
]

Array: TypeAlias = Any

quiet = np.errstate(all="ignore")
"""Decorator: infinities and overflows are part of the mathematics."""

FP8 = ("float8_e4m3fn", "float8_e5m2")
FP4 = ("float4_e2m1fn", "float4_e2m1fn_x2", "uint8")
"""Names of packed e2m1: ``uint8`` is the container that every framework has."""


@quiet
def accumulator(
    a: Array, b: Array, sfa: Array = None, sfb: Array = None, *, vec: int = 32, accumulate: str = "float32"
) -> Array:
    """Return ``sum over k of A*B`` of the exact operands, in fp32.

    Parameters
    ----------
    a, b
        (M, K, L) and (N, K, L), any strides; packed e2m1 along K.
    sfa, sfb
        Scales in either form of the blocked layout, or ``None``: the elements are the operands.
    vec
        Elements per scale along K.
    accumulate
        ``"float32"``, or ``"float64"``: summed in fp64 and rounded once.

    Returns
    -------
    Array
        (L, M, N) float32. A NaN scale makes its row (column) NaN and no other.
    """
    left, right = dequantised(a, sfa, vec), dequantised(b, sfb, vec)
    xp = array_namespace(left)
    if accumulate == "float32":
        return _product(left, right)
    _check_has_float64(left)
    exact = _product(xp.astype(left, xp.float64), xp.astype(right, xp.float64))
    return xp.astype(exact, xp.float32)


def dequantised(x: Array, scales: Array, vec: int) -> Array:
    """Return an operand in fp32 as (L, rows, K)."""
    elements = _bytes_moved(x, (2, 0, 1))
    if scales is None:
        return formats.decode(elements)
    rows, columns = elements.shape[1], elements.shape[2]
    if backend.dtype_name(x) in ("uint8", "float4_e2m1fn_x2"):
        columns *= 2
    plain = formats.from_blocked(scales, rows, formats.scales_per_row(columns, vec))
    return formats.dequantize(elements, plain, vec=vec)


def scaled(acc: Array, alpha: float) -> Array:
    """Return ``alpha * acc`` with ``alpha`` rounded to fp32."""
    return acc * float(np.float32(alpha))


def relu(x: Array) -> Array:
    """Return ``x`` where it is positive or NaN, else +0."""
    xp = array_namespace(x)
    return xp.where(x <= 0, xp.zeros_like(x), x)


def stored(x: Array, dtype: str) -> Array:
    """Return (L, M, N) fp32 as an (M, N, L) output without a scale: ``CAST``, e2m1 packed in pairs of columns."""
    if dtype not in FP4:
        return unbatched(formats.cast(x, dtype))
    packed = formats.pack_fp4(formats.cast(x, "float4_e2m1fn"))
    return unbatched(packed if dtype == "uint8" else formats.typed_view(packed, "float4_e2m1fn_x2"))


def stored_or_quantised(x: Array, dtype: str, norm_const: Array, vec: int | None) -> tuple[Array, Array]:
    """Return (L, M, N) fp32 as an (M, N, L) output, and blocked e8m0 scales or ``None``.

    An fp8 output is quantised over ``vec`` columns (``Q-NC``), any other, and every one without ``vec``, is stored as
    it is. The scales have the logical view, in JAX the physical form.
    """
    if vec is None or dtype not in FP8:
        return stored(x, dtype), None
    elements, scales = formats.quantize_nc(x, dtype, norm_const, vec=vec)
    blocked = formats.to_blocked(scales)
    form = formats.blocked_view(blocked, "physical" if backend.framework_of(x) == "jax" else "logical")
    return unbatched(elements), form


def largest_magnitude(x: Array, shape: tuple[int, ...]) -> Array:
    """Return the largest ``|x|`` in a shape of ones; NaN if there is one, -inf of nothing."""
    xp = array_namespace(x)
    if 0 in x.shape:
        return _beside(xp.full(shape, -math.inf, dtype=xp.float32), x)
    # As bit patterns magnitudes are in the order of the numbers, NaN on top, and no compiler flushes a subnormal one.
    patterns = backend.bits_of(x) & 0x7FFFFFFF
    return xp.reshape(backend.float_of_bits(xp.max(patterns)), shape)


def batched(x: Array) -> Array:
    """Return (M, N, L) as (L, M, N)."""
    return array_namespace(x).permute_dims(x, (2, 0, 1))


def unbatched(x: Array) -> Array:
    """Return (L, M, N) as (M, N, L)."""
    return _bytes_moved(x, (1, 2, 0))


def is_fp4(x: Array) -> bool:
    """Whether a scaled operand holds e2m1."""
    return backend.dtype_name(x) in FP4


def _bytes_moved(x: Array, axes: tuple[int, int, int]) -> Array:
    """Return the dimensions of ``x`` in another order; torch can do little else with packed pairs than see bytes."""
    name = backend.dtype_name(x)
    if name != "float4_e2m1fn_x2":
        return array_namespace(x).permute_dims(x, axes)
    return formats.typed_view(array_namespace(x).permute_dims(formats.byte_view(x), axes), name)


def _product(left: Array, right: Array) -> Array:
    """Return (L, M, K) times (L, N, K) transposed."""
    xp = array_namespace(left)
    transposed = xp.permute_dims(right, (0, 2, 1))
    if backend.framework_of(left) == "jax":  # its default multiplies in fewer bits on some devices
        return xp.matmul(left, transposed, precision="highest")
    return xp.matmul(left, transposed)


def _check_has_float64(x: Array) -> None:
    if backend.framework_of(x) == "jax" and not sys.modules["jax"].config.jax_enable_x64:
        raise ValueError("accumulate='float64' needs JAX's 64-bit types: set jax_enable_x64, or pass numpy arrays.")


def _beside(value: Array, x: Array) -> Array:
    return value.to(x.device) if backend.framework_of(x) == "torch" else value
