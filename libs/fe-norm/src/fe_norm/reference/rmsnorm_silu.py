"""``o = SiLU(RMSNorm(x) * w + b)`` on arrays of any framework."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from fe_runtime import formats

__all__ = ["rmsnorm_silu"]


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
    v = xp.astype(x, real)
    rstd = 1 / xp.sqrt(xp.mean(v * v, axis=-1, keepdims=True) + eps)
    z = rstd * v
    if w is not None:
        z = z * xp.astype(w, real)
    if bias is not None:
        z = z + xp.astype(bias, real)
    y = z * _sigmoid(xp, z)
    if out_dtype == compute:
        return y, None
    if out_dtype == "float4_e2m1fn_x2":
        return formats.quantize_nvfp4_norm(y)
    if out_dtype == "float8_e4m3fn":
        return formats.cast(y if scale is None else y * xp.astype(scale, real), out_dtype), None
    return formats.cast(y, out_dtype), None


def _sigmoid(xp: Any, z: Any) -> Any:
    # 1/(1 + exp(-z)) without overflow: exp of the negative magnitude is at most 1.
    decay = xp.exp(-xp.abs(z))
    one = xp.ones_like(z)
    return xp.where(z >= 0, one, decay) / (1 + decay)
