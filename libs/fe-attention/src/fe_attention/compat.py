"""The names of the peer library: a port changes its import, and gets the same objects as under our names."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from fe_runtime._lazy import lazy_exports as _lazy_exports

if _TYPE_CHECKING:  # what type checkers and editors see
    from fe_attention import CSA as CSA
    from fe_attention import CSACompressorBackward as CSACompressorBackward
    from fe_attention import CSACompressorForward as CSACompressorForward
    from fe_attention import EngramGateSavedBackward as EngramGateSavedBackward
    from fe_attention import EngramGateSavedForward as EngramGateSavedForward
    from fe_attention import HSTULMSDBwd as HSTULMSDBwd
    from fe_attention import HSTULMSDFwd as HSTULMSDFwd
    from fe_attention import csa_compressor_backward_wrapper as csa_compressor_backward_wrapper
    from fe_attention import csa_compressor_forward_wrapper as csa_compressor_forward_wrapper
    from fe_attention import engram_gate_saved_backward as engram_gate_saved_backward
    from fe_attention import engram_gate_saved_forward as engram_gate_saved_forward
    from fe_attention import hstu_lmsd_backward as hstu_lmsd_backward
    from fe_attention import hstu_lmsd_forward as hstu_lmsd_forward

_CSA = "fe_attention.csa.compressor"
_ENGRAM = "fe_attention.engram.gate"
_LMSD, _LMSD_BACKWARD = "fe_attention.hstu.lmsd", "fe_attention.hstu.lmsd_backward"

__getattr__, __dir__, __all__ = _lazy_exports(
    __name__,
    {
        "CSA": "fe_attention.csa",
        "CSACompressorBackward": f"{_CSA}:CSACompressorBackward",
        "CSACompressorForward": f"{_CSA}:CSACompressorForward",
        "csa_compressor_backward_wrapper": f"{_CSA}:csa_compressor_backward_wrapper",
        "csa_compressor_forward_wrapper": f"{_CSA}:csa_compressor_forward_wrapper",
        "EngramGateSavedBackward": f"{_ENGRAM}:EngramGateSavedBackward",
        "EngramGateSavedForward": f"{_ENGRAM}:EngramGateSavedForward",
        "engram_gate_saved_backward": f"{_ENGRAM}:engram_gate_saved_backward",
        "engram_gate_saved_forward": f"{_ENGRAM}:engram_gate_saved_forward",
        "HSTULMSDBwd": f"{_LMSD_BACKWARD}:HSTULMSDBwd",
        "HSTULMSDBwdSm100": f"{_LMSD_BACKWARD}:HSTULMSDBwd",
        "HSTULMSDFwd": f"{_LMSD}:HSTULMSDFwd",
        "HSTULMSDFwdSm100": f"{_LMSD}:HSTULMSDFwd",
        "hstu_lmsd_backward": f"{_LMSD_BACKWARD}:hstu_lmsd_backward",
        "hstu_lmsd_forward": f"{_LMSD}:hstu_lmsd_forward",
    },
)
