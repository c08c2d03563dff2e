"""The peer's namespace of grouped products with weights behind addresses: the same objects as under our names."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from fe_runtime._lazy import lazy_exports as _lazy_exports

if _TYPE_CHECKING:  # what type checkers and editors see
    import fe_gemm as _ours
    from fe_gemm import DiscreteGroupedGemmDswiglu as DiscreteGroupedGemmDswiglu
    from fe_gemm import DiscreteGroupedGemmSwiglu as DiscreteGroupedGemmSwiglu
    from fe_gemm import discrete_grouped_gemm_dswiglu_jax as discrete_grouped_gemm_dswiglu_jax
    from fe_gemm import discrete_grouped_gemm_dswiglu_wrapper as discrete_grouped_gemm_dswiglu_wrapper
    from fe_gemm import discrete_grouped_gemm_swiglu_jax as discrete_grouped_gemm_swiglu_jax
    from fe_gemm import discrete_grouped_gemm_swiglu_wrapper as discrete_grouped_gemm_swiglu_wrapper

    DiscreteGroupedGemmDswigluSm100 = _ours.DiscreteGroupedGemmDswiglu
    DiscreteGroupedGemmSwigluSm100 = _ours.DiscreteGroupedGemmSwiglu
    discrete_grouped_gemm_dswiglu_jax_sm100 = _ours.discrete_grouped_gemm_dswiglu_jax
    discrete_grouped_gemm_dswiglu_wrapper_sm100 = _ours.discrete_grouped_gemm_dswiglu_wrapper
    discrete_grouped_gemm_swiglu_jax_sm100 = _ours.discrete_grouped_gemm_swiglu_jax
    discrete_grouped_gemm_swiglu_wrapper_sm100 = _ours.discrete_grouped_gemm_swiglu_wrapper

_DISCRETE = "fe_gemm.grouped.discrete"

__getattr__, __dir__, __all__ = _lazy_exports(
    __name__,
    {
        "DiscreteGroupedGemmDswiglu": f"{_DISCRETE}_dswiglu:DiscreteGroupedGemmDswiglu",
        "DiscreteGroupedGemmDswigluSm100": f"{_DISCRETE}_dswiglu:DiscreteGroupedGemmDswiglu",
        "DiscreteGroupedGemmSwiglu": f"{_DISCRETE}_swiglu:DiscreteGroupedGemmSwiglu",
        "DiscreteGroupedGemmSwigluSm100": f"{_DISCRETE}_swiglu:DiscreteGroupedGemmSwiglu",
        "discrete_grouped_gemm_dswiglu_jax": f"{_DISCRETE}_dswiglu:discrete_grouped_gemm_dswiglu_jax",
        "discrete_grouped_gemm_dswiglu_jax_sm100": f"{_DISCRETE}_dswiglu:discrete_grouped_gemm_dswiglu_jax",
        "discrete_grouped_gemm_dswiglu_wrapper": f"{_DISCRETE}_dswiglu:discrete_grouped_gemm_dswiglu_wrapper",
        "discrete_grouped_gemm_dswiglu_wrapper_sm100": f"{_DISCRETE}_dswiglu:discrete_grouped_gemm_dswiglu_wrapper",
        "discrete_grouped_gemm_swiglu_jax": f"{_DISCRETE}_swiglu:discrete_grouped_gemm_swiglu_jax",
        "discrete_grouped_gemm_swiglu_jax_sm100": f"{_DISCRETE}_swiglu:discrete_grouped_gemm_swiglu_jax",
        "discrete_grouped_gemm_swiglu_wrapper": f"{_DISCRETE}_swiglu:discrete_grouped_gemm_swiglu_wrapper",
        "discrete_grouped_gemm_swiglu_wrapper_sm100": f"{_DISCRETE}_swiglu:discrete_grouped_gemm_swiglu_wrapper",
    },
)
