"""What the generator draws: it must be valid, varied, and follow the test's wishes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fe_dummy import CONTRACT, OPERATION
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis.errors import NoSuchExample, Unsatisfiable

from fe_runtime.contract import ANY_LAYOUT, CONTIGUOUS, UNIT_INNER, Contract, Input, Option, Rule, bind
from fe_runtime.errors import InvalidArgumentError
from fe_runtime.testing import Call, valid_calls
from fe_runtime.testing.generate import strides_for

SEARCH = settings(max_examples=2000, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))


@given(valid_calls(CONTRACT))
def test_every_call_is_accepted_and_computes(call: Call) -> None:
    bound = bind(CONTRACT, call.arrays, call.options)
    result = OPERATION(call.arrays, call.options)
    for spec, output in zip(bound.outputs, result, strict=True):
        assert (spec is None) == (output is None)
        if spec is not None:
            assert (output.shape, output.dtype.name) == (spec.shape, spec.dtype)


def strides(array: np.ndarray) -> tuple[int, ...]:
    return tuple(step // array.itemsize for step in array.strides)


@pytest.mark.parametrize(
    "seen",
    [
        lambda x, call: x.ndim == 1,
        lambda x, call: x.ndim == 4,
        lambda x, call: x.size == 0,
        lambda x, call: x.shape[-1] == 1,
        lambda x, call: x.shape[-1] % 2 == 1 and x.shape[-1] > 1,
        lambda x, call: x.ndim > 1 and x.size > 1 and not x.flags.c_contiguous,
        lambda x, call: x.ndim > 1 and x.shape[0] > 1 and strides(x)[0] == 0,
        lambda x, call: x.dtype.name == "bfloat16",
        lambda x, call: call.arrays[1].dtype.name == "float64",
        lambda x, call: call.arrays[1].ndim == 2,
        lambda x, call: call.arrays[2] is None and call.arrays[3] is None,
        lambda x, call: call.arrays[2] is not None and call.arrays[3] is not None,
        lambda x, call: call.options["scale"] != 1.0,
        lambda x, call: call.options["group"] is not None,
        lambda x, call: call.options["total"] is False,
        lambda x, call: call.options["mode"] == "exotic",
        lambda x, call: call.options["out_dtype"] == "half",
        lambda x, call: call.options["out_dtype"] is None,
    ],
    ids=lambda _: "",
)
def test_all_that_a_contract_allows_is_drawn(seen: Any) -> None:
    find(valid_calls(CONTRACT), lambda call: bool(seen(call.arrays[0], call)), settings=SEARCH)


@given(valid_calls(CONTRACT))
def test_dependent_dtypes_and_options_that_a_rule_forbids(call: Call) -> None:
    x, _, bias, _ = call.arrays
    assert x is not None
    assert bias is None or bias.dtype == x.dtype
    assert x.shape[-1] % (call.options["group"] or 1) == 0  # type: ignore[operator]


@given(valid_calls(CONTRACT, extents={"C": (48,), "...": (2, 4)}, options={"mode": ("plain",), "scale": (0.5,)}))
def test_the_tests_wishes(call: Call) -> None:
    x = call.arrays[0]
    assert x is not None
    assert x.shape[-1] == 48
    assert set(x.shape[:-1]) <= {2, 4}
    assert (call.options["mode"], call.options["scale"]) == ("plain", 0.5)


def test_the_tests_values() -> None:
    def values(name: str, shape: tuple[int, ...], dtype: str, random: np.random.Generator) -> np.ndarray:
        return np.full(shape, {"x": 3.0, "weight": 5.0}.get(name, 0.0))

    call = find(
        valid_calls(CONTRACT, values=values),
        lambda call: call.arrays[0].size > 0 and call.arrays[1].size > 0,  # type: ignore[union-attr]
        settings=SEARCH,
    )
    assert (call.arrays[0] == 3).all()  # type: ignore[union-attr]
    assert (call.arrays[1] == 5).all()  # type: ignore[union-attr]


def test_a_contract_that_rejects_its_own_declaration_fails_the_test() -> None:
    # The default is not among the choices, so a call without the option raises.
    broken = replace(CONTRACT, options=(Option("mode", str, "missing", choices=("a",)),), rules=(), outputs=())

    @settings(database=None, phases=[Phase.generate])
    @given(valid_calls(broken))
    def check(call: Call) -> None:
        pass

    with pytest.raises(InvalidArgumentError, match="mode must be a; got 'missing'"):
        check()


def test_a_rule_that_nothing_satisfies_is_reported() -> None:
    never = Rule("x", "be", lambda _: False, lambda _: "", "")

    with pytest.raises((Unsatisfiable, NoSuchExample)):
        find(valid_calls(replace(CONTRACT, rules=(never,))), lambda _: True, settings=SEARCH)


@pytest.mark.parametrize("shape", [(), (4,), (1, 1), (2, 3), (2, 3, 4), (0, 3)])
@pytest.mark.parametrize("layout", [CONTIGUOUS, UNIT_INNER, ANY_LAYOUT], ids=lambda layout: layout.name)
def test_strides_satisfy_the_layout(shape: tuple[int, ...], layout: Any) -> None:
    found = strides_for(shape, layout, negative=True)
    assert len(found) == len(set(found)) >= 1
    assert all(layout.holds(shape, stride) and len(stride) == len(shape) for stride in found)
    if layout is ANY_LAYOUT and shape == (2, 3):
        assert {(3, 1), (4, 1), (11, 1), (6, 2), (1, 2), (0, 1), (-3, 1), (3, -1)} <= set(found)
        assert min(min(stride) for stride in strides_for(shape, layout)) >= 0


def test_forms_that_read_as_another_are_not_drawn() -> None:
    contract = Contract("op", (Input("x", "... C", ("float32",), also=("... C 1",)), Input("w", "C", ("float32",))), ())

    @given(valid_calls(contract))
    def check(call: Call) -> None:
        bind(contract, call.arrays, call.options)

    check()
