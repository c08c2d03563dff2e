"""What the warps of a block share in a product of a few block-scaled rows: their work, and a ring in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Uint8, cute

from fe_gemm.planning.scaled_few_rows import ATOM_BYTES, ATOM_ROWS, CHUNKS, SLOT_BYTES, Launch, Problem
from fe_runtime.cute.pipeline import Ring
from fe_runtime.cute.tma import swizzled_layout

__all__ = ["Setup", "Shared", "Work"]


@dataclass(frozen=True, slots=True)
class Setup:
    """All that is static in a compilation."""

    problem: Problem
    launch: Launch

    @property
    def pieces(self) -> int:
        """Pieces of 8 elements that a lane treats in a chunk of a row: it has 8 bytes of 32."""
        return 8 // self.problem.bits

    @property
    def chunks(self) -> int:
        """Chunks of a slot that a warp multiplies."""
        return CHUNKS // self.launch.depth_warps

    @property
    def unrolls(self) -> bool:
        """Whether the chunks of a slot are written out one by one, for which a thread has registers."""
        return self.problem.blocks * self.launch.tiles <= 2

    @property
    def together(self) -> int:
        """Blocks of tokens that are on their way through registers together."""
        return 2 if self.problem.folds else 4

    @property
    def weights_layout(self) -> cute.ComposedLayout:
        """Layout (rows, bytes, slots) of weights in shared memory."""
        return swizzled_layout(Uint8, (self.launch.rows, SLOT_BYTES), True, self.launch.slots)


@dataclass(frozen=True, slots=True)
class Work:
    """What a block has to do: the items first, first + stride, ... below ``items``, of ``steps`` slots each.

    An item is a tile of rows of weights and a slice of K. Steps beyond K are made with zeros.

    Parameters
    ----------
    rows, blocks
        Rows of weights, and scales of a row.
    row_atoms, column_atoms
        Atoms of their scales, down and across.
    """

    setup: Setup
    rows: Int32
    blocks: Int32
    row_atoms: Int32
    column_atoms: Int32
    steps: Int32
    items: Int32
    first: Int32
    stride: Int32

    @staticmethod
    def of(setup: Setup, rows: Int32, k: Int32) -> Work:
        """Return the work of the calling block on weights (rows, k)."""
        problem, how = setup.problem, setup.launch
        block, _, _ = cute.arch.block_idx()
        stride, _, _ = cute.arch.grid_dim()
        blocks = cute.ceil_div(k, problem.vec)
        return Work(
            setup,
            rows,
            blocks,
            cute.ceil_div(rows, ATOM_ROWS),
            cute.ceil_div(blocks, 4),
            cute.ceil_div(cute.ceil_div(k, problem.depth), how.slices),
            items(setup, rows),
            block,
            stride,
        )

    def place(self, item: Int32) -> tuple[Int32, Int32]:
        """Return the tile and the slice of an item."""
        slices = self.setup.launch.slices
        return item // slices, item % slices

    def existing(self, words: list[Int32], column: Int32) -> list[Int32]:
        """Return words of a column of atoms, zero in the bytes that belong to no block."""
        left = cutlass.max(cutlass.min(self.blocks - column * 4, Int32(4)), Int32(0))
        mask = cutlass.select_(left == 4, Int32(-1), (Int32(1) << (left * 8)) - 1)
        return [word & mask for word in words]


def items(setup: Setup, rows: Int32) -> Int32:
    """Return the number of items of weights with so many rows."""
    return cute.ceil_div(rows, setup.launch.rows) * setup.launch.slices


@dataclass(frozen=True, slots=True)
class Shared:
    """The slots of the ring. What a slot holds:

    Parameters
    ----------
    weights
        Bytes (rows, bytes, slots), where TMA puts them.
    codes
        The same as words (word of 8 bytes, half of a piece of 16 bytes, place of the piece, row, slot).
    atoms
        Scales of weights as words (quarter, row of a quarter, column, row of atoms, slot).
    tokens
        Tokens as operands in float16: words (4, lane, piece, block of 8 tokens, chunk, slot).
    factors
        Scales of tokens in float32, if they are not multiplied into them: (4, lane % 4, two blocks, chunk, slot), for
        each lane those of the tokens whose sums it holds.
    strange
        Not zero where a scale of 32 tokens is too large for the short way: (tokens / 32, slot).
    sums
        Sums of the warps that share rows with others: (4, lane, block, tile, warp).
    """

    weights: cute.Tensor
    codes: cute.Tensor
    atoms: cute.Tensor
    tokens: cute.Tensor
    factors: cute.Tensor | None
    strange: cute.Tensor
    sums: cute.Tensor | None
    ring: Ring

    @classmethod
    def allocate(cls, setup: Setup, allocator: Any) -> Shared:
        """Take the shared memory."""
        problem, how = setup.problem, setup.launch
        blocks, slots = problem.blocks, how.slots
        memory = allocator.allocate(slots * how.rows * SLOT_BYTES, 1024)
        layout = setup.weights_layout
        weights = cute.make_tensor(cute.recast_ptr(memory, layout.inner, Uint8), layout.outer)
        words = cute.make_layout((2, 2, SLOT_BYTES // 16, how.rows, slots))
        codes = cute.make_tensor(cute.recast_ptr(memory, dtype=Int32), words)
        columns = problem.scale_columns
        quarters, words_of_atom = ATOM_ROWS // 32, ATOM_BYTES // 4
        atoms = cute.make_layout(
            (quarters, 32, columns, how.atoms, slots),
            stride=(1, 4, words_of_atom, columns * words_of_atom, how.atoms * columns * words_of_atom),
        )
        others = how.computing_warps - how.row_warps

        def take(dtype: type[cutlass.Numeric], layout: Any) -> cute.Tensor:
            return allocator.allocate_tensor(dtype, layout, byte_alignment=128)

        return cls(
            weights,
            codes,
            take(Int32, atoms),
            take(Int32, cute.make_layout((4, 32, setup.pieces, blocks, CHUNKS, slots))),
            None if problem.folds else take(Float32, cute.make_layout((4, 4, blocks // 2, CHUNKS, slots))),
            take(Int32, cute.make_layout((-(-problem.tokens // 32), slots))),
            take(Float32, cute.make_layout((4, 32, blocks, how.tiles, others))) if others else None,
            Ring.allocate(allocator, slots),
        )
