"""``gemm_proj_rope_mxfp8`` by plain loops over single elements and blocks, its values in float64, and its tolerance.

Nothing here uses the library. ``x`` and ``w`` come as float64 values, (T, K) and (N, K).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from naive_gemm import E4M3, E8M0, VALUES, encode

RECIPROCAL = np.float32(1) / np.float32(448)
BF16 = ml_dtypes.bfloat16


@dataclass
class Inputs:
    """Arrays as the operation takes them (scales absent for bf16), and their exact values."""

    x: Any
    w: Any
    cos: Any
    sin: Any
    x_scale: Any = None
    w_scale: Any = None

    @property
    def arrays(self) -> tuple[Any, ...]:
        return self.x, self.w, self.cos, self.sin, self.x_scale, self.w_scale

    @property
    def exact(self) -> tuple[Any, Any, Any, Any]:
        """Values of x, w, cos and sin in float64, w as (N, K)."""
        x, w = dequantised(self.x, self.x_scale), dequantised(self.w, self.w_scale)
        return x, w, self.cos.astype(np.float64), self.sin.astype(np.float64)

    def turned(self) -> tuple[Any, ...]:
        """The arrays of the same problem with ``w_out_in=False``."""
        w_scale = None if self.w_scale is None else np.ascontiguousarray(self.w_scale.T)
        return self.x, np.ascontiguousarray(self.w.T), self.cos, self.sin, self.x_scale, w_scale


def inputs(
    tokens: int, depth: int, heads: int, scaled: bool = False, whole: bool = False, seed: int = 0, size: float = 1.0
) -> Inputs:
    """Return random inputs; ``whole``: small integers, with scales 1/2, 1 and 2, so that bf16 holds every sum."""
    rng = np.random.default_rng(seed)
    shapes = (tokens, depth), (192 * heads, depth)
    angle = rng.uniform(0, 6.3, (tokens, 64))
    tables = [part.astype(BF16) for part in (np.cos(angle), np.sin(angle))]
    if whole:
        x, w = (rng.integers(-1, 2, shape) * (rng.random(shape) < 16 / depth) for shape in shapes)
    else:
        x, w = size * rng.standard_normal(shapes[0]), rng.standard_normal(shapes[1]) * depth**-0.5
    if not scaled:
        return Inputs(x.astype(BF16), w.astype(BF16), *tables)
    codes, scales = [], []
    for array in (x, w):
        low, high = (0, 2) if whole else (-4, 5)
        byte = 127 + rng.integers(low, high, (array.shape[0], depth // 32)).astype(np.uint8)
        fitted = array if whole else array / np.repeat(VALUES[E8M0][byte], 32, axis=1)
        codes.append(encode(fitted, E4M3).view(ml_dtypes.float8_e4m3fn))
        scales.append(byte)
    return Inputs(*codes, *tables, *scales)


def dequantised(array: Any, scales: Any) -> Any:
    if scales is None:
        return array.astype(np.float64)
    rows, columns = array.shape
    out = np.zeros(array.shape)
    for r in range(rows):
        for c in range(columns):
            out[r, c] = VALUES[E4M3][array[r, c].view(np.uint8)] * VALUES[E8M0][scales[r, c // 32]]
    return out


def sums(x: Any, w: Any) -> Any:
    """One k after the other."""
    acc = np.zeros((x.shape[0], w.shape[0]))
    for k in range(x.shape[1]):
        acc += x[:, None, k] * w[None, :, k]
    return acc


def rotated(q: Any, cos: Any, sin: Any, absolute: bool = False) -> Any:
    """Return (T, H, 192) values of float64 ``q`` (T, N), feature by feature; ``absolute``: sums of magnitudes."""
    tokens, columns = q.shape
    out = np.zeros((tokens, columns // 192, 192))
    for t in range(tokens):
        for h in range(columns // 192):
            head = q[t, 192 * h : 192 * h + 192]
            for f in range(128):
                out[t, h, f] = abs(head[f]) if absolute else head[f]
            for j in range(32):
                a, b = head[128 + 2 * j], head[129 + 2 * j]
                for f, p, m in (
                    (128 + j, a * cos[t, j], b * sin[t, j]),
                    (160 + j, b * cos[t, 32 + j], -a * sin[t, 32 + j]),
                ):
                    out[t, h, f] = abs(p) + abs(m) if absolute else p - m
    return out


def quantised(block: Any) -> tuple[Any, int]:
    """Return codes and scale byte of fp32 numbers (``Q-MX``)."""
    block = np.asarray(block, np.float32)
    p = np.float32(np.nanmax(np.abs(block), initial=np.float32(0)) * RECIPROCAL)
    byte = 0
    while byte < 254 and VALUES[E8M0][byte] < p:
        byte += 1
    factor = 0.0 if byte == 254 else 2.0 ** (127 - byte)
    return encode((block * np.float32(factor)).astype(np.float32), E4M3), byte


def outputs(x: Any, w: Any, cos: Any, sin: Any) -> tuple[Any, Any, Any, Any]:
    """Return codes and bytes of rows, then of columns, all uint8; the sums must be exact in float64."""
    return finished(sums(x, w).astype(np.float32), cos, sin)


def finished(acc: Any, cos: Any, sin: Any) -> tuple[Any, Any, Any, Any]:
    """Return the same of the fp32 sums (T, N)."""
    q = acc.astype(BF16).astype(np.float64)
    values = rotated(q, cos, sin).astype(np.float32)  # two exact products: this is the only rounding
    tokens, heads, _ = values.shape
    row, column = np.zeros(values.shape, np.uint8), np.zeros(values.shape, np.uint8)
    row_scales, column_scales = np.zeros((tokens, heads, 6), np.uint8), np.zeros((tokens // 32, heads, 192), np.uint8)
    for h in range(heads):
        for t in range(tokens):
            for b in range(6):
                part = slice(32 * b, 32 * b + 32)
                row[t, h, part], row_scales[t, h, b] = quantised(values[t, h, part])
        for i in range(tokens // 32):
            for f in range(192):
                part = slice(32 * i, 32 * i + 32)
                column[part, h, f], column_scales[i, h, f] = quantised(values[part, h, f])
    return row, row_scales, column, column_scales


def decoded(row: Any, row_scales: Any, column: Any, column_scales: Any) -> tuple[Any, Any]:
    """Return the values of both directions in float64."""
    by_row = VALUES[E4M3][row.view(np.uint8)] * np.repeat(VALUES[E8M0][row_scales.view(np.uint8)], 32, axis=2)
    by_column = VALUES[E4M3][column.view(np.uint8)] * np.repeat(VALUES[E8M0][column_scales.view(np.uint8)], 32, axis=0)
    return by_row, by_column


def check_within_tolerance(found: Any, x: Any, w: Any, cos: Any, sin: Any) -> None:
    """Compare outputs (numpy) with the float64 values: half a step of e4m3, the bf16 rounding of Y, the sums.

    Half a step is 2^-4 of the value, or 2^-10 of the scale for subnormal codes; Y loses 2^-8 of itself; a sum of K
    products loses (2^-18 + K 2^-28) of the sum of their magnitudes.
    """
    acc = sums(x, w)
    v, magnitude = rotated(acc, cos, sin), rotated(acc, cos, sin, absolute=True)
    lost = (2.0**-18 + x.shape[1] * 2.0**-28) * rotated(sums(abs(x), abs(w)), abs(cos), abs(sin), absolute=True)
    scales = np.repeat(VALUES[E8M0][found[1]], 32, axis=2), np.repeat(VALUES[E8M0][found[3]], 32, axis=0)
    for direction, got, scale in zip(("row", "column"), decoded(*found), scales, strict=True):
        allowed = 1.02 * np.maximum(2.0**-4 * np.abs(v), 2.0**-10 * scale) + 2.0**-8 * magnitude + lost
        error = np.abs(got - v)
        assert (error <= allowed).all(), f"{direction}: {np.max(error / allowed)} of the allowed error"
    for at, axis in ((1, 2), (3, 0)):
        blocks = (
            np.abs(v).reshape(v.shape[0], v.shape[1], 6, 32) if axis == 2 else np.abs(v).reshape(-1, 32, *v.shape[1:])
        )
        largest = blocks.max(axis=3 if axis == 2 else 1)
        want = np.ceil(np.log2(np.maximum(largest / 448, 2.0**-127))) + 127
        off = np.abs(found[at].astype(np.int64) - want)
        assert off.max() <= 1
        assert (off != 0).mean() <= 0.01
