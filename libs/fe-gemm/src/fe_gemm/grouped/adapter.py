"""The legacy and the discrete operations: other argument forms of ``grouped_gemm_glu`` and ``grouped_gemm_dglu``.

They run those operations and share their kernels, their registered ops and their errors, which name them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fe_runtime.arrays import detect_framework, get_device, is_jax_array, is_torch_tensor, on_stream, resolve_stream
from fe_runtime.errors import InvalidArgumentError, explain

from . import forms

__all__ = ["AdapterAPI", "check_rows", "check_scaled", "copy_on", "given", "ones_like", "zeroed_rows"]


class AdapterAPI:
    """A class form that is another one's with other arguments."""

    def __init__(self, operation: str, inner: Any, sample_a: Any, takes_jax: bool) -> None:
        self._inner, self._name = inner, operation
        self._refused = "a JAX array" if not takes_jax and is_jax_array(sample_a) else ""
        self._is_scaled = forms.dtype_name(sample_a) != "bfloat16"

    def check_support(self) -> bool:
        """Validate the samples and options completely; True, or raise."""
        self._check()
        return bool(self._inner.check_support())

    def compile(self) -> None:
        """Build the kernel, once; later calls do nothing."""
        self._check()
        self._inner.compile()

    def explain(self) -> str:
        """Return the plan in words."""
        return str(self._inner.explain())

    def scratch_workspace_bytes(self) -> int:
        """Return the bytes of scratch that ``execute`` needs from the caller: none."""
        return 0

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Compile if needed, then execute."""
        self.compile()
        return self.execute(*arguments, **keywords)

    def execute(self, *arguments: Any, **keywords: Any) -> Any:
        """Run on live operands; each class writes out its signature."""
        raise NotImplementedError

    def _check(self) -> None:
        if self._refused:
            fix = f"Call {self._name}_jax."
            text = explain(self._name, "sample_a", "be no JAX array, which nobody can write", self._refused, fix)
            raise InvalidArgumentError(text)
        if not self._is_scaled:
            raise _not_scaled(self._name)


def check_scaled(operation: str, a: Any) -> None:
    """Raise ``InvalidArgumentError`` for bfloat16 operands."""
    if forms.dtype_name(a) == "bfloat16":
        raise _not_scaled(operation)


def given(operation: str, **arrays: Any) -> None:
    """Raise ``InvalidArgumentError`` for a missing array that only this form asks for."""
    for name, array in arrays.items():
        if array is None:
            raise InvalidArgumentError(explain(operation, name, "be an array", "None", "Pass the array."))


def ones_like(x: Any, stream: Any) -> Any:
    """Return an array of ones beside another one, made on the launch stream."""
    if x is None:
        return None
    if is_torch_tensor(x):
        import torch

        with on_stream(resolve_stream(stream, "torch", get_device(x), "current_stream"), (x,)):
            return torch.ones_like(x)
    if is_jax_array(x):
        import jax

        return jax.numpy.ones_like(x)
    return np.ones_like(x)


def zeroed_rows(a: Any, stream: Any) -> Any:
    """Return a number for each row of A, 0, made on the launch stream."""
    shape = (a.shape[0], *(1,) * (2 * (len(a.shape) - 2)))
    if not is_torch_tensor(a):
        return np.zeros(shape, np.float32)
    import torch

    with on_stream(resolve_stream(stream, detect_framework(a), get_device(a), "current_stream"), (a,)):
        return torch.zeros(shape, dtype=torch.float32, device=a.device)


def check_rows(operation: str, name: str, buffer: Any, like: Any) -> None:
    """Raise ``InvalidArgumentError`` unless a caller's buffer can take a number for each row."""
    shape, rows = tuple(getattr(buffer, "shape", ())), like.shape[0]
    is_alike = detect_framework(buffer) == detect_framework(like) and get_device(buffer) == get_device(like)
    if not is_alike or buffer.dtype != like.dtype or shape not in ((rows,), (rows, 1, 1)):
        rule = f"be float32 ({rows},) or ({rows}, 1, 1), of the kind and on the device of a_tensor"
        given = f"{type(buffer).__name__} {shape} {getattr(buffer, 'dtype', '')}"
        raise InvalidArgumentError(explain(operation, name, rule, given, "Allocate it so, or leave it out."))


def copy_on(stream: Any, target: Any, source: Any) -> Any:
    """Copy an array into the caller's, of as many values, on the launch stream; return the latter."""
    source = source.reshape(target.shape)
    if is_torch_tensor(target):
        with on_stream(resolve_stream(stream, "torch", get_device(target), "current_stream"), (target, source)):
            return target.copy_(source)
    target[...] = source
    return target


def _not_scaled(operation: str) -> InvalidArgumentError:
    fix = "For bfloat16 use grouped_gemm_glu or grouped_gemm_dglu."
    return InvalidArgumentError(explain(operation, "a_tensor", "be fp8 or FP4", "bfloat16", fix))
