"""Block-scaled operands as bytes, their values, and their scales in the blocked layout with random padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fe_runtime import formats

Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True)
class BlockedOperand:
    """Codes (R, C, L), one in a byte, and scale bytes (R, ceil(C / vec), L); dtypes by canonical name."""

    element: str
    scale: str
    vec: int
    codes: Numbers
    scales: Numbers

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return 4 if self.element == "float4_e2m1fn" else 8

    @property
    def packed(self) -> Numbers:
        """The codes as they are stored: two e2m1 codes in a byte."""
        return self.codes[:, 0::2] | self.codes[:, 1::2] << 4 if self.bits == 4 else self.codes

    @property
    def values(self) -> Numbers:
        """The values in float32, (R, C, L)."""
        return np.stack([self._values(batch) for batch in range(self.codes.shape[2])], axis=2)

    def _values(self, batch: int) -> Numbers:
        codes = np.ascontiguousarray(self.codes[..., batch])
        elements = formats.pack_fp4(codes) if self.bits == 4 else formats.typed_view(codes, self.element)
        scales = formats.typed_view(np.ascontiguousarray(self.scales[..., batch]), self.scale)
        found: Numbers = formats.dequantize(elements, scales, vec=self.vec)
        return found

    @property
    def blocked_scales(self) -> Numbers:
        """The scale bytes in the blocked layout, one after the other; the padding is random, NaN among it."""
        rows, blocks, batches = self.scales.shape
        _, row_tiles, tiles, *_ = formats.scale_shape(rows, blocks, batches)
        padded = np.random.default_rng(0).integers(0, 256, (batches, 128 * row_tiles, 4 * tiles), np.uint8)
        padded[:, :rows, :blocks] = self.scales.transpose(2, 0, 1)
        found: Numbers = formats.to_blocked(padded).reshape(-1)
        return found


def random_operand(
    element: str, scale: str, vec: int, shape: tuple[int, int, int], scales: tuple[int, int] = (0, 256), seed: int = 0
) -> BlockedOperand:
    """An operand of random codes, and scale bytes in a range."""
    random = np.random.default_rng([seed, *shape])
    rows, columns, batches = shape
    codes = random.integers(0, 16 if element == "float4_e2m1fn" else 256, shape, np.uint8)
    blocks = formats.scales_per_row(columns, vec)
    low, high = scales
    if scale == "float8_e4m3fn":
        high = min(high, 128)  # the sign of a scale is not in the contract
    return BlockedOperand(element, scale, vec, codes, random.integers(low, high, (rows, blocks, batches), np.uint8))
