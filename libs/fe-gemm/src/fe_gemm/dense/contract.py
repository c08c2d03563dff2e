"""What the dense products have in common: operands, scales, factors, options, results, and what is forbidden.

A contract of a block-scaled product is put together from these parts, in this order:

```
inputs   operand_a(BLOCK_DTYPES), operand_b(BLOCK_DTYPES), ..., scales_a(), scales_b(), PROB, NORM_CONST
options  ALPHA, major("c_major"), stored_dtype("c_dtype", ...), ACCUMULATOR, vector_size(16), with_amax(...)
outputs  Output("c_tensor", lambda bound: matrix(bound, dtype=..., major=...)),
         Output("amax_tensor", lambda bound: maximum(bound, (1, 1, 1))), Output("sfd_tensor", ...: scales(bound, ...))
rules    *EXTENTS, *jax_layout("c_major"), *BLOCK_FORMAT, ... own ones
derived  TILES           dynamic  ROWS
```

Letters: ``M``, ``N``, ``K``, ``L`` as everywhere; ``TM``, ``TN`` tiles of 128 rows of the scales of A and B, ``TA`` and
``TB`` their tiles of 4 scales along K.

How arrays appear to what uses a contract:

* packed FP4 operands have dtype ``float4_e2m1fn`` and the extents of the codes in a ``Bound``; the reference gets the
  caller's array (``float4_e2m1fn_x2`` or ``uint8``, half as long along K), a kernel the bytes;
* scales are e8m0 or e4m3 in a ``Bound``, whatever dtype the bytes came in; the reference gets the physical form in the
  caller's dtype, and may return results in either form;
* the reference gets ``norm_const_tensor`` as (1,), is called with every option of the contract by name, and returns
  outputs with any strides: the runtime gives them the contract's.

Hints (tile, cluster, stages) are no options: they are checked by :mod:`fe_gemm.dense.hints` and go no further, so no
value of one compiles or prepares anything. The class form finds dtypes and major of its results in its samples
(:func:`sample_dtype`, :func:`sample_major`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fe_runtime.arrays import get_shape, get_strides
from fe_runtime.contract import ANY_LAYOUT, Bound, Input, Option, OutputSpec, Rule, pitched
from fe_runtime.dtypes import canonical_dtype
from fe_runtime.strides import has_order

__all__ = [
    "ACCUMULATOR",
    "ALPHA",
    "BLOCK_DTYPES",
    "BLOCK_FORMAT",
    "EXTENTS",
    "FP4",
    "FP8",
    "NORM_CONST",
    "PACKED",
    "PROB",
    "ROWS",
    "TILES",
    "WIDE",
    "blocks",
    "input_matrix",
    "jax_layout",
    "major",
    "matrix",
    "maximum",
    "operand_a",
    "operand_b",
    "same_major",
    "sample_dtype",
    "sample_major",
    "scales",
    "scales_a",
    "scales_b",
    "stored_dtype",
    "text",
    "vector_size",
    "with_amax",
]

FP8 = ("float8_e4m3fn", "float8_e5m2")
FP4 = "float4_e2m1fn"
"""Packed FP4 among the inputs of a ``Bound``."""
PACKED = ("float4_e2m1fn_x2", "uint8")
"""Packed FP4 as the dtype of a result: torch's own, and the container that every framework has."""
BLOCK_DTYPES = (FP4, *FP8)
"""Elements of block-scaled operands."""
WIDE = ("float32", "float16", "bfloat16")

ALIGNMENT = 16
"""Bytes at which matrices start and their rows (columns) follow each other: what the copy engine demands."""
LOGICAL = (3, 4, 1, 5, 2, 0)
"""The order in which the dimensions of physical scales are those of the logical view."""
ORDERS = {"n": (2, 0, 1), "m": (2, 1, 0)}
"""Dimensions of an (M, N, L) array in memory, outermost first."""


def _matrix_layout(name: str, rule: str, *orders: tuple[int, ...]) -> Any:
    fix = "Pass a copy with the batch outermost; JAX arrays are laid out so for L = 1."
    return pitched(name, f"have {rule} of stride 1 and the batch outermost, without overlap", fix, *orders)


K_OR_M_MAJOR = _matrix_layout("k- or m-major", "K (or its rows)", ORDERS["n"], ORDERS["m"])
N_OR_M_MAJOR = _matrix_layout("n- or m-major", "N (or M)", ORDERS["n"], ORDERS["m"])
LAYOUTS = {
    "n": _matrix_layout("n-major", "its columns", ORDERS["n"]),
    "m": _matrix_layout("m-major", "its rows", ORDERS["m"]),
}


def operand_a(dtypes: tuple[str, ...]) -> Input:
    """Return A: (M, K, L), rows or columns contiguous with any aligned pitch; packed FP4 along K."""
    return input_matrix("a_tensor", "M K L", dtypes, doc="left matrix")


