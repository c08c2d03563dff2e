"""``o = SiLU(RMSNorm(x) * w + b)`` and its gradient, on arrays of any framework."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from fe_runtime import formats

from .rms_norm import gradients_of_rows, normalised

__all__ = ["rmsnorm_silu", "rmsnorm_silu_backward"]


def rmsnorm_silu(
    x: Any, w: Any = None, bias: Any = None, scale: Any = None, *, eps: float, out_dtype: str, compute: str = "float32"
) -> tuple[Any, Any]:
    """Normalise each row by its root mean square, scale it, apply SiLU, and round once to the output format.

    ``rstd = 1/sqrt(mean(x^2) + eps)``, ``z = (rstd*x)*w + b``, ``y = z/(1 + exp(-z))``.

    Parameters
    ----------
    x
        (..., C), any float dtype.
    w, bias
        (C,) or ``None``.
    scale
        (1,) float32 or ``None``: multiplies ``y`` before the FP8 rounding.
    eps
        Added to the mean square.
    out_dtype
        ``"float8_e4m3fn"``, ``"float4_e2m1fn_x2"`` (NVFP4: 16 values a block) or a float dtype.
    compute
        dtype of the arithmetic: ``"float32"`` as the contract says, ``"float64"`` for an oracle.

    Returns
    -------
    tuple
        ``(o, sf)``; ``sf`` is ``None`` but for NVFP4.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: RMSNorm + SiLU, numerics.
    """
    xp = array_namespace(x)
    real = getattr(xp, compute)
    z, _ = normalised(x, w, bias, eps, real)
    y = z * _sigmoid(xp, z)
    if out_dtype == compute:
        return y, None
    if out_dtype == "float4_e2m1fn_x2":
        return formats.quantize_nvfp4_norm(y)
    if out_dtype == "float8_e4m3fn":
        return formats.cast(y if scale is None else y * xp.astype(scale, real), out_dtype), None
    return formats.cast(y, out_dtype), None


def rmsnorm_silu_backward(
    do: Any, x: Any, w: Any = None, bias: Any = None, *, eps: float, compute: str = "float32"
) -> tuple[Any, Any, Any]:
    """Return the gradients of :func:`rmsnorm_silu` with an unquantised output.

    With ``z`` as there, ``s = sigmoid(z)``, ``u0 = do*s*(1 + z*(1 - s))``, ``u = u0*w`` and ``xh = rstd*x``:
    ``dx = rstd*(u - xh*mean(u*xh))``, ``dw = sum over rows of u0*xh``, ``db = sum over rows of u0``.

    Parameters
    ----------
    do
        (..., C), gradient of the output.
    x, w, bias, eps
        As given to the forward.
    compute
        dtype of the arithmetic.

    Returns
    -------
    tuple
        ``(dx, dw, db)``, each rounded once to the dtype of what it is the gradient of; ``None`` for what is absent.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: RMSNorm + SiLU, differentiated.
    """
    xp = array_namespace(x)
    real = getattr(xp, compute)
    z, rstd = normalised(x, w, bias, eps, real)
    s = _sigmoid(xp, z)
    u0 = xp.astype(do, real) * s * (1 + z * (1 - s))
    return gradients_of_rows(u0, None, x, w, bias, rstd)


def _sigmoid(xp: Any, z: Any) -> Any:
    # 1/(1 + exp(-z)) without overflow: exp of the negative magnitude is at most 1.
    decay = xp.exp(-xp.abs(z))
    one = xp.ones_like(z)
    return xp.where(z >= 0, one, decay) / (1 + decay)
