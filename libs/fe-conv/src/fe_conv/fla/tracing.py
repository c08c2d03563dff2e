"""What the replacements have to know about torch: tracing, gradients, plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["hidden_from_compiler", "is_plain", "is_tracing", "needs_gradient"]


def hidden_from_compiler(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function so that ``torch.compile`` calls it without looking inside, as it calls the original."""
    torch: Any = _torch()
    hidden: Callable[..., Any] = torch.compiler.disable(function)
    hidden.__wrapped__ = original  # type: ignore[attr-defined]
    return hidden


def is_tracing() -> bool:
    """Return whether torch records the call instead of running it."""
    torch = _torch()
    return bool(torch.compiler.is_compiling() or torch.jit.is_scripting() or torch.jit.is_tracing())


def is_plain(tensor: object) -> bool:
    """Return whether an object is a tensor or a parameter, and no subclass of these."""
    torch = _torch()
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


def needs_gradient(tensors: Iterable[Any]) -> bool:
    """Return whether autograd would record an operation on these tensors."""
    return bool(_torch().is_grad_enabled()) and any(tensor.requires_grad for tensor in tensors)


def _torch() -> Any:
    import torch  # a statement: torch.compile traces it, a call of importlib it does not

    return torch
