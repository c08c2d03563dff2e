"""What the kernels of the CSA compressor share: where a row's window lies, its entries in registers, sums over it.

Offsets are the caller's data: whatever they hold, nothing here reads outside an array.

Functions marked ``cute.jit`` branch or loop on the device; the others only compose while compiling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from fe_attention.planning.csa import Launch, Problem
from fe_runtime.cute.memory import access_bits, load_atom
from fe_runtime.cute.reduce import WARP

__all__ = [
    "Entry",
    "Place",
    "Setup",
    "exchange",
    "maxima",
    "place_of",
    "segment_of",
    "totals",
    "values_of",
    "weights_of",
]

FEW = 16
"""Offsets that are read at once rather than one after the other."""
LOG2_E = 1.4426950408889634
MINUS_INFINITY = float("-inf")


@dataclass(frozen=True, slots=True)
class Setup:
    """All that is static in a compilation."""

    problem: Problem
    launch: Launch

    @property
    def share(self) -> int:
        """Entries of a thread."""
        return self.launch.share(self.problem)

    @property
    def vectors(self) -> int:
        """Vectors of a row of the result."""
        return self.problem.head_dim // self.launch.vector

    def atom(self, dtype: type[cutlass.Numeric]) -> cute.CopyAtom:
        """Return the load of a vector."""
        return load_atom(dtype, self.bits(dtype))

    def bits(self, dtype: type[cutlass.Numeric]) -> int:
        """Bits of one access to a vector."""
        vector = self.launch.vector
        return access_bits(dtype, vector, min(16, vector * dtype.width // 8))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a thread works: its vector of channels, whether that is one, its part of a window, its row of the block."""

    index: Int32
    inside: Boolean | bool
    group: Int32 | int
    slot: Int32

    @staticmethod
    def of(setup: Setup, tile: Int32) -> Place:
        """Return the calling thread's place in a tile of channels; threads past the end have the last vector."""
        how = setup.launch
        thread, _, _ = cute.arch.thread_idx()
        index = tile * how.across + thread % how.across
        whole = how.tiles(setup.problem) * how.across == setup.vectors
        inside = True if whole else index < setup.vectors
        group = 0 if how.groups == 1 else thread // how.across % how.groups
        slot = thread // (how.across * how.groups)
        return Place(index if whole else cutlass.min(index, setup.vectors - 1), inside, group, slot)


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a window: its token, its number among the vectors of the token, its place in the block and whether
    it is there at all, which is known while compiling if every one is."""

    token: Int64
    vector: Int32
    k: Int32 | int
    exists: Boolean | bool

    @staticmethod
    def of(setup: Setup, place: Place, number: int, first: Int64, reaches_back: Boolean) -> Entry:
        """Return the thread's entry ``number`` of the window whose block starts at token ``first``."""
        problem, groups = setup.problem, setup.launch.groups
        back = problem.coff == 2
        if groups == 1:
            before = back and number < problem.ratio
            k: Any = number - (problem.ratio if back and not before else 0)
            token = first + (k - problem.ratio if before else k)
            column = place.index if before or not back else place.index + setup.vectors
            exists: Any = reaches_back if before else True
            return Entry(cutlass.select_(exists, token, first) if before else token, column, k, exists)
        at = place.group + number * groups
        is_entry: Any = True if (number + 1) * groups <= problem.entries else at < problem.entries
        if not back:
            exists = is_entry
            k = at if is_entry is True else cutlass.min(at, problem.ratio - 1)
            return Entry(first + k, place.index, k, exists)
        own = at >= problem.ratio
        exists = (own | reaches_back) if is_entry is True else (own | reaches_back) & is_entry
        k = cutlass.select_(own, at - problem.ratio, at)
        k = k if is_entry is True else cutlass.min(k, problem.ratio - 1)
        token = first + cutlass.select_(own, k, k - problem.ratio)
        column = place.index + cutlass.select_(own, Int32(setup.vectors), Int32(0))
        return Entry(cutlass.select_(exists, token, first), column, k, exists)

    def load(self, setup: Setup, array: cute.Tensor) -> cute.Tensor:
        """Return the entry's vector of an array of tokens; of one that is not there, some other."""
        return _vector(setup, array[self.token, None], self.vector)

    def bias(self, setup: Setup, ape: cute.Tensor) -> cute.Tensor:
        """Return the entry's vector of the bias."""
        return _vector(setup, ape[self.k, None], self.vector)


def _vector(setup: Setup, row: cute.Tensor, number: Int32) -> cute.Tensor:
    values = cute.make_rmem_tensor((setup.launch.vector,), row.element_type)
    cute.copy(setup.atom(row.element_type), cute.local_tile(row, (setup.launch.vector,), (number,)), values)
    return values


def weights_of(
    setup: Setup, entries: list[Entry], scores: list[cute.Tensor], ape: cute.Tensor, scratch: cute.Tensor | None
) -> tuple[list[list[Float32]], list[Float32]]:
    """Return ``exp(x - max x)`` of each of a thread's entries, and its sum over the window, for each channel."""
    x = []
    for entry, score in zip(entries, scores, strict=True):
        s, b = score.load().to(Float32), entry.bias(setup, ape).load().to(Float32)
        values = [s[n] + b[n] for n in range(setup.launch.vector)]
        if entry.exists is not True:
            values = [cutlass.select_(entry.exists, value, Float32(MINUS_INFINITY)) for value in values]
        x.append(values)
    top = maxima(setup, x, scratch)
    found = []
    for entry, values in zip(entries, x, strict=True):
        e = [_exp(value - most) for value, most in zip(values, top, strict=True)]
        if entry.exists is not True:
            e = [cutlass.select_(entry.exists, value, Float32(0.0)) for value in e]
        found.append(e)
    return found, totals(setup, found, scratch, 1)


