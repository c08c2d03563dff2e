"""One small operation, declared as those of the domain libraries are."""

from fe_runtime._lazy import lazy_exports

_NAMES = (
    "BACKWARD",
    "DETACHED",
    "INFERENCE",
    "OPERATION",
    "ScaleClamp",
    "scale_clamp",
    "scale_clamp_detached",
    "scale_clamp_inference",
    "scale_clamp_jax",
)

__getattr__, __dir__, __all__ = lazy_exports(__name__, {name: f"{__name__}.front_door:{name}" for name in _NAMES})
