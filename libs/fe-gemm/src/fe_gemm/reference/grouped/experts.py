"""The weights of the experts: one buffer in either form, or a table of addresses; one expert is decoded at a time."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from array_api_compat import array_namespace

from fe_runtime import formats
from fe_runtime.formats import _backend as backend

from . import forms

__all__ = ["Experts", "dense", "discrete", "store_through_pointers", "weights"]

Array: TypeAlias = Any

ITEM = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of the items wider than one."""


@dataclass(frozen=True)
class Experts:
    """E matrices: ``elements[e]`` is (N, K) as stored, packed e2m1 as bytes; ``scales[e]`` (N, S), or no scales."""

    elements: Any
    scales: Any
    vec: int

    @property
    def rows(self) -> int:
        """N."""
        rows: int = self.elements[0].shape[0]
        return rows

    def matrix(self, expert: Any) -> Array:
        """Return the values of one expert's matrix, (N, K) float32."""
        if self.scales is None:
            return formats.decode(self.elements[expert])
        return formats.dequantize(self.elements[expert], self.scales[expert], vec=self.vec)


def weights(
    a: Array,
    offsets: Array,
    b: Array,
    sfb: Array,
    b_ptrs: Array,
    sfb_ptrs: Array,
    sfa: Array,
    *,
    n: int | None,
    b_dtype: str | None,
    b_major: str,
    vec: int,
) -> Experts:
    """Return the weights of a call, from ``b`` and ``sfb`` or else from the two tables of addresses.

    Behind the latter are matrices (``n``, K) of ``b_dtype`` (that of ``a`` if left out), K from ``a``, whose scales
    have the dtype of ``sfa``.
    """
    if b is not None:
        return dense(b, sfb, b_major, vec)
    if n is None:
        raise ValueError("weights behind addresses need their number of rows: pass n.")
    shape = (n, a.shape[1])
    return discrete(
        b_ptrs, sfb_ptrs, offsets.shape[0], shape, b_dtype or backend.dtype_name(a), sfa, major=b_major, vec=vec
    )


def dense(b: Array, scales: Array, major: str, vec: int) -> Experts:
    """Return the weights of one buffer: legacy (N, K, E), or canonical (E, N, K), with ``major="n"`` (E, K, N).

    Canonical is what has the elements of its last dimension side by side. An extent of 1 there is legacy, of one
    expert: its stride says nothing.
    """
    elements = forms.stored(b)
    xp = array_namespace(elements)
    if elements.shape[2] != 1 and backend.strides_of(elements)[2] == 1:
        elements = elements if major == "k" else xp.permute_dims(elements, (0, 2, 1))
    elif backend.framework_of(b) != "jax":  # whose arrays, always row-major, are canonical
        elements = xp.permute_dims(elements, (2, 0, 1))
    if scales is None:
        return Experts(elements, None, vec)
    count, rows, _ = elements.shape
    return Experts(elements, forms.plain_scales(scales, rows, forms.depth(elements, vec), count), vec)


def discrete(
    pointers: Array,
    scale_pointers: Array,
    count: int,
    shape: tuple[int, int],
    dtype: str,
    like_scales: Array,
    *,
    major: str,
    vec: int,
) -> Experts:
    """Return the weights behind ``count`` addresses, each a matrix of ``shape``, its second extent in stored items.

    Raises
    ------
    NotImplementedError
        JAX arrays on a GPU.
    """
    rows, columns = shape
    stored = "uint8" if dtype.startswith("float4") else dtype
    elements = [
        _typed(memory, (rows, columns) if major == "k" else (columns, rows), stored)
        for memory in _memory(pointers, count, rows * columns * ITEM.get(stored, 1))
    ]
    if major == "n":
        elements = [array_namespace(x).permute_dims(x, (1, 0)) for x in elements]
    if scale_pointers is None:
        return Experts(_joined(elements), None, vec)
    blocks = forms.depth(elements[0], vec)
    size = int(np.prod(formats.scale_shape(rows, blocks)))
    name = backend.dtype_name(like_scales)
    scales = [
        forms.plain_scales(_typed(memory, (size,), name), rows, blocks)[0]
        for memory in _memory(scale_pointers, count, size)
    ]
    return Experts(_joined(elements), _joined(scales), vec)


