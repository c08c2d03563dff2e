"""Rows (or tokens) that belong to experts: who owns a row, products of each group, and maxima over groups.

``offsets[e]`` is the row after the last one of expert ``e``; rows from ``offsets[-1]`` on are the tail, which nobody
owns. numpy and torch loop over the experts on the host. JAX never looks at an offset there: it loops on the device
over experts and, within one, over blocks of rows, so that a product costs what its rows cost.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from array_api_compat import array_namespace, device

from fe_runtime.formats import _backend as backend

from .experts import Experts

__all__ = [
    "addressed",
    "maxima",
    "of_rows",
    "owners",
    "positions",
    "row_products",
    "row_values",
    "scale_atoms",
    "token_products",
    "within",
]

Array: TypeAlias = Any

BLOCK = 128
"""Rows (tokens) that JAX multiplies at a time."""
NAN = 0x7FC00000
MINUS_INFINITY = -0x00800000
"""The bits of -inf as int32."""


def owners(offsets: Array, extent: int) -> Array:
    """Return the expert of each of ``extent`` rows, and E for a row of the tail; (extent,), integers."""
    rows = positions(offsets, extent)
    return array_namespace(offsets).searchsorted(within(offsets, extent), rows, side="right")


def within(offsets: Array, extent: int) -> Array:
    """Return the offsets clamped to the array: malformed ones give wrong numbers, never a wrong address."""
    xp = array_namespace(offsets)
    clamped = xp.where(offsets > extent, xp.full_like(offsets, extent), offsets)
    return xp.where(clamped < 0, xp.zeros_like(clamped), clamped)


def positions(offsets: Array, extent: int) -> Array:
    """Return 0, 1, ... beside the offsets, with their dtype."""
    xp = array_namespace(offsets)
    if backend.framework_of(offsets) == "jax":
        return xp.arange(extent, dtype=offsets.dtype)
    return xp.arange(extent, dtype=offsets.dtype, device=device(offsets))


def addressed(x: Array, offsets: Array) -> Array:
    """Return ``x`` (M, ...) with rows of the tail 0, whatever they held."""
    xp = array_namespace(x)
    owned = positions(offsets, x.shape[0]) < offsets[-1]
    return xp.where(xp.reshape(owned, (-1, *(1,) * (x.ndim - 1))), x, xp.zeros_like(x))


def of_rows(values: Array, offsets: Array, extent: int) -> Array:
    """Return what belongs to the expert of each row: (E, ...) to (extent, ...). The tail has the last expert's."""
    xp = array_namespace(values)
    owner = owners(offsets, extent)
    last = values.shape[0] - 1
    return xp.take(values, xp.where(owner > last, last, owner), axis=0)


def row_values(x: Array, offsets: Array) -> Array:
    """Return numbers of rows, (M,) or (M, 1, 1), as fp32 (M, 1); those of the tail 0."""
    xp = array_namespace(x)
    return addressed(backend.as_float32(xp.reshape(x, (-1, 1))), offsets)


def row_products(a: Array, experts: Experts, offsets: Array, accumulate: str = "float32") -> Array:
    """Return ``sum over k of a[m, k] * B_e(m)[n, k]``.

    Parameters
    ----------
    a
        (M, K) float32; the tail may hold anything.
    experts
        E matrices (N, K).
    offsets
        (E,) int32, on the device of ``a``.
    accumulate
        ``"float64"``: summed in fp64 and rounded once.

    Returns
    -------
    Array
        (M, N) float32, rows of the tail 0.
    """
    xp, rows = array_namespace(a), a.shape[0]
    left = _in_precision(a, accumulate)
    if backend.framework_of(a) == "jax":
        product = _compiled(_row_products_on_device)(
            left, experts.elements, experts.scales, within(offsets, rows), experts.vec
        )
    else:
        product = xp.zeros((rows, experts.rows), dtype=left.dtype, device=device(a))
        for expert, start, stop in _spans(offsets, rows):
            product[start:stop] = left[start:stop] @ _in_precision(experts.matrix(expert), accumulate).T
    return addressed(xp.astype(product, xp.float32), offsets)


