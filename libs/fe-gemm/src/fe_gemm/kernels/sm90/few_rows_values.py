"""Values of block-scaled operands in float16, and which scales are too large for the short way of a product."""

from __future__ import annotations

from cutlass import Int32, cute

from fe_gemm.planning.scaled_few_rows import Problem
from fe_runtime.cute.convert import e2m1_as_e4m3, e4m3_to_f16, e5m2_to_f16, f16_products

__all__ = ["folded_factor", "operand_words", "strange_bytes", "words_of"]

_SIXTY_FOUR = 0x54005400  # twice, in float16


def operand_words(problem: Problem, codes: list[Int32], factor: Int32 | None) -> list[Int32]:
    """Return the values of words of codes as words of two float16, in an order that is always the same; exact.

    With a ``factor``, of :func:`folded_factor`, the values times their scale.
    """
    if problem.element == "float8_e5m2":
        return [value for word in codes for value in e5m2_to_f16(word)]
    if problem.element == "float8_e4m3fn":
        return [value for word in codes for value in e4m3_to_f16(word)]
    small = [value for word in codes for four in e2m1_as_e4m3(word) for value in e4m3_to_f16(four)]
    return [f16_products(value, factor) for value in small]


def folded_factor(scales: Int32, number: Int32) -> Int32:
    """Return the e4m3 scale in byte ``number`` of a word, times 2^6, twice in float16: what e2m1 codes need."""
    twice = Int32(cute.arch.prmt(scales, 0, number * 0x11))
    factor, _ = e4m3_to_f16(twice)
    return f16_products(factor, _SIXTY_FOUR)


def strange_bytes(scales: Int32) -> Int32:
    """Return a word that is not zero if a byte of e8m0 scales is 192 or more: 2^65 and above, or NaN.

    Below, sums of 32 products of codes can be multiplied by two scales, one after the other, without an overflow that
    the products of values would not have.
    """
    return scales & (scales << 1) & -0x7F7F7F80  # 0x80808080


def words_of(shared: cute.Tensor) -> list[Int32]:
    """Load neighbouring words of shared memory at once."""
    words = cute.make_rmem_tensor(shared.shape, Int32)
    words.store(shared.load())
    return [words[i] for i in range(cute.size(words))]
