"""What ``grouped_gemm_glu`` accepts and returns. Letters as in :mod:`fe_gemm.grouped.families`."""

from __future__ import annotations

from typing import Any

from fe_gemm.dense import contract as dense
from fe_runtime.contract import Bound, Contract, Option, Output, OutputSpec, Rule
from fe_runtime.values import Read

from . import families
from . import vocabulary as common

__all__ = ["ACTIVATIONS", "CONTRACT", "check_values"]

ACTIVATIONS = ("swiglu", "geglu", "situglu")
STORED = (*common.WIDE, *dense.FP8)


def _c(bound: Bound) -> OutputSpec | None:
    if not bound.options["generate_c"]:
        return None
    return common.rows_of(bound, common.text(bound, "c_dtype"), common.columns(bound))


def _width(bound: Bound) -> int:
    return common.columns(bound) // 2


def _d(bound: Bound) -> OutputSpec:
    return common.rows_of(bound, common.text(bound, "d_dtype"), _width(bound))


def _is_quantised(bound: Bound) -> bool:
    return bound.has("norm_const_tensor")


def _amax(bound: Bound) -> OutputSpec | None:
    if not bound.options["with_amax"]:
        return None
    return OutputSpec((bound.dim("E"), 1), "float32", accumulate="max", any_units=True)


def _has_amax(bound: Bound) -> bool:
    """Whether the wrapper returns amax."""
    return families.is_scaled(bound) and bound.options["d_dtype"] in ("bfloat16", "float16")


def _dtype_is(bound: Bound, option: str, dtypes: tuple[str, ...]) -> bool:
    return bound.options[option] in dtypes


def _given(option: str) -> Any:
    return lambda bound: f"{bound.options[option]} for {bound.dtype('a_tensor')} operands"


RESULT_RULES = (
    *(
        Rule(
            name,
            "be bfloat16, float16 or float32 for bfloat16 operands",
            holds=lambda bound, name=name: families.is_scaled(bound) or _dtype_is(bound, name, common.WIDE),  # type: ignore[misc]
            given=_given(name),
            fix="Quantised results need fp8 operands.",
        )
        for name in ("c_dtype", "d_dtype")
    ),
    families.supported(
        "c_dtype",
        "be bfloat16 or float16 for FP4 operands",
        holds=lambda bound: (
            bound.dtype("a_tensor") != dense.FP4 or _dtype_is(bound, "c_dtype", ("bfloat16", "float16"))
        ),
        given=_given("c_dtype"),
    ),
    Rule(
        "d_dtype",
        "be bfloat16, float16 or float32 for FP4 operands",
        holds=lambda bound: bound.dtype("a_tensor") != dense.FP4 or _dtype_is(bound, "d_dtype", common.WIDE),
        given=_given("d_dtype"),
        fix="Quantised results need fp8 operands.",
    ),
    Rule(
        "d_dtype",
        "be fp8, bfloat16 or float16 for fp8 operands",
        holds=lambda bound: not families.has_fp8(bound) or not _dtype_is(bound, "d_dtype", ("float32",)),
        given=_given("d_dtype"),
        fix="Pass another d_dtype.",
    ),
    Rule(
        "norm_const_tensor",
        "be given for an fp8 D",
        holds=lambda bound: _is_quantised(bound) or not _dtype_is(bound, "d_dtype", dense.FP8),
        given=lambda _bound: "None",
        fix="Pass ones of shape (1,) for no factor.",
    ),
    Rule(
        "norm_const_tensor",
        "be left out for FP4 operands",
        holds=lambda bound: bound.dtype("a_tensor") != dense.FP4 or not _is_quantised(bound),
        given=lambda _bound: "an array",
        fix="Their results are not quantised.",
    ),
)

CONTRACT = Contract(
    operation="grouped_gemm_glu",
    inputs=(
        common.operand("a_tensor", "M K", families.ELEMENTS, doc="rows of all experts, one after the other"),
        families.SCALES_A,
        common.OFFSETS,
        common.ALPHA,
        common.weights(families.ELEMENTS),
        families.SCALES_B,
        common.BIAS,
        common.B_PTRS,
        families.SFB_PTRS,
        families.NORM_CONST,
        common.prob("prob_tensor", ("float32", "bfloat16"), "factor of each row of D; required for bfloat16 operands"),
    ),
    options=(
        common.COUNT,
        common.B_DTYPE,
        common.B_MAJOR,
        common.ACCUMULATOR,
        common.stored_dtype("c_dtype", STORED, doc="dtype of C"),
        common.stored_dtype("d_dtype", STORED, doc="dtype of D"),
        *families.SCALE_OPTIONS,
        Option("act_func", str, "swiglu", choices=ACTIVATIONS, doc="the activation"),
        *families.CLAMPS,
        Option("generate_c", bool, False, doc="whether to return C"),
        Option("with_amax", bool, resolve=_has_amax, doc="whether to return amax; None: where the wrapper does"),
    ),
    outputs=(
        Output("c_tensor", _c, doc="products plus bias, before the activation"),
        Output("d_tensor", _d, doc="activation times prob"),
        Output("d_col_tensor", lambda bound: _d(bound) if _is_quantised(bound) else None, doc="D in column blocks"),
        Output(
            "amax_tensor",
            _amax,
            doc="largest magnitude of each expert's D before rounding",
            onto=lambda _options: "max",
        ),
        Output(
            "sfd_row_tensor",
            lambda bound: families.row_scales(bound, _width(bound)) if _is_quantised(bound) else None,
            doc="scales of D",
        ),
        Output(
            "sfd_col_tensor",
            lambda bound: families.column_scales(bound, _width(bound)) if _is_quantised(bound) else None,
            doc="scales of D in column blocks",
        ),
    ),
    rules=(
        *common.WEIGHT_MODE,
        Rule(
            "b_major",
            'be "k" for dense weights',
            holds=lambda bound: not bound.has("b_tensor") or bound.options["b_major"] == "k",
            given=lambda bound: repr(bound.options["b_major"]),
            fix="Store the weights as (E, N, K).",
        ),
        Rule(
            "b_tensor",
            "be stored by rows, K contiguous",
            holds=lambda bound: not bound.has("b_tensor") or common.lies_by_rows(bound),
            given=lambda bound: f"strides {tuple(bound.arrays['b_tensor'].stride)}",
            fix="Store the weights as (E, N, K).",
        ),
        *families.FAMILY,
        *common.EXTENTS,
        common.multiple_of(64, common.columns, "b_tensor", "N"),
        *RESULT_RULES,
        families.AMAX,
        families.finite("situ_beta1", "situglu"),
        families.finite("situ_beta2", "situglu"),
    ),
    dynamic=families.ROWS,
    errors=common.ERRORS,
    derived=families.DERIVED,
)


def check_values(bound: Bound, read: Read) -> None:
    """Raise ``InvalidArgumentError`` for malformed offsets and null addresses."""
    if bound.options["use_single_group_runtime_offsets"]:
        common.check_tables(bound, read)
    else:
        common.check_values(bound, read)
        if bound.options["discrete_col_sfd"] and any(name == "norm_const_tensor" for name in bound.arrays):
            common.check_tiles(bound, "padded_offsets", read("padded_offsets"), 128)
