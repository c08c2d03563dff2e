"""Cells in shared memory: where a thread's values lie in them, how they get there rounded, and back.

A cell has 64 rows and 32 or 64 columns. Of 8 neighbouring columns, a *block*, a thread of a warp group holds two rows,
8 apart (``half`` 0 and 1), and in each two neighbouring columns (``side`` 0 and 1): a fragment is a register tensor
(side, half, block). A cell consists of contiguous lines of 32, 64 or 128 bytes, whose 16-byte pieces are permuted as
TMA does it: some bits of the line's number are joined to the number of the piece by exclusive or.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Uint16, cute
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind, make_smem_layout_atom

from fe_gemm.planning.problem import CELL, Sheet
from fe_runtime.cute.convert import e2m1_word
from fe_runtime.cute.tma import swizzled_offset
from fe_runtime.cute.types import numeric, storage

__all__ = ["BLOCK", "Place", "cell_layout", "fragment", "made_here", "read", "thread_offset", "write"]

BLOCK = 8
"""Columns of a block."""

_KINDS = {
    (32, "n"): SmemLayoutAtomKind.K_SW32,
    (64, "n"): SmemLayoutAtomKind.K_SW64,
    (64, "m"): SmemLayoutAtomKind.MN_SW64,
    (128, "n"): SmemLayoutAtomKind.K_SW128,
    (128, "m"): SmemLayoutAtomKind.MN_SW128,
}


def fragment(blocks: int) -> cute.Tensor:
    """Return registers for a thread's part of ``blocks`` blocks of columns: (side, half, block)."""
    return cute.make_rmem_tensor((2, 2, blocks), Float32)


def cell_layout(sheet: Sheet, buffers: int) -> cute.ComposedLayout:
    """Return the layout (rows, columns, buffers) of cells in shared memory; two e2m1 values count as one column."""
    atom = make_smem_layout_atom(_KINDS[sheet.line_bytes, sheet.major], storage(sheet.dtype))
    order = (0, 1, 2) if sheet.major == "n" else (1, 0, 2)
    return cute.tile_to_shape(atom, (CELL, stored_columns(sheet), buffers), order=order)


def stored_columns(sheet: Sheet) -> int:
    """Return the columns of a cell as TMA counts them."""
    return sheet.cell_columns * sheet.bits // max(8, sheet.bits)


