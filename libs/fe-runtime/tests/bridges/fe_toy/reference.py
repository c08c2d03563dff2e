"""The mathematics of ``scale_clamp`` on arrays of any framework."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from fe_runtime import formats


def forward(x: Any, bias: Any, *, scale: float, limit: float, mask: bool, out_dtype: str) -> tuple[Any, Any]:
    xp = array_namespace(x)
    z = _unclipped(xp, x, bias, scale)
    y = formats.cast(xp.clip(z, -limit, limit), out_dtype)
    return y, xp.astype(xp.abs(z) <= limit, xp.uint8) if mask else None


def backward(dy: Any, x: Any, bias: Any, *, scale: float, limit: float) -> tuple[Any, Any]:
    xp = array_namespace(x)
    dz = xp.where(xp.abs(_unclipped(xp, x, bias, scale)) <= limit, xp.astype(dy, xp.float32), 0.0)
    dbias = None
    if bias is not None:
        dbias = xp.astype(xp.sum(xp.reshape(dz, (-1, dz.shape[-1])), axis=0), bias.dtype)
    return xp.astype(dz * scale, x.dtype), dbias


def _unclipped(xp: Any, x: Any, bias: Any, scale: float) -> Any:
    z = xp.astype(x, xp.float32) * scale
    return z if bias is None else z + xp.astype(bias, xp.float32)
