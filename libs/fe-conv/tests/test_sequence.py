"""The front door of ``causal_conv1d`` on the CPU: every row of its checks, its results, layouts, states and plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import conv_oracle as oracle
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import fe_runtime
from fe_conv import causal_conv1d
from fe_conv.sequence import BACKWARD, CHANNEL_LAST, CHANNEL_LAST_BACKWARD, OPERATION
from fe_runtime import DtypeError, InvalidArgumentError, NotSupportedError
from fe_runtime.testing import Call, assert_rejected, invalid_calls, to_framework, to_numpy

B, D, T, W = 2, 5, 9, 4
FORWARD = (OPERATION, CHANNEL_LAST)
BACKWARDS = (BACKWARD, CHANNEL_LAST_BACKWARD)


def arrays(dtype: Any = np.float32, *, batch: int = B, width: int = W, seed: int = 0) -> dict[str, Any]:
    given = oracle.operands(batch, D, T, width, seed=seed)
    return {name: array.astype(dtype) for name, array in given.items()}


def error_of(*call: Any, **keywords: Any) -> Exception:
    """Return the exception of a call, whose text must name operation, argument, rule and what was given."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the tests look at the class
        causal_conv1d(*call, **keywords)
    assert str(caught.value).startswith("causal_conv1d")
    assert " must " in str(caught.value)
    assert "; got " in str(caught.value)
    return caught.value


# --- every row of the contract's checks ------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["relu", "SiLU", ""])
def test_unknown_activation(activation: str) -> None:
    a = arrays()
    error = error_of(a["x"], a["weight"], activation=activation)
    assert type(error) is NotSupportedError
    assert isinstance(error, NotImplementedError)
    assert "activation must be identity, silu or swish" in str(error)


def test_activation_that_is_no_string() -> None:
    a = arrays()
    assert type(error_of(a["x"], a["weight"], activation=True)) is TypeError


def labels(value: int = 0) -> Any:
    return np.full((B, T), value, np.int32)


def offsets(*values: int) -> Any:
    return np.array(values, np.int32)


def test_seq_idx_and_cu_seqlens_both_given() -> None:
    a = arrays(batch=1)
    error = error_of(a["x"], a["weight"], seq_idx=labels()[:1], cu_seqlens=offsets(0, T))
    assert type(error) is InvalidArgumentError
    assert "seq_idx must be None with cu_seqlens" in str(error)


def test_seq_idx_with_return_final_states() -> None:
    a = arrays()
    error = error_of(a["x"], a["weight"], seq_idx=labels(), return_final_states=True)
    assert type(error) is InvalidArgumentError
    assert "seq_idx must be None with return_final_states=True" in str(error)


def test_seq_idx_with_initial_states() -> None:
    a = arrays()
    error = error_of(a["x"], a["weight"], seq_idx=labels(), initial_states=a["states"])
    assert type(error) is NotSupportedError
    assert "seq_idx must be None with initial_states" in str(error)


def test_final_states_out_without_return_final_states() -> None:
    a = arrays()
    error = error_of(a["x"], a["weight"], final_states_out=np.empty((B, D, W - 1), np.float32))
    assert type(error) is InvalidArgumentError
    assert "final_states_out must be None without return_final_states=True" in str(error)


@pytest.mark.parametrize("value", [1, 0, None, "yes", np.bool_(True)], ids=repr)
def test_return_final_states_is_not_a_bool(value: Any) -> None:
    a = arrays()
    assert type(error_of(a["x"], a["weight"], return_final_states=value)) is TypeError
    out = np.empty((B, D, W - 1), np.float32)
    assert type(error_of(a["x"], a["weight"], return_final_states=value, final_states_out=out)) is TypeError


