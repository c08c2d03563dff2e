"""Products of a slot: a warp's rows of weights with all tokens, on the tensor cores, in float16 with float32 sums.

Codes of 8 and of 4 bits are exact in float16, and so are e2m1 codes times their e4m3 scale. e8m0 scales are not: with
them, sums over a block of 32 products are multiplied by both scales in float32 and added up there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
from cutlass import Float32, Int32, cute

from fe_gemm.kernels.warp_mma import mma_f16
from fe_gemm.planning.scaled_few_rows import ATOM_ROWS, CHUNKS
from fe_runtime.cute.convert import e8m0_to_f32, f16_values

from .epilogue.cells import made_here
from .few_rows_shared import Setup, Shared, Work
from .few_rows_values import folded_factor, operand_words, strange_bytes, words_of

__all__ = ["Multiplier", "fragment_row"]


def fragment_row(lane: Int32) -> Int32:
    """Return the row, of 8, whose weights a lane supplies and whose sums it holds.

    With even rows first, and then odd ones, the lanes that read shared memory together touch all of its banks.
    """
    g = lane // 4
    return g % 4 * 2 + g // 4


@dataclass(frozen=True, slots=True)
class Multiplier:
    """A thread's view of the slots: of each tile of 16 rows it has two, 8 apart.

    Parameters
    ----------
    first_row
        Its first row among those of the block.
    first_chunk
        The first chunk of its warp.
    """

    setup: Setup
    work: Work
    shared: Shared
    lane: Int32
    first_row: Int32
    first_chunk: Int32

    @staticmethod
    def of(setup: Setup, work: Work, shared: Shared, warp: Int32, lane: Int32) -> Multiplier:
        """Return the view of a thread."""
        how = setup.launch
        row_warp, depth_warp = warp % how.row_warps, warp // how.row_warps
        row = row_warp * (16 * how.tiles) + fragment_row(lane)
        return Multiplier(setup, work, shared, lane, row, depth_warp * setup.chunks)

    def anew(self) -> Multiplier:
        """Return the same view, of which the compiler prepares nothing ahead, where it would take registers."""
        return replace(self, lane=made_here(self.lane), first_row=made_here(self.first_row))

    def accumulator(self) -> cute.Tensor:
        """Return registers for sums: (2 of a row and 2 of the other, block, tile)."""
        return cute.make_rmem_tensor((4, self.setup.problem.blocks, self.setup.launch.tiles), Float32)

    def scale_places(self, tile: Int32) -> list[tuple[Int32, Int32]]:
        """Return where the scales of the thread's rows are if the block's rows are a ``tile``.

        For each tile of 16 rows and its two rows: the place in the atoms, and a mask that is zero beyond the weights.
        """
        first, found = tile * self.setup.launch.rows, []
        for i in range(2 * self.setup.launch.tiles):
            row = self.first_row + 8 * i
            mask = cutlass.select_(first + row < self.work.rows, Int32(-1), Int32(0))
            found.append((first % ATOM_ROWS + row, mask))
        return found

    def scale_word(self, place: Int32, column: Int32 | int, slot: Int32) -> Int32:
        """Return the scales of a row in a column of atoms of a slot."""
        quarter, row = place // 32 % 4, place % 32
        return self.shared.atoms[quarter, row, column, place // ATOM_ROWS, slot]

    def codes(self, i: int, chunk: Int32, lane_of_row: Int32, slot: Int32) -> list[Int32]:
        """Return 8 bytes of the thread's ``i``-th row, those of lane ``lane_of_row`` of four."""
        row = self.first_row + 8 * i
        piece = (chunk * 2 + lane_of_row // 2) ^ (row & 7)
        return words_of(self.shared.codes[None, lane_of_row % 2, piece, row, slot])

    def tokens(self, lane: Int32, block: int, chunk: Int32, slot: Int32) -> list[Int32]:
        """Return what a lane supplies of a block of tokens, words of two float16."""
        return [
            word
            for piece in range(self.setup.pieces)
            for word in words_of(self.shared.tokens[None, lane, piece, block, chunk, slot])
        ]

    def weights(self, tile: int, chunk: Int32, slot: Int32, factors: list[Int32 | None]) -> list[list[Int32]]:
        """Return what the thread supplies of a tile of weights: four words for each instruction."""
        problem = self.setup.problem
        rows = [
            operand_words(problem, self.codes(2 * tile + half, chunk, self.lane % 4, slot), factors[half])
            for half in range(2)
        ]
        return [[rows[0][j], rows[1][j], rows[0][j + 1], rows[1][j + 1]] for j in range(0, 4 * self.setup.pieces, 2)]

    def add_slot(self, accumulator: cute.Tensor, slot: Int32, step: Int32, places: list[tuple[Int32, Int32]]) -> None:
        """Add the products of a slot, which is step ``step`` of all of K."""
        if self.setup.problem.folds:
            self._add_folded(accumulator, slot, step, tuple(places))
        else:
            scales = self.work.existing([self.scale_word(place, 0, slot) & mask for place, mask in places], step)
            self._add_scaled(accumulator, slot, tuple(scales))

    @cute.jit
    def _add_scaled(self, accumulator: cute.Tensor, slot: Int32, scales: tuple[Int32, ...]) -> None:
        """Take the short way, or the long one if a scale of the warp's rows or of the tokens is strange."""
        strange = self.shared.strange[0, slot]
        for i in cutlass.range_constexpr(1, cute.size(self.shared.strange, mode=[0])):
            strange = strange | self.shared.strange[i, slot]
        for i in cutlass.range_constexpr(len(scales)):
            strange = strange | strange_bytes(scales[i])
        if cute.arch.vote_any_sync(strange != 0):
            self.add_long(accumulator, slot, scales)
        else:
            self.add_short(accumulator, slot, scales)

    @cute.jit
    def _add_folded(
        self, accumulator: cute.Tensor, slot: Int32, step: Int32, places: tuple[tuple[Int32, Int32], ...]
    ) -> None:
        """Add products of values."""
        if cutlass.const_expr(self.setup.unrolls):
            for i in cutlass.range_constexpr(self.setup.chunks):
                self._add_values_of_chunk(accumulator, slot, step, places, self.first_chunk + i)
        else:
            for i in cutlass.range(self.setup.chunks, unroll=1):
                self._add_values_of_chunk(accumulator, slot, step, places, self.first_chunk + i)

    def _add_values_of_chunk(
        self,
        accumulator: cute.Tensor,
        slot: Int32,
        step: Int32,
        places: tuple[tuple[Int32, Int32], ...],
        chunk: Int32,
    ) -> None:
        exists = (step * CHUNKS + chunk) * 4 + self.lane % 4 < self.work.blocks
        for tile in range(self.setup.launch.tiles):
            factors: list[Int32 | None] = []
            for place, _ in places[2 * tile : 2 * tile + 2]:
                word = cutlass.select_(exists, self.scale_word(place, chunk, slot), Int32(0))
                factors.append(folded_factor(word, self.lane % 4))
            weights = self.weights(tile, chunk, slot, factors)
            for block in range(self.setup.problem.blocks):
                b = self.tokens(self.lane, block, chunk, slot)
                sums: tuple[Float32, ...] = tuple(accumulator[j, block, tile] for j in range(4))
                for number, a in enumerate(weights):
                    sums = mma_f16(a, b[2 * number : 2 * number + 2], sums)
                for j in range(4):
                    accumulator[j, block, tile] = sums[j]

    @cute.jit
    def add_short(self, accumulator: cute.Tensor, slot: Int32, scales: tuple[Int32, ...]) -> None:
        """Add sums of products of codes times their scales, none of which is strange."""
        if cutlass.const_expr(self.setup.unrolls):
            if cutlass.const_expr(self.setup.launch.depth_warps > 1):
                scales = tuple(scale >> (self.first_chunk * 8) for scale in scales)
            for i in cutlass.range_constexpr(self.setup.chunks):
                factors = tuple(_short_factor(scale, i) for scale in scales)
                self._add_sums_of_chunk(accumulator, slot, factors, self.first_chunk + i)
        else:
            fresh = self.anew()
            for i in cutlass.range(self.setup.chunks, unroll=1):
                chunk = self.first_chunk + i
                factors = tuple(_short_factor(scale >> (chunk * 8), 0) for scale in scales)
                fresh._add_sums_of_chunk(accumulator, slot, factors, chunk)

    def _add_sums_of_chunk(
        self, accumulator: cute.Tensor, slot: Int32, row_factors: tuple[Float32, ...], chunk: Int32
    ) -> None:
        tiles = range(self.setup.launch.tiles)
        weights = [self.weights(tile, chunk, slot, [None, None]) for tile in tiles]
        for block in range(self.setup.problem.blocks):
            b = self.tokens(self.lane, block, chunk, slot)
            token_factors = self._token_factors(block, chunk, slot)
            for tile in tiles:
                sums: tuple[Float32, ...] = (Float32(0.0),) * 4
                for number, a in enumerate(weights[tile]):
                    sums = mma_f16(a, b[2 * number : 2 * number + 2], sums)
                for j in range(4):
                    scaled = sums[j] * row_factors[2 * tile + j // 2]
                    old = accumulator[j, block, tile]
                    accumulator[j, block, tile] = cute.math.fma(scaled, token_factors[j % 2], old)

    @cute.jit
    def add_long(self, accumulator: cute.Tensor, slot: Int32, scales: tuple[Int32, ...]) -> None:
        """Add products of values, one by one, as the format defines them."""
        fresh = self.anew()
        for i in cutlass.range(self.setup.chunks, unroll=1):
            chunk = fresh.first_chunk + i
            for part in cutlass.range(4, unroll=1):
                for tile in cutlass.range_constexpr(self.setup.launch.tiles):
                    rows = [
                        _values(
                            operand_words(self.setup.problem, fresh.codes(row, chunk, part, slot), None),
                            e8m0_to_f32((scales[row] >> (chunk * 8)) & 0xFF),
                        )
                        for row in (2 * tile, 2 * tile + 1)
                    ]
                    fresh._add_values(accumulator, tile, rows, chunk, part, slot)

    def _add_values(
        self,
        accumulator: cute.Tensor,
        tile: int,
        rows: list[list[Float32]],
        chunk: Int32,
        part: Int32,
        slot: Int32,
    ) -> None:
        """Add products of 8 values of two rows with those of the tokens whose sums the thread holds."""
        for block in range(self.setup.problem.blocks):
            factors = self._token_factors(block, chunk, slot)
            for side in range(2):
                lane = (self.lane % 4 * 2 + side) * 4 + part
                token = _values(self.tokens(lane, block, chunk, slot), factors[side])
                for half in range(2):
                    total = accumulator[2 * half + side, block, tile]
                    for x, y in zip(rows[half], token, strict=True):
                        total = cute.math.fma(x, y, total)
                    accumulator[2 * half + side, block, tile] = total

    def _token_factors(self, block: int, chunk: Int32, slot: Int32) -> list[Float32]:
        """Return the scales of the two tokens of a block whose sums the thread holds."""
        four = cute.make_rmem_tensor((4,), Float32)
        four.store(self.shared.factors[None, self.lane % 4, block // 2, chunk, slot].load())
        return [four[block % 2 * 2 + i] for i in range(2)]


def _short_factor(scales: Int32, byte: int) -> Float32:
    """Return an e8m0 scale that is not NaN: its code is the exponent, but 0 means 2^-127."""
    place = 23 - 8 * byte
    exponent = (scales << place if place >= 0 else scales >> -place) & 0x7F800000
    factor: Float32 = cutlass.max(exponent, Int32(0x00400000)).bitcast(Float32)
    return factor


def _values(words: list[Int32], factor: Float32) -> list[Float32]:
    return [value * factor for word in words for value in f16_values(word)]
