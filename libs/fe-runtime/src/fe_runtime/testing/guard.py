"""An array inside a buffer of canaries, so that a read beyond it matters and a write beyond it is found."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fe_runtime.arrays import as_device, get_data_ptr
from fe_runtime.dtypes import framework_dtype
from fe_runtime.strides import contiguous_stride

from .memory import NumpyArray, numpy_dtype, reach

__all__ = ["Guarded", "guarded"]

_MARGIN = 4096
"""Bytes of canaries before and after the array: more than any tile reaches beyond it."""


@dataclass(frozen=True)
class Guarded:
    """An array (``array``) and the buffer around it. ``name`` is for error texts."""

    array: Any
    name: str
    _buffer: Any
    _before: NumpyArray
    _inside: NumpyArray
    _start: int

    def check_surroundings(self) -> None:
        """Raise ``AssertionError`` if a byte outside the array was written, also between its rows."""
        self._compare(~self._inside, "outside the array")

    def check_unchanged(self) -> None:
        """Raise ``AssertionError`` if any byte was written, inside the array or outside."""
        self._compare(np.ones_like(self._inside), "of the array or around it")

    def _compare(self, where: NumpyArray, what: str) -> None:
        changed = np.flatnonzero(where & (self._before != _host_bytes(self._buffer)))
        if changed.size:
            offsets = f"{changed[0] - self._start} to {changed[-1] - self._start}"
            raise AssertionError(
                f"{self.name}: {changed.size} bytes {what} changed, at offsets {offsets} from its first element"
            )


def guarded(
    shape: Sequence[int],
    dtype: str,
    *,
    stride: Sequence[int] | None = None,
    values: NumpyArray | None = None,
    canary: float | None = None,
    alignment: int = 16,
    framework: str = "numpy",
    device: object = "cpu",
    name: str = "array",
) -> Guarded:
    """Make an array whose neighbourhood is watched.

    Parameters
    ----------
    shape, stride
        Extents, and strides in elements (contiguous if left out). Negative strides exist in numpy only.
    dtype
        Canonical name; packed FP4 as ``uint8``.
    values
        Contents, converted to ``dtype``. Left out: canaries too, so that an element that is never written shows.
    canary
        A number such as 1e4, or ``None`` for 0xFF bytes, which are NaN in every float.
    alignment
        Bytes: the address is a multiple of this power of two and of no larger one.
    framework, device
        ``"numpy"`` or ``"torch"``.
    name
        For error texts.

    Raises
    ------
    ValueError
        The alignment is no power of two, or smaller than an element.
    """
    kind = numpy_dtype(dtype)
    if alignment & (alignment - 1) or alignment < kind.itemsize:
        raise ValueError(f"alignment must be a power of two of at least {kind.itemsize} bytes; got {alignment}")
    stride = contiguous_stride(shape) if stride is None else tuple(stride)
    place = _Place(tuple(shape), stride, kind, alignment)
    if framework == "numpy":
        buffer: Any = np.empty(place.total, np.uint8)
        start = place.start(get_data_ptr(buffer))
        array: Any = place.fill(buffer, start, values, canary)
    elif framework == "torch":
        torch: Any = importlib.import_module("torch")
        buffer = torch.empty(place.total, dtype=torch.uint8, device=str(as_device(device)))
        start = place.start(get_data_ptr(buffer))
        contents = np.empty(place.total, np.uint8)
        place.fill(contents, start, values, canary)
        buffer.copy_(torch.from_numpy(contents))
        typed = buffer.view(framework_dtype(dtype, "torch"))
        array = typed.as_strided(place.shape, place.stride, start // kind.itemsize)
    else:
        raise ValueError(f"framework must be 'numpy' or 'torch'; got {framework!r}")
    return Guarded(array, name, buffer, _host_bytes(buffer).copy(), place.inside(start), start)


@dataclass(frozen=True)
class _Place:
    """Where in its buffer an array lies."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    kind: np.dtype[Any]
    alignment: int

    @property
    def total(self) -> int:
        low, high = reach(self.shape, self.stride)
        size = 2 * _MARGIN + (high - low) * self.kind.itemsize + 2 * self.alignment
        return -(-size // 16) * 16

    def start(self, address: int) -> int:
        """Return the offset of the first element in a buffer at ``address``."""
        low, _ = reach(self.shape, self.stride)
        first = _MARGIN - low * self.kind.itemsize
        return first + (self.alignment - address - first) % (2 * self.alignment)

    def fill(self, buffer: NumpyArray, start: int, values: NumpyArray | None, canary: float | None) -> NumpyArray:
        """Fill a host buffer with canaries and the values; return the array in it."""
        buffer[:] = 0xFF
        array = self._view(buffer, start, self.kind)
        if canary is not None:
            phase = start % self.kind.itemsize
            count = (len(buffer) - phase) // self.kind.itemsize
            np.ndarray((count,), self.kind, buffer, phase)[...] = np.asarray(canary).astype(self.kind)
        if values is not None:
            array[...] = values.astype(self.kind)
        return array

    def inside(self, start: int) -> NumpyArray:
        """Return for each byte of the buffer whether it belongs to the array."""
        mask = np.zeros(self.total, np.bool_)
        self._view(mask, start, np.dtype((np.void, self.kind.itemsize)))[...] = b"\x01" * self.kind.itemsize
        return mask

    def _view(self, buffer: NumpyArray, start: int, kind: np.dtype[Any]) -> NumpyArray:
        steps = tuple(step * kind.itemsize for step in self.stride)
        return np.ndarray(self.shape, kind, buffer, start, steps)


def _host_bytes(buffer: Any) -> NumpyArray:
    return buffer if isinstance(buffer, np.ndarray) else np.asarray(buffer.cpu().numpy())