@pytest.mark.parametrize("name", ["x", "weight", "bias", "seq_idx", "cu_seqlens", "initial_states"])
@pytest.mark.parametrize("value", [[[[1.0]]], 1.0, "x"], ids=["list", "number", "string"])
def test_non_tensor_operand(name: str, value: Any) -> None:
    a = arrays()
    call = {"x": a["x"], "weight": a["weight"], name: value}
    error = error_of(**call)
    assert type(error) is TypeError
    assert f"{name} must be an array" in str(error)


def test_final_states_out_that_is_no_tensor() -> None:
    a = arrays()
    assert type(error_of(a["x"], a["weight"], return_final_states=True, final_states_out=[1.0])) is TypeError


SHAPES = {
    "x not 3-D": ("x", {"x": (B, D)}),
    "x of four dimensions": ("x", {"x": (B, D, T, 1)}),
    "weight not 2-D": ("weight", {"weight": (D, 1, W)}),
    "weight of another number of channels": ("weight", {"weight": (D + 1, W)}),
    "one tap": ("weight", {"weight": (D, 1)}),
    "no taps": ("weight", {"weight": (D, 0)}),
    "bias of another number of channels": ("bias", {"bias": (D + 1,)}),
    "bias of two dimensions": ("bias", {"bias": (1, D)}),
    "states of another number of sequences": ("initial_states", {"initial_states": (B + 1, D, W - 1)}),
    "states of another number of channels": ("initial_states", {"initial_states": (B, D + 1, W - 1)}),
    "states of another width": ("initial_states", {"initial_states": (B, D, W)}),
}


@pytest.mark.parametrize("case", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("channel_last", [False, True])
def test_shape_mismatch(case: Any, channel_last: bool) -> None:
    argument, changed = case
    a = arrays()
    call = {"x": a["x"], "weight": a["weight"]} | {n: np.zeros(shape, np.float32) for n, shape in changed.items()}
    if channel_last and call["x"].ndim == 3:
        call["x"] = np.ascontiguousarray(call["x"].swapaxes(1, 2)).swapaxes(1, 2)
    error = error_of(**call)
    assert type(error) is InvalidArgumentError
    assert f": {argument} must " in str(error)


@pytest.mark.parametrize("shape", [(B, T + 1), (B + 1, T), (T,)])
def test_seq_idx_shape_mismatch(shape: tuple[int, ...]) -> None:
    a = arrays()
    error = error_of(a["x"], a["weight"], seq_idx=np.zeros(shape, np.int32))
    assert type(error) is InvalidArgumentError
    assert "seq_idx must have shape" in str(error)


@pytest.mark.parametrize("shape", [(B, D, W), (B, W - 1, D), (B + 1, D, W - 1), (D, W - 1)])
def test_final_states_out_shape_mismatch(shape: tuple[int, ...]) -> None:
    a = arrays()
    out = np.zeros(shape, np.float32)
    error = error_of(a["x"], a["weight"], return_final_states=True, final_states_out=out)
    assert type(error) is InvalidArgumentError
    assert (out == 0).all()


def test_packed_with_more_than_one_batch_row() -> None:
    a = arrays()
    error = error_of(a["x"], a["weight"], cu_seqlens=offsets(0, T))
    assert type(error) is InvalidArgumentError
    assert "x must have one batch row with cu_seqlens" in str(error)


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_offsets(count: int) -> None:
    a = arrays(batch=1)
    error = error_of(a["x"], a["weight"], cu_seqlens=np.zeros(count, np.int32))
    assert type(error) is InvalidArgumentError
    assert "cu_seqlens must hold at least two offsets" in str(error)


def test_more_sequences_than_tokens_are_accepted() -> None:
    a = arrays(batch=1)
    many = np.repeat(offsets(0, 3, T), [20, 20, 1])
    y, final = causal_conv1d(a["x"], a["weight"], cu_seqlens=many, return_final_states=True)
    want, want_final = oracle.forward(a["x"], a["weight"], offsets=many)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(final, want_final)


@pytest.mark.parametrize("name", ["initial_states", "final_states_out"])
def test_state_dtype_differs_from_x(name: str) -> None:
    a = arrays()
    call = {name: a["states"].astype(np.float64), "return_final_states": True}
    error = error_of(a["x"], a["weight"], **call)
    assert type(error) is DtypeError
    assert isinstance(error, TypeError)


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16])
def test_weight_or_bias_dtype_differs_from_x(name: str, dtype: Any) -> None:
    a = arrays()
    call = {"x": a["x"], "weight": a["weight"], name: a[name].astype(dtype)}
    error = error_of(**call)
    assert type(error) is DtypeError
    assert f": {name} must have the dtype of x" in str(error)


