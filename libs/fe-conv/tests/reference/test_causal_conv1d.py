"""The reference of ``causal_conv1d`` and its gradient against naive loops in float64 and finite differences."""

from __future__ import annotations

from typing import Any

import conv_oracle as oracle
import jax
import ml_dtypes
import numpy as np
import pytest
import torch

from fe_conv.reference import causal_conv1d as reference
from fe_runtime.testing import to_framework, to_numpy

FRAMEWORKS = ("numpy", "torch", "jax")
ACTIVATIONS = ("identity", "silu")


class Mode:
    """How the tokens of a case form sequences."""

    def __init__(self, batch: int, length: int, offsets: Any = None, labels: Any = None) -> None:
        self.batch, self.length = batch, length
        self.where = {} if offsets is None else {"offsets": np.asarray(offsets, np.int32)}
        if labels is not None:
            self.where = {"labels": np.asarray(labels, np.int32)}
        self.rows = batch if offsets is None else len(offsets) - 1
        self.with_states = labels is None

    @property
    def metadata(self) -> dict[str, Any]:
        """The same as arguments of the reference."""
        return {"seq_idx": self.where.get("labels"), "cu_seqlens": self.where.get("offsets")}


MODES = {
    "rows": Mode(2, 9),
    "one row": Mode(1, 6),
    "one token": Mode(2, 1),
    "no tokens": Mode(2, 0),
    "no rows": Mode(0, 5),
    "packed": Mode(1, 20, [0, 7, 20]),
    "packed 1, 2, 3 beside long ones": Mode(1, 26, [0, 1, 12, 14, 17, 18, 26]),
    "packed with empty members": Mode(1, 12, [0, 0, 5, 5, 5, 12, 12]),
    "packed, all empty": Mode(1, 0, [0, 0, 0]),
    "packed, tokens outside": Mode(1, 15, [3, 8, 11]),
    "packed, one sequence": Mode(1, 9, [0, 9]),
    "labels": Mode(2, 10, labels=[[0, 0, 0, 1, 1, 1, 1, 2, 2, 2], [5, 5, 5, 5, 5, 5, 3, 3, 3, 3]]),
    "labels that come back": Mode(1, 9, labels=[[0, 0, 1, 0, 0, 1, 1, 0, 1]]),
    "labels with padding": Mode(2, 8, labels=[[-1, -1, 0, 0, 0, -1, 0, 1], [0, 0, -2, -2, -1, 4, 4, -7]]),
    "labels, all padding": Mode(1, 4, labels=[[-1, -1, -1, -1]]),
}
WIDTHS = (2, 3, 4, 5, 7)


def in_layout(array: Any, channel_last: bool) -> Any:
    return np.ascontiguousarray(array.swapaxes(1, 2)) if channel_last else array


def call(given: Any, mode: Mode, channel_last: bool, activation: str, final: bool, framework: str = "numpy") -> Any:
    """Run the forward reference; return y as (B, D, T) and the final states as (N, D, W-1), both numpy."""
    function = reference.causal_conv1d_channel_last if channel_last else reference.causal_conv1d
    arrays = {"x": in_layout(given["x"], channel_last), "weight": given["weight"], "bias": given.get("bias")}
    arrays |= {"initial_states": given.get("states"), **mode.metadata}
    placed = {name: None if a is None else to_framework(a, framework) for name, a in arrays.items()}
    with np.errstate(all="ignore"):
        y, states = function(**placed, activation=activation, return_final_states=final)
    y = to_numpy(y)
    return y.swapaxes(1, 2) if channel_last else y, None if states is None else to_numpy(states).swapaxes(1, 2)


def call_backward(
    dy: Any, dfinal: Any, given: Any, mode: Mode, channel_last: bool, activation: str, framework: str = "numpy"
) -> Any:
    function = reference.causal_conv1d_channel_last_backward if channel_last else reference.causal_conv1d_backward
    arrays = {"dy": in_layout(dy, channel_last), "dfinal": None if dfinal is None else in_layout(dfinal, True)}
    arrays |= {"x": in_layout(given["x"], channel_last), "weight": given["weight"], "bias": given.get("bias")}
    arrays |= {"initial_states": given.get("states"), **mode.metadata}
    placed = {name: None if a is None else to_framework(a, framework) for name, a in arrays.items()}
    with np.errstate(all="ignore"):
        results = function(**placed, activation=activation)
    dx, *rest = [None if a is None else to_numpy(a) for a in results]
    return dict(zip(("x", "weight", "bias", "states"), [dx.swapaxes(1, 2) if channel_last else dx, *rest], strict=True))


