"""float32 numbers as the parts whose bf16 products replace theirs, by definition; numbers that are hard to split."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["HARD", "hard_floats", "parts"]

BF16 = ml_dtypes.bfloat16
LARGEST = float(ml_dtypes.finfo(BF16).max)
SMALLEST = 2.0**-133

TIES = (1, 1 + 2.0**-8, 1 + 3 * 2.0**-9, 1 + 2.0**-23)
LARGE = (LARGEST, 3.3961775292304957e38, 3.4028234663852886e38, np.inf)
SMALL = (0, 2.0**-117, 2.0**-126, 1.5 * SMALLEST, SMALLEST, 2.0**-134, 2.0**-149)
HARD = np.array([*TIES, *LARGE, *SMALL, np.nan], np.float32)
"""Ties, both ends of the range of bf16 and of float32, subnormals, what is no number."""


def hard_floats(rng: Any, shape: tuple[int, ...]) -> Any:
    """Return random float32 bits, common numbers, and hard ones, with either sign."""
    anything = rng.integers(0, 2**32, shape, dtype=np.uint64).astype(np.uint32).view(np.float32)
    common = rng.standard_normal(shape).astype(np.float32) * np.exp2(rng.integers(-20, 20, shape)).astype(np.float32)
    hard = rng.choice(np.concatenate([HARD, -HARD]), shape)
    return np.choose(rng.integers(0, 3, shape), [anything, common, hard])


def parts(x: Any, names: tuple[str, ...]) -> list[Any]:
    """Return parts of float32 numbers as bf16: the number nearest to them, finite and not zero if they are, and what is
    nearest to the rest; ``plain_head`` and ``tail`` are zero where the number is infinite or NaN."""
    finite = np.isfinite(x)
    with np.errstate(all="ignore"):
        size = np.abs(x.astype(np.float64))
        size = np.where(finite & (size > 0), np.clip(size, SMALLEST, LARGEST), size)
        head = np.copysign(size, x).astype(np.float32).astype(BF16)
        rest = np.where(finite, x.astype(np.float64) - head.astype(np.float64), 0)
    made = {
        "head": head,
        "plain_head": np.where(finite & (x != 0), head, BF16(0)),
        "tail": rest.astype(np.float32).astype(BF16),
    }
    return [made[name] for name in names]