@pytest.mark.parametrize(
    ("name", "array"),
    [("seq_idx", np.zeros((B, T), np.int64)), ("cu_seqlens", np.array([0.0, T])), ("x", np.zeros((B, D, T), np.int32))],
    ids=["seq_idx", "cu_seqlens", "x"],
)
def test_other_dtypes(name: str, array: Any) -> None:
    a = arrays()
    call = {"x": a["x"], "weight": a["weight"], name: array}
    assert type(error_of(**call)) is DtypeError


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("width", [3, 4])
def test_bf16_x_with_fp32_weight_in_every_combination(width: int, activation: str | None, bias: bool) -> None:
    a = arrays(ml_dtypes.bfloat16, width=width)
    weight = arrays(width=width)["weight"]
    y = causal_conv1d(a["x"], weight, a["bias"] if bias else None, activation, initial_states=a["states"])
    want, _ = oracle.forward(a["x"], weight, a["bias"] if bias else None, activation or "identity", states=a["states"])
    assert y.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(y.astype(np.float64), want, rtol=2.0**-8, atol=1e-5)


def test_mixed_devices_and_frameworks() -> None:
    x, weight, states = (torch.zeros(shape) for shape in ((B, D, T), (D, W), (B, D, W - 1)))
    for call in ({"initial_states": states.to("meta")}, {"bias": torch.zeros(D, device="meta")}):
        error = error_of(x, weight, **call)
        assert type(error) is InvalidArgumentError
    error = error_of(x, weight, return_final_states=True, final_states_out=states.to("meta"))
    assert type(error) is InvalidArgumentError
    assert "final_states_out must be on the device of x" in str(error)
    assert type(error_of(x, weight.numpy())) is InvalidArgumentError
    error = error_of(x, weight, return_final_states=True, final_states_out=states.numpy())
    assert type(error) is InvalidArgumentError
    assert "framework" in str(error)


@pytest.mark.parametrize("name", ["x", "weight", "bias", "cu_seqlens", "initial_states"])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_final_states_out_overlaps_an_input(name: str, framework: str) -> None:
    """Decided by bytes, not by storage: the two views below have storages of their own in torch."""
    batch, channels, width = 1, 4, 2
    memory = np.zeros(64, np.float32)
    out = memory[:4].reshape(batch, channels, width - 1)
    inputs = {
        "x": np.ones((batch, channels, 3), np.float32),
        "weight": np.ones((channels, width), np.float32),
        "bias": np.ones(channels, np.float32),
        "cu_seqlens": offsets(0, 3),
        "initial_states": np.ones((batch, channels, width - 1), np.float32),
    }
    shape, dtype = inputs[name].shape, inputs[name].dtype
    inputs[name] = memory[3 : 3 + inputs[name].size].view(dtype).reshape(shape)
    inputs[name][...] = [0, 3] if name == "cu_seqlens" else 1
    if framework == "torch":
        out, inputs = torch.from_numpy(out), {n: torch.from_numpy(a) for n, a in inputs.items()}  # type: ignore[assignment]
    before = memory.copy()
    error = error_of(**inputs, return_final_states=True, final_states_out=out)
    assert type(error) is InvalidArgumentError
    assert f"final_states_out must share no memory with {name}" in str(error)
    np.testing.assert_array_equal(memory, before)


