"""Compiled kernels as XLA FFI targets: the same object that torch launches, called by XLA on its own stream."""

from __future__ import annotations

import hashlib
import importlib.util
import threading
from collections.abc import Callable
from typing import Any

from fe_runtime.plan import Kernel, NoKernel

__all__ = ["bridge_problem", "ffi_target"]

_registered: dict[str, Any] = {}
_lock = threading.Lock()


def ffi_target(kernel: Kernel, run: Callable[..., object]) -> str:
    """Register a loaded kernel once per process; return the target's name, the same in every process."""
    scalars = kernel.form.scalars
    identity = f"{kernel.spec.identity} {scalars}"
    name = f"{kernel.spec.operation}.{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    with _lock:
        if name not in _registered:
            bridge = importlib.import_module("jax_tvm_ffi")
            arguments = ["args", "rets", *(f"attrs.{scalar}" for scalar in scalars)]
            _registered[name] = bridge.register_ffi_target(name, run, arguments, platform="gpu", allow_cuda_graph=True)
    return name


def bridge_problem() -> NoKernel | None:
    """Return why XLA cannot call kernels on this installation, or ``None`` if it can."""
    if importlib.util.find_spec("jax_tvm_ffi") is None:
        return NoKernel("jax-tvm-ffi, through which XLA calls kernels, is not installed", _INSTALL)
    return None


_INSTALL = "Run: pip install 'fe-runtime[jax]'."
