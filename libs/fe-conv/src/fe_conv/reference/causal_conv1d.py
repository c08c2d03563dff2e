"""The causal depthwise convolution and its gradient on arrays of any framework."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain
from math import prod
from typing import Any

from array_api_compat import array_namespace

from .segments import Packed, Rows, segments, shifted, zeros

__all__ = [
    "causal_conv1d",
    "causal_conv1d_backward",
    "causal_conv1d_channel_last",
    "causal_conv1d_channel_last_backward",
]

Segments = Rows | Packed


def causal_conv1d(
    x: Any,
    weight: Any,
    bias: Any = None,
    seq_idx: Any = None,
    cu_seqlens: Any = None,
    initial_states: Any = None,
    *,
    activation: str,
    return_final_states: bool,
    channel_last: bool = False,
) -> tuple[Any, Any]:
    """Convolve each channel with its filter, causally and within each sequence.

    ``h = concat(initial_states or zeros, x)``, ``z[t] = sum_j weight[j]*h[t+j] + bias``, oldest tap first,
    ``y = act(z)``, rounded once; fp32, for fp64 input fp64. The final states are the last W-1 entries of ``h``.

    Parameters
    ----------
    x
        (B, D, T), or (B, T, D) with ``channel_last``; any float dtype.
    weight, bias
        (D, W); (D,) or ``None``.
    seq_idx
        (B, T) labels or ``None``: a tap counts only at a token of the same label; negative labels mean padding.
    cu_seqlens
        (N+1,) offsets of sequences packed along T, or ``None``. Tokens in no sequence give 0.
    initial_states
        (N, D, W-1), N = B without offsets; or ``None``.
    activation
        ``"identity"`` or ``"silu"``.

    Returns
    -------
    tuple
        ``(y, final_states)``; the states (N, W-1, D), bitwise copies, ``None`` unless asked for.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: causal_conv1d, math.
    """
    xp = array_namespace(x)
    tokens = _tokens(xp, x, channel_last)
    where = segments(xp, tokens, weight.shape[1] - 1, seq_idx, cu_seqlens)
    history = None if initial_states is None else xp.permute_dims(initial_states, (0, 2, 1))
    z = _preactivation(xp, where, tokens, weight, bias, history)
    y = z if activation == "identity" else z * _sigmoid(xp, z)
    y = _where(xp, where.member(), y)
    final = _final_states(xp, where, tokens, history) if return_final_states else None
    return _output(xp, y, x.dtype, channel_last), final


def causal_conv1d_backward(
    dy: Any,
    dfinal: Any,
    x: Any,
    weight: Any,
    bias: Any = None,
    seq_idx: Any = None,
    cu_seqlens: Any = None,
    initial_states: Any = None,
    *,
    activation: str,
    channel_last: bool = False,
) -> tuple[Any, Any, Any, Any]:
    """Return the gradients of :func:`causal_conv1d` for x, weight, bias and initial states (``None`` where absent).

    ``dz = dy*act'(z)`` with ``z`` computed again; ``dh[t+j] += dz[t]*weight[j]``, ``dweight[j] = sum_t dz[t]*h[t+j]``,
    ``dbias = sum_t dz[t]``; ``dh`` at the end of each sequence also gets ``dfinal`` (N, W-1, D).
    """
    xp = array_namespace(x)
    tokens = _tokens(xp, x, channel_last)
    where = segments(xp, tokens, weight.shape[1] - 1, seq_idx, cu_seqlens)
    wide = _wide(xp, x)
    history = None if initial_states is None else xp.astype(xp.permute_dims(initial_states, (0, 2, 1)), wide)
    dz = xp.astype(_tokens(xp, dy, channel_last), wide)
    if activation != "identity":
        z = _preactivation(xp, where, tokens, weight, bias, history)
        s = _sigmoid(xp, z)
        dz = dz * (s * (1 + z * (1 - s)))
    dz = _where(xp, where.member(), dz)
    heads = None if history is None else where.heads(dz)
    taps = _taps(xp, weight, wide)
    dx = _sum(shifted(xp, _where(xp, where.within(back), dz), -back) * tap for back, tap in enumerate(reversed(taps)))
    dhistory = None if heads is None else _sum(shifted(xp, heads, j) * tap for j, tap in enumerate(taps[:-1]))
    if dfinal is not None:
        to_tokens, to_history = where.from_tails(xp.astype(dfinal, wide))
        dx = dx + to_tokens
        dhistory = None if dhistory is None else dhistory + to_history
    return (
        _output(xp, dx, x.dtype, channel_last),
        xp.astype(_dweight(xp, where, dz, heads, xp.astype(tokens, wide), history, len(taps)), weight.dtype),
        None if bias is None else xp.astype(_sum_tokens(xp, dz), bias.dtype),
        None if dhistory is None else _output(xp, dhistory, x.dtype, channel_last=False),
    )


causal_conv1d_channel_last = partial(causal_conv1d, channel_last=True)
causal_conv1d_channel_last_backward = partial(causal_conv1d_backward, channel_last=True)


def _preactivation(xp: Any, where: Segments, tokens: Any, weight: Any, bias: Any, history: Any) -> Any:
    """Return ``z`` (B, T, D): the taps that fall into the history first, since those are the oldest."""
    wide = _wide(xp, tokens)
    taps, values = _taps(xp, weight, wide), xp.astype(tokens, wide)
    products = (_tap(xp, where, values, len(taps) - 1 - j) * tap for j, tap in enumerate(taps))
    if history is None:
        z = _sum(products)
    else:
        states = xp.astype(history, wide)
        before = _sum(shifted(xp, states, -j) * tap for j, tap in enumerate(taps[:-1]))
        z = _sum(chain([where.from_heads(before)], products))
    return z if bias is None else z + xp.astype(bias, wide)


def _dweight(xp: Any, where: Segments, dz: Any, heads: Any, values: Any, history: Any, width: int) -> Any:
    """Return the gradient of the filter, (D, W)."""
    columns = []
    for j in range(width):
        column = _sum_tokens(xp, dz * _tap(xp, where, values, width - 1 - j))
        if heads is not None and j < width - 1:
            column = column + _sum_tokens(xp, heads * shifted(xp, history, -j))
        columns.append(column)
    return xp.stack(columns, axis=1)


def _final_states(xp: Any, where: Segments, tokens: Any, history: Any) -> Any:
    if history is None:
        history = zeros(xp, tokens, (where.sequences, where.reach, where.channels))
    return _dense(xp, where.tails(tokens, history))


def _tokens(xp: Any, array: Any, channel_last: bool) -> Any:
    return array if channel_last else xp.permute_dims(array, (0, 2, 1))


def _output(xp: Any, tokens: Any, dtype: Any, channel_last: bool) -> Any:
    """Return (B, T, D) values in the layout and dtype of a result, row-major."""
    return _dense(xp, xp.astype(_tokens(xp, tokens, channel_last), dtype))


def _dense(xp: Any, array: Any) -> Any:
    return xp.reshape(xp.reshape(array, (prod(array.shape),)), array.shape)


def _wide(xp: Any, array: Any) -> Any:
    return xp.float64 if array.dtype == xp.float64 else xp.float32


def _taps(xp: Any, weight: Any, wide: Any) -> list[Any]:
    """Return the filter as W vectors (D,), oldest first."""
    values = xp.astype(weight, wide)
    return [values[:, j] for j in range(weight.shape[1])]


def _tap(xp: Any, where: Segments, values: Any, back: int) -> Any:
    """Return the tokens ``back`` before each token, zeros where the sequence has none."""
    return _where(xp, where.within(back), shifted(xp, values, back))


def _where(xp: Any, mask: Any, values: Any) -> Any:
    return values if mask is None else xp.where(mask, values, xp.zeros_like(values))


def _sum(terms: Iterable[Any]) -> Any:
    """Return the sum of arrays, first to last."""
    total = None
    for term in terms:
        total = term if total is None else total + term
    return total


def _sum_tokens(xp: Any, values: Any) -> Any:
    """Return the sum over all tokens, (D,), as a tree: its error grows with the logarithm of their number only."""
    batch, length, channels = values.shape
    count = batch * length
    rows, rest = xp.reshape(values, (count, channels)), zeros(xp, values, (channels,))
    while count > 1:
        half = count // 2
        if count % 2:
            rest = rest + rows[count - 1, :]
        rows = rows[:half, :] + rows[half : 2 * half, :]
        count = half
    return rest + rows[0, :] if count else rest


def _sigmoid(xp: Any, z: Any) -> Any:
    # 1/(1 + exp(-z)) without overflow: exp of the negative magnitude is at most 1.
    decay = xp.exp(-xp.abs(z))
    return xp.where(z >= 0, xp.ones_like(z), decay) / (1 + decay)
