"""What the tiles of W have to know of their expert, found on the device before the product.

One warp for each expert writes its maps, and its record: number, first token, tokens, factor of W. Records are in the
order of descending tokens; an expert's place in it is the number of those that have more. So no warp needs another one.

Sizes of groups that make no sense lead to no access outside the arrays: an end is at least the one before it, and at
most T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from fe_gemm.planning.grouped import MAP_BYTES
from fe_gemm.planning.grouped_wgrad import GROUP_BYTES, MAPS, TOKENS
from fe_runtime.cute.memory import load_atom, store_atom

from .tensor_maps import TensorMaps, group_end
from .wgrad_maps import ExpertMap, write_map

__all__ = ["Group", "Groups", "launch_groups"]

_WORDS = GROUP_BYTES // 4


@dataclass(frozen=True, slots=True)
class Group:
    """What a tile has to know of its expert.

    Where there are no ``tokens``, :meth:`start` lies behind all that the expert's maps reach, so that zeros arrive.
    """

    expert: Int32
    first: Int32
    tokens: Int32
    factor: Float32

    def start(self, contiguous: bool, ragged: bool) -> Int32:
        """Return where the tokens begin in an operand.

        Where tokens are ``contiguous`` it is a multiple of 16 bytes, whatever the sizes of the groups: TMA traps at
        other places.
        """
        none = 1 - cutlass.min(self.tokens, 1)
        start = none if ragged else cutlass.max(self.first, none)
        if contiguous:
            start = (start + none * (TOKENS - 1)) // TOKENS * TOKENS
        return start

    def steps(self, depth: int) -> Int32:
        """Return the slots that a tile takes: one, of zeros, where there is nothing to add."""
        return cutlass.max((self.tokens + (depth - 1)) // depth, 1)


@dataclass(frozen=True, slots=True)
class Groups:
    """The records in a workspace (words, experts + 2), behind the tensor maps; :attr:`occupied` and :attr:`counter` are
    the last ones."""

    records: cute.Tensor

    @classmethod
    def of(cls, workspace: cute.Tensor, experts: Int32) -> Groups:
        """Return the records in a workspace of :func:`fe_gemm.planning.grouped_wgrad.workspace_bytes`."""
        address = workspace.iterator.toint() + Int64(experts) * (MAP_BYTES * len(MAPS))
        start = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=GROUP_BYTES)
        return cls(cute.make_tensor(start, cute.make_layout((_WORDS, experts + 2), stride=(1, _WORDS))))

    def at(self, place: Int32) -> Group:
        """Return the expert with the ``place``-th most tokens."""
        words = self._read(place)
        expert, first, tokens = (cute.arch.make_warp_uniform(words[i]) for i in range(3))
        return Group(expert, first, tokens, words[3].bitcast(Float32))

    @property
    def occupied(self) -> Int32:
        """How many experts have tokens."""
        return self._read(self._experts)[0]

    @property
    def counter(self) -> cute.Pointer:
        """A counter that is 0 when the records are written."""
        return self.records.iterator + (self._experts + 1) * _WORDS

    @property
    def _experts(self) -> Int32:
        return cute.size(self.records, mode=[1]) - 2

    def write(self, place: Int32, words: tuple[Int32, Int32, Int32, Int32]) -> None:
        """Write a record."""
        values = cute.make_rmem_tensor((_WORDS,), Int32)
        for i, word in enumerate(words):
            values[i] = word
        cute.copy(store_atom(Int32, 8 * GROUP_BYTES), values, self.records[None, place])

    def _read(self, place: Int32) -> cute.Tensor:
        words = cute.make_rmem_tensor((_WORDS,), Int32)
        cute.copy(load_atom(Int32, 8 * GROUP_BYTES), self.records[None, place], words)
        return words


def launch_groups(
    offsets: cute.Tensor,
    tokens: Int32,
    scales: tuple[cute.Tensor, ...],
    maps: tuple[ExpertMap, ...],
    workspace: cute.Tensor,
    stream: Any,
) -> None:
    """Launch what fills a workspace; called by a launcher.

    Parameters
    ----------
    offsets
        int32 (E,): the ends of the groups.
    tokens
        T.
    scales
        Arrays (E,), whose product is the factor of W; none: 1.
    maps
        Arrays that have maps, in the order of the table.
    workspace
        Of :func:`fe_gemm.planning.grouped_wgrad.workspace_bytes`.
    """
    kinds = tuple(entry.kind for entry in maps)
    parts = tuple((entry.atom, entry.array, *(() if entry.given is None else (entry.given,))) for entry in maps)
    groups_kernel.set_name_prefix("fe_gemm_wgrad_groups", remove_cutlass_symbol=True, keep_mangled_name=False)
    groups_kernel(kinds, offsets, tokens, scales, parts, workspace).launch(
        grid=(offsets.shape[0], 1, 1), block=(32, 1, 1), stream=stream
    )


@cute.kernel
def groups_kernel(
    kinds: cutlass.Constexpr[tuple[str, ...]],
    offsets: cute.Tensor,
    tokens: Int32,
    scales: tuple[cute.Tensor, ...],
    parts: tuple[Any, ...],
    workspace: cute.Tensor,
) -> None:
    """Write the record and the maps of the expert that has the block's number; a block is a warp."""
    lane, (expert, _, _) = cute.arch.lane_idx(), cute.arch.block_idx()
    experts = offsets.shape[0]
    words = len(kinds) * MAP_BYTES // 4
    drafts = cutlass.memory.SmemAllocator().allocate_array(Int32, words, byte_alignment=MAP_BYTES)
    for i in cutlass.range(lane, words, 32):
        cute.make_tensor(drafts, cute.make_layout(words))[i] = Int32(0)
    cute.arch.sync_warp()
    end = cutlass.min(group_end(offsets, expert, lane), tokens)
    first = cutlass.min(group_end(offsets, expert - 1, lane), tokens)
    readable = Boolean(True)
    for number, (kind, part) in enumerate(zip(kinds, parts, strict=True)):
        own = ExpertMap(kind, *part)
        readable = readable & own.is_readable(first, end - first)
        target = TensorMaps.of(workspace, experts, number).pointer(expert)
        write_map(own.atom, own.fields(expert, first, end - first), drafts + number * MAP_BYTES // 4, target)
    own_tokens = (expert, first, end - first)
    _write_record(offsets, tokens, scales, Groups.of(workspace, experts), own_tokens, readable, lane)


@cute.jit
def _write_record(
    offsets: cute.Tensor,
    tokens: Int32,
    scales: tuple[cute.Tensor, ...],
    groups: Groups,
    own: tuple[Int32, Int32, Int32],
    readable: Boolean,
    lane: Int32,
) -> None:
    """Write the record of an expert (number, first token, tokens), and the first one those of all."""
    expert, first, size = own
    place, occupied = _rank(offsets, tokens, size, expert, lane)
    factor = Float32(1.0)
    if cutlass.const_expr(len(scales) > 0):
        if size > 0:  # without tokens, W is 0, whatever the factor
            factor = scales[0][expert] * scales[1][expert]
    if (size > 0) & ~readable:
        factor = Float32(float("nan"))
    if lane == 0:
        groups.write(place, (expert, first, size, factor.bitcast(Int32)))
        if expert == 0:
            nothing = Int32(0)
            groups.write(offsets.shape[0], (occupied, nothing, nothing, nothing))
            groups.write(offsets.shape[0] + 1, (nothing, nothing, nothing, nothing))


@cute.jit
def _rank(offsets: cute.Tensor, tokens: Int32, size: Int32, expert: Int32, lane: Int32) -> tuple[Int32, Int32]:
    """Return how many experts come before one with ``size`` tokens, and how many have tokens; called by a warp."""
    before, occupied, last = Int32(0), Int32(0), Int32(0)
    for base in cutlass.range(0, offsets.shape[0], 32, unroll=1):
        end = Int32(0)
        if base + lane < offsets.shape[0]:
            end = offsets[base + lane]
        end = _running_maximum(cutlass.max(end, last), lane)
        start = cute.arch.shuffle_sync_up(end, 1)
        if lane == 0:
            start = last
        last = cute.arch.shuffle_sync(end, 31)
        other = cutlass.min(end, tokens) - cutlass.min(start, tokens)
        precedes = (other > size) | ((other == size) & (base + lane < expert))
        before = before + cute.arch.popc(cute.arch.vote_ballot_sync(precedes))
        occupied = occupied + cute.arch.popc(cute.arch.vote_ballot_sync(other > 0))
    return before, occupied


def _running_maximum(value: Int32, lane: Int32) -> Int32:
    """Return the largest value of the lanes up to the calling one."""
    for distance in (1, 2, 4, 8, 16):  # a lane whose source does not exist gets its own value
        value = cutlass.max(value, cute.arch.shuffle_sync_up(value, distance))
    return value
