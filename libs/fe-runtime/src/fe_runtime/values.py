"""Contracts on the values of offsets, indices and positions: checked on the host where reading them is free or asked
for.

The normal path never reads device memory; kernels stay inside their operands whatever these values are. Under
``FE_CHECK_DEVICE_VALUES=1`` each call copies them to the host first, which waits for the GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import env
from .arrays import is_torch_tensor, is_tracer
from .contract import Bound

__all__ = ["Read", "ValueCheck", "with_value_check"]

Read = Callable[[str], "np.ndarray[Any, Any]"]
"""``read(name) -> numpy array``: the values of an input that is present."""

ValueCheck = Callable[[Bound, Read], None]
"""``check(bound, read)`` raises ``InvalidArgumentError`` for values that the contract forbids."""


def with_value_check(
    check: ValueCheck, bound: Bound, names: Sequence[str], run: Callable[..., Any], variable: str = ""
) -> Callable[..., Any]:
    """Return ``run(arrays, ...)`` with the check before it.

    Parameters
    ----------
    check
        The operation's check.
    bound
        The checked signature.
    names
        Names of the arrays that ``run`` gets first.
    run
        The prepared call.
    variable
        Another library's environment variable that asks for the check too, and for ``RuntimeError`` under capture.

    Notes
    -----
    Arrays on the CPU are always checked, those on a GPU in checked mode outside of graph capture. Tracers and tensors
    without data never are.
    """
    if bound.device.type not in ("cpu", "cuda"):
        return run
    on_cpu = bound.device.type == "cpu"

    def checked(arrays: Sequence[Any], *more: Any) -> Any:
        if (on_cpu or _is_asked_for(bound.operation, variable)) and not any(map(is_tracer, arrays)):
            known = dict(zip(names, arrays, strict=True))
            check(bound, lambda name: _on_host(known[name]))
        return run(arrays, *more)

    return checked


def _is_asked_for(operation: str, variable: str) -> bool:
    """Whether values on the GPU are to be read. Capturing a graph, they cannot be."""
    if variable and env.switch(variable):
        if _is_capturing():
            text = f"{operation}: {variable} asks for a look at values on the GPU, which a graph capture cannot have."
            raise RuntimeError(f"{text} Unset it, or set FE_CHECK_DEVICE_VALUES, which capture passes over.")
        return True
    return env.check_device_values() and not _is_capturing()


def _on_host(array: Any) -> np.ndarray[Any, Any]:
    return np.asarray(array.detach().cpu()) if is_torch_tensor(array) else np.asarray(array)


def _is_capturing() -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())
