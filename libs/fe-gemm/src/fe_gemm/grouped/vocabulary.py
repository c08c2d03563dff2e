"""What the grouped products have in common: operands, weight modes, offsets, options, results, and what is forbidden.

Letters: ``E`` experts, ``M`` rows, ``N`` rows of one expert's weight, ``K`` the depth; ``P`` entries of a table of
addresses. How arrays appear to what uses a contract:

* A, numbers of rows, and results come with or without trailing ones; results follow A. A kernel sees (M, X) and (M,).
* Dense weights are (E, N, K), by rows (``K`` inside) or by columns; the front door makes views of the other forms. A
  bias is (E, N).
* Discrete weights are a table of addresses: int64 (E,), in JAX also its bytes, uint8 (8 E,). ``b_major`` says how the
  matrices behind them lie. No addresses are read on the host, but by the reference.

Hints are no options: :mod:`fe_gemm.grouped.hints` checks them and they go no further.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fe_runtime import env
from fe_runtime.contract import Bound, Input, Layout, Option, OutputSpec, Rule, compact
from fe_runtime.errors import InvalidArgumentError, explain
from fe_runtime.plan import Target
from fe_runtime.strides import has_order, is_contiguous
from fe_runtime.values import Read

__all__ = [
    "ACCUMULATOR",
    "ALIGNMENT",
    "ALPHA",
    "BF16",
    "BIAS",
    "B_DTYPE",
    "B_MAJOR",
    "B_PTRS",
    "CHECK_VARIABLE",
    "COUNT",
    "DERIVED",
    "ERRORS",
    "EXTENTS",
    "MAX_EXPERTS",
    "OFFSETS",
    "ROW_MAJOR",
    "WEIGHT_MODE",
    "WIDE",
    "check_addresses",
    "check_offsets",
    "check_tables",
    "check_tiles",
    "check_values",
    "columns",
    "is_legacy",
    "lies_by_rows",
    "multiple_of",
    "multiprocessors",
    "operand",
    "prob",
    "rows_of",
    "stored_dtype",
    "table",
    "text",
    "weights",
]

BF16 = ("bfloat16",)
WIDE = ("bfloat16", "float16", "float32")
MAX_EXPERTS = 1024
ALIGNMENT = 16
"""Bytes at which matrices start and their rows (columns) follow each other: what the copy engine demands."""
ADDRESS_BYTES = 8
CHECK_VARIABLE = "CUDNN_FE_GROUPED_GEMM_VALIDATE_DEVICE_VALUES"
"""The peer's switch for a look at offsets and addresses, which is honoured too."""
MARGIN_VARIABLE = "CUDNNFE_CLUSTER_OVERLAP_MARGIN"
"""The peer's variable for what kernels leave free, which is honoured in multiprocessors."""
ERRORS: dict[str, type[Exception]] = {"missing": InvalidArgumentError}

BY_ROWS, BY_COLUMNS = (0, 1, 2), (0, 2, 1)

ROW_MAJOR = compact("row-major", "be contiguous (row-major)", "Pass a contiguous copy.", (0, 1))
WEIGHTS = compact(
    "k- or n-major",
    'be contiguous as (E, N, K), as (E, K, N) with b_major="n", or as a view (N, K, E) of (E, N, K)',
    "Pass a contiguous copy.",
    BY_ROWS,
    BY_COLUMNS,
)
BY_EXPERT = Layout(
    "by expert",
    "have shape (N, E) and strides (1, N): the transpose of a contiguous (E, N)",
    "Pass bias.T.contiguous().T.",
    is_contiguous,
)


def operand(name: str, shape: str, dtypes: tuple[str, ...], optional: bool = False, doc: str = "") -> Input:
    """Return a matrix (M, X), or (M, X, 1): row-major, packed FP4 along X."""
    pairs = 1 if "float4_e2m1fn" in dtypes else None
    return Input(
        name,
        shape,
        dtypes,
        ROW_MAJOR,
        also=(f"{shape} 1",),
        optional=optional,
        pairs=pairs,
        alignment=ALIGNMENT,
        doc=doc,
    )


def weights(dtypes: tuple[str, ...]) -> Input:
    """Return the dense weights, of the dtype of A."""
    return Input(
        "b_tensor",
        "E N K",
        dtypes,
        WEIGHTS,
        optional=True,
        dtype_of="a_tensor",
        pairs=2 if "float4_e2m1fn" in dtypes else None,
        alignment=ALIGNMENT,
        doc="weights of the experts; also a view (N, K, E)",
    )


def prob(name: str, dtypes: tuple[str, ...], doc: str) -> Input:
    """Return numbers of rows: (M,) or (M, 1, 1)."""
    return Input(name, "M", dtypes, also=("M 1 1",), optional=True, doc=doc)


OFFSETS = Input("padded_offsets", "E", ("int32",), doc="the row after the last one of each expert, non-decreasing")
ALPHA = Input("alpha_tensor", "E", ("float32",), doc="factor of each expert's products")
BIAS = Input(
    "bias_tensor",
    "E N",
    WIDE,
    BY_EXPERT,
    optional=True,
    alignment=ALIGNMENT,
    doc="bias of each expert, passed as (N, E)",
)


