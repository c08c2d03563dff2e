"""LayerNorm, multiply, SiLU and dropout of HSTU layers (LMSD), and its gradient, on arrays of any framework."""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace

from .philox import keep, keep_factor

__all__ = ["hstu_lmsd_backward", "hstu_lmsd_forward"]

NORM, X, U = range(3)
"""Planes of random numbers, and bits of the mask: of the product with the norm, of x, of u."""


def hstu_lmsd_forward(
    x: Any,
    u: Any,
    weight: Any,
    bias: Any,
    *,
    eps: float,
    dropout_ratio: float,
    seed: int,
    apply_u_silu: bool,
    concat_u: bool,
    concat_x: bool,
    compute: str = "float32",
) -> tuple[Any, Any, Any, Any]:
    """Normalise the rows of x, multiply by the activated u, concatenate, and drop.

    ``ln = (x - mean) * rstd * weight + bias``, ``a = silu(u)`` or u, ``y = [drop2(a) | drop1(x) | drop0(ln * a)]``, the
    first two if asked for; ``var = max(mean(x^2) - mean(x)^2, 0)``, ``rstd = 1/sqrt(var + eps)``.

    Parameters
    ----------
    x, u
        (N, D).
    weight, bias
        (D,).
    eps
        Added to the variance.
    dropout_ratio, seed
        Probability, as float32, with which an element is dropped, and the key of the random numbers.
    apply_u_silu, concat_u, concat_x
        Whether u is activated, and which parts come before the product.
    compute
        dtype of the arithmetic: ``"float32"`` as the contract says, ``"float64"`` for an oracle, which then is also
        that of the results. The mask and its factor do not depend on it.

    Returns
    -------
    tuple
        ``(y, mean, rstd, mask)``: (N, parts * D) with the dtype of x, (N,) and (N,), and int8 (N, D) with bit b set
        where plane b is kept; ``None`` without dropout.
    """
    xp = array_namespace(x)
    real = getattr(xp, compute)
    v, w = xp.astype(x, real), xp.astype(u, real)
    mean = xp.mean(v, axis=-1, keepdims=True)
    variance = xp.mean(v * v, axis=-1, keepdims=True) - mean * mean
    rstd = 1 / xp.sqrt(xp.where(variance < 0, xp.zeros_like(variance), variance) + eps)
    ln = (v - mean) * rstd * xp.astype(weight, real) + xp.astype(bias, real)
    a = w * _sigmoid(w) if apply_u_silu else w
    parts = {U: a} if concat_u else {}
    parts |= {X: v} if concat_x else {}
    parts[NORM] = ln * a
    mask = None
    if np.float32(dropout_ratio) > 0:
        kept = {plane: keep(x, plane, seed, dropout_ratio) for plane in parts}
        mask = sum(xp.astype(where, xp.int8) * (1 << plane) for plane, where in kept.items())
        mask = xp.astype(mask, xp.int8)
        parts = {plane: _dropped(part, kept[plane], dropout_ratio) for plane, part in parts.items()}
    y = xp.concat(list(parts.values()), axis=-1)
    y = y if compute == "float64" else xp.astype(y, x.dtype)
    return y, xp.squeeze(mean, axis=-1), xp.squeeze(rstd, axis=-1), mask


def hstu_lmsd_backward(
    dy: Any,
    x: Any,
    u: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    rstd: Any,
    mask: Any = None,
    *,
    dropout_ratio: float,
    apply_u_silu: bool,
    concat_u: bool,
    concat_x: bool,
    compute_dweight: bool = True,
    compute: str = "float32",
) -> tuple[Any, Any, Any, Any]:
    """Return the gradients of :func:`hstu_lmsd_forward`.

    With ``g`` the parts of dy, each times ``1/(1 - p)`` where its bit of the mask is set and 0 elsewhere, ``xh =
    x*rstd - mean*rstd`` and ``gln = g_norm * a``:
    ``du = (g_norm*ln + g_u) * a'``, ``dx = g_x + (w*gln - xh*mean_D(xh*w*gln) - mean_D(w*gln)) * rstd``,
    ``dweight = sum over rows of gln*xh``, ``dbias = sum over rows of gln``.

    Parameters
    ----------
    dy
        (N, parts * D), gradient of y.
    x, u, weight, bias, mean, rstd, mask
        As given to the forward and as it returned them.
    dropout_ratio, apply_u_silu, concat_u, concat_x
        As given to the forward.
    compute_dweight
        Whether the gradient of the weight is wanted.
    compute
        dtype of the arithmetic, and with ``"float64"`` of the results.

    Returns
    -------
    tuple
        ``(dx, du, dweight, dbias)``; ``dweight`` may be ``None``.
    """
    xp = array_namespace(x)
    real = getattr(xp, compute)
    columns = x.shape[-1]
    planes = [*([U] if concat_u else []), *([X] if concat_x else []), NORM]
    upstream = {
        plane: xp.astype(dy[:, number * columns : (number + 1) * columns], real) for number, plane in enumerate(planes)
    }
    if mask is not None:
        for plane, part in upstream.items():
            upstream[plane] = _dropped(part, (mask >> plane) & 1 == 1, dropout_ratio)
    v, w, gain = xp.astype(x, real), xp.astype(u, real), xp.astype(weight, real)
    m, r = xp.astype(mean, real)[:, None], xp.astype(rstd, real)[:, None]
    xh = v * r - m * r
    ln = xh * gain + xp.astype(bias, real)
    s = _sigmoid(w)
    a, slope = (w * s, s + w * s * (1 - s)) if apply_u_silu else (w, 1)
    du = (upstream[NORM] * ln + upstream.get(U, 0)) * slope
    gln = upstream[NORM] * a
    wd = gain * gln
    dx = (wd - xh * xp.mean(xh * wd, axis=-1, keepdims=True) - xp.mean(wd, axis=-1, keepdims=True)) * r
    dx = dx + upstream[X] if concat_x else dx
    results = (dx, du, xp.sum(gln * xh, axis=0) if compute_dweight else None, xp.sum(gln, axis=0))
    if compute == "float64":
        return results
    dx, du, dweight, dbias = (None if result is None else xp.astype(result, x.dtype) for result in results)
    return dx, du, dweight, dbias


def _sigmoid(z: Any) -> Any:
    xp = array_namespace(z)
    e = xp.exp(-xp.abs(z))
    return xp.where(z < 0, e, xp.ones_like(e)) / (1 + e)


def _dropped(values: Any, kept: Any, dropout_ratio: float) -> Any:
    xp = array_namespace(values)
    return xp.where(kept, values * keep_factor(dropout_ratio), xp.zeros_like(values))
