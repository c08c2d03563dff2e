"""Memory that was allocated but never written shows: it starts as 0xFF bytes, which are NaN in every float."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

__all__ = ["POISON", "poisoned_memory"]

POISON = 0xFF
"""The byte: NaN in all floats down to fp8 and e8m0, -1 in signed and the largest value in unsigned integers."""


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill what numpy's and torch's ``empty`` functions return, for the block.

    Covers ``empty`` and ``empty_like`` of numpy, and of torch (if it is loaded) also ``empty_strided``,
    ``empty_permuted`` and the tensor methods ``new_empty`` and ``new_empty_strided``, on every device and for every
    dtype. During the capture of a CUDA graph the fill is captured, so each replay starts from poisoned memory.

    Notes
    -----
    torch's own switch (``torch.utils.deterministic.fill_uninitialized_memory``) needs deterministic algorithms turned
    on, which changes what operations do, and fills integers with a valid value. jax has no uninitialised arrays.
    """
    with ExitStack() as stack:
        for name in ("empty", "empty_like"):
            stack.enter_context(patch.object(np, name, _poisoned_numpy(getattr(np, name))))
        torch = sys.modules.get("torch")
        if torch is not None:
            stack.enter_context(_torch_mode(torch))
        yield


def _poisoned_numpy(allocate: Callable[..., Any]) -> Callable[..., Any]:
    def poisoned(*arguments: Any, **keywords: Any) -> Any:
        array = allocate(*arguments, **keywords)
        if not array.dtype.hasobject:
            ctypes.memset(array.ctypes.data, POISON, array.nbytes)  # new arrays have no gaps
        return array

    return poisoned


def _torch_mode(torch: Any) -> Any:
    # A mode sees every call, also one through a reference to torch.empty that was taken before.
    allocating = {
        torch.empty,
        torch.empty_like,
        torch.empty_strided,
        torch.empty_permuted,
        torch.Tensor.new_empty,
        torch.Tensor.new_empty_strided,
    }

    class PoisonMode(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if function in allocating and (kwargs or {}).get("out") is None:
                _fill(torch, result)
            return result

    return PoisonMode()


def _fill(torch: Any, tensor: Any) -> None:
    if tensor.is_meta or type(tensor) is not torch.Tensor or not tensor.numel():
        return
    storage = tensor.untyped_storage()  # its own, since the tensor is new
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    whole.set_(storage, 0, (storage.nbytes(),), (1,)).fill_(POISON)
