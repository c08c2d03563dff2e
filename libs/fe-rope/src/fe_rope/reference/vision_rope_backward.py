"""Inverse split-half rotation of two gradients, packed with a third into one matrix, on arrays of any framework."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from . import exact

__all__ = ["vision_rope_backward", "vision_rope_backward_native"]


def vision_rope_backward(grad_q: Any, grad_k: Any, grad_v: Any, cosine: Any, sine: Any) -> tuple[Any]:
    """Rotate the gradients of Q and K backwards and pack dQ, dK and dV side by side.

    ``a, b`` channel ``i`` of either half, ``c, s`` its table entries: ``bf16(RN(RN(a*c) + RN(b*s)))`` and
    ``bf16(RN(RN(b*c) - RN(a*s)))``. V is copied bit for bit.

    Parameters
    ----------
    grad_q, grad_k, grad_v
        (T, H, D) bfloat16, D even.
    cosine, sine
        (T, D/2) float32.

    Returns
    -------
    tuple
        (T, 3*H*D) bfloat16 alone.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: vision RoPE backward, arithmetic.
    """
    tokens, heads, channels = grad_q.shape
    cosine, sine = cosine[:, None, :], sine[:, None, :]
    parts = (_rotated(grad_q, cosine, sine), _rotated(grad_k, cosine, sine), grad_v)
    return (exact.join([part.reshape((tokens, heads * channels)) for part in parts]),)


def vision_rope_backward_native(grad_q: Any, grad_k: Any, grad_v: Any, cosine: Any, sine: Any) -> tuple[Any]:
    """The same for arrays as they are stored: (H, T, D), (H, D, T) and (H, T, D)."""
    xp = array_namespace(grad_q)
    orders = ((1, 0, 2), (2, 0, 1), (1, 0, 2))
    q, k, v = (
        xp.permute_dims(gradient, order) for gradient, order in zip((grad_q, grad_k, grad_v), orders, strict=True)
    )
    return vision_rope_backward(q, k, v, cosine, sine)


def _rotated(gradient: Any, cosine: Any, sine: Any) -> Any:
    half = gradient.shape[-1] // 2
    wide = exact.widen(gradient)
    a, b = wide[..., :half], wide[..., half:]
    first = exact.add(exact.multiply(a, cosine), exact.multiply(b, sine))
    second = exact.add(exact.multiply(b, cosine), -exact.multiply(a, sine))
    return exact.join([exact.narrow(first), exact.narrow(second)])