def operand_b(dtypes: tuple[str, ...]) -> Input:
    """Return B: (N, K, L), of the dtype of A."""
    return input_matrix("b_tensor", "N K L", dtypes, dtype_of="a_tensor", doc="right matrix, transposed")


def input_matrix(
    name: str,
    shape: str,
    dtypes: tuple[str, ...],
    dtype_of: str | None = None,
    optional: bool = False,
    doc: str = "",
) -> Input:
    """Return an input matrix of any major and aligned pitch."""
    layout = K_OR_M_MAJOR if "K" in shape else N_OR_M_MAJOR
    pairs = 1 if FP4 in dtypes else None
    return Input(
        name,
        shape,
        dtypes,
        layout,
        optional=optional,
        dtype_of=dtype_of,
        pairs=pairs,
        alignment=ALIGNMENT,
        doc=doc,
    )


def _scale_input(name: str, shape: str, optional: bool, dtype_of: str | None, doc: str) -> Input:
    return Input(
        name,
        shape,
        ("float8_e8m0fnu", "float8_e4m3fn"),
        optional=optional,
        dtype_of=dtype_of,
        view=LOGICAL,
        dtype_aliases={"uint8": "float8_e8m0fnu", "int8": "float8_e8m0fnu"},
        alignment=ALIGNMENT,
        doc=doc + ": physical form or logical view; bytes mean e8m0",
    )


def scales_a(optional: bool = False) -> Input:
    """Return the scales of A."""
    return _scale_input("sfa_tensor", "L TM TA 32 4 4", optional, None, "scales of A")


def scales_b(optional: bool = False) -> Input:
    """Return the scales of B, of the dtype of those of A."""
    return _scale_input("sfb_tensor", "L TN TB 32 4 4", optional, "sfa_tensor", "scales of B")


PROB = Input("prob_tensor", "M 1 L", ("float32",), ANY_LAYOUT, doc="factor of each row")
NORM_CONST = Input(
    "norm_const_tensor", "1", ("float32",), also=("1 1*",), optional=True, doc="global factor of an fp8 result's scales"
)

ALPHA = Option("alpha", float, 1.0, runtime=True, doc="factor of the product")
ACCUMULATOR = Option("acc_dtype", "dtype", "float32", choices=("float32",), doc="dtype of the sum over K")


def with_amax(by_default: Callable[[Bound], bool]) -> Option:
    """Return the option that asks for the largest magnitude; a wrapper leaves it to ``by_default``."""
    doc = "whether to find the largest magnitude; None: where the wrapper returns it"
    return Option("with_amax", bool, resolve=by_default, doc=doc)


def vector_size(default: int) -> Option:
    """Return ``sf_vec_size``: elements per scale."""
    return Option("sf_vec_size", int, default, choices=(16, 32), doc="elements per scale")


def major(name: str, doc: str = "the contiguous dimension of the results") -> Option:
    """Return the option that says which dimension of the results is contiguous."""
    return Option(name, str, "n", choices=("n", "m"), doc=doc)


def stored_dtype(name: str, default: str, dtypes: tuple[str, ...], doc: str = "") -> Option:
    """Return the option for the dtype of a result; with packed pairs among ``dtypes`` the code's name means them."""
    aliases: dict[object, object] = {FP4: "float4_e2m1fn_x2"} if "float4_e2m1fn_x2" in dtypes else {}
    return Option(name, "dtype", default, choices=dtypes, aliases=aliases, doc=doc)


