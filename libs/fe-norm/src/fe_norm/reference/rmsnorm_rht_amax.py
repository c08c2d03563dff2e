"""RMSNorm, scale, Hadamard rotation of 16 channels, and the largest magnitude of each group of rows, on arrays of any
framework."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from fe_runtime import formats

__all__ = ["rmsnorm_rht_amax"]

BLOCK = 16


def rmsnorm_rht_amax(
    x: Any, w: Any, *, eps: float, rows_per_cta: int, num_threads: int | None = None, compute: str = "float32"
) -> tuple[Any, Any]:
    """Normalise each row by its root mean square, scale it, and rotate every 16 channels by a Hadamard matrix.

    ``y = (x * 1/sqrt(mean(x^2) + eps)) * w``, ``r = H16 @ y / 4`` for each block of 16 channels.

    Parameters
    ----------
    x
        (M, N), any float dtype; N a multiple of 16.
    w
        (N,).
    eps
        Added to the mean square.
    rows_per_cta
        Rows that share an entry of the maxima; divides M.
    num_threads
        Without effect: no hint to a kernel changes the result.
    compute
        dtype of the arithmetic: ``"float32"`` as the contract says, ``"float64"`` for an oracle.

    Returns
    -------
    tuple
        ``(o, amax)``: ``o`` is ``r`` rounded once to the dtype of x (``"float64"``: not rounded); ``amax``
        (M / rows_per_cta,) the largest ``|r|`` of each group of rows before that rounding, NaN left out.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: RMSNorm + RHT + amax, numerics.
    """
    del num_threads
    xp = array_namespace(x)
    real = getattr(xp, compute)
    v = xp.astype(x, real)
    rstd = 1 / xp.sqrt(xp.mean(v * v, axis=-1, keepdims=True) + eps)
    rotated = _rotate(xp, v * rstd * xp.astype(w, real)) * 0.25
    magnitude = xp.abs(rotated)
    magnitude = xp.where(xp.isnan(magnitude), xp.zeros_like(magnitude), magnitude)
    groups = xp.reshape(xp.max(magnitude, axis=-1), (x.shape[0] // rows_per_cta, rows_per_cta))
    o = rotated if compute == "float64" else formats.cast(rotated, x.dtype)
    return o, xp.max(groups, axis=-1)


def _rotate(xp: Any, y: Any) -> Any:
    """Return ``H16 @ y`` for each 16 values of the last axis, by sums and differences: one stage for each bit."""
    shape = y.shape
    for distance in (1, 2, 4, 8):
        pairs = xp.reshape(y, (shape[0], shape[1] // (2 * distance), 2, distance))
        low, high = pairs[:, :, 0, :], pairs[:, :, 1, :]
        y = xp.reshape(xp.stack([low + high, low - high], axis=2), shape)
    return y
