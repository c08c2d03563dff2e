"""From a checked call to what a kernel has to compute: dtypes, majors, pitches, formats, results. Metadata only."""

from __future__ import annotations

from dataclasses import dataclass

from fe_runtime.contract import Bound, OutputSpec
from fe_runtime.dtypes import bits
from fe_runtime.formats import block_format
from fe_runtime.strides import has_order
from fe_runtime.tensor_desc import TensorDesc

__all__ = ["Matrix", "Product", "Scales", "describe"]

OUTERMOST_FIRST = {True: (2, 0, 1), False: (2, 1, 0)}
"""Dimensions of an (X, Y, L) matrix in memory, by whether Y is contiguous."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix, or batch of them, as it lies in memory.

    Parameters
    ----------
    dtype
        Canonical name; packed FP4 is ``float4_e2m1fn``.
    major
        The contiguous dimension: ``"m"``, ``"n"`` or ``"k"``.
    pitch, batch_pitch
        Bytes from one row (column) to the next, and from one matrix of the batch to the next; 0 where there is only
        one. They are dynamic: no kernel is compiled for them. For results of our own allocation these are those of a
        compact matrix.
    """

    dtype: str
    major: str
    pitch: int
    batch_pitch: int


@dataclass(frozen=True, slots=True)
class Scales:
    """The format of block-scaled operands: canonical dtype of the scales, elements of a block along K."""

    dtype: str
    vec: int
    name: str


@dataclass(frozen=True, slots=True)
class Product:
    """What a call computes.

    Static for a kernel are ``epilogue``, ``scales``, ``accumulator``, dtypes and majors, and which matrices and vectors
    there are; extents and pitches are dynamic.

    Parameters
    ----------
    epilogue
        Name of the operation.
    a, b
        The operands.
    scales
        Their common format; ``None`` without scales.
    extents
        M, N, K, L.
    matrices
        Input and result matrices beside A and B by their names in the contract.
    vectors
        Dtypes of the other results that the call has (maxima, sums, scales), by name.
    accumulator
        dtype of the sum.
    """

    epilogue: str
    a: Matrix
    b: Matrix
    scales: Scales | None
    extents: tuple[int, int, int, int]
    matrices: dict[str, Matrix]
    vectors: dict[str, str]
    accumulator: str = "float32"


def describe(bound: Bound, names: tuple[str, ...]) -> Product:
    """Describe a checked call of a dense product.

    Parameters
    ----------
    bound
        The call.
    names
        The contract's outputs, in order.
    """
    matrices, vectors = {}, {}
    for name, spec in zip(names, bound.outputs, strict=True):
        if spec is not None and spec.order:
            matrices[name] = _result(spec)
        elif spec is not None:
            vectors[name] = spec.dtype
    if "c_tensor" in bound.arrays:  # an input with the rows of D, contiguous as D is: its strides need not tell
        major = matrices["d_tensor"].major
        matrices["c_tensor"] = _matrix(bound.arrays["c_tensor"], ("m", "n"), inner=int(major == "n"))
    m, n, k, batches = map(bound.dim, "MNKL")
    return Product(
        epilogue=bound.operation,
        a=_matrix(bound.arrays["a_tensor"], ("m", "k")),
        b=_matrix(bound.arrays["b_tensor"], ("n", "k")),
        scales=_scales(bound),
        extents=(m, n, k, batches),
        matrices=matrices,
        vectors=vectors,
        accumulator=str(bound.options.get("acc_dtype", "float32")),
    )


def _scales(bound: Bound) -> Scales | None:
    dtype, vec = bound.dtype("sfa_tensor"), bound.options.get("sf_vec_size")
    if dtype is None or not isinstance(vec, int):
        return None
    row = block_format(bound.dtype("a_tensor"), dtype, vec, operation=bound.operation)
    return Scales(row.scale, row.vec, row.name)


def _matrix(desc: TensorDesc, letters: tuple[str, str], inner: int | None = None) -> Matrix:
    """Describe (X, Y, L); ``letters`` names X and Y, ``inner`` is the contiguous one if strides need not tell."""
    if inner is None:
        inner = 1 if has_order(desc.shape, desc.stride, OUTERMOST_FIRST[True]) else 0
    width = bits(desc.dtype)
    pitch, batch = (0 if desc.shape[dim] <= 1 else desc.stride[dim] * width // 8 for dim in (1 - inner, 2))
    return Matrix(desc.dtype, letters[inner], pitch, batch)


def _result(spec: OutputSpec) -> Matrix:
    return _matrix(TensorDesc.of(spec.dtype, spec.shape, spec.stride), ("m", "n"), inner=spec.order[-1])
