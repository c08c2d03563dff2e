"""Arrays that claim to lie on a GPU, for compiled functions, which check their arguments before they touch one."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod
from typing import Any

__all__ = ["DeviceArray"]

CUDA = 2
CODES = {
    "uint8": (1, 8),
    "int32": (0, 32),
    "int64": (0, 64),
    "bfloat16": (4, 16),
    "float16": (2, 16),
    "float32": (2, 32),
}
"""Kind and bits of dtypes in DLPack."""
ADDRESS = 0x7F00_0000_0000


class _Managed(ctypes.Structure):
    """``DLManagedTensor`` of DLPack."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_keep = _Deleter(lambda _managed: None)  # a DeviceArray owns what its capsule points to
# A prototype of its own: everybody in the process shares ctypes.pythonapi.PyCapsule_New and its argument types.
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


class DeviceArray:
    """An array of a shape and strides (in elements; row-major if left out) at an address, with nothing there."""

    def __init__(
        self, shape: Sequence[int], dtype: str, stride: Sequence[int] | None = None, address: int = ADDRESS
    ) -> None:
        rank = len(shape)
        if stride is None:
            stride = [prod(shape[number + 1 :]) for number in range(rank)]
        self.shape, self.stride, self.dtype = tuple(shape), tuple(stride), dtype
        extents, steps = (ctypes.c_int64 * rank)(*shape), (ctypes.c_int64 * rank)(*stride)
        deleter = ctypes.cast(_keep, ctypes.c_void_p)
        self._managed = _Managed(address, CUDA, 0, rank, *CODES[dtype], 1, extents, steps, 0, None, deleter)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0

    def __dlpack__(self, **_protocol: Any) -> Any:
        return _new_capsule(ctypes.addressof(self._managed), b"dltensor", None)
