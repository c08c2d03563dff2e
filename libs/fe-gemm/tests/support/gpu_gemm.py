"""Problems for the dense products on a GPU: operands with other numbers around them, and their products in float64.

Everything else, how numbers are decoded, rounded, quantised and laid out, is that of :mod:`naive_gemm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from naive_gemm import (
    E2M1,
    E4M3,
    E5M2,
    FORMATS,
    LARGEST,
    STORED,
    Operand,
    accumulation_share,
    in_order,
    operand,
    value_of,
)

from fe_runtime.compile import cache_info
from fe_runtime.testing import to_framework, to_numpy

DEVICE, BACKEND = "cuda", "sm90"
SPLIT_SHARE = 2.0**-14
"""Allowed share of the sum of magnitudes for float32 operands, which are multiplied as two bf16 numbers each: the
operations promise 2^-9 only, but one of the two left out would not show in that."""

ROWS_OF_ALL_KINDS = (1, 17, 64, 65, 128, 129, 300)
EVEN_ROWS = (16, 32, 64, 80, 128, 144, 304)
"""M on both sides of what few rows are to the kernels; the second, where columns have to be multiples of 16 bytes."""
DEPTHS = (72, 520, 136, 264, 64, 328, 520)
"""K, each rounded up to what is legal: tails of a tile, and partial blocks of scales."""
BATCHES = (1, 1, 3, 1, 1, 3, 1)
FAR = 2**30 + 64
"""A stride in elements; twice that is beyond 2^31."""


@dataclass
class Plain:
    """One side of a product without scales: (rows, K, L)."""

    values: Any

    def exact(self) -> Any:
        return value_of(self.values)

    def elements(self, major: str = "k") -> Any:
        return in_order(self.values, major)


def shapes(name: str, columns: tuple[int, ...], rows: tuple[int, ...]) -> Iterator[tuple[int, int, int, int]]:
    """Yield M, N, K, L: every M, with one after the other of the rest."""
    unit = depth_unit(name)
    for number, (m, k, batch) in enumerate(zip(rows, DEPTHS, BATCHES, strict=True)):
        yield m, columns[number % len(columns)], -(-k // unit) * unit, batch


def depth_unit(name: str) -> int:
    """Return how many elements along K are 16 bytes."""
    if name in FORMATS:
        return 32 if FORMATS[name][0] == E2M1 else 16
    return 16 // np.dtype(STORED[name]).itemsize


def error_share(name: str, k: int) -> float:
    """Return the share of the sum of magnitudes by which a sum of ``k`` products may be off."""
    if name == "float32":
        return SPLIT_SHARE
    return accumulation_share(k, "float8" if name in (E4M3, E5M2) else "bfloat16")


def sides(name: str, shape: tuple[int, int, int, int], size: float = 1.0, whole: bool = False, seed: int = 0) -> Any:
    """Return A and B, whose products add up to numbers of about ``size``; ``whole``: small integers.

    8-bit numbers without scales, and scales of 8 bits with a mantissa, reach only so far down: what is left to get to
    ``size`` is returned third, a power of two for alpha.
    """
    m, n, k, batch = shape
    rng = np.random.default_rng([seed, *shape])
    each = (size / np.sqrt(k)) ** 0.5
    least = 1.0 if name in (E4M3, E5M2) else 2.0**-6 if name == "nvfp4" else 0.0
    rest = 1.0 if each >= least or whole else 2.0 ** np.round(2 * np.log2(each / least))
    each = max(each, least)
    a, b = (_side(rng, name, rows, k, batch, each, whole) for rows in (m, n))
    return a, b, rest


def _side(rng: Any, name: str, rows: int, k: int, batch: int, size: float, whole: bool) -> Plain | Operand:
    if name in FORMATS:
        return operand(rng, rows, k, batch, name, size, whole)
    drawn = rng.integers(-3, 4, (rows, k, batch)) if whole else rng.standard_normal((rows, k, batch)) * size
    return Plain(drawn.astype(STORED[name]))


def product(a: Any, b: Any, name: str = "bfloat16") -> tuple[Any, Any]:
    """Return the products of float64 matrices (rows, K, L), and the error allowed to a kernel's sums."""
    left, right = (torch.from_numpy(np.ascontiguousarray(x.transpose(2, 0, 1))).to(DEVICE) for x in (a, b))
    sums, sizes = ((x @ y.mT).permute(1, 2, 0).cpu().numpy() for x, y in ((left, right), (left.abs(), right.abs())))
    return sums, error_share(name, a.shape[1]) * sizes


