"""``grouped_gemm_swiglu``: the legacy form of the block-scaled ``grouped_gemm_glu`` with dense weights."""

from __future__ import annotations

from typing import Any

from fe_gemm import GroupedGemmGlu, grouped_gemm_glu_jax, grouped_gemm_glu_wrapper
from fe_runtime.tuple_dict import TupleDict

from .adapter import AdapterAPI, check_scaled, given

__all__ = ["GroupedGemmSwiglu", "grouped_gemm_swiglu_jax", "grouped_gemm_swiglu_wrapper"]

NAME = "grouped_gemm_swiglu"


def grouped_gemm_swiglu_wrapper(
    a_tensor: Any,
    b_tensor: Any,
    sfa_tensor: Any,
    sfb_tensor: Any,
    padded_offsets: Any,
    alpha_tensor: Any,
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
    current_stream: Any = None,
    *,
    backend: str = "auto",
) -> TupleDict:
    """Multiply each row by its expert's weight, and gate with SwiGLU.

    Everything is as in :func:`fe_gemm.grouped_gemm_glu_wrapper` with ``act_func="swiglu"``, dense weights of fp8 or
    FP4, and no bias; C is always returned, in JAX too.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: grouped GEMM with SwiGLU.
    """
    check_scaled(NAME, a_tensor)
    given(NAME, b_tensor=b_tensor, alpha_tensor=alpha_tensor)
    return grouped_gemm_glu_wrapper(
        a_tensor,
        sfa_tensor,
        padded_offsets,
        alpha_tensor,
        b_tensor,
        sfb_tensor,
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
        current_stream=current_stream,
        generate_c=True,
        backend=backend,
    )


class GroupedGemmSwiglu(AdapterAPI):
    """SwiGLU of block-scaled grouped products into the caller's outputs; see :class:`fe_gemm.GroupedGemmGlu`."""

    def __init__(
        self,
        sample_a: Any,
        sample_b: Any,
        sample_c: Any,
        sample_d: Any,
        sample_sfa: Any,
        sample_sfb: Any,
        sample_padded_offsets: Any,
        sample_alpha: Any,
        sample_d_col: Any,
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
        *,
        backend: str = "auto",
    ) -> None:
        inner = GroupedGemmGlu(
            sample_a,
            sample_c,
            sample_d,
            sample_sfa,
            sample_padded_offsets,
            sample_alpha,
            sample_d_col,
            sample_b,
            sample_sfb,
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
            generate_c=True,
            backend=backend,
        )
        super().__init__(NAME, inner, sample_a, takes_jax=False)

    def execute(
        self,
        a_tensor: Any,
        b_tensor: Any,
        c_tensor: Any,
        d_tensor: Any,
        sfa_tensor: Any,
        sfb_tensor: Any,
        padded_offsets: Any,
        alpha_tensor: Any,
        d_col_tensor: Any = None,
        sfd_row_tensor: Any = None,
        sfd_col_tensor: Any = None,
        amax_tensor: Any = None,
        norm_const_tensor: Any = None,
        prob_tensor: Any = None,
        current_stream: Any = None,
    ) -> None:
        """Write the results into the caller's outputs; no synchronisation."""
        self._inner.execute(
            a_tensor,
            c_tensor,
            d_tensor,
            sfa_tensor,
            padded_offsets,
            alpha_tensor,
            b_tensor,
            sfb_tensor,
            d_col_tensor=d_col_tensor,
            sfd_row_tensor=sfd_row_tensor,
            sfd_col_tensor=sfd_col_tensor,
            amax_tensor=amax_tensor,
            norm_const_tensor=norm_const_tensor,
            prob_tensor=prob_tensor,
            current_stream=current_stream,
        )


def grouped_gemm_swiglu_jax(
    a_tensor: Any,
    b_tensor: Any,
    sfa_tensor: Any,
    sfb_tensor: Any,
    padded_offsets: Any,
    alpha_tensor: Any,
    prob_tensor: Any,
    norm_const_tensor: Any,
    c_dtype: Any = "bfloat16",
    d_dtype: Any = "float8_e4m3fn",
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    discrete_col_sfd: bool = False,
    *,
    sf_vec_size: int = 32,
    backend: str = "auto",
) -> TupleDict:
    """Apply the operation to JAX arrays, eagerly or under ``jit``: see :func:`fe_gemm.grouped_gemm_glu_jax`."""
    check_scaled(NAME, a_tensor)
    given(NAME, b_tensor=b_tensor)
    result: TupleDict = grouped_gemm_glu_jax(
        a_tensor,
        padded_offsets,
        alpha_tensor,
        prob_tensor=prob_tensor,
        c_dtype=c_dtype,
        d_dtype=d_dtype,
        mma_tiler_mn=mma_tiler_mn,
        cluster_shape_mn=cluster_shape_mn,
        generate_c=True,
        b_tensor=b_tensor,
        sfa_tensor=sfa_tensor,
        sfb_tensor=sfb_tensor,
        norm_const_tensor=norm_const_tensor,
        discrete_col_sfd=discrete_col_sfd,
        sf_vec_size=sf_vec_size,
        backend=backend,
    )
    return result
