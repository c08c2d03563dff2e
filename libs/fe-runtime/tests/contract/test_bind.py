"""What a call binds, and every way in which it can be wrong: kind of error, order of the checks, text."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fe_dummy import CONTRACT

from fe_runtime.contract import ANY_LAYOUT, UNIT_INNER, Bound, Contract, Input, Output, OutputSpec, Rule, bind
from fe_runtime.errors import DtypeError, InvalidArgumentError
from fe_runtime.tensor_desc import TensorDesc
from fe_runtime.testing import guarded, strided_array

X = np.ones((2, 3, 8), np.float32)
W = np.ones(8, np.float32)
SQUARE = np.zeros((8, 8, 2), np.int32)


def call(x: Any = X, weight: Any = W, bias: Any = None, mixer: Any = None, **options: Any) -> Bound:
    return bind(CONTRACT, (x, weight, bias, mixer), options)


def refusal(*arguments: Any, kind: type[Exception] = InvalidArgumentError, **keywords: Any) -> str:
    with pytest.raises(kind) as caught:
        call(*arguments, **keywords)
    assert caught.type is kind
    return str(caught.value)


# What is bound


def test_a_call_is_bound() -> None:
    bound = call(bias=W, scale=2, out_dtype="half")
    assert (bound.operation, bound.framework, str(bound.device)) == ("scale_rows", "numpy", "cpu")
    assert list(bound.arrays) == ["x", "weight", "bias"]
    assert bound.has("bias")
    assert not bound.has("mixer")
    assert bound.dtype("mixer") is None
    assert bound.dtype("x") == "float32"
    assert (bound.batch, bound.rows, bound.dim("C")) == ((2, 3), 6, 8)
    assert bound.options == {"scale": 2.0, "group": 8, "total": True, "mode": "plain", "out_dtype": "float16"}
    assert type(bound.options["scale"]) is float
    assert bound.outputs == (OutputSpec((2, 3, 8), "float16"), OutputSpec((8,), "float32"))


def test_an_output_that_is_not_produced_has_no_spec() -> None:
    assert call(total=False).outputs == (OutputSpec((2, 3, 8), "float32"), None)


def test_a_letter_of_the_batch_is_no_extent() -> None:
    with pytest.raises(KeyError):
        call().dim("...")


@pytest.mark.parametrize("rank", range(4))
def test_any_batch_rank(rank: int) -> None:
    bound = call(np.ones((*range(2, 2 + rank), 8), np.float32))
    assert bound.batch == tuple(range(2, 2 + rank))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)])
def test_empty_rows_are_legal(shape: tuple[int, ...]) -> None:
    assert call(np.ones(shape, np.float32)).rows == 0


def test_tensor_descriptors_stand_for_arrays() -> None:
    arrays = (TensorDesc.of("bfloat16", (4, 8), device="cuda:1"), TensorDesc.of("float32", (8,), device="cuda:1"))
    bound = call(*arrays)
    assert (bound.framework, str(bound.device)) == ("descriptor", "cuda:1")
    assert bound.alignments == {"x": 16, "weight": 16, "y": 16, "total": 16}


def test_a_descriptor_may_stand_beside_arrays() -> None:
    described = TensorDesc.of("float32", (8,))
    assert call(X, described).framework == "numpy"
    assert call(TensorDesc.of("float32", (2, 3, 8)), W).framework == "numpy"


# Other forms of a shape


@pytest.mark.parametrize("batch", [(), (5,), (2, 3), (2, 3, 4)])
def test_a_trailing_one_is_dropped(batch: tuple[int, ...]) -> None:
    contract = Contract(
        "op", (Input("w", "C", ("float32",)), Input("x", "... C", ("float32",), UNIT_INNER, also=("... C 1",))), ()
    )
    # Padded rows, so that a wrong choice of strides shows.
    steps = tuple(int(np.prod(batch[i + 1 :], dtype=int)) * 16 for i in range(len(batch)))
    bound = bind(contract, (W, strided_array((*batch, 8, 1), (*steps, 1, 1), "float32")), {})
    assert (bound.batch, bound.given["x"]) == (batch, (*batch, 8, 1))
    assert bound.arrays["x"].shape == (*batch, 8)
    assert bound.arrays["x"].stride == (*steps, 1)
    assert bound.arrays["x"].stride_order == tuple(reversed(range(len(batch) + 1)))


def test_a_strided_form_keeps_the_stride_of_its_letter() -> None:
    contract = Contract("op", (Input("x", "C", ("float32",), ANY_LAYOUT, also=("C 1", "1 C")),), ())
    for shape, stride in [((8, 1), (3, 7)), ((1, 8), (7, 3))]:
        bound = bind(contract, (strided_array(shape, stride, "float32"),), {})
        assert (bound.arrays["x"].shape, bound.arrays["x"].stride) == ((8,), (3,))


def test_ones_of_the_canonical_form_and_numbers() -> None:
    contract = Contract("op", (Input("x", "M 1 4 K", ("float32",), ANY_LAYOUT, also=("M 4 K", "M 4 K 1")),), ())
    for shape, stride in [((5, 4, 6), (100, 7, 1)), ((5, 4, 6, 1), (100, 7, 1, 9))]:
        desc = bind(contract, (strided_array(shape, stride, "float32"),), {}).arrays["x"]
        assert desc.shape == (5, 1, 4, 6)
        assert (desc.stride[0], *desc.stride[2:]) == (100, 7, 1)


def test_the_canonical_form_comes_first() -> None:
    contract = Contract("op", (Input("x", "... C", ("float32",), also=("... C 1",)),), ())
    bound = bind(contract, (np.ones((4, 1), np.float32),), {})
    assert (bound.batch, bound.dim("C")) == ((4,), 1)


def test_a_later_form_is_tried_when_an_extent_rules_out_the_first() -> None:
    contract = Contract("op", (Input("w", "C", ("float32",)), Input("x", "R C", ("float32",), also=("R C 1",))), ())
    with pytest.raises(InvalidArgumentError, match=r"x must have shape \(R, C\) with C = 8 or \(R, C, 1\) with C = 8"):
        bind(contract, (W, np.ones((8, 1), np.float32)), {})
    assert bind(contract, (W, np.ones((3, 8, 1), np.float32)), {}).dim("R") == 3


# Alignment


@pytest.mark.parametrize("alignment", [2, 4, 8, 16])
def test_alignment_of_the_pointer(alignment: int) -> None:
    x = guarded((4, 8), "bfloat16", alignment=alignment).array
    assert call(x).alignments["x"] == alignment


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [
        ((4, 8), (8, 1), 16),
        ((4, 8), (12, 1), 8),
        ((4, 8), (9, 1), 2),
        ((4, 8), (0, 1), 16),  # one row, read four times
        ((2, 4, 8), (33, 8, 1), 2),
        ((1, 8), (9, 1), 2),  # as more rows of that array would be
        ((4, 1), (1, 1), 2),  # rows of one value
        ((4, 1), (1, 4), 2),
        ((4, 1), (12, 1), 8),
        ((4, 8), (1, 1), 2),  # overlapping windows: rows start anywhere
        ((8,), (1,), 16),
    ],
)
def test_alignment_of_the_rows(shape: tuple[int, ...], stride: tuple[int, ...], expected: int) -> None:
    x = TensorDesc.of("bfloat16", shape, stride)
    assert call(x, TensorDesc.of("float32", shape[-1:])).alignments["x"] == expected


def test_alignment_of_outputs_that_will_be_allocated() -> None:
    odd = call(np.ones((4, 9), np.float32), np.ones(9, np.float32))
    assert odd.alignments == {"x": 4, "weight": 16, "y": 4, "total": 16}
    assert "total" not in call(total=False).alignments


# What is refused: kinds first


@pytest.mark.parametrize("value", [[1.0], 1.0, "x", None, np.float32(1), object()], ids=lambda v: type(v).__name__)
def test_a_required_array_must_be_an_array(value: object) -> None:
    text = refusal(value, kind=TypeError)
    assert text.startswith("scale_rows: x must be an array (torch, JAX or numpy); got ")


@pytest.mark.parametrize("value", [[1.0], 0.5, "x"], ids=lambda v: type(v).__name__)
def test_an_optional_array_must_be_an_array(value: object) -> None:
    assert refusal(bias=value, kind=TypeError).startswith("scale_rows: bias must be an array")


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        ([1.0], "Pass numpy.asarray(values, dtype), or an array of the other arguments' framework."),
        (0.5, "Pass numpy.asarray([value], dtype), of shape (1,), or an array of the other arguments' framework."),
        ("x", "Pass an array."),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_fix_names_the_call_that_makes_an_array(value: object, fix: str) -> None:
    assert refusal(bias=value, kind=TypeError).endswith(fix)


def test_long_values_are_cut_in_the_text() -> None:
    assert len(refusal([0.0] * 1000, kind=TypeError)) < 240


def test_an_unknown_dtype_is_refused_in_the_name_of_the_operation() -> None:
    assert refusal(np.ones((2, 8), np.complex64)).startswith("scale_rows: x must have a known dtype; got complex64")


def test_swapped_bytes_have_a_fix() -> None:
    swapped = X.astype(X.dtype.newbyteorder())
    text = refusal(swapped)
    assert "x must have a known dtype; got " in text
    assert text.endswith('Pass x.astype(x.dtype.newbyteorder("=")).')
    call(swapped.astype(swapped.dtype.newbyteorder("=")))  # it helps


def test_strides_between_elements_are_refused_in_the_name_of_the_operation() -> None:
    bytes_apart = np.ndarray((2, 8), np.float32, bytearray(200), 0, (33, 4))
    assert refusal(bytes_apart).startswith("scale_rows: x must have strides that are multiples of its element size")


# Ranks and shapes


def test_rank() -> None:
    text = refusal(np.ones((), np.float32))
    assert text == "scale_rows: x must have shape (..., C); got shape (). Reshape it to (..., C)."
    text = refusal(mixer=np.zeros(8, np.int32))
    assert text == "scale_rows: mixer must have shape (C, C, 2); got shape (8,). Reshape it to (C, C, 2)."


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 1, 8)])
def test_a_rank_of_ones_is_reshaped_to_the_accepted_shape(shape: tuple[int, ...]) -> None:
    assert refusal(weight=W.reshape(shape)) == (
        f"scale_rows: weight must have shape (C,) or (C, 1) or (1, C); got shape {shape}. "
        "Reshape it to (8,): weight.reshape(8)."
    )


def test_a_scalar_array_is_reshaped_to_one_element() -> None:
    contract = Contract("op", (Input("scale", "1", ("float32",)),), ())
    with pytest.raises(InvalidArgumentError, match=r"got shape \(\)\. Reshape it to \(1,\): scale\.reshape\(1\)\."):
        bind(contract, (np.ones((), np.float32),), {})


def test_an_extent_that_another_argument_fixes() -> None:
    text = refusal(weight=np.ones(7, np.float32))
    assert text == (
        "scale_rows: weight must have shape (C,) with C = 8 or (C, 1) with C = 8 or (1, C) with C = 8; got shape (7,). "
        "Its extents must agree with the other arguments."
    )


def test_an_extent_that_a_number_fixes() -> None:
    assert "mixer must have shape (C, C, 2) with C = 8; got shape (8, 8, 3)" in refusal(
        mixer=np.zeros((8, 8, 3), np.int32)
    )


def test_a_letter_twice_in_one_shape() -> None:
    assert "mixer must have shape (C, C, 2) with C = 8" in refusal(mixer=np.zeros((8, 7, 2), np.int32))


def test_batch_extents_must_agree() -> None:
    contract = Contract("op", (Input("a", "... C", ("float32",)), Input("b", "...", ("float32",))), ())
    assert bind(contract, (X, np.ones((2, 3), np.float32)), {}).batch == (2, 3)
    with pytest.raises(
        InvalidArgumentError, match=r"op: b must have shape \(\.\.\.\) with \.\.\. = \(2, 3\); got shape"
    ):
        bind(contract, (X, np.ones((3, 2), np.float32)), {})


# Strides, dtypes


def test_layout() -> None:
    text = refusal(strided_array((4, 8), (1, 4), "float32"))
    assert text == (
        "scale_rows: x must have a last dimension of stride 1 and no negative strides; got shape (4, 8) with strides "
        "(1, 4). Pass a copy whose last dimension is contiguous."
    )
    assert "weight must be contiguous (row-major)" in refusal(weight=np.ones(16, np.float32)[::2])


def test_negative_strides() -> None:
    assert "no negative strides" in refusal(X[::-1])


def test_dtype() -> None:
    assert "x must have dtype bfloat16, float16 or float32; got int32. Convert it first." in refusal(X.astype(np.int32))
    assert "mixer must have dtype int32; got int64" in refusal(mixer=SQUARE.astype(np.int64))


def test_dtype_of_another_argument() -> None:
    text = refusal(bias=W.astype(ml_dtypes.bfloat16))
    assert text == "scale_rows: bias must have the dtype of x (float32); got bfloat16. Convert one of them."


# Places


def test_mixed_frameworks() -> None:
    torch = pytest.importorskip("torch")
    text = refusal(weight=torch.ones(8))
    assert text == (
        "scale_rows: weight must come from the framework of x (numpy); got torch. "
        "Convert one of them: frameworks cannot be mixed in one call."
    )


def test_mixed_frameworks_behind_a_descriptor() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(InvalidArgumentError, match=r"bias must come from the framework of weight \(numpy\); got torch"):
        call(TensorDesc.of("float32", (2, 8)), W, torch.ones(8))


def test_mixed_devices() -> None:
    here, there = TensorDesc.of("float32", (2, 8), device="cuda:0"), TensorDesc.of("float32", (8,), device="cuda:1")
    assert refusal(here, there) == (
        "scale_rows: weight must be on the device of x (cuda:0); got cuda:1. Move one of them."
    )


def test_an_unknown_device_fits_any() -> None:
    # A traced array beside a concrete one, as under jax.jit.
    traced, real = TensorDesc.of("float32", (2, 8), device="unknown"), TensorDesc.of("float32", (8,), device="cuda:0")
    assert str(call(traced, real).device) == "cuda:0"
    with pytest.raises(InvalidArgumentError, match=r"bias must be on the device of weight \(cuda:0\); got cpu"):
        call(traced, real, TensorDesc.of("float32", (8,), device="cpu"))


# Options: see test_options.py. Rules


def test_rules_between_arguments() -> None:
    assert refusal(group=3) == "scale_rows: group must divide C; got group = 3, C = 8. Leave it out."


@pytest.mark.parametrize("kind", [DtypeError, NotImplementedError])
def test_a_rule_may_say_which_error(kind: type[Exception]) -> None:
    rule = Rule("x", "be odd", lambda _: False, lambda _: "even", "", error=kind)
    with pytest.raises(kind, match="op: x must be odd; got even"):
        bind(Contract("op", (Input("x", "C", ("float32",)),), (), rules=(rule,)), (W,), {})


# Order: each call breaks all rules from one on; the first broken one is reported


def test_the_order_of_the_checks() -> None:
    torch = pytest.importorskip("torch")
    strided64 = strided_array((8,), (2,), "int64")
    steps: list[tuple[str, dict[str, Any]]] = [
        ("weight must be an array", {"weight": [1.0]}),
        ("total must be a Python bool", {"total": 1}),
        ("weight must have shape (C,) or (C, 1) or (1, C); got", {"weight": strided64[None, None]}),
        ("weight must have shape (C,) with C = 8", {"weight": strided64[:7]}),
        ("weight must be contiguous", {"weight": strided64}),
        ("weight must have dtype", {"weight": strided64.copy()}),
        ("weight must come from the framework", {"weight": torch.ones(8)}),
        ("weight must be on the device", {"weight": TensorDesc.of("float32", (8,), device="cuda:0")}),
        ("scale must be a finite number", {"scale": -1.0}),
        ("group must divide C", {"group": 3}),
    ]
    for number, (expected, _) in enumerate(steps):
        broken: dict[str, Any] = {}
        for _, change in reversed(steps[number:]):
            broken |= change
        kind = TypeError if number < 2 else InvalidArgumentError
        assert expected in refusal(kind=kind, **broken)


def test_the_number_of_arrays_is_the_wrappers_business() -> None:
    contract = Contract(
        "op", (Input("x", "C", ("float32",)),), (Output("y", lambda b: OutputSpec((b.dim("C"),), "int8")),)
    )
    with pytest.raises(ValueError, match="argument 2"):
        bind(contract, (W, W), {})