def example(mode: Mode, width: int, *, bias: bool = True, states: bool = True, seed: int = 0) -> dict[str, Any]:
    given = oracle.operands(mode.batch, 3, mode.length, width, rows=mode.rows, seed=seed)
    if not bias:
        del given["bias"]
    if not (states and mode.with_states):
        del given["states"]
    return given


def check_forward(given: Any, mode: Mode, channel_last: bool, activation: str) -> None:
    want, want_final = oracle.forward(**given, activation=activation, **mode.where)
    y, final = call(given, mode, channel_last, activation, mode.with_states)
    np.testing.assert_allclose(y, want, rtol=1e-13, atol=1e-13)
    if mode.with_states:
        np.testing.assert_array_equal(final, want_final.reshape(final.shape))


@pytest.mark.parametrize("channel_last", [False, True], ids=["channel first", "channel last"])
@pytest.mark.parametrize("mode", MODES.values(), ids=list(MODES))
@pytest.mark.parametrize("width", WIDTHS)
def test_forward_is_the_naive_loop(width: int, mode: Mode, channel_last: bool) -> None:
    for activation in ACTIVATIONS:
        check_forward(example(mode, width), mode, channel_last, activation)
        check_forward(example(mode, width, bias=False, states=False), mode, channel_last, activation)


@pytest.mark.parametrize("mode", ["rows", "packed 1, 2, 3 beside long ones", "labels"])
def test_the_widest_filter(mode: str) -> None:
    check_forward(example(MODES[mode], 128), MODES[mode], True, "silu")


def check_backward(given: Any, mode: Mode, channel_last: bool, activation: str, with_final: bool) -> None:
    rng = np.random.default_rng(9)
    dy = rng.standard_normal(given["x"].shape)
    dfinal = None
    if with_final and mode.with_states:
        dfinal = rng.standard_normal((mode.rows, given["x"].shape[1], given["weight"].shape[1] - 1))
    want = oracle.backward(dy, dfinal, **given, activation=activation, **mode.where)
    got = call_backward(dy, dfinal, given, mode, channel_last, activation)
    for name in ("x", "weight", "bias", "states"):
        if name in ("bias", "states") and name not in given:
            assert got[name] is None
            continue
        np.testing.assert_allclose(got[name], want[name], rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("channel_last", [False, True], ids=["channel first", "channel last"])
@pytest.mark.parametrize("mode", MODES.values(), ids=list(MODES))
@pytest.mark.parametrize("width", WIDTHS)
def test_backward_is_the_naive_loop(width: int, mode: Mode, channel_last: bool) -> None:
    for activation in ACTIVATIONS:
        check_backward(example(mode, width), mode, channel_last, activation, True)
        check_backward(example(mode, width, bias=False, states=False), mode, channel_last, activation, True)
        check_backward(example(mode, width), mode, channel_last, activation, False)


@pytest.mark.parametrize("mode", ["rows", "packed 1, 2, 3 beside long ones", "labels"])
def test_the_widest_filter_backward(mode: str) -> None:
    check_backward(example(MODES[mode], 128), MODES[mode], False, "silu", True)


@pytest.mark.parametrize("mode", ["rows", "one token", "packed with empty members", "labels with padding"])
@pytest.mark.parametrize("width", [2, 4])
def test_backward_is_the_finite_difference(width: int, mode: str) -> None:
    """Of the naive loop, so neither the reference nor the formula of its gradient is believed."""
    case = MODES[mode]
    given = example(case, width)
    rng = np.random.default_rng(3)
    dy = rng.standard_normal(given["x"].shape)
    dfinal = rng.standard_normal((case.rows, 3, width - 1)) if case.with_states else None

    def loss(**changed: Any) -> float:
        y, final = oracle.forward(**given | changed, activation="silu", **case.where)
        return float((y * dy).sum() + (0 if dfinal is None else (final * dfinal).sum()))

    got = call_backward(dy, dfinal, given, case, False, "silu")
    for name, value in given.items():
        want = oracle.derivative(lambda moved, name=name: loss(**{name: moved}), value)
        np.testing.assert_allclose(got[name], want, rtol=1e-6, atol=1e-7, err_msg=name)


# --- precision and frameworks ---------------------------------------------------------------------------------------

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
RELATIVE = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 1e-5}


