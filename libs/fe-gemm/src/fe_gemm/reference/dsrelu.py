"""Gradients through the squared ReLU of a block-scaled product, on arrays of any framework."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from fe_runtime import formats

from . import operands

__all__ = ["gemm_dsrelu"]


@operands.quiet
def gemm_dsrelu(
    a: Any,
    b: Any,
    c: Any,
    sfa: Any,
    sfb: Any,
    prob: Any,
    norm_const: Any = None,
    *,
    alpha: float = 1.0,
    d_dtype: str = "bfloat16",
    sf_vec_size: int = 16,
    with_amax: bool | None = None,
    accumulate: str = "float32",
    **without_effect: object,
) -> tuple[Any, Any, Any, Any]:
    """Compute the product again and carry a gradient back through the squared ReLU and the factors of the rows.

    ``G = alpha * sum_k A*B``, ``d = (relu(G)*2) * (C*prob)``, ``D = CAST(d)`` or quantised when fp8,
    ``dprob = sum_n relu(G)^2 * C``.

    Parameters
    ----------
    a, b, sfa, sfb, alpha, sf_vec_size, accumulate, without_effect
        As in :func:`fe_gemm.reference.gemm_srelu`.
    c
        (M, N, L), fp16, bf16 or fp32: the gradient of the activation's output.
    prob
        (M, 1, L) float32, any strides.
    norm_const
        (1,) float32 for an fp8 D.
    d_dtype
        dtype of D; fp8 is quantised in blocks of ``sf_vec_size`` columns.
    with_amax
        Whether to return amax; ``None``: for packed e2m1 operands and a D wider than fp8.

    Returns
    -------
    tuple
        ``(d, dprob, amax, sfd)``: D (M, N, L); ``dprob`` (M, 1, L) float32; ``amax`` (1,) the largest ``|d|`` before
        its rounding; ``sfd`` blocked e8m0 scales of an fp8 D; the last two ``None`` where not asked for. ``relu``
        keeps NaN.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: backward of GEMM with squared ReLU, mathematics.
    """
    del without_effect
    g = operands.scaled(operands.accumulator(a, b, sfa, sfb, vec=sf_vec_size, accumulate=accumulate), alpha)
    positive, gradient = operands.relu(g), formats.decode(operands.batched(c))
    value = (positive * 2) * (gradient * operands.batched(prob))
    dprob = array_namespace(g).sum((positive * positive) * gradient, axis=-1, keepdims=True)
    d, sfd = operands.stored_or_quantised(value, d_dtype, norm_const, sf_vec_size)
    if with_amax is None:
        with_amax = operands.is_fp4(a) and d_dtype not in operands.FP8
    amax = operands.largest_magnitude(value, (1,)) if with_amax else None
    return d, operands.unbatched(dprob), amax, sfd
