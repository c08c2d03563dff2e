"""What ``grouped_gemm_dglu`` accepts and returns. Letters as in :mod:`fe_gemm.grouped.families`; ``W`` = 2 N."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fe_gemm.dense import contract as dense
from fe_runtime.contract import Bound, Contract, Input, Option, Output, OutputSpec, Rule
from fe_runtime.values import Read

from . import families
from . import vocabulary as common
from .glu_contract import STORED
from .glu_contract import check_values as check_forward_values

__all__ = ["ACTIVATIONS", "CONTRACT", "check_values", "is_quantised"]

ACTIVATIONS = ("dswiglu", "dgeglu", "dsituglu")


def is_quantised(bound: Bound) -> bool:
    """Whether D comes with scales: an fp8 D of fp8 operands."""
    return families.has_fp8(bound) and bound.options["d_dtype"] in dense.FP8


def _d(bound: Bound) -> OutputSpec:
    return common.rows_of(bound, common.text(bound, "d_dtype"), 2 * common.columns(bound))


def _dprob(bound: Bound) -> OutputSpec | None:
    if not bound.options["with_dprob"]:
        return None
    rows = bound.dim("M")
    shape = (rows, 1, 1) if common.is_legacy(bound) else (rows,)
    return OutputSpec(shape, "float32", accumulate="add", any_units=True)


def _dbias(bound: Bound) -> OutputSpec | None:
    if not bound.options["generate_dbias"]:
        return None
    shape = (bound.dim("E"), 2 * common.columns(bound), 1)
    return OutputSpec(shape, "bfloat16", accumulate="add", alignment=common.ALIGNMENT)


def _amax(bound: Bound) -> OutputSpec | None:
    if not bound.options["with_amax"]:
        return None
    return OutputSpec((bound.dim("E"), 2, 1), "float32", accumulate="max", any_units=True)


def _has_amax(bound: Bound) -> bool:
    """Whether the wrapper returns amax."""
    return families.is_scaled(bound) and bound.options["d_dtype"] in ("bfloat16", "float16")


def _adds(_options: Mapping[str, object]) -> str:
    return "add"


def _width(bound: Bound) -> int:
    return 2 * common.columns(bound)


def _given(option: str) -> Any:
    return lambda bound: f"{bound.options[option]} for {bound.dtype('a_tensor')} operands"


def _keeps_activation(bound: Bound) -> bool:
    return bool(bound.options["with_activation"])


def _uses_geglu(bound: Bound) -> bool:
    return bound.options["act_func"] == "dgeglu" and not families.is_scaled(bound)


ACTIVATION_RULES = (
    Rule(
        "activation_tensor",
        "be left out for fp8 and FP4 operands",
        holds=lambda bound: not _keeps_activation(bound) or not families.is_scaled(bound),
        given=lambda _bound: "an array",
        fix="Compute it in the forward.",
    ),
    Rule(
        "activation_tensor",
        "be left out but for dgeglu with a bfloat16 C and D",
        holds=lambda bound: (
            not _keeps_activation(bound)
            or (
                bound.options["act_func"] == "dgeglu"
                and bound.dtype("c_tensor") == "bfloat16"
                and bound.options["d_dtype"] == "bfloat16"
            )
        ),
        given=lambda bound: f"{bound.options['act_func']}, {bound.dtype('c_tensor')}, {bound.options['d_dtype']}",
        fix="Compute it in the forward.",
    ),
    Rule(
        "round_dgrad_to_input_dtype",
        "be False for fp8 and FP4 operands",
        holds=lambda bound: not bound.options["round_dgrad_to_input_dtype"] or not families.is_scaled(bound),
        given=lambda _bound: True,
        fix="Leave it out.",
    ),
    Rule(
        "geglu_alpha",
        "be finite and positive",
        holds=lambda bound: not _uses_geglu(bound) or 0 < float(str(bound.options["geglu_alpha"])) < float("inf"),
        given=lambda bound: bound.options["geglu_alpha"],
        fix="Leave it out for the default.",
    ),
    Rule(
        "glu_clamp_min",
        "be finite and below a finite glu_clamp_max",
        holds=lambda bound: not _uses_geglu(bound) or _are_bounds(bound),
        given=lambda bound: f"{bound.options['glu_clamp_min']} and {bound.options['glu_clamp_max']}",
        fix="Leave them out for the defaults.",
    ),
    families.finite("situ_beta1", "situglu"),
    families.finite("situ_beta2", "situglu"),
)


def _are_bounds(bound: Bound) -> bool:
    low, high = (float(str(bound.options[name])) for name in ("glu_clamp_min", "glu_clamp_max"))
    return -float("inf") < low < high < float("inf")


RESULT_RULES = (
    Rule(
        "dprob_tensor",
        "be given for bfloat16 operands",
        holds=lambda bound: families.is_scaled(bound) or bool(bound.options["with_dprob"]),
        given=lambda _bound: "None",
        fix="Pass zeros of shape (M,), float32.",
    ),
    Rule(
        "c_tensor",
        "be bfloat16, float16 or float32 for bfloat16 operands",
        holds=lambda bound: families.is_scaled(bound) or bound.dtype("c_tensor") in common.WIDE,
        given=lambda bound: bound.dtype("c_tensor"),
        fix="Pass the C of the forward.",
    ),
    Rule(
        "d_dtype",
        "be bfloat16, float16 or float32 for bfloat16 and FP4 operands",
        holds=lambda bound: families.has_fp8(bound) or bound.options["d_dtype"] in common.WIDE,
        given=_given("d_dtype"),
        fix="Quantised results need fp8 operands.",
    ),
    Rule(
        "d_dtype",
        "be fp8, bfloat16 or float16 for fp8 operands",
        holds=lambda bound: not families.has_fp8(bound) or bound.options["d_dtype"] != "float32",
        given=_given("d_dtype"),
        fix="Pass another d_dtype.",
    ),
    Rule(
        "norm_const_tensor",
        "be given for an fp8 D",
        holds=lambda bound: bound.has("norm_const_tensor") or not is_quantised(bound),
        given=lambda _bound: "None",
        fix="Pass ones of shape (1,) for no factor.",
    ),
    Rule(
        "norm_const_tensor",
        "be left out for FP4 operands",
        holds=lambda bound: bound.dtype("a_tensor") != dense.FP4 or not bound.has("norm_const_tensor"),
        given=lambda _bound: "an array",
        fix="Their results are not quantised.",
    ),
)

CONTRACT = Contract(
    operation="grouped_gemm_dglu",
    inputs=(
        common.operand("a_tensor", "M K", families.ELEMENTS, doc="gradients of the second layer's results"),
        common.operand("c_tensor", "M W", STORED, doc="C of the forward"),
        families.SCALES_A,
        common.OFFSETS,
        Input("alpha_tensor", "E", ("float32",), doc="factor of each expert's products, applied twice"),
        Input("beta_tensor", "E", ("float32",), doc="factor of each expert's C"),
        common.prob("prob_tensor", ("float32", "bfloat16"), "factor of each row in the forward"),
        common.weights(families.ELEMENTS),
        families.SCALES_B,
        common.B_PTRS,
        families.SFB_PTRS,
        families.NORM_CONST,
    ),
    options=(
        common.COUNT,
        common.B_DTYPE,
        common.B_MAJOR,
        common.ACCUMULATOR,
        common.stored_dtype("d_dtype", STORED, doc="dtype of D"),
        *families.SCALE_OPTIONS,
        Option("act_func", str, "dswiglu", choices=ACTIVATIONS, doc="the activation"),
        *families.CLAMPS,
        Option("generate_dbias", bool, False, doc="whether to return dbias"),
        Option("round_dgrad_to_input_dtype", bool, False, doc="whether to round the product to bfloat16 first"),
        Option("with_dprob", bool, False, doc="whether to sum dprob"),
        Option("with_activation", bool, False, doc="whether to write the activation times prob"),
        Option("with_amax", bool, resolve=_has_amax, doc="whether to return amax; None: where the wrapper does"),
    ),
    outputs=(
        Output("d_row_tensor", _d, doc="gradients of gates and ups"),
        Output("d_col_tensor", lambda bound: _d(bound) if is_quantised(bound) else None, doc="D in column blocks"),
        Output("dprob_tensor", _dprob, doc="gradient of prob, added to what is there", onto=_adds),
        Output("dbias_tensor", _dbias, doc="gradient of the bias, added to what is there", onto=_adds),
        Output(
            "amax_tensor",
            _amax,
            doc="largest magnitudes of each expert's gradients of gates and of ups",
            onto=lambda _options: "max",
        ),
        Output(
            "sfd_row_tensor",
            lambda bound: families.row_scales(bound, _width(bound)) if is_quantised(bound) else None,
            doc="scales of D",
        ),
        Output(
            "sfd_col_tensor",
            lambda bound: families.column_scales(bound, _width(bound)) if is_quantised(bound) else None,
            doc="scales of D in column blocks",
        ),
        Output(
            "activation_tensor",
            lambda bound: (
                common.rows_of(bound, "bfloat16", common.columns(bound)) if _keeps_activation(bound) else None
            ),
            doc="activation times prob",
        ),
    ),
    rules=(
        *common.WEIGHT_MODE,
        *families.FAMILY,
        *common.EXTENTS[:2],
        common.multiple_of(32, common.columns, "b_tensor", "N"),
        Rule(
            "c_tensor",
            "have 2 N columns",
            holds=lambda bound: bound.dim("W") == 2 * common.columns(bound),
            given=lambda bound: f"{bound.dim('W')} columns for N = {common.columns(bound)}",
            fix="Pass the C of the forward.",
        ),
        *RESULT_RULES,
        families.AMAX,
        *ACTIVATION_RULES,
    ),
    dynamic=families.ROWS,
    errors=common.ERRORS,
    derived=families.DERIVED,
)


def check_values(bound: Bound, read: Read) -> None:
    """Raise ``InvalidArgumentError`` for malformed offsets and null addresses."""
    check_forward_values(bound, read)
