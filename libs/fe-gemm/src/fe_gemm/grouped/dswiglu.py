"""``grouped_gemm_dswiglu``: the legacy form of the block-scaled ``grouped_gemm_dglu`` with dense weights."""

from __future__ import annotations

from typing import Any

from fe_gemm import GroupedGemmDglu, grouped_gemm_dglu_jax, grouped_gemm_dglu_wrapper
from fe_runtime.arrays import is_jax_array, is_torch_tensor
from fe_runtime.dtypes import canonical_dtype
from fe_runtime.errors import InvalidArgumentError, explain
from fe_runtime.tuple_dict import TupleDict

from .adapter import AdapterAPI, check_rows, check_scaled, copy_on, given, ones_like, zeroed_rows
from .hints import Hints

__all__ = ["GroupedGemmDswiglu", "grouped_gemm_dswiglu_jax", "grouped_gemm_dswiglu_wrapper"]

NAME = "grouped_gemm_dswiglu"
HINTS = Hints(NAME, tile_n=(128, 256), tile_m=(64, 128, 256), longest=4)
KEYS = ("d_row_tensor", "d_col_tensor", "dprob_tensor", "amax_tensor", "sfd_row_tensor", "sfd_col_tensor")
IDENTITY = (None, "none", "identity")


def grouped_gemm_dswiglu_wrapper(
    a_tensor: Any,
    b_tensor: Any,
    c_tensor: Any,
    sfa_tensor: Any,
    sfb_tensor: Any,
    padded_offsets: Any,
    alpha_tensor: Any,
    beta_tensor: Any,
    prob_tensor: Any,
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
    epilogue_op: str | None = None,
    current_stream: Any = None,
    dprob_tensor_buf: Any = None,
    amax_tensor_buf: Any = None,
    *,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> TupleDict:
    """Multiply gradients by the second layer's weights, and carry them back through SwiGLU.

    Everything is as in :func:`fe_gemm.grouped_gemm_dglu_wrapper` with ``act_func="dswiglu"`` and dense weights of fp8
    or FP4, but for what follows.

    Parameters
    ----------
    beta_tensor
        ``None`` for ones.
    dprob_tensor_buf
        (M,) or (M, 1, 1) float32, which is zeroed, written and returned; ``None``: a new one. JAX: ``None``.
    amax_tensor_buf
        (E, 2, 1) float32, whose maxima are raised: fill it with -inf. ``None``: a new one. Ignored where there is no
        amax. JAX: ``None``.
    deterministic
        Without effect: results always have the same bits.

    Returns
    -------
    TupleDict
        ``d_row_tensor``, ``d_col_tensor``, ``dprob_tensor``, ``amax_tensor``, ``sfd_row_tensor``, ``sfd_col_tensor``;
        without rows the scales are ``None``.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: backward of grouped GEMM with SwiGLU.
    """
    check_scaled(NAME, a_tensor)
    given(NAME, b_tensor=b_tensor, prob_tensor=prob_tensor, alpha_tensor=alpha_tensor, a_tensor=a_tensor)
    HINTS.check(mma_tiler_mn, cluster_shape_mn, vector_f32=vector_f32, m_aligned=m_aligned, cd_major=cd_major)
    in_jax = not is_torch_tensor(a_tensor) and is_jax_array(a_tensor)
    if in_jax:
        _check_jax(dprob_tensor_buf, amax_tensor_buf, epilogue_op)
    dprob = None if in_jax else zeroed_rows(a_tensor, current_stream)
    if dprob_tensor_buf is not None:
        check_rows(NAME, "dprob_tensor_buf", dprob_tensor_buf, dprob)
    wants_amax = canonical_dtype("bfloat16" if d_dtype is None else d_dtype) in ("bfloat16", "float16")
    result = grouped_gemm_dglu_wrapper(
        a_tensor,
        c_tensor,
        sfa_tensor,
        padded_offsets,
        alpha_tensor,
        ones_like(alpha_tensor, current_stream) if beta_tensor is None else beta_tensor,
        prob_tensor,
        dprob,
        b_tensor,
        sfb_tensor,
        norm_const_tensor=norm_const_tensor,
        acc_dtype=acc_dtype,
        d_dtype=d_dtype,
        sf_vec_size=sf_vec_size,
        vector_f32=vector_f32,
        discrete_col_sfd=discrete_col_sfd,
        epilogue_op=epilogue_op,
        current_stream=current_stream,
        deterministic=deterministic,
        outputs={"amax_tensor": amax_tensor_buf} if wants_amax and amax_tensor_buf is not None else None,
        backend=backend,
    )
    kept = _kept(result, a_tensor.shape[0])
    if dprob_tensor_buf is not None:  # not before: a call that raises leaves it as it was
        kept["dprob_tensor"] = copy_on(current_stream, dprob_tensor_buf, kept["dprob_tensor"])
    return kept


class GroupedGemmDswiglu(AdapterAPI):
    """Backward of block-scaled SwiGLU into the caller's outputs; see :class:`fe_gemm.GroupedGemmDglu`."""

    def __init__(
        self,
        sample_a: Any,
        sample_b: Any,
        sample_c: Any,
        sample_d_row: Any,
        sample_d_col: Any,
        sample_sfa: Any,
        sample_sfb: Any,
        sample_padded_offsets: Any,
        sample_alpha: Any,
        sample_beta: Any,
        sample_prob: Any,
        sample_dprob: Any,
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
        epilogue_op: str | None = None,
        *,
        deterministic: bool | None = None,
        backend: str = "auto",
    ) -> None:
        self._hints = mma_tiler_mn, cluster_shape_mn
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
            sample_b,
            sample_sfb,
            sample_sfd_row=sample_sfd_row,
            sample_sfd_col=sample_sfd_col,
            sample_amax=sample_amax,
            sample_norm_const=sample_norm_const,
            acc_dtype=acc_dtype,
            sf_vec_size=sf_vec_size,
            vector_f32=vector_f32,
            m_aligned=m_aligned,
            discrete_col_sfd=discrete_col_sfd,
            epilogue_op=epilogue_op,
            _deterministic=deterministic,
            backend=backend,
        )
        super().__init__(NAME, inner, sample_a, takes_jax=True)

    def execute(
        self,
        a_tensor: Any,
        b_tensor: Any,
        c_tensor: Any,
        d_row_tensor: Any,
        d_col_tensor: Any,
        sfa_tensor: Any,
        sfb_tensor: Any,
        padded_offsets: Any,
        alpha_tensor: Any,
        beta_tensor: Any,
        prob_tensor: Any,
        dprob_tensor: Any,
        sfd_row_tensor: Any = None,
        sfd_col_tensor: Any = None,
        amax_tensor: Any = None,
        norm_const_tensor: Any = None,
        current_stream: Any = None,
    ) -> None:
        """Write the results into the caller's outputs, add to dprob; no synchronisation."""
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
            b_tensor,
            sfb_tensor,
            sfd_row_tensor=sfd_row_tensor,
            sfd_col_tensor=sfd_col_tensor,
            amax_tensor=amax_tensor,
            norm_const_tensor=norm_const_tensor,
            current_stream=current_stream,
        )

    def _check(self) -> None:
        super()._check()
        HINTS.check(*self._hints)


