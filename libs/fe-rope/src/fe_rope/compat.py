"""The names of the peer library: a port changes its import, and gets the same objects as under our names."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from fe_runtime._lazy import lazy_exports as _lazy_exports

if _TYPE_CHECKING:  # what type checkers and editors see
    from .rope_qdq import RopeQDQInplace as RopeQDQInplace
    from .rope_qdq import rope_qdq_inplace as rope_qdq_inplace
    from .tail_rope import TailRoPEForward as TailRoPEForward
    from .tail_rope import tail_rope as tail_rope
    from .vision_rope_backward import VisionRoPEBackward as VisionRoPEBackward
    from .vision_rope_backward import vision_rope_backward_wrapper as vision_rope_backward_wrapper

_FRONT_DOORS = {
    "rope_qdq": ("RopeQDQInplace", "rope_qdq_inplace"),
    "tail_rope": ("TailRoPEForward", "tail_rope"),
    "vision_rope_backward": ("VisionRoPEBackward", "vision_rope_backward_wrapper"),
}

__getattr__, __dir__, __all__ = _lazy_exports(
    __name__, {name: f"fe_rope.{door}:{name}" for door, names in _FRONT_DOORS.items() for name in names}
)