def token_products(a: Array, b: Array, offsets: Array, accumulate: str = "float32") -> Array:
    """Return ``sum over the tokens t of expert e of a[i, t] * b[t, j]``.

    Parameters
    ----------
    a, b
        (R, T) and (T, C), float32; the tail may hold anything, and tokens of other experts do not matter to one.
    offsets, accumulate
        As in :func:`row_products`.

    Returns
    -------
    Array
        (E, R, C) float32; 0 for an expert without tokens. The order of the sums depends on the offsets alone.
    """
    xp, tokens = array_namespace(a), a.shape[1]
    left, right = _in_precision(a, accumulate), _in_precision(b, accumulate)
    if backend.framework_of(a) == "jax":
        product = _compiled(_token_products_on_device)(left, right, within(offsets, tokens))
    else:
        shape = (offsets.shape[0], left.shape[0], right.shape[1])
        product = xp.zeros(shape, dtype=left.dtype, device=device(a))
        for expert, start, stop in _spans(offsets, tokens):
            product[expert] = left[:, start:stop] @ right[start:stop]
    return xp.astype(product, xp.float32)


def maxima(x: Array, offsets: Array) -> Array:
    """Return the largest magnitude over the rows of each expert: (M, C) to (E,) float32.

    NaN if there is one, -inf for an expert without rows.
    """
    xp, count = array_namespace(x), offsets.shape[0]
    # As bit patterns magnitudes are in the order of the numbers, NaN on top, and no compiler flushes a subnormal one.
    patterns = backend.bits_of(x) & 0x7FFFFFFF
    largest = _scattered_max(xp.max(patterns, axis=1), owners(offsets, x.shape[0]), count + 1)[:count]
    largest = xp.where(largest > 0x7F800000, NAN, largest)
    return backend.float_of_bits(xp.where(largest < 0, MINUS_INFINITY, largest))


