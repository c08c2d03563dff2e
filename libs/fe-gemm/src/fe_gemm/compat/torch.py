"""The peer's names for torch, as its documentation has them: the same objects as under our names."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from fe_runtime._lazy import lazy_exports as _lazy_exports

if _TYPE_CHECKING:  # what type checkers and editors see
    import fe_gemm as _ours

    grouped_gemm_dswiglu = _ours.grouped_gemm_dswiglu_wrapper
    grouped_gemm_swiglu = _ours.grouped_gemm_swiglu_wrapper

__getattr__, __dir__, __all__ = _lazy_exports(
    __name__,
    {
        "grouped_gemm_dswiglu": "fe_gemm.grouped.dswiglu:grouped_gemm_dswiglu_wrapper",
        "grouped_gemm_swiglu": "fe_gemm.grouped.swiglu:grouped_gemm_swiglu_wrapper",
    },
)
