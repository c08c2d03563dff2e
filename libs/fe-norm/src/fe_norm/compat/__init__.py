"""The names of the peer library: a port changes its import, and gets the same objects as under our names.

``compat.jax`` stands for the peer's ``jax`` namespace. Its newer names, without architecture and technology, are here
too.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from fe_runtime._lazy import lazy_exports as _lazy_exports

if _TYPE_CHECKING:  # what type checkers and editors see
    import fe_norm as _ours
    from fe_norm import best_num_threads as best_num_threads
    from fe_norm import pick_rows_per_cta as pick_rows_per_cta

    from . import jax as jax

    RmsNormRhtAmaxSm100 = _ours.RmsNormRhtAmax
    RmsNormSiluPadSm100 = _ours.RmsNormSiluPad
    rmsnorm_rht_amax_forward = _ours.rmsnorm_rht_amax_wrapper
    rmsnorm_rht_amax_jax_forward = _ours.rmsnorm_rht_amax_jax
    rmsnorm_rht_amax_wrapper_sm100 = _ours.rmsnorm_rht_amax_wrapper
    rmsnorm_silu_pad_forward = _ours.rmsnorm_silu_pad_wrapper
    rmsnorm_silu_pad_jax_forward = _ours.rmsnorm_silu_pad_jax
    rmsnorm_silu_pad_wrapper_sm100 = _ours.rmsnorm_silu_pad_wrapper

_RHT, _PAD = "fe_norm.rmsnorm_rht_amax", "fe_norm.rmsnorm_silu_pad"

__getattr__, __dir__, __all__ = _lazy_exports(
    __name__,
    {
        "RmsNormRhtAmaxSm100": f"{_RHT}:RmsNormRhtAmax",
        "RmsNormSiluPadSm100": f"{_PAD}:RmsNormSiluPad",
        "best_num_threads": f"{_RHT}:best_num_threads",
        "jax": f"{__name__}.jax",
        "pick_rows_per_cta": f"{_RHT}:pick_rows_per_cta",
        "rmsnorm_rht_amax_forward": f"{_RHT}:rmsnorm_rht_amax_wrapper",
        "rmsnorm_rht_amax_jax_forward": f"{_RHT}:rmsnorm_rht_amax_jax",
        "rmsnorm_rht_amax_wrapper_sm100": f"{_RHT}:rmsnorm_rht_amax_wrapper",
        "rmsnorm_silu_pad_forward": f"{_PAD}:rmsnorm_silu_pad_wrapper",
        "rmsnorm_silu_pad_jax_forward": f"{_PAD}:rmsnorm_silu_pad_jax",
        "rmsnorm_silu_pad_wrapper_sm100": f"{_PAD}:rmsnorm_silu_pad_wrapper",
    },
)
