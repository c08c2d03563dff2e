"""Products of groups of rows with their experts' weights, bf16 in, on arrays of any framework."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from fe_gemm.reference import operands
from fe_runtime import formats

from . import experts, forms, groups

__all__ = ["grouped_gemm"]


@operands.quiet
def grouped_gemm(
    a: Any,
    padded_offsets: Any,
    alpha: Any,
    b: Any = None,
    bias: Any = None,
    b_ptrs: Any = None,
    prob: Any = None,
    *,
    n: int | None = None,
    b_dtype: str | None = None,
    b_major: str = "k",
    c_dtype: str | None = None,
    d_dtype: str | None = None,
    generate_c: bool = False,
    accumulate: str = "float32",
    **without_effect: object,
) -> tuple[Any, Any]:
    """Multiply each row by the weight of the expert that it belongs to.

    ``g = alpha[e] * sum_k A*B_e``; without a bias ``c = g``, ``d = g * prob``; with one ``c = d = g + bias*prob``.

    Parameters
    ----------
    a
        (M, K) or (M, K, 1), bfloat16. Rows of the tail may hold anything.
    padded_offsets
        (E,) int32: the row after the last one of each expert, non-decreasing. Any group sizes.
    alpha
        (E,) float32.
    b
        (N, K, E), (E, N, K), or with ``b_major="n"`` (E, K, N); told apart by the strides.
    bias
        (N, E), bfloat16, float16 or float32, or ``None``.
    b_ptrs
        Instead of ``b``: addresses of the experts' matrices, on the device of ``a``.
    prob
        (M,) or (M, 1, 1) float32.
    n, b_dtype, b_major
        Rows, dtype and major of what lies behind ``b_ptrs``.
    c_dtype, d_dtype
        bfloat16 if left out.
    generate_c
        Whether to return C.
    accumulate
        ``"float64"``: sum in fp64, rounded once to fp32.
    without_effect
        Hints, which do not change values.

    Returns
    -------
    tuple
        ``(d, c)``, (M, N) in the form of A; C ``None`` if not asked for. Rows of the tail are 0. D comes from the
        unrounded c.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: grouped GEMM, mathematics.
    """
    del without_effect
    rows = forms.matrix(a)
    weights = experts.weights(
        rows, padded_offsets, b, None, b_ptrs, None, None, n=n, b_dtype=b_dtype, b_major=b_major, vec=0
    )
    acc = groups.row_products(formats.decode(rows), weights, padded_offsets, accumulate)
    c = groups.of_rows(alpha, padded_offsets, rows.shape[0])[:, None] * acc
    factor = groups.row_values(prob, padded_offsets)
    if bias is None:
        d = c * factor
    else:
        turned = array_namespace(bias).permute_dims(bias, (1, 0))
        c = d = c + groups.of_rows(formats.decode(turned), padded_offsets, rows.shape[0]) * factor
    return _stored(d, d_dtype, padded_offsets, a), _stored(c, c_dtype, padded_offsets, a) if generate_c else None


def _stored(x: Any, dtype: str | None, offsets: Any, a: Any) -> Any:
    return forms.as_given(formats.cast(groups.addressed(x, offsets), dtype or "bfloat16"), a)
