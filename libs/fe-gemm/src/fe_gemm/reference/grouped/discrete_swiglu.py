"""Block-scaled grouped product with SwiGLU or GeGLU whose weights lie behind addresses: another argument form."""

from __future__ import annotations

from typing import Any

from .glu import grouped_gemm_glu

__all__ = ["discrete_grouped_gemm_swiglu"]


def discrete_grouped_gemm_swiglu(
    a: Any,
    b_ptrs: Any,
    sfa: Any,
    sfb_ptrs: Any,
    padded_offsets: Any,
    alpha: Any,
    bias: Any = None,
    norm_const: Any = None,
    prob: Any = None,
    *,
    n: int,
    b_dtype: str | None = None,
    **options: Any,
) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Multiply each row by its expert's weight, and gate; C is always returned.

    Operands, options and results are those of :func:`grouped_gemm_glu`; ``prob=None`` is a factor of 1.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: discrete grouped GEMM with SwiGLU.
    """
    options["generate_c"] = True
    arrays = (a, sfa, padded_offsets, alpha, None, None, bias, b_ptrs, sfb_ptrs, norm_const, prob)
    return grouped_gemm_glu(*arrays, n=n, b_dtype=b_dtype, **options)
