"""One step of a causal convolution and its state, on arrays of any framework."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace, is_torch_array

from fe_runtime import formats

__all__ = ["causal_conv1d_update"]


def causal_conv1d_update(
    x: Any,
    conv_state: Any,
    weight: Any,
    bias: Any = None,
    cache_seqlens: Any = None,
    conv_state_indices: Any = None,
    *,
    activation: str,
    compute: str = "float32",
) -> tuple[Any, Any]:
    """Convolve K new tokens of each row with the row's history, and move the history on.

    ``out[n,d,k] = act(sum_j weight[d,j] * h[n,d,k+j] + bias[d])``, where ``h`` is the history of ``W-1`` tokens, then
    ``x``. Row ``n`` has its history in slot ``conv_state_indices[n]`` (default ``n``) of the state: in the last places
    of the slot, or, with ``cache_seqlens``, in the places before ``cache_seqlens[n] mod L``, counted in a circle.

    Parameters
    ----------
    x
        (N, D) or (N, D, K), any float dtype.
    conv_state
        (S, D, L), dtype of x.
    weight
        (D, W), ``L >= W-1``.
    bias
        (D,) or ``None``.
    cache_seqlens
        (N,) integers or ``None``: a slot is a ring; where the first new token goes.
    conv_state_indices
        (N,) integers or ``None``. A row whose index is no slot is padding: its output is 0, and it has no state.
    activation
        ``"identity"`` or ``"silu"``.
    compute
        dtype of the arithmetic: ``"float32"`` as the contract says, ``"float64"`` for an oracle.

    Returns
    -------
    tuple
        ``(out, new_state)``; the payloads of the state are moved bit by bit.

    Notes
    -----
    Of several rows that name one slot, one leaves its new history there.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: causal convolution, decode step.
    """
    xp = array_namespace(x)
    tokens = x if x.ndim == 3 else xp.expand_dims(x, axis=2)
    rows, slots, width = x.shape[0], conv_state.shape[0], weight.shape[1]
    if conv_state_indices is None:
        valid, history = None, conv_state[:rows, ...]
    else:
        index = _index(xp, conv_state_indices)
        valid = (index >= 0) & (index < slots)
        index = xp.where(valid, index, xp.zeros_like(index))
        history = xp.take(conv_state, index, axis=0)
    first = None if cache_seqlens is None else xp.remainder(cache_seqlens, conv_state.shape[2])
    z = _convolved(xp, _recent(xp, history, width - 1, first), tokens, weight, bias, getattr(xp, compute))
    y = z * _sigmoid(xp, z) if activation == "silu" else z
    out = y if compute == "float64" else formats.cast(y, x.dtype)
    if valid is not None:
        out = xp.where(valid[:, None, None], out, xp.zeros_like(out))
    moved = _shifted(xp, history, tokens) if first is None else _written(xp, history, tokens, first)
    if valid is None:
        state = xp.concat([moved, conv_state[rows:, ...]], axis=0)
    else:
        state = _scattered(xp, conv_state, moved, index, valid)
    return xp.reshape(out, x.shape), state


def _recent(xp: Any, history: Any, count: int, first: Any) -> Any:
    """Return the last ``count`` tokens of each history, oldest first."""
    length = history.shape[2]
    if first is None:
        return history[:, :, length - count :]
    return _places(xp, history, xp.remainder(first[:, None] + (_count(xp, count, first) - count), length))


def _convolved(xp: Any, recent: Any, tokens: Any, weight: Any, bias: Any, real: Any) -> Any:
    """Return the filter's response to each new token: oldest tap first, bias last."""
    count = tokens.shape[2]
    wide = xp.concat([xp.astype(recent, real), xp.astype(tokens, real)], axis=2)
    taps = xp.astype(weight, real)
    z = taps[:, :1] * wide[:, :, :count]
    for j in range(1, weight.shape[1]):
        z = z + taps[:, j : j + 1] * wide[:, :, j : j + count]
    return z if bias is None else z + xp.astype(bias, real)[:, None]


def _shifted(xp: Any, history: Any, tokens: Any) -> Any:
    """Return each history with the new tokens at its end and the oldest ones gone."""
    return xp.concat([history, tokens], axis=2)[:, :, tokens.shape[2] :]


def _written(xp: Any, history: Any, tokens: Any, first: Any) -> Any:
    """Return each ring with the new tokens written from place ``first`` on; the last one to reach a place stays."""
    length, count = history.shape[2], tokens.shape[2]
    if count == 0:
        return history
    token = xp.remainder(_count(xp, length, first) - first[:, None], length)  # the first that reaches each place
    token = token + length * ((count - 1 - token) // length)
    fresh = _places(xp, tokens, xp.clip(token, 0, count - 1))
    return xp.where((token >= 0)[:, None, :], fresh, history)


def _scattered(xp: Any, state: Any, moved: Any, index: Any, valid: Any) -> Any:
    """Return the state with ``moved[n]`` in slot ``index[n]`` for each valid row."""
    slots, rows = state.shape[0], index.shape[0]
    if rows == 0:
        return state
    keys = xp.where(valid, index, slots)
    order = xp.argsort(keys)
    keys = xp.take(keys, order, axis=0)
    wanted = _count(xp, slots, keys)
    at = xp.clip(xp.searchsorted(keys, wanted), 0, rows - 1)
    row = xp.take(order, at, axis=0)
    owned = xp.take(keys, at, axis=0) == wanted
    return xp.where(owned[:, None, None], xp.take(moved, row, axis=0), state)


def _places(xp: Any, values: Any, places: Any) -> Any:
    """Return ``values[n, d, places[n, i]]``."""
    rows, channels, _ = values.shape
    index = xp.broadcast_to(_index(xp, places)[:, None, :], (rows, channels, places.shape[1]))
    return xp.take_along_axis(values, index, axis=2)


def _count(xp: Any, stop: int, like: Any) -> Any:
    """Return 0, 1, ... with the dtype of ``like``, on its device."""
    return xp.arange(stop, dtype=like.dtype, **({"device": like.device} if is_torch_array(like) else {}))


def _index(xp: Any, values: Any) -> Any:
    # torch gathers by 64-bit integers only.
    return xp.astype(values, xp.int64) if is_torch_array(values) else values


def _sigmoid(xp: Any, z: Any) -> Any:
    # 1/(1 + exp(-z)) without overflow: exp of the negative magnitude is at most 1.
    decay = xp.exp(-xp.abs(z))
    return xp.where(z >= 0, xp.ones_like(z), decay) / (1 + decay)
