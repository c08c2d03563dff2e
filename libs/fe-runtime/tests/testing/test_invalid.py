"""The list of invalid calls is complete, each is rejected by the contract alone, and bad rejections are found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fe_dummy import CONTRACT

from fe_runtime.contract import Contract, Input, Option, bind
from fe_runtime.errors import InvalidArgumentError, explain
from fe_runtime.testing import Call, InvalidCall, assert_rejected, invalid_calls

X, W = np.ones((2, 3, 8), np.float32), np.ones(8, np.float32)
EXAMPLE = Call(
    (X, W, W.copy(), np.zeros((8, 8, 2), np.int32)),
    {"scale": 1.5, "group": 2, "total": True, "mode": "plain", "out_dtype": None},
)
CALLS = invalid_calls(CONTRACT, EXAMPLE)
IDS = {call.id for call in CALLS}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.id)
def test_each_is_rejected(call: InvalidCall) -> None:
    assert_rejected(lambda arrays, options: bind(CONTRACT, arrays, options), "scale_rows", call)


@pytest.mark.parametrize(
    "expected",
    [
        "x-list",
        "x-None",
        "bias-number",
        "x-rank0",
        "weight-rank0",
        "weight-rank3",
        "mixer-rank2",
        "weight-extent0",
        "bias-extent0",
        "mixer-extent1",
        "mixer-extent2",
        "x-strides(48,16,2)",
        "weight-strides(2,)",
        "weight-strides(-1,)",
        "x-int32",
        "x-float8_e4m3fn",
        "bias-float16",
        "mixer-bool",
        "scale-str-1",
        "scale-NoneType-None",
        "scale-float-nan",
        "group-float-1.5",
        "group-int--4",
        "total-int-1",
        "mode-str-no_such_choice",
        "out_dtype-str-no_such_dtype",
        "out_dtype-str-float64",
        "rule0-group",
    ],
)
def test_nothing_is_forgotten(expected: str) -> None:
    assert expected in IDS


def test_what_is_allowed_is_not_listed() -> None:
    assert not IDS & {
        "bias-None",
        "x-extent0",
        "x-extent2",
        "x-rank1",
        "weight-float64",
        "group-NoneType-None",
        "x-framework",
    }
    assert not {label for label in IDS if label.startswith("out_dtype-str-bfloat16")}


def test_another_framework_if_it_is_loaded() -> None:
    pytest.importorskip("torch")
    labels = {call.id for call in invalid_calls(CONTRACT, EXAMPLE)}
    assert {"weight-framework", "bias-framework", "mixer-framework"} <= labels


def test_absent_optional_inputs_are_left_alone() -> None:
    calls = invalid_calls(CONTRACT, EXAMPLE._replace(arrays=(X, W, None, None)))
    labels = {call.id for call in calls if call.argument == "bias"}
    assert labels == {"bias-list", "bias-number", "bias-string"}


def test_the_example_must_be_valid() -> None:
    with pytest.raises(InvalidArgumentError):
        invalid_calls(CONTRACT, EXAMPLE._replace(options={"scale": -1.0}))


def test_integers_outside_their_choices() -> None:
    contract = Contract("op", (Input("x", "C", ("float32",)),), (), (Option("n", int, 2, choices=(1, 2, -7)),))
    (value,) = (call.options["n"] for call in invalid_calls(contract, Call((W,), {})) if call.id.startswith("n-int"))
    assert value not in (1, 2, -7)


# A rejection may be wrong in many ways


BAD = InvalidCall("bad", (X,), {}, InvalidArgumentError, "x")
GOOD_TEXT = explain("op", "x", "be odd", "even")


def complaint(run: Any, call: InvalidCall = BAD, **keywords: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        assert_rejected(run, "op", call, **keywords)
    return str(caught.value)


def raising(error: Exception) -> Any:
    def run(arrays: Any, options: Any) -> None:
        raise error

    return run


def test_a_good_rejection() -> None:
    assert_rejected(raising(InvalidArgumentError(GOOD_TEXT)), "op", BAD)


@pytest.mark.parametrize("kind", [ValueError, TypeError, RuntimeError])
def test_the_class_must_be_exact(kind: type[Exception]) -> None:
    assert "instead of InvalidArgumentError" in complaint(raising(kind(GOOD_TEXT)))


def test_an_accepted_call() -> None:
    assert complaint(lambda arrays, options: None) == "bad: was accepted instead of raising InvalidArgumentError"


@pytest.mark.parametrize(
    "text", ["x must be odd; got even", "op: y must be odd; got even", "op: x must be odd", "x is odd"]
)
def test_the_text_must_name_operation_argument_and_value(text: str) -> None:
    assert "the text must start with 'op: x must '" in complaint(raising(InvalidArgumentError(text)))


def test_nothing_may_be_written() -> None:
    def writing(arrays: Any, options: Any) -> None:
        (arrays[0] if target is None else target)[...] = 9
        raise InvalidArgumentError(GOOD_TEXT)

    torch = pytest.importorskip("torch")
    for output in (np.zeros(3), torch.zeros(3)):
        target = output
        assert "an operand changed" in complaint(writing, outputs=[output])
    target = None
    call = InvalidCall("bad", (X.copy(),), {}, InvalidArgumentError, "x")
    assert "an operand changed" in complaint(writing, call)
