"""Where the sequences of a call lie: one per batch row, packed by offsets, or labelled token by token.

Arrays of tokens are (B, T, D). "The head" of a sequence are its first ``reach`` tokens and "the tail" its last ones,
where ``reach = W-1`` is how far a filter looks back; both are (N, reach, D). Whatever the offsets hold, no index leaves
its array.
"""

from __future__ import annotations

from typing import Any

from array_api_compat import is_torch_array

__all__ = ["Labelled", "Packed", "Rows", "segments", "shifted", "zeros"]


class Rows:
    """Every batch row is one sequence."""

    def __init__(self, xp: Any, tokens: Any, reach: int) -> None:
        self.xp, self.reach = xp, reach
        self.sequences, self.length, self.channels = tokens.shape

    def member(self) -> Any:
        """Return which tokens belong to a sequence, to broadcast against (B, T, D); ``None``: all."""
        return None

    def within(self, back: int) -> Any:
        """Return which tokens have the token ``back`` before them in their own sequence; ``None``: all.

        It may count the first ``back`` tokens of a row in: :func:`shifted` has zeros there.
        """
        return None

    def heads(self, values: Any) -> Any:
        """Return the first tokens of each sequence, zeros where it is shorter."""
        kept = values[:, : self.reach, :]
        return self.xp.concat([kept, self._nothing(values, self.reach - kept.shape[1])], axis=1)

    def from_heads(self, heads: Any) -> Any:
        """Return the tokens that :meth:`heads` reads, with the values ``heads``, zeros elsewhere."""
        kept = heads[:, : self.length, :]
        return self.xp.concat([kept, self._nothing(heads, self.length - kept.shape[1])], axis=1)

    def tails(self, values: Any, before: Any) -> Any:
        """Return the last ``reach`` entries of each sequence behind its history ``before`` (N, reach, D)."""
        kept = values[:, max(0, self.length - self.reach) :, :]
        return self.xp.concat([before[:, min(self.length, self.reach) :, :], kept], axis=1)

    def from_tails(self, tails: Any) -> tuple[Any, Any]:
        """Return the tokens and the history that :meth:`tails` reads, with the values ``tails``, zeros elsewhere."""
        whole = self.xp.concat([self._nothing(tails, self.length), tails], axis=1)
        return whole[:, self.reach :, :], whole[:, : self.reach, :]

    def _nothing(self, like: Any, length: int) -> Any:
        return zeros(self.xp, like, (self.sequences, length, self.channels))


