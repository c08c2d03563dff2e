"""What LMSD and its gradient accept and return."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fe_attention import epsilon
from fe_runtime.contract import Bound, Contract, Input, Option, Output, OutputSpec, Rule, pitched

__all__ = ["ALIGNMENT", "BACKWARD_CONTRACT", "CONTRACT", "has_dropout"]

ALIGNMENT = 16
"""Bytes at a multiple of which every operand on a GPU, and every row, starts."""
MOST_ELEMENTS = 2**31
"""Most elements of x."""
BF16 = ("bfloat16",)

ROWS = pitched("rows", "have rows of stride 1 that do not overlap", "Pass a contiguous copy.", (0, 1))


def has_dropout(dropout_ratio: float) -> bool:
    """Return whether anything is dropped: whether the ratio, rounded to float32, is above 0."""
    return bool(np.float32(dropout_ratio) > 0)


def _is_ratio(value: object) -> bool:
    return isinstance(value, float) and value >= 0 and bool(np.float32(value) < 1)


def _ratio(bound: Bound) -> float:
    value = bound.options["dropout_ratio"]
    if not isinstance(value, float):
        raise KeyError("dropout_ratio")
    return value


def _parts(bound: Bound) -> int:
    return 1 + bool(bound.options["concat_u"]) + bool(bound.options["concat_x"])


def _rows(bound: Bound) -> OutputSpec:
    return OutputSpec((bound.dim("N"), bound.dim("D")), "bfloat16", layout=ROWS, alignment=ALIGNMENT)


def _columns(bound: Bound) -> OutputSpec:
    return OutputSpec((bound.dim("D"),), "bfloat16", alignment=ALIGNMENT)


def _statistic(bound: Bound) -> OutputSpec:
    return OutputSpec((bound.dim("N"),), "float32", alignment=ALIGNMENT)


def _mask(bound: Bound) -> OutputSpec | None:
    shape = (bound.dim("N"), bound.dim("D"))
    return OutputSpec(shape, "int8", alignment=ALIGNMENT) if has_dropout(_ratio(bound)) else None


def _cut(call: Mapping[str, Any]) -> dict[str, Any]:
    """Cut the columns of a valid call down to none, to build one that breaks a rule."""
    names = ("dy_tensor", "x_tensor", "u_tensor", "weight_tensor", "bias_tensor", "mask_tensor")
    return {**call, **{name: call[name][..., :0] for name in names if call.get(name) is not None}}


DROPOUT = Option(
    "dropout_ratio",
    float,
    0.1,
    holds=_is_ratio,
    rule="be in [0, 1), rounded to float32 too",
    invalid=(-0.1, 1.0, 1 - 2.0**-30, math.nan, math.inf),
    runtime=True,
    doc="probability with which an element is dropped",
)

FLAGS = (
    Option("apply_u_silu", bool, True, doc="whether u is activated: u * sigmoid(u)"),
    Option("concat_u", bool, True, doc="whether y begins with the activated u"),
    Option("concat_x", bool, True, doc="whether x comes next in y"),
)

OPERANDS = (
    Input("x_tensor", "N D", BF16, ROWS, alignment=ALIGNMENT, doc="what is normalised"),
    Input("u_tensor", "N D", BF16, ROWS, alignment=ALIGNMENT, doc="what it is multiplied by"),
    Input("weight_tensor", "D", BF16, alignment=ALIGNMENT, doc="scale of the norm"),
    Input("bias_tensor", "D", BF16, alignment=ALIGNMENT, doc="shift of the norm"),
)

RULES = (
    Rule(
        "x_tensor",
        "have a positive multiple of 8 columns",
        holds=lambda bound: bound.dim("D") > 0 and bound.dim("D") % 8 == 0,
        given=lambda bound: f"shape {bound.given['x_tensor']}",
        fix="Pad the columns.",
        violation=_cut,
    ),
    Rule(
        "x_tensor",
        "have at most 2^31 elements",
        holds=lambda bound: bound.dim("N") * bound.dim("D") <= MOST_ELEMENTS,
        given=lambda bound: f"shape {bound.given['x_tensor']}",
        fix="Split the rows over several calls.",
    ),
)

CONTRACT = Contract(
    operation="hstu_lmsd_forward",
    inputs=OPERANDS,
    options=(
        Option(
            "eps",
            float,
            1e-6,
            holds=epsilon.holds,
            rule=epsilon.RULE,
            invalid=(0.0, -1.0, math.nan, math.inf, 1e-50, 1e300),
            runtime=True,
            doc="added to the variance",
        ),
        DROPOUT,
        Option(
            "seed",
            int,
            0,
            holds=lambda seed: isinstance(seed, int) and -(2**63) <= seed < 2**63,
            rule="be a signed integer of 64 bits",
            invalid=(2**63, -(2**63) - 1),
            runtime=True,
            doc="key of the random numbers",
        ),
        *FLAGS,
    ),
    outputs=(
        Output(
            "y_tensor",
            lambda bound: OutputSpec((bound.dim("N"), _parts(bound) * bound.dim("D")), "bfloat16", alignment=ALIGNMENT),
            doc="[activated u | x | product], what is asked for, dropped",
        ),
        Output("mean_tensor", _statistic, doc="mean of each row of x"),
        Output("rstd_tensor", _statistic, doc="1/sqrt(variance + eps) of each row of x"),
        Output("mask_tensor", _mask, doc="what was kept: bit 0 of the product, 1 of x, 2 of u; None without dropout"),
    ),
    rules=RULES,
    dynamic=("N",),
)

BACKWARD_CONTRACT = Contract(
    operation="hstu_lmsd_backward",
    inputs=(
        Input("dy_tensor", "N Y", BF16, ROWS, alignment=ALIGNMENT, doc="gradient of y"),
        *OPERANDS,
        Input("mean_tensor", "N", ("float32",), alignment=ALIGNMENT, doc="of the forward"),
        Input("rstd_tensor", "N", ("float32",), alignment=ALIGNMENT, doc="of the forward"),
        Input("mask_tensor", "N D", ("int8",), alignment=ALIGNMENT, optional=True, doc="of the forward"),
    ),
    options=(
        DROPOUT,
        *FLAGS,
        Option("compute_dweight", bool, True, doc="whether the gradient of the weight is wanted"),
    ),
    outputs=(
        Output("dx_tensor", _rows, doc="gradient of x"),
        Output("du_tensor", _rows, doc="gradient of u"),
        Output(
            "dweight_tensor",
            lambda bound: _columns(bound) if bound.options["compute_dweight"] else None,
            doc="gradient of the weight; None if it is not wanted",
        ),
        Output("dbias_tensor", _columns, doc="gradient of the bias"),
    ),
    rules=(
        *RULES,
        Rule(
            "mask_tensor",
            "be given if, and only if, dropout_ratio is above 0",
            holds=lambda bound: bound.has("mask_tensor") == has_dropout(_ratio(bound)),
            given=lambda bound: (
                f"{'an array' if bound.has('mask_tensor') else 'None'} with dropout_ratio {_ratio(bound)!r}"
            ),
            fix="Pass the mask and the ratio of the forward.",
            violation=lambda call: {**call, "dropout_ratio": 0.0 if call["mask_tensor"] is not None else 0.5},
        ),
    ),
    derived={"Y": lambda bound: _parts(bound) * bound.dim("D")},
    dynamic=("N",),
)
