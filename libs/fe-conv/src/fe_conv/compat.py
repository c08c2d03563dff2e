"""The names of the peer library: a port changes its import, and gets the same objects as under our names.

``compat.ops.causal_conv1d`` stands for its ``ops.causal_conv1d``, ``compat.fla`` for its ``fla``.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from fe_runtime._lazy import lazy_exports as _lazy_exports

if _TYPE_CHECKING:  # what type checkers and editors see
    from . import fla as fla
    from . import ops as ops

__getattr__, __dir__, __all__ = _lazy_exports(__name__, {"fla": "fe_conv.fla", "ops": "fe_conv.ops"})