def placed(array: Any, major: str = "k", pad: int = 0, outside: float = np.nan) -> Any:
    """Return elements (rows, K, L) on the GPU, K (or rows) side by side.

    ``pad``: how many bytes lie between its lines; then there is another line after each matrix too. They hold
    ``outside``, bytes of pairs of e2m1 0xFF.
    """
    axes = (2, 0, 1) if major == "k" else (2, 1, 0)
    inner = array.transpose(axes)
    batch, lines, length = inner.shape
    name = array.dtype.name
    value = 0xFF if array.dtype == np.uint8 else np.clip(outside, -LARGEST.get(name, np.inf), LARGEST.get(name, np.inf))
    buffer = np.full((batch, lines + (pad > 0), length + pad // array.itemsize), value).astype(array.dtype)
    buffer[:, :lines, :length] = inner
    return to_framework(buffer, "torch", DEVICE)[:, :lines, :length].permute(*map(int, np.argsort(axes)))


def on_gpu(array: Any) -> Any:
    """Return a numpy array on the GPU, with its strides."""
    return to_framework(array, "torch", DEVICE)


def scales(a: Operand, b: Operand, seed: int = 0, form: str = "logical") -> dict[str, Any]:
    """Return the scales of both sides on the GPU by the names of the arguments; ``seed``: of their padding."""
    return {
        "sfa_tensor": on_gpu(a.blocked(form, 2 * seed)),
        "sfb_tensor": on_gpu(b.blocked(form, 2 * seed + 1)),
    }


def guarded_rows(shape: tuple[int, int, int], dtype: str, major: str = "n", pad: int = 16) -> Any:
    """Return a result (M, N, L) for a caller to hand in, with ``pad`` watched bytes after each line."""
    from fe_runtime import testing

    m, n, _ = shape
    item = 1 if dtype == "uint8" else np.dtype(STORED[dtype]).itemsize
    lines, length = (m, n) if major == "n" else (n, m)
    line = length + pad // item
    stride = (line, 1, line * lines) if major == "n" else (1, line, line * lines)
    name = f"{dtype} of {shape}"
    return testing.guarded(shape, dtype, stride=stride, framework="torch", device=DEVICE, name=name)


def compiles() -> int:
    """Return how many kernels this process has compiled or loaded."""
    return sum(entry.compiles + entry.disk_hits for entry in cache_info().values())


def host(x: Any) -> Any:
    """Return a torch result in numpy; ``None`` for ``None``."""
    if x is None or x.element_size() > 1:
        return None if x is None else to_numpy(x)
    codes = to_numpy(x.view(torch.uint8))  # torch can do little else with narrow numbers than see bytes
    name = str(x.dtype).removeprefix("torch.")
    return codes.view(STORED[name]) if name in STORED else codes


def as_bytes(x: Any) -> Any:
    """Return narrow numbers as bytes, which every function of torch can treat; others as they are."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def there(results: Any) -> list[Any]:
    """Return the results that there are, narrow ones as bytes."""
    return [as_bytes(x) for x in results if x is not None]


def far_copy(x: Any, pitch: int, dimension: int = 0) -> Any:
    """Return a copy of a matrix (rows, columns, L), columns contiguous, whose rows (batches) are ``pitch`` apart."""
    extent = x.shape[dimension]
    apart = [x.shape[1], 1, x.shape[0] * x.shape[1]]
    apart[dimension] = pitch
    apart[2] = max(apart[2], extent * pitch if dimension == 0 else 0)
    memory = torch.empty((extent - 1) * pitch + x[..., :1].numel(), dtype=x.dtype, device=x.device)
    far = memory.as_strided(x.shape, apart)
    as_bytes(far).copy_(as_bytes(x))
    return far


def bits(x: Any) -> Any:
    """Return the bytes of a torch result, to compare bit for bit."""
    return as_bytes(x).contiguous().reshape(-1).view(torch.uint8)


def assert_same(got: Any, want: Any) -> None:
    """Compare two tuples of torch results bit for bit, ``None`` included."""
    for number, (x, y) in enumerate(zip(got, want, strict=True)):
        assert (x is None) == (y is None), number
        if x is not None:
            assert (x.shape, x.dtype) == (y.shape, y.dtype), number
            assert torch.equal(bits(x), bits(y)), f"result {number}: {(bits(x) != bits(y)).sum().item()} bytes differ"


def assert_same_in_jax(got: Any, want: Any) -> None:
    """Compare JAX results with torch's bit for bit, scales in the forms of either."""
    for number, (x, y) in enumerate(zip(got, want, strict=True)):
        assert (x is None) == (y is None), number
        if x is not None:
            y = y.permute(5, 2, 4, 0, 1, 3) if y.ndim == 6 else y
            assert np.asarray(x).tobytes() == host(y).tobytes(), number


def jax_arrays(given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments on the GPU as JAX arrays, scales in the physical form."""
    found = {}
    for name, x in given.items():
        x = x.permute(5, 2, 4, 0, 1, 3) if x.ndim == 6 else x
        found[name] = to_framework(host(x), "jax", DEVICE)
    return found
