"""What ``grouped_gemm_wgrad`` accepts and returns.

Letters: ``T`` tokens, ``M`` and ``N`` the extents of a weight's gradient, ``E`` experts, ``P`` entries of a table of
addresses, ``SA`` and ``SB`` bytes of the scales, which come flat. B of packed FP4, whose pairs lie along T, is the
input ``bt_tensor``, (N, T): JAX has no other way to hold it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fe_gemm.dense import contract as dense
from fe_gemm.planning.grouped_wgrad import TOKENS
from fe_runtime.contract import Bound, Contract, Input, Option, Output, OutputSpec, Rule, compact
from fe_runtime.dtypes import bits
from fe_runtime.errors import InvalidArgumentError, explain
from fe_runtime.values import Read

from . import vocabulary as common

__all__ = ["CONTRACT", "ORDERS", "check_values", "scale_bytes"]

ORDERS = ("tensor2d", "tensor_ragged")
FLOATS = ("bfloat16", *dense.FP8)

A_LAYOUT = compact("token- or row-major", "be contiguous along T or along M", "Pass a copy.", (0, 1), (1, 0))
B_LAYOUT = compact("n- or token-major", "be contiguous along N or along T", "Pass a copy.", (0, 1), (1, 0))


def is_scaled(bound: Bound) -> bool:
    """Whether the operands are block-scaled."""
    return bound.dtype("a_tensor") != "bfloat16"


def scale_bytes(rows: int, tokens: int, vec: int) -> int:
    """Return the bytes of the scales of (``rows``, ``tokens``) in one blocked layout for each expert."""
    return 128 * dense.blocks(rows, 128) * 4 * dense.blocks(dense.blocks(tokens, vec), 4)


def _vec(bound: Bound) -> int:
    return int(str(bound.options["sf_vec_size"]))


def _wgrad(bound: Bound) -> OutputSpec | None:
    if bound.has("wgrad_ptrs"):
        return None
    shape = (bound.dim("E"), bound.dim("M"), bound.dim("N"))
    accumulate = "add" if bound.options["accumulate_on_output"] else ""
    return OutputSpec(shape, common.text(bound, "wgrad_dtype"), accumulate=accumulate, alignment=common.ALIGNMENT)


def _token(bound: Bound) -> OutputSpec | None:
    if not bound.has("wgrad_ptrs") or bound.framework != "jax":
        return None
    return OutputSpec((bound.dim("M"), bound.dim("N")), common.text(bound, "wgrad_dtype"))


def _scales(name: str, letter: str, partner: str | None, doc: str) -> Input:
    return Input(
        name,
        letter,
        ("float8_e8m0fnu", "float8_e4m3fn"),
        optional=True,
        dtype_of=partner,
        dtype_aliases={"uint8": "float8_e8m0fnu", "int8": "float8_e8m0fnu"},
        alignment=common.ALIGNMENT,
        doc=f"{doc}, one blocked layout for each expert, all bytes in order",
    )


def _forbidden_without_scales(name: str) -> Rule:
    return Rule(
        name,
        "be left out for bfloat16 operands",
        holds=lambda bound: is_scaled(bound) or not bound.has(name),
        given=lambda _bound: "an array",
        fix="Only block-scaled operands have scales.",
    )


def _needs_global_scales(bound: Bound) -> bool:
    return bound.dtype("a_tensor") == dense.FP4 and bound.dtype("sfa_tensor") == "float8_e4m3fn"


RULES = (
    Rule(
        "b_tensor",
        "be given",
        holds=lambda bound: bound.has("b_tensor") != bound.has("bt_tensor"),
        given=lambda _bound: "None",
        fix="Pass (T, N).",
    ),
    Rule(
        "b_tensor",
        "have the dtype of a_tensor: FP4 pairs lie along T",
        holds=lambda bound: bound.has("bt_tensor") == (bound.dtype("a_tensor") == dense.FP4),
        given=lambda bound: f"{bound.dtype('b_tensor') or bound.dtype('bt_tensor')} for {bound.dtype('a_tensor')}",
        fix="Convert one of them.",
    ),
    *(_forbidden_without_scales(name) for name in ("sfa_tensor", "sfb_tensor", "global_scale_a", "global_scale_b")),
    Rule(
        "sf_vec_size",
        "be left at 16 for bfloat16 operands",
        holds=lambda bound: is_scaled(bound) or _vec(bound) == 16,
        given=lambda bound: _vec(bound),
        fix="Only block-scaled operands have scales.",
    ),
    *(
        Rule(
            name,
            "be given for fp8 and FP4 operands",
            holds=lambda bound, name=name: not is_scaled(bound) or bound.has(name),  # type: ignore[misc]
            given=lambda _bound: "None",
            fix="Pass the packed scales.",
        )
        for name in ("sfa_tensor", "sfb_tensor")
    ),
    *dense.BLOCK_FORMAT,
    Rule(
        "global_scale_a",
        "be given together with global_scale_b",
        holds=lambda bound: bound.has("global_scale_a") == bound.has("global_scale_b"),
        given=lambda _bound: "one of them",
        fix="Pass both or neither.",
    ),
    Rule(
        "global_scale_a",
        "be given for NVFP4 operands",
        holds=lambda bound: bound.has("global_scale_a") or not _needs_global_scales(bound),
        given=lambda _bound: "None",
        fix="Pass the decode factors of both tensors, one for each expert.",
    ),
    Rule(
        "offsets_tensor",
        f"have from 1 to {common.MAX_EXPERTS} entries",
        holds=lambda bound: 1 <= bound.dim("E") <= common.MAX_EXPERTS,
        given=lambda bound: f"E = {bound.dim('E')}",
        fix="Split the experts over several calls.",
    ),
    Rule(
        "a_tensor",
        "have M > 0",
        holds=lambda bound: bound.dim("M") > 0,
        given=lambda bound: f"shape {bound.given['a_tensor']}",
        fix="There is no gradient to compute.",
    ),
    Rule(
        "b_tensor",
        "have N > 0 with results' rows of a multiple of 16 bytes",
        holds=lambda bound: (
            bound.dim("N") > 0 and bound.dim("N") * bits(common.text(bound, "wgrad_dtype")) % (8 * 16) == 0
        ),
        given=lambda bound: f"N = {bound.dim('N')} of {bound.options['wgrad_dtype']}",
        fix="Pad N.",
    ),
    Rule(
        "wgrad_ptrs",
        "hold int64 addresses (bytes are for JAX arrays)",
        holds=lambda bound: bound.dtype("wgrad_ptrs") != "uint8" or bound.framework == "jax",
        given=lambda bound: bound.dtype("wgrad_ptrs"),
        fix="Pass int64 of shape (E,).",
    ),
)

CONTRACT = Contract(
    operation="grouped_gemm_wgrad",
    inputs=(
        Input("a_tensor", "M T", (*FLOATS, dense.FP4), A_LAYOUT, pairs=1, alignment=16, doc="gradients of the outputs"),
        Input("b_tensor", "T N", FLOATS, B_LAYOUT, optional=True, dtype_of="a_tensor", alignment=16, doc="activations"),
        Input(
            "bt_tensor",
            "N T",
            (dense.FP4,),
            common.ROW_MAJOR,
            optional=True,
            dtype_of="a_tensor",
            pairs=1,
            alignment=16,
            doc="B of packed FP4, transposed",
        ),
        _scales("sfa_tensor", "SA", None, "scales of A"),
        _scales("sfb_tensor", "SB", "sfa_tensor", "scales of B"),
        Input("offsets_tensor", "E", ("int32",), doc="the token after the last one of each expert, non-decreasing"),
        common.table("wgrad_ptrs", "addresses of (M, N) results, in place of a new one; uint8 in JAX only"),
        Input("global_scale_a", "E", ("float32",), optional=True, doc="factor of each expert"),
        Input("global_scale_b", "E", ("float32",), optional=True, doc="factor of each expert"),
    ),
    options=(
        common.ACCUMULATOR,
        common.stored_dtype("wgrad_dtype", doc="dtype of the gradients"),
        dense.vector_size(16),
        Option("accumulate_on_output", bool, False, doc="whether to add to what the results hold"),
        Option("input_order", str, "tensor2d", choices=ORDERS, doc="how tokens that are side by side lie"),
    ),
    outputs=(
        Output(
            "wgrad_tensor",
            _wgrad,
            doc="gradients (E, M, N), without addresses",
            onto=lambda options: "add" if options["accumulate_on_output"] else "",
        ),
        Output("token", _token, doc="JAX, with addresses: ready when the gradients are"),
    ),
    rules=RULES,
    dynamic=("T", "SA", "SB"),
    errors=common.ERRORS,
    derived={
        "P": lambda bound: bound.dim("E") * (8 if bound.dtype("wgrad_ptrs") == "uint8" else 1),
        "SA": lambda bound: scale_bytes(bound.dim("M"), bound.dim("T"), _vec(bound)),
        "SB": lambda bound: scale_bytes(bound.dim("N"), bound.dim("T"), _vec(bound)),
    },
)


def check_values(bound: Bound, read: Read) -> None:
    """Raise ``InvalidArgumentError`` for offsets that decrease, exceed the tokens, cut a tile of scales or, on a GPU,
    begin groups where contiguous tokens cannot be loaded, and for null addresses."""
    offsets = read("offsets_tensor")
    common.check_offsets(bound, "offsets_tensor", offsets, bound.dim("T"), "tokens")
    if is_scaled(bound):
        common.check_tiles(bound, "offsets_tensor", offsets, 4 * _vec(bound))
    elif bound.device.type == "cuda" and _has_contiguous_tokens(bound):
        _check_starts(bound, offsets)
    if bound.has("wgrad_ptrs"):
        common.check_addresses(bound, "wgrad_ptrs", read("wgrad_ptrs"))


def _has_contiguous_tokens(bound: Bound) -> bool:
    """Whether an operand has the tokens of a row side by side."""
    a, b = bound.arrays["a_tensor"], bound.arrays["b_tensor"]
    return a.stride[1] == 1 or b.stride[0] == 1


def _check_starts(bound: Bound, offsets: Any) -> None:
    """Raise unless groups with tokens begin at multiples of 16 bytes."""
    whole = np.concatenate([[0], offsets])
    cut = np.flatnonzero((whole[:-1] % TOKENS != 0) & (np.diff(whole) > 0))
    if cut.size:
        at = int(cut[0]) - 1
        rule = f"be multiples of {TOKENS} before another group, where tokens lie side by side in memory"
        fix = "Pass transposed views of (T, M) and (T, N) tensors, or pad each expert's tokens with zeros."
        given = f"{int(offsets[at])} at entry {at}"
        raise InvalidArgumentError(explain(bound.operation, "offsets_tensor", rule, given, fix))
