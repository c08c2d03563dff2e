"""The front door of ``causal_conv1d_update`` on the CPU: contract, frameworks, registered op, JAX entry, plan."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from fe_conv.reference.update import causal_conv1d_update as reference
from fe_conv.update import CONTRACT, OPERATION, causal_conv1d_update, causal_conv1d_update_jax
from fe_runtime import NotSupportedError, TensorDesc
from fe_runtime.contract import CONTIGUOUS, Layout
from fe_runtime.plan import HOPPER, Target
from fe_runtime.testing import Call, assert_rejected, invalid_calls, strided_array, to_framework, to_numpy, valid_calls

BF16 = "bfloat16"


def run(arrays: Any, options: Any) -> Any:
    x, state, weight, bias, lengths, indices = arrays
    return causal_conv1d_update(x, state, weight, bias, cache_seqlens=lengths, conv_state_indices=indices, **options)


def example(framework: str = "numpy", dtype: str = "float32", tokens: tuple[int, ...] = ()) -> Call:
    rng = np.random.default_rng(0)
    shapes = ((3, 6, *tokens), (5, 6, 4), (6, 4), (6,))
    floats = [rng.standard_normal(shape).astype(getattr(ml_dtypes, dtype, dtype)) for shape in shapes]
    arrays = [*floats, np.array([7, 1, 2], np.int32), np.array([4, -1, 0], np.int32)]
    return Call(tuple(to_framework(a, framework) for a in arrays), {"activation": "silu"})


def step(x: Any, history: Any, weight: Any, bias: Any, activation: Any) -> Any:
    """One token, in float64: the formula of the contract, channels side by side."""
    taps = np.concatenate([history, x[..., None]], axis=-1)[..., -weight.shape[1] :].astype(np.float64)
    z = (taps * weight.astype(np.float64)).sum(-1) + (0 if bias is None else bias.astype(np.float64))
    return z / (1 + np.exp(-z)) if activation in ("silu", "swish") else z


# ---- the contract's rows of errors


@pytest.mark.parametrize("call", invalid_calls(CONTRACT, example()), ids=lambda call: call.id)
def test_invalid_call_is_rejected(call: Any) -> None:
    assert_rejected(run, "causal_conv1d_update", call)


@pytest.mark.parametrize("activation", ["relu", "tanh", "SiLU", ""])
def test_unknown_activation(activation: str) -> None:
    x, state, weight, *_ = example().arrays
    with pytest.raises(ValueError, match=r"causal_conv1d_update: activation must be identity, silu or swish"):
        causal_conv1d_update(x, state, weight, activation=activation)


@pytest.mark.parametrize("argument", range(6), ids=CONTRACT.input_names)
def test_operand_that_is_no_tensor(argument: int) -> None:
    arrays: list[Any] = list(example().arrays)
    arrays[argument] = arrays[argument].tolist()
    with pytest.raises(TypeError, match=f"{CONTRACT.input_names[argument]} must be an array"):
        run(arrays, {})


@pytest.mark.parametrize(
    ("argument", "shape"),
    [
        ("x", (6,)),
        ("x", (3, 6, 2, 1)),
        ("x", (3, 7)),
        ("conv_state", (5, 6)),
        ("conv_state", (5, 7, 4)),
        ("conv_state", (5, 6, 2)),
        ("conv_state", (0, 6, 4)),
        ("weight", (6,)),
        ("weight", (7, 4)),
        ("weight", (6, 0)),
        ("weight", (6, 6)),
        ("bias", (6, 1)),
        ("bias", (5,)),
        ("cache_seqlens", (3, 1)),
        ("cache_seqlens", (4,)),
        ("conv_state_indices", (4,)),
    ],
)
def test_ranks_and_shapes(argument: str, shape: tuple[int, ...]) -> None:
    arrays = dict(zip(CONTRACT.input_names, example().arrays, strict=True))
    arrays[argument] = np.zeros(shape, arrays[argument].dtype)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="causal_conv1d_update: "):
        run(arrays.values(), {})


def test_no_channels() -> None:
    with pytest.raises(ValueError, match="x must have at least one channel"):
        causal_conv1d_update(*(np.zeros(shape, np.float32) for shape in ((3, 0), (3, 0, 3), (0, 4))))


def test_fewer_slots_than_rows_without_indices() -> None:
    x, state, weight, *_ = example().arrays
    with pytest.raises(ValueError, match=r"conv_state must have a slot for each row .*; got S = 2 with N = 3"):
        causal_conv1d_update(x, state[:2], weight)  # type: ignore[index]


@pytest.mark.parametrize(
    ("argument", "dtype"),
    [
        ("x", "float64"),
        ("conv_state", "float16"),
        ("weight", "float16"),
        ("bias", "float16"),
        ("bias", "int32"),
        ("cache_seqlens", "int64"),
        ("conv_state_indices", "int64"),
    ],
)
def test_dtypes_are_type_errors(argument: str, dtype: str) -> None:
    arrays = dict(zip(CONTRACT.input_names, example().arrays, strict=True))
    arrays[argument] = arrays[argument].astype(dtype)  # type: ignore[union-attr]
    with pytest.raises(TypeError, match=f"causal_conv1d_update: {argument} must have "):
        run(arrays.values(), {})


def test_other_device() -> None:
    x, state, weight, *_ = example("torch").arrays
    with pytest.raises(ValueError, match="weight must be on the device of x"):
        causal_conv1d_update(x, state, weight.to("meta"))  # type: ignore[union-attr]


@pytest.mark.parametrize("argument", ["x", "conv_state", "weight", "bias"])
def test_required_gradient(argument: str) -> None:
    arrays = dict(zip(CONTRACT.input_names, example("torch").arrays, strict=True))
    before = arrays["conv_state"].clone()  # type: ignore[union-attr]
    arrays[argument].requires_grad_()  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match=f"causal_conv1d_update: {argument} must not require a gradient"):
        run(arrays.values(), {})
    assert torch.equal(arrays["conv_state"].detach(), before)  # type: ignore[union-attr]
    with torch.no_grad():
        assert not run(arrays.values(), {}).requires_grad


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_state_that_overlaps(framework: str) -> None:
    buffer = to_framework(np.zeros(200, np.float32), framework)
    state = buffer[:80].reshape(4, 5, 4)
    weight, bias = np.ones((5, 4), np.float32), np.ones(5, np.float32)
    weight, bias = (to_framework(a, framework) for a in (weight, bias))
    with pytest.raises(ValueError, match="conv_state must not share memory with x"):
        causal_conv1d_update(buffer[70:90].reshape(4, 5), state, weight)
    with pytest.raises(ValueError, match="conv_state must not share memory with weight"):
        causal_conv1d_update(buffer[100:120].reshape(4, 5), state, buffer[:20].reshape(5, 4))
    with pytest.raises(ValueError, match="conv_state must not share memory with bias"):
        causal_conv1d_update(buffer[100:120].reshape(4, 5), state, weight, buffer[:5])
    causal_conv1d_update(buffer[80:100].reshape(4, 5), state, weight, bias)


def test_state_with_an_element_in_two_places() -> None:
    x, _, weight, *_ = example("torch").arrays
    for state in (torch.zeros(1, 6, 4).expand(3, 6, 4), torch.zeros(99).as_strided((3, 6, 4), (12, 2, 1))):
        with pytest.raises(ValueError, match="conv_state must have positive strides and no element in two places"):
            causal_conv1d_update(x, state, weight)


def test_state_that_cannot_be_written() -> None:
    x, state, weight, *_ = example().arrays
    state.flags.writeable = False  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="conv_state must be writable"):
        causal_conv1d_update(x, state, weight)
    with pytest.raises(ValueError, match="causal_conv1d_update_jax"):
        causal_conv1d_update(*map(jnp.asarray, (x, state, weight)))


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([4, -2, 0], "name slots 0 to 4, or -1 for padding; got the value -2"),
        ([4, 5, 0], "name slots 0 to 4, or -1 for padding; got the value 5"),
        ([3, -1, 3], "name no slot twice; got the slot 3 twice"),
    ],
    ids=["below -1", "no such slot", "duplicate"],
)
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_indices_on_the_cpu(framework: str, indices: list[int], text: str) -> None:
    x, state, weight, *_ = example(framework).arrays
    before = to_numpy(state).copy()
    given = to_framework(np.array(indices, np.int32), framework)
    with pytest.raises(ValueError, match=f"conv_state_indices must {re.escape(text)}"):
        causal_conv1d_update(x, state, weight, conv_state_indices=given)
    np.testing.assert_array_equal(to_numpy(state), before)


# ---- values


def distinct_indices(name: str, shape: tuple[int, ...], dtype: str, random: Any) -> Any:
    if name == "conv_state_indices":
        return np.where(random.random(shape) < 0.3, -1, random.permutation(5)[: shape[0]])
    return random.integers(-20, 20, shape) if dtype == "int32" else random.standard_normal(shape)


POSITIVE = Layout(
    "positive",
    "",
    "",
    lambda shape, stride: CONTIGUOUS.holds(shape, stride) or stride == (shape[1] * shape[2], 1, shape[1]),
)
NARROW = replace(
    CONTRACT,
    inputs=tuple(
        replace(
            declared,
            dtype_of="x" if declared.name in ("weight", "bias", "conv_state") else None,
            layout=POSITIVE if declared.name == "conv_state" else declared.layout,
        )
        for declared in CONTRACT.inputs
    ),
)
EXTENTS = {"N": (0, 1, 3, 5), "S": (5, 7), "D": (1, 4, 9), "L": (4, 6), "W": (1, 2, 4, 5), "...": (0, 1, 3, 7)}


@settings(max_examples=60, deadline=None)
@given(valid_calls(NARROW, extents=EXTENTS, values=distinct_indices))
def test_valid_calls_give_what_the_contract_says(call: Call) -> None:
    x, state, weight, bias, lengths, indices = (None if a is None else a.copy() for a in call.arrays)
    out = run(call.arrays, call.options)
    assert out.shape == x.shape
    assert out.dtype == x.dtype
    assert out.flags.c_contiguous
    tokens = x[..., None] if x.ndim == 2 else x
    for n in range(x.shape[0]):
        slot = n if indices is None else indices[n]
        for k in range(tokens.shape[2]):
            got = (out if x.ndim == 3 else out[..., None])[n, :, k].astype(np.float64)
            if slot == -1:
                assert not got.any()
                continue
            at = None if lengths is None else (lengths[n] + k) % state.shape[2]
            history = state[slot] if at is None else np.roll(state[slot], -at, axis=-1)
            want = step(tokens[n, :, k], history, weight, bias, call.options["activation"])
            np.testing.assert_allclose(got, want, rtol=2.0**-7, atol=1e-2 if x.dtype != np.float32 else 1e-5)
            if at is None:
                state[slot] = np.concatenate([state[slot, :, 1:], tokens[n, :, k, None]], axis=-1)
            else:
                state[slot, :, at] = tokens[n, :, k]
    np.testing.assert_array_equal(call.arrays[1], state)


@pytest.mark.parametrize("tokens", [(), (3,)], ids=["one token", "K=3"])
@pytest.mark.parametrize("dtype", ["float32", "float16", BF16])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_frameworks_give_numpys_bits(framework: str, dtype: str, tokens: tuple[int, ...]) -> None:
    call = example("numpy", dtype, tokens)
    given = example(framework, dtype, tokens)
    want = run(call.arrays, call.options)
    if framework == "jax":
        x, state, weight, bias, lengths, indices = given.arrays
        got, new = causal_conv1d_update_jax(
            x, state, weight, bias, "silu", cache_seqlens=lengths, conv_state_indices=indices
        )
        assert state is not new
    else:
        got, new = run(given.arrays, given.options), given.arrays[1]
    np.testing.assert_array_equal(to_numpy(new).view(np.uint8), call.arrays[1].view(np.uint8))  # type: ignore[union-attr]
    np.testing.assert_allclose(to_numpy(got).astype(float), want.astype(float), rtol=2.0**-7 if dtype == BF16 else 1e-3)


@pytest.mark.parametrize("weight_dtype", [BF16, "float32"])
@pytest.mark.parametrize("bias_dtype", [BF16, "float32"])
def test_float32_parameters_with_bf16_tokens(weight_dtype: str, bias_dtype: str) -> None:
    x, state, weight, bias, *_ = example("numpy", BF16).arrays
    weight, bias = weight.astype(weight_dtype), bias.astype(bias_dtype)  # type: ignore[union-attr]
    if (weight_dtype, bias_dtype) == (BF16, "float32"):
        with pytest.raises(TypeError, match="bias must have the dtype of x or of weight"):
            causal_conv1d_update(x, state, weight, bias)
        return
    want = step(x, state[:3], weight, bias, None)  # type: ignore[index]
    np.testing.assert_allclose(causal_conv1d_update(x, state, weight, bias).astype(float), want, rtol=2.0**-8)


def test_strided_operands() -> None:
    """A token slice of a fused projection, channels between others, a state whose tokens are planes."""
    x, state, weight, bias, *_ = example().arrays
    want_state = state.copy()  # type: ignore[union-attr]
    want = causal_conv1d_update(x, want_state, weight, bias)
    x = strided_array((3, 6), (17, 2), "float32", x)
    planes = strided_array((5, 6, 4), (30, 1, 7), "float32", state)
    got = causal_conv1d_update(x, planes, strided_array((6, 4), (1, 6), "float32", weight), bias)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(planes, want_state)


def test_no_rows() -> None:
    _, state, weight, *_ = example().arrays
    before = state.copy()  # type: ignore[union-attr]
    out = causal_conv1d_update(np.empty((0, 6), np.float32), state, weight)
    assert out.shape == (0, 6)
    np.testing.assert_array_equal(state, before)


def test_a_filter_of_width_one_needs_no_state() -> None:
    x, _, weight, *_ = example().arrays
    state = np.empty((3, 6, 0), np.float32)
    out = causal_conv1d_update(x, state, weight[:, -1:])  # type: ignore[index]
    np.testing.assert_allclose(out, x * weight[:, -1], rtol=1e-6)  # type: ignore[index,operator]


# ---- torch and JAX


@pytest.mark.parametrize("optional", [False, True], ids=["plain", "bias, ring and indices"])
def test_opcheck(optional: bool) -> None:
    x, state, weight, *others = example("torch").arrays
    arguments = (x, state, weight, *(others if optional else ()))
    causal_conv1d_update(x, state.clone(), weight)  # type: ignore[union-attr]
    torch.library.opcheck(torch.ops.fe_conv.causal_conv1d_update.default, arguments, {"activation": "silu"})


def test_op_is_registered_as_mutating_its_state() -> None:
    causal_conv1d_update(*example("torch").arrays[:3])
    schema = torch.ops.fe_conv.causal_conv1d_update.default._schema
    written = [argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    assert written == ["conv_state"]


def test_version_of_the_state_counts() -> None:
    x, state, weight, *_ = example("torch").arrays
    before = state._version  # type: ignore[union-attr]
    causal_conv1d_update(x, state, weight)
    assert state._version > before  # type: ignore[union-attr]


def test_compiles_as_one_graph_that_updates_the_state() -> None:
    x, state, weight, *_ = example("torch").arrays
    want_state = state.clone()  # type: ignore[union-attr]
    want = [causal_conv1d_update(x * k, want_state, weight, activation="silu") for k in (1, 2)]  # type: ignore[operator]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def two_steps(x: Any, state: Any, weight: Any) -> Any:
        return [causal_conv1d_update(x * k, state, weight, activation="silu") for k in (1, 2)]

    got = two_steps(x, state, weight)
    assert all(map(torch.equal, got, want))
    assert torch.equal(state, want_state)  # type: ignore[arg-type]


def test_meta_tensors_and_subclasses() -> None:
    x, state, weight, *_ = example("torch").arrays
    meta = causal_conv1d_update(x.to("meta"), state.to("meta"), weight.to("meta"))  # type: ignore[union-attr]
    assert (meta.device.type, meta.shape, meta.is_contiguous()) == ("meta", (3, 6), True)

    class Labelled(torch.Tensor):
        pass

    want = causal_conv1d_update(x, state.clone(), weight)  # type: ignore[union-attr]
    got = causal_conv1d_update(x.as_subclass(Labelled), state, weight)  # type: ignore[union-attr]
    assert torch.equal(got.as_subclass(torch.Tensor), want)


def test_jax_entry_under_jit_with_a_donated_state() -> None:
    x, state, weight, bias, lengths, indices = example("jax").arrays
    want, want_state = reference(
        *map(np.asarray, (x, state, weight, bias)), np.asarray(lengths), np.asarray(indices), activation="silu"
    )

    def call(x: Any, state: Any) -> Any:
        return causal_conv1d_update_jax(
            x, state, weight, bias, "swish", cache_seqlens=lengths, conv_state_indices=indices
        )

    out, new = jax.jit(call, donate_argnums=1)(x, jnp.array(state))
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(new, want_state)
    shapes = jax.eval_shape(call, x, state)
    assert [(s.shape, s.dtype) for s in shapes] == [((3, 6), np.float32), ((5, 6, 4), np.float32)]


def test_jax_lowers_for_cuda_without_a_gpu() -> None:
    x, state, weight, *_ = example("jax", BF16).arrays
    lowered = jax.jit(causal_conv1d_update_jax).trace(x, state, weight).lower(lowering_platforms=("cuda",))
    assert "output_operand_aliases" in lowered.as_text() or "output_operand_alias" in lowered.as_text()


# ---- the plan


def desc(shape: tuple[int, ...], dtype: str = BF16, stride: Any = None) -> TensorDesc:
    return TensorDesc.of(dtype, shape, stride, device="cuda:0")


def config_of(rows: int = 8, channels: int = 8192, length: int = 4, width: int = 4, **other: Any) -> dict[str, Any]:
    x, state, weight = desc((rows, channels)), desc((4096, channels, length)), desc((channels, width))
    arrays = {"x": x, "conv_state": state, "weight": weight} | other
    given = tuple(arrays.get(name) for name in CONTRACT.input_names)
    plan = OPERATION.plan(OPERATION.bind(given, {"activation": "silu"}), target=HOPPER)
    assert plan.kernel is not None
    return {"builder": plan.kernel.spec.builder} | dict(plan.kernel.spec.config)


def test_extents_do_not_compile() -> None:
    configs = [config_of(rows, channels) for rows in (1, 8, 4096) for channels in (2048, 8192, 24576)]
    assert all(config == configs[0] for config in configs)
    general = [config_of(length=length, x=desc((8, 8192, k))) for length in (3, 9) for k in (1, 5)]
    assert all(config == general[0] for config in general)


@pytest.mark.parametrize(
    ("other", "layout"),
    [
        pytest.param({}, "row", id="contiguous"),
        pytest.param({"length": 3}, "row", id="contiguous of 3"),
        pytest.param({"conv_state": desc((9, 8192, 3), stride=(24576, 1, 8192))}, "plane", id="channel-last"),
        pytest.param({"x": desc((8, 8192), stride=(24576, 1))}, "row", id="slice of a fused projection"),
        pytest.param({"conv_state": desc((9, 8192, 4), stride=(40000, 4, 1))}, "row", id="slots apart"),
        pytest.param({"conv_state_indices": desc((8,), "int32")}, "row", id="indices"),
        pytest.param({"length": 9}, "any", id="long slots"),
        pytest.param({"width": 1}, "any", id="width 1"),
        pytest.param({"x": desc((8, 8192), stride=(16384, 2))}, "any", id="channels apart"),
        pytest.param({"weight": desc((8192, 4), stride=(1, 8192))}, "any", id="transposed filter"),
        pytest.param({"bias": desc((8192,), stride=(2,))}, "any", id="strided bias"),
        pytest.param({"conv_state": desc((9, 8192, 4), stride=(65536, 8, 1))}, "any", id="places apart"),
        pytest.param({"cache_seqlens": desc((8,), "int32")}, "any", id="ring"),
        pytest.param({"x": desc((8, 8192, 2))}, "any", id="several tokens"),
    ],
)
def test_layouts_of_the_fast_kernel(other: dict[str, Any], layout: str) -> None:
    assert config_of(**other)["layout"] == layout


def test_filters_that_no_kernel_holds() -> None:
    arrays = (desc((8, 64)), desc((8, 64, 40)), desc((64, 40)), None, None, None)
    plan = OPERATION.plan(OPERATION.bind(arrays, {}), target=HOPPER)
    assert plan.backend == "reference"
    assert "no kernel: the filter has more than 32 taps" in plan.explain()
    with pytest.raises(NotSupportedError, match="more than 32 taps"):
        OPERATION.plan(OPERATION.bind(arrays, {}), "sm90", HOPPER)


@pytest.mark.parametrize(("capability", "backend"), [((8, 0), "sm80"), ((9, 0), "sm90"), ((12, 0), "sm120")])
def test_architectures_with_a_kernel(capability: tuple[int, int], backend: str) -> None:
    bound = OPERATION.bind((desc((8, 64)), desc((8, 64, 4)), desc((64, 4)), None, None, None), {})
    assert OPERATION.plan(bound, target=Target(capability, 100)).backend == backend
