"""Operations on the arrays themselves that need their framework: allocate, pad, read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from fe_runtime.arrays.recognition import detect_framework
from fe_runtime.device import as_device
from fe_runtime.dtypes import canonical_dtype, framework_dtype
from fe_runtime.errors import InvalidArgumentError, explain
from fe_runtime.tensor_desc import TensorDesc

__all__ = ["allocate_byte_workspace", "empty", "pad_to_ndim", "permuted", "to_host_list"]


def empty(framework: str, shape: Sequence[int], dtype: str, device: object) -> Any:
    """Allocate a C-contiguous array whose contents are undefined (zeros in jax).

    Parameters
    ----------
    framework
        ``"torch"``, ``"jax"`` or ``"numpy"``.
    shape
        Extents as stored: packed FP4 (``float4_e2m1fn_x2``) counts bytes.
    dtype
        Canonical name.
    device
        Where to allocate; torch allocates on the current stream of that device. numpy allocates on the host.

    Raises
    ------
    InvalidArgumentError
        Unknown framework or dtype, FP4 codes where only packed pairs exist, a device the framework does not have, or
        a 64-bit dtype in jax while 64-bit types are off.
    """
    if framework == "torch":
        if dtype == "float4_e2m1fn":
            fix = "Use 'float4_e2m1fn_x2' with the extents in bytes."
            raise InvalidArgumentError(explain("empty", "dtype", "be storable in torch", repr(dtype), fix))
        import torch

        return torch.empty(tuple(shape), dtype=framework_dtype(dtype, "torch"), device=str(as_device(device)))
    if framework == "numpy":
        where = as_device(device)
        if where.type != "cpu":
            raise InvalidArgumentError(explain("empty", "device", "be 'cpu' for numpy", where))
        import numpy as np

        return np.empty(tuple(shape), dtype=framework_dtype(dtype, "numpy"))
    if framework == "jax":
        return _jax_zeros(tuple(shape), dtype, device)
    raise InvalidArgumentError(explain("empty", "framework", "be 'torch', 'jax' or 'numpy'", repr(framework)))


def allocate_byte_workspace(size: int, framework: str, device: object) -> Any:
    """Allocate ``size`` bytes as a ``uint8`` vector with undefined contents."""
    return empty(framework, (size,), "uint8", device)


def to_host_list(x: object) -> list[Any]:
    """Return the values of an array as nested Python lists (waits for the device)."""
    if detect_framework(x) == "unknown":
        import numpy as np

        x = np.from_dlpack(cast("Any", x))
    return cast("list[Any]", cast("Any", x).tolist())


def pad_to_ndim(x: Any, ndim: int) -> Any:
    """Return a view of an array or descriptor with extent-1 dimensions appended up to rank ``ndim``.

    Raises
    ------
    InvalidArgumentError
        ``x`` has more than ``ndim`` dimensions.
    """
    missing = ndim - len(x.shape)
    if missing < 0:
        raise InvalidArgumentError(explain("pad_to_ndim", "array", f"have at most {ndim} dimensions", len(x.shape)))
    for _ in range(missing):
        is_torch_like = isinstance(x, TensorDesc) or detect_framework(x) == "torch"
        x = x.unsqueeze(-1) if is_torch_like else x[..., None]
    return x


def permuted(x: Any, order: Sequence[int]) -> Any:
    """Return an array with its dimensions in another order: a view, in JAX a new array."""
    return x.permute(order) if detect_framework(x) == "torch" else x.transpose(order)


def _jax_zeros(shape: tuple[int, ...], dtype: str, device: object) -> Any:
    # jax has no uninitialised memory to hand out, and silently narrows 64-bit dtypes unless they are turned on.
    import jax

    if canonical_dtype(dtype) in ("int64", "float64") and not cast("Any", jax.config).jax_enable_x64:
        fix = "Call jax.config.update('jax_enable_x64', True) first."
        raise InvalidArgumentError(explain("empty", "dtype", "have at most 32 bits in jax", repr(dtype), fix))
    where = as_device(device)
    platform = "gpu" if where.type == "cuda" else where.type
    try:
        found = [d for d in jax.local_devices(backend=platform) if where.index is None or as_device(d) == where]
    except RuntimeError:  # jax has no such platform here
        found = []
    if not found:
        raise InvalidArgumentError(explain("empty", "device", "be one that jax sees", where))
    return jax.numpy.zeros(shape, dtype=framework_dtype(dtype, "jax"), device=found[0])
