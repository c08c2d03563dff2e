"""The gate of Engram layers with its saved state, and its gradient, on arrays of any framework."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

__all__ = ["engram_gate_saved_backward", "engram_gate_saved_forward"]

FLOOR = 1e-6
"""Least magnitude of which the gate takes the root; below it the gate has no slope."""


def engram_gate_saved_forward(
    x: Any, kv: Any, weight: Any, token_mask: Any, *, eps: float, compute: str = "float32"
) -> tuple[Any, Any]:
    """Add to each stream of a token the token's value times the stream's gate.

    ``rx = 1/sqrt(mean(x^2) + eps)``, ``rk`` alike of the key, ``dot = (sum (x*w)*k) * (rx*rk) * D^-1/2``,
    ``gate = sigmoid(copysign(sqrt(max(|dot|, 1e-6)), dot))``, 0 where the token is masked; ``out = x + gate*v``.

    Parameters
    ----------
    x
        (N, H, D).
    kv
        (N, (H + 1) * D): a key of each stream, then the value that they share.
    weight
        (H, D).
    token_mask
        (N,), bool.
    eps
        Added to the mean squares.
    compute
        dtype of the arithmetic: ``"float32"`` as the contract says, ``"float64"`` for an oracle.

    Returns
    -------
    tuple
        ``out`` (N, H, D), dtype of x, and ``saved`` (N, H, 4): gate, dot, rx, rk, dtype ``compute``.
    """
    xp = array_namespace(x)
    real = getattr(xp, compute)
    width = x.shape[-1]
    keys, value = _split(kv, x.shape)
    stream, key, w = (xp.astype(array, real) for array in (x, keys, weight))
    rx, rk = (1 / xp.sqrt(xp.sum(a * a, axis=-1) * (1 / width) + eps) for a in (stream, key))
    dot = xp.sum(stream * w * key, axis=-1) * (rx * rk) * width**-0.5
    gate = 1 / (1 + xp.exp(-xp.copysign(_root(dot), dot)))
    gate = xp.where(token_mask[:, None], gate, xp.zeros_like(gate))
    open_ = xp.expand_dims(gate, axis=-1)
    out = xp.where(open_ != 0, xp.astype(stream + open_ * xp.astype(value, real), x.dtype), x)
    return out, xp.stack([gate, dot, rx, rk], axis=-1)


def engram_gate_saved_backward(
    grad_out: Any, x: Any, kv: Any, weight: Any, saved: Any, *, compute: str = "float32"
) -> tuple[Any, Any, Any]:
    """Return the gradients of x, kv and weight from what the forward saved.

    ``gv = sum g*v``, ``ddot = gv*gate*(1 - gate)*0.5/root`` (0 where ``|dot| < 1e-6``), ``c = ddot*rx*rk*D^-1/2``,
    ``cx = ddot*dot*rx^2/D``, ``ck = ddot*dot*rk^2/D``; ``dx = g + c*w*k - cx*x``, ``dk = c*w*x - ck*k``,
    ``dv = sum over streams of gate*g``, ``dweight = sum over tokens of c*x*k``.

    Streams whose gate is 0 are left out of all sums, whatever they hold: their dx is g, their dk 0.

    Parameters
    ----------
    grad_out
        (N, H, D), gradient of ``out``.
    x, kv, weight
        As given to the forward.
    saved
        (N, H, 4), as the forward returned it.
    compute
        dtype of the arithmetic.

    Returns
    -------
    tuple
        ``grad_x`` and ``grad_kv`` of the dtypes of x and kv, ``grad_weight`` of the dtype of weight.
    """
    xp = array_namespace(x)
    real = getattr(xp, compute)
    tokens, streams, width = x.shape
    keys, value = _split(kv, x.shape)
    g, v, stream, key, w = (xp.astype(array, real) for array in (grad_out, value, x, keys, weight))
    gate, dot, rx, rk = (xp.astype(saved[..., i : i + 1], real) for i in range(4))
    kept = gate != 0

    def selected(values: Any) -> Any:
        return xp.where(kept, values, xp.zeros_like(values))

    ddot = xp.sum(g * v, axis=-1, keepdims=True) * gate * (1 - gate) * (0.5 / _root(dot))
    ddot = xp.where(xp.abs(dot) >= FLOOR, ddot, xp.zeros_like(ddot))
    c = ddot * rx * rk * width**-0.5
    cx, ck = (ddot * dot * r * r * (1 / width) for r in (rx, rk))
    dx = xp.where(kept, xp.astype(g + c * w * key - cx * stream, x.dtype), grad_out)
    dk = selected(c * w * stream - ck * key)
    dv = xp.sum(selected(gate * g), axis=1)
    dkv = xp.concat([xp.reshape(dk, (tokens, streams * width)), dv], axis=-1)
    dw = xp.sum(selected(c * stream * key), axis=0)
    return dx, xp.astype(dkv, kv.dtype), xp.astype(dw, weight.dtype)


def _split(kv: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Return the keys (N, H, D) and the value (N, 1, D)."""
    xp = array_namespace(kv)
    tokens, streams, width = shape
    keys = xp.reshape(kv[:, : streams * width], (tokens, streams, width))
    return keys, xp.reshape(kv[:, streams * width :], (tokens, 1, width))


def _root(dot: Any) -> Any:
    """Return ``sqrt(max(|dot|, 1e-6))``; NaN stays."""
    xp = array_namespace(dot)
    magnitude = xp.abs(dot)
    return xp.sqrt(xp.where(magnitude < FLOOR, xp.full_like(magnitude, FLOOR), magnitude))
