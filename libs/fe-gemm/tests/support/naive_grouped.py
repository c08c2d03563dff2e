"""Grouped products in float64 by plain loops, with quantisers and byte offsets of scales of their own.

Narrow numbers are decoded and encoded by :mod:`naive_gemm`; nothing here uses the library, but for what puts arrays
into a framework. Letters as in the operations: ``E`` experts, ``M`` rows, ``off`` ends of the experts' rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import ml_dtypes
import numpy as np
from naive_gemm import E4M3, E5M2, E8M0, FORMATS, VALUES, Operand, encode, operand, sigmoid

from fe_runtime.testing import to_framework, to_numpy

FRAMEWORKS = ("numpy", "torch", "jit")
ALL_FRAMEWORKS = (*FRAMEWORKS, "jax")
"""JAX's eager mode compiles one step after the other, which takes long: not for every test."""
BF16 = ml_dtypes.bfloat16
LIMIT = {E4M3: 448.0, E5M2: 128.0, "bfloat16": 1.0, "float16": 1.0, "float32": 1.0}

ROWS = 300
SIZES = {
    "empty first, middle, last": [0, 5, 0, 0, 40, 3, 0],
    "none empty": [17, 1, 30, 2, 8, 60, 4],
    "all empty": [0] * 7,
    "one has all": [0, 0, 0, ROWS, 0, 0, 0],
    "one has nearly all": [1, 296, 0, 2, 0, 1, 0],
    "multiples of 128": [0, 128, 0, 128, 0, 0, 0],
}
"""Sizes of the groups of ``ROWS`` rows: shapes that JAX compiles once."""


def ends(sizes: list[int]) -> Any:
    return np.cumsum(sizes).astype(np.int32)


def owner(off: Any, rows: int) -> list[int | None]:
    """Return the expert of each row, ``None`` in the tail."""
    found: list[int | None] = [None] * rows
    start = 0
    for e, stop in enumerate(off):
        found[start:stop] = [e] * (int(stop) - start)
        start = int(stop)
    return found


def members(off: Any, e: int) -> range:
    return range(int(off[e - 1]) if e else 0, int(off[e]))


def product(a: Any, b: Any, off: Any) -> Any:
    """Return (M, N) of (M, K) and (E, N, K), rows of the tail 0."""
    result = np.zeros((a.shape[0], b.shape[1]))
    for m, e in enumerate(owner(off, a.shape[0])):
        if e is not None:
            result[m] = (np.asarray(b[e], np.float64) * np.asarray(a[m], np.float64)).sum(axis=1)
    return result


def by_row(values: Any, off: Any, rows: int) -> Any:
    """Return the experts' numbers (E, ...) for each row, 0 in the tail."""
    values = np.asarray(values, np.float64)
    found = [values[0] * 0 if e is None else values[e] for e in owner(off, rows)]
    return np.array(found).reshape(rows, *values.shape[1:])


def tail_is(x: Any, off: Any, value: float) -> bool:
    rest = np.asarray(x, np.float64)[int(off[-1]) :]
    return bool((rest == value).all())


# ---- the activations, one number at a time