def table(name: str, doc: str) -> Input:
    """Return a table of addresses, one for each expert."""
    return Input(name, "P", ("int64", "uint8"), optional=True, alignment=ADDRESS_BYTES, doc=doc)


B_PTRS = table("b_ptrs", "addresses of the experts' weights, in place of b_tensor; uint8 in JAX only")

COUNT = Option(
    "n", int, holds=lambda n: isinstance(n, int) and n > 0, rule="be positive", doc="rows of a weight behind b_ptrs"
)
B_DTYPE = Option("b_dtype", "dtype", doc="dtype of the weights behind b_ptrs")
B_MAJOR = Option(
    "b_major", str, "k", choices=("k", "n"), doc='"n": weights are (E, K, N), and (K, N) matrices behind addresses'
)
ACCUMULATOR = Option(
    "acc_dtype", "dtype", choices=("float32",), resolve=lambda _bound: "float32", doc="dtype of sums. None: float32"
)


def stored_dtype(name: str, dtypes: tuple[str, ...] = WIDE, doc: str = "") -> Option:
    """Return the option for the dtype of a result."""
    return Option(
        name, "dtype", choices=dtypes, resolve=lambda _bound: "bfloat16", doc=f"{doc}. None: bfloat16".lstrip(". ")
    )


def columns(bound: Bound) -> int:
    """Return N: of the dense weights, or as given for those behind addresses."""
    if bound.has("b_tensor"):
        return bound.dim("N")
    n = bound.options["n"]
    return n if isinstance(n, int) else 0


def is_legacy(bound: Bound) -> bool:
    """Whether A has a trailing one: then results do."""
    return len(bound.given["a_tensor"]) == 3


def rows_of(bound: Bound, dtype: str, width: int) -> OutputSpec:
    """Return a result (M, ``width``), or (M, ``width``, 1) where A has that form."""
    rows = bound.dim("M")
    if is_legacy(bound):
        return OutputSpec((rows, width, 1), dtype, order=(2, 0, 1), alignment=ALIGNMENT)
    return OutputSpec((rows, width), dtype, alignment=ALIGNMENT)


def text(bound: Bound, option: str) -> str:
    """Return an option whose value is a string."""
    return str(bound.options[option])


# --- what is forbidden


def _is_dense(bound: Bound) -> bool:
    return bound.has("b_tensor")


def _table_fits(bound: Bound, name: str = "b_ptrs") -> bool:
    return bound.dtype(name) != "uint8" or bound.framework == "jax"


def _lies_by_columns(bound: Bound) -> bool:
    desc = bound.arrays["b_tensor"]
    return has_order(desc.shape, desc.stride, BY_COLUMNS)


def lies_by_rows(bound: Bound) -> bool:
    """Whether the dense weights have K contiguous."""
    desc = bound.arrays["b_tensor"]
    return has_order(desc.shape, desc.stride, BY_ROWS)


WEIGHT_MODE = (
    Rule(
        "b_tensor",
        "be given, or b_ptrs with n and b_dtype: one of the two",
        holds=lambda bound: bound.has("b_tensor") != bound.has("b_ptrs"),
        given=lambda bound: "both" if bound.has("b_tensor") else "neither",
        fix="Pass dense weights or addresses of weights.",
    ),
    Rule(
        "n",
        "be given with b_ptrs, and only then",
        holds=lambda bound: (bound.options["n"] is None) == _is_dense(bound),
        given=lambda bound: repr(bound.options["n"]),
        fix="It is the number of rows of a weight behind an address.",
    ),
    Rule(
        "b_dtype",
        "be given with b_ptrs, and only then",
        holds=lambda bound: (bound.options["b_dtype"] is None) == _is_dense(bound),
        given=lambda bound: repr(bound.options["b_dtype"]),
        fix="It is the dtype of the weights behind the addresses.",
    ),
    Rule(
        "b_dtype",
        "be the dtype of a_tensor",
        holds=lambda bound: _is_dense(bound) or _same_elements(bound),
        given=lambda bound: repr(bound.options["b_dtype"]),
        fix="Convert the weights.",
    ),
    Rule(
        "b_ptrs",
        "hold int64 addresses (bytes are for JAX arrays)",
        holds=_table_fits,
        given=lambda bound: bound.dtype("b_ptrs"),
        fix="Pass int64 of shape (E,).",
    ),
    Rule(
        "b_tensor",
        'be stored by columns for b_major="n"',
        holds=lambda bound: not _is_dense(bound) or bound.options["b_major"] == "k" or _lies_by_columns(bound),
        given=lambda bound: f"strides {tuple(bound.arrays['b_tensor'].stride)}",
        fix='Leave b_major="k", or pass (E, K, N).',
    ),
)
"""One of the two weight modes, with what belongs to it."""


def _same_elements(bound: Bound) -> bool:
    named = {"uint8": "float4_e2m1fn", "float4_e2m1fn_x2": "float4_e2m1fn"}
    given = str(bound.options["b_dtype"])
    return named.get(given, given) == bound.dtype("a_tensor")