def narrowed(given: Any, dtype: str, weight_dtype: str | None = None) -> dict[str, Any]:
    cast = {name: array.astype(DTYPES[dtype]) for name, array in given.items()}
    if weight_dtype:
        cast["weight"] = given["weight"].astype(DTYPES[weight_dtype])
    return cast


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_precision_of_each_dtype_in_each_framework(dtype: str, framework: str) -> None:
    mode = MODES["packed 1, 2, 3 beside long ones"]
    given = narrowed(example(mode, 4), dtype)
    want, want_final = oracle.forward(**given, activation="silu", **mode.where)
    y, final = call(given, mode, True, "silu", True, framework)
    assert y.dtype == DTYPES[dtype]
    atol = 2.0**-20 * oracle.magnitude(**given, **mode.where)
    np.testing.assert_allclose(y.astype(np.float64), want, rtol=RELATIVE[dtype], atol=atol)
    np.testing.assert_array_equal(final.astype(np.float64), want_final)

    dy = np.random.default_rng(1).standard_normal(given["x"].shape).astype(DTYPES[dtype])
    dfinal = np.random.default_rng(2).standard_normal(want_final.shape).astype(DTYPES[dtype])
    want_gradients = oracle.backward(dy, dfinal, **given, activation="silu", **mode.where)
    scales = oracle.backward(dy, dfinal, **given, activation="silu", absolute=True, **mode.where)
    got = call_backward(dy, dfinal, given, mode, True, "silu", framework)
    for name, gradient in got.items():
        # one rounding to the dtype, a few to fp32 of the terms
        bound = RELATIVE[dtype] * np.abs(want_gradients[name]) + 2.0**-19 * scales[name]
        assert gradient.dtype == DTYPES[dtype]
        assert (np.abs(gradient.astype(np.float64) - want_gradients[name]) <= bound).all(), name


def test_fp32_filter_with_bf16_input() -> None:
    mode = MODES["rows"]
    given = narrowed(example(mode, 4), "bfloat16", "float32")
    y, final = call(given, mode, True, "silu", True)
    want, _ = oracle.forward(**given, activation="silu", **mode.where)
    assert (y.dtype, final.dtype) == (ml_dtypes.bfloat16, ml_dtypes.bfloat16)
    np.testing.assert_allclose(y.astype(np.float64), want, rtol=2.0**-8, atol=1e-5)
    got = call_backward(np.ones_like(given["x"]), None, given, mode, True, "silu")
    assert [got[name].dtype.name for name in ("x", "weight", "bias", "states")] == [
        "bfloat16",
        "float32",
        "bfloat16",
        "bfloat16",
    ]
    want_gradients = oracle.backward(np.ones(given["x"].shape), None, **given, activation="silu")
    np.testing.assert_allclose(got["weight"], want_gradients["weight"], rtol=1e-5, atol=1e-5)


def test_fp64_is_computed_in_fp64() -> None:
    mode = Mode(1, 4)
    given = example(mode, 2, bias=False, states=False)
    given["x"][:] = 1 + 2.0**-40
    given["weight"][:] = 1.0
    y, _ = call(given, mode, False, "identity", False)
    assert (y[..., 1:] == 2 + 2.0**-39).all()


def test_long_sums_of_fp32_terms_stay_exact_to_a_few_roundings() -> None:
    """dweight and dbias of 2^17 tokens: a plain loop in fp32 would lose three digits."""
    x = np.ones((1, 1, 2**17), np.float32)
    given = {"x": x * np.float32(0.1), "weight": np.ones((1, 2), np.float32), "bias": np.zeros(1, np.float32)}
    got = call_backward(x, None, given, Mode(1, x.shape[2]), False, "identity")
    assert abs(float(got["bias"][0]) / 2**17 - 1) < 1e-6
    exact = float(np.float32(0.1)) * 2**17
    assert abs(float(got["weight"][0, 1]) / exact - 1) < 1e-6


def test_final_states_are_copied_bit_for_bit() -> None:
    bits = np.array([0x8000, 0x7FC1, 0xFF80, 0x0001, 0x3F80], np.uint16)  # -0, a NaN with a payload, -inf, subnormal
    x = bits.view(ml_dtypes.bfloat16).reshape(1, 1, 5)
    weight = np.ones((1, 4), ml_dtypes.bfloat16)
    for framework in FRAMEWORKS:
        _, final = call({"x": x, "weight": weight}, Mode(1, 5), False, "silu", True, framework)
        np.testing.assert_array_equal(final.view(np.uint16).ravel(), bits[2:])
    _, final = call({"x": x, "weight": weight}, Mode(1, 5, [0, 5]), False, "silu", True)
    np.testing.assert_array_equal(final.view(np.uint16).ravel(), bits[2:])


