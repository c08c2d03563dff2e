"""What experts' tensor maps have of their own, in gradients of experts' weights, and how a warp writes one.

Maps are read from a table, see :mod:`.tensor_maps`. In those of the operands the tokens end with the expert's, so what
belongs to the next one arrives as zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

__all__ = ["KINDS", "ExpertMap", "write_map"]

KINDS = ("tokens", "ragged", "addressed")

TOKENS = 8
"""16-bit values in 16 bytes, of which TMA wants addresses and strides to be multiples."""


@dataclass(frozen=True, slots=True)
class ExpertMap:
    """An array's maps.

    Parameters
    ----------
    kind
        ``"tokens"``: of an operand (R, T). ``"ragged"``: of an operand (R, T) of 16-bit values, tokens contiguous,
        where those of each expert are a compact matrix (R, T_e), one after the other. ``"addressed"``: of a result that
        has an address for each expert.
    atom
        The launch's own TMA copy.
    array
        The array as TMA sees it.
    given
        Nothing; the address of the first expert's matrix; int64 (E,), the addresses.
    """

    kind: str
    atom: cute.CopyAtom
    array: cute.Tensor
    given: Any = None

    def fields(self, expert: Int32, first: Int32, tokens: Int32) -> dict[str, Any]:
        """Return the fields that differ for an expert, as PTX names them, and their values.

        No extent is 0, which would stand for 2^32: what begins at the end of nothing must not be read.
        """
        if self.kind == "addressed":
            return {"global_address": self.given[expert]}
        row, token, _ = self.array.stride
        if self.kind == "tokens":
            return {f"global_dim {token.mode[0]}": cutlass.max(first + tokens, 1)}
        return self._ragged_fields(first, tokens, row.mode[0], token.mode[0])

    def is_readable(self, first: Int32, tokens: Int32) -> Boolean | bool:
        """Whether TMA can read what belongs to an expert: along the contiguous dimension it starts at multiples of 16
        bytes only."""
        if self.kind == "addressed":
            return True
        if self.kind == "ragged":
            return (Int64(self.array.shape[0]) * first % TOKENS == 0) & (tokens % TOKENS == 0)
        tokens_are_contiguous = self.array.stride[1].mode[0] == 0
        return first % TOKENS == 0 if tokens_are_contiguous else True

    def _ragged_fields(self, first: Int32, tokens: Int32, row: int, token: int) -> dict[str, Any]:
        """Return the fields for a matrix of its own.

        TMA wants it and its rows to start at multiples of 16 bytes. Where they do not, see :meth:`is_readable`, the map
        begins and goes on with the nearest ones before, and reaches only over the expert's own values.
        """
        rows = self.array.shape[0]
        line = cutlass.max(tokens // TOKENS, 1)
        fitting = cutlass.max(Int64(rows) * tokens // (Int64(line) * TOKENS), 1)
        return {
            "global_address": self.given + Int64(rows) * first // TOKENS * (2 * TOKENS),
            f"global_dim {token}": cutlass.max(tokens, 1),
            f"global_dim {row}": Int32(cutlass.min(fitting, rows)),
            f"global_stride {token}": Int64(line) * (2 * TOKENS),
        }


def write_map(atom: cute.CopyAtom, fields: dict[str, Any], draft: cute.Pointer, target: cute.Pointer) -> None:
    """Write the map of a copy with other fields; called by a warp.

    ``draft``: 128 bytes of zeros in shared memory, of which a copy fills only the half in which something is.
    """
    _write_draft(atom, fields, draft)
    cute.arch.sync_warp()
    cpasync.cp_fence_tma_desc_release(target, draft)


@cute.jit
def _write_draft(atom: cute.CopyAtom, fields: dict[str, Any], draft: cute.Pointer) -> None:
    """Copy a map to shared memory and replace what differs, in one thread."""
    with cute.arch.elect_one():
        cpasync.copy_tensormap(atom, draft)
        for name, value in fields.items():
            field, *ordinal = name.split()
            place = "".join(f", {number}" for number in ordinal)
            cute.arch.inline_ptx(
                f"tensormap.replace.tile.{field}.shared::cta.b1024.b{value.width} [{{$r0}}]{place}, {{$r1}};",
                read_only_args=[draft.toint(), value],
            )
