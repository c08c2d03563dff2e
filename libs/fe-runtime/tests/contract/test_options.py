"""Arguments that are no arrays: kinds, values, defaults."""

from __future__ import annotations

import fractions
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fe_runtime.contract import Contract, Input, Option, bind, check_option_kinds, check_option_values
from fe_runtime.errors import InvalidArgumentError

X = np.ones(4, np.float32)


def value_of(option: Option, **given: Any) -> object:
    contract = Contract("op", (Input("x", "C", ("float32",)),), (), (option,))
    return bind(contract, (X,), given).options[option.name]


def refusal(option: Option, value: object, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        value_of(option, **{option.name: value})
    assert caught.type is kind
    return str(caught.value)


NUMBER = Option("eps", float, 1e-5, holds=lambda v: float(v) >= 0, rule="be a number >= 0")  # type: ignore[arg-type]
COUNT = Option("count", int, 2, choices=(1, 2, 4))
FLAG = Option("flag", bool, False)
WORD = Option("mode", str, "a", choices=("a", "b"))
DTYPE = Option(
    "out", "dtype", "bfloat16", choices=("bfloat16", "float32", "nvfp4"), aliases={"float4_e2m1fn_x2": "nvfp4"}
)
ANY_DTYPE = Option("out", "dtype", "float32")


@pytest.mark.parametrize("option", [NUMBER, COUNT, FLAG, WORD, DTYPE], ids=lambda option: option.name)
def test_a_missing_option_takes_its_default(option: Option) -> None:
    assert value_of(option) == option.default


@pytest.mark.parametrize("value", [1, 2.5, np.float32(2.5), np.int64(3), fractions.Fraction(1, 2), 0])
def test_a_number_becomes_a_float(value: Any) -> None:
    found = value_of(NUMBER, eps=value)
    assert type(found) is float
    assert found == float(value)


@pytest.mark.parametrize("value", [1, np.int32(2), np.uint8(4)])
def test_an_integer_becomes_an_int(value: Any) -> None:
    found = value_of(COUNT, count=value)
    assert type(found) is int
    assert found == value


def test_a_symbolic_integer_is_one() -> None:
    class Symbolic:
        def __index__(self) -> int:
            return 4

        __int__ = __index__

    assert value_of(COUNT, count=Symbolic()) == 4


@pytest.mark.parametrize(
    ("option", "value"),
    [
        (NUMBER, "1"),
        (NUMBER, None),
        (NUMBER, True),
        (NUMBER, 1j),
        (NUMBER, np.ones(())),
        (COUNT, 2.0),
        (COUNT, True),
        (COUNT, np.bool_(True)),
        (COUNT, None),
        (COUNT, "2"),
        (COUNT, np.array(2)),  # reading an array could wait for a GPU
        (FLAG, 1),
        (FLAG, None),
        (FLAG, "yes"),
        (WORD, b"a"),
        (WORD, None),
        (WORD, 3),
    ],
    ids=lambda value: value.name if isinstance(value, Option) else f"{type(value).__name__}-{value}",
)
def test_wrong_kinds(option: Option, value: object) -> None:
    text = refusal(option, value, TypeError)
    kind = option.kind.__name__ if isinstance(option.kind, type) else ""
    assert text.startswith(f"op: {option.name} must be a Python {kind}; got {type(value).__name__}")
    fix = f"Leave it out for the default {option.default!r}."
    assert text.endswith(f"Pass {option.name}.item()." if isinstance(value, np.ndarray | np.bool_) else fix)


def test_an_array_in_the_place_of_an_option_is_told_its_possible_names() -> None:
    contract = Contract(
        "op",
        (Input("x", "C", ("float32",)), *(Input(name, "C", ("float32",), optional=True) for name in ("w", "b"))),
        (),
        (NUMBER,),
    )
    with pytest.raises(TypeError) as caught:
        bind(contract, (X, None, None), {"eps": X})
    assert str(caught.value) == (
        "op: eps must be a Python float; got ndarray of shape (4,). If it is meant for another argument, name that: "
        "w= or b=."
    )
    assert refusal(NUMBER, X, TypeError).endswith("Leave it out for the default 1e-05.")  # there is no other


def test_a_torch_scalar_is_no_number() -> None:
    torch = pytest.importorskip("torch")
    refusal(COUNT, torch.tensor(2), TypeError)
    refusal(NUMBER, torch.tensor(2.0), TypeError)


def test_a_traced_option_must_be_static() -> None:
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match=r'Make it static: jax\.jit\(\.\.\., static_argnames="eps"\)'):
        jax.jit(lambda eps: value_of(NUMBER, eps=eps))(1e-6)


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        (NUMBER, -1.0, "be a number >= 0"),
        (NUMBER, float("nan"), "be a number >= 0"),
        (COUNT, 3, "be 1, 2 or 4"),
        (WORD, "c", "be a or b"),
        (DTYPE, "float16", "be bfloat16, float32, nvfp4 or float4_e2m1fn_x2"),
        (DTYPE, "no_such", "be bfloat16, float32, nvfp4 or float4_e2m1fn_x2"),
        (DTYPE, None, "be bfloat16, float32, nvfp4 or float4_e2m1fn_x2"),
        (DTYPE, 3, "be bfloat16, float32, nvfp4 or float4_e2m1fn_x2"),
        (DTYPE, int, "be bfloat16, float32, nvfp4 or float4_e2m1fn_x2"),
        (ANY_DTYPE, "no_such", "be a dtype"),
        (ANY_DTYPE, [], "be a dtype"),
    ],
    ids=lambda value: value.name if isinstance(value, Option) else str(value),
)
def test_wrong_values(option: Option, value: object, rule: str) -> None:
    text = refusal(option, value, InvalidArgumentError)
    assert text.startswith(f"op: {option.name} must {rule}; got {value!r}. Leave it out")


