"""What the ``fe`` command runs, checks, times and compiles of this library."""

from __future__ import annotations

from .dense import GEMM_AMAX, GEMM_DSRELU, GEMM_SRELU, GEMM_SWIGLU
from .grouped import GROUPED_GEMM, GROUPED_GEMM_DGLU, GROUPED_GEMM_GLU, GROUPED_GEMM_WGRAD
from .mhc import MHC_PROJECTION_BACKWARD
from .proj_rope import GEMM_PROJ_ROPE_MXFP8

__all__ = [
    "GEMM_AMAX",
    "GEMM_DSRELU",
    "GEMM_PROJ_ROPE_MXFP8",
    "GEMM_SRELU",
    "GEMM_SWIGLU",
    "GROUPED_GEMM",
    "GROUPED_GEMM_DGLU",
    "GROUPED_GEMM_GLU",
    "GROUPED_GEMM_WGRAD",
    "MHC_PROJECTION_BACKWARD",
    "WORKLOADS",
]

WORKLOADS = (
    GEMM_AMAX,
    GEMM_SWIGLU,
    GEMM_SRELU,
    GEMM_DSRELU,
    GEMM_PROJ_ROPE_MXFP8,
    MHC_PROJECTION_BACKWARD,
    GROUPED_GEMM,
    GROUPED_GEMM_GLU,
    GROUPED_GEMM_DGLU,
    GROUPED_GEMM_WGRAD,
)
