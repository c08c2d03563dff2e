"""What the contracts of ``gemm_srelu`` and its backward share: hints, and the result D with what belongs to it."""

from __future__ import annotations

from fe_runtime.contract import Bound, Option, Output, OutputSpec, Rule

from . import contract as common
from .hints import Hints

__all__ = ["AMAX", "D_DTYPE", "D_RULES", "SCALES", "STORED", "WITH_AMAX", "hints"]

STORED = (*common.WIDE, *common.FP8)
"""Dtypes of D, and of C of the forward."""


def hints(operation: str) -> Hints:
    """Return the legal hints of an operation."""
    return Hints(operation, tile_n=(64, 128, 192, 256), default_cluster=lambda rows: (2, 1) if rows == 256 else (1, 1))


def _is_quantised(bound: Bound) -> bool:
    return common.text(bound, "d_dtype") in common.FP8


def _returns_amax(bound: Bound) -> bool:
    return bound.dtype("a_tensor") == common.FP4 and not _is_quantised(bound)


def _amax(bound: Bound) -> OutputSpec | None:
    return common.maximum(bound, (1,))


def _scales(bound: Bound) -> OutputSpec | None:
    # Of the dtype of the scales of A: an fp8 D takes those to be e8m0.
    return common.scales(bound, "float8_e8m0fnu", bound.dim("N")) if _is_quantised(bound) else None


D_DTYPE: Option = common.stored_dtype("d_dtype", "bfloat16", STORED, "dtype of D; fp8 is quantised in blocks")
WITH_AMAX: Option = common.with_amax(_returns_amax)
AMAX = Output("amax_tensor", _amax, doc="largest magnitude before the rounding of D")
SCALES = Output("sfd_tensor", _scales, doc="scales of an fp8 D")

D_RULES = (
    Rule(
        "d_dtype",
        "be fp8 only with e8m0 scales and sf_vec_size = 32",
        holds=lambda bound: (
            not _is_quantised(bound)
            or (bound.dtype("sfa_tensor") == "float8_e8m0fnu" and bound.options["sf_vec_size"] == 32)
        ),
        given=lambda bound: (
            f"{common.text(bound, 'd_dtype')} with {bound.dtype('sfa_tensor')} scales "
            f"per {bound.options['sf_vec_size']}"
        ),
        fix="There is no format for other blocks of fp8.",
    ),
    Rule(
        "norm_const_tensor",
        "be given for an fp8 D",
        holds=lambda bound: not _is_quantised(bound) or bound.has("norm_const_tensor"),
        given=lambda bound: "None",
        fix="Pass the global factor of its scales, 1.0 for none.",
    ),
)