@pytest.mark.parametrize(
    ("value", "meant"), [("bf16", "bfloat16"), ("BF16", "bfloat16"), ("fp32", "float32"), ("fp4", "nvfp4")]
)
def test_a_short_name_of_a_dtype_is_refused_with_the_long_one(value: str, meant: str) -> None:
    assert refusal(DTYPE, value, InvalidArgumentError).endswith(f"got {value!r}. Did you mean {meant!r}?")


def test_only_accepted_names_are_meant() -> None:
    assert "mean" not in refusal(DTYPE, "fp8", InvalidArgumentError)
    assert refusal(ANY_DTYPE, "fp8", InvalidArgumentError).endswith("Did you mean 'float8_e4m3fn'?")


@pytest.mark.parametrize(
    ("doc", "said"),
    [("output; None: that of x", " (that of x)"), ("that of x by default", " (that of x by default)"), ("", "")],
)
def test_the_fix_says_what_none_means(doc: str, said: str) -> None:
    option = Option("out", "dtype", None, choices=("float32",), resolve=lambda bound: bound.dtype("x"), doc=doc)
    assert refusal(option, "int8", InvalidArgumentError).endswith(f"Leave it out for the default None{said}.")


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (ml_dtypes.bfloat16, "bfloat16"),
        (np.dtype(ml_dtypes.bfloat16), "bfloat16"),
        (np.float32, "float32"),
        ("float32", "float32"),
        ("nvfp4", "nvfp4"),
        ("float4_e2m1fn_x2", "nvfp4"),
    ],
)
def test_dtypes_become_names(value: object, name: str) -> None:
    assert value_of(DTYPE, out=value) == name


def test_torch_and_jax_dtypes_become_names() -> None:
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    assert value_of(DTYPE, out=torch.bfloat16) == "bfloat16"
    assert value_of(DTYPE, out=torch.float4_e2m1fn_x2) == "nvfp4"
    assert value_of(DTYPE, out=jax.numpy.float32) == "float32"


def test_none_chooses_where_it_is_the_default() -> None:
    free = Option("n", int, None, holds=lambda v: v > 0, rule="be > 0", resolve=lambda bound: 2 * bound.dim("C"))  # type: ignore[operator]
    assert value_of(free) == 8
    assert value_of(free, n=None) == 8
    assert value_of(free, n=3) == 3
    refusal(free, 0, InvalidArgumentError)


def test_options_resolve_in_their_order() -> None:
    first = Option("first", int, None, resolve=lambda bound: 3)
    second = Option("second", int, None, resolve=lambda bound: bound.options["first"])
    contract = Contract("op", (Input("x", "C", ("float32",)),), (), (first, second))
    assert bind(contract, (X,), {}).options == {"first": 3, "second": 3}


def test_an_unknown_name_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"op: epsilon must be one of the options eps; got 1\.0\. Leave it out\."):
        value_of(NUMBER, epsilon=1.0)


def test_integer_beyond_all_floats() -> None:
    contract = Contract(
        "op",
        inputs=(),
        outputs=(),
        options=(Option("eps", float, 1.0, holds=lambda e: isinstance(e, float) and e < 9, rule="be below 9"),),
    )
    assert check_option_kinds(contract, {"eps": -(10**400)}) == {"eps": float("-inf")}
    with pytest.raises(InvalidArgumentError, match="eps must be below 9; got inf"):
        check_option_values(contract, check_option_kinds(contract, {"eps": 10**400}))
