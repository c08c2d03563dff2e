"""Product with the SwiGLU activation in interleaved blocks of 32 columns, on arrays of any framework."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from fe_runtime import formats

from . import operands

__all__ = ["gemm_swiglu"]

BLOCK = 32
"""Columns of the product that are all ``up`` or all ``gate``."""


@operands.quiet
def gemm_swiglu(
    a: Any,
    b: Any,
    sfa: Any = None,
    sfb: Any = None,
    norm_const: Any = None,
    *,
    alpha: float = 1.0,
    ab12_dtype: str = "float32",
    c_dtype: str = "float16",
    acc_dtype: str = "float32",
    sf_vec_size: int = 16,
    with_amax: bool | None = None,
    accumulate: str = "float32",
    **without_effect: object,
) -> tuple[Any, Any, Any, Any]:
    """Multiply, then gate each block of 32 columns by the block after it.

    ``x = alpha * sum_k A*B``; of each 64 columns of x the first 32 are ``up``, the last 32 ``gate``;
    ``C = up * (gate * sigmoid(gate))``.

    Parameters
    ----------
    a, b
        (M, K, L) and (N, K, L), N a multiple of 64. Without scales fp16, bf16, fp32, e4m3 or e5m2; with scales e4m3,
        e5m2, or e2m1 packed along K.
    sfa, sfb
        Blocked scales of A and B, either form, or both ``None``.
    norm_const
        (1,) float32 for an fp8 C.
    alpha
        Rounded to fp32.
    ab12_dtype, c_dtype
        dtypes of the outputs. With scales an fp8 C is quantised in blocks of ``sf_vec_size`` columns.
    acc_dtype
        ``"float16"``: the sum is rounded once to fp16 before alpha.
    sf_vec_size
        Elements per scale.
    with_amax
        Whether to return amax; ``None``: with scales, for packed e2m1 operands and a bf16 C.
    accumulate
        ``"float64"``: sum in fp64, rounded once to fp32.
    without_effect
        Majors and hints, which do not change values.

    Returns
    -------
    tuple
        ``(ab12, c, sfc, amax)``: AB12 (M, N, L) is x stored, C (M, N/2, L); ``sfc`` blocked e8m0 scales of an fp8 C,
        ``amax`` (1, 1, 1) the largest magnitude of C before its rounding; both ``None`` where not asked for.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: GEMM with SwiGLU, mathematics.
    """
    del without_effect
    acc = operands.accumulator(a, b, sfa, sfb, vec=sf_vec_size, accumulate=accumulate)
    if acc_dtype == "float16":
        acc = formats.decode(formats.cast(acc, "float16"))
    x = operands.scaled(acc, alpha)
    value = _gated(x)
    c, sfc = operands.stored_or_quantised(value, c_dtype, norm_const, sf_vec_size if sfa is not None else None)
    if with_amax is None:
        with_amax = sfa is not None and operands.is_fp4(a) and c_dtype == "bfloat16"
    amax = operands.largest_magnitude(value, (1, 1, 1)) if with_amax else None
    return operands.stored(x, ab12_dtype), c, sfc, amax


def _gated(x: Any) -> Any:
    xp = array_namespace(x)
    batch, rows, columns = x.shape
    pairs = xp.reshape(x, (batch, rows, columns // (2 * BLOCK), 2, BLOCK))
    up, gate = pairs[:, :, :, 0, :], pairs[:, :, :, 1, :]
    return xp.reshape(up * (gate * _sigmoid(gate)), (batch, rows, columns // 2))


def _sigmoid(z: Any) -> Any:
    # 1/(1 + exp(-z)) without overflow: exp of the negative magnitude is at most 1.
    xp = array_namespace(z)
    decay = xp.exp(-xp.abs(z))
    return xp.where(z >= 0, xp.ones_like(z), decay) / (1 + decay)
