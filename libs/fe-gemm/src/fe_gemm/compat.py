"""The names of the peer library: a port changes its import, and gets the same objects as under our names."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from fe_runtime._lazy import lazy_exports as _lazy_exports

if _TYPE_CHECKING:  # what type checkers and editors see
    import fe_gemm as _ours
    from fe_gemm import MhcProjectionBackward as MhcProjectionBackward
    from fe_gemm import gemm_proj_rope_mxfp8_reference as gemm_proj_rope_mxfp8_reference
    from fe_gemm import mhc_projection_backward as mhc_projection_backward

    GemmAmaxSm100 = _ours.GemmAmax
    GemmDsreluSm100 = _ours.GemmDsrelu
    GemmProjRopeMxfp8Bf16InSm100 = _ours.GemmProjRopeMxfp8Bf16In
    GemmProjRopeMxfp8Mxfp8InSm100 = _ours.GemmProjRopeMxfp8Mxfp8In
    GemmSreluSm100 = _ours.GemmSrelu
    GemmSwigluSm100 = _ours.GemmSwiglu
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
        "mhc_projection_backward": "fe_gemm.mhc:mhc_projection_backward",
    },
)
