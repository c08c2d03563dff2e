"""Names of the element types, and their translation between the frameworks.

Every operation speaks of dtypes by canonical name: ``float16 bfloat16 float32 float64 uint8 int8 int32 int64 bool
float8_e4m3fn float8_e5m2 float8_e8m0fnu float4_e2m1fn``, and ``float4_e2m1fn_x2`` for an array whose bytes hold two
FP4 codes each.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

from fe_runtime.errors import InvalidArgumentError, explain

__all__ = ["DTYPES", "Framework", "bits", "canonical_dtype", "framework_dtype"]

Framework = Literal["torch", "jax", "numpy", "unknown"]

_BITS = {
    "float16": 16,
    "bfloat16": 16,
    "float32": 32,
    "float64": 64,
    "uint8": 8,
    "int8": 8,
    "int32": 32,
    "int64": 64,
    "bool": 8,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "float8_e8m0fnu": 8,
    "float4_e2m1fn": 4,
    "float4_e2m1fn_x2": 8,
}

DTYPES: tuple[str, ...] = tuple(_BITS)
"""Every canonical name."""

# Canonical name of each dtype object met so far. Dtype objects are few and immortal, so the table stays small.
_known: dict[object, str] = {**{name: name for name in DTYPES}, bool: "bool"}
_framework_dtypes: dict[tuple[str, str], Any] = {}


def canonical_dtype(dtype: object) -> str:
    """Return the canonical name of a dtype of any framework.

    Parameters
    ----------
    dtype
        A torch, numpy, ml_dtypes, jax or DSL dtype, a numpy or jax scalar type, or a canonical name.

    Raises
    ------
    InvalidArgumentError
        ``None``, an unknown dtype, or one that leaves the width open (Python's ``int`` and ``float``).

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: runtime conventions, dtypes and descriptors.
    """
    try:
        return _known[dtype]
    except (KeyError, TypeError):  # TypeError: not hashable, so not a dtype
        pass
    name = _name_of(dtype)
    if name not in _BITS:
        given = "None" if dtype is None else repr(dtype)
        fix = f"Use one of {', '.join(DTYPES)}."
        raise InvalidArgumentError(explain("canonical_dtype", "dtype", "be a known dtype", given, fix))
    _known[dtype] = name
    return name


def framework_dtype(name: str, framework: str) -> Any:
    """Return the dtype object in which ``framework`` stores elements of the canonical dtype ``name``.

    Parameters
    ----------
    name
        Canonical name.
    framework
        ``"torch"``, ``"jax"`` or ``"numpy"``. torch is imported if need be: the caller asks for it by name.

    Returns
    -------
    torch.dtype or numpy.dtype
        A ``torch.dtype``, or a ``numpy.dtype`` (which is what jax arrays carry too).

    Raises
    ------
    InvalidArgumentError
        Unknown name or framework, a dtype the installed torch lacks, or FP4 for jax.

    Notes
    -----
    torch has FP4 only in packed pairs, so both FP4 names give ``torch.float4_e2m1fn_x2`` there. numpy holds packed
    pairs as ``uint8`` bytes and single codes as ml_dtypes' one-byte ``float4_e2m1fn``.
    """
    key = (name, framework)
    if key not in _framework_dtypes:
        _framework_dtypes[key] = _find_framework_dtype(canonical_dtype(name), framework)
    return _framework_dtypes[key]


def bits(name: str) -> int:
    """Return the width of one element in bits (4 for FP4 codes, 8 for a packed pair).

    Raises
    ------
    InvalidArgumentError
        ``name`` is not a canonical dtype.
    """
    return _BITS[canonical_dtype(name)]


# DSL and tvm-ffi names are ours without underscores (and capitals in the DSL).
_DSL_NAMES = {name.replace("_", ""): name for name in DTYPES} | {"boolean": "bool"}


def _name_of(dtype: object) -> str | None:
    """Return the name of ``dtype`` in its own framework, reduced to our spelling; None if it is no dtype."""
    owner = dtype if isinstance(dtype, type) else type(dtype)
    root = owner.__module__.partition(".")[0]
    if root == "cutlass" and isinstance(dtype, type):
        return _DSL_NAMES.get(owner.__name__.lower())
    if root == "tvm_ffi":
        return _DSL_NAMES.get(str(dtype).replace("_", ""))
    if dtype is None or dtype is int or dtype is float or isinstance(dtype, str):
        return None
    torch_dtype = getattr(sys.modules.get("torch"), "dtype", None)
    if isinstance(torch_dtype, type) and isinstance(dtype, torch_dtype):
        return str(dtype).removeprefix("torch.")
    return _numpy_name(dtype)


def _numpy_name(dtype: object) -> str | None:
    # numpy dtypes, and the scalar types of numpy, ml_dtypes and jax, which all convert to one.
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(dtype, (numpy.dtype, type)):
        return None
    try:
        found = numpy.dtype(dtype)
    except (TypeError, ValueError):
        return None
    return str(found.name) if found.isnative else None


def _find_framework_dtype(name: str, framework: str) -> Any:
    if framework == "torch":
        torch_name = "float4_e2m1fn_x2" if name == "float4_e2m1fn" else name
        import torch

        found = getattr(torch, torch_name, None)
        if found is None:
            fix = f"Install a torch that has torch.{torch_name}."
            raise InvalidArgumentError(explain("framework_dtype", "name", "exist in torch", repr(name), fix))
        return found
    if framework not in ("jax", "numpy"):
        rule = "be 'torch', 'jax' or 'numpy'"
        raise InvalidArgumentError(explain("framework_dtype", "framework", rule, repr(framework)))
    if framework == "jax" and name.startswith("float4"):
        fix = "Use 'uint8': packed FP4 bytes travel as uint8 in jax."
        raise InvalidArgumentError(explain("framework_dtype", "name", "not be FP4 for jax", repr(name), fix))
    import ml_dtypes
    import numpy as np

    if name == "float4_e2m1fn_x2":
        return np.dtype("uint8")
    return np.dtype(getattr(ml_dtypes, name, name))