def thread_offset(sheet: Sheet, thread: Any) -> Any:
    """Return the byte offset in a cell from which :class:`Place` leads to all values of a thread.

    16-bit values are moved as matrices of 8 x 8, of which a thread gives the address of a line; otherwise this is
    where the first value of a thread lies.
    """
    if sheet.bits == 16:
        return _matrix_line(thread, sheet.major == "m")
    line = sheet.line_bytes
    row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
    if sheet.major == "n":
        return _permuted(row * line + column * sheet.bits // 8, line)
    rows = line * 8 // sheet.bits
    part = row // rows * (sheet.cell_columns * line)
    return _permuted(column * line + row % rows * sheet.bits // 8, line) + part


@dataclass(frozen=True, slots=True)
class Place:
    """The way from a thread's first value to another: exclusive or with ``flip``, then ``add`` bytes."""

    flip: int
    add: int

    @classmethod
    def of(cls, sheet: Sheet, side: int, half: int, block: int) -> Place:
        """Return the way to a value of a fragment, for values of other than 16 bits."""
        line, bits = sheet.line_bytes, sheet.bits
        if sheet.major == "n":
            per_line = line // bits  # blocks: eight values have as many bytes as one has bits
            return cls(block % per_line * bits, (block // per_line * CELL + half * 8) * line + side * bits // 8)
        return cls(half * bits ^ (side << 4 if line == 128 else 0), (block * BLOCK + side) * line)

    @classmethod
    def of_matrices(cls, sheet: Sheet, pair: int) -> Place:
        """Return the way to the matrices of a pair of blocks, for values of 16 bits."""
        return cls(0, pair * 16 * 128) if sheet.major == "m" else cls(pair << 5, 0)

    def __call__(self, start: Any) -> Any:
        """Return the place, from the thread's first one in a cell."""
        return (start ^ self.flip) + self.add


def made_here(address: Int32) -> Int32:
    """Return an address that the compiler takes for a new one.

    Otherwise it computes those of all values that follow from it once for all tiles, and has no registers for them.
    """
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[address])


def write(sheet: Sheet, values: cute.Tensor, start: Int32) -> None:
    """Write a fragment as wide as a cell, rounded by recipe CAST; ``start``: the thread's address in the cell."""
    writer = {32: _write_words, 16: _write_matrices, 8: _write_bytes, 4: _write_nibbles}[sheet.bits]
    writer(sheet, values, start)


def read(sheet: Sheet, start: Int32) -> cute.Tensor:
    """Read a fragment as wide as a cell of float32, float16 or bfloat16."""
    values = fragment(sheet.cell_columns // BLOCK)
    if sheet.bits == 16:
        _read_matrices(sheet, values, start)
    else:
        _read_words(sheet, values, start)
    return values


def _matrix_line(thread: Any, transposes: bool) -> Any:
    """Return the byte offset of the matrix line that a lane addresses, in the first pair of blocks of a cell.

    Matrix q of four (lanes 8q to 8q + 7) is rows 8 (q & 1) and columns 8 (q >> 1) of a warp's 16 x 16 values.
    """
    warp, lane = thread // 32, thread % 32
    if transposes:
        return swizzled_offset((lane // 16) * 8 + lane % 8, warp * 2 + (lane // 8) % 2)
    return swizzled_offset(warp * 16 + lane % 16, lane // 16)


def _permuted(offset: Any, line: int) -> Any:
    """Return where the byte at ``offset`` of the unpermuted cell lies: bits from 7 on change bits from 4 on."""
    return offset ^ ((offset >> 7 & (line // 16 - 1)) << 4)


def _write_matrices(sheet: Sheet, values: cute.Tensor, start: Int32) -> None:
    rounded = cute.make_rmem_tensor(values.shape, numeric(sheet.dtype))
    rounded.store(values.load().to(rounded.element_type))
    words = _words(rounded)
    trans = ".trans" if sheet.major == "m" else ""
    for pair in range(cute.size(values) // 8):
        cute.arch.inline_ptx(
            f"stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [{{$r0}}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
            read_only_args=[Place.of_matrices(sheet, pair)(start), *(words[4 * pair + i] for i in range(4))],
        )


def _read_matrices(sheet: Sheet, values: cute.Tensor, start: Int32) -> None:
    stored = cute.make_rmem_tensor(values.shape, numeric(sheet.dtype))
    words = _words(stored)
    trans = ".trans" if sheet.major == "m" else ""
    for pair in range(cute.size(values) // 8):
        found = cute.arch.inline_ptx(
            f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}];",
            write_only_types=[Int32] * 4,
            read_only_args=[Place.of_matrices(sheet, pair)(start)],
        )
        for i in range(4):
            words[4 * pair + i] = found[i]
    values.store(stored.load().to(Float32))


def _words(values: cute.Tensor) -> cute.Tensor:
    """Return a fragment of 16-bit values as words: for each block the two rows."""
    return cute.recast_tensor(cute.make_tensor(values.iterator, cute.make_layout(cute.size(values))), Int32)


def _write_words(sheet: Sheet, values: cute.Tensor, start: Int32) -> None:
    for half, block in _pairs(values):
        first, second = values[0, half, block], values[1, half, block]
        if sheet.major == "n":
            address = Place.of(sheet, 0, half, block)(start)
            cute.arch.inline_ptx("st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, first, second])
        else:
            _store("f32", Place.of(sheet, 0, half, block)(start), first)
            _store("f32", Place.of(sheet, 1, half, block)(start), second)


def _read_words(sheet: Sheet, values: cute.Tensor, start: Int32) -> None:
    for half, block in _pairs(values):
        places = [Place.of(sheet, side, half, block)(start) for side in range(2)]
        if sheet.major == "n":
            found = cute.arch.inline_ptx(
                "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];",
                write_only_types=[Float32, Float32],
                read_only_args=[places[0]],
            )
        else:
            found = [
                cute.arch.inline_ptx(
                    "ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[place]
                )
                for place in places
            ]
        for side in range(2):
            values[side, half, block] = found[side]


def _write_bytes(sheet: Sheet, values: cute.Tensor, start: Int32) -> None:
    for half, block in _pairs(values):
        codes = eight_bit_pair(sheet.dtype, values[0, half, block], values[1, half, block])
        if sheet.major == "n":
            _store("b16", Place.of(sheet, 0, half, block)(start), codes)
        else:
            for side in range(2):
                _store("b8", Place.of(sheet, side, half, block)(start), Int32(codes) >> 8 * side)


def _write_nibbles(sheet: Sheet, values: cute.Tensor, start: Int32) -> None:
    for block in range(0, cute.size(values, mode=[2]), 2):
        eight = [values[side, half, block + i] for i in range(2) for half in range(2) for side in range(2)]
        word = e2m1_word(eight, eight)
        for i in range(4):
            code = Uint16((word >> 8 * i) & 0xFF)
            _store("b8", Place.of(sheet, 0, i % 2, block + i // 2)(start), code)


def eight_bit_pair(dtype: str, low: Float32, high: Float32) -> Uint16:
    """Return the codes of two values, ``low`` in the low byte: nearest, ties to even, saturating. NaN gives 0x7F."""
    kind = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}[dtype]
    return cute.arch.inline_ptx(
        f"cvt.rn.satfinite.{kind}x2.f32 {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Uint16],
        read_only_args=[high, low],
    )


def _pairs(values: cute.Tensor) -> list[tuple[int, int]]:
    """Return (half, block) of all pairs of neighbouring columns."""
    return [(half, block) for block in range(cute.size(values, mode=[2])) for half in range(2)]


def _store(kind: str, address: Int32, value: cutlass.Numeric) -> None:
    cute.arch.inline_ptx(f"st.shared.{kind} [{{$r0}}], {{$r1}};", read_only_args=[address, value])
