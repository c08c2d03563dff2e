"""The operations under the namespace in which users of the peer library look for them."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from fe_runtime._lazy import lazy_exports as _lazy_exports

if _TYPE_CHECKING:  # what type checkers and editors see
    from . import causal_conv1d as causal_conv1d
    from . import causal_conv1d_update as causal_conv1d_update

_NAMES = ("causal_conv1d", "causal_conv1d_update")

__getattr__, __dir__, __all__ = _lazy_exports(__name__, {name: f"fe_conv:{name}" for name in _NAMES})
