"""The compressor of CSA and HCA, gated pooling of blocks of tokens, and its gradient, on arrays of any framework."""

from __future__ import annotations

from typing import Any, NamedTuple

from array_api_compat import array_namespace, device

__all__ = ["csa_compressor_backward", "csa_compressor_forward"]

IN_ORDER = 8
"""Windows of so many entries are summed one by one."""


def csa_compressor_forward(
    kv: Any,
    score: Any,
    ape: Any,
    cu_seqlens: Any,
    cu_seqlens_comp: Any,
    *,
    ratio: int,
    head_dim: int,
    coff: int,
    total_comp: int,
    compute: str = "float32",
) -> tuple[Any]:
    """Pool each block of ``ratio`` tokens of each sequence by a softmax over its window, channel by channel.

    With ``coff`` 1 the window of a block is the block. With 2 it is the block before it (columns below ``head_dim``),
    if there is one, and the block (the other columns). ``x_k = score_k + ape_k``, ``p = softmax(x)``,
    ``out = sum of kv_k * p_k``, rounded once.

    Parameters
    ----------
    kv, score
        (T, coff * head_dim): the tokens of all sequences.
    ape
        (ratio, coff * head_dim): added to the scores by place in the block.
    cu_seqlens, cu_seqlens_comp
        (B + 1,): where the tokens, and the blocks, of each sequence start.
    ratio, head_dim, coff
        Tokens of a block; channels of a result; blocks of a window.
    total_comp
        Rows of the result. Those that no sequence has are a first block from token ``cu_seqlens[0]``.
    compute
        dtype of the arithmetic: ``"float32"`` as the contract says, ``"float64"`` for an oracle.

    Returns
    -------
    tuple
        ``(out,)``, (total_comp, head_dim), dtype of kv.
    """
    xp = array_namespace(kv)
    if total_comp == 0:
        return (xp.zeros((0, head_dim), dtype=kv.dtype, device=device(kv)),)
    window = _window(kv, score, ape, cu_seqlens, cu_seqlens_comp, ratio, head_dim, coff, total_comp, compute)
    return (xp.astype(_sum(window.values * window.weights), kv.dtype),)


def csa_compressor_backward(
    grad_out: Any,
    kv: Any,
    score: Any,
    ape: Any,
    cu_seqlens: Any,
    cu_seqlens_comp: Any,
    *,
    ratio: int,
    head_dim: int,
    coff: int,
    compute: str = "float32",
) -> tuple[Any, Any, Any]:
    """Return the gradients of kv, score and ape.

    ``y_k = (go * kv_k) * p_k``, ``ds_k = y_k - p_k * sum of y``, ``dkv_k = go * p_k``; what no window has gets 0.

    Parameters
    ----------
    grad_out
        (total_comp, head_dim). Rows that no sequence has do not count, whatever they hold.
    kv, score, ape, cu_seqlens, cu_seqlens_comp, ratio, head_dim, coff, compute
        As given to the forward.

    Returns
    -------
    tuple
        ``grad_kv`` and ``grad_score`` of the dtype of kv, ``grad_ape`` of the dtype of ape.
    """
    xp = array_namespace(kv)
    rows = grad_out.shape[0]
    if rows == 0:
        return xp.zeros_like(kv), xp.zeros_like(score), xp.zeros_like(ape)
    window = _window(kv, score, ape, cu_seqlens, cu_seqlens_comp, ratio, head_dim, coff, rows, compute)
    real = xp.reshape(window.is_real, (-1, 1, 1))
    go = xp.astype(xp.expand_dims(grad_out, axis=1), window.values.dtype)
    go = xp.where(real, go, xp.zeros_like(go))
    y = (go * window.values) * window.weights
    ds = y - window.weights * xp.expand_dims(_sum(y), axis=1)
    dkv = go * window.weights
    ds, dkv = (xp.where(real & window.is_valid, a, xp.zeros_like(a)) for a in (ds, dkv))
    places = _places(cu_seqlens, cu_seqlens_comp, kv.shape[0], rows, ratio, coff)
    grad_kv, grad_score = (xp.astype(_taken(a, places), kv.dtype) for a in (dkv, ds))
    grad_ape = xp.sum(ds, axis=0)  # (coff * ratio, head_dim)
    halves = [grad_ape[part * ratio : (part + 1) * ratio, :] for part in range(coff)]
    return grad_kv, grad_score, xp.astype(xp.concat(halves, axis=-1), ape.dtype)


class Window(NamedTuple):
    """The windows of all rows: values, weights and whether an entry is there, (rows, coff * ratio, head_dim or 1); and
    whether a sequence has the row."""

    values: Any
    weights: Any
    is_valid: Any
    is_real: Any