def grouped_gemm_dswiglu_jax(
    a_tensor: Any,
    b_tensor: Any,
    c_tensor: Any,
    sfa_tensor: Any,
    sfb_tensor: Any,
    padded_offsets: Any,
    alpha_tensor: Any,
    beta_tensor: Any,
    prob_tensor: Any,
    norm_const_tensor: Any,
    d_dtype: Any = "float8_e4m3fn",
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    discrete_col_sfd: bool = False,
    *,
    sf_vec_size: int = 32,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> TupleDict:
    """Apply the operation to JAX arrays, eagerly or under ``jit``: see :func:`fe_gemm.grouped_gemm_dglu_jax`."""
    del deterministic
    check_scaled(NAME, a_tensor)
    given(NAME, b_tensor=b_tensor, prob_tensor=prob_tensor)
    HINTS.check(mma_tiler_mn, cluster_shape_mn)
    result = grouped_gemm_dglu_jax(
        a_tensor,
        c_tensor,
        padded_offsets,
        alpha_tensor,
        ones_like(alpha_tensor, None) if beta_tensor is None else beta_tensor,
        prob_tensor=prob_tensor,
        d_dtype=d_dtype,
        b_tensor=b_tensor,
        sfa_tensor=sfa_tensor,
        sfb_tensor=sfb_tensor,
        norm_const_tensor=norm_const_tensor,
        discrete_col_sfd=discrete_col_sfd,
        sf_vec_size=sf_vec_size,
        backend=backend,
    )
    return _kept(result, a_tensor.shape[0])


def _kept(result: Any, rows: int) -> TupleDict:
    """Return the six results; without rows there are no scales."""
    values = [None if not rows and key.startswith("sfd") else result[key] for key in KEYS]
    return TupleDict.of(KEYS, tuple(values))


def _check_jax(dprob: Any, amax: Any, epilogue: Any) -> None:
    for name, value in (("dprob_tensor_buf", dprob), ("amax_tensor_buf", amax)):
        if value is not None:
            rule, fix = "be None for JAX arrays", "XLA allocates the results."
            raise InvalidArgumentError(explain(NAME, name, rule, "an array", fix))
    if epilogue not in IDENTITY:
        rule = "be None for JAX arrays"
        raise InvalidArgumentError(explain(NAME, "epilogue_op", rule, repr(epilogue), "Leave it out."))
