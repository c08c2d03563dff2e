"""The class form on JAX arrays: the kernel writes into the caller's buffers, outside JAX's functional model."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax

from fe_runtime.arrays import get_data_ptr
from fe_runtime.arrays.devices import synchronize
from fe_runtime.contract import Bound, Contract
from fe_runtime.dtypes import framework_dtype
from fe_runtime.errors import InvalidArgumentError, explain
from fe_runtime.launch import BYTES, is_empty
from fe_runtime.plan import Kernel

if TYPE_CHECKING:
    from fe_runtime.operation import Operation

__all__ = ["BufferView", "in_place_launch"]


def in_place_launch(
    operation: Operation, bound: Bound, kernel: Kernel | None, run: Callable[..., object], *, wait: bool
) -> Callable[..., None]:
    """Return ``launch(arrays, outputs)`` that runs the kernel on the arrays' own memory.

    Every operand is ready before the launch. With ``wait`` the device has done all its work before the launch and when
    it returns: the kernel writes behind JAX's back, so nothing of JAX may be under way beside it. Otherwise the caller,
    who gave a stream, orders what follows.

    Raises
    ------
    InvalidArgumentError
        There is no kernel, or nothing for it to read: the reference cannot write into JAX arrays, which are immutable.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: runtime conventions, the class form with JAX arrays.
    """
    if kernel is None:
        name = next(_written(operation.contract, bound))
        fix = f"Call {operation.jax_entry or 'the wrapper'}, which returns new arrays."
        given = f"a JAX array on {bound.device}, which only a kernel can write"
        raise InvalidArgumentError(explain(operation.name, name, "be writable", given, fix))
    if is_empty(bound):
        _reject_unwritten(operation, bound)
        return _nothing
    form, contract = kernel.form, operation.contract
    specs = [spec for spec in bound.outputs if spec is not None]
    shapes = [shape for shape in (*form.inputs, *form.outputs) if shape is not None]
    dtypes = [*(desc.dtype for desc in bound.arrays.values()), *(spec.dtype for spec in specs)]
    scalars = [bound.options[name] for name in form.scalars]
    index = bound.device.index or 0
    present = [number for number, name in enumerate(contract.input_names) if name in bound.arrays]
    again = [at for at, number in enumerate(present) if number in contract.mutated]
    first = len(present)
    held = [first + number for number, spec in enumerate(specs) if spec.accumulate]

    def launch(arrays: Sequence[Any], outputs: Sequence[Any]) -> None:
        operands = [operand for operand in (*arrays, *outputs) if operand is not None]
        jax.block_until_ready(operands)
        if wait:
            synchronize(bound.device)
        views = [BufferView(*known, index) for known in zip(operands, shapes, dtypes, strict=True)]
        scratch = [_workspace(operands[0], *known, index) for known in form.scratch]
        run(
            *views[:first],
            *[views[at] for at in held],
            *views[first:],
            *[views[at] for at in again],
            *scratch,
            *scalars,
        )
        if wait:
            synchronize(bound.device)

    return launch


def _reject_unwritten(operation: Operation, bound: Bound) -> None:
    """Raise if a call without elements has an output with elements: no kernel is there to write it."""
    for name, spec in zip(operation.contract.output_names, bound.outputs, strict=True):
        if spec is not None and 0 not in spec.shape and not spec.accumulate:
            fix = f"Call {operation.jax_entry or 'the wrapper'}, which returns new arrays."
            given = f"one of shape {spec.shape} beside inputs without elements"
            raise InvalidArgumentError(
                explain(operation.name, name, "have no elements if the inputs have none", given, fix)
            )


def _written(contract: Contract, bound: Bound) -> Iterator[str]:
    yield from (name for name, spec in zip(contract.output_names, bound.outputs, strict=True) if spec)
    yield from (contract.input_names[number] for number in contract.mutated)


def _workspace(like: Any, shape: tuple[int, ...], dtype: str, index: int) -> BufferView:
    device = next(iter(like.devices()))
    array = jax.block_until_ready(jax.numpy.zeros(shape, framework_dtype(dtype, "jax"), device=device))
    return BufferView(array, shape, dtype, index)


def _nothing(_arrays: Sequence[Any], _outputs: Sequence[Any]) -> None:
    """Stand for the launch of a call without elements."""


class BufferView:
    """The memory of a JAX array under another shape, and as bytes for fp8: a producer of DLPack.

    JAX itself reshapes and reinterprets into new buffers only.
    """

    def __init__(self, array: Any, shape: tuple[int, ...], dtype: str, index: int = 0) -> None:
        self._array = array
        self._shape = shape
        self._dtype = "uint8" if dtype in BYTES else dtype
        self._device = (_CUDA, index) if next(iter(array.devices())).platform in ("gpu", "cuda") else (_CPU, 0)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **_protocol: object) -> Any:
        code, width = _TYPE_CODES[self._dtype]
        managed, keep = _Managed(), (ctypes.c_int64 * len(self._shape))(*self._shape)
        managed.tensor.data = get_data_ptr(self._array)
        managed.tensor.device_type, managed.tensor.device_id = self._device
        managed.tensor.ndim = len(self._shape)
        managed.tensor.code, managed.tensor.bits, managed.tensor.lanes = code, width, 1
        managed.tensor.shape = ctypes.cast(keep, ctypes.c_void_p)
        managed.context = next(_numbers)
        managed.deleter = _release
        _alive[managed.context] = (managed, keep, self._array)
        return _new_capsule(ctypes.addressof(managed), b"dltensor", None)


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),  # null: row-major
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (("tensor", _Tensor), ("context", ctypes.c_size_t), ("deleter", _Deleter))

_CPU, _CUDA = 1, 2
_TYPE_CODES = {
    "int8": (0, 8),
    "int32": (0, 32),
    "int64": (0, 64),
    "uint8": (1, 8),
    "float16": (2, 16),
    "float32": (2, 32),
    "float64": (2, 64),
    "bfloat16": (4, 16),
    "bool": (6, 8),
}

_numbers = itertools.count(1)
_alive: dict[int, Any] = {}
"""What a consumer of a capsule still uses, until it calls the deleter."""


def _forget(managed: Any) -> None:
    _alive.pop(managed.contents.context, None)


_release = _Deleter(_forget)

_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