def store_through_pointers(pointers: Array, values: Array, dtype: str, accumulate: bool, offsets: Array) -> None:
    """Write E matrices (``values``, (E, M, N) of a dtype) to addresses, or add them to what is there.

    An expert without tokens overwrites with 0 and adds nothing. Each addend has been rounded already.

    Raises
    ------
    NotImplementedError
        JAX arrays, whose memory is not written to.
    """
    if backend.framework_of(values) == "jax":
        raise NotImplementedError("the reference does not write through addresses in JAX: use the dense output.")
    count, rows, columns = values.shape
    ends = offsets.tolist()
    memories = _memory(pointers, count, rows * columns * ITEM[dtype])
    for expert, memory in enumerate(memories):
        target = _typed(memory, (rows, columns), dtype)
        if not accumulate:
            target[...] = values[expert]
        elif ends[expert] > ([0, *ends])[expert]:
            target[...] = formats.cast(formats.decode(target) + formats.decode(values[expert]), dtype)


def _joined(matrices: list[Array]) -> Any:
    """Return a list as it is, or for JAX, whose loops index by traced numbers, as one array."""
    if backend.framework_of(matrices[0]) != "jax":
        return matrices
    return array_namespace(matrices[0]).stack(matrices)


def _typed(memory: Array, shape: tuple[int, ...], dtype: str) -> Array:
    """Return bytes as an array of a dtype; in numpy and torch the same memory."""
    xp = array_namespace(memory)
    if dtype not in ITEM:
        return xp.reshape(formats.typed_view(memory, dtype) if dtype != "uint8" else memory, shape)
    framework = backend.framework_of(memory)
    if framework == "jax":
        parts = xp.reshape(memory, (*shape, ITEM[dtype]))
        return sys.modules["jax"].lax.bitcast_convert_type(parts, dtype)
    kind = getattr(sys.modules["torch"], dtype) if framework == "torch" else np.dtype(dtype)
    return xp.reshape(memory.view(kind), shape)


def _memory(pointers: Array, count: int, size: int) -> list[Array]:
    """Return ``size`` bytes behind each address, as ``uint8`` arrays of the framework of the table."""
    framework = backend.framework_of(pointers)
    if framework == "jax":
        return _read_by_callback(pointers, count, size)
    if framework == "numpy":
        return [_on_host(address, size) for address in _addresses(pointers)]
    torch = sys.modules["torch"]
    if pointers.device.type == "cpu":
        return [torch.from_numpy(_on_host(address, size)) for address in _addresses(pointers.numpy())]
    found = _addresses(pointers.cpu().numpy())
    return [torch.as_tensor(_OnGpu(address, size), device=pointers.device) for address in found]


def _addresses(table: Any) -> list[int]:
    """Return the entries of a table: (E,) int64, or their bytes, little-endian."""
    table = np.ascontiguousarray(table)
    return [int(address) for address in (table.view("<i8") if table.dtype == np.uint8 else table)]


def _on_host(address: int, size: int) -> Any:
    if size == 0:
        return np.zeros(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


@dataclass(frozen=True)
class _OnGpu:
    """Bytes in the memory of a GPU, as torch understands them."""

    address: int
    size: int

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 3}


def _read_by_callback(pointers: Array, count: int, size: int) -> list[Array]:
    jax = sys.modules["jax"]
    traced = isinstance(pointers, jax.core.Tracer)
    platforms = {jax.default_backend()} if traced else {found.platform for found in pointers.devices()}
    if platforms != {"cpu"}:
        raise NotImplementedError("the reference reads weights behind addresses in JAX on the CPU alone.")

    def read(table: Any) -> Any:
        return np.stack([_on_host(address, size) for address in _addresses(table)])

    memory = jax.pure_callback(read, jax.ShapeDtypeStruct((count, size), np.uint8), pointers)
    return [memory[expert] for expert in range(count)]
