"""``discrete_grouped_gemm_swiglu``: block-scaled ``grouped_gemm_glu`` with weights behind addresses, in legacy form."""

from __future__ import annotations

from typing import Any

from fe_gemm import GroupedGemmGlu, grouped_gemm_glu_jax, grouped_gemm_glu_wrapper
from fe_runtime.errors import InvalidArgumentError, explain
from fe_runtime.tuple_dict import TupleDict

from . import forms
from .adapter import AdapterAPI, check_scaled, given

__all__ = [
    "DiscreteGroupedGemmSwiglu",
    "discrete_grouped_gemm_swiglu_jax",
    "discrete_grouped_gemm_swiglu_wrapper",
]

NAME = "discrete_grouped_gemm_swiglu"
ACTIVATIONS = ("swiglu", "geglu")
OF_ROWS = ("c_tensor", "d_tensor", "d_col_tensor")


def discrete_grouped_gemm_swiglu_wrapper(
    a_tensor: Any,
    b_ptrs: Any,
    sfa_tensor: Any,
    sfb_ptrs: Any,
    padded_offsets: Any,
    alpha_tensor: Any,
    n: int,
    b_dtype: Any,
    bias_tensor: Any = None,
    norm_const_tensor: Any = None,
    prob_tensor: Any = None,
    acc_dtype: Any = None,
    c_dtype: Any = None,
    d_dtype: Any = None,
    cd_major: str = "n",
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    sf_vec_size: int = 16,
    vector_f32: bool = False,
    m_aligned: int = 256,
    discrete_col_sfd: bool = False,
    act_func: str = "swiglu",
    b_major: str = "k",
    linear_offset: float | None = None,
    geglu_alpha: float = 1.702,
    glu_clamp_max: float = 7.0,
    glu_clamp_min: float = -7.0,
    use_dynamic_sched: bool = False,
    current_stream: Any = None,
    *,
    backend: str = "auto",
) -> TupleDict:
    """Multiply each row by its expert's weight, which lies behind an address, and gate.

    Everything is as in :func:`fe_gemm.grouped_gemm_glu_wrapper` with discrete weights of fp8 or FP4 and ``act_func``
    ``"swiglu"`` or ``"geglu"``; C is always returned.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: discrete grouped GEMM with SwiGLU.
    """
    check_scaled(NAME, a_tensor)
    _check(act_func)
    given(NAME, b_ptrs=b_ptrs, sfb_ptrs=sfb_ptrs)
    return grouped_gemm_glu_wrapper(
        a_tensor,
        sfa_tensor,
        padded_offsets,
        alpha_tensor,
        bias_tensor=bias_tensor,
        b_ptrs=b_ptrs,
        sfb_ptrs=sfb_ptrs,
        n=n,
        b_dtype=b_dtype,
        b_major=b_major,
        norm_const_tensor=norm_const_tensor,
        prob_tensor=prob_tensor,
        acc_dtype=acc_dtype,
        c_dtype=c_dtype,
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
        use_dynamic_sched=use_dynamic_sched,
        current_stream=current_stream,
        generate_c=True,
        backend=backend,
    )


