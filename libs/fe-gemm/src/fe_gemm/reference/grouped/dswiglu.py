"""Legacy form of the backward of the block-scaled grouped product with SwiGLU: weights in one buffer, own dprob."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from .dglu import grouped_gemm_dglu

__all__ = ["grouped_gemm_dswiglu"]


def grouped_gemm_dswiglu(
    a: Any,
    b: Any,
    c: Any,
    sfa: Any,
    sfb: Any,
    padded_offsets: Any,
    alpha: Any,
    beta: Any,
    prob: Any,
    norm_const: Any = None,
    dprob: Any = None,
    *,
    d_dtype: str | None = None,
    sf_vec_size: int = 16,
    discrete_col_sfd: bool = False,
    accumulate: str = "float32",
    **without_effect: object,
) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Multiply gradients by the second layer's weights, and carry them back through SwiGLU.

    Everything is as in :func:`grouped_gemm_dglu` with ``act_func="dswiglu"``, but for what follows.

    Parameters
    ----------
    beta
        ``None`` for ones.
    dprob
        What the sums are added to; ``None`` (the wrapper, which zeroes a given buffer): 0.

    Returns
    -------
    tuple
        ``(d_row, d_col, dprob, amax, sfd_row, sfd_col)``; without rows there are no scales.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: backward of grouped GEMM with SwiGLU.
    """
    del without_effect
    d_row, d_col, dprob, _, amax, sfd_row, sfd_col, _ = grouped_gemm_dglu(
        a,
        c,
        sfa,
        padded_offsets,
        alpha,
        array_namespace(alpha).ones_like(alpha) if beta is None else beta,
        prob,
        dprob,
        b,
        sfb,
        norm_const=norm_const,
        with_dprob=True,
        d_dtype=d_dtype,
        sf_vec_size=sf_vec_size,
        discrete_col_sfd=discrete_col_sfd,
        accumulate=accumulate,
    )
    if a.shape[0] == 0:
        sfd_row = sfd_col = None
    return d_row, d_col, dprob, amax, sfd_row, sfd_col
