"""What ``gemm_swiglu`` accepts and returns."""

from __future__ import annotations

from fe_runtime.contract import Bound, Contract, Option, Output, OutputSpec, Rule

from . import contract as common

__all__ = ["CONTRACT"]

STORED = (*common.WIDE, *common.FP8)
HALVES = ("float16", "bfloat16")


def _is_scaled(bound: Bound) -> bool:
    return bound.has("sfa_tensor")


def _is_fp4(bound: Bound) -> bool:
    return bound.dtype("a_tensor") == common.FP4


def _quantises(bound: Bound) -> bool:
    """Whether C is fp8, so quantised in blocks: without scales it cannot be."""
    return common.text(bound, "c_dtype") in common.FP8


def _wants_amax(bound: Bound) -> bool:
    return _is_scaled(bound) and _is_fp4(bound) and common.text(bound, "c_dtype") == "bfloat16"


def _sums_in_halves(bound: Bound) -> bool:
    return bound.options["acc_dtype"] == "float16"


def _ab12(bound: Bound) -> OutputSpec:
    return common.matrix(bound, common.text(bound, "ab12_dtype"), common.text(bound, "c_major"))


def _c(bound: Bound) -> OutputSpec:
    return common.matrix(bound, common.text(bound, "c_dtype"), common.text(bound, "c_major"), bound.dim("N") // 2)


def _sfc(bound: Bound) -> OutputSpec | None:
    return common.scales(bound, "float8_e8m0fnu", bound.dim("N") // 2) if _quantises(bound) else None


def _amax(bound: Bound) -> OutputSpec | None:
    return common.maximum(bound, (1, 1, 1))


OPERAND_RULES = (
    Rule(
        "b_tensor",
        "have a multiple of 64 as N",
        holds=lambda bound: bound.dim("N") % 64 == 0,
        given=lambda bound: f"N = {bound.dim('N')}",
        fix="Interleave up and gate in blocks of 32 rows, padded with zeros.",
    ),
    Rule(
        "sfa_tensor",
        "be given if and only if sfb_tensor is",
        holds=lambda bound: bound.has("sfa_tensor") == bound.has("sfb_tensor"),
        given=lambda bound: "only sfa_tensor" if bound.has("sfa_tensor") else "only sfb_tensor",
        fix="Pass both or none.",
    ),
    Rule(
        "a_tensor",
        "have scales if it is FP4",
        holds=lambda bound: _is_scaled(bound) or not _is_fp4(bound),
        given=lambda bound: "no sfa_tensor",
        fix="Pass sfa_tensor and sfb_tensor.",
    ),
    Rule(
        "a_tensor",
        "be fp8 or FP4 with scales",
        holds=lambda bound: not _is_scaled(bound) or bound.dtype("a_tensor") in common.BLOCK_DTYPES,
        given=lambda bound: bound.dtype("a_tensor"),
        fix="Leave the scales out.",
    ),
    Rule(
        "norm_const_tensor",
        "be None without scales",
        holds=lambda bound: _is_scaled(bound) or not bound.has("norm_const_tensor"),
        given=lambda bound: "an array",
        fix="Drop it, or pass sfa_tensor and sfb_tensor.",
    ),
    Rule(
        "amax_tensor",
        "be None without scales",
        holds=lambda bound: _is_scaled(bound) or not bound.options["with_amax"],
        given=lambda bound: "an array",
        fix="Drop it, or pass sfa_tensor and sfb_tensor.",
    ),
)

RESULT_RULES = (
    Rule(
        "c_dtype",
        "be float16 or bfloat16 without scales",
        holds=lambda bound: _is_scaled(bound) or common.text(bound, "c_dtype") in HALVES,
        given=lambda bound: common.text(bound, "c_dtype"),
        fix="Pass another c_dtype.",
    ),
    Rule(
        "acc_dtype",
        "be float32 with scales",
        holds=lambda bound: not (_is_scaled(bound) and _sums_in_halves(bound)),
        given=lambda bound: "float16",
        fix="Leave it out.",
    ),
    Rule(
        "acc_dtype",
        "be float32 unless the operands are float16 or fp8",
        holds=lambda bound: not _sums_in_halves(bound) or bound.dtype("a_tensor") in ("float16", *common.FP8),
        given=lambda bound: f"float16 for {bound.dtype('a_tensor')}",
        fix="Leave it out.",
    ),
    Rule(
        "acc_dtype",
        "be float32 unless ab12_dtype is float16 or bfloat16",
        holds=lambda bound: not _sums_in_halves(bound) or common.text(bound, "ab12_dtype") in HALVES,
        given=lambda bound: f"float16 with ab12_dtype = {common.text(bound, 'ab12_dtype')}",
        fix="Leave it out, or pass another ab12_dtype.",
    ),
    Rule(
        "c_dtype",
        "be fp8 only with e8m0 scales and sf_vec_size = 32",
        holds=lambda bound: (
            not _quantises(bound)
            or (bound.dtype("sfa_tensor") == "float8_e8m0fnu" and bound.options["sf_vec_size"] == 32)
        ),
        given=lambda bound: (
            f"{common.text(bound, 'c_dtype')} with {bound.dtype('sfa_tensor')} scales "
            f"per {bound.options['sf_vec_size']}"
        ),
        fix="There is no format for other blocks of fp8.",
    ),
    Rule(
        "norm_const_tensor",
        "be given for an fp8 C",
        holds=lambda bound: not _quantises(bound) or bound.has("norm_const_tensor"),
        given=lambda bound: "None",
        fix="Pass the global factor of its scales, 1.0 for none.",
    ),
    Rule(
        "c_major",
        'be "n" for FP4 operands',
        holds=lambda bound: not _is_fp4(bound) or bound.options["c_major"] == "n",
        given=lambda bound: repr(bound.options["c_major"]),
        fix="Transpose the result.",
    ),
    Rule(
        "amax_tensor",
        "be given for FP4 operands with a bfloat16 C",
        holds=lambda bound: not _wants_amax(bound) or bool(bound.options["with_amax"]),
        given=lambda bound: "None",
        fix="Pass an array of one float32.",
    ),
)

CONTRACT = Contract(
    operation="gemm_swiglu",
    inputs=(
        common.operand_a(("float16", "bfloat16", "float32", *common.BLOCK_DTYPES)),
        common.operand_b(("float16", "bfloat16", "float32", *common.BLOCK_DTYPES)),
        common.scales_a(optional=True),
        common.scales_b(optional=True),
        common.NORM_CONST,
    ),
    options=(
        common.ALPHA,
        common.major("c_major", "the contiguous dimension of AB12 and C"),
        common.stored_dtype("ab12_dtype", "float32", STORED, "dtype of AB12"),
        common.stored_dtype("c_dtype", "float16", STORED, "dtype of C"),
        Option("acc_dtype", "dtype", "float32", choices=("float32", "float16"), doc="dtype of the sum over K"),
        common.vector_size(16),
        common.with_amax(_wants_amax),
    ),
    outputs=(
        Output("ab12_tensor", _ab12, doc="product before the activation"),
        Output("c_tensor", _c, doc="gated columns"),
        Output("sfc_tensor", _sfc, doc="scales of an fp8 C"),
        Output("amax_tensor", _amax, doc="largest magnitude before the rounding of C"),
    ),
    rules=(
        *common.EXTENTS,
        *common.jax_layout("c_major"),
        *OPERAND_RULES,
        *common.BLOCK_FORMAT,
        *RESULT_RULES,
    ),
    dynamic=common.ROWS,
    derived=common.TILES,
)
