"""Facts about CUDA devices, asked of the driver: no framework is needed and no CUDA context is made."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fe_runtime.device import as_device
from fe_runtime.errors import InvalidArgumentError, explain

__all__ = ["capability", "cuda_is_available", "device_guard", "get_compute_capability", "sm_count", "synchronize"]

_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _MULTIPROCESSOR_COUNT = 75, 76, 16  # CUdevice_attribute


def capability(device: object) -> tuple[int, int]:
    """Return the compute capability of a CUDA device, ``(9, 0)`` for an H100.

    Parameters
    ----------
    device
        A ``Device``, its name, a framework's device, or a CUDA ordinal.

    Raises
    ------
    RuntimeError
        CUDA is unavailable, or there is no such device.
    InvalidArgumentError
        ``device`` is not a CUDA device.
    """
    ordinal = _ordinal(device)
    return _attribute(_CAPABILITY_MAJOR, ordinal), _attribute(_CAPABILITY_MINOR, ordinal)


get_compute_capability = capability


def sm_count(device: object) -> int:
    """Return the number of streaming multiprocessors of a CUDA device; parameters and errors as :func:`capability`."""
    return _attribute(_MULTIPROCESSOR_COUNT, _ordinal(device))


def cuda_is_available() -> bool:
    """Return whether the driver works and sees a device."""
    try:
        count = ctypes.c_int()
        _call("cuDeviceGetCount", ctypes.byref(count))
    except RuntimeError:
        return False
    return count.value > 0


@contextmanager
def device_guard(device: object) -> Iterator[None]:
    """Make a CUDA device current in this thread for the block, whether or not the thread had a context before.

    Other devices (``cpu``, ``unknown``) need no guard: the block just runs.
    """
    where = as_device(device)
    if where.type != "cuda":
        yield
        return
    _call("cuCtxPushCurrent_v2", _primary_context(_ordinal(where)))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def synchronize(device: object) -> None:
    """Wait until a CUDA device has done all work of this process."""
    with device_guard(device):
        _call("cuCtxSynchronize")


def _ordinal(device: object) -> int:
    if isinstance(device, int) and not isinstance(device, bool):
        return device
    where = as_device(device)
    if where.type != "cuda":
        raise InvalidArgumentError(explain("capability", "device", "be a CUDA device", where))
    return _current_ordinal() if where.index is None else where.index


def _current_ordinal() -> int:
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.current_device())
    return 0


@functools.cache
def _attribute(attribute: int, ordinal: int) -> int:
    value = ctypes.c_int()
    _call("cuDeviceGetAttribute", ctypes.byref(value), attribute, _device_handle(ordinal))
    return value.value


@functools.cache
def _primary_context(ordinal: int) -> ctypes.c_void_p:
    context = ctypes.c_void_p()  # retained until the process ends, as every framework does
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), _device_handle(ordinal))
    return context


def _device_handle(ordinal: int) -> ctypes.c_int:
    handle = ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(ordinal))
    return handle


def _call(function: str, *arguments: object) -> None:
    driver = _driver()
    _check(driver, function, getattr(driver, function)(*arguments))


@functools.cache
def _driver() -> ctypes.CDLL:
    """Load and initialise the CUDA driver library; a failure is not cached."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(name)
    except OSError as error:
        raise RuntimeError(f"CUDA is not available: the NVIDIA driver library {name} cannot be loaded") from error
    _check(driver, "cuInit", driver.cuInit(0))
    return driver


def _check(driver: ctypes.CDLL, function: str, status: int) -> None:
    if status == 0:
        return
    text = ctypes.c_char_p()
    driver.cuGetErrorString(status, ctypes.byref(text))
    reason = text.value.decode() if text.value else "unknown error"
    if function == "cuInit":
        raise RuntimeError(f"CUDA is not available: {reason} (driver error {status})")
    raise RuntimeError(f"CUDA driver: {function} failed: {reason} (error {status})")