def test_nan_in_one_sequence_stays_there() -> None:
    mode = MODES["packed 1, 2, 3 beside long ones"]
    given = example(mode, 4)
    clean, _ = call(given, mode, True, "silu", False)
    given["x"][:, :, 12:14] = np.nan
    y, _ = call(given, mode, True, "silu", False)
    inside = np.zeros(26, np.bool_)
    inside[12:14] = True
    assert np.isnan(y[..., inside]).all()
    np.testing.assert_array_equal(y[..., ~inside], clean[..., ~inside])


def test_padding_is_zero_whatever_it_holds() -> None:
    mode = MODES["labels with padding"]
    given = example(mode, 3)
    padding = np.broadcast_to((mode.where["labels"] < 0)[:, None, :], given["x"].shape)
    given["x"][padding] = np.nan
    y, _ = call(given, mode, False, "silu", False)
    assert (y[padding] == 0).all()
    assert np.isfinite(y).all()
    got = call_backward(np.ones(y.shape), None, given, mode, False, "silu")
    assert (got["x"][padding] == 0).all()
    assert np.isfinite(got["weight"]).all()


MALFORMED = {
    "decreasing": [0, 9, 4, 12],
    "negative": [-7, 5, 12],
    "beyond the end": [0, 5, 1000],
    "all beyond": [50, 60, 70],
    "reversed": [12, 6, 0],
    "extreme": [-(2**31), 2**31 - 1, 3],
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("offsets", MALFORMED.values(), ids=list(MALFORMED))
def test_malformed_offsets_give_finite_values_of_the_right_shape(offsets: list[int], framework: str) -> None:
    mode = Mode(1, 12, offsets)
    given = narrowed(example(mode, 4), "float32")
    y, final = call(given, mode, True, "silu", True, framework)
    assert (y.shape, final.shape) == ((1, 3, 12), (mode.rows, 3, 3))
    assert np.isfinite(y).all()
    got = call_backward(y, final, given, mode, True, "silu", framework)
    assert all(np.isfinite(gradient).all() for gradient in got.values())


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_both_kinds_of_offsets(kind: Any) -> None:
    mode = MODES["packed"]
    given = example(mode, 4)
    want, _ = call(given, mode, True, "silu", False)
    arrays = (in_layout(given["x"], True), given["weight"], given["bias"], None, mode.where["offsets"].astype(kind))
    y, _ = reference.causal_conv1d_channel_last(*arrays, given["states"], activation="silu", return_final_states=False)
    np.testing.assert_array_equal(y.swapaxes(1, 2), want)


@pytest.mark.parametrize("channel_last", [False, True])
def test_results_are_row_major_for_any_strides(channel_last: bool) -> None:
    x = torch.randn(7, 5, 3).permute(1, 2, 0)  # strides (3, 1, 15)
    weight = torch.randn(x.shape[2] if channel_last else x.shape[1], 3)
    function = reference.causal_conv1d_channel_last if channel_last else reference.causal_conv1d
    y, final = function(x, weight, activation="silu", return_final_states=True)
    assert y.is_contiguous()
    assert final.is_contiguous()
    view = np.lib.stride_tricks.as_strided(np.arange(60.0), (2, 3, 5), (8, 16, 48))
    y, final = function(view, np.ones((5 if channel_last else 3, 3)), activation="silu", return_final_states=True)
    assert y.flags.c_contiguous
    assert final.flags.c_contiguous


def test_offsets_are_traced_by_jax() -> None:
    """One compiled program serves every content of the offsets."""
    mode = MODES["packed"]
    given = narrowed(example(mode, 4), "float32")
    x, w, states = in_layout(given["x"], True), given["weight"], given["states"]

    @jax.jit
    def run(x: Any, w: Any, offsets: Any, states: Any) -> Any:
        return reference.causal_conv1d_channel_last(
            x, w, None, None, offsets, states, activation="silu", return_final_states=True
        )

    for offsets in ([0, 7, 20], [0, 0, 20], [0, 20, 20], [2, 3, 17]):
        want, want_final = oracle.forward(given["x"], w, activation="silu", states=states, offsets=np.asarray(offsets))
        y, final = run(x, w, np.asarray(offsets, np.int32), states)
        np.testing.assert_allclose(np.asarray(y).swapaxes(1, 2), want, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(np.asarray(final).swapaxes(1, 2), want_final.astype(np.float32))
    assert run._cache_size() == 1
