"""From an array of any framework to its metadata."""

from __future__ import annotations

import sys
from typing import Any, cast

from fe_runtime.arrays.recognition import detect_framework
from fe_runtime.device import Device, as_device
from fe_runtime.dtypes import canonical_dtype
from fe_runtime.errors import InvalidArgumentError, explain
from fe_runtime.strides import contiguous_stride, unpack_fp4
from fe_runtime.tensor_desc import TensorDesc, make_desc

__all__ = ["describe", "get_device", "get_shape", "get_strides", "get_version"]

_UNKNOWN = Device("unknown")
_DLPACK_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 13: "cuda"}  # the two host kinds, device and managed memory


def describe(
    x: object, name: str = "", interpret_uint8_as_fp4x2: bool = False, packed: int | None = None
) -> TensorDesc:
    """Return the metadata of an array; a descriptor passes through.

    Parameters
    ----------
    x
        A torch tensor, jax array or tracer, numpy array, any producer of ``__dlpack__``, or a ``TensorDesc``.
    name
        The argument's name, kept in the descriptor and used in errors.
    interpret_uint8_as_fp4x2
        Read ``uint8`` as pairs of FP4 codes. torch's ``float4_e2m1fn_x2`` is always read so.
    packed
        The dimension along which the pairs of a packed FP4 array lie; by default the one of stride 1.

    Returns
    -------
    TensorDesc
        Packed FP4 arrays have dtype ``float4_e2m1fn`` and logical shape and stride. A tracer has device ``unknown``.

    Raises
    ------
    TypeError
        ``x`` is no array.
    InvalidArgumentError
        Unknown dtype, strides that are no multiple of the element size, a sparse tensor, or packed FP4 without a
        unit-stride dimension.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: runtime conventions, recognising and describing arrays.
    """
    if isinstance(x, TensorDesc):
        return _pass_through(x, name, interpret_uint8_as_fp4x2, packed)
    framework = detect_framework(x)
    array = cast("Any", x)
    if framework == "torch":
        shape, stride, device = tuple(array.shape), _torch_stride(array, name), as_device(array.device)
    else:
        shape, stride, device = get_shape(x, name), get_strides(x, name), get_device(x, name)
    try:
        dtype = canonical_dtype(array.dtype)
    except (AttributeError, InvalidArgumentError) as error:
        given, fix = getattr(x, "dtype", "no dtype"), ""
        if not getattr(given, "isnative", True):  # a numpy array in the other byte order
            given, fix = (
                f"{given} (bytes swapped)",
                f'Pass {name or "x"}.astype({name or "x"}.dtype.newbyteorder("=")).',
            )
        raise InvalidArgumentError(explain("describe", name or "array", "have a known dtype", given, fix)) from error
    reinterpreted = interpret_uint8_as_fp4x2 and dtype == "uint8"
    if reinterpreted or dtype == "float4_e2m1fn_x2":
        if packed is None or packed < len(shape):  # otherwise the rank is wrong, and its caller says so
            shape, stride = unpack_fp4(shape, stride, name or "array", packed)
        dtype = "float4_e2m1fn"
    return make_desc(dtype, shape, stride, device, interpret=reinterpreted, name=name)


def get_shape(x: object, name: str = "array") -> tuple[int, ...]:
    """Return the extents of an array (bytes of packed FP4, not logical elements)."""
    shape = getattr(x, "shape", None)
    is_array = detect_framework(x) != "unknown" or hasattr(x, "__dlpack__") or isinstance(x, TensorDesc)
    if not is_array or shape is None:
        rule = "be an array (torch, jax, numpy, or a producer of __dlpack__)"
        raise TypeError(explain("describe", name or "array", rule, type(x).__name__))
    return tuple(shape)


def get_strides(x: object, name: str = "array") -> tuple[int, ...]:
    """Return the strides of an array in elements."""
    framework = detect_framework(x)
    array = cast("Any", x)
    if framework == "torch":
        return _torch_stride(array, name)
    if framework == "jax":
        return contiguous_stride(array.shape)
    if framework == "numpy":
        return _from_bytes(array.strides, array.itemsize, name)
    return _foreign_strides(array, name)


def get_device(x: object, name: str = "array") -> Device:
    """Return where an array lives; ``Device("unknown")`` for tracers and arrays that do not tell."""
    framework = detect_framework(x)
    array = cast("Any", x)
    if framework == "numpy":
        return Device("cpu")
    if framework == "jax":
        return _jax_device(array, name)
    try:
        return as_device(array.device)
    except (AttributeError, TypeError):
        pass
    try:
        kind, index = array.__dlpack_device__()
        kind = _DLPACK_DEVICES[int(kind)]
    except (AttributeError, KeyError, TypeError, ValueError):
        return _UNKNOWN
    return Device(kind, int(index) if kind == "cuda" else None)


def get_version(x: object) -> int:
    """Return torch's in-place version counter of a tensor, 0 for every other array."""
    return int(cast("Any", x)._version) if detect_framework(x) == "torch" else 0


def _pass_through(desc: TensorDesc, name: str, interpret: bool, packed: int | None) -> TensorDesc:
    # A descriptor of the stored bytes means the same as the array of these bytes.
    reinterpreted = interpret and desc.dtype == "uint8"
    name = desc.name or name
    if reinterpreted or desc.dtype == "float4_e2m1fn_x2":
        shape, stride = desc.shape, desc.stride
        if packed is None or packed < len(shape):
            shape, stride = unpack_fp4(shape, stride, name or "array", packed)
        return make_desc("float4_e2m1fn", shape, stride, desc.device, interpret=reinterpreted, name=name)
    return desc if name == desc.name else desc.renamed(name)


def _torch_stride(tensor: Any, name: str) -> tuple[int, ...]:
    if tensor.layout is not cast("Any", sys.modules["torch"]).strided:
        fix = "Call .to_dense() first."
        raise InvalidArgumentError(explain("describe", name or "array", "be a strided tensor", tensor.layout, fix))
    return tuple(tensor.stride())


def _jax_device(array: Any, name: str) -> Device:
    try:
        devices = array.devices()
    except Exception:  # a tracer or an abstract value: jax has an error class of its own for each
        return _UNKNOWN
    if len(devices) != 1:
        fix = "Call the operation on local shards, inside shard_map."
        given = f"{len(devices)} devices"
        raise InvalidArgumentError(explain("describe", name or "array", "live on one device", given, fix))
    return as_device(next(iter(devices)))


def _foreign_strides(array: Any, name: str) -> tuple[int, ...]:
    interface = getattr(array, "__cuda_array_interface__", None)
    if isinstance(interface, dict) and "typestr" in interface:  # these producers count strides in bytes
        steps = interface.get("strides")
        itemsize = int(str(interface["typestr"])[2:])
        return contiguous_stride(array.shape) if steps is None else _from_bytes(steps, itemsize, name)
    found = getattr(array, "stride", None)
    found = found() if callable(found) else getattr(array, "strides", None)
    return contiguous_stride(array.shape) if found is None else tuple(found)


def _from_bytes(steps: tuple[int, ...], itemsize: int, name: str) -> tuple[int, ...]:
    for step in steps:
        if step % itemsize:
            rule = f"have strides that are multiples of its element size, {itemsize} bytes"
            raise InvalidArgumentError(explain("describe", name or "array", rule, f"{steps} bytes", "Copy it first."))
    return tuple(step // itemsize for step in steps)
