"""What may be added to a mean square or a variance: the arithmetic is float32, subnormal numbers aside."""

from __future__ import annotations

__all__ = ["RULE", "holds"]

SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
RULE = "be a finite number > 0, at least 2^-126 (the arithmetic is float32)"


def holds(eps: object) -> bool:
    """Whether an option is such a number."""
    return isinstance(eps, float) and SMALLEST <= eps <= LARGEST
