"""Selected entry points of the flash-linear-attention package served by these libraries, reversibly.

``accelerate_fla()`` replaces functions of that package in the running process; each replacement serves a call natively
where it can and otherwise hands it, unchanged, to the function it replaced. ``restore_fla()`` undoes it. Importing this
module touches nothing.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from fe_runtime._lazy import lazy_exports as _lazy_exports

if _TYPE_CHECKING:  # what type checkers and editors see
    from .patching import accelerate_fla as accelerate_fla
    from .patching import is_accelerated as is_accelerated
    from .patching import restore_fla as restore_fla
    from .routes import kda_last_path as kda_last_path
    from .routes import last_path as last_path
    from .routes import mlp_last_path as mlp_last_path
    from .routes import short_conv_last_path as short_conv_last_path

_HOMES = {
    "patching": ("accelerate_fla", "is_accelerated", "restore_fla"),
    "routes": ("kda_last_path", "last_path", "mlp_last_path", "short_conv_last_path"),
}

__getattr__, __dir__, __all__ = _lazy_exports(
    __name__, {name: f"{__name__}.{home}:{name}" for home, names in _HOMES.items() for name in names}
)
