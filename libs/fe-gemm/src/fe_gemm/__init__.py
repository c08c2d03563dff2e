"""Fused matrix products for torch, JAX and numpy; every public name loads on first use."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from fe_runtime._lazy import lazy_exports as _lazy_exports

from ._version import __version__

if _TYPE_CHECKING:  # what type checkers and editors see
    from .dense.amax import GemmAmax as GemmAmax
    from .dense.amax import gemm_amax_jax as gemm_amax_jax
    from .dense.amax import gemm_amax_wrapper as gemm_amax_wrapper
    from .dense.dsrelu import GemmDsrelu as GemmDsrelu
    from .dense.dsrelu import gemm_dsrelu_jax as gemm_dsrelu_jax
    from .dense.dsrelu import gemm_dsrelu_wrapper as gemm_dsrelu_wrapper
    from .dense.proj_rope_mxfp8 import GemmProjRopeMxfp8Bf16In as GemmProjRopeMxfp8Bf16In
    from .dense.proj_rope_mxfp8 import GemmProjRopeMxfp8Mxfp8In as GemmProjRopeMxfp8Mxfp8In
    from .dense.proj_rope_mxfp8 import gemm_proj_rope_mxfp8_jax as gemm_proj_rope_mxfp8_jax
    from .dense.proj_rope_mxfp8 import gemm_proj_rope_mxfp8_reference as gemm_proj_rope_mxfp8_reference
    from .dense.proj_rope_mxfp8 import gemm_proj_rope_mxfp8_wrapper as gemm_proj_rope_mxfp8_wrapper
    from .dense.srelu import GemmSrelu as GemmSrelu
    from .dense.srelu import gemm_srelu_jax as gemm_srelu_jax
    from .dense.srelu import gemm_srelu_wrapper as gemm_srelu_wrapper
    from .dense.swiglu import GemmSwiglu as GemmSwiglu
    from .dense.swiglu import gemm_swiglu_jax as gemm_swiglu_jax
    from .dense.swiglu import gemm_swiglu_wrapper as gemm_swiglu_wrapper
    from .grouped.dglu import GroupedGemmDglu as GroupedGemmDglu
    from .grouped.dglu import grouped_gemm_dglu_jax as grouped_gemm_dglu_jax
    from .grouped.dglu import grouped_gemm_dglu_wrapper as grouped_gemm_dglu_wrapper
    from .grouped.discrete_dswiglu import DiscreteGroupedGemmDswiglu as DiscreteGroupedGemmDswiglu
    from .grouped.discrete_dswiglu import discrete_grouped_gemm_dswiglu_jax as discrete_grouped_gemm_dswiglu_jax
    from .grouped.discrete_dswiglu import discrete_grouped_gemm_dswiglu_wrapper as discrete_grouped_gemm_dswiglu_wrapper
    from .grouped.discrete_swiglu import DiscreteGroupedGemmSwiglu as DiscreteGroupedGemmSwiglu
    from .grouped.discrete_swiglu import discrete_grouped_gemm_swiglu_jax as discrete_grouped_gemm_swiglu_jax
    from .grouped.discrete_swiglu import discrete_grouped_gemm_swiglu_wrapper as discrete_grouped_gemm_swiglu_wrapper
    from .grouped.dswiglu import GroupedGemmDswiglu as GroupedGemmDswiglu
    from .grouped.dswiglu import grouped_gemm_dswiglu_jax as grouped_gemm_dswiglu_jax
    from .grouped.dswiglu import grouped_gemm_dswiglu_wrapper as grouped_gemm_dswiglu_wrapper
    from .grouped.glu import GroupedGemmGlu as GroupedGemmGlu
    from .grouped.glu import grouped_gemm_glu_jax as grouped_gemm_glu_jax
    from .grouped.glu import grouped_gemm_glu_wrapper as grouped_gemm_glu_wrapper
    from .grouped.prepared import PreparedGroupedGemm as PreparedGroupedGemm
    from .grouped.prepared import prepare_grouped_gemm as prepare_grouped_gemm
    from .grouped.swiglu import GroupedGemmSwiglu as GroupedGemmSwiglu
    from .grouped.swiglu import grouped_gemm_swiglu_jax as grouped_gemm_swiglu_jax
    from .grouped.swiglu import grouped_gemm_swiglu_wrapper as grouped_gemm_swiglu_wrapper
    from .grouped.unfused import GroupedGemm as GroupedGemm
    from .grouped.unfused import grouped_gemm_jax as grouped_gemm_jax
    from .grouped.unfused import grouped_gemm_wrapper as grouped_gemm_wrapper
    from .grouped.wgrad import GroupedGemmWgrad as GroupedGemmWgrad
    from .grouped.wgrad import WGradInputOrder as WGradInputOrder
    from .grouped.wgrad import get_grouped_gemm_wgrad_workspace_size as get_grouped_gemm_wgrad_workspace_size
    from .grouped.wgrad import grouped_gemm_wgrad_jax as grouped_gemm_wgrad_jax
    from .grouped.wgrad import grouped_gemm_wgrad_wrapper as grouped_gemm_wgrad_wrapper
    from .mhc import MhcProjectionBackward as MhcProjectionBackward
    from .mhc import mhc_projection_backward as mhc_projection_backward
    from .mhc import mhc_projection_backward_jax as mhc_projection_backward_jax
    from .mlp import interleave_gate_up as interleave_gate_up
    from .mlp import split_gate_up as split_gate_up
    from .mlp import swiglu_mlp as swiglu_mlp
    from .mlp import swiglu_mlp_interleaved as swiglu_mlp_interleaved

_FRONT_DOORS = {
    "dense.amax": ("GemmAmax", "gemm_amax_jax", "gemm_amax_wrapper"),
    "dense.proj_rope_mxfp8": (
        "GemmProjRopeMxfp8Bf16In",
        "GemmProjRopeMxfp8Mxfp8In",
        "gemm_proj_rope_mxfp8_jax",
        "gemm_proj_rope_mxfp8_reference",
        "gemm_proj_rope_mxfp8_wrapper",
    ),
    "dense.dsrelu": ("GemmDsrelu", "gemm_dsrelu_jax", "gemm_dsrelu_wrapper"),
    "dense.srelu": ("GemmSrelu", "gemm_srelu_jax", "gemm_srelu_wrapper"),
    "dense.swiglu": ("GemmSwiglu", "gemm_swiglu_jax", "gemm_swiglu_wrapper"),
    "grouped.dglu": ("GroupedGemmDglu", "grouped_gemm_dglu_jax", "grouped_gemm_dglu_wrapper"),
    "grouped.glu": ("GroupedGemmGlu", "grouped_gemm_glu_jax", "grouped_gemm_glu_wrapper"),
    "grouped.unfused": ("GroupedGemm", "grouped_gemm_jax", "grouped_gemm_wrapper"),
    "grouped.wgrad": (
        "GroupedGemmWgrad",
        "WGradInputOrder",
        "get_grouped_gemm_wgrad_workspace_size",
        "grouped_gemm_wgrad_jax",
        "grouped_gemm_wgrad_wrapper",
    ),
    "grouped.swiglu": ("GroupedGemmSwiglu", "grouped_gemm_swiglu_jax", "grouped_gemm_swiglu_wrapper"),
    "grouped.dswiglu": ("GroupedGemmDswiglu", "grouped_gemm_dswiglu_jax", "grouped_gemm_dswiglu_wrapper"),
    "grouped.discrete_swiglu": (
        "DiscreteGroupedGemmSwiglu",
        "discrete_grouped_gemm_swiglu_jax",
        "discrete_grouped_gemm_swiglu_wrapper",
    ),
    "grouped.discrete_dswiglu": (
        "DiscreteGroupedGemmDswiglu",
        "discrete_grouped_gemm_dswiglu_jax",
        "discrete_grouped_gemm_dswiglu_wrapper",
    ),
    "grouped.prepared": ("PreparedGroupedGemm", "prepare_grouped_gemm"),
    "mhc": ("MhcProjectionBackward", "mhc_projection_backward", "mhc_projection_backward_jax"),
    "mlp": ("interleave_gate_up", "split_gate_up", "swiglu_mlp", "swiglu_mlp_interleaved"),
}

__getattr__, __dir__, _names = _lazy_exports(
    __name__, {name: f"{__name__}.{door}:{name}" for door, names in _FRONT_DOORS.items() for name in names}
)
__all__ = [*_names, "__version__"]
