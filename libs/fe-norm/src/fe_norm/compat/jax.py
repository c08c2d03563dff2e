"""The peer library's JAX names."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["RmsNormRhtAmaxResult", "rmsnorm_rht_amax_sm100"]


class RmsNormRhtAmaxResult(NamedTuple):
    """What :func:`rmsnorm_rht_amax_sm100` returns."""

    output: Any
    amax: Any


def rmsnorm_rht_amax_sm100(
    x: Any,
    weight: Any,
    *,
    eps: float = 1e-5,
    num_threads: int | None = None,
    rows_per_cta: int | None = None,
) -> RmsNormRhtAmaxResult:
    """Call :func:`fe_norm.rmsnorm_rht_amax_jax` and name its results, as the peer's function does."""
    from fe_norm import rmsnorm_rht_amax_jax

    return RmsNormRhtAmaxResult(
        *rmsnorm_rht_amax_jax(x, weight, eps=eps, num_threads=num_threads, rows_per_cta=rows_per_cta)
    )
