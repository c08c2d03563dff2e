"""A declaration that contradicts itself is refused when it is made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fe_dummy import CONTRACT

from fe_runtime.contract import Contract, Input, Option, bind
from fe_runtime.errors import DtypeError, InvalidArgumentError, NotSupportedError


def test_names_and_kinds_of_options() -> None:
    assert CONTRACT.input_names == ("x", "weight", "bias", "mixer")
    assert CONTRACT.output_names == ("y", "total")
    assert CONTRACT.option_names == ("scale", "group", "total", "mode", "out_dtype")
    assert [option.name for option in CONTRACT.runtime_options] == ["scale"]
    assert [option.name for option in CONTRACT.static_options] == ["group", "total", "mode", "out_dtype"]


@pytest.mark.parametrize("also", ["N C", "C N", "... C 2", "C"])
def test_another_form_may_only_add_or_drop_ones(also: str) -> None:
    with pytest.raises(ValueError, match="entries 1"):
        Input("x", "... C", ("float32",), also=(also,))


@pytest.mark.parametrize("also", ["... C 1", "1 ... C", "... 1 C"])
def test_forms_with_ones_are_accepted(also: str) -> None:
    assert len(Input("x", "... C", ("float32",), also=(also,)).patterns) == 2


def test_a_rule_in_code_needs_words() -> None:
    with pytest.raises(ValueError, match="in words"):
        Option("eps", float, 1.0, holds=lambda value: bool(value))


def test_unknown_kind_of_violation() -> None:
    with pytest.raises(ValueError, match="errors names"):
        Contract("op", inputs=(), outputs=(), errors={"color": TypeError})


def test_errors_of_the_classes_that_the_contract_names() -> None:
    contract = Contract(
        "op",
        inputs=(Input("x", "2 3", ("float32",)),),
        outputs=(),
        options=(Option("mode", str, "a", choices=("a", "b"), error=NotSupportedError),),
        errors={"dtype": DtypeError, "layout": NotSupportedError, "rank": DtypeError, "shape": NotSupportedError},
    )
    x = np.zeros((2, 3), np.float32)
    for array, options, error in (
        (x[0], {}, DtypeError),
        (x[:1], {}, NotSupportedError),
        (np.asfortranarray(x), {}, NotSupportedError),
        (x.astype(np.float64), {}, DtypeError),
        (x, {"mode": "c"}, NotSupportedError),
    ):
        with pytest.raises(error, match=r"op: (x|mode) must .*; got "):
            bind(contract, (array,), options)


@pytest.mark.parametrize(
    ("errors", "error"), [({}, TypeError), ({"missing": InvalidArgumentError}, InvalidArgumentError)]
)
def test_a_missing_array_is_a_type_error_unless_the_contract_says_otherwise(
    errors: Any, error: type[Exception]
) -> None:
    contract = Contract("op", inputs=(Input("x", "N", ("float32",)),), outputs=(), errors=errors)
    with pytest.raises(error, match="op: x must be an array") as caught:
        bind(contract, (None,), {})
    assert type(caught.value) is error