def columns(n: int) -> tuple[list[int], list[int]]:
    """Return the columns g(j) of gates and u(j) of what they gate."""
    gates = [64 * (j // 32) + j % 32 for j in range(n)]
    return gates, [g + 32 for g in gates]


def forward(name: str, gate: Any, up: Any, **factors: float) -> Any:
    """Return the activation of float64 arrays."""
    f = settings(name, factors)
    if name == "swiglu":
        return up * gate * sigmoid(gate)
    if name == "geglu":
        g, u = np.minimum(gate, f["cmax"]), np.clip(up, f["cmin"], f["cmax"])
        return (u + f["off"]) * g * sigmoid(f["a"] * g)
    return f["b1"] * np.tanh(gate / f["b1"]) * sigmoid(gate) * f["b2"] * np.tanh(up / f["b2"])


def slopes(name: str, gate: Any, up: Any, **factors: float) -> tuple[Any, Any]:
    """Return the derivatives by gate and up, from central differences of :func:`forward`."""
    h = 1e-5
    by_gate = (forward(name, gate + h, up, **factors) - forward(name, gate - h, up, **factors)) / (2 * h)
    by_up = (forward(name, gate, up + h, **factors) - forward(name, gate, up - h, **factors)) / (2 * h)
    return by_gate, by_up


def settings(name: str, given: dict[str, float]) -> dict[str, float]:
    known = {
        "off": given.get("linear_offset", 1.0 if name == "geglu" else 0.0),
        "a": given.get("geglu_alpha", 1.702),
        "cmax": given.get("glu_clamp_max", 7.0),
        "cmin": given.get("glu_clamp_min", -7.0),
        "b1": given.get("situ_beta1", 4.0),
        "b2": given.get("situ_beta2", 25.0),
    }
    return {key: float(np.float32(value)) for key, value in known.items()}


# ---- quantised results


def quantised(x: Any, name: str, norm: float, axis: int, norm_first: bool = False) -> tuple[Any, Any]:
    """Return values and bytes of scales of blocks of 32 along an axis of (M, X): codes of fp8, or 16-bit numbers.

    The scales have one number for each block along the axis. NaN wins the maximum of its block.
    """
    x = np.asarray(x, np.float32)
    if axis == 0:
        codes, scales = quantised(x.T, name, norm, 1, norm_first)
        return codes.T, scales.T
    n, reciprocal = np.float32(norm), np.float32(1) / np.float32(LIMIT[name])
    codes = np.zeros(x.shape, np.uint8 if name in (E4M3, E5M2) else name)
    scales = np.zeros((x.shape[0], -(-x.shape[1] // 32)), np.uint8)
    for m in range(x.shape[0]):
        for q in range(scales.shape[1]):
            block = x[m, 32 * q : 32 * q + 32]
            amax = np.abs(block).max()
            p = np.float32(amax * np.float32(reciprocal * n)) if norm_first else np.float32(amax * reciprocal) * n
            if math.isnan(p):
                scales[m, q], factor = 255, np.float32(np.nan)
            else:
                scales[m, q] = int(np.argmax(VALUES[E8M0][:255] >= float(p)))
                factor = np.float32(min(norm_over(n, scales[m, q]), float(np.finfo(np.float32).max)))
            values = block * factor
            codes[m, 32 * q : 32 * q + 32] = encode(values, name) if name in (E4M3, E5M2) else values.astype(name)
    return codes, scales


def norm_over(n: Any, byte: Any) -> float:
    return float(n) / float(VALUES[E8M0][byte])


def row_offset(m: int, q: int, depth: int) -> int:
    """Return where scale ``q`` of row ``m`` lies among ``depth`` scales of a row."""
    return ((m // 128) * -(-depth // 4) + q // 4) * 512 + m % 32 * 16 + m % 128 // 32 * 4 + q % 4


def row_scales(scales: Any) -> Any:
    """Return all bytes of scales (M, S) in the blocked layout, padding 0."""
    rows, depth = scales.shape
    memory = np.zeros(512 * -(-rows // 128) * -(-depth // 4), np.uint8)
    for m in range(rows):
        for q in range(depth):
            memory[row_offset(m, q, depth)] = scales[m, q]
    return memory


def expert_scales(scales: Any, off: Any, extent: int, sf: int, fill: Any = None) -> Any:
    """Return scales (R, blocks of tokens) with a blocked layout for each expert; the others as ``fill`` has them."""
    rows = scales.shape[0]
    count = 512 * -(-rows // 128) * -(-extent // (4 * sf))
    memory = np.zeros(count, np.uint8) if fill is None else fill.integers(0, 256, count, np.uint8)
    for e in range(len(off)):
        tokens = members(off, e)
        depth = -(-len(tokens) // sf)
        base = -(-rows // 128) * 128 * tokens.start // sf
        for r in range(rows):
            for p in range(depth):
                memory[base + row_offset(r, p, depth)] = scales[r, tokens.start // sf + p]
    return memory


def without_negative_zero(codes: Any) -> Any:
    return np.where(codes == 0x80, 0, codes)


# ---- operands and calls


def plain(rng: Any, shape: tuple[int, ...], whole: bool = False, size: float = 1.0) -> Any:
    """Return random bf16 numbers."""
    drawn = rng.integers(-3, 4, shape) if whole else rng.standard_normal(shape) * size
    return drawn.astype(BF16)


def scaled(
    rng: Any, name: str, rows: int, n: int, k: int, experts: int, whole: bool = False
) -> tuple[Operand, Operand]:
    """Return A (M, K, 1) and the weights (N, K, E)."""
    return operand(rng, rows, k, 1, name, whole=whole), operand(rng, n, k, experts, name, whole=whole)


def weights(b: Operand) -> Any:
    """Return the values (E, N, K) of weights."""
    return canonical(b.exact())


def canonical(b: Any) -> Any:
    """Return (N, K, E) as (E, N, K), contiguous."""
    return np.ascontiguousarray(b.transpose(2, 0, 1))


def per_scale(name: str) -> int:
    return FORMATS[name][2]


def each_on_host(cases: Iterable[Any]) -> list[tuple[Any, str]]:
    """Return every case with each framework that compiles nothing; a few with JAX will do."""
    return [(case, framework) for case in cases for framework in ("numpy", "torch")]


def call(function: Callable[..., Any], framework: str, arrays: list[Any], **options: Any) -> list[Any]:
    """Return the results in numpy of a function of numpy arrays (or ``None``), in a framework."""
    kind = "jax" if framework == "jit" else framework
    given = [None if x is None else to_framework(x, kind) for x in arrays]
    run = _compiled(function, tuple(options.items())) if framework == "jit" else functools.partial(function, **options)
    return [None if x is None else to_numpy(x) for x in run(*given)]


@functools.cache
def _compiled(function: Callable[..., Any], options: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = jax.jit(functools.partial(function, **dict(options)))
    return compiled
