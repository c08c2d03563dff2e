"""Gradients of the experts' weights: sums over each expert's tokens, bf16 or block-scaled, in any framework."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from array_api_compat import array_namespace

from fe_gemm.reference import operands
from fe_runtime import formats
from fe_runtime.formats import _backend as backend

from . import experts, forms, groups, quantised

__all__ = ["grouped_gemm_wgrad", "has_tokens"]

Array: TypeAlias = Any


@operands.quiet
def grouped_gemm_wgrad(
    a: Any,
    b: Any,
    sfa: Any,
    sfb: Any,
    offsets: Any,
    wgrad: Any = None,
    wgrad_ptrs: Any = None,
    global_scale_a: Any = None,
    global_scale_b: Any = None,
    *,
    wgrad_dtype: str | None = None,
    sf_vec_size: int = 16,
    accumulate_on_output: bool = False,
    input_order: str = "tensor2d",
    b_is_transposed: bool | None = None,
    accumulate: str = "float32",
    **without_effect: object,
) -> tuple[Any]:
    """Multiply what belongs to each expert's tokens: ``W[e] = s_e * sum over the tokens t of e of A[:, t] * B[t, :]``.

    Parameters
    ----------
    a
        (M, T), any strides: bfloat16 (or another float without scales), e4m3, e5m2, or e2m1 packed along T.
    b
        (T, N), any strides; e2m1 packed along T.
    sfa, sfb
        Scales, one blocked layout for each expert, as an array of all bytes in order; or both ``None``.
    offsets
        (E,) int32: the token after the last one of each expert. Tokens beyond the last may hold anything. With
        scales, sizes of groups are multiples of ``4 * sf_vec_size``, but for the last.
    wgrad
        (E, M, N): what W is added to with ``accumulate_on_output``; ``None``: 0.
    wgrad_ptrs
        Addresses of (M, N) matrices: W is written (or added) there, and nothing returned.
    global_scale_a, global_scale_b
        (E,) float32, whose product is ``s_e``; or both ``None``.
    wgrad_dtype
        bfloat16 if left out; float16 or float32.
    sf_vec_size
        Tokens per scale.
    accumulate_on_output
        ``CAST(old + CAST(W))``; an expert without tokens keeps what is there.
    input_order
        ``"tensor_ragged"``: the tokens of each expert are a compact matrix of their own, one after the other, in an
        array of the same shape: matters where tokens are side by side in memory.
    b_is_transposed
        Whether ``b`` is given as (N, T). ``None``: packed e2m1 in JAX is, which has no strides.
    accumulate
        ``"float64"``: sum in fp64, rounded once to fp32.
    without_effect
        Hints, which do not change values.

    Returns
    -------
    tuple
        ``(wgrad,)``: (E, M, N), 0 for an expert without tokens; ``None`` with ``wgrad_ptrs``.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: weight gradient of grouped GEMM, mathematics.
    """
    del without_effect
    dtype = wgrad_dtype or "bfloat16"
    ragged = str(getattr(input_order, "value", input_order)) == "tensor_ragged"
    if b_is_transposed is None:
        b_is_transposed = sfb is not None and operands.is_fp4(b) and backend.framework_of(b) == "jax"
    turned = forms.stored(b)
    if not b_is_transposed:
        turned = array_namespace(turned).permute_dims(turned, (1, 0))
    left = _values(forms.stored(a), sfa, offsets, sf_vec_size, ragged and _is_contiguous(a, 1))
    right = _values(turned, sfb, offsets, sf_vec_size, ragged and _is_contiguous(b, 1 if b_is_transposed else 0))
    xp = array_namespace(left)
    product = groups.token_products(left, xp.permute_dims(right, (1, 0)), offsets, accumulate)
    if global_scale_a is not None:
        product = product * (global_scale_a * global_scale_b)[:, None, None]
        product = xp.where(has_tokens(offsets), product, xp.zeros_like(product))
    found = formats.cast(product, dtype)
    if wgrad_ptrs is not None:
        experts.store_through_pointers(wgrad_ptrs, found, dtype, accumulate_on_output, offsets)
        return (None,)
    if accumulate_on_output and wgrad is not None:
        total = formats.cast(formats.decode(wgrad) + formats.decode(found), dtype)
        found = xp.where(has_tokens(offsets), total, wgrad)
    return (found,)


def _values(x: Array, scales: Array, offsets: Array, vec: int, ragged: bool) -> Array:
    """Return an operand, stored as (R, T), in fp32; ``ragged``: stored as compact matrices, one after the other."""
    xp, packed = array_namespace(x), scales is not None and backend.dtype_name(x) == "uint8"
    if scales is None:
        found = formats.decode(x)
        return _in_one_matrix(found, offsets) if ragged else found
    elements = formats.decode(formats.unpack_fp4(x), "float4_e2m1fn") if packed else formats.decode(x)
    if ragged:
        elements = _in_one_matrix(elements, offsets)
    rows, tokens = elements.shape
    size = math.prod(formats.scale_shape(rows, formats.scales_per_row(tokens, vec)))
    if math.prod(scales.shape) != size:
        raise ValueError(f"scales of {rows} rows and {tokens} tokens need {size} bytes; got {tuple(scales.shape)}.")
    if not tokens:
        return elements
    given = xp.reshape(formats.byte_view(scales), (-1,))
    whole = quantised.of_all_experts(given, offsets, rows, tokens, 4 * vec)
    typed = formats.typed_view(whole, backend.dtype_name(scales))
    plain = formats.from_blocked(typed, rows, formats.scales_per_row(tokens, vec))
    return formats.dequantize(elements, plain[0], vec=vec)


def _is_contiguous(x: Array, axis: int) -> bool:
    """Whether the elements along one of two dimensions are side by side."""
    return backend.strides_of(x)[axis] == 1 or x.shape[axis] == 1


def _in_one_matrix(x: Array, offsets: Array) -> Array:
    """Return (R, T) of compact (R, T_e) matrices one after the other in the memory of ``x``, row by row."""
    xp = array_namespace(x)
    rows, tokens = x.shape
    if not tokens:
        return x
    ends = groups.within(offsets, tokens)
    if backend.framework_of(x) != "jax":  # which has no 64-bit integers unless told to
        ends = xp.astype(ends, xp.int64)
    bounds = xp.concat([xp.zeros_like(ends[:1]), ends, xp.full_like(ends[:1], tokens)])
    owner = groups.owners(ends, tokens)
    start, stop = xp.take(bounds, owner), xp.take(bounds, owner + 1)
    at, row = (groups.positions(ends, extent) for extent in (tokens, rows))
    place = rows * start + row[:, None] * (stop - start) + (at - start)
    place = xp.reshape(xp.clip(place, 0, rows * tokens - 1), (-1,))
    return xp.reshape(xp.take(xp.reshape(x, (-1,)), place), (rows, tokens))


def has_tokens(offsets: Array) -> Array:
    """Return which experts have tokens, (E, 1, 1)."""
    xp = array_namespace(offsets)
    before = xp.concat([xp.zeros_like(offsets[:1]), offsets[:-1]])
    return (offsets > before)[:, None, None]
