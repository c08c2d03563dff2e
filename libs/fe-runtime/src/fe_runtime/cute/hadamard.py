"""The Walsh-Hadamard transform of sixteen values that two neighbouring threads share, in float32.

``H16[i, j] = (-1)^popcount(i & j)``: symmetric, ``H16 @ H16 = 16 * I``. It splits into four stages, one for each bit
of the index; a stage replaces each pair of values whose indices differ in that bit by its sum and difference. A thread
holds eight neighbours, so three stages stay in its registers and one exchange between two threads does the fourth.
"""

from __future__ import annotations

from cutlass import Float32, Int32, cute

__all__ = ["hadamard_8", "hadamard_16", "half_sign"]


def hadamard_16(values: list[Float32], sign: Float32) -> list[Float32]:
    """Return a thread's eight of the sixteen values ``H16 @ y``.

    Threads of even and odd lane ``2i`` and ``2i + 1`` hold ``y[0:8]`` and ``y[8:16]`` and get the same part of the
    result. Every thread of the warp must come here, with ``sign`` from :func:`half_sign`.

    Each result is a sum of all sixteen values through four roundings: its error is at most ``2^-22 * sum|y|`` (and a
    relative ``2^-22`` of that), so ``2^-18 * max|y|``. Products with powers of two commute with it exactly.
    """
    return [
        cute.math.fma(value, sign, cute.arch.shuffle_sync_bfly(value, offset=1))  # one rounding: the product is exact
        for value in hadamard_8(values)
    ]


def hadamard_8(values: list[Float32]) -> list[Float32]:
    """Return ``H8 @ y`` of a thread's eight values: three roundings, error at most ``3 * 2^-24 * sum|y|``."""
    values = list(values)
    for distance in (1, 2, 4):
        for i in range(8):
            if not i & distance:
                low, high = values[i], values[i + distance]
                values[i], values[i + distance] = low + high, low - high
    return values


def half_sign(lane: Int32) -> Float32:
    """Return 1 for a thread of even lane and -1 for one of odd lane: the sign of its values in its own results."""
    return Float32(1 - 2 * (lane & 1))
