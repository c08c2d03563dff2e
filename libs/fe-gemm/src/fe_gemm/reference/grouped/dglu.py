"""Gradients through the gated activation of grouped products, bf16 or block-scaled, on arrays of any framework."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from fe_gemm.reference import operands
from fe_runtime import formats

from . import experts, forms, groups, quantised
from .activations import Activation, interleaved, separated

__all__ = ["grouped_gemm_dglu"]


@operands.quiet
def grouped_gemm_dglu(
    a: Any,
    c: Any,
    sfa: Any,
    padded_offsets: Any,
    alpha: Any,
    beta: Any,
    prob: Any = None,
    dprob: Any = None,
    b: Any = None,
    sfb: Any = None,
    b_ptrs: Any = None,
    sfb_ptrs: Any = None,
    norm_const: Any = None,
    *,
    n: int | None = None,
    b_dtype: str | None = None,
    b_major: str = "k",
    generate_dbias: bool = False,
    d_dtype: str | None = None,
    sf_vec_size: int = 16,
    discrete_col_sfd: bool = False,
    act_func: str = "dswiglu",
    linear_offset: float | None = None,
    geglu_alpha: float = 1.702,
    glu_clamp_max: float = 7.0,
    glu_clamp_min: float = -7.0,
    situ_beta1: float = 4.0,
    situ_beta2: float = 25.0,
    use_single_group_runtime_offsets: bool = False,
    round_dgrad_to_input_dtype: bool = False,
    with_activation: bool = False,
    with_dprob: bool | None = None,
    with_amax: bool | None = None,
    accumulate: str = "float32",
    **without_effect: object,
) -> tuple[Any, Any, Any, Any, Any, Any, Any, Any]:
    """Multiply gradients by the second layer's weights, and carry them back through the gated activation.

    ``R = alpha[e]^2 * sum_k A*B_e``; gate and up are ``beta[e] * C`` in even and odd blocks of 32 columns, and
    ``act`` is that of :func:`grouped_gemm_glu`. ``dgate = R*prob * d act/d gate``, ``dup = R*prob * d act/d up``,
    ``dprob = sum_n R*act``, ``dbias = sum over rows(e) of (dgate, dup)``. A clamp that cuts makes the gradient 0.

    Parameters
    ----------
    a, sfa, padded_offsets, alpha, b, sfb, b_ptrs, sfb_ptrs, n, b_dtype, b_major, sf_vec_size, discrete_col_sfd, \
