"""The documented mathematics of the operations on arrays of any framework: what kernels are compared with."""

from .amax import gemm_amax
from .dsrelu import gemm_dsrelu
from .mhc_projection_backward import mhc_projection_backward
from .proj_rope_mxfp8 import gemm_proj_rope_mxfp8
from .srelu import gemm_srelu
from .swiglu import gemm_swiglu

__all__ = [
    "gemm_amax",
    "gemm_dsrelu",
    "gemm_proj_rope_mxfp8",
    "gemm_srelu",
    "gemm_swiglu",
    "mhc_projection_backward",
]
