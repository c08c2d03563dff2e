"""Runtime of the fe libraries: contracts, compiled kernels, and the torch and JAX bridges.

Everything a caller may catch or construct is reachable here and loads on first use.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ._lazy import lazy_exports as _lazy_exports
from ._version import __version__

if _TYPE_CHECKING:  # what type checkers and editors see
    from .api_base import APIBase as APIBase
    from .arrays import Device as Device
    from .arrays import detect_framework as detect_framework
    from .collect_env import collect_env_info as collect_env_info
    from .compile.cache import cache_clear as cache_clear
    from .compile.cache import cache_info as cache_info
    from .compile.spec import KernelSpec as KernelSpec
    from .compile.toolchain import ToolchainError as ToolchainError
    from .env import configure as configure
    from .errors import DeterminismError as DeterminismError
    from .errors import DtypeError as DtypeError
    from .errors import FallbackWarning as FallbackWarning
    from .errors import FeDeprecationWarning as FeDeprecationWarning
    from .errors import InvalidArgumentError as InvalidArgumentError
    from .errors import NotCompiledError as NotCompiledError
    from .errors import NotSupportedError as NotSupportedError
    from .operation import Operation as Operation
    from .tensor_desc import TensorDesc as TensorDesc
    from .tuple_dict import TupleDict as TupleDict

_HOMES = {
    "api_base": ("APIBase",),
    "arrays": (
        "Device",
        "detect_framework",
    ),
    "collect_env": ("collect_env_info",),
    "compile.cache": ("cache_clear", "cache_info"),
    "compile.spec": ("KernelSpec",),
    "compile.toolchain": ("ToolchainError",),
    "env": ("configure",),
    "errors": (
        "DeterminismError",
        "DtypeError",
        "FallbackWarning",
        "FeDeprecationWarning",
        "InvalidArgumentError",
        "NotCompiledError",
        "NotSupportedError",
    ),
    "operation": ("Operation",),
    "tensor_desc": ("TensorDesc",),
    "tuple_dict": ("TupleDict",),
}

__getattr__, __dir__, _names = _lazy_exports(
    __name__, {name: f"{__name__}.{home}:{name}" for home, names in _HOMES.items() for name in names}
)
__all__ = [*_names, "__version__"]
