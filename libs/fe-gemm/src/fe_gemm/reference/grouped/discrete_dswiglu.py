"""Backward of the grouped product with SwiGLU or GeGLU whose weights lie behind addresses: another argument form."""

from __future__ import annotations

from typing import Any

from .dglu import grouped_gemm_dglu

__all__ = ["discrete_grouped_gemm_dswiglu"]


def discrete_grouped_gemm_dswiglu(
    a: Any,
    b_ptrs: Any,
    c: Any,
    sfa: Any,
    sfb_ptrs: Any,
    padded_offsets: Any,
    alpha: Any,
    beta: Any,
    prob: Any,
    dprob: Any = None,
    norm_const: Any = None,
    *,
    n: int,
    b_dtype: str | None = None,
    **options: Any,
) -> tuple[Any, Any, Any, Any, Any, Any, Any]:
    """Multiply gradients by the second layer's weights, and carry them back through the gated activation.

    Operands, options and results are those of :func:`grouped_gemm_dglu`, without the last result; dprob is always
    returned, from 0 where none is given. A D that is not fp8 is a plain cast without scales and without D_col.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: backward of discrete grouped GEMM with SwiGLU.
    """
    options["with_dprob"], options["with_activation"] = True, False
    arrays = (a, c, sfa, padded_offsets, alpha, beta, prob, dprob, None, None, b_ptrs, sfb_ptrs, norm_const)
    return grouped_gemm_dglu(*arrays, n=n, b_dtype=b_dtype, **options)[:7]