class Packed:
    """One batch row holds sequences one after the other; sequence ``n`` is ``[offsets[n], offsets[n+1])``."""

    def __init__(self, xp: Any, tokens: Any, reach: int, offsets: Any) -> None:
        self.xp, self.reach = xp, reach
        _, self.length, self.channels = tokens.shape
        self.sequences = offsets.shape[0] - 1
        limited = xp.clip(offsets, 0, self.length)
        self.starts, ends = limited[:-1], limited[1:]
        self.lengths = xp.where(ends > self.starts, ends - self.starts, xp.zeros_like(ends))
        at = self._range(self.length)
        count = xp.astype(xp.searchsorted(offsets, at, side="right"), offsets.dtype)  # offsets up to each token
        self.row = xp.clip(count - 1, 0, self.sequences - 1)
        self.position = at - xp.take(self.starts, self.row, axis=0)
        inside = (self.position >= 0) & (self.position < xp.take(self.lengths, self.row, axis=0))
        self._member = inside & (count >= 1) & (count <= self.sequences)

    def member(self) -> Any:
        """Return which tokens belong to a sequence."""
        return self._member[None, :, None]

    def within(self, back: int) -> Any:
        """Return which tokens have the token ``back`` before them in their own sequence."""
        return (self._member & (self.position >= back))[None, :, None]

    def heads(self, values: Any) -> Any:
        """Return the first tokens of each sequence, zeros where it is shorter."""
        step = self._range(self.reach)[None, :]
        return self._gather(values[0, ...], self.starts[:, None] + step, step < self.lengths[:, None])

    def from_heads(self, heads: Any) -> Any:
        """Return the tokens that :meth:`heads` reads, with the values ``heads``, zeros elsewhere."""
        return self._to_tokens(heads, self.position, self.position < self.reach)

    def tails(self, values: Any, before: Any) -> Any:
        """Return the last ``reach`` entries of each sequence behind its history ``before``."""
        step = self._range(self.reach)[None, :]
        entry = self.lengths[:, None] + step  # in the history and the tokens behind it
        is_token = entry >= self.reach
        tokens = self._gather(values[0, ...], self.starts[:, None] + entry - self.reach, is_token)
        return self.xp.where(is_token[..., None], tokens, self._of_each(before, entry))

    def from_tails(self, tails: Any) -> tuple[Any, Any]:
        """Return the tokens and the history that :meth:`tails` reads, with the values ``tails``, zeros elsewhere."""
        at = self.position - self.xp.take(self.lengths, self.row, axis=0) + self.reach
        entry = self._range(self.reach)[None, :] - self.lengths[:, None]
        return self._to_tokens(tails, at, at >= 0), self._of_each(tails, entry)

    def _to_tokens(self, table: Any, at: Any, read: Any) -> Any:
        """Return (1, T, D): the entry ``at`` of each token's sequence in a (N, reach, D) table, where ``read``."""
        index = self.row * self.reach + self.xp.clip(at, 0, self.reach - 1)
        return self._gather(self._flat(table), index[None, :], (self._member & read)[None, :])

    def _of_each(self, table: Any, entry: Any) -> Any:
        """Return (N, reach, D): the entries ``entry`` of each sequence in such a table, zeros outside of it."""
        first = self._range(self.sequences)[:, None] * self.reach
        inside = (entry >= 0) & (entry < self.reach)
        return self._gather(self._flat(table), first + self.xp.clip(entry, 0, self.reach - 1), inside)

    def _flat(self, table: Any) -> Any:
        return self.xp.reshape(table, (self.sequences * self.reach, self.channels))

    def _gather(self, rows: Any, index: Any, read: Any) -> Any:
        """Return ``rows[index]`` where ``read``, else zeros; the index may be anything there."""
        xp, shape = self.xp, (*index.shape, self.channels)
        nothing = zeros(xp, rows, shape)
        if rows.shape[0] == 0:
            return nothing
        flat = xp.reshape(xp.clip(index, 0, rows.shape[0] - 1), (index.shape[0] * index.shape[1],))
        return xp.where(read[..., None], xp.reshape(xp.take(rows, flat, axis=0), shape), nothing)

    def _range(self, stop: int) -> Any:
        return self.xp.arange(stop, dtype=self.starts.dtype, **_beside(self.starts))


class Labelled(Rows):
    """Tokens of one row belong together if their labels (B, T) are equal; a negative label means padding."""

    def __init__(self, xp: Any, tokens: Any, reach: int, labels: Any) -> None:
        super().__init__(xp, tokens, reach)
        self.labels = labels[..., None]

    def member(self) -> Any:
        """Return which tokens are no padding."""
        return self.labels >= 0

    def within(self, back: int) -> Any:
        """Return which tokens have the label of the token ``back`` before them, and are no padding."""
        return self.member() & (self.labels == shifted(self.xp, self.labels, back))


def segments(xp: Any, tokens: Any, reach: int, seq_idx: Any = None, cu_seqlens: Any = None) -> Rows | Packed:
    """Return the sequences of a call."""
    if seq_idx is not None:
        return Labelled(xp, tokens, reach, seq_idx)
    return Rows(xp, tokens, reach) if cu_seqlens is None else Packed(xp, tokens, reach, cu_seqlens)


def shifted(xp: Any, values: Any, back: int) -> Any:
    """Return the array whose token ``t`` is token ``t - back`` (``back`` may be negative), zeros where none is."""
    length = values.shape[1]
    if not back:
        return values
    missing = min(abs(back), length)
    gap = zeros(xp, values, (values.shape[0], missing, values.shape[2]))
    if back > 0:
        return xp.concat([gap, values[:, : length - missing, :]], axis=1)
    return xp.concat([values[:, missing:, :], gap], axis=1)


def zeros(xp: Any, like: Any, shape: tuple[int, ...]) -> Any:
    """Return zeros with the dtype of ``like``, on its device."""
    return xp.zeros(shape, dtype=like.dtype, **_beside(like))


def _beside(array: Any) -> dict[str, Any]:
    """Return the keyword that makes a new array where ``array`` is; numpy and JAX need none."""
    return {"device": array.device} if is_torch_array(array) else {}
