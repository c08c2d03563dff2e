"""Operations of compressed sparse attention; the namespace ``CSA``."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from fe_runtime._lazy import lazy_exports as _lazy_exports

if _TYPE_CHECKING:  # what type checkers and editors see
    from .compressor import CSACompressorBackward as CSACompressorBackward
    from .compressor import CSACompressorForward as CSACompressorForward
    from .compressor import csa_compressor_backward_wrapper as csa_compressor_backward_wrapper
    from .compressor import csa_compressor_forward_wrapper as csa_compressor_forward_wrapper

_NAMES = (
    "CSACompressorBackward",
    "CSACompressorForward",
    "csa_compressor_backward_wrapper",
    "csa_compressor_forward_wrapper",
)

__getattr__, __dir__, __all__ = _lazy_exports(__name__, {name: f"{__name__}.compressor:{name}" for name in _NAMES})
