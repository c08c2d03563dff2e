"""Rounding a thread's results to an output format and storing them."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Boolean, Float32, Int32, Uint8, Uint16, cute

from fe_norm.launch import NVFP4_VECTOR
from fe_runtime.cute.convert import block_quotients, e2m1_word, e4m3_pair, nvfp4_scale
from fe_runtime.cute.memory import access_bits, store_atom
from fe_runtime.cute.rows import RowPartition, store_vector
from fe_runtime.cute.types import numeric

__all__ = ["BLOCK", "OutputFormat", "OutputRow", "both", "rounded"]

BLOCK = 16


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """What is static about an output.

    Parameters
    ----------
    name
        bfloat16, float16, float32, float8_e4m3fn or nvfp4.
    partition
        The share of a thread in a row of values.
    alignment
        Bytes to which every row is aligned.
    e4m3_hardware
        Whether the architecture converts to e4m3.
    """

    name: str
    partition: RowPartition
    alignment: int
    e4m3_hardware: bool

    @property
    def stored(self) -> RowPartition:
        """The share of a thread in a row as it is stored: NVFP4 has two values in a byte."""
        pair = 2 if self.name == "nvfp4" else 1
        values = self.partition
        return RowPartition(values.columns // pair, values.vector // pair, values.threads, values.count)


@dataclass(frozen=True, slots=True)
class OutputRow:
    """Where one row of results goes: the row, its NVFP4 scales, the factor of e4m3 values, and whether it exists."""

    format: OutputFormat
    values: cute.Tensor
    scales: cute.Tensor | None
    factor: Float32 | None
    exists: Boolean | bool

    def store(self, results: list[Float32], index: Int32, inside: Boolean | bool) -> None:
        """Round the results of vector ``index`` and store them if it lies ``inside`` the row."""
        fmt = self.format
        inside = both(self.exists, inside)
        if fmt.name == "nvfp4":
            items = self._nvfp4(results, index, inside)
        elif fmt.name == "float8_e4m3fn":
            items = self._e4m3(results)
        else:
            items = rounded(results, fmt.name)
        dtype = self.values.element_type
        bits = access_bits(dtype, fmt.stored.vector, fmt.alignment)
        store_vector(items, self.values, index, inside, fmt.stored, store_atom(dtype, bits))

    def _e4m3(self, results: list[Float32]) -> cute.Tensor:
        """Return the codes of ``result * factor``."""
        hardware = self.format.e4m3_hardware
        scaled = results if self.factor is None else [result * self.factor for result in results]
        items = cute.make_rmem_tensor((len(results),), Uint8)
        if len(results) == 1:
            items[0] = Uint8(e4m3_pair(scaled[0], Float32(0.0), hardware) & 0xFF)
            return items
        pairs = cute.recast_tensor(items, Uint16)
        for i in range(len(results) // 2):
            pairs[i] = e4m3_pair(scaled[2 * i], scaled[2 * i + 1], hardware)
        return items

    def _nvfp4(self, results: list[Float32], index: Int32, inside: Boolean | bool) -> cute.Tensor:
        """Return the packed codes ``e2m1(y / q)`` and store the block's scale, ``q = max(max|y| / 6, 2^-126)``.

        The two threads of a block of 16 values are neighbours in a warp, and all of a warp must come here.
        """
        largest = Float32(0.0)
        for result in results:
            largest = cute.arch.fmax(largest, cute.math.absf(result))
        largest = cute.arch.warp_reduction(largest, cute.arch.fmax, threads_in_group=BLOCK // NVFP4_VECTOR)
        scale = nvfp4_scale(largest)
        code = Uint8(e4m3_pair(scale, Float32(0.0), self.format.e4m3_hardware) & 0xFF)
        _store_scale(self.scales, index // 2, code, both(inside, index % 2 == 0))
        items = cute.make_rmem_tensor((NVFP4_VECTOR // 2,), Uint8)
        cute.recast_tensor(items, Int32)[0] = e2m1_word(block_quotients(results, scale), results)
        return items


def rounded(results: list[Float32], dtype: str) -> cute.Tensor:
    wide = cute.make_rmem_tensor((len(results),), Float32)
    for i, result in enumerate(results):
        wide[i] = result
    items = cute.make_rmem_tensor((len(results),), numeric(dtype))
    items.store(wide.load().to(numeric(dtype)))
    return items


@cute.jit
def _store_scale(scales: cute.Tensor, block: Int32, code: Uint8, inside: Boolean) -> None:
    if inside:
        scales[block] = code


def both(a: Boolean | bool, b: Boolean | bool) -> Boolean | bool:
    """Return ``a and b``, decided while compiling where one is a ``bool``."""
    if isinstance(a, bool):
        return b if a else False
    if isinstance(b, bool):
        return a if b else False
    return a & b
