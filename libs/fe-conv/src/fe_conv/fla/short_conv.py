"""The replacement of ``causal_conv1d_update``, the decode step of the short convolutions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from fe_conv import causal_conv1d_update as native_update
from fe_runtime.arrays import alignment, capability, get_device
from fe_runtime.compile.spec import arch_for
from fe_runtime.device import Device
from fe_runtime.plan import BACKENDS, backend_of

from .routes import SHORT_CONV, Decision, routed
from .tracing import hidden_from_compiler, is_plain, is_tracing, needs_gradient

__all__ = ["short_conv"]

DTYPES = ("torch.bfloat16", "torch.float16")
ACTIVATIONS = (None, "identity", "silu", "swish")
WIDEST = 32


def short_conv(original: Callable[..., Any], _holder: Any) -> Callable[..., Any]:
    """Return the replacement of ``causal_conv1d_update(x, cache, residual, weight, bias, activation)``.

    It returns ``(y, cache)``: ``y`` of x's shape, ``residual + act(conv + bias)``, and the caller's cache, written in
    place.
    """
    return hidden_from_compiler(routed(original, SHORT_CONV, decide), original)


def decide(
    x: Any, cache: Any, residual: Any = None, weight: Any = None, bias: Any = None, activation: Any = None
) -> Decision:
    """Return the native call, or why the original has to serve this one."""
    if weight is None:
        return "weight"
    if activation not in ACTIVATIONS:
        return "activation"
    tensors = [x, cache, weight, *(tensor for tensor in (bias, residual) if tensor is not None)]
    reason = _unsuitable(tensors) or _misplaced(x, tensors, weight, cache)
    if reason is not None:
        return reason
    rows = _rows(x)
    if isinstance(rows, str):
        return rows
    reason = _misshapen(x, rows, cache, weight, bias, residual)
    if reason is not None:
        return reason
    if any(alignment(tensor) < 16 for tensor in (x, cache, weight)):
        return "alignment"
    if needs_gradient(tensors):
        return "autograd"
    backend = _backend(get_device(x))
    return lambda: _run(x, rows, cache, residual, weight, bias, activation, backend)


def _run(
    x: Any, rows: Any, cache: Any, residual: Any, weight: Any, bias: Any, activation: Any, backend: str
) -> tuple[Any, Any]:
    y = native_update(rows, cache, weight, bias, activation, backend=backend).view(x.shape)
    return y if residual is None else y.add_(residual), cache


def _unsuitable(tensors: list[Any]) -> str | None:
    if not all(map(is_plain, tensors)):
        return "tensor-subclass"
    if is_tracing():
        return "compile"
    dtypes = {str(tensor.dtype) for tensor in tensors}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        return "non-bf16"
    return None


def _misplaced(x: Any, tensors: list[Any], weight: Any, cache: Any) -> str | None:
    if not all(tensor.is_cuda for tensor in tensors):
        return "non-cuda"
    if any(tensor.device != x.device for tensor in tensors):
        return "device"
    if not _backend(get_device(x)):
        return "unsupported-arch"
    if not (weight.is_contiguous() and cache.is_contiguous()):
        return "noncontiguous"
    return None


def _rows(x: Any) -> Any:
    """Return x as (N, D) without a copy, or the reason why there is no such view."""
    shape, steps = tuple(x.shape), x.stride()
    if 0 in shape:
        return "shape"
    if len(shape) == 3 and 1 in shape[:2]:
        at = 1 if shape[1] == 1 else 0
        rows, (step, inner) = x.select(at, 0), (steps[1 - at], steps[2])
    elif len(shape) == 2:
        rows, (step, inner) = x, steps
    else:
        return "shape"
    count, channels = rows.shape
    if (inner != 1 and channels > 1) or (step < channels and count > 1):
        return "noncontiguous"
    if step % 8 and step != channels and count > 1:
        return "alignment"
    return rows


def _misshapen(x: Any, rows: Any, cache: Any, weight: Any, bias: Any, residual: Any) -> str | None:
    count, channels = rows.shape
    if bias is not None and tuple(bias.shape) != (channels,):
        return "bias"
    if residual is not None and residual.shape != x.shape:
        return "residual"
    if weight.ndim != 2 or weight.shape[0] != channels or not 2 <= weight.shape[1] <= WIDEST:
        return "shape"
    return None if tuple(cache.shape) == (count, channels, weight.shape[1]) else "shape"


@cache
def _backend(device: Device) -> str:
    """Return the kernel backend of a GPU, so that its absence is an error and no slow path; empty: there is none."""
    backend = backend_of(arch_for(capability(device)))
    return backend if backend in BACKENDS else ""
