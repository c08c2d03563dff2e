"""Block-scaled product and the largest magnitude of its result, on arrays of any framework."""

from __future__ import annotations

from typing import Any

from . import operands

__all__ = ["gemm_amax"]


@operands.quiet
def gemm_amax(
    a: Any,
    b: Any,
    sfa: Any,
    sfb: Any,
    *,
    c_dtype: str = "float32",
    sf_vec_size: int = 32,
    accumulate: str = "float32",
    **without_effect: object,
) -> tuple[Any, Any]:
    """Multiply block-scaled matrices and find the largest magnitude of the result.

    ``acc = sum_k A*B``, ``C = CAST(acc)``, ``amax = max |acc|`` before the rounding.

    Parameters
    ----------
    a, b
        (M, K, L) and (N, K, L): e4m3, e5m2, or e2m1 packed along K.
    sfa, sfb
        Blocked scales of A and B, either form.
    c_dtype
        fp32, fp16, bf16, e4m3, e5m2, or packed e2m1 (``"float4_e2m1fn_x2"``, or ``"uint8"`` for the container).
    sf_vec_size
        Elements per scale.
    accumulate
        ``"float64"``: sum in fp64, rounded once to fp32.
    without_effect
        Majors and hints, which do not change values.

    Returns
    -------
    tuple
        C (M, N, L), n-major, packed e2m1 (M, N/2, L); amax (1, 1, 1) float32, NaN if C has one, -inf without elements.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: GEMM with amax, mathematics.
    """
    del without_effect
    acc = operands.accumulator(a, b, sfa, sfb, vec=sf_vec_size, accumulate=accumulate)
    return operands.stored(acc, c_dtype), operands.largest_magnitude(acc, (1, 1, 1))
