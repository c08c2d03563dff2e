"""The torch bridge: every operation is a ``torch.library`` op, and eager calls go around it when they can.

| module | concern |
|---|---|
| ``dispatch`` | which calls must go through torch's dispatcher, and how they do |
| ``registration`` | the op itself: schema from the contract, kernels, fake kernel |
| ``autograd`` | the derivative, from :class:`fe_runtime.gradient.Gradient` |
| ``vmap`` | the batching rule, from the ``...`` of the contract |

Importing this package registers every operation that exists by then; an operation that is made later registers
itself. So ``torch.ops.<library>.<operation>`` exists as soon as both torch and the operation's module are loaded, if
torch was loaded first, and otherwise from the operation's first call, or from ``import fe_runtime.torch``.
"""

from __future__ import annotations

from fe_runtime.operation import OPERATIONS
from fe_runtime.tuple_dict import register_pytrees

from .dispatch import dispatch, eager_key, must_dispatch, plain_key
from .registration import register

__all__ = ["dispatch", "eager_key", "must_dispatch", "plain_key", "register"]

register_pytrees()  # before torch.compile looks at whether it has been done
for _operation in tuple(OPERATIONS.values()):
    register(_operation)
