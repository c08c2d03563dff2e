"""Gradients through the product with the SwiGLU activation, on arrays of any framework."""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace

from fe_runtime import formats
from fe_runtime.formats import _backend as backend

from . import operands

__all__ = ["gemm_swiglu_backward"]

BLOCK = 32


def gemm_swiglu_backward(
    dc: Any, dab12: Any, a: Any, b: Any, ab12: Any, *, alpha: float = 1.0, compute: str = "float32"
) -> tuple[Any, Any]:
    """Carry the gradients of C and of AB12 back to A and B.

    With ``up`` and ``gate`` of each 64 columns of AB12 and ``s = sigmoid(gate)``: ``dup = dC * (gate * s)``,
    ``dgate = dC * up * (s * (1 + gate * (1 - s)))``, ``dx`` these in the columns of up and gate, plus dAB12;
    ``dA[m, k, l] = alpha * sum_n dx[m, n, l] * B[n, k, l]``, ``dB[n, k, l] = alpha * sum_m dx[m, n, l] * A[m, k, l]``.

    Parameters
    ----------
    dc
        (M, N/2, L), the gradient of C.
    dab12
        (M, N, L), the gradient of AB12, or ``None`` for none.
    a, b
        (M, K, L) and (N, K, L), float16, bfloat16 or float32.
    ab12
        (M, N, L), as the forward stored it: the gradient is that at the rounded values.
    alpha
        Rounded to fp32.
    compute
        dtype of the arithmetic: ``"float32"`` as the contract says, ``"float64"`` for an oracle.

    Returns
    -------
    tuple
        ``(da, db)``, dtypes of A and B. ``dx`` is computed in fp32 and rounded once to the dtype of A, the products
        are summed in fp32, multiplied by alpha and rounded once. ``"float64"``: nothing is rounded.
    """
    real = getattr(array_namespace(a), compute)
    exact = compute == "float64"

    def taken(x: Any) -> Any:
        """Return (L, rows, columns) in the dtype of the arithmetic."""
        values = operands.batched(x)
        wide = values if exact and backend.dtype_name(x) == "float64" else formats.decode(values)
        return array_namespace(wide).astype(wide, real)

    dx = _through_activation(taken(dc), taken(ab12))
    if dab12 is not None:
        dx = dx + taken(dab12)
    if not exact:
        dx = formats.decode(formats.cast(dx, a.dtype))
    xp, factor = array_namespace(dx), alpha if exact else float(np.float32(alpha))
    da = _product(dx, taken(b)) * factor
    db = _product(xp.permute_dims(dx, (0, 2, 1)), taken(a)) * factor
    if exact:
        return operands.unbatched(da), operands.unbatched(db)
    return operands.stored(da, a.dtype), operands.stored(db, b.dtype)


def _through_activation(dc: Any, x: Any) -> Any:
    xp = array_namespace(x)
    batch, rows, columns = x.shape
    pairs = xp.reshape(x, (batch, rows, columns // (2 * BLOCK), 2, BLOCK))
    up, gate = pairs[:, :, :, 0, :], pairs[:, :, :, 1, :]
    given = xp.reshape(dc, up.shape)
    decay = xp.exp(-xp.abs(gate))
    s = xp.where(gate >= 0, xp.ones_like(gate), decay) / (1 + decay)
    rest = xp.where(gate >= 0, decay, xp.ones_like(gate)) / (1 + decay)  # 1 - s without cancellation
    dup, dgate = given * (gate * s), given * up * (s * (1 + gate * rest))
    return xp.reshape(xp.stack([dup, dgate], axis=3), x.shape)


def _product(left: Any, right: Any) -> Any:
    """Return (L, M, N) times (L, N, K)."""
    xp = array_namespace(left)
    if backend.framework_of(left) == "jax":  # its default multiplies in fewer bits on some devices
        return xp.matmul(left, right, precision="highest")
    return xp.matmul(left, right)