def values_of(setup: Setup, entry: Entry, loaded: cute.Tensor) -> list[Float32]:
    """Return an entry's vector in float32; 0 for one that is not there."""
    values = loaded.load().to(Float32)
    found = [values[n] for n in range(setup.launch.vector)]
    if entry.exists is True:
        return found
    return [cutlass.select_(entry.exists, value, Float32(0.0)) for value in found]


def _exp(value: Float32) -> Float32:
    """Return ``exp(value)`` for values <= 0, NaN for NaN: an error of ``2^-22 + |value| * 2^-23``, relative."""
    return cute.math.exp2(value * Float32(LOG2_E), approx=True, ftz=True)


# ---- over a window


def exchange(setup: Setup) -> cute.Tensor | None:
    """Return shared memory for three meetings of the threads of a window, if there are several."""
    how = setup.launch
    if how.groups == 1:
        return None
    layout = cute.make_layout((how.vector, how.across, how.threads // WARP, 3))
    return cutlass.memory.SmemAllocator().allocate_tensor(Float32, layout, byte_alignment=16)


def maxima(setup: Setup, terms: list[list[Float32]], scratch: cute.Tensor | None) -> list[Float32]:
    """Return for each channel the largest value over the window; NaN counts only where all are."""
    return _together(setup, terms, cute.arch.fmax, scratch, 0)


def totals(setup: Setup, terms: list[list[Float32]], scratch: cute.Tensor | None, turn: int) -> list[Float32]:
    """Return for each channel the sum over the window, in order where one thread has it."""
    return _together(setup, terms, lambda a, b: a + b, scratch, turn)


def _together(
    setup: Setup,
    terms: list[list[Float32]],
    combine: Callable[[Any, Any], Any],
    scratch: cute.Tensor | None,
    turn: int,
) -> list[Float32]:
    found = terms[0]
    for values in terms[1:]:
        found = [combine(a, b) for a, b in zip(found, values, strict=True)]
    if scratch is None:
        return found
    how = setup.launch
    offset = how.across
    while offset < WARP:
        found = [combine(a, cute.arch.shuffle_sync_bfly(a, offset)) for a in found]
        offset *= 2
    warps = how.across * how.groups // WARP
    if warps == 1:
        return found
    return _over_warps(how.across, warps, found, combine, scratch[None, None, None, turn])


@cute.jit
def _over_warps(
    across: cutlass.Constexpr[int],
    warps: cutlass.Constexpr[int],
    values: list[Float32],
    combine: cutlass.Constexpr[Any],
    scratch: cute.Tensor,
) -> list[Float32]:
    """Return the values of the warps of a window, combined in order. Uses of the same place are two barriers apart."""
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    if lane < across:
        for n in cutlass.range_constexpr(len(values)):
            scratch[n, lane, warp] = values[n]
    cute.arch.sync_threads()
    return _combined(values, combine, scratch, lane % across, warp // warps * warps, warps)


def _combined(
    values: list[Float32],
    combine: Callable[[Any, Any], Any],
    scratch: cute.Tensor,
    lane: Int32,
    first: Int32,
    warps: int,
) -> list[Float32]:
    found: list[Any] = []
    for number in range(warps):
        part = scratch[None, lane, first + number].load()
        parts = [part[n] for n in range(len(values))]
        found = [combine(a, b) for a, b in zip(found, parts, strict=True)] if found else parts
    return found


# ---- which sequence


@cute.jit
def place_of(
    cu_seqlens: cute.Tensor,
    cu_seqlens_comp: cute.Tensor,
    row: Int32,
    tokens: Int64,
    ratio: cutlass.Constexpr[int],
) -> tuple[Int64, Boolean, Boolean]:
    """Return the first token of a row's block, whether there is a block before it in its sequence, and whether a
    sequence has the row. The first token is one from which a whole block fits."""
    number, start = segment_of(cu_seqlens_comp, row)
    segments = Int32(cu_seqlens_comp.shape[0]) - 1
    is_real = (start <= row) & (row < cu_seqlens_comp[segments]) & (number < segments)
    block = cutlass.select_(is_real, row - start, Int32(0))
    number = cutlass.select_(is_real, number, Int32(0))
    first = Int64(cu_seqlens[number]) + Int64(block) * ratio
    first = cutlass.max(cutlass.min(first, tokens - ratio), Int64(0))
    return first, (block > 0) & (first >= ratio), is_real


@cute.jit
def segment_of(offsets: cute.Tensor, position: Int32) -> tuple[Int32, Int32]:
    """Return the last of the offsets that is not after a position, or the first one; its number and value.

    Bisection down to a few, which are read at once.
    """
    low, high = Int32(0), Int32(offsets.shape[0])
    while high - low > FEW:
        middle = (low + high) >> 1
        if offsets[middle] <= position:
            low = middle
        else:
            high = middle
    number, value = low, offsets[low]
    for n in cutlass.range_constexpr(1, FEW):
        at = low + n
        found = offsets[cutlass.min(at, Int32(offsets.shape[0]) - 1)]
        is_later = (at < high) & (found <= position)
        number = cutlass.select_(is_later, at, number)
        value = cutlass.select_(is_later, found, value)
    return number, value
