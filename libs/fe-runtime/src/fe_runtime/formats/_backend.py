"""What the array API lacks: bit views, narrow dtypes, strides, and fp32 arithmetic that no compiler rewrites.

This is the only file of the package that treats the frameworks differently. It imports none of them: an array of a
framework can only exist once its user has imported the framework.
"""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

import array_api_compat
import numpy as np

from fe_runtime.dtypes import Framework, bits, canonical_dtype, framework_dtype
from fe_runtime.errors import DtypeError, InvalidArgumentError, explain

__all__ = [
    "Array",
    "as_bytes",
    "as_float32",
    "as_type",
    "axis_of",
    "bits_of",
    "contiguous",
    "convert",
    "divide",
    "dtype_name",
    "float_of_bits",
    "framework_of",
    "multiply",
    "namespace",
    "pad",
    "scalar",
    "strides_of",
]

Array: TypeAlias = Any
"""A numpy array, torch tensor, or JAX array or tracer."""


def framework_of(x: object) -> Framework:
    """Return the framework of an array; ``TypeError`` for anything that is no array."""
    if array_api_compat.is_numpy_array(x):
        return "numpy"
    if array_api_compat.is_torch_array(x):
        return "torch"
    if array_api_compat.is_jax_array(x):
        return "jax"
    raise DtypeError(explain("formats", "array", "be a numpy, torch or JAX array", type(x).__name__))


def namespace(x: Array) -> Any:
    """Return the array-API namespace of ``x``."""
    framework_of(x)
    return array_api_compat.array_namespace(x)


def dtype_name(x: Array) -> str:
    """Return the canonical name of the dtype of ``x``."""
    return canonical_dtype(x.dtype)


def axis_of(operation: str, x: Array, axis: int) -> int:
    """Return ``axis`` counted from the front; :class:`InvalidArgumentError` if ``x`` has no such dimension."""
    framework_of(x)
    dimensions: int = x.ndim
    if not -dimensions <= axis < dimensions:
        raise InvalidArgumentError(explain(operation, "axis", f"name one of the {dimensions} dimensions", axis))
    return axis % dimensions


def strides_of(x: Any) -> tuple[int, ...]:
    """Return the strides in elements of an array or descriptor. JAX arrays are always C-contiguous."""
    if array_api_compat.is_numpy_array(x):
        return tuple(stride // x.itemsize for stride in x.strides)
    stride = getattr(x, "stride", None)
    if stride is not None:
        return tuple(stride() if callable(stride) else stride)
    strides, step = [], 1
    for extent in reversed(x.shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def contiguous(x: Array) -> Array:
    """Return ``x`` in C order, copied if need be."""
    framework = framework_of(x)
    if framework == "torch":
        return x.contiguous()
    return np.ascontiguousarray(x) if framework == "numpy" else x


def pad(x: Array, axis: int, extent: int) -> Array:
    """Return ``x`` with zeros appended along ``axis`` (>= 0) up to ``extent``; ``x`` itself if it is as long."""
    missing = extent - x.shape[axis]
    if missing == 0:
        return x
    if framework_of(x) == "torch":
        return sys.modules["torch"].nn.functional.pad(x, (0, 0) * (x.ndim - 1 - axis) + (0, missing))
    return namespace(x).pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])


def as_bytes(x: Array) -> Array:
    """Return the bytes of an array of one-byte items as ``uint8``, with the strides of ``x`` (a view where possible).

    Native ``float4_e2m1fn`` arrays give one code per byte.
    """
    name = dtype_name(x)
    if bits(name) > 8 or name == "bool":
        raise InvalidArgumentError(explain("formats", "array", "have one-byte items", f"dtype {name}"))
    if name == "uint8":
        return x
    framework = framework_of(x)
    if framework == "jax":
        jax = sys.modules["jax"]
        if name == "float4_e2m1fn":
            return jax.lax.bitcast_convert_type(x, "uint4").astype("uint8")
        return jax.lax.bitcast_convert_type(x, "uint8")
    return _detached(x, framework).view(framework_dtype("uint8", framework))


def as_type(x: Array, name: str) -> Array:
    """Return ``uint8`` bytes as the framework's one-byte dtype ``name`` (a view where possible).

    numpy and JAX have no dtype for FP4 pairs: there ``float4_e2m1fn_x2`` stays ``uint8``.
    """
    framework = framework_of(x)
    if name == "uint8" or (name == "float4_e2m1fn_x2" and framework != "torch"):
        return x
    dtype = framework_dtype(name, framework)
    if framework == "jax":
        return sys.modules["jax"].lax.bitcast_convert_type(x, dtype)
    return x.view(dtype)


def as_float32(x: Array) -> Array:
    """Return ``x`` as fp32: exact for every type up to 32 bits, rounded to nearest even from fp64."""
    return convert(x, "float32")


def convert(x: Array, name: str) -> Array:
    """Return ``x`` in the framework's dtype ``name``, by the framework's own conversion."""
    framework = framework_of(x)
    if dtype_name(x) == name:
        return _detached(x, framework)
    dtype = framework_dtype(name, framework)
    if framework == "torch":
        return x.detach().to(dtype)
    with np.errstate(all="ignore"):
        return x.astype(dtype)


def bits_of(x: Array) -> Array:
    """Return the bit patterns of fp32 ``x`` as ``int32``."""
    return _reinterpret(x, "int32")


def float_of_bits(pattern: Array) -> Array:
    """Return the fp32 numbers with the ``int32`` bit patterns ``pattern``."""
    return _reinterpret(pattern, "float32")


def multiply(a: Array, b: Array | float) -> Array:
    """Return fp32 ``a * b``, rounded once to nearest even, subnormals kept.

    A Python number stands for the fp32 number nearest to it. XLA flushes subnormals and regroups products, so JAX
    arrays go through integer arithmetic.
    """
    if framework_of(a) == "jax":
        from fe_runtime.formats import _xla_float

        return _xla_float.multiply(a, b)
    with np.errstate(all="ignore"):
        return a * (float(np.float32(b)) if isinstance(b, float) else b)


def divide(a: Array, b: Array | float) -> Array:
    """Return fp32 ``a / b``, rounded once to nearest even, subnormals kept.

    XLA turns divisions by constants and by broadcast operands into products with a reciprocal, and so does torch on a
    GPU for Python numbers. Both would flip codes at midpoints.
    """
    framework = framework_of(a)
    if framework == "jax":
        from fe_runtime.formats import _xla_float

        return _xla_float.divide(a, b)
    with np.errstate(all="ignore"):
        return a / (scalar(b, a) if isinstance(b, float) else b)


def scalar(value: Array | float, like: Array) -> Array:
    """Return a Python number, or an array of one element, as an fp32 array of shape ``()`` beside ``like``."""
    if not isinstance(value, (int, float)):
        return namespace(value).reshape(as_float32(value), ())
    framework = framework_of(like)
    if framework == "numpy":
        return np.float32(value)
    if framework == "torch":
        torch = sys.modules["torch"]
        return torch.full((), float(value), dtype=torch.float32, device=like.device)
    return sys.modules["jax"].numpy.float32(value)


def _reinterpret(x: Array, name: str) -> Array:
    framework = framework_of(x)
    dtype = framework_dtype(name, framework)
    return sys.modules["jax"].lax.bitcast_convert_type(x, dtype) if framework == "jax" else x.view(dtype)


def _detached(x: Array, framework: Framework) -> Array:
    # Bit views and roundings have no derivative.
    return x.detach() if framework == "torch" else x
