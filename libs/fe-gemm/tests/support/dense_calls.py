"""Operands of the dense products in each framework, for the tests of their front doors."""

from __future__ import annotations

from typing import Any

import numpy as np
from naive_gemm import Operand, in_order

from fe_runtime.testing import to_framework

FRAMEWORKS = ("numpy", "torch", "jax")


def scaled(a: Operand, b: Operand, framework: str = "numpy", major: str = "k", dtype: Any = None) -> list[Any]:
    """Return A, B and their scales; ``dtype``: by which the scales' bytes are called."""
    form = "physical" if framework == "jax" else "logical"
    given = [a.elements(major), b.elements(major), a.blocked(form, 1, dtype), b.blocked(form, 2, dtype)]
    return [to_framework(array, framework) for array in given]


def pairs(arrays: list[Any]) -> list[Any]:
    """Return torch operands with A and B as torch's own packed FP4."""
    import torch

    return [x.view(torch.float4_e2m1fn_x2) if n < 2 else x for n, x in enumerate(arrays)]


def plain(rng: Any, rows: int, k: int, batch: int, dtype: Any, size: float = 1.0, major: str = "k") -> Any:
    """Return random elements (rows, K, L)."""
    return in_order((rng.standard_normal((rows, k, batch)) * size).astype(dtype), major)


def pitched(array: Any, extra: int) -> Any:
    """Return the same (rows, K, L) elements with ``extra`` ones between its rows, and NaN in the gaps."""
    rows, k, batch = array.shape
    wide = np.full((batch, rows, (k + extra) * array.itemsize), 0xFF, np.uint8).view(array.dtype)
    view = wide[:, :, :k].transpose(1, 2, 0)
    view[...] = array
    return view


def strides(x: Any) -> tuple[int, ...]:
    """Return strides in elements."""
    return tuple(step // x.itemsize for step in x.strides) if isinstance(x, np.ndarray) else tuple(x.stride())