def test_cpu_tensors_take_the_reference_silently(recwarn: pytest.WarningsRecorder) -> None:
    a = arrays()
    y = causal_conv1d(torch.from_numpy(a["x"]), torch.from_numpy(a["weight"]))
    assert isinstance(y, torch.Tensor)
    assert not recwarn.list


@pytest.mark.parametrize("shape", [(0, D, T), (B, 0, T), (B, D, 0), (0, 0, 0)], ids=["B", "D", "T", "all"])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_empty_extents(shape: tuple[int, int, int], framework: str) -> None:
    """The output is empty; the final state is the tail of the history."""
    batch, channels, length = shape
    states = np.random.default_rng(0).standard_normal((batch, channels, W - 1))
    x, weight, given = (to_framework(array, framework) for array in (np.zeros(shape), np.ones((channels, W)), states))
    y, final = causal_conv1d(x, weight, initial_states=given, return_final_states=True)
    assert tuple(y.shape) == shape
    if length == 0:
        np.testing.assert_array_equal(to_numpy(final), states)
    y, final = causal_conv1d(x, weight, return_final_states=True)
    assert tuple(final.shape) == states.shape
    assert (to_numpy(final) == 0).all()


def test_offsets_of_other_kinds_and_values() -> None:
    a = arrays(batch=1)
    want = causal_conv1d(a["x"], a["weight"], cu_seqlens=offsets(0, 4, T))
    np.testing.assert_array_equal(causal_conv1d(a["x"], a["weight"], cu_seqlens=np.array([0, 4, T])), want)
    y = causal_conv1d(a["x"], a["weight"], cu_seqlens=offsets(2, 4))
    assert (y[..., :2] == 0).all()
    assert (y[..., 4:] == 0).all()
    np.testing.assert_array_equal(y[..., 2:4], causal_conv1d(np.ascontiguousarray(a["x"][..., 2:4]), a["weight"]))


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("values", [(0, 6, 4, T), (-1, 4, T), (0, T + 1)], ids=["decreasing", "negative", "beyond"])
def test_malformed_offsets_on_the_cpu(values: Any, framework: str) -> None:
    a = arrays(batch=1)
    placed = [to_framework(array, framework) for array in (a["x"], a["weight"], offsets(*values))]
    error = error_of(placed[0], placed[1], cu_seqlens=placed[2])
    assert type(error) is InvalidArgumentError
    assert "cu_seqlens must hold offsets from 0 to T = 9 that never decrease" in str(error)


def test_checked_mode_wants_every_token_in_a_sequence() -> None:
    a = arrays(batch=1)
    fe_runtime.configure(check_device_values=True)
    try:
        for values in ((1, T), (0, T - 1)):
            error = error_of(a["x"], a["weight"], cu_seqlens=offsets(*values))
            assert "cu_seqlens must begin with 0 and end with T = 9" in str(error)
        causal_conv1d(a["x"], a["weight"], cu_seqlens=offsets(0, 0, 5, 5, T))
    finally:
        fe_runtime.configure(check_device_values=None)


def example(operation: Any, labelled: bool) -> Call:
    """A valid call of an operation with every optional input that goes together."""
    channel_last, is_backward = "channel_last" in operation.name, "backward" in operation.name
    a = arrays(batch=1)
    x = np.ascontiguousarray(a["x"].swapaxes(1, 2)) if channel_last else a["x"]
    states = None if labelled else np.ones((2, D, W - 1), np.float32)
    where = (labels()[:1], None) if labelled else (None, offsets(0, 4, T))
    given = (x, a["weight"], a["bias"], *where, states)
    if is_backward:
        dfinal = None if labelled else np.ones((2, W - 1, D), np.float32)
        return Call((x.copy(), dfinal, *given), {"activation": "silu"})
    return Call(given, {"activation": "silu", "return_final_states": not labelled})