def multiple_of(count: int, extent: Callable[[Bound], int], argument: str, letter: str) -> Rule:
    """Return the rule that N (or another extent) is positive and a multiple of ``count``."""
    return Rule(
        argument,
        f"have {letter} > 0, a multiple of {count}",
        holds=lambda bound: extent(bound) > 0 and extent(bound) % count == 0,
        given=lambda bound: f"{letter} = {extent(bound)}",
        fix="Pad the weights.",
    )


EXTENTS = (
    Rule(
        "padded_offsets",
        f"have from 1 to {MAX_EXPERTS} entries",
        holds=lambda bound: 1 <= bound.dim("E") <= MAX_EXPERTS,
        given=lambda bound: f"E = {bound.dim('E')}",
        fix="Split the experts over several calls.",
    ),
    Rule(
        "a_tensor",
        "have K > 0",
        holds=lambda bound: bound.dim("K") > 0,
        given=lambda bound: f"shape {bound.given['a_tensor']}",
        fix="There is nothing to sum.",
    ),
    Rule(
        "bias_tensor",
        "have N rows, one for each column of the product",
        holds=lambda bound: not bound.has("bias_tensor") or bound.dim("N") == columns(bound),
        given=lambda bound: f"{bound.dim('N')} rows for N = {columns(bound)}",
        fix="Its shape is (N, E).",
    ),
)

DERIVED: dict[str, Callable[[Bound], int]] = {
    "P": lambda bound: bound.dim("E") * (ADDRESS_BYTES if bound.dtype("b_ptrs") == "uint8" else 1),
}


def multiprocessors(operation: str, target: Target) -> int:
    """Return how many multiprocessors a persistent kernel may take: all but those that the peer's variable keeps free.

    Raises
    ------
    InvalidArgumentError
        The variable is no number, or leaves none.
    """
    kept = env.text(MARGIN_VARIABLE) or "0"
    rule = f"be a number below {target.sm_count}, the multiprocessors of the GPU"
    try:
        left = target.sm_count - int(kept)
    except ValueError as error:
        raise InvalidArgumentError(explain(operation, MARGIN_VARIABLE, rule, repr(kept), "Unset it.")) from error
    if left <= 0:
        raise InvalidArgumentError(explain(operation, MARGIN_VARIABLE, rule, kept, "Unset it."))
    return min(left, target.sm_count)


# --- values on the device


def check_values(bound: Bound, read: Read) -> None:
    """Raise ``InvalidArgumentError`` for offsets that decrease or leave the rows, and for addresses that are none."""
    check_offsets(bound, "padded_offsets", read("padded_offsets"), bound.dim("M"), "rows")
    check_tables(bound, read)


def check_tables(bound: Bound, read: Read) -> None:
    """Raise ``InvalidArgumentError`` for addresses of weights and scales that are none."""
    for name in ("b_ptrs", "sfb_ptrs"):
        if bound.has(name):
            check_addresses(bound, name, read(name))


def check_offsets(bound: Bound, name: str, offsets: Any, extent: int, what: str) -> None:
    """Raise unless offsets never decrease and lie within the rows (tokens)."""
    whole = np.concatenate([[0], offsets.astype(np.int64)])
    falls = np.flatnonzero(np.diff(whole) < 0)
    if falls.size:
        at = int(falls[0])
        rule = "start at 0 or more and never decrease"
        given = f"{int(offsets[at])} after {int(whole[at])} at entry {at}"
        raise InvalidArgumentError(explain(bound.operation, name, rule, given, "Entries are the ends of groups."))
    if whole[-1] > extent:
        rule, fix = f"end within the {extent} {what}", f"The last entry counts the {what} that experts own."
        raise InvalidArgumentError(explain(bound.operation, name, rule, int(whole[-1]), fix))


def check_tiles(bound: Bound, name: str, offsets: Any, tile: int) -> None:
    """Raise unless all groups but the last are whole tiles of scales: otherwise their scales have no place."""
    cut = np.flatnonzero((offsets % tile != 0) & (offsets != offsets[-1]))
    if cut.size:
        at = int(cut[0])
        rule = f"be multiples of {tile}, four blocks of scales, but for the last"
        fix = "Pad the rows of each expert with zeros."
        text = explain(bound.operation, name, rule, f"{int(offsets[at])} at entry {at}", fix)
        raise InvalidArgumentError(text)


def check_addresses(bound: Bound, name: str, addresses: Any) -> None:
    """Raise for a null address, and on a GPU for one that is no multiple of 16."""
    values = np.ascontiguousarray(addresses)
    values = values.view("<i8") if values.dtype == np.uint8 else values
    step = ALIGNMENT if bound.device.type == "cuda" else 1
    wrong = np.flatnonzero((values == 0) | (values % step != 0))
    if wrong.size:
        rule = "hold addresses that are not null" + (f", multiples of {step}" if step > 1 else "")
        given = f"{int(values[wrong[0]])} at entry {int(wrong[0])}"
        raise InvalidArgumentError(explain(bound.operation, name, rule, given, "Pass data_ptr() of each matrix."))