def _window(
    kv: Any,
    score: Any,
    ape: Any,
    cu_seqlens: Any,
    cu_seqlens_comp: Any,
    ratio: int,
    head_dim: int,
    coff: int,
    rows: int,
    compute: str,
) -> Window:
    xp = array_namespace(kv)
    real = getattr(xp, compute)
    where = device(kv)
    number, segments = xp.arange(rows, dtype=xp.int32, device=where), cu_seqlens.shape[0] - 1
    starts, comp = xp.astype(cu_seqlens, xp.int32), xp.astype(cu_seqlens_comp, xp.int32)
    segment = xp.searchsorted(comp, number, side="right") - 1
    is_real = (segment >= 0) & (segment < segments)
    segment = xp.where(is_real, segment, xp.zeros_like(segment))
    block = xp.where(is_real, number - xp.take(comp, segment, axis=0), xp.zeros_like(number))
    first = xp.take(starts, segment, axis=0) + block * ratio
    entry = xp.arange(coff * ratio, dtype=xp.int32, device=where)
    back = coff - 1 - entry // ratio  # blocks before the row's own
    tokens = first[:, None] + (entry % ratio - back * ratio)[None, :]
    index = xp.clip(tokens, 0, kv.shape[0] - 1)
    is_valid = xp.expand_dims(block[:, None] >= back[None, :], axis=-1)

    def gathered(array: Any) -> Any:
        parts = [array[:, part * head_dim : (part + 1) * head_dim] for part in range(coff)]
        each = [
            xp.reshape(
                xp.take(a, xp.reshape(index[:, part * ratio : (part + 1) * ratio], (-1,)), axis=0),
                (rows, ratio, head_dim),
            )
            for part, a in enumerate(parts)
        ]
        return xp.astype(xp.concat(each, axis=1), real)

    bias = xp.concat([ape[:, part * head_dim : (part + 1) * head_dim] for part in range(coff)], axis=0)
    x = gathered(score) + xp.astype(bias, real)[None, ...]
    x = xp.where(is_valid, x, xp.full_like(x, -float("inf")))
    e = xp.exp(x - xp.max(x, axis=1, keepdims=True))
    e = xp.where(is_valid, e, xp.zeros_like(e))
    values = gathered(kv)
    values = xp.where(is_valid, values, xp.zeros_like(values))
    return Window(values, e / xp.expand_dims(_sum(e), axis=1), is_valid, is_real)


def _sum(terms: Any) -> Any:
    """Return the sum over the entries of each window: short ones in order."""
    xp = array_namespace(terms)
    if terms.shape[1] > IN_ORDER:
        return xp.sum(terms, axis=1)
    total = terms[:, 0, :]
    for k in range(1, terms.shape[1]):
        total = total + terms[:, k, :]
    return total


def _places(cu_seqlens: Any, cu_seqlens_comp: Any, tokens: int, rows: int, ratio: int, coff: int) -> list[Any]:
    """Return for each part of the columns the entry (row * coff * ratio + k) that has each token, -1 for none."""
    xp = array_namespace(cu_seqlens)
    number, segments = xp.arange(tokens, dtype=xp.int32, device=device(cu_seqlens)), cu_seqlens.shape[0] - 1
    starts, comp = xp.astype(cu_seqlens, xp.int32), xp.astype(cu_seqlens_comp, xp.int32)
    segment = xp.searchsorted(starts, number, side="right") - 1
    inside = (segment >= 0) & (segment < segments)
    segment = xp.where(inside, segment, xp.zeros_like(segment))
    offset = number - xp.take(starts, segment, axis=0)
    start = xp.take(comp, segment, axis=0)
    stop = xp.clip(xp.take(comp, xp.clip(segment + 1, 0, segments), axis=0), 0, rows)
    found = []
    for part in range(coff):
        row = start + offset // ratio + (coff - 1 - part)
        entry = row * (coff * ratio) + (part * ratio + offset % ratio)
        there = inside & (row < stop) & (row >= 0)
        found.append(xp.where(there, entry, xp.full_like(entry, -1)))
    return found


def _taken(entries: Any, places: list[Any]) -> Any:
    """Return the gradients of the tokens, (T, coff * head_dim)."""
    xp = array_namespace(entries)
    flat = xp.reshape(entries, (-1, entries.shape[-1]))
    parts = []
    for place in places:
        values = xp.take(flat, xp.clip(place, 0, flat.shape[0] - 1), axis=0)
        parts.append(xp.where(xp.expand_dims(place >= 0, axis=-1), values, xp.zeros_like(values)))
    return xp.concat(parts, axis=-1)