def blocks(extent: int, length: int) -> int:
    """Return how many blocks of ``length`` cover ``extent``."""
    return -(-extent // length)


def text(bound: Bound, option: str) -> str:
    """Return an option whose value is a string: a dtype or a major."""
    return str(bound.options[option])


def _vector(bound: Bound) -> int:
    value = bound.options["sf_vec_size"]
    if not isinstance(value, int):
        raise KeyError("sf_vec_size")
    return value


def _scale_tiles(bound: Bound) -> int:
    return blocks(blocks(bound.dim("K"), _vector(bound)), 4)


TILES: dict[str, Callable[[Bound], int]] = {
    "TM": lambda bound: blocks(bound.dim("M"), 128),
    "TA": _scale_tiles,
    "TN": lambda bound: blocks(bound.dim("N"), 128),
    "TB": _scale_tiles,
}
"""Tiles of the scales, which follow from the matrices."""
ROWS = ("M", "TM")
"""What may change between the executions of one object."""


def matrix(bound: Bound, dtype: str, major: str, columns: int | None = None) -> OutputSpec:
    """Return an (M, ``columns``, L) result (N columns by default), compact; a caller's own may have an aligned pitch.

    Packed FP4 is half as wide.
    """
    width = bound.dim("N") if columns is None else columns
    width = width // 2 if dtype in PACKED else width
    return OutputSpec(
        (bound.dim("M"), width, bound.dim("L")),
        dtype,
        order=ORDERS[major],
        layout=LAYOUTS[major],
        alignment=ALIGNMENT,
        pairs=1,
    )


def maximum(bound: Bound, shape: tuple[int, ...]) -> OutputSpec | None:
    """Return the largest magnitude, if it is asked for: the class form raises what its buffer holds."""
    if not bound.options.get("with_amax", True):
        return None
    return OutputSpec(shape, "float32", accumulate="max", any_units=True)


def scales(bound: Bound, dtype: str, columns: int) -> OutputSpec:
    """Return the scales of an (M, ``columns``, L) result in blocks of ``sf_vec_size`` columns."""
    tiles = blocks(blocks(columns, _vector(bound)), 4)
    shape = (bound.dim("L"), blocks(bound.dim("M"), 128), tiles, 32, 4, 4)
    return OutputSpec(shape, dtype, view=LOGICAL, alignment=ALIGNMENT, byte_aliases=("uint8", "int8"))


EXTENTS = (
    Rule(
        "a_tensor",
        "have K > 0",
        holds=lambda bound: bound.dim("K") > 0,
        given=lambda bound: f"shape {bound.given['a_tensor']}",
        fix="There is nothing to sum.",
    ),
    Rule(
        "b_tensor",
        "have N > 0",
        holds=lambda bound: bound.dim("N") > 0,
        given=lambda bound: f"shape {bound.given['b_tensor']}",
        fix="There are no columns to compute.",
    ),
)


def jax_layout(major_option: str) -> tuple[Rule, ...]:
    """Return the rules of JAX arrays, which are row-major: one batch, results n-major."""
    return (
        Rule(
            "a_tensor",
            "have L = 1 for JAX arrays",
            holds=lambda bound: bound.framework != "jax" or bound.dim("L") == 1,
            given=lambda bound: f"shape {bound.given['a_tensor']}",
            fix="Call it for each batch, or pass torch tensors.",
        ),
        Rule(
            major_option,
            'be "n" for JAX arrays',
            holds=lambda bound: bound.framework != "jax" or bound.options[major_option] == "n",
            given=lambda bound: repr(bound.options[major_option]),
            fix="Transpose the result.",
        ),
    )


def _is_scaled(bound: Bound) -> bool:
    return bound.has("sfa_tensor")


def _block_length(bound: Bound) -> tuple[int, ...]:
    """Return the lengths of blocks that the dtypes of elements and scales allow."""
    if bound.dtype("a_tensor") in FP8:
        return (32,)
    return (16,) if bound.dtype("sfa_tensor") == "float8_e4m3fn" else (16, 32)


BLOCK_FORMAT = (
    Rule(
        "sfa_tensor",
        "hold e8m0 scales for fp8 operands",
        holds=lambda bound: (
            not _is_scaled(bound) or bound.dtype("a_tensor") not in FP8 or bound.dtype("sfa_tensor") == "float8_e8m0fnu"
        ),
        given=lambda bound: bound.dtype("sfa_tensor"),
        fix="Formats: MXFP8 (fp8, e8m0, 32), MXFP4 (fp4, e8m0, 16 or 32), NVFP4 (fp4, e4m3, 16).",
    ),
    Rule(
        "sf_vec_size",
        "be 32 for fp8 operands, 16 for e4m3 scales",
        holds=lambda bound: not _is_scaled(bound) or _vector(bound) in _block_length(bound),
        given=lambda bound: f"{_vector(bound)} for {bound.dtype('a_tensor')} with {bound.dtype('sfa_tensor')} scales",
        fix="Formats: MXFP8 (fp8, e8m0, 32), MXFP4 (fp4, e8m0, 16 or 32), NVFP4 (fp4, e4m3, 16).",
    ),
)
"""Which scales go with which elements, where scales are given."""


def same_major(name: str, option: str) -> Rule:
    """Return the rule that an (M, N, L) input is contiguous along the dimension that ``option`` names."""

    def holds(bound: Bound) -> bool:
        desc = bound.arrays[name]
        return has_order(desc.shape, desc.stride, ORDERS[text(bound, option)])

    return Rule(
        name,
        f"be contiguous along the dimension that {option} names",
        holds=holds,
        given=lambda bound: f"strides {tuple(bound.arrays[name].stride)} with {option} = {text(bound, option)!r}",
        fix=f"Pass the other {option}, or a copy.",
    )


def sample_dtype(array: Any, default: str) -> Any:
    """Return the dtype of a class's sample result, ``default`` for what has none: the checks will name the sample."""
    dtype = getattr(array, "dtype", None)
    return default if dtype is None else canonical_dtype(dtype)


def sample_major(array: Any) -> str:
    """Return ``"m"`` for a sample result whose columns are contiguous and whose rows are not, else ``"n"``."""
    if not hasattr(array, "shape") or len(array.shape) != 3:
        return "n"
    shape, stride = get_shape(array), _strides(array)
    return "m" if has_order(shape, stride, ORDERS["m"]) and not has_order(shape, stride, ORDERS["n"]) else "n"


def _strides(array: Any) -> tuple[int, ...]:
    stride = getattr(array, "stride", None)
    return tuple(stride) if isinstance(stride, tuple) else get_strides(array)