use_single_group_runtime_offsets, accumulate, without_effect
        As in :func:`grouped_gemm_glu`; ``b`` has N rows, one branch of the activation, and may have any major.
    c
        (M, 2N[, 1]): what the forward returned; float32, float16, bfloat16, e4m3 or e5m2.
    beta
        (E,) float32. Without effect for a block-scaled dgeglu.
    prob
        (M,) or (M, 1, 1), float32 or bfloat16, or ``None`` for 1.
    dprob
        Like ``prob``, float32: what the sums are added to. Rows of the tail keep it.
    norm_const
        (1,) float32 for an fp8 D; without effect for any other.
    generate_dbias
        Whether to return dbias.
    d_dtype
        bfloat16 if left out; fp8 is quantised in both directions.
    act_func
        ``"dswiglu"``, ``"dgeglu"`` or ``"dsituglu"``, with the factors of :func:`grouped_gemm_glu`.
    round_dgrad_to_input_dtype
        Round R to bf16 before everything else.
    with_activation
        Whether to return ``act * prob``.
    with_dprob
        Whether to return dprob; ``None``: if it is given. Without a given one it starts at 0.
    with_amax
        Whether to return amax; ``None``: with scales and a bfloat16 or float16 D.

    Returns
    -------
    tuple
        ``(d_row, d_col, dprob, dbias, amax, sfd_row, sfd_col, activation)``: D and D_col (M, 2N) in the form of A,
        rows of the tail 0; dprob float32 in the form of A; ``dbias`` (E, 2N, 1) bfloat16, of unrounded gradients,
        rounded once; ``amax`` (E, 2, 1) float32, the largest ``|dgate|`` and ``|dup|``, -inf for an expert without
        rows; e8m0 scales of an fp8 D; ``activation`` (M, N) bfloat16. ``None`` for what is not produced.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: backward of grouped GEMM with GLU, mathematics.
    """
    del without_effect
    rows, d_dtype = forms.matrix(a), d_dtype or "bfloat16"
    extent = rows.shape[0]
    offsets = forms.row_offsets(padded_offsets, extent, use_single_group_runtime_offsets)
    weights = experts.weights(
        rows, offsets, b, sfb, b_ptrs, sfb_ptrs, sfa, n=n, b_dtype=b_dtype, b_major=b_major, vec=sf_vec_size
    )
    acc = groups.row_products(forms.values(rows, sfa, sf_vec_size), weights, offsets, accumulate)
    r = groups.addressed(groups.of_rows(alpha * alpha, offsets, extent)[:, None] * acc, offsets)
    if round_dgrad_to_input_dtype:
        r = formats.decode(formats.cast(r, "bfloat16"))
    saved = formats.decode(forms.matrix(c))
    if act_func != "dgeglu" or sfa is None:
        saved = groups.of_rows(beta, offsets, extent)[:, None] * saved
    activation = Activation.of(
        act_func, linear_offset, geglu_alpha, glu_clamp_max, glu_clamp_min, situ_beta1, situ_beta2
    )
    act, by_gate, by_up = activation.backward(*separated(groups.addressed(saved, offsets)))
    factor = 1 if prob is None else groups.row_values(prob, offsets)
    dgate, dup = (groups.addressed(r * factor * slope, offsets) for slope in (by_gate, by_up))
    x = interleaved(dgate, dup)

    wants_dprob = dprob is not None if with_dprob is None else with_dprob
    wants_amax = sfa is not None and d_dtype in ("bfloat16", "float16") if with_amax is None else with_amax
    found_dprob = _dprob(groups.addressed(r * act, offsets), dprob, offsets, a) if wants_dprob else None
    dbias = _sums(x, offsets, accumulate) if generate_dbias else None
    amax = _maxima(dgate, dup, offsets) if wants_amax else None
    kept = None
    if with_activation:
        kept = forms.as_given(formats.cast(groups.addressed(act * factor, offsets), "bfloat16"), a)
    if norm_const is None or d_dtype not in operands.FP8:
        d = forms.as_given(formats.cast(x, d_dtype), a)
        return d, None, found_dprob, dbias, amax, None, None, kept
    found = quantised.both_ways(x, d_dtype, norm_const, offsets, a, norm_first=True, discrete_col_sfd=discrete_col_sfd)
    return found.d, found.d_col, found_dprob, dbias, amax, found.sfd_row, found.sfd_col, kept


def _dprob(terms: Any, given: Any, offsets: Any, a: Any) -> Any:
    """Return the sums over columns, added to what is given; rows of the tail as they are."""
    xp = array_namespace(terms)
    sums = xp.sum(terms, axis=1)
    if given is None:
        return forms.as_given(sums, a)
    owned = groups.owners(offsets, sums.shape[0]) < offsets.shape[0]
    flat = xp.reshape(given, (-1,))
    return xp.reshape(xp.where(owned, flat + sums, flat), given.shape)


def _sums(x: Any, offsets: Any, accumulate: str) -> Any:
    xp = array_namespace(x)
    ones = xp.ones_like(x[:, 0])[None, :]
    sums = groups.token_products(ones, x, offsets, accumulate)
    return formats.cast(xp.permute_dims(sums, (0, 2, 1)), "bfloat16")


def _maxima(dgate: Any, dup: Any, offsets: Any) -> Any:
    both = [groups.maxima(part, offsets) for part in (dgate, dup)]
    return array_namespace(dgate).stack(both, axis=1)[:, :, None]