def every_invalid_call() -> list[Any]:
    found = []
    for operation in (*FORWARD, *BACKWARDS):
        calls = invalid_calls(operation.contract, example(operation, labelled=False))
        bare = dataclasses.replace(operation.contract, rules=())
        calls += [c for c in invalid_calls(bare, example(operation, labelled=True)) if c.argument == "seq_idx"]
        found += [pytest.param(operation, call, id=f"{operation.name}-{call.id}") for call in calls]
    return found


@pytest.mark.parametrize(("operation", "call"), every_invalid_call())
def test_the_registered_operations_reject_every_invalid_call(operation: Any, call: Any) -> None:
    assert_rejected(operation.outputs, operation.name, call)


# --- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("layout", ["tokens inside", "channels inside", "neither"])
def test_every_framework_and_layout(layout: str, framework: str) -> None:
    """Rows with and without states, packed rows, labels: against naive loops."""
    a = arrays()

    def laid_out(x: Any) -> Any:
        if layout == "channels inside":
            return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
        return np.repeat(np.repeat(x, 2, axis=1), 2, axis=2)[:, ::2, ::2] if layout == "neither" else x

    def call(x: Any, **more: Any) -> Any:
        placed = {name: to_framework(value, framework) for name, value in more.items()}
        options = {"activation": "swish", "return_final_states": "seq_idx" not in more}
        results = causal_conv1d(to_framework(laid_out(x), framework), **placed, **options)
        return [to_numpy(result) for result in results] if options["return_final_states"] else [to_numpy(results)]

    known = {"weight": a["weight"], "bias": a["bias"]}
    want = oracle.forward(a["x"], **known, activation="silu", states=a["states"])
    for got, exact in zip(call(a["x"], **known, initial_states=a["states"]), want, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-6)
    packed = offsets(0, 0, 5, 6, T)
    want = oracle.forward(a["x"][:1], **known, activation="silu", offsets=packed)
    for got, exact in zip(call(a["x"][:1], **known, cu_seqlens=packed), want, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-6)
    marked = np.random.default_rng(5).integers(-1, 2, (B, T)).astype(np.int32)
    want = oracle.forward(a["x"], **known, activation="silu", labels=marked)
    np.testing.assert_allclose(call(a["x"], **known, seq_idx=marked)[0], want[0], rtol=1e-5, atol=1e-6)


MEMORY = {
    "contiguous": lambda: torch.randn(2, 5, 7),
    "transposed": lambda: torch.randn(2, 7, 5).transpose(1, 2),
    "slice of a projection": lambda: torch.randn(2, 7, 16)[:, :, 3:8].transpose(1, 2),
    "slice of tokens": lambda: torch.randn(2, 5, 16)[:, :, 3:10],
    "batch inside, channels innermost": lambda: torch.randn(7, 2, 5).permute(1, 2, 0),
    "batch inside, tokens innermost": lambda: torch.randn(5, 2, 7).permute(1, 0, 2),
    "one token": lambda: torch.randn(2, 5, 1),
    "one token, transposed": lambda: torch.randn(2, 1, 5).transpose(1, 2),
    "one channel": lambda: torch.randn(2, 1, 7),
    "one channel, transposed": lambda: torch.randn(2, 7, 1).transpose(1, 2),
    "one row, transposed": lambda: torch.randn(1, 7, 5).transpose(1, 2),
    "every other": lambda: torch.randn(2, 10, 14)[:, ::2, ::2],
    "every other, transposed": lambda: torch.randn(2, 14, 10)[:, ::2, ::2].transpose(1, 2),
}


@pytest.mark.parametrize("make", MEMORY.values(), ids=list(MEMORY))
def test_output_has_the_memory_format_of_empty_like(make: Any) -> None:
    x = make()
    weight = torch.randn(x.shape[1], 3)
    y = causal_conv1d(x, weight)
    assert y.stride() == torch.empty_like(x).stride()
    want, _ = oracle.forward(x.numpy(), weight.numpy())
    np.testing.assert_allclose(y.numpy(), want, rtol=1e-5, atol=1e-5)
    if 1 not in x.shape:  # numpy gives every such dimension the stride of one element
        result = causal_conv1d(x.numpy(), weight.numpy())
        assert result.strides == np.empty_like(x.numpy()).strides


