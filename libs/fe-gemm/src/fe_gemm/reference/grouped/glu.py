"""Grouped products with a gated activation, bf16 or block-scaled, on arrays of any framework."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from fe_gemm.reference import operands
from fe_runtime import formats

from . import experts, forms, groups, quantised
from .activations import Activation, separated

__all__ = ["grouped_gemm_glu"]


@operands.quiet
def grouped_gemm_glu(
    a: Any,
    sfa: Any,
    padded_offsets: Any,
    alpha: Any,
    b: Any = None,
    sfb: Any = None,
    bias: Any = None,
    b_ptrs: Any = None,
    sfb_ptrs: Any = None,
    norm_const: Any = None,
    prob: Any = None,
    *,
    n: int | None = None,
    b_dtype: str | None = None,
    b_major: str = "k",
    c_dtype: str | None = None,
    d_dtype: str | None = None,
    sf_vec_size: int = 16,
    discrete_col_sfd: bool = False,
    act_func: str = "swiglu",
    linear_offset: float | None = None,
    geglu_alpha: float = 1.702,
    glu_clamp_max: float = 7.0,
    glu_clamp_min: float = -7.0,
    situ_beta1: float = 4.0,
    situ_beta2: float = 25.0,
    use_single_group_runtime_offsets: bool = False,
    generate_c: bool | None = None,
    with_amax: bool | None = None,
    accumulate: str = "float32",
    **without_effect: object,
) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Multiply each row by its expert's weight, and gate: even blocks of 32 columns are gates, odd ones are gated.

    ``h = alpha[e] * sum_k A*B_e + bias[e]``, ``C = CAST(h)``; from h, not from C, ``x = act(gate, up) * prob``:

    * swiglu: ``up * gate*sigmoid(gate)``;
    * geglu: ``(clamp(up) + linear_offset) * g*sigmoid(geglu_alpha * g)`` with ``g = min(gate, glu_clamp_max)``;
    * situglu: ``beta1*tanh(gate/beta1)*sigmoid(gate) * beta2*tanh(up/beta2)``.

    Parameters
    ----------
    a
        (M, K) or (M, K, 1): bfloat16, e4m3, e5m2, or e2m1 packed along K. Rows of the tail may hold anything.
    sfa
        Blocked scales of A over all rows, in any form; ``None`` for bfloat16.
    padded_offsets
        (E,) int32: the row after the last one of each expert, non-decreasing. Any group sizes, but multiples of 128
        with ``discrete_col_sfd``.
    alpha
        (E,) float32.
    b, sfb
        (N, K, E), (E, N, K), or with ``b_major="n"`` (E, K, N), told apart by the strides; scales in any form.
    bias
        (N, E), bfloat16, float16 or float32, or ``None``.
    b_ptrs, sfb_ptrs
        Instead of ``b`` and ``sfb``: addresses of the experts' matrices and blocked scales, on the device of ``a``.
    norm_const
        (1,) float32: D of fp8 operands is quantised, also a 16-bit one. ``None``: D is rounded.
    prob
        (M,) or (M, 1, 1), float32 or bfloat16, or ``None`` for 1.
    n, b_dtype, b_major
        Rows, dtype and major of what lies behind ``b_ptrs``; ``b_dtype=None``: the dtype of A.
    c_dtype, d_dtype
        bfloat16 if left out; an fp8 C is a plain cast.
    sf_vec_size
        Elements per scale of the operands; scales of D are per 32.
    discrete_col_sfd
        Column scales of D as one blocked layout for each expert.
    use_single_group_runtime_offsets
        All rows belong to the only expert, whatever ``padded_offsets`` holds.
    generate_c
        Whether to return C; ``None``: with scales.
    with_amax
        Whether to return amax; ``None``: with scales and a bfloat16 or float16 D.
    accumulate
        ``"float64"``: sum in fp64, rounded once to fp32.
    without_effect
        Hints, which do not change values.

    Returns
    -------
    tuple
        ``(c, d, d_col, amax, sfd_row, sfd_col)``: C (M, N), D and D_col (M, N/2) in the form of A, rows of the tail
        0; ``amax`` (E, 1) float32, the largest ``|x|``, -inf for an expert without rows, NaN if there is one; e8m0
        scales, the logical view where A has rank 3 (JAX: the physical form). ``None`` for what is not produced.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: grouped GEMM with GLU, mathematics.
    """
    del without_effect
    rows, d_dtype = forms.matrix(a), d_dtype or "bfloat16"
    extent = rows.shape[0]
    offsets = forms.row_offsets(padded_offsets, extent, use_single_group_runtime_offsets)
    weights = experts.weights(
        rows, offsets, b, sfb, b_ptrs, sfb_ptrs, sfa, n=n, b_dtype=b_dtype, b_major=b_major, vec=sf_vec_size
    )
    acc = groups.row_products(forms.values(rows, sfa, sf_vec_size), weights, offsets, accumulate)
    h = groups.of_rows(alpha, offsets, extent)[:, None] * acc
    if bias is not None:
        h = h + groups.of_rows(formats.decode(array_namespace(bias).permute_dims(bias, (1, 0))), offsets, extent)
    h = groups.addressed(h, offsets)
    activation = Activation.of(
        act_func, linear_offset, geglu_alpha, glu_clamp_max, glu_clamp_min, situ_beta1, situ_beta2
    )
    x = activation.forward(*separated(h))
    if prob is not None:
        x = x * groups.row_values(prob, offsets)
    c = forms.as_given(formats.cast(h, c_dtype or "bfloat16"), a) if _or(generate_c, sfa is not None) else None
    narrow = d_dtype in ("bfloat16", "float16")
    amax = groups.maxima(x, offsets)[:, None] if _or(with_amax, sfa is not None and narrow) else None
    if norm_const is None:
        return c, forms.as_given(formats.cast(x, d_dtype), a), None, amax, None, None
    found = quantised.both_ways(x, d_dtype, norm_const, offsets, a, norm_first=False, discrete_col_sfd=discrete_col_sfd)
    return c, found.d, found.d_col, amax, found.sfd_row, found.sfd_col


def _or(wanted: bool | None, default: bool) -> bool:
    return default if wanted is None else wanted
