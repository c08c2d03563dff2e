"""What ``causal_conv1d`` and its gradient accept and return, for x with the channels before or behind the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fe_runtime import env
from fe_runtime.contract import ANY_LAYOUT, UNIT_INNER, Bound, Contract, Input, Option, Output, OutputSpec, Rule
from fe_runtime.errors import DtypeError, InvalidArgumentError, NotSupportedError, explain
from fe_runtime.values import Read

__all__ = ["backward_contract", "check_offsets", "forward_contract", "sequences"]

FLOATS = ("bfloat16", "float16", "float32", "float64")
NAMES = {False: "causal_conv1d", True: "causal_conv1d_channel_last"}


def forward_contract(channel_last: bool) -> Contract:
    """Return the contract of the forward operation; ``channel_last``: x is (B, T, D), else (B, D, T)."""
    return Contract(
        operation=NAMES[channel_last],
        inputs=(Input("x", _shape(channel_last), FLOATS, UNIT_INNER, doc="input"), *_OPERANDS),
        options=(
            _ACTIVATION,
            Option("return_final_states", bool, False, doc="whether to return the end of every sequence"),
        ),
        outputs=(
            Output("y", lambda bound: OutputSpec(_extents(bound, "x"), bound.arrays["x"].dtype), doc="result"),
            Output("final_states", _final_states, doc="last W-1 values of every sequence and the history before it"),
        ),
        rules=(
            *_RULES,
            Rule(
                "seq_idx",
                "be None with return_final_states=True",
                holds=lambda bound: not (bound.has("seq_idx") and bound.options["return_final_states"]),
                given=lambda bound: f"an array of shape {bound.given['seq_idx']}",
                fix="Labels do not say where a sequence ends: use cu_seqlens for states.",
                violation=lambda call: _with_labels(call, return_final_states=True),
            ),
        ),
        dynamic=("B", "T", "S", "N+1"),
        errors={"dtype": DtypeError},
    )


def backward_contract(channel_last: bool) -> Contract:
    """Return the contract of the gradient: those of the outputs, then the inputs of the forward operation."""
    shape = _shape(channel_last)
    return Contract(
        operation=f"{NAMES[channel_last]}_backward",
        inputs=(
            Input("dy", shape, FLOATS, UNIT_INNER, doc="gradient of y"),
            Input("dfinal", "S W-1 D", FLOATS, optional=True, dtype_of="dy", doc="gradient of final_states"),
            Input("x", shape, FLOATS, UNIT_INNER, dtype_of="dy", doc="input"),
            *_OPERANDS,
        ),
        options=(_ACTIVATION,),
        outputs=(
            Output("dx", lambda bound: OutputSpec(_extents(bound, "x"), bound.arrays["x"].dtype), doc="gradient of x"),
            Output("dweight", lambda bound: _like(bound, "weight"), doc="gradient of weight"),
            Output("dbias", lambda bound: _like(bound, "bias"), doc="gradient of bias"),
            Output("dinitial", lambda bound: _like(bound, "initial_states"), doc="gradient of initial_states"),
        ),
        rules=(*_RULES, _states_rule("dfinal")),
        dynamic=("B", "T", "S", "N+1"),
        errors={"dtype": DtypeError},
    )


def sequences(bound: Bound) -> int:
    """Return the number of sequences of a call: batch rows, or members of the packed row."""
    return bound.dim("N+1") - 1 if bound.has("cu_seqlens") else bound.dim("B")


def check_offsets(bound: Bound, read: Read) -> None:
    """Raise for offsets that decrease or leave the tokens; in checked mode also for tokens that are in no sequence.

    Raises
    ------
    InvalidArgumentError
        Naming the first offset that is wrong.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: causal_conv1d, checks.
    """
    if not bound.has("cu_seqlens"):
        return
    offsets, tokens = read("cu_seqlens"), bound.dim("T")
    wrong = (offsets < 0) | (offsets > tokens) | (np.diff(offsets, prepend=offsets[:1]) < 0)
    rule = f"hold offsets from 0 to T = {tokens} that never decrease"
    if env.check_device_values() and not wrong.any():
        rule = f"begin with 0 and end with T = {tokens} in checked mode"
        wrong[0], wrong[-1] = offsets[0] != 0, offsets[-1] != tokens
    if wrong.any():
        at = int(np.argmax(wrong))
        fix = "Pass the cumulative lengths of the sequences: 0 first, T last."
        raise InvalidArgumentError(explain(bound.operation, "cu_seqlens", rule, f"{offsets[at]} at index {at}", fix))


def _shape(channel_last: bool) -> str:
    return "B T D" if channel_last else "B D T"


def _extents(bound: Bound, name: str) -> tuple[int, ...]:
    return tuple(bound.arrays[name].shape)


def _like(bound: Bound, name: str) -> OutputSpec | None:
    return OutputSpec(_extents(bound, name), bound.arrays[name].dtype) if bound.has(name) else None


def _final_states(bound: Bound) -> OutputSpec | None:
    if not bound.options["return_final_states"]:
        return None
    return OutputSpec((sequences(bound), bound.dim("W") - 1, bound.dim("D")), bound.arrays["x"].dtype)


def _states_rule(name: str) -> Rule:
    """Return the rule on the extents of an array of states that its letters alone do not say."""
    return Rule(
        name,
        "have a row for each sequence (batch row, or member of cu_seqlens) and W-1 values a channel",
        holds=lambda bound: not bound.has(name) or (bound.dim("S"), bound.dim("W-1")) == _states(bound),
        given=lambda bound: f"shape {bound.given[name]}, where S = {_states(bound)[0]} and W-1 = {_states(bound)[1]}",
        fix="Its extents must agree with x, weight and cu_seqlens.",
        violation=lambda call: _with_another_row(call, name),
    )


def _states(bound: Bound) -> tuple[int, int]:
    return sequences(bound), bound.dim("W") - 1


def _has_dtype_for(bound: Bound) -> bool:
    x, weight = bound.arrays["x"].dtype, bound.arrays["weight"].dtype
    return weight == x or (x, weight) == ("bfloat16", "float32")


def _with_one_tap(call: Mapping[str, Any]) -> Mapping[str, object]:
    return {**call, "weight": call["weight"][:, :1].copy()}


def _with_half_weight(call: Mapping[str, Any]) -> Mapping[str, object]:
    return {**call, "weight": call["weight"].astype(np.float16)}


def _with_another_row(call: Mapping[str, Any], name: str) -> Mapping[str, object]:
    """Return a call whose only states have one row more than there are sequences."""
    others = {other: None for other in ("dfinal", "initial_states") if other in call}
    return {**call, **others, name: np.concatenate([call[name], call[name][:1]])}


def _with_two_packed_rows(call: Mapping[str, Any]) -> Mapping[str, object]:
    doubled = {name: np.concatenate([call[name]] * 2) for name in ("dy", "x") if name in call}
    return {**call, **doubled, "seq_idx": None, "cu_seqlens": np.array([0, 1], np.int32)}


def _with_labels(call: Mapping[str, Any], **others: object) -> dict[str, object]:
    channels = call["weight"].shape[0]
    batch, *extents = call["x"].shape
    length = extents[0] if extents[1] == channels else extents[1]
    absent = {name: None for name in ("cu_seqlens", "dfinal", "initial_states") if name in call}
    return {**call, **absent, "seq_idx": np.zeros((batch, length), np.int32), **others}


def _with_labels_and_states(call: Mapping[str, Any]) -> Mapping[str, object]:
    channels, width = call["weight"].shape
    return _with_labels(call, initial_states=np.zeros((len(call["x"]), channels, width - 1), call["x"].dtype))


_OPERANDS = (
    Input("weight", "D W", FLOATS, doc="filter of each channel, newest tap last"),
    Input("bias", "D", FLOATS, optional=True, dtype_of="x", doc="added before the activation"),
    Input("seq_idx", "B T", ("int32",), optional=True, doc="labels: taps count within one label; negative: padding"),
    Input("cu_seqlens", "N+1", ("int32", "int64"), optional=True, doc="offsets of the packed sequences"),
    Input("initial_states", "S D W-1", FLOATS, ANY_LAYOUT, optional=True, dtype_of="x", doc="history of each sequence"),
)

_ACTIVATION = Option(
    "activation",
    str,
    choices=("identity", "silu"),
    aliases={"swish": "silu"},
    resolve=lambda _bound: "identity",
    error=NotSupportedError,
    doc="applied to the sum; None: identity",
)

_RULES = (
    Rule(
        "weight",
        "have at least two taps",
        holds=lambda bound: bound.dim("W") >= 2,
        given=lambda bound: f"shape {bound.given['weight']}",
        fix="A filter of one tap is a product.",
        violation=_with_one_tap,
    ),
    Rule(
        "weight",
        "have the dtype of x, or float32 where x is bfloat16",
        holds=_has_dtype_for,
        given=lambda bound: f"{bound.arrays['weight'].dtype} with x {bound.arrays['x'].dtype}",
        fix="Convert it first.",
        error=DtypeError,
        violation=_with_half_weight,
    ),
    Rule(
        "seq_idx",
        "be None with cu_seqlens",
        holds=lambda bound: not (bound.has("seq_idx") and bound.has("cu_seqlens")),
        given=lambda bound: f"an array of shape {bound.given['seq_idx']}",
        fix="Say in one way which tokens belong together.",
        violation=lambda call: _with_labels(call, cu_seqlens=np.array([0, 1], np.int32)),
    ),
    Rule(
        "seq_idx",
        "be None with initial_states",
        holds=lambda bound: not (bound.has("seq_idx") and bound.has("initial_states")),
        given=lambda bound: f"an array of shape {bound.given['seq_idx']}",
        fix="Use cu_seqlens for sequences with a history.",
        error=NotSupportedError,
        violation=_with_labels_and_states,
    ),
    Rule(
        "x",
        "have one batch row with cu_seqlens",
        holds=lambda bound: not bound.has("cu_seqlens") or bound.dim("B") == 1,
        given=lambda bound: f"shape {bound.given['x']}",
        fix="Pack the sequences one after the other along the tokens.",
        violation=_with_two_packed_rows,
    ),
    Rule(
        "cu_seqlens",
        "hold at least two offsets",
        holds=lambda bound: not bound.has("cu_seqlens") or bound.dim("N+1") >= 2,
        given=lambda bound: f"shape {bound.given['cu_seqlens']}",
        fix="Pass the start of the first sequence and the end of each.",
        violation=lambda call: {**call, "seq_idx": None, "cu_seqlens": np.zeros(1, np.int32)},
    ),
    _states_rule("initial_states"),
)
