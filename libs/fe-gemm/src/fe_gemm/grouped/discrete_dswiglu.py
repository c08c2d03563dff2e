"""``discrete_grouped_gemm_dswiglu``: block-scaled ``grouped_gemm_dglu`` with weights behind addresses, in legacy
form."""

from __future__ import annotations

from typing import Any

from fe_gemm import GroupedGemmDglu, grouped_gemm_dglu_jax, grouped_gemm_dglu_wrapper
from fe_runtime.errors import InvalidArgumentError, explain
from fe_runtime.tuple_dict import TupleDict

from . import forms
from .adapter import AdapterAPI, check_scaled, given

__all__ = [
    "DiscreteGroupedGemmDswiglu",
    "discrete_grouped_gemm_dswiglu_jax",
    "discrete_grouped_gemm_dswiglu_wrapper",
]

NAME = "discrete_grouped_gemm_dswiglu"
ACTIVATIONS = ("dswiglu", "dgeglu")
OF_ROWS = ("d_row_tensor", "d_col_tensor")


def discrete_grouped_gemm_dswiglu_wrapper(
    a_tensor: Any,
    b_ptrs: Any,
    c_tensor: Any,
    sfa_tensor: Any,
    sfb_ptrs: Any,
    padded_offsets: Any,
    alpha_tensor: Any,
    beta_tensor: Any,
    prob_tensor: Any,
    dprob_tensor: Any,
    n: int,
    b_dtype: Any,
    generate_dbias: bool = False,
    norm_const_tensor: Any = None,
    acc_dtype: Any = None,
    d_dtype: Any = None,
    cd_major: str = "n",
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    sf_vec_size: int = 16,
    vector_f32: bool = False,
    m_aligned: int = 256,
    discrete_col_sfd: bool = False,
    act_func: str = "dswiglu",
    b_major: str = "k",
    epilogue_op: str | None = None,
    linear_offset: float | None = None,
    geglu_alpha: float = 1.702,
    glu_clamp_max: float = 7.0,
    glu_clamp_min: float = -7.0,
    use_dynamic_sched: bool = False,
    current_stream: Any = None,
    *,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> TupleDict:
    """Multiply gradients by weights behind addresses, and carry them back through the gated activation.

    Everything is as in :func:`fe_gemm.grouped_gemm_dglu_wrapper` with discrete weights of fp8 or FP4 and ``act_func``
    ``"dswiglu"`` or ``"dgeglu"``; prob and dprob are required (JAX: no dprob). A D that is not fp8 is a plain cast.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: backward of discrete grouped GEMM with SwiGLU.
    """
    check_scaled(NAME, a_tensor)
    _check(act_func)
    given(NAME, b_ptrs=b_ptrs, sfb_ptrs=sfb_ptrs, prob_tensor=prob_tensor)
    if not forms.is_jax(a_tensor):
        given(NAME, dprob_tensor=dprob_tensor)
    return grouped_gemm_dglu_wrapper(
        a_tensor,
        c_tensor,
        sfa_tensor,
        padded_offsets,
        alpha_tensor,
        beta_tensor,
        prob_tensor,
        dprob_tensor,
        generate_dbias=generate_dbias,
        b_ptrs=b_ptrs,
        sfb_ptrs=sfb_ptrs,
        n=n,
        b_dtype=b_dtype,
        b_major=b_major,
        norm_const_tensor=norm_const_tensor,
        acc_dtype=acc_dtype,
        d_dtype=d_dtype,
        cd_major=cd_major,
        mma_tiler_mn=mma_tiler_mn,
        cluster_shape_mn=cluster_shape_mn,
        sf_vec_size=sf_vec_size,
        vector_f32=vector_f32,
        m_aligned=m_aligned,
        discrete_col_sfd=discrete_col_sfd,
        act_func=act_func,
        linear_offset=linear_offset,
        geglu_alpha=geglu_alpha,
        glu_clamp_max=glu_clamp_max,
        glu_clamp_min=glu_clamp_min,
        epilogue_op=epilogue_op,
        use_dynamic_sched=use_dynamic_sched,
        current_stream=current_stream,
        deterministic=deterministic,
        backend=backend,
    )


class DiscreteGroupedGemmDswiglu(AdapterAPI):
    """Backward of gated block-scaled products with discrete weights into the caller's outputs; see
    :class:`fe_gemm.GroupedGemmDglu`. The factors of the activation are those of each execution."""

    def __init__(
        self,
        sample_a: Any,
        num_experts: int,
        b_shape: tuple[int, ...],
        b_dtype: Any,
        sample_c: Any,
        sample_d_row: Any,
        sample_d_col: Any,
        sample_sfa: Any,
        sample_padded_offsets: Any,
        sample_alpha: Any,
        sample_beta: Any,
        sample_prob: Any,
        sample_dprob: Any,
        sample_dbias: Any = None,
        sample_sfd_row: Any = None,
        sample_sfd_col: Any = None,
        sample_amax: Any = None,
        sample_norm_const: Any = None,
        acc_dtype: Any = None,
        mma_tiler_mn: tuple[int, int] = (256, 256),
        cluster_shape_mn: tuple[int, int] | None = None,
        sf_vec_size: int = 16,
        vector_f32: bool = False,
        m_aligned: int = 256,
        discrete_col_sfd: bool = False,
        act_func: str = "dswiglu",
        b_major: str = "k",
        epilogue_op: str | None = None,
        use_dynamic_sched: bool = False,
        *,
        deterministic: bool | None = None,
        backend: str = "auto",
    ) -> None:
        self._act_func = act_func
        inner = GroupedGemmDglu(
            sample_a,
            sample_c,
            sample_d_row,
            sample_d_col,
            sample_sfa,
            sample_padded_offsets,
            sample_alpha,
            sample_beta,
            sample_prob,
            sample_dprob,
            sample_dbias=sample_dbias,
            num_experts=num_experts,
            b_shape=b_shape,
            b_dtype=b_dtype,
            sample_sfd_row=sample_sfd_row,
            sample_sfd_col=sample_sfd_col,
            sample_amax=sample_amax,
            sample_norm_const=sample_norm_const,
            acc_dtype=acc_dtype,
            mma_tiler_mn=mma_tiler_mn,
            cluster_shape_mn=cluster_shape_mn,
            sf_vec_size=sf_vec_size,
            vector_f32=vector_f32,
            m_aligned=m_aligned,
            discrete_col_sfd=discrete_col_sfd,
            act_func=act_func,
            b_major=b_major,
            epilogue_op=epilogue_op,
            use_dynamic_sched=use_dynamic_sched,
            _deterministic=deterministic,
            backend=backend,
        )
        super().__init__(NAME, inner, sample_a, takes_jax=True)

    def execute(
        self,
        a_tensor: Any,
        b_ptrs: Any,
        c_tensor: Any,
        d_row_tensor: Any,
        d_col_tensor: Any,
        sfa_tensor: Any,
        sfb_ptrs: Any,
        padded_offsets: Any,
        alpha_tensor: Any,
        beta_tensor: Any,
        prob_tensor: Any,
        dprob_tensor: Any,
        dbias_tensor: Any = None,
        sfd_row_tensor: Any = None,
        sfd_col_tensor: Any = None,
        amax_tensor: Any = None,
        norm_const_tensor: Any = None,
        linear_offset: float | None = None,
        geglu_alpha: float = 1.702,
        glu_clamp_max: float = 7.0,
        glu_clamp_min: float = -7.0,
        current_stream: Any = None,
    ) -> None:
        """Write the results into the caller's outputs, add to dprob and dbias; no synchronisation."""
        factors = {
            "linear_offset": linear_offset,
            "geglu_alpha": geglu_alpha,
            "glu_clamp_max": glu_clamp_max,
            "glu_clamp_min": glu_clamp_min,
        }
        self._inner.execute(
            a_tensor,
            c_tensor,
            d_row_tensor,
            d_col_tensor,
            sfa_tensor,
            padded_offsets,
            alpha_tensor,
            beta_tensor,
            prob_tensor,
            dprob_tensor,
            dbias_tensor=dbias_tensor,
            b_ptrs=b_ptrs,
            sfb_ptrs=sfb_ptrs,
            sfd_row_tensor=sfd_row_tensor,
            sfd_col_tensor=sfd_col_tensor,
            amax_tensor=amax_tensor,
            norm_const_tensor=norm_const_tensor,
            current_stream=current_stream,
            factors=factors,
        )

    def _check(self) -> None:
        super()._check()
        _check(self._act_func)


def discrete_grouped_gemm_dswiglu_jax(
    a_tensor: Any,
    b_ptrs: Any,
    c_tensor: Any,
    sfa_tensor: Any,
    sfb_ptrs: Any,
    padded_offsets: Any,
    alpha_tensor: Any,
    beta_tensor: Any,
    prob_tensor: Any,
    norm_const_tensor: Any,
    n: int,
    generate_dbias: bool = False,
    d_dtype: Any = "bfloat16",
    acc_dtype: Any = "float32",
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    sf_vec_size: int = 32,
    vector_f32: bool = False,
    discrete_col_sfd: bool = False,
    act_func: str = "dswiglu",
    epilogue_op: str | None = None,
    linear_offset: float | None = None,
    geglu_alpha: float = 1.702,
    glu_clamp_max: float = 7.0,
    glu_clamp_min: float = -7.0,
    use_dynamic_sched: bool = False,
    *,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> dict[str, Any]:
    """Apply the operation to JAX arrays, eagerly or under ``jit``: see :func:`fe_gemm.grouped_gemm_dglu_jax`.

    Returns
    -------
    dict
        The wrapper's results; rows from the last offset on are 0, in dprob too.
    """
    del deterministic
    check_scaled(NAME, a_tensor)
    _check(act_func)
    given(NAME, b_ptrs=b_ptrs, sfb_ptrs=sfb_ptrs, prob_tensor=prob_tensor)
    if epilogue_op not in (None, "none", "identity"):
        rule = "be None for JAX arrays"
        raise InvalidArgumentError(explain(NAME, "epilogue_op", rule, repr(epilogue_op), "Leave it out."))
    result = grouped_gemm_dglu_jax(
        a_tensor,
        c_tensor,
        padded_offsets,
        alpha_tensor,
        beta_tensor,
        b_ptrs,
        n,
        prob_tensor,
        d_dtype,
        acc_dtype,
        mma_tiler_mn,
        cluster_shape_mn,
        vector_f32,
        act_func,
        linear_offset,
        generate_dbias,
        use_dynamic_sched,
        sfa_tensor=sfa_tensor,
        sfb_ptrs=sfb_ptrs,
        norm_const_tensor=norm_const_tensor,
        discrete_col_sfd=discrete_col_sfd,
        geglu_alpha=geglu_alpha,
        glu_clamp_max=glu_clamp_max,
        glu_clamp_min=glu_clamp_min,
        sf_vec_size=sf_vec_size,
        backend=backend,
    )
    return forms.rows_without_tail(result, OF_ROWS, padded_offsets)


def _check(act_func: Any) -> None:
    if act_func not in ACTIVATIONS:
        rule = "be dswiglu or dgeglu"
        raise InvalidArgumentError(explain(NAME, "act_func", rule, repr(act_func), "Use grouped_gemm_dglu."))