def scale_atoms(offsets: Array, extent: int, tile: int, row_tiles: int) -> Array:
    """Return where the atoms of scales along grouped tokens lie when each expert has a blocked layout of its own.

    Parameters
    ----------
    offsets
        (E,), multiples of ``tile`` but for the last.
    extent
        Tokens in all; those beyond the last offset make up one more layout at the end.
    tile
        Tokens of an atom: four times those of a scale.
    row_tiles
        ``ceil(R / 128)``.

    Returns
    -------
    Array
        (row_tiles, ceil(extent / tile)) integers: the atom of a row tile and a token tile, counted from the start.
    """
    xp, tiles = array_namespace(offsets), -(-extent // tile)
    ends = within(offsets, extent)
    bounds = xp.concat([ends[:-1] // tile, (ends[-1:] + (tile - 1)) // tile])
    at = positions(offsets, tiles)
    group = xp.searchsorted(bounds, at, side="right")
    begin = xp.take(xp.concat([xp.zeros_like(bounds[:1]), bounds]), group)
    end = xp.take(xp.concat([bounds, xp.full_like(bounds[:1], tiles)]), group)
    row = xp.expand_dims(positions(offsets, row_tiles), axis=1)
    place = begin * row_tiles + row * (end - begin) + (at - begin)
    return xp.clip(place, 0, max(0, row_tiles * tiles - 1))


def _spans(offsets: Array, extent: int) -> list[tuple[int, int, int]]:
    """Return (expert, first row, row after the last) of the experts that have rows; on the host."""
    ends = [min(max(int(end), 0), extent) for end in offsets.tolist()]
    spans = zip(range(len(ends)), [0, *ends], ends, strict=False)
    return [span for span in spans if span[1] < span[2]]


def _in_precision(x: Array, accumulate: str) -> Array:
    if accumulate == "float32":
        return x
    if backend.framework_of(x) == "jax" and not sys.modules["jax"].config.jax_enable_x64:
        raise ValueError("accumulate='float64' needs JAX's 64-bit types: set jax_enable_x64, or pass numpy arrays.")
    xp = array_namespace(x)
    return xp.astype(x, xp.float64)


def _scattered_max(values: Array, targets: Array, count: int) -> Array:
    """Return the largest of the non-negative ``values`` that go to each of ``count`` targets, -1 for none."""
    framework = backend.framework_of(values)
    if framework == "torch":
        start = values.new_full((count,), -1)
        return start.scatter_reduce(0, targets.to(sys.modules["torch"].int64), values, "amax")
    if framework == "jax":
        xp = array_namespace(values)
        return xp.full((count,), -1, dtype=xp.int32).at[targets].max(values)
    largest = np.full(count, -1, np.int32)
    np.maximum.at(largest, targets, values)
    return largest


@functools.cache
def _compiled(function: Callable[..., Array]) -> Callable[..., Array]:
    """Return a JAX function compiled once for its shapes: its loops would be compiled again in each eager call."""
    static = ("vec",) if function is _row_products_on_device else ()
    compiled: Callable[..., Array] = sys.modules["jax"].jit(function, static_argnames=static)
    return compiled


def _row_products_on_device(a: Array, elements: Array, scales: Array, offsets: Array, vec: int) -> Array:
    """Multiply in JAX. A block may reach beyond its expert: the next one, or the caller, overwrites those rows."""
    xp, lax = array_namespace(a), sys.modules["jax"].lax
    experts = Experts(elements, scales, vec)
    extent = a.shape[0]
    rows = max(1, min(BLOCK, extent))
    padded = backend.pad(a, 0, extent + rows)

    def multiply(expert: Array, product: Array) -> Array:
        weight = xp.astype(experts.matrix(expert), a.dtype).T

        def block(state: tuple[Array, Array]) -> tuple[Array, Array]:
            at, product = state
            part = xp.matmul(lax.dynamic_slice_in_dim(padded, at, rows, 0), weight, precision="highest")
            return at + rows, lax.dynamic_update_slice_in_dim(product, part, at, 0)

        start = _start(offsets, expert)
        return lax.while_loop(lambda state: state[0] < offsets[expert], block, (start, product))[1]

    def each(expert: Array, product: Array) -> Array:
        has_rows = _start(offsets, expert) < offsets[expert]
        return lax.cond(has_rows, multiply, lambda _, product: product, expert, product)

    empty = xp.zeros((extent + rows, experts.rows), dtype=a.dtype)
    return lax.fori_loop(0, offsets.shape[0], each, empty)[:extent]


def _token_products_on_device(a: Array, b: Array, offsets: Array) -> Array:
    xp, lax = array_namespace(a), sys.modules["jax"].lax
    tokens = max(1, min(BLOCK, a.shape[1]))
    left, right = backend.pad(a, 1, a.shape[1] + tokens), backend.pad(b, 0, b.shape[0] + tokens)

    def each(expert: Array, product: Array) -> Array:
        def block(state: tuple[Array, Array]) -> tuple[Array, Array]:
            at, total = state
            owned = at + xp.arange(tokens, dtype=offsets.dtype) < offsets[expert]
            rows = xp.where(owned, lax.dynamic_slice_in_dim(left, at, tokens, 1), 0)
            columns = xp.where(owned[:, None], lax.dynamic_slice_in_dim(right, at, tokens, 0), 0)
            return at + tokens, total + xp.matmul(rows, columns, precision="highest")

        first = (_start(offsets, expert), xp.zeros(product.shape[1:], dtype=a.dtype))
        total = lax.while_loop(lambda state: state[0] < offsets[expert], block, first)[1]
        return lax.dynamic_update_index_in_dim(product, total, expert, 0)

    empty = xp.zeros((offsets.shape[0], a.shape[0], b.shape[1]), dtype=a.dtype)
    return lax.fori_loop(0, offsets.shape[0], each, empty)


def _start(offsets: Array, expert: Array) -> Array:
    xp = array_namespace(offsets)
    return xp.where(expert == 0, xp.zeros_like(offsets[0]), offsets[expert - 1])
