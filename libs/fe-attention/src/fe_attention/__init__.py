"""Attention operations for torch, JAX and numpy; every public name loads on first use."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from fe_runtime._lazy import lazy_exports as _lazy_exports

from ._version import __version__

if _TYPE_CHECKING:  # what type checkers and editors see
    from . import csa as _csa
    from .csa.compressor import CSACompressorBackward as CSACompressorBackward
    from .csa.compressor import CSACompressorForward as CSACompressorForward
    from .csa.compressor import csa_compressor as csa_compressor
    from .csa.compressor import csa_compressor_backward_jax as csa_compressor_backward_jax
    from .csa.compressor import csa_compressor_backward_wrapper as csa_compressor_backward_wrapper
    from .csa.compressor import csa_compressor_forward_jax as csa_compressor_forward_jax
    from .csa.compressor import csa_compressor_forward_wrapper as csa_compressor_forward_wrapper
    from .csa.compressor import csa_compressor_jax as csa_compressor_jax
    from .engram.gate import EngramGateSavedBackward as EngramGateSavedBackward
    from .engram.gate import EngramGateSavedForward as EngramGateSavedForward
    from .engram.gate import engram_gate as engram_gate
    from .engram.gate import engram_gate_jax as engram_gate_jax
    from .engram.gate import engram_gate_saved_backward as engram_gate_saved_backward
    from .engram.gate import engram_gate_saved_backward_jax as engram_gate_saved_backward_jax
    from .engram.gate import engram_gate_saved_forward as engram_gate_saved_forward
    from .engram.gate import engram_gate_saved_forward_jax as engram_gate_saved_forward_jax
    from .hstu.lmsd import HSTULMSDFwd as HSTULMSDFwd
    from .hstu.lmsd import hstu_lmsd_forward as hstu_lmsd_forward
    from .hstu.lmsd import hstu_lmsd_forward_jax as hstu_lmsd_forward_jax
    from .hstu.lmsd_backward import HSTULMSDBwd as HSTULMSDBwd
    from .hstu.lmsd_backward import hstu_lmsd_backward as hstu_lmsd_backward
    from .hstu.lmsd_backward import hstu_lmsd_backward_jax as hstu_lmsd_backward_jax

    CSA = _csa

_FRONT_DOORS = {
    "csa.compressor": (
        "CSACompressorBackward",
        "CSACompressorForward",
        "csa_compressor",
        "csa_compressor_backward_jax",
        "csa_compressor_backward_wrapper",
        "csa_compressor_forward_jax",
        "csa_compressor_forward_wrapper",
        "csa_compressor_jax",
    ),
    "engram.gate": (
        "EngramGateSavedBackward",
        "EngramGateSavedForward",
        "engram_gate",
        "engram_gate_jax",
        "engram_gate_saved_backward",
        "engram_gate_saved_backward_jax",
        "engram_gate_saved_forward",
        "engram_gate_saved_forward_jax",
    ),
    "hstu.lmsd": ("HSTULMSDFwd", "hstu_lmsd_forward", "hstu_lmsd_forward_jax"),
    "hstu.lmsd_backward": ("HSTULMSDBwd", "hstu_lmsd_backward", "hstu_lmsd_backward_jax"),
}

__getattr__, __dir__, _names = _lazy_exports(
    __name__,
    {"CSA": f"{__name__}.csa"}
    | {name: f"{__name__}.{door}:{name}" for door, names in _FRONT_DOORS.items() for name in names},
)
__all__ = [*_names, "__version__"]
