"""The forms in which operands of the grouped products come, brought to the canonical one by views.

Weights are canonical as (E, N, K), stored by rows or by columns; biases as (E, N). The legacy form of weights is
(N, K, E). Rank alone tells the forms of A, of what has its rows, and of numbers of rows: contracts accept both.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from fe_runtime.arrays import get_strides, is_jax_array, is_torch_tensor
from fe_runtime.tensor_desc import TensorDesc

__all__ = [
    "blocked_scales",
    "by_expert",
    "by_rows_of_pairs",
    "dense_major",
    "dtype_name",
    "is_jax",
    "is_packed",
    "reshaped",
    "rows_without_tail",
    "strides",
    "turned",
    "weight_form",
    "weights",
    "without_tail",
]

LEGACY = (2, 0, 1)
BY_COLUMNS = (0, 2, 1)


def weights(b: Any, b_major: object) -> Any:
    """Return dense weights as (E, N, K): a view, in JAX a copy of weights by columns.

    Anything but an array of rank 3 is returned as it is: the contract says what is wrong with it.
    """
    order = _ORDERS.get(weight_form(b, b_major))
    return b if order is None else turned(b, order)


def weight_form(b: Any, b_major: object) -> str:
    """Return ``"legacy"``, ``"canonical"``, ``"by columns"`` (canonical (E, K, N)) or ``""`` for no weights.

    Canonical is what has the elements of its last dimension side by side. An extent of 1 there is legacy, of one
    expert: its stride says nothing.
    """
    shape = getattr(b, "shape", None)
    if shape is None or len(shape) != 3:
        return ""
    if is_torch_tensor(b):
        is_legacy = shape[2] == 1 or b.stride(2) != 1
    else:
        is_legacy = not is_jax_array(b) and (shape[2] == 1 or strides(b)[2] != 1)
    if is_legacy and 0 not in shape:
        return "legacy"
    return "by columns" if b_major == "n" else "canonical"


def dense_major(b: Any, b_major: Any) -> Any:
    """Return the major of what :func:`weights` returns: in JAX always ``"k"``."""
    return "k" if b_major == "n" and is_jax(b) else b_major


def by_expert(bias: Any) -> Any:
    """Return a bias (N, E) as (E, N): a view, in JAX a copy. Anything of another rank is returned as it is."""
    shape = getattr(bias, "shape", None)
    return bias if shape is None or len(shape) != 2 else turned(bias, (1, 0))


def blocked_scales(scales: Any, shape: Sequence[int]) -> Any:
    """Return contiguous bytes of scales in the blocked layout, of any shape but its two own, in the physical shape.

    Parameters
    ----------
    scales
        An array, a descriptor or ``None``. One of rank 6, of another size or with gaps is returned as it is: the
        contract says what is wrong with it.
    shape
        The physical shape.
    """
    given = getattr(scales, "shape", None)
    if given is None or len(given) == 6 or _count(given) != _count(shape):
        return scales
    return reshaped(scales, shape)


def reshaped(x: Any, shape: Sequence[int]) -> Any:
    """Return a contiguous array or descriptor in another shape; one with gaps is returned as it is."""
    if isinstance(x, TensorDesc) or is_torch_tensor(x):
        return x.view(tuple(shape)) if x.is_contiguous() else x
    if not is_jax(x) and not getattr(x, "flags", {"C_CONTIGUOUS": False})["C_CONTIGUOUS"]:
        return x
    return x.reshape(tuple(shape))


def dtype_name(x: Any) -> str:
    """Return the name of an array's dtype as its framework writes it; plain enough for what traces programs."""
    return str(getattr(x, "dtype", "")).removeprefix("torch.")


def is_packed(x: Any) -> bool:
    """Whether an array holds packed FP4 pairs."""
    return dtype_name(x) in ("uint8", "float4_e2m1fn_x2", "float4_e2m1fn")


def by_rows_of_pairs(b: Any) -> Any:
    """Return B of packed FP4, a view (T/2, N) of an (N, T/2) buffer, as that buffer, which is what JAX has."""
    shape = getattr(b, "shape", None)
    return b if shape is None or len(shape) != 2 or is_jax(b) else turned(b, (1, 0))


def turned(x: Any, order: Sequence[int]) -> Any:
    """Return an array or descriptor with its dimensions in another order: a view, in JAX a new array."""
    if isinstance(x, TensorDesc) or is_torch_tensor(x):
        return x.permute(*order)
    return x.transpose(order) if hasattr(x, "transpose") else x


def without_tail(x: Any, offsets: Any) -> Any:
    """Return a JAX result of rows with those from the last offset on 0, which kernels do not write."""
    jnp: Any = sys.modules["jax"].numpy
    owned = jnp.arange(x.shape[0]) < offsets[-1]
    return jnp.where(owned.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros_like(x))


def rows_without_tail(result: Any, names: Sequence[str], offsets: Any) -> dict[str, Any]:
    """Return JAX results by name, those of rows without what lies behind the last offset."""
    found = dict(result.items())
    return found | {key: without_tail(found[key], offsets) for key in names if found[key] is not None}


def strides(x: Any) -> tuple[int, ...]:
    """Return the strides of an array or a descriptor in elements."""
    return x.stride if isinstance(x, TensorDesc) else get_strides(x)


def is_jax(x: Any) -> bool:
    """Whether an array is one of JAX."""
    # torch first: torch.compile cannot trace the other question.
    return not is_torch_tensor(x) and is_jax_array(x)


_ORDERS = {"legacy": LEGACY, "by columns": BY_COLUMNS}


def _count(shape: Sequence[int]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count
