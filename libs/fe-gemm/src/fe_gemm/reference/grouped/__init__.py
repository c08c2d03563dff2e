"""The documented mathematics of the grouped products, on arrays of any framework.

The legacy and the discrete operations are other argument forms of :func:`grouped_gemm_glu` and
:func:`grouped_gemm_dglu`, and adapters here. Rows that no expert owns give 0. No function looks at an offset on the
host in JAX, so that all can be traced; numpy and torch loop over experts.
"""

from .dglu import grouped_gemm_dglu
from .discrete_dswiglu import discrete_grouped_gemm_dswiglu
from .discrete_swiglu import discrete_grouped_gemm_swiglu
from .dswiglu import grouped_gemm_dswiglu
from .glu import grouped_gemm_glu
from .swiglu import grouped_gemm_swiglu
from .unfused import grouped_gemm
from .wgrad import grouped_gemm_wgrad

__all__ = [
    "discrete_grouped_gemm_dswiglu",
    "discrete_grouped_gemm_swiglu",
    "grouped_gemm",
    "grouped_gemm_dglu",
    "grouped_gemm_dswiglu",
    "grouped_gemm_glu",
    "grouped_gemm_swiglu",
    "grouped_gemm_wgrad",
]
