"""The replacement of ``GatedMLP.forward``: ``(silu(x Wg^T) * (x Wu^T)) Wd^T`` by fe-gemm, where that is installed.

The native path reads the weights of the projections and calls none of their modules, so whatever could make a call of
these modules mean something else (a subclass, a hook, a parametrization, an adapter) sends the call to the original.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from fe_runtime.arrays import capability, get_device
from fe_runtime.errors import NotSupportedError

from .gates import is_known_version
from .routes import GATED_MLP, Decision, routed
from .tracing import is_plain, is_tracing

__all__ = ["gated_mlp"]

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
ACTIVATION = "swiglu_linear"
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
CAPABILITIES = ((9, 0),)
"""Where fe-gemm has the kernels."""
MULTIPLE = 8
"""Sizes are multiples of it, so that every row of bf16 starts at 16 bytes."""


def gated_mlp(original: Callable[..., Any], holder: Any) -> Callable[..., Any]:
    """Return the replacement of ``forward(self, x, **kwargs)`` of the class ``holder``.

    Keyword arguments beyond x are ignored natively and reach the original on fallback. The native path is
    differentiable in x and the three weights. A ``RuntimeError`` or ``ValueError`` of the native operation is recorded;
    any other exception passes, since activation checkpointing stops a forward by one.
    """
    return routed(original, GATED_MLP, partial(decide, holder), (RuntimeError, ValueError))


def decide(kind: Any, module: Any, x: Any, **_ignored: Any) -> Decision:
    """Return the native call, or why the original has to serve this one."""
    reason = _context() or _module(kind, module) or _tokens(x)
    if reason is not None:
        return reason
    weights = [getattr(module, name).weight for name in PROJECTIONS]
    reason = _sizes(x, module) or next(filter(None, (_parameter(w, x) for w in weights)), None)
    reason = reason or _shapes(x, *weights)
    return reason or (lambda: _swiglu_mlp()(x, *weights))


def _swiglu_mlp() -> Callable[..., Any]:
    """Return the operation of fe-gemm; ``ImportError`` or ``NotSupportedError`` where there is none."""
    operation: Callable[..., Any] | None = getattr(import_module("fe_gemm"), "swiglu_mlp", None)
    if operation is None:
        reason = "the installed fe-gemm has no swiglu_mlp"
        raise NotSupportedError(f"gated_mlp: {reason}. Install a newer one.", reason=reason)
    return operation


def _context() -> str | None:
    torch = _torch()
    if is_tracing():
        return "compile"
    if torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") != torch.bfloat16:
        return "autocast"
    return None if is_known_version() else "fla-version"


def _module(kind: Any, module: Any) -> str | None:
    children = set(module._modules)
    allowed = {*PROJECTIONS, ACTIVATION}
    whole = set(PROJECTIONS) <= children <= allowed
    if type(module) is not kind or _has_own_forward(module) or not whole or module._parameters or module._buffers:
        return "custom-gated-mlp"
    if _has_hooks(module) or _has_global_hooks() or _is_parametrized(module):
        return "hooks-or-parametrization"
    if module.hidden_act != "swish" or module.fuse_swiglu is not True or ACTIVATION not in children:
        return "variant"
    linear = _torch().nn.Linear
    for name in PROJECTIONS:
        projection = getattr(module, name)
        reason = _child(projection, linear, {"weight", "bias"})
        if reason is None and projection.bias is not None:
            reason = "bias"
        if reason is not None:
            return reason
    return _child(getattr(module, ACTIVATION), getattr(sys.modules[kind.__module__], "SwiGLULinear", None), set())


def _child(module: Any, kind: Any, parameters: set[str]) -> str | None:
    """Return why a child cannot be replaced by its weight alone."""
    if _is_parametrized(module):
        return "parametrized"
    if type(module) is not kind:
        return "custom-module"
    if _has_own_forward(module):
        return "custom-forward"
    if set(module._parameters) != parameters or module._buffers or module._modules:
        return "custom-module"
    return "hooks" if _has_hooks(module) else None


def _tokens(x: Any) -> str | None:
    if not is_plain(x):
        return "tensor-subclass"
    if x.dtype != _torch().bfloat16:
        return "non-bf16"
    if not x.is_cuda:
        return "non-cuda"
    if x.ndim < 2 or x.numel() == 0 or not x.is_contiguous():
        return "shape-or-layout"
    if x._backward_hooks:
        return "hooks"
    return None if capability(get_device(x)) in CAPABILITIES else "unsupported-arch"


def _sizes(x: Any, module: Any) -> str | None:
    inner, outer = module.gate_proj.out_features, module.gate_proj.in_features
    fits = x.shape[-1] == outer and outer % MULTIPLE == 0 and inner % MULTIPLE == 0
    return None if fits else "shape"


def _parameter(weight: Any, x: Any) -> str | None:
    if not is_plain(weight):
        return "tensor-subclass"
    if weight.dtype != x.dtype:
        return "non-bf16"
    if weight.device != x.device:
        return "nonlocal-device"
    if weight.ndim != 2:
        return "shape"
    if not weight.is_contiguous():
        return "noncontiguous"
    if weight.untyped_storage().nbytes() < weight.nbytes:  # a sharding wrapper has freed it
        return "nonlocal-parameter"
    return "hooks" if weight._backward_hooks else None


def _shapes(x: Any, gate: Any, up: Any, down: Any) -> str | None:
    inner, outer = gate.shape
    return None if (outer, up.shape, tuple(down.shape)) == (x.shape[-1], gate.shape, (outer, inner)) else "shape"


def _has_own_forward(module: Any) -> bool:
    return "forward" in vars(module)


def _has_hooks(module: Any) -> bool:
    return any(getattr(module, name, None) for name in HOOKS)


def _has_global_hooks() -> bool:
    home = vars(_torch().nn.modules.module)
    return any(home.get(f"_global{name}") for name in HOOKS)


def _is_parametrized(module: Any) -> bool:
    return "parametrizations" in module._modules


def _torch() -> Any:
    import torch  # a statement: torch.compile traces it, a call of importlib it does not

    return torch
