"""Fused rotary embedding operations for torch, JAX and numpy; every public name loads on first use."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from fe_runtime._lazy import lazy_exports as _lazy_exports

from ._version import __version__

if _TYPE_CHECKING:  # what type checkers and editors see
    from . import compat as compat
    from .rope_qdq import RopeQDQInplace as RopeQDQInplace
    from .rope_qdq import rope_qdq_inplace as rope_qdq_inplace
    from .rope_qdq import rope_qdq_jax as rope_qdq_jax
    from .tail_rope import TailRoPEForward as TailRoPEForward
    from .tail_rope import tail_rope as tail_rope
    from .tail_rope import tail_rope_jax as tail_rope_jax
    from .vision_rope_backward import VisionRoPEBackward as VisionRoPEBackward
    from .vision_rope_backward import vision_rope_backward_jax as vision_rope_backward_jax
    from .vision_rope_backward import vision_rope_backward_wrapper as vision_rope_backward_wrapper

_FRONT_DOORS = {
    "rope_qdq": ("RopeQDQInplace", "rope_qdq_inplace", "rope_qdq_jax"),
    "tail_rope": ("TailRoPEForward", "tail_rope", "tail_rope_jax"),
    "vision_rope_backward": (
        "VisionRoPEBackward",
        "vision_rope_backward_jax",
        "vision_rope_backward_wrapper",
    ),
}

__getattr__, __dir__, _names = _lazy_exports(
    __name__,
    {name: f"{__name__}.{door}:{name}" for door, names in _FRONT_DOORS.items() for name in names}
    | {"compat": f"{__name__}.compat"},
)
__all__ = [*_names, "__version__"]
