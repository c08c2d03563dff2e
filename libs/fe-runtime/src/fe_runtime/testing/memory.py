"""Arrays of any strides, and the same array in another framework."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from fe_runtime.arrays import Device, as_device, detect_framework
from fe_runtime.dtypes import canonical_dtype, framework_dtype

__all__ = ["NumpyArray", "numpy_dtype", "reach", "strided_array", "to_framework", "to_numpy"]

NumpyArray = np.ndarray[Any, np.dtype[Any]]


def strided_array(
    shape: Sequence[int], stride: Sequence[int], dtype: str, values: NumpyArray | None = None
) -> NumpyArray:
    """Return a numpy array with these strides (in elements); the elements between its own are 0xFF bytes (NaN).

    Parameters
    ----------
    shape, stride
        Extents and strides in elements; a stride may be 0 or negative.
    dtype
        Canonical name.
    values
        What to fill it with; converted to ``dtype``. Left out: zeros.
    """
    _, view = _strided(shape, stride, dtype, values)
    return view


def reach(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, int]:
    """Return the lowest element offset and one past the highest, counted from the first element."""
    if 0 in shape:
        return 0, 0
    ends = [(extent - 1) * step for extent, step in zip(shape, stride, strict=True)]
    return sum(min(end, 0) for end in ends), sum(max(end, 0) for end in ends) + 1


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy (or ml_dtypes) dtype of a canonical name."""
    return cast("np.dtype[Any]", framework_dtype(name, "numpy"))


def to_framework(array: NumpyArray, framework: str, device: object = "cpu") -> Any:
    """Return a copy of a numpy array in ``"numpy"``, ``"torch"`` or ``"jax"``.

    Strides are kept where the framework has them: torch knows none below zero and jax none at all.
    """
    if framework == "numpy":
        return _copy(array)
    if framework == "jax":
        return _to_jax(array, as_device(device))
    if framework != "torch":
        raise ValueError(f"framework must be 'numpy', 'torch' or 'jax'; got {framework!r}")
    torch: Any = importlib.import_module("torch")
    source = array if min(array.strides, default=0) >= 0 else np.ascontiguousarray(array)
    buffer, view = _strided(source.shape, _stride(source), canonical_dtype(source.dtype), source)
    dtype: Any = framework_dtype(canonical_dtype(source.dtype), "torch")
    # On the device the copy starts at an address that suits every dtype.
    stored = torch.from_numpy(buffer).to(str(as_device(device)), copy=True)
    return stored.view(dtype).as_strided(view.shape, _stride(view))


def to_numpy(x: Any) -> NumpyArray:
    """Return the values of an array as contiguous numpy; packed FP4 pairs as ``uint8``, other dtypes unchanged."""
    if detect_framework(x) != "torch":
        return np.ascontiguousarray(np.asarray(x)).reshape(x.shape)
    torch: Any = importlib.import_module("torch")
    tensor = x.detach().cpu().resolve_neg().resolve_conj().contiguous()
    kind = numpy_dtype(canonical_dtype(tensor.dtype))
    if not tensor.numel():  # its strides may be anything
        return np.zeros(tuple(tensor.shape), kind)
    flat: NumpyArray = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat.view(kind).reshape(tuple(tensor.shape))


def _copy(array: NumpyArray) -> NumpyArray:
    # ndarray.copy() would close the gaps between the elements.
    return strided_array(array.shape, _stride(array), canonical_dtype(array.dtype), array)


def _stride(array: NumpyArray) -> tuple[int, ...]:
    return tuple(step // array.itemsize for step in array.strides)


def _strided(
    shape: Sequence[int], stride: Sequence[int], dtype: str, values: NumpyArray | None
) -> tuple[NumpyArray, NumpyArray]:
    """Return a buffer of bytes and the array in it."""
    kind = numpy_dtype(dtype)
    low, high = reach(shape, stride)
    buffer = np.full(max(high - low, 1) * kind.itemsize, 0xFF, np.uint8)
    steps = tuple(step * kind.itemsize for step in stride)
    view: NumpyArray = np.ndarray(tuple(shape), kind, buffer, -low * kind.itemsize, steps)
    view[...] = np.zeros((), kind) if values is None else values.astype(kind)
    return buffer, view


def _to_jax(array: NumpyArray, device: Device) -> Any:
    jax: Any = importlib.import_module("jax")
    platform = "gpu" if device.type == "cuda" else device.type
    found = jax.local_devices(backend=platform)[device.index or 0]
    return jax.device_put(np.ascontiguousarray(array).reshape(array.shape), found)
