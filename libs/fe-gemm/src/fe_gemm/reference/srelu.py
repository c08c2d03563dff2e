"""Block-scaled product with the squared ReLU and a factor for each row, on arrays of any framework."""

from __future__ import annotations

from typing import Any

from . import operands

__all__ = ["gemm_srelu"]


@operands.quiet
def gemm_srelu(
    a: Any,
    b: Any,
    sfa: Any,
    sfb: Any,
    prob: Any,
    norm_const: Any = None,
    *,
    alpha: float = 1.0,
    c_dtype: str = "bfloat16",
    d_dtype: str = "bfloat16",
    sf_vec_size: int = 16,
    with_amax: bool | None = None,
    accumulate: str = "float32",
    **without_effect: object,
) -> tuple[Any, Any, Any, Any]:
    """Multiply block-scaled matrices, square what is positive, and scale each row.

    ``x = alpha * sum_k A*B``, ``C = CAST(x)``, ``d = relu(x)^2 * prob``, ``D = CAST(d)`` or quantised when fp8.

    Parameters
    ----------
    a, b
        (M, K, L) and (N, K, L): e4m3, e5m2, or e2m1 packed along K.
    sfa, sfb
        Blocked scales of A and B, either form.
    prob
        (M, 1, L) float32, any strides.
    norm_const
        (1,) float32 for an fp8 D.
    alpha
        Rounded to fp32.
    c_dtype, d_dtype
        dtypes of the outputs; an fp8 C is a plain cast, an fp8 D is quantised in blocks of ``sf_vec_size`` columns.
    sf_vec_size
        Elements per scale.
    with_amax
        Whether to return amax; ``None``: for packed e2m1 operands and a D wider than fp8.
    accumulate
        ``"float64"``: sum in fp64, rounded once to fp32.
    without_effect
        Majors and hints, which do not change values.

    Returns
    -------
    tuple
        ``(c, d, amax, sfd)``: C and D (M, N, L); ``amax`` (1,) the largest ``|d|`` before its rounding; ``sfd``
        blocked e8m0 scales of an fp8 D; both ``None`` where not asked for. ``relu`` keeps NaN.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: GEMM with squared ReLU, mathematics.
    """
    del without_effect
    x = operands.scaled(operands.accumulator(a, b, sfa, sfb, vec=sf_vec_size, accumulate=accumulate), alpha)
    positive = operands.relu(x)
    value = (positive * positive) * operands.batched(prob)
    d, sfd = operands.stored_or_quantised(value, d_dtype, norm_const, sf_vec_size)
    if with_amax is None:
        with_amax = operands.is_fp4(a) and d_dtype not in operands.FP8
    amax = operands.largest_magnitude(value, (1,)) if with_amax else None
    return operands.stored(x, c_dtype), d, amax, sfd
