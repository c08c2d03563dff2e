"""The peer's namespace of grouped products: the same objects as under our names."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from fe_runtime._lazy import lazy_exports as _lazy_exports

if _TYPE_CHECKING:  # what type checkers and editors see
    import fe_gemm as _ours
    from fe_gemm import GroupedGemm as GroupedGemm
    from fe_gemm import GroupedGemmDglu as GroupedGemmDglu
    from fe_gemm import GroupedGemmDswiglu as GroupedGemmDswiglu
    from fe_gemm import GroupedGemmGlu as GroupedGemmGlu
    from fe_gemm import GroupedGemmSwiglu as GroupedGemmSwiglu
    from fe_gemm import GroupedGemmWgrad as GroupedGemmWgrad
    from fe_gemm import WGradInputOrder as WGradInputOrder
    from fe_gemm import get_grouped_gemm_wgrad_workspace_size as get_grouped_gemm_wgrad_workspace_size
    from fe_gemm import grouped_gemm_dglu_jax as grouped_gemm_dglu_jax
    from fe_gemm import grouped_gemm_dglu_wrapper as grouped_gemm_dglu_wrapper
    from fe_gemm import grouped_gemm_dswiglu_jax as grouped_gemm_dswiglu_jax
    from fe_gemm import grouped_gemm_dswiglu_wrapper as grouped_gemm_dswiglu_wrapper
    from fe_gemm import grouped_gemm_glu_jax as grouped_gemm_glu_jax
    from fe_gemm import grouped_gemm_glu_wrapper as grouped_gemm_glu_wrapper
    from fe_gemm import grouped_gemm_jax as grouped_gemm_jax
    from fe_gemm import grouped_gemm_swiglu_jax as grouped_gemm_swiglu_jax
    from fe_gemm import grouped_gemm_swiglu_wrapper as grouped_gemm_swiglu_wrapper
    from fe_gemm import grouped_gemm_wgrad_jax as grouped_gemm_wgrad_jax
    from fe_gemm import grouped_gemm_wgrad_wrapper as grouped_gemm_wgrad_wrapper
    from fe_gemm import grouped_gemm_wrapper as grouped_gemm_wrapper
    from fe_gemm.grouped.prepared import PreparedGroupedGemm as PreparedGroupedGemm
    from fe_gemm.grouped.prepared import prepare_grouped_gemm as prepare_grouped_gemm

    GroupedGemmDgluSm100 = _ours.GroupedGemmDglu
    GroupedGemmDswigluSm100 = _ours.GroupedGemmDswiglu
    GroupedGemmGluSm100 = _ours.GroupedGemmGlu
    GroupedGemmSm100 = _ours.GroupedGemm
    GroupedGemmSwigluSm100 = _ours.GroupedGemmSwiglu
    GroupedGemmWgradSm100 = _ours.GroupedGemmWgrad
    get_grouped_gemm_wgrad_workspace_size_sm100 = _ours.get_grouped_gemm_wgrad_workspace_size
    grouped_gemm_dglu_jax_sm100 = _ours.grouped_gemm_dglu_jax
    grouped_gemm_dglu_wrapper_sm100 = _ours.grouped_gemm_dglu_wrapper
    grouped_gemm_dswiglu_wrapper_sm100 = _ours.grouped_gemm_dswiglu_wrapper
    grouped_gemm_glu_jax_sm100 = _ours.grouped_gemm_glu_jax
    grouped_gemm_glu_wrapper_sm100 = _ours.grouped_gemm_glu_wrapper
    grouped_gemm_jax_sm100 = _ours.grouped_gemm_jax
    grouped_gemm_swiglu_wrapper_sm100 = _ours.grouped_gemm_swiglu_wrapper
    grouped_gemm_wgrad_jax_sm100 = _ours.grouped_gemm_wgrad_jax
    grouped_gemm_wgrad_wrapper_sm100 = _ours.grouped_gemm_wgrad_wrapper
    grouped_gemm_wrapper_sm100 = _ours.grouped_gemm_wrapper

_HOME = "fe_gemm.grouped"

__getattr__, __dir__, __all__ = _lazy_exports(
    __name__,
    {
        "GroupedGemm": f"{_HOME}.unfused:GroupedGemm",
        "GroupedGemmDglu": f"{_HOME}.dglu:GroupedGemmDglu",
        "GroupedGemmDgluSm100": f"{_HOME}.dglu:GroupedGemmDglu",
        "GroupedGemmDswiglu": f"{_HOME}.dswiglu:GroupedGemmDswiglu",
        "GroupedGemmDswigluSm100": f"{_HOME}.dswiglu:GroupedGemmDswiglu",
        "GroupedGemmGlu": f"{_HOME}.glu:GroupedGemmGlu",
        "GroupedGemmGluSm100": f"{_HOME}.glu:GroupedGemmGlu",
        "GroupedGemmSm100": f"{_HOME}.unfused:GroupedGemm",
        "GroupedGemmSwiglu": f"{_HOME}.swiglu:GroupedGemmSwiglu",
        "GroupedGemmSwigluSm100": f"{_HOME}.swiglu:GroupedGemmSwiglu",
        "GroupedGemmWgrad": f"{_HOME}.wgrad:GroupedGemmWgrad",
        "GroupedGemmWgradSm100": f"{_HOME}.wgrad:GroupedGemmWgrad",
        "PreparedGroupedGemm": f"{_HOME}.prepared:PreparedGroupedGemm",
        "WGradInputOrder": f"{_HOME}.wgrad:WGradInputOrder",
        "get_grouped_gemm_wgrad_workspace_size": f"{_HOME}.wgrad:get_grouped_gemm_wgrad_workspace_size",
        "get_grouped_gemm_wgrad_workspace_size_sm100": f"{_HOME}.wgrad:get_grouped_gemm_wgrad_workspace_size",
        "grouped_gemm_dglu_jax": f"{_HOME}.dglu:grouped_gemm_dglu_jax",
        "grouped_gemm_dglu_jax_sm100": f"{_HOME}.dglu:grouped_gemm_dglu_jax",
        "grouped_gemm_dglu_wrapper": f"{_HOME}.dglu:grouped_gemm_dglu_wrapper",
        "grouped_gemm_dglu_wrapper_sm100": f"{_HOME}.dglu:grouped_gemm_dglu_wrapper",
        "grouped_gemm_dswiglu_jax": f"{_HOME}.dswiglu:grouped_gemm_dswiglu_jax",
        "grouped_gemm_dswiglu_wrapper": f"{_HOME}.dswiglu:grouped_gemm_dswiglu_wrapper",
        "grouped_gemm_dswiglu_wrapper_sm100": f"{_HOME}.dswiglu:grouped_gemm_dswiglu_wrapper",
        "grouped_gemm_glu_jax": f"{_HOME}.glu:grouped_gemm_glu_jax",
        "grouped_gemm_glu_jax_sm100": f"{_HOME}.glu:grouped_gemm_glu_jax",
        "grouped_gemm_glu_wrapper": f"{_HOME}.glu:grouped_gemm_glu_wrapper",
        "grouped_gemm_glu_wrapper_sm100": f"{_HOME}.glu:grouped_gemm_glu_wrapper",
        "grouped_gemm_jax": f"{_HOME}.unfused:grouped_gemm_jax",
        "grouped_gemm_jax_sm100": f"{_HOME}.unfused:grouped_gemm_jax",
        "grouped_gemm_swiglu_jax": f"{_HOME}.swiglu:grouped_gemm_swiglu_jax",
        "grouped_gemm_swiglu_wrapper": f"{_HOME}.swiglu:grouped_gemm_swiglu_wrapper",
        "grouped_gemm_swiglu_wrapper_sm100": f"{_HOME}.swiglu:grouped_gemm_swiglu_wrapper",
        "grouped_gemm_wgrad_jax": f"{_HOME}.wgrad:grouped_gemm_wgrad_jax",
        "grouped_gemm_wgrad_jax_sm100": f"{_HOME}.wgrad:grouped_gemm_wgrad_jax",
        "grouped_gemm_wgrad_wrapper": f"{_HOME}.wgrad:grouped_gemm_wgrad_wrapper",
        "grouped_gemm_wgrad_wrapper_sm100": f"{_HOME}.wgrad:grouped_gemm_wgrad_wrapper",
        "grouped_gemm_wrapper": f"{_HOME}.unfused:grouped_gemm_wrapper",
        "grouped_gemm_wrapper_sm100": f"{_HOME}.unfused:grouped_gemm_wrapper",
        "prepare_grouped_gemm": f"{_HOME}.prepared:prepare_grouped_gemm",
    },
)
