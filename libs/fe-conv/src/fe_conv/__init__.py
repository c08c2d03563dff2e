"""Fused causal convolution operations for torch, JAX and numpy; every public name loads on first use."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from fe_runtime._lazy import lazy_exports as _lazy_exports

from ._version import __version__

if _TYPE_CHECKING:  # what type checkers and editors see
    from . import compat as compat
    from . import fla as fla
    from . import ops as ops
    from .sequence import causal_conv1d as causal_conv1d
    from .sequence import causal_conv1d_jax as causal_conv1d_jax
    from .sequence import causal_conv1d_last_route as causal_conv1d_last_route
    from .update import causal_conv1d_update as causal_conv1d_update
    from .update import causal_conv1d_update_jax as causal_conv1d_update_jax

_FRONT_DOORS = {
    "sequence": ("causal_conv1d", "causal_conv1d_jax", "causal_conv1d_last_route"),
    "update": ("causal_conv1d_update", "causal_conv1d_update_jax"),
}
_SUBMODULES = ("compat", "fla", "ops")

__getattr__, __dir__, _names = _lazy_exports(
    __name__,
    {name: f"{__name__}.{door}:{name}" for door, names in _FRONT_DOORS.items() for name in names}
    | {name: f"{__name__}.{name}" for name in _SUBMODULES},
)
__all__ = [*_names, "__version__"]
