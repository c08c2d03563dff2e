"""RMSNorm with an optional residual sum before it, and its gradient, on arrays of any framework."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from fe_runtime import formats

__all__ = ["gradients_of_rows", "normalised", "rms_norm", "rms_norm_backward"]


def rms_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    residual: Any = None,
    *,
    eps: float,
    out_dtype: str,
    compute: str = "float32",
) -> tuple[Any, Any, Any]:
    """Add the residual, normalise each row by its root mean square, scale and shift it, and round once.

    ``h = x + residual`` rounded to the dtype of x, ``rstd = 1/sqrt(mean(h^2) + eps)``,
    ``out = (rstd*h)*weight + bias``.

    Parameters
    ----------
    x, residual
        (..., N), of one float dtype; ``residual`` may be ``None``: then h is x.
    weight, bias
        (N,) or ``None``.
    eps
        Added to the mean square.
    out_dtype
        A float dtype.
    compute
        dtype of the arithmetic: ``"float32"`` as the contract says, ``"float64"`` for an oracle.

    Returns
    -------
    tuple
        ``(out, h, rstd)``; ``h`` is ``None`` without a residual, ``rstd`` has shape (...) and dtype ``compute``.
    """
    xp = array_namespace(x)
    real = getattr(xp, compute)
    h = x if residual is None else xp.astype(xp.astype(x, real) + xp.astype(residual, real), x.dtype)
    out, rstd = normalised(h, weight, bias, eps, real)
    rounded = out if out_dtype == compute else formats.cast(out, out_dtype)
    return rounded, None if residual is None else h, xp.squeeze(rstd, axis=-1)


def rms_norm_backward(
    dout: Any,
    dresidual_out: Any,
    x: Any,
    weight: Any,
    bias: Any,
    rstd: Any,
    *,
    eps: float = 0.0,
    compute: str = "float32",
) -> tuple[Any, Any, Any]:
    """Return the gradients of :func:`rms_norm`.

    ``xh = rstd*x``, ``u = dout*weight``, ``dx = rstd*(u - xh*mean(u*xh)) + dresidual_out``,
    ``dweight = sum over rows of dout*xh``, ``dbias = sum over rows of dout``.

    Parameters
    ----------
    dout
        (..., N), gradient of the output.
    dresidual_out
        (..., N), gradient of the sum h that went on beside it, or ``None``.
    x
        (..., N), what was normalised: the sum h where there was a residual.
    weight, bias
        (N,) or ``None``; of the bias only its dtype is used.
    rstd
        (...), as the forward returned it. ``None``: computed from x and ``eps``.
    eps
        Added to the mean square.
    compute
        dtype of the arithmetic.

    Returns
    -------
    tuple
        ``(dx, dweight, dbias)``, each of the dtype of what it is the gradient of, ``None`` for what is absent. dx is
        the gradient of x and of the residual.
    """
    xp = array_namespace(x)
    real = getattr(xp, compute)
    if rstd is None:
        _, scale = normalised(x, None, None, eps, real)
    else:
        scale = xp.expand_dims(xp.astype(rstd, real), axis=-1)
    return gradients_of_rows(xp.astype(dout, real), dresidual_out, x, weight, bias, scale)


def normalised(x: Any, weight: Any, bias: Any, eps: float, real: Any) -> tuple[Any, Any]:
    """Return ``z = (rstd*x)*weight + bias`` and ``rstd`` (..., 1)."""
    xp = array_namespace(x)
    v = xp.astype(x, real)
    rstd = 1 / xp.sqrt(xp.mean(v * v, axis=-1, keepdims=True) + eps)
    z = rstd * v
    if weight is not None:
        z = z * xp.astype(weight, real)
    if bias is not None:
        z = z + xp.astype(bias, real)
    return z, rstd


def gradients_of_rows(dz: Any, dresidual_out: Any, x: Any, weight: Any, bias: Any, rstd: Any) -> tuple[Any, Any, Any]:
    """Return the gradients of x, weight and bias for ``z = (rstd*x)*weight + bias``, given ``dz``.

    ``dz`` and ``rstd`` (..., 1) have the dtype of the arithmetic.
    """
    xp = array_namespace(x)
    real = dz.dtype
    xh = rstd * xp.astype(x, real)
    u = dz if weight is None else dz * xp.astype(weight, real)
    dx = rstd * (u - xh * xp.mean(u * xh, axis=-1, keepdims=True))
    if dresidual_out is not None:
        dx = dx + xp.astype(dresidual_out, real)
    dweight = None if weight is None else _sum_of_rows(dz * xh, weight.dtype)
    dbias = None if bias is None else _sum_of_rows(dz, bias.dtype)
    return xp.astype(dx, x.dtype), dweight, dbias


def _sum_of_rows(values: Any, dtype: Any) -> Any:
    xp = array_namespace(values)
    return xp.astype(xp.sum(xp.reshape(values, (-1, values.shape[-1])), axis=0), dtype)
