"""The legacy and the discrete operations: other argument forms of ``grouped_gemm_glu`` and ``grouped_gemm_dglu``.

They run those operations and share their kernels, their registered ops and their errors, which name them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fe_runtime.arrays import detect_framework, get_device, is_jax_array, is_torch_tensor, on_stream, resolve_stream
from fe_runtime.errors import InvalidArgumentError, explain

from . import forms

__all__ = ["AdapterAPI", "check_scaled", "given", "ones_like", "zeroed_rows"]


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


def ones_like(x: Any) -> Any:
    """Return an array of ones beside another one."""
    if x is None:
        return None
    if is_torch_tensor(x):
        import torch

        return torch.ones_like(x)
    if is_jax_array(x):
        import jax

        return jax.numpy.ones_like(x)
    return np.ones_like(x)


def zeroed_rows(operation: str, a: Any, buffer: Any, stream: Any) -> Any:
    """Return a number for each row of A, 0, on the launch stream: the caller's array, or a new one."""
    if not is_torch_tensor(a):
        if buffer is None:
            return np.zeros((a.shape[0], *(1,) * (2 * (len(a.shape) - 2))), np.float32)
        if not isinstance(buffer, np.ndarray):
            raise InvalidArgumentError(
                explain(operation, "dprob_tensor_buf", "be a numpy array", type(buffer).__name__)
            )
        buffer[...] = 0
        return buffer
    import torch

    if buffer is not None and not is_torch_tensor(buffer):
        raise InvalidArgumentError(explain(operation, "dprob_tensor_buf", "be a torch tensor", type(buffer).__name__))
    with on_stream(resolve_stream(stream, detect_framework(a), get_device(a), "current_stream"), (a,)):
        if buffer is not None:
            return buffer.zero_()
        shape = (a.shape[0], 1, 1) if a.ndim == 3 else (a.shape[0],)
        return torch.zeros(shape, dtype=torch.float32, device=a.device)


def _not_scaled(operation: str) -> InvalidArgumentError:
    fix = "For bfloat16 use grouped_gemm_glu or grouped_gemm_dglu."
    return InvalidArgumentError(explain(operation, "a_tensor", "be fp8 or FP4", "bfloat16", fix))
