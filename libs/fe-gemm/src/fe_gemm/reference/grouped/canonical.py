"""The grouped products on canonical operands, as the operations hand them over: weights (E, N, K) of any strides, a
bias (E, N)."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from fe_runtime.formats import _backend as backend

from . import dglu, glu, unfused, wgrad

__all__ = ["grouped_gemm", "grouped_gemm_dglu", "grouped_gemm_glu", "grouped_gemm_wgrad"]


def grouped_gemm(
    a: Any, padded_offsets: Any, alpha: Any, b: Any, bias: Any, b_ptrs: Any, prob: Any, **options: Any
) -> tuple[Any, Any]:
    """Multiply each row by the weight of its expert: :func:`fe_gemm.reference.grouped.grouped_gemm`."""
    return unfused.grouped_gemm(
        a, padded_offsets, alpha, _weights(b), _bias(bias), b_ptrs, prob, **_with_major(b, options)
    )


def grouped_gemm_glu(
    a: Any,
    sfa: Any,
    padded_offsets: Any,
    alpha: Any,
    b: Any,
    sfb: Any,
    bias: Any,
    b_ptrs: Any,
    sfb_ptrs: Any,
    norm_const: Any,
    prob: Any,
    **options: Any,
) -> tuple[Any, ...]:
    """Multiply and gate: :func:`fe_gemm.reference.grouped.grouped_gemm_glu`."""
    arrays = (a, sfa, padded_offsets, alpha, _weights(b), sfb, _bias(bias), b_ptrs, sfb_ptrs, norm_const, prob)
    return glu.grouped_gemm_glu(*arrays, **_with_major(b, options))


def grouped_gemm_dglu(
    a: Any,
    c: Any,
    sfa: Any,
    padded_offsets: Any,
    alpha: Any,
    beta: Any,
    prob: Any,
    b: Any,
    sfb: Any,
    b_ptrs: Any,
    sfb_ptrs: Any,
    norm_const: Any,
    **options: Any,
) -> tuple[Any, ...]:
    """Carry gradients back: :func:`fe_gemm.reference.grouped.grouped_gemm_dglu`, dprob before it is added."""
    arrays = (a, c, sfa, padded_offsets, alpha, beta, prob, None, _weights(b), sfb, b_ptrs, sfb_ptrs, norm_const)
    return dglu.grouped_gemm_dglu(*arrays, **_with_major(b, options))


def grouped_gemm_wgrad(
    a: Any,
    b: Any,
    bt: Any,
    sfa: Any,
    sfb: Any,
    offsets: Any,
    wgrad_ptrs: Any,
    global_scale_a: Any,
    global_scale_b: Any,
    *,
    accumulate_on_output: bool = False,
    **options: Any,
) -> tuple[Any, Any]:
    """Sum over each expert's tokens: :func:`fe_gemm.reference.grouped.grouped_gemm_wgrad`.

    ``bt`` is B as (N, T). Without addresses, what is to be added to an output is returned, for an expert without tokens
    -0, which changes nothing.

    Returns
    -------
    tuple
        ``(wgrad, None)``.
    """
    arrays = (a, b if bt is None else bt, sfa, sfb, offsets, None, wgrad_ptrs, global_scale_a, global_scale_b)
    options["b_is_transposed"] = bt is not None
    if wgrad_ptrs is not None:
        options["accumulate_on_output"] = accumulate_on_output
    (found,) = wgrad.grouped_gemm_wgrad(*arrays, **options)
    if accumulate_on_output and found is not None:
        xp = array_namespace(found)
        found = xp.where(wgrad.has_tokens(offsets), found, -xp.zeros_like(found))
    return found, None


def _weights(b: Any) -> Any:
    """Return weights in the legacy form (N, K, E), whose strides tell how they lie; JAX arrays are canonical."""
    if b is None or backend.framework_of(b) == "jax":
        return b
    return array_namespace(b).permute_dims(b, (1, 2, 0))


def _bias(bias: Any) -> Any:
    return None if bias is None else array_namespace(bias).permute_dims(bias, (1, 0))


def _with_major(b: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options, where dense weights need no word on how they lie."""
    return options if b is None else {**options, "b_major": "k"}
