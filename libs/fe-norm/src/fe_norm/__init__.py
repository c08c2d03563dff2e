"""Fused normalisation operations for torch, JAX and numpy; every public name loads on first use."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from fe_runtime._lazy import lazy_exports as _lazy_exports

from ._version import __version__

if _TYPE_CHECKING:  # what type checkers and editors see
    from .rmsnorm_silu import RmsNormSilu as RmsNormSilu
    from .rmsnorm_silu import fused_rmsnorm_silu as fused_rmsnorm_silu
    from .rmsnorm_silu import rmsnorm_silu_jax as rmsnorm_silu_jax
    from .rmsnorm_silu import rmsnorm_silu_wrapper as rmsnorm_silu_wrapper

_FRONT_DOORS = {
    "rmsnorm_silu": ("RmsNormSilu", "fused_rmsnorm_silu", "rmsnorm_silu_jax", "rmsnorm_silu_wrapper"),
}

__getattr__, __dir__, _names = _lazy_exports(
    __name__, {name: f"{__name__}.{door}:{name}" for door, names in _FRONT_DOORS.items() for name in names}
)
__all__ = [*_names, "__version__"]
