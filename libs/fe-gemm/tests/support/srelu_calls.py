"""Operands of ``gemm_srelu`` and its backward in every framework, and comparison of their results bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from naive_gemm import FORMATS, STORED, in_order, operand

from fe_runtime.testing import to_framework, to_numpy

FRAMEWORKS = ("numpy", "torch", "jax")


def operands(
    name: str = "mxfp8_e4m3",
    framework: str = "numpy",
    m: int = 32,
    n: int = 48,
    k: int = 64,
    batch: int = 1,
    major: str = "k",
    seed: int = 0,
    whole: bool = True,
) -> dict[str, Any]:
    """Return A, B, their scales, and factors of the rows, by the names of the arguments, with ``sf_vec_size``."""
    rng = np.random.default_rng(seed)
    a, b = (operand(rng, rows, k, batch, name, whole=whole) for rows in (m, n))
    form = "physical" if framework == "jax" else "logical"
    prob = np.exp2(rng.integers(-3, 1, (m, 1, batch))).astype(np.float32)
    arrays = {
        "a_tensor": a.elements(major),
        "b_tensor": b.elements(major),
        "sfa_tensor": a.blocked(form, 1),
        "sfb_tensor": b.blocked(form, 2),
        "prob_tensor": prob,
    }
    made = {key: to_framework(array, framework) for key, array in arrays.items()}
    return {**made, "sf_vec_size": FORMATS[name][2]}


def upstream(framework: str, m: int, n: int, batch: int, dtype: str, major: str = "n") -> Any:
    """Return a gradient (M, N, L) of small integers."""
    values = np.random.default_rng(9).integers(-4, 5, (m, n, batch)).astype(STORED[dtype])
    return to_framework(in_order(values, "k" if major == "n" else "rows"), framework)


def one(framework: str, value: float = 1.0) -> Any:
    """Return a (1,) float32 array."""
    return to_framework(np.array([value], np.float32), framework)


def assert_same(got: Any, want: Any) -> None:
    """Compare two tuples of results bit for bit, ``None`` included; scales in whichever form."""
    for result, expected in zip(got, want, strict=True):
        assert (result is None) == (expected is None)
        if result is not None:
            np.testing.assert_array_equal(_plain(result), _plain(expected))


def strides_of(x: Any) -> tuple[int, ...]:
    """Return the strides of a numpy or torch array in elements."""
    return tuple(x.stride()) if hasattr(x, "data_ptr") else tuple(step // x.itemsize for step in x.strides)


def fresh_like(x: Any, fill: float | None = None) -> Any:
    """Return an array like a result, with its strides, to write into; ``None`` for ``None``."""
    if x is None:
        return None
    if hasattr(x, "data_ptr"):
        import torch

        made = torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype)
        return made if fill is None else made.fill_(fill)
    made = np.empty_like(x)  # keeps the order of dimensions
    if fill is not None:
        made[...] = fill
    return made


def _plain(x: Any) -> Any:
    """Return the bytes of a narrow result, the values of any other, scales in their logical view."""
    array = to_numpy(x)
    if array.dtype.itemsize == 1:
        array = np.ascontiguousarray(array).view(np.uint8)
    is_physical = array.ndim == 6 and array.shape[3:] == (32, 4, 4)
    return array.transpose(3, 4, 1, 5, 2, 0) if is_physical else array
