"""Operations of Engram layers."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from fe_runtime._lazy import lazy_exports as _lazy_exports

if _TYPE_CHECKING:  # what type checkers and editors see
    from .gate import EngramGateSavedBackward as EngramGateSavedBackward
    from .gate import EngramGateSavedForward as EngramGateSavedForward
    from .gate import engram_gate_saved_backward as engram_gate_saved_backward
    from .gate import engram_gate_saved_forward as engram_gate_saved_forward

_NAMES = (
    "EngramGateSavedBackward",
    "EngramGateSavedForward",
    "engram_gate_saved_backward",
    "engram_gate_saved_forward",
)

__getattr__, __dir__, __all__ = _lazy_exports(__name__, {name: f"{__name__}.gate:{name}" for name in _NAMES})
