"""What all rows of a group have in common: a factor, and a bias for each column."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, cute

from fe_runtime.cute.types import numeric

from .cells import BLOCK, made_here

__all__ = ["Bias", "GroupFactor"]


@dataclass(frozen=True, slots=True)
class GroupFactor:
    """A thread's view of a factor for each group: the array (E,) and, in a register, the factor of its tile's group."""

    array: cute.Tensor
    held: cute.Tensor
    squared: bool

    @classmethod
    def of(cls, array: cute.Tensor, squared: bool = False) -> GroupFactor:
        """Return the view of a thread; ``squared``: the factor is the square of the number."""
        return cls(array, cute.make_rmem_tensor((1,), Float32), squared)

    def begin(self, group: Int32) -> None:
        """Read the factor of a group."""
        number = self.array[group]
        self.held[0] = number * number if self.squared else number

    @property
    def value(self) -> Float32:
        """The factor."""
        return self.held[0]


@dataclass(frozen=True, slots=True)
class Bias:
    """A thread's view of a bias (E, N) of float32, float16 or bfloat16; N is a multiple of 8.

    It is read when a strip is finished: the lines that all rows share come from the first-level cache, but for the
    first time, and the other warp group multiplies meanwhile.
    """

    array: cute.Tensor
    dtype: str

    def of_blocks(self, group: Int32, column: Int32, blocks: int, together: bool) -> cute.Tensor:
        """Return the bias (side, block) of a thread's columns in so many blocks, of which ``column`` is the first.

        Beyond the last column it is that of another one. ``together``: the blocks lie all before it or all behind it,
        so one address will do.
        """
        count, item = self.array.shape[1], self.array.element_type.width // 8
        start = self.array.iterator.toint() + Int64(group) * count * item
        column = column if item == 4 else made_here(column)
        places = []
        for further in range(0, BLOCK * blocks, BLOCK):
            first, rest = (column, further) if together else (column + further, 0)
            inside = cutlass.select_(first < count, first, column % BLOCK)
            places.append((start + inside * item, rest * item))
        return _read_words(places) if item == 4 else _read_halves(self.dtype, places)


def _read_words(places: list[tuple[Int64, int]]) -> cute.Tensor:
    values = cute.make_rmem_tensor((2, len(places)), Float32)
    for block, (address, rest) in enumerate(places):
        values[0, block], values[1, block] = cute.arch.inline_ptx(
            f"ld.global.nc.v2.f32 {{{{$w0}}, {{$w1}}}}, [{{$r0}}+{rest}];",
            write_only_types=[Float32] * 2,
            read_only_args=[address],
        )
    return values


def _read_halves(dtype: str, places: list[tuple[Int64, int]]) -> cute.Tensor:
    stored = cute.make_rmem_tensor((2, len(places)), numeric(dtype))
    words = cute.recast_tensor(cute.make_tensor(stored.iterator, cute.make_layout(cute.size(stored))), Int32)
    for block, (address, rest) in enumerate(places):
        words[block] = cute.arch.inline_ptx(
            f"ld.global.nc.b32 {{$w0}}, [{{$r0}}+{rest}];", write_only_types=[Int32], read_only_args=[address]
        )
    values = cute.make_rmem_tensor(stored.shape, Float32)
    values.store(stored.load().to(Float32))
    return values
