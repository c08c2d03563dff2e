"""Legacy form of the block-scaled grouped product with SwiGLU: other order of arguments, weights in one buffer."""

from __future__ import annotations

from typing import Any

from .glu import grouped_gemm_glu

__all__ = ["grouped_gemm_swiglu"]


def grouped_gemm_swiglu(
    a: Any,
    b: Any,
    sfa: Any,
    sfb: Any,
    padded_offsets: Any,
    alpha: Any,
    norm_const: Any = None,
    prob: Any = None,
    *,
    c_dtype: str | None = None,
    d_dtype: str | None = None,
    sf_vec_size: int = 16,
    discrete_col_sfd: bool = False,
    accumulate: str = "float32",
    **without_effect: object,
) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Multiply each row by its expert's weight, and gate with SwiGLU.

    Everything is as in :func:`grouped_gemm_glu` with ``act_func="swiglu"`` and no bias; C is always returned.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: grouped GEMM with SwiGLU.
    """
    del without_effect
    return grouped_gemm_glu(
        a,
        sfa,
        padded_offsets,
        alpha,
        b,
        sfb,
        norm_const=norm_const,
        prob=prob,
        c_dtype=c_dtype,
        d_dtype=d_dtype,
        sf_vec_size=sf_vec_size,
        discrete_col_sfd=discrete_col_sfd,
        generate_c=True,
        accumulate=accumulate,
    )
