"""Fused normalisation operations for torch, JAX and numpy; every public name loads on first use."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from fe_runtime._lazy import lazy_exports as _lazy_exports

from ._version import __version__

if _TYPE_CHECKING:  # what type checkers and editors see
    from .rms_norm import rms_norm as rms_norm
    from .rms_norm import rms_norm_backward as rms_norm_backward
    from .rms_norm import rms_norm_jax as rms_norm_jax
    from .rmsnorm_rht_amax import RmsNormRhtAmax as RmsNormRhtAmax
    from .rmsnorm_rht_amax import best_num_threads as best_num_threads
    from .rmsnorm_rht_amax import pick_rows_per_cta as pick_rows_per_cta
    from .rmsnorm_rht_amax import rmsnorm_rht_amax_jax as rmsnorm_rht_amax_jax
    from .rmsnorm_rht_amax import rmsnorm_rht_amax_wrapper as rmsnorm_rht_amax_wrapper
    from .rmsnorm_silu import RmsNormSilu as RmsNormSilu
    from .rmsnorm_silu import fused_rmsnorm_silu as fused_rmsnorm_silu
    from .rmsnorm_silu import rmsnorm_silu_backward as rmsnorm_silu_backward
    from .rmsnorm_silu import rmsnorm_silu_jax as rmsnorm_silu_jax
    from .rmsnorm_silu import rmsnorm_silu_wrapper as rmsnorm_silu_wrapper
    from .rmsnorm_silu_pad import RmsNormSiluPad as RmsNormSiluPad
    from .rmsnorm_silu_pad import rmsnorm_silu_pad_jax as rmsnorm_silu_pad_jax
    from .rmsnorm_silu_pad import rmsnorm_silu_pad_wrapper as rmsnorm_silu_pad_wrapper

_FRONT_DOORS = {
    "rmsnorm_rht_amax": (
        "RmsNormRhtAmax",
        "best_num_threads",
        "pick_rows_per_cta",
        "rmsnorm_rht_amax_jax",
        "rmsnorm_rht_amax_wrapper",
    ),
    "rms_norm": ("rms_norm", "rms_norm_backward", "rms_norm_jax"),
    "rmsnorm_silu": (
        "RmsNormSilu",
        "fused_rmsnorm_silu",
        "rmsnorm_silu_backward",
        "rmsnorm_silu_jax",
        "rmsnorm_silu_wrapper",
    ),
    "rmsnorm_silu_pad": ("RmsNormSiluPad", "rmsnorm_silu_pad_jax", "rmsnorm_silu_pad_wrapper"),
}

__getattr__, __dir__, _names = _lazy_exports(
    __name__, {name: f"{__name__}.{door}:{name}" for door, names in _FRONT_DOORS.items() for name in names}
)
__all__ = [*_names, "__version__"]
