"""Dense products in float64 by plain loops, with decoders, encoders, scale layout and error bounds of their own.

Nothing here uses the library. Narrow numbers are codes in ``uint8`` arrays, one a byte; arrays have the shape
``(rows, columns, L)`` of the operations. The bounds are those that the operations promise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

E4M3, E5M2, E2M1, E8M0 = "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "float8_e8m0fnu"

FORMATS = {
    "mxfp8_e4m3": (E4M3, E8M0, 32),
    "mxfp8_e5m2": (E5M2, E8M0, 32),
    "mxfp4": (E2M1, E8M0, 32),
    "nvfp4": (E2M1, E4M3, 16),
    "fp4_e8m0_16": (E2M1, E8M0, 16),
}
"""Element, scale and block length of every block-scaled format."""


def _signed(exponent_bits: int, mantissa_bits: int, bias: int, non_finite: dict[int, float]) -> list[float]:
    """Return the value of every code of a sign-exponent-mantissa type."""
    values = []
    sign_bit = 1 << (exponent_bits + mantissa_bits)
    for code in range(2 * sign_bit):
        magnitude = code % sign_bit
        exponent, mantissa = divmod(magnitude, 1 << mantissa_bits)
        fraction = mantissa / (1 << mantissa_bits)
        value = fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)
        value = non_finite.get(magnitude, value)
        values.append(-value if code & sign_bit else value)
    return values


VALUES = {
    E4M3: np.array(_signed(4, 3, 7, {0x7F: math.nan})),
    E5M2: np.array(_signed(5, 2, 15, {0x7C: math.inf, 0x7D: math.nan, 0x7E: math.nan, 0x7F: math.nan})),
    E2M1: np.array(_signed(2, 1, 1, {})),
    E8M0: np.array([2.0 ** (byte - 127) for byte in range(255)] + [math.nan]),
}
"""Value of each code."""

LARGEST = {E4M3: 448.0, E5M2: 57344.0, E2M1: 6.0}
STORED = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
STORED |= {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2, E8M0: ml_dtypes.float8_e8m0fnu}

U = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, E4M3: 2.0**-4, E5M2: 2.0**-3, E2M1: 2.0**-2}
"""Share of the result that its rounding may cost."""
HALF_SUBNORMAL = {"float32": 0.0, "bfloat16": 0.0, "float16": 2.0**-25, E4M3: 2.0**-10, E5M2: 2.0**-17, E2M1: 0.25}


def encode(x: Any, name: str) -> Any:
    """Return the codes of ``x`` rounded to nearest, ties to the even code, saturating; NaN as code 0x7F, in e2m1 7."""
    x = np.asarray(x, np.float64)
    values = VALUES[name]
    positive = values[: len(values) // 2]
    positive = positive[np.isfinite(positive)]
    between = (positive[1:] + positive[:-1]) / 2
    size = np.nan_to_num(np.abs(x), nan=0.0, posinf=1e300)
    code = np.searchsorted(between, size, side="left")
    tie = np.append(between, np.inf)[np.minimum(code, len(between))] == size
    code = code + (tie & (code % 2 == 1))
    sign = np.signbit(x) * (len(values) // 2)
    return np.where(np.isnan(x), 7 if name == E2M1 else 0x7F, code + sign).astype(np.uint8)


def cast(x: Any, name: str) -> Any:
    """Return ``x`` (fp32 numbers) rounded to a type, as float64."""
    if name in LARGEST:
        return VALUES[name][encode(x, name)]
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float64).astype(np.float32).astype(STORED[name]).astype(np.float64)


def value_of(array: Any) -> Any:
    """Return the float64 values of a numpy array of any type but packed e2m1."""
    name = np.dtype(array.dtype).name
    return VALUES[name][array.view(np.uint8)] if name in VALUES else array.astype(np.float64)


def pack(codes: Any, axis: int) -> Any:
    """Return e2m1 codes two a byte, the first in the low half."""
    pairs = np.moveaxis(codes, axis, 0)
    return np.moveaxis(pairs[0::2] | pairs[1::2] << 4, 0, axis)


def unpack(packed: Any, axis: int) -> Any:
    halves = np.moveaxis(packed, axis, 0)
    codes = np.stack([halves & 15, halves >> 4], axis=1).reshape(2 * halves.shape[0], *halves.shape[1:])
    return np.moveaxis(codes, 0, axis)


def blocked(scales: Any, padding: Any, form: str = "logical") -> Any:
    """Return bytes (rows, S, L) in the 128x4 layout, every byte of padding drawn from the ``padding`` generator."""
    rows, count, batch = scales.shape
    row_tiles, scale_tiles = -(-rows // 128), -(-count // 4)
    memory = padding.integers(0, 256, 512 * batch * row_tiles * scale_tiles, dtype=np.uint8)
    for r in range(rows):
        for j in range(count):
            for b in range(batch):
                atom = (b * row_tiles + r // 128) * scale_tiles + j // 4
                memory[atom * 512 + r % 32 * 16 + r // 32 % 4 * 4 + j % 4] = scales[r, j, b]
    physical = memory.reshape(batch, row_tiles, scale_tiles, 32, 4, 4)
    return physical if form == "physical" else physical.transpose(3, 4, 1, 5, 2, 0)


def unblocked(array: Any, rows: int, count: int) -> tuple[Any, Any]:
    """Return the bytes (rows, S, L) of a blocked array of either form, and those of its padding."""
    if array.shape[:2] == (32, 4):
        array = array.transpose(5, 2, 4, 0, 1, 3)
    batch = array.shape[0]
    scales = np.zeros((rows, count, batch), np.uint8)
    rest = array.view(np.uint8).astype(np.int32).copy()
    for r in range(rows):
        for j in range(count):
            at = (slice(None), r // 128, j // 4, r % 32, r // 32 % 4, j % 4)
            scales[r, j] = rest[at]
            rest[at] = -1
    return scales, rest[rest >= 0]


@dataclass
class Operand:
    """One side of a product: codes (rows, K, L), and codes of scales (rows, S, L)."""

    codes: Any
    element: str
    scales: Any
    scale: str
    vec: int

    def exact(self) -> Any:
        """Return the dequantised values in float64."""
        factors = np.repeat(VALUES[self.scale][self.scales], self.vec, axis=1)[:, : self.codes.shape[1]]
        return VALUES[self.element][self.codes] * factors

    def elements(self, major: str = "k") -> Any:
        """Return the elements as the operations take them: packed e2m1 in bytes, k-major or row-major in memory."""
        if self.element == E2M1:
            return in_order(pack(self.codes, 1), major)
        return in_order(self.codes, major).view(STORED[self.element])

    def blocked(self, form: str = "logical", seed: int = 0, dtype: Any = None) -> Any:
        """Return the scales in the blocked layout with random padding."""
        return blocked(self.scales, np.random.default_rng(seed), form).view(dtype or STORED[self.scale])


def in_order(array: Any, major: str) -> Any:
    """Return (rows, K, L) with K (``"k"``) or rows side by side in memory, the batch outermost."""
    axes = (2, 0, 1) if major == "k" else (2, 1, 0)
    return np.ascontiguousarray(array.transpose(axes)).transpose(np.argsort(axes))


def operand(rng: Any, rows: int, k: int, batch: int, name: str, size: float = 1.0, whole: bool = False) -> Operand:
    """Return a random operand whose values are about ``size``; ``whole``: small integers times powers of two >= 1/2."""
    element, scale, vec = FORMATS[name]
    count = -(-k // vec)
    spread = 3.0 if element == E2M1 else 16.0
    if whole:
        values = rng.choice([-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0], (rows, k, batch))
        factors = rng.choice([0.5, 1.0, 2.0], (rows, count, batch))
    else:
        values = rng.standard_normal((rows, k, batch)) * spread
        factors = np.exp2(rng.uniform(-3, 3, (rows, count, batch))) * size / spread
    codes = (encode(factors, E4M3) if scale == E4M3 else np.clip(np.round(np.log2(factors)) + 127, 0, 254)).astype(
        np.uint8
    )
    return Operand(encode(values, element), element, codes, scale, vec)


def product(a: Any, b: Any) -> Any:
    """Return sum over k of ``a[m, k, l] * b[n, k, l]``, one k after the other."""
    acc = np.zeros((a.shape[0], b.shape[0], a.shape[2]))
    for k in range(a.shape[1]):
        acc += a[:, None, k] * b[None, :, k]
    return acc


def accumulation_error(a: Any, b: Any, kind: str = "bfloat16") -> Any:
    """Return the allowed error of the accumulator: ``kind`` is what the operands are multiplied as."""
    return accumulation_share(a.shape[1], kind) * product(np.abs(a), np.abs(b))


def accumulation_share(k: int, kind: str = "bfloat16") -> float:
    """Return the share of the sum of magnitudes by which a sum of ``k`` products may be off."""
    return {"bfloat16": 2.0**-18 + k * 2.0**-28, "float8": 2.0**-11, "float32": 2.0**-9}[kind]


def storing_error(exact: Any, dtype: str) -> Any:
    """Return the allowed error of rounding ``exact`` to an output type."""
    clamped = np.clip(exact, -LARGEST.get(dtype, np.inf), LARGEST.get(dtype, np.inf))
    return U[dtype] * np.abs(clamped) + HALF_SUBNORMAL[dtype]


def assert_within(got: Any, exact: Any, allowed: Any, dtype: str, name: str = "result") -> None:
    """Compare values with float64 numbers; those of a narrow type are clamped to its range first."""
    exact = np.clip(exact, -LARGEST.get(dtype, np.inf), LARGEST.get(dtype, np.inf))
    assert got.shape == exact.shape, (name, got.shape, exact.shape)
    error = np.abs(got - exact)
    bad = ~(error <= allowed)
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise AssertionError(f"{name}: {bad.sum()} values off, first {at}: got {got[at]}, want {exact[at]}")


def quantised(x: Any, name: str, n: float, vec: int) -> tuple[Any, Any]:
    """Return codes (M, N, L) and e8m0 bytes (M, S, L) of fp32 ``x`` quantised in blocks of columns (``Q-NC``)."""
    reciprocal = np.float32(1) / np.float32({E4M3: 448.0, E5M2: 128.0}[name])
    rows, columns, batch = x.shape
    codes = np.zeros(x.shape, np.uint8)
    scales = np.zeros((rows, -(-columns // vec), batch), np.uint8)
    largest = float(np.finfo(np.float32).max)
    for r in range(rows):
        for j in range(scales.shape[1]):
            for b in range(batch):
                block = np.asarray(x[r, j * vec : (j + 1) * vec, b], np.float32)
                amax = np.float32(np.nanmax(np.abs(block), initial=0.0))
                p = float(np.float32(np.float32(amax * reciprocal) * np.float32(n)))
                byte = next(byte for byte in range(255) if VALUES[E8M0][byte] >= p or byte == 254)
                factor = np.float32(min(float(np.float32(n)) / float(VALUES[E8M0][byte]), largest))
                with np.errstate(all="ignore"):
                    codes[r, j * vec : (j + 1) * vec, b] = encode(block * factor, name)
                scales[r, j, b] = byte
    return codes, scales


def assert_quantised(elements: Any, scales: Any, exact: Any, name: str, n: float, vec: int = 32) -> None:
    """Compare an output and its blocked scales with ``Q-NC`` of the values, byte for byte; padding must be 0."""
    codes, bytes_of_scales = quantised(exact, name, n, vec)
    np.testing.assert_array_equal(elements.view(np.uint8), codes)
    got, padding = unblocked(scales.view(np.uint8), bytes_of_scales.shape[0], bytes_of_scales.shape[1])
    np.testing.assert_array_equal(got, bytes_of_scales)
    assert not padding.any()


def sigmoid(z: Any) -> Any:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-np.asarray(z, np.float64)))


def gated(x: Any) -> tuple[Any, Any]:
    """Return ``up`` and ``gate`` of (M, N, L): columns 0-31 and 32-63 of every 64."""
    up = [x[:, n] for n in range(x.shape[1]) if n % 64 < 32]
    gate = [x[:, n] for n in range(x.shape[1]) if n % 64 >= 32]
    return np.stack(up, axis=1), np.stack(gate, axis=1)