def test_odd_strides_of_every_operand() -> None:
    a = arrays(np.float64, batch=1)
    want = causal_conv1d(a["x"], a["weight"], a["bias"], cu_seqlens=offsets(0, 4, T))

    def spread(array: Any) -> Any:
        wide = np.zeros((*array.shape, 2), array.dtype)
        wide[..., 0] = array
        return wide[..., 0]

    cu = spread(offsets(0, 4, T))
    y = causal_conv1d(spread(a["x"]), spread(a["weight"]), spread(a["bias"]), cu_seqlens=cu)
    np.testing.assert_array_equal(y, want)
    reversed_ = causal_conv1d(a["x"][..., ::-1], a["weight"][:, ::-1], a["bias"][::-1][::-1])
    np.testing.assert_allclose(
        reversed_, oracle.forward(a["x"][..., ::-1], a["weight"][:, ::-1], a["bias"])[0], rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0)])
def test_states_of_any_strides(order: tuple[int, ...]) -> None:
    a = arrays(np.float64)
    states = np.ascontiguousarray(a["states"].transpose(order)).transpose(np.argsort(order))
    y, final = causal_conv1d(a["x"], a["weight"], initial_states=states, return_final_states=True)
    want, want_final = oracle.forward(a["x"], a["weight"], states=a["states"])
    np.testing.assert_allclose(y, want, rtol=1e-12, atol=1e-12)
    out = np.full_like(states, np.nan)
    _, returned = causal_conv1d(
        a["x"], a["weight"], initial_states=states, return_final_states=True, final_states_out=out
    )
    assert returned is out
    np.testing.assert_array_equal(out, want_final)
    np.testing.assert_array_equal(final, want_final)


@pytest.mark.parametrize("packed", [False, True])
def test_new_states_have_the_channels_innermost(packed: bool) -> None:
    x, weight = torch.randn(1, 6, 10), torch.randn(6, 4)
    cu = torch.tensor([0, 2, 10], dtype=torch.int32) if packed else None
    result = causal_conv1d(x, weight, cu_seqlens=cu, return_final_states=True)
    assert type(result) is tuple
    assert result[1].shape == (2 if packed else 1, 6, 3)
    assert result[1].stride() == (18, 1, 6)


def test_a_sequence_in_two_parts_is_the_sequence() -> None:
    a = arrays(np.float64)
    whole = causal_conv1d(a["x"], a["weight"], a["bias"], "silu", initial_states=a["states"])
    for cut in range(T + 1):
        first, second = a["x"][..., :cut], a["x"][..., cut:]
        y, states = causal_conv1d(
            first, a["weight"], a["bias"], "silu", initial_states=a["states"], return_final_states=True
        )
        rest = causal_conv1d(second, a["weight"], a["bias"], "silu", initial_states=states)
        np.testing.assert_allclose(np.concatenate([y, rest], axis=2), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", [None, "identity"])
def test_identity_has_two_names(activation: Any) -> None:
    x = np.array([[[-3.0, 1.0]]])
    np.testing.assert_array_equal(causal_conv1d(x, np.array([[0.0, 1.0]]), activation=activation), x)


def test_jax_arrays_in_the_eager_function() -> None:
    a = arrays()
    y, final = causal_conv1d(jnp.asarray(a["x"]), jnp.asarray(a["weight"]), return_final_states=True)
    want, want_final = oracle.forward(a["x"], a["weight"])
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(final, want_final.astype(np.float32))
    out = jnp.zeros((B, D, W - 1))
    error = error_of(jnp.asarray(a["x"]), jnp.asarray(a["weight"]), return_final_states=True, final_states_out=out)
    assert type(error) is InvalidArgumentError
    assert "final_states_out must be None for JAX arrays" in str(error)
