"""What the operations that take bf16 as well as block-scaled operands have in common: scales, and the rules on them.

The dtype of A decides: bfloat16 has no scales and no control of them; fp8 and packed FP4 have both scales. Further
letters: ``TM``, ``TN`` tiles of 128 rows of the scales of A and B, ``TA`` and ``TB`` their tiles of 4 scales along K,
``PS`` entries of the table of addresses of B's scales.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

from fe_gemm.dense import contract as dense
from fe_runtime._callers import user_stacklevel
from fe_runtime.contract import Bound, Input, Option, OutputSpec, Rule
from fe_runtime.errors import InvalidArgumentError, NotSupportedError, explain
from fe_runtime.formats import scale_shape, scales_per_row

from . import forms
from . import vocabulary as common

__all__ = [
    "AMAX",
    "CLAMPS",
    "DERIVED",
    "ELEMENTS",
    "FAMILY",
    "LOGICAL",
    "NORM_CONST",
    "ROWS",
    "SCALES_A",
    "SCALES_B",
    "SCALE_OPTIONS",
    "SFB_PTRS",
    "column_scales",
    "factors",
    "finite",
    "has_fp8",
    "is_scaled",
    "row_scales",
    "scale_controls",
    "scales",
    "supported",
    "warn_epilogue",
]

ELEMENTS = (*common.BF16, *dense.FP8, dense.FP4)
LOGICAL = dense.LOGICAL
QUANTISED = 32
"""Elements of a scale of a result."""


def _scale_input(name: str, shape: str, partner: str | None, doc: str) -> Input:
    return Input(
        name,
        shape,
        ("float8_e8m0fnu", "float8_e4m3fn"),
        optional=True,
        dtype_of=partner,
        view=LOGICAL,
        dtype_aliases={"uint8": "float8_e8m0fnu", "int8": "float8_e8m0fnu"},
        alignment=common.ALIGNMENT,
        doc=f"{doc}: physical form or logical view; bytes mean e8m0",
    )


SCALES_A = _scale_input("sfa_tensor", "1 TM TA 32 4 4", None, "scales of A over all rows")
SCALES_B = _scale_input("sfb_tensor", "E TN TB 32 4 4", "sfa_tensor", "scales of dense weights")
SFB_PTRS = Input(
    "sfb_ptrs",
    "PS",
    ("int64", "uint8"),
    optional=True,
    alignment=8,
    doc="addresses of the scales of the weights behind b_ptrs; uint8 in JAX only",
)
NORM_CONST = dense.NORM_CONST
ROWS = ("M", "TM")
DERIVED: dict[str, Callable[[Bound], int]] = {
    **common.DERIVED,
    **dense.TILES,
    "PS": lambda bound: bound.dim("E") * (8 if bound.dtype("sfb_ptrs") == "uint8" else 1),
}
SCALE_OPTIONS = (
    dense.vector_size(16),
    Option("discrete_col_sfd", bool, False, doc="whether column scales are one blocked layout for each expert"),
    Option(
        "use_single_group_runtime_offsets",
        bool,
        False,
        doc="whether all rows belong to the only expert, whatever padded_offsets holds",
    ),
)


def scales(a: Any, b: Any, sfa: Any, sfb: Any, vec: Any) -> tuple[Any, Any]:
    """Return the scales of A and of dense weights in the physical form or the logical view.

    Contiguous arrays of any other shape with the right number of bytes are viewed as the physical form.

    Parameters
    ----------
    a, b
        A in either form, and weights as (E, N, K), or ``None``.
    """
    if vec not in (16, 32):
        return sfa, sfb
    return _in_blocks(a, (1, 0), sfa, vec, 1), _in_blocks(b, (2, 1), sfb, vec, None)


def _in_blocks(x: Any, at: tuple[int, int], scale: Any, vec: int, batch: int | None) -> Any:
    shape = getattr(x, "shape", None)
    if scale is None or shape is None or len(shape) <= max(at):
        return scale
    depth = 2 * shape[at[0]] if forms.is_packed(x) and forms.dtype_name(x) != "float4_e2m1fn" else shape[at[0]]
    physical = scale_shape(shape[at[1]], scales_per_row(depth, vec), shape[0] if batch is None else batch)
    return forms.blocked_scales(scale, physical)


def row_scales(bound: Bound, width: int) -> OutputSpec:
    """Return the scales of a result (M, ``width``) in blocks along its rows."""
    return _result_scales(bound, bound.dim("M"), width)


def column_scales(bound: Bound, width: int) -> OutputSpec:
    """Return the scales of a result (M, ``width``) in blocks along its columns: those of (``width``, M)."""
    return _result_scales(bound, width, bound.dim("M"))


def _result_scales(bound: Bound, rows: int, depth: int) -> OutputSpec:
    shape = (1, dense.blocks(rows, 128), dense.blocks(dense.blocks(depth, QUANTISED), 4), 32, 4, 4)
    view = LOGICAL if common.is_legacy(bound) else ()
    aliases = ("uint8", "int8")
    return OutputSpec(shape, "float8_e8m0fnu", view=view, alignment=common.ALIGNMENT, byte_aliases=aliases)


def is_scaled(bound: Bound) -> bool:
    """Whether the operands are block-scaled."""
    return bound.dtype("a_tensor") != "bfloat16"


def has_fp8(bound: Bound) -> bool:
    """Whether the operands are fp8."""
    return bound.dtype("a_tensor") in dense.FP8


# --- rules


def _absent(name: str) -> Rule:
    return Rule(
        name,
        "be left out for bfloat16 operands",
        holds=lambda bound: is_scaled(bound) or not bound.has(name),
        given=lambda _bound: "an array",
        fix="Only block-scaled operands have scales.",
    )


AMAX = Rule(
    "amax_tensor",
    "be left out for bfloat16 operands",
    holds=lambda bound: is_scaled(bound) or not bound.options["with_amax"],
    given=lambda _bound: "an array",
    fix="Only block-scaled operands have a largest magnitude.",
)


def _at_default(name: str, default: object) -> Rule:
    return Rule(
        name,
        f"be left at {default} for bfloat16 operands",
        holds=lambda bound: is_scaled(bound) or bound.options[name] == default,
        given=lambda bound: repr(bound.options[name]),
        fix="Only block-scaled operands have scales.",
    )


def _belongs(name: str, partner: str) -> Rule:
    return Rule(
        name,
        f"be given with {partner} of fp8 or FP4, and only then",
        holds=lambda bound: not is_scaled(bound) or bound.has(name) == bound.has(partner),
        given=lambda bound: "an array" if bound.has(name) else "None",
        fix="Scales come as the weights do.",
    )


FAMILY = (
    *(_absent(name) for name in ("sfa_tensor", "sfb_tensor", "sfb_ptrs", "norm_const_tensor")),
    _at_default("sf_vec_size", 16),
    _at_default("discrete_col_sfd", False),
    _at_default("use_single_group_runtime_offsets", False),
    Rule(
        "sfa_tensor",
        "be given for fp8 and FP4 operands",
        holds=lambda bound: not is_scaled(bound) or bound.has("sfa_tensor"),
        given=lambda _bound: "None",
        fix="Pass the blocked scales.",
    ),
    _belongs("sfb_tensor", "b_tensor"),
    _belongs("sfb_ptrs", "b_ptrs"),
    *dense.BLOCK_FORMAT,
    Rule(
        "sfb_ptrs",
        "hold int64 addresses (bytes are for JAX arrays)",
        holds=lambda bound: bound.dtype("sfb_ptrs") != "uint8" or bound.framework == "jax",
        given=lambda bound: bound.dtype("sfb_ptrs"),
        fix="Pass int64 of shape (E,).",
    ),
    Rule(
        "b_major",
        'be "k" for FP4: pairs lie along K',
        holds=lambda bound: bound.dtype("a_tensor") != dense.FP4 or bound.options["b_major"] == "k",
        given=lambda bound: repr(bound.options["b_major"]),
        fix="Store the weights by rows.",
    ),
    Rule(
        "use_single_group_runtime_offsets",
        "be False for more than one expert",
        holds=lambda bound: not bound.options["use_single_group_runtime_offsets"] or bound.dim("E") == 1,
        given=lambda bound: f"E = {bound.dim('E')}",
        fix="Leave it out.",
    ),
    Rule(
        "prob_tensor",
        "be given for bfloat16 operands, in float32",
        holds=lambda bound: is_scaled(bound) or bound.dtype("prob_tensor") == "float32",
        given=lambda bound: bound.dtype("prob_tensor") or "None",
        fix="Pass ones of shape (M,) for no factor.",
    ),
)
"""What the dtype of the operands asks for and forbids."""


def supported(argument: str, rule: str, holds: Callable[[Bound], bool], given: Callable[[Bound], object]) -> Rule:
    """Return a rule on what could be meant, but is served by nobody."""
    return Rule(argument, rule, holds=holds, given=given, fix="Pass another dtype.", error=NotSupportedError)


def finite(name: str, act: str, positive: bool = True) -> Rule:
    """Return the rule that a factor of one activation is finite (and positive)."""

    def holds(bound: Bound) -> bool:
        value = float(str(bound.options[name]))
        used = str(bound.options["act_func"]).endswith(act)
        return not used or (math.isfinite(value) and (value > 0 or not positive))

    rule = "be finite and positive" if positive else "be finite"
    return Rule(name, rule, holds=holds, given=lambda bound: bound.options[name], fix="Leave it out for the default.")


def scale_controls(operation: str, override: Any, fp8_override: str = "sf_fp8_dtype_override") -> None:
    """Raise ``InvalidArgumentError`` for another dtype of scales, which no GPU that is served has."""
    if override is not None:
        rule = "be None: no GPU that is served has another dtype for scales"
        raise InvalidArgumentError(explain(operation, fp8_override, rule, repr(override), "Leave it out."))


def factors(offset: Any, alpha: Any, clamp_max: Any, clamp_min: Any, beta1: Any, beta2: Any) -> dict[str, Any]:
    """Return the options :data:`CLAMPS` by name."""
    names = ("linear_offset", "geglu_alpha", "glu_clamp_max", "glu_clamp_min", "situ_beta1", "situ_beta2")
    return dict(zip(names, (offset, alpha, clamp_max, clamp_min, beta1, beta2), strict=True))


def warn_epilogue(operation: str, name: str) -> None:
    """Warn, once in a process, that an epilogue that is accepted is not applied."""
    if not _warned:
        _warned.append(name)
        text = f"{operation}: epilogue_op={name!r} is accepted and not applied, as by the peer."
        warnings.warn(text, RuntimeWarning, stacklevel=user_stacklevel())


_warned: list[str] = []


def _number(name: str, default: float, doc: str, runtime: bool = True) -> Option:
    return Option(name, float, default, runtime=runtime, doc=doc)


CLAMPS = (
    Option(
        "linear_offset",
        float,
        runtime=True,
        resolve=lambda bound: 1.0 if str(bound.options["act_func"]).endswith("geglu") else 0.0,
        doc="what geglu adds to the clamped up. None: 1",
    ),
    _number("geglu_alpha", 1.702, "factor inside the sigmoid of geglu"),
    _number("glu_clamp_max", 7.0, "geglu: upper bound of gate and up"),
    _number("glu_clamp_min", -7.0, "geglu: lower bound of up"),
    _number("situ_beta1", 4.0, "situglu: bound of the gate; part of the compiled code", runtime=False),
    _number("situ_beta2", 25.0, "situglu: bound of up"),
)
"""Factors of the activations."""
