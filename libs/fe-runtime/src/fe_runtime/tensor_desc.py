"""TensorDesc: what an operation needs to know of an array, without the array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import cast

from fe_runtime.device import Device, as_device
from fe_runtime.dtypes import canonical_dtype
from fe_runtime.errors import InvalidArgumentError, explain
from fe_runtime.strides import (
    canonicalize_unit_dim_strides,
    contiguous_stride,
    is_contiguous,
    resolve_view_shape,
    stride_order_of,
    view_stride,
)

__all__ = ["TensorDesc", "make_desc"]


@dataclass(frozen=True, slots=True)
class TensorDesc:
    """Dtype, shape, layout and device of an array; holds no storage.

    Parameters
    ----------
    dtype
        Any dtype that :func:`fe_runtime.dtypes.canonical_dtype` knows; kept by canonical name.
    shape, stride
        Extents and strides in elements (logical elements for packed FP4).
    stride_order
        Dimensions from the innermost outwards: sorted by (stride, extent).
    device
        A device of any framework or its name.
    interpret_uint8_as_fp4x2
        Whether the array is ``uint8`` bytes that were reinterpreted as FP4 pairs; shape and stride are then logical.
    name
        The argument's name for error texts; takes no part in comparison.

    Raises
    ------
    InvalidArgumentError
        Ranks differ, ``stride_order`` is no permutation, or an unknown dtype.
    TypeError
        ``device`` names no device.

    Notes
    -----
    The methods that have a torch counterpart behave as torch does, errors included.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: runtime conventions, dtypes and descriptors.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    stride_order: tuple[int, ...]
    device: Device
    interpret_uint8_as_fp4x2: bool = False
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        shape, stride, order = tuple(self.shape), tuple(self.stride), tuple(self.stride_order)
        rank = len(shape)
        if len(stride) != rank:
            raise InvalidArgumentError(
                _text(self.name, "stride", f"have one entry for each of {rank} dimensions", stride)
            )
        if sorted(order) != list(range(rank)):
            raise InvalidArgumentError(_text(self.name, "stride_order", f"be a permutation of 0..{rank - 1}", order))
        checked = (canonical_dtype(self.dtype), shape, stride, order, as_device(self.device))
        for slot, value in zip(("dtype", "shape", "stride", "stride_order", "device"), checked, strict=True):
            object.__setattr__(self, slot, value)

    @classmethod
    def of(
        cls,
        dtype: object,
        shape: Sequence[int],
        stride: Sequence[int] | None = None,
        device: object = "cpu",
        name: str = "",
    ) -> TensorDesc:
        """Describe an array by dtype and shape; C-contiguous unless ``stride`` (in elements) is given."""
        shape = tuple(shape)
        stride = contiguous_stride(shape) if stride is None else tuple(stride)
        order = stride_order_of(shape, stride) if len(stride) == len(shape) else ()
        return cls(canonical_dtype(dtype), shape, stride, order, as_device(device), name=name)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def canonical_stride(self) -> tuple[int, ...]:
        """The stride with that of every extent-1 dimension replaced, as layouts are compared."""
        return canonicalize_unit_dim_strides(self.shape, self.stride)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __bool__(self) -> bool:  # a descriptor is never "absent", even of an empty array
        return True

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """Return the number of (logical) elements."""
        return prod(self.shape)

    def size(self, dim: int | None = None) -> tuple[int, ...] | int:
        """Return the shape, or the extent of one dimension."""
        return self.shape if dim is None else self.shape[_wrap(dim, self.ndim)]

    def is_contiguous(self) -> bool:
        """Return whether the elements lie in C order without gaps."""
        return is_contiguous(self.shape, self.stride)

    def contiguous(self) -> TensorDesc:
        """Return the descriptor of a C-contiguous copy, or this one if it is contiguous."""
        return self if self.is_contiguous() else self._with(self.shape, contiguous_stride(self.shape))

    def permute(self, *dims: int | Sequence[int]) -> TensorDesc:
        """Return the view with the dimensions in the given order."""
        wanted = _flat(dims)
        if len(wanted) != self.ndim:
            raise RuntimeError(f"permute: {len(wanted)} dimensions given for a tensor of {self.ndim}")
        order = _wrap_all("permute", wanted, self.ndim)
        return self._with(tuple(self.shape[d] for d in order), tuple(self.stride[d] for d in order))

    def transpose(self, dim0: int, dim1: int) -> TensorDesc:
        """Return the view with two dimensions exchanged."""
        first, second = _wrap(dim0, self.ndim), _wrap(dim1, self.ndim)
        order = list(range(self.ndim))
        if order:
            order[first], order[second] = order[second], order[first]
        return self.permute(order)

    def squeeze(self, dim: int | Sequence[int] | None = None) -> TensorDesc:
        """Return the view without extent-1 dimensions: all, or those named that have extent 1."""
        if dim is None:
            named = set(range(self.ndim))
        else:
            named = set(_wrap_all("squeeze", dim if isinstance(dim, Sequence) else (dim,), self.ndim))
        kept = [d for d in range(self.ndim) if d not in named or self.shape[d] != 1]
        return self._with(tuple(self.shape[d] for d in kept), tuple(self.stride[d] for d in kept))

    def unsqueeze(self, dim: int) -> TensorDesc:
        """Return the view with a new extent-1 dimension at ``dim``."""
        at = _wrap(dim, self.ndim + 1)
        stride = self.shape[at] * self.stride[at] if at < self.ndim else 1
        shape = (*self.shape[:at], 1, *self.shape[at:])
        return self._with(shape, (*self.stride[:at], stride, *self.stride[at:]))

    def view(self, *shape: int | Sequence[int]) -> TensorDesc:
        """Return the view with another shape (one entry may be -1); ``RuntimeError`` if it would need a copy."""
        wanted = resolve_view_shape(_flat(shape), self.numel())
        stride = view_stride(self.shape, self.stride, wanted)
        if stride is None:
            raise RuntimeError(f"view: shape {self.shape} with stride {self.stride} has no view of shape {wanted}")
        return self._with(wanted, stride)

    def as_strided(self, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> TensorDesc:
        """Return a descriptor with this shape and stride (a descriptor has no storage: the offset is not kept)."""
        size, stride = tuple(size), tuple(stride)
        if len(size) != len(stride):
            raise RuntimeError(f"as_strided: size {size} and stride {stride} differ in length")
        if min(size + stride, default=0) < 0 or (storage_offset is not None and storage_offset < 0):
            raise RuntimeError(f"as_strided: negative entry in size {size}, stride {stride} or the offset")
        return self._with(size, stride)

    def renamed(self, name: str) -> TensorDesc:
        """Return this descriptor under another name."""
        return replace(self, name=name)

    def _with(self, shape: tuple[int, ...], stride: tuple[int, ...]) -> TensorDesc:
        return make_desc(
            self.dtype, shape, stride, self.device, interpret=self.interpret_uint8_as_fp4x2, name=self.name
        )


def make_desc(
    dtype: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    device: Device,
    *,
    interpret: bool = False,
    name: str = "",
) -> TensorDesc:
    """Build a descriptor from values that are known to be right, skipping the checks (describe's fast path)."""
    desc = object.__new__(TensorDesc)
    put = object.__setattr__
    put(desc, "dtype", dtype)
    put(desc, "shape", shape)
    put(desc, "stride", stride)
    put(desc, "stride_order", stride_order_of(shape, stride))
    put(desc, "device", device)
    put(desc, "interpret_uint8_as_fp4x2", interpret)
    put(desc, "name", name)
    return desc


def _text(name: str, argument: str, rule: str, given: object) -> str:
    return explain(f"TensorDesc {name}".rstrip(), argument, rule, given)


def _flat(values: tuple[int | Sequence[int], ...]) -> tuple[int, ...]:
    """Accept both ``f(1, 2)`` and ``f((1, 2))``."""
    if len(values) == 1 and isinstance(values[0], Sequence):
        return tuple(values[0])
    return cast("tuple[int, ...]", values)


def _wrap(dim: int, rank: int) -> int:
    """Return ``dim`` counted from the front; a scalar has, as in torch, the dimensions -1 and 0."""
    bound = max(rank, 1)
    if not -bound <= dim < bound:
        raise IndexError(f"dimension {dim} is out of range: expected {-bound} to {bound - 1}")
    return dim % bound


def _wrap_all(method: str, dims: Sequence[int], rank: int) -> list[int]:
    wrapped: list[int] = []
    for dim in dims:
        wrapped.append(_wrap(dim, rank))
        if wrapped.count(wrapped[-1]) > 1:
            raise RuntimeError(f"{method}: dimension {dim} is repeated in {tuple(dims)}")
    return wrapped
