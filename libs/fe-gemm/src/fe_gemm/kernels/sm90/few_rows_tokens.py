"""Warps that bring tokens: from global memory, through registers, into a slot as an operand in float16."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, cute

from fe_gemm.kernels.blocked import WORD_ROWS, scale_atoms
from fe_gemm.planning.scaled_few_rows import CHUNKS, SLOT_BYTES
from fe_runtime.cute.convert import e8m0_to_f32
from fe_runtime.cute.memory import load_atom
from fe_runtime.cute.pipeline import Position

from .few_rows_shared import Setup, Shared, Work
from .few_rows_values import folded_factor, operand_words, strange_bytes

__all__ = ["bring_tokens"]


@cute.jit
def bring_tokens(
    setup: cutlass.Constexpr[Setup],
    work: Work,
    shared: Shared,
    a: cute.Tensor,
    sfa: cute.Tensor,
    number: Int32,
    lane: Int32,
) -> None:
    """Fill the part of the tokens of every slot whose number is ``number`` or that and a multiple of the converters."""
    how = setup.launch
    own = (work.items - work.first + (work.stride - 1)) // work.stride  # items of this block
    tokens = Tokens.of(setup, work, a, sfa, lane)
    at = Position.of_producer(how.slots).ahead(number)
    for step in cutlass.range(number, own * work.steps, how.converters, unroll=1):
        _, slice_ = work.place(work.first + step // work.steps * work.stride)
        column = slice_ * work.steps + step % work.steps
        loaded = tokens.load(column, 0)
        cute.arch.mbarrier_wait(shared.ring.empty + at.slot, at.parity)
        tokens.store(shared, at.slot, 0, *loaded)
        for first in cutlass.range_constexpr(setup.together, setup.problem.blocks, setup.together):
            tokens.store(shared, at.slot, first, *tokens.load(column, first))
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(shared.ring.full + at.slot)
        at = at.ahead(Int32(how.converters))


@dataclass(frozen=True, slots=True)
class Tokens:
    """A lane's view of the tokens: bytes (tokens, bytes of K) and scales (quarter, row of a quarter, column).

    Lane 4 g + t brings, of token g of every block and of every chunk, bytes 8 t to 8 t + 7.
    """

    setup: Setup
    work: Work
    codes: cute.Tensor
    scales: cute.Tensor
    lane: Int32

    @staticmethod
    def of(setup: Setup, work: Work, a: cute.Tensor, sfa: cute.Tensor, lane: Int32) -> Tokens:
        """Return the view of a lane."""
        problem = setup.problem
        count, held, _ = a.shape
        atoms = scale_atoms(sfa, (count, held * 8 // problem.bits, 1), problem.vec)
        return Tokens(setup, work, a[None, None, 0], atoms[None, None, None, 0, 0], lane)

    def blocks(self, first: int) -> range:
        """Return the numbers of the blocks that are brought together with the ``first``."""
        return range(first, min(first + self.setup.together, self.setup.problem.blocks))

    def load(self, step: Int32, first: int) -> tuple[cute.Tensor, cute.Tensor]:
        """Return codes (2 words, block, chunk) and scales (words) of some blocks; zeros where there are none.

        Scales that are multiplied into the values are those of the lane's codes; others, one for each token of a lane.
        """
        problem, blocks = self.setup.problem, self.blocks(first)
        codes = cute.make_rmem_tensor((2, len(blocks), CHUNKS), Int32)
        scales = cute.make_rmem_tensor((len(blocks) * CHUNKS if problem.folds else 1,), Int32)
        for i, block in enumerate(blocks):
            token = block * 8 + self.lane // 4
            for chunk in range(CHUNKS):
                self._load_codes(codes[None, i, chunk], token, step, chunk)
                if problem.folds:
                    scales[i * CHUNKS + chunk] = self._word(token, step * problem.scale_columns + chunk)
        if not problem.folds:
            scales[0] = self._word(first * 8 + self.lane, step)
        return codes, scales

    def _load_codes(self, codes: cute.Tensor, token: Int32, step: Int32, chunk: int) -> None:
        count, held = self.codes.shape
        vector = step * (SLOT_BYTES // 8) + chunk * 4 + self.lane % 4
        exists = Boolean(token < count) & Boolean(vector * 8 < held)
        token, vector = cutlass.min(token, count - 1), cutlass.min(vector, held // 8 - 1)
        found = cute.make_rmem_tensor((8,), self.codes.element_type)
        cute.copy(
            load_atom(self.codes.element_type, 64), cute.local_tile(self.codes[token, None], (8,), (vector,)), found
        )
        words = cute.recast_tensor(found, Int32)
        for i in range(2):
            codes[i] = cutlass.select_(exists, words[i], Int32(0))

    def _word(self, token: Int32, column: Int32) -> Int32:
        """Return the scales of a token in a column of atoms, zero where there are none."""
        count, _ = self.codes.shape
        row, last = cutlass.min(token, count - 1), self.work.column_atoms - 1
        word = self.scales[row // WORD_ROWS, row % WORD_ROWS, cutlass.min(column, last)]
        (word,) = self.work.existing([word], column)
        return cutlass.select_(token < count, word, Int32(0))

    def store(self, shared: Shared, slot: Int32, first: int, codes: cute.Tensor, scales: cute.Tensor) -> None:
        """Write what :meth:`load` returned into a slot."""
        problem = self.setup.problem
        for i, block in enumerate(self.blocks(first)):
            for chunk in range(CHUNKS):
                factor = folded_factor(scales[i * CHUNKS + chunk], self.lane % 4) if problem.folds else None
                words = operand_words(problem, [codes[word, i, chunk] for word in range(2)], factor)
                for piece in range(self.setup.pieces):
                    target = cute.make_rmem_tensor((4,), Int32)
                    for word in range(4):
                        target[word] = words[4 * piece + word]
                    shared.tokens[None, self.lane, piece, block, chunk, slot].store(target.load())
        if not problem.folds:
            _store_factors(self.setup, shared, slot, first * 8 + self.lane, scales[0], self.lane)


@cute.jit
def _store_factors(
    setup: cutlass.Constexpr[Setup], shared: Shared, slot: Int32, token: Int32, scales: Int32, lane: Int32
) -> None:
    """Write the scales of a token where the lanes that hold its sums find them, and whether one is strange.

    Lane t holds tokens 2 t and 2 t + 1 of each block.
    """
    flags = shared.strange
    if token < setup.problem.tokens:
        place = shared.factors[token % 16 // 8 * 2 + token % 2, token % 8 // 2, token // 16, None, slot]
        for chunk in cutlass.range_constexpr(CHUNKS):
            place[chunk] = e8m0_to_f32((scales >> (8 * chunk)) & 0xFF)
    strange = cute.arch.vote_any_sync(strange_bytes(scales) != 0)
    if lane == 0:
        flags[token // 32, slot] = Int32(strange)
