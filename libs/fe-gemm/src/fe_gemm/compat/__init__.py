"""The names of the peer library: a port changes its import, and gets the same objects as under our names.

``compat.grouped_gemm`` and ``compat.discrete_grouped_gemm`` stand for the peer's namespaces of these names,
``compat.torch`` and ``compat.jax`` for those of its documentation.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from fe_runtime._lazy import lazy_exports as _lazy_exports

if _TYPE_CHECKING:  # what type checkers and editors see
    import fe_gemm as _ours
    from fe_gemm import MhcProjectionBackward as MhcProjectionBackward
    from fe_gemm import WGradInputOrder as WGradInputOrder
    from fe_gemm import gemm_proj_rope_mxfp8_reference as gemm_proj_rope_mxfp8_reference
    from fe_gemm import mhc_projection_backward as mhc_projection_backward

    from . import discrete_grouped_gemm as discrete_grouped_gemm
    from . import grouped_gemm as grouped_gemm
    from . import jax as jax
    from . import torch as torch

    GemmAmaxSm100 = _ours.GemmAmax
    GemmDsreluSm100 = _ours.GemmDsrelu
    GemmProjRopeMxfp8Bf16InSm100 = _ours.GemmProjRopeMxfp8Bf16In
    GemmProjRopeMxfp8Mxfp8InSm100 = _ours.GemmProjRopeMxfp8Mxfp8In
    GemmSreluSm100 = _ours.GemmSrelu
    GemmSwigluSm100 = _ours.GemmSwiglu
    DiscreteGroupedGemmDswigluSm100 = _ours.DiscreteGroupedGemmDswiglu
    DiscreteGroupedGemmSwigluSm100 = _ours.DiscreteGroupedGemmSwiglu
    GroupedGemmDgluSm100 = _ours.GroupedGemmDglu
    GroupedGemmDswigluSm100 = _ours.GroupedGemmDswiglu
    GroupedGemmGluSm100 = _ours.GroupedGemmGlu
    GroupedGemmSm100 = _ours.GroupedGemm
    GroupedGemmSwigluSm100 = _ours.GroupedGemmSwiglu
    GroupedGemmWgradSm100 = _ours.GroupedGemmWgrad
    discrete_grouped_gemm_dswiglu_jax_sm100 = _ours.discrete_grouped_gemm_dswiglu_jax
    discrete_grouped_gemm_dswiglu_wrapper_sm100 = _ours.discrete_grouped_gemm_dswiglu_wrapper
    discrete_grouped_gemm_swiglu_jax_sm100 = _ours.discrete_grouped_gemm_swiglu_jax
    discrete_grouped_gemm_swiglu_wrapper_sm100 = _ours.discrete_grouped_gemm_swiglu_wrapper
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
    gemm_amax_jax_sm100 = _ours.gemm_amax_jax
    gemm_amax_wrapper_sm100 = _ours.gemm_amax_wrapper
    gemm_dsrelu_jax_sm100 = _ours.gemm_dsrelu_jax
    gemm_dsrelu_wrapper_sm100 = _ours.gemm_dsrelu_wrapper
    gemm_proj_rope_mxfp8_jax_sm100 = _ours.gemm_proj_rope_mxfp8_jax
    gemm_proj_rope_mxfp8_wrapper_sm100 = _ours.gemm_proj_rope_mxfp8_wrapper
    gemm_srelu_jax_sm100 = _ours.gemm_srelu_jax
    gemm_srelu_wrapper_sm100 = _ours.gemm_srelu_wrapper
    gemm_swiglu_jax_sm100 = _ours.gemm_swiglu_jax
    gemm_swiglu_wrapper_sm100 = _ours.gemm_swiglu_wrapper

_AMAX, _SWIGLU = "fe_gemm.dense.amax", "fe_gemm.dense.swiglu"
_SRELU, _DSRELU = "fe_gemm.dense.srelu", "fe_gemm.dense.dsrelu"
_GROUPED = "fe_gemm.grouped"
_DISCRETE = "fe_gemm.grouped.discrete"
_PROJ_ROPE = "fe_gemm.dense.proj_rope_mxfp8"

__getattr__, __dir__, __all__ = _lazy_exports(
    __name__,
    {
        "GemmAmaxSm100": f"{_AMAX}:GemmAmax",
        "GemmDsreluSm100": f"{_DSRELU}:GemmDsrelu",
        "GemmProjRopeMxfp8Bf16InSm100": f"{_PROJ_ROPE}:GemmProjRopeMxfp8Bf16In",
        "GemmProjRopeMxfp8Mxfp8InSm100": f"{_PROJ_ROPE}:GemmProjRopeMxfp8Mxfp8In",
        "GemmSreluSm100": f"{_SRELU}:GemmSrelu",
        "GemmSwigluSm100": f"{_SWIGLU}:GemmSwiglu",
        "DiscreteGroupedGemmDswigluSm100": f"{_DISCRETE}_dswiglu:DiscreteGroupedGemmDswiglu",
        "DiscreteGroupedGemmSwigluSm100": f"{_DISCRETE}_swiglu:DiscreteGroupedGemmSwiglu",
        "GroupedGemmDgluSm100": f"{_GROUPED}.dglu:GroupedGemmDglu",
        "GroupedGemmDswigluSm100": f"{_GROUPED}.dswiglu:GroupedGemmDswiglu",
        "GroupedGemmGluSm100": f"{_GROUPED}.glu:GroupedGemmGlu",
        "GroupedGemmSm100": f"{_GROUPED}.unfused:GroupedGemm",
        "GroupedGemmSwigluSm100": f"{_GROUPED}.swiglu:GroupedGemmSwiglu",
        "GroupedGemmWgradSm100": f"{_GROUPED}.wgrad:GroupedGemmWgrad",
        "WGradInputOrder": f"{_GROUPED}.wgrad:WGradInputOrder",
        "discrete_grouped_gemm_dswiglu_jax_sm100": f"{_DISCRETE}_dswiglu:discrete_grouped_gemm_dswiglu_jax",
        "discrete_grouped_gemm_dswiglu_wrapper_sm100": f"{_DISCRETE}_dswiglu:discrete_grouped_gemm_dswiglu_wrapper",
        "discrete_grouped_gemm_swiglu_jax_sm100": f"{_DISCRETE}_swiglu:discrete_grouped_gemm_swiglu_jax",
        "discrete_grouped_gemm_swiglu_wrapper_sm100": f"{_DISCRETE}_swiglu:discrete_grouped_gemm_swiglu_wrapper",
        "get_grouped_gemm_wgrad_workspace_size_sm100": f"{_GROUPED}.wgrad:get_grouped_gemm_wgrad_workspace_size",
        "grouped_gemm_dglu_jax_sm100": f"{_GROUPED}.dglu:grouped_gemm_dglu_jax",
        "grouped_gemm_dglu_wrapper_sm100": f"{_GROUPED}.dglu:grouped_gemm_dglu_wrapper",
        "grouped_gemm_dswiglu_wrapper_sm100": f"{_GROUPED}.dswiglu:grouped_gemm_dswiglu_wrapper",
        "grouped_gemm_glu_jax_sm100": f"{_GROUPED}.glu:grouped_gemm_glu_jax",
        "grouped_gemm_glu_wrapper_sm100": f"{_GROUPED}.glu:grouped_gemm_glu_wrapper",
        "grouped_gemm_jax_sm100": f"{_GROUPED}.unfused:grouped_gemm_jax",
        "grouped_gemm_swiglu_wrapper_sm100": f"{_GROUPED}.swiglu:grouped_gemm_swiglu_wrapper",
        "grouped_gemm_wgrad_jax_sm100": f"{_GROUPED}.wgrad:grouped_gemm_wgrad_jax",
        "grouped_gemm_wgrad_wrapper_sm100": f"{_GROUPED}.wgrad:grouped_gemm_wgrad_wrapper",
        "grouped_gemm_wrapper_sm100": f"{_GROUPED}.unfused:grouped_gemm_wrapper",
        "MhcProjectionBackward": "fe_gemm.mhc:MhcProjectionBackward",
        "gemm_amax_jax_sm100": f"{_AMAX}:gemm_amax_jax",
        "gemm_amax_wrapper_sm100": f"{_AMAX}:gemm_amax_wrapper",
        "gemm_dsrelu_jax_sm100": f"{_DSRELU}:gemm_dsrelu_jax",
        "gemm_dsrelu_wrapper_sm100": f"{_DSRELU}:gemm_dsrelu_wrapper",
        "gemm_proj_rope_mxfp8_jax_sm100": f"{_PROJ_ROPE}:gemm_proj_rope_mxfp8_jax",
        "gemm_proj_rope_mxfp8_reference": f"{_PROJ_ROPE}:gemm_proj_rope_mxfp8_reference",
        "gemm_proj_rope_mxfp8_wrapper_sm100": f"{_PROJ_ROPE}:gemm_proj_rope_mxfp8_wrapper",
        "gemm_srelu_jax_sm100": f"{_SRELU}:gemm_srelu_jax",
        "gemm_srelu_wrapper_sm100": f"{_SRELU}:gemm_srelu_wrapper",
        "gemm_swiglu_jax_sm100": f"{_SWIGLU}:gemm_swiglu_jax",
        "gemm_swiglu_wrapper_sm100": f"{_SWIGLU}:gemm_swiglu_wrapper",
        "discrete_grouped_gemm": "fe_gemm.compat.discrete_grouped_gemm",
        "grouped_gemm": "fe_gemm.compat.grouped_gemm",
        "jax": "fe_gemm.compat.jax",
        "torch": "fe_gemm.compat.torch",
        "mhc_projection_backward": "fe_gemm.mhc:mhc_projection_backward",
    },
)
