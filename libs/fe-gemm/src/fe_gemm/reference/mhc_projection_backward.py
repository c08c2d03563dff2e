"""Gradients of the flattened residual input and of the projection weight of manifold-constrained hyper-connections, on
arrays of any framework."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from fe_runtime import formats

__all__ = ["mhc_projection_backward"]


def mhc_projection_backward(
    x: Any,
    weight: Any,
    grad_proj: Any,
    grad_r: Any,
    r: Any,
    *,
    allow_tf32: bool = True,
    compute: str = "float32",
) -> tuple[Any, Any]:
    """Return the gradients of x and of the weight.

    ``dx = grad_r * (1 / (r * Kc)) * x + P @ weight`` and ``dweight = P^T @ x`` with ``P = grad_proj[:, :N]``.

    Parameters
    ----------
    x
        (M, Kc).
    weight
        (N, Kc).
    grad_proj
        (M, Np), Np >= N; columns from N on are not read.
    grad_r, r
        (M, 1).
    allow_tf32
        Without effect: the products are exact in float32 and more.
    compute
        dtype of the arithmetic: ``"float32"``, or ``"float64"`` for an oracle.

    Returns
    -------
    tuple
        ``(dx, dweight)``: dx rounded once to the dtype of x (``"float64"``: not rounded), dweight in ``compute``.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: mHC projection backward, mathematics.
    """
    del allow_tf32
    xp = array_namespace(x)
    real = getattr(xp, compute)
    n, columns = weight.shape
    values, w, p, dr, norm = (xp.astype(array, real) for array in (x, weight, grad_proj[:, :n], grad_r, r))
    dx = dr * (1 / (norm * columns)) * values + xp.matmul(p, w)
    dweight = xp.matmul(xp.matrix_transpose(p), values)
    return dx if compute == "float64" else formats.cast(dx, x.dtype), dweight