class DiscreteGroupedGemmSwiglu(AdapterAPI):
    """Gated block-scaled products with discrete weights into the caller's outputs; see
    :class:`fe_gemm.GroupedGemmGlu`."""

    def __init__(
        self,
        sample_a: Any,
        num_experts: int,
        b_shape: tuple[int, ...],
        b_dtype: Any,
        sample_c: Any,
        sample_d: Any,
        sample_sfa: Any,
        sample_padded_offsets: Any,
        sample_alpha: Any,
        sample_d_col: Any,
        sample_bias: Any = None,
        sample_sfd_row: Any = None,
        sample_sfd_col: Any = None,
        sample_amax: Any = None,
        sample_norm_const: Any = None,
        sample_prob: Any = None,
        acc_dtype: Any = None,
        mma_tiler_mn: tuple[int, int] = (256, 256),
        cluster_shape_mn: tuple[int, int] | None = None,
        sf_vec_size: int = 16,
        vector_f32: bool = False,
        m_aligned: int = 256,
        discrete_col_sfd: bool = False,
        act_func: str = "swiglu",
        b_major: str = "k",
        use_dynamic_sched: bool = False,
        *,
        backend: str = "auto",
    ) -> None:
        self._act_func = act_func
        inner = GroupedGemmGlu(
            sample_a,
            sample_c,
            sample_d,
            sample_sfa,
            sample_padded_offsets,
            sample_alpha,
            sample_d_col,
            sample_bias=sample_bias,
            num_experts=num_experts,
            b_shape=b_shape,
            b_dtype=b_dtype,
            sample_sfd_row=sample_sfd_row,
            sample_sfd_col=sample_sfd_col,
            sample_amax=sample_amax,
            sample_norm_const=sample_norm_const,
            sample_prob=sample_prob,
            acc_dtype=acc_dtype,
            mma_tiler_mn=mma_tiler_mn,
            cluster_shape_mn=cluster_shape_mn,
            sf_vec_size=sf_vec_size,
            vector_f32=vector_f32,
            m_aligned=m_aligned,
            discrete_col_sfd=discrete_col_sfd,
            act_func=act_func,
            b_major=b_major,
            use_dynamic_sched=use_dynamic_sched,
            generate_c=True,
            backend=backend,
        )
        super().__init__(NAME, inner, sample_a, takes_jax=True)

    def execute(
        self,
        a_tensor: Any,
        b_ptrs: Any,
        c_tensor: Any,
        d_tensor: Any,
        sfa_tensor: Any,
        sfb_ptrs: Any,
        padded_offsets: Any,
        alpha_tensor: Any,
        bias_tensor: Any = None,
        d_col_tensor: Any = None,
        sfd_row_tensor: Any = None,
        sfd_col_tensor: Any = None,
        amax_tensor: Any = None,
        norm_const_tensor: Any = None,
        prob_tensor: Any = None,
        linear_offset: float | None = None,
        geglu_alpha: float = 1.702,
        glu_clamp_max: float = 7.0,
        glu_clamp_min: float = -7.0,
        current_stream: Any = None,
    ) -> None:
        """Write the results into the caller's outputs; no synchronisation, no allocation."""
        self._inner.execute(
            a_tensor,
            c_tensor,
            d_tensor,
            sfa_tensor,
            padded_offsets,
            alpha_tensor,
            bias_tensor=bias_tensor,
            b_ptrs=b_ptrs,
            sfb_ptrs=sfb_ptrs,
            d_col_tensor=d_col_tensor,
            sfd_row_tensor=sfd_row_tensor,
            sfd_col_tensor=sfd_col_tensor,
            amax_tensor=amax_tensor,
            norm_const_tensor=norm_const_tensor,
            prob_tensor=prob_tensor,
            linear_offset=linear_offset,
            geglu_alpha=geglu_alpha,
            glu_clamp_max=glu_clamp_max,
            glu_clamp_min=glu_clamp_min,
            current_stream=current_stream,
        )

    def _check(self) -> None:
        super()._check()
        _check(self._act_func)


def discrete_grouped_gemm_swiglu_jax(
    a_tensor: Any,
    b_ptrs: Any,
    sfa_tensor: Any,
    sfb_ptrs: Any,
    padded_offsets: Any,
    alpha_tensor: Any,
    prob_tensor: Any,
    norm_const_tensor: Any,
    n: int,
    bias_tensor: Any = None,
    c_dtype: Any = "bfloat16",
    d_dtype: Any = "bfloat16",
    acc_dtype: Any = "float32",
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    sf_vec_size: int = 32,
    vector_f32: bool = False,
    discrete_col_sfd: bool = False,
    act_func: str = "swiglu",
    linear_offset: float | None = None,
    geglu_alpha: float = 1.702,
    glu_clamp_max: float = 7.0,
    glu_clamp_min: float = -7.0,
    use_dynamic_sched: bool = False,
    *,
    backend: str = "auto",
) -> dict[str, Any]:
    """Apply the operation to JAX arrays, eagerly or under ``jit``: see :func:`fe_gemm.grouped_gemm_glu_jax`.

    Returns
    -------
    dict
        The wrapper's results; rows from the last offset on are 0.
    """
    check_scaled(NAME, a_tensor)
    _check(act_func)
    given(NAME, b_ptrs=b_ptrs, sfb_ptrs=sfb_ptrs)
    result = grouped_gemm_glu_jax(
        a_tensor,
        padded_offsets,
        alpha_tensor,
        b_ptrs,
        n,
        prob_tensor,
        c_dtype,
        d_dtype,
        acc_dtype,
        mma_tiler_mn,
        cluster_shape_mn,
        vector_f32,
        act_func,
        linear_offset,
        True,
        use_dynamic_sched,
        sfa_tensor=sfa_tensor,
        sfb_ptrs=sfb_ptrs,
        norm_const_tensor=norm_const_tensor,
        bias_tensor=bias_tensor,
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
        rule = "be swiglu or geglu"
        raise InvalidArgumentError(explain(NAME, "act_func", rule, repr(act_func), "Use grouped_gemm_glu."))
