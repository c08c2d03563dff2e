"""Arrays whose bytes may come in several forms: pitches, packed pairs, views, byte aliases, accumulated results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from fe_storage import CONTRACT, LAYOUTS, OPERATION, VIEW, ScaleBlocks, scale_blocks
from hypothesis import given, settings

from fe_runtime.compile import cache
from fe_runtime.contract import Input, OutputSpec, bind, check_outputs
from fe_runtime.errors import InvalidArgumentError
from fe_runtime.jax.entry import entry
from fe_runtime.plan import HOPPER, Kernel
from fe_runtime.tensor_desc import TensorDesc
from fe_runtime.testing import Call, assert_rejected, invalid_calls, to_numpy, valid_calls

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((16, 64)).astype(np.float32)
SCALE = RANDOM.integers(125, 130, (2, 16, 1)).astype(np.uint8)
CODES = RANDOM.integers(0, 256, (16, 32)).astype(np.uint8)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def spread(scale: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    factors = np.exp2(scale.astype(np.float64)[..., 0] - 127)
    return np.repeat(factors.T, 32, axis=1)


def unpacked(codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.stack([E2M1[codes & 15], E2M1[codes >> 4]], axis=-1).reshape(codes.shape[0], -1)


WANT = X * spread(SCALE)


def check(call: Any, text: str, **changes: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        call(**changes)


def bound(x: Any = X, scale: Any = SCALE, factor: Any = None, **options: Any) -> Any:
    return bind(CONTRACT, (x, scale, factor), options)


# --- inputs ---------------------------------------------------------------------------------------------------------


def test_rows_may_have_an_aligned_pitch() -> None:
    wide = np.zeros((16, 68), np.float32)[:, :64]
    wide[...] = X
    np.testing.assert_allclose(scale_blocks(wide, SCALE)["y"], WANT, rtol=1e-6)
    assert bound(wide).alignments["x"] == 16


def test_columns_may_be_contiguous() -> None:
    np.testing.assert_allclose(scale_blocks(np.asfortranarray(X), SCALE)["y"], WANT, rtol=1e-6)


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (
            np.zeros((16, 67), np.float32)[:, :64],
            r"x must have strides of multiples of 16 bytes; got strides \(67, 1\)",
        ),
        (np.zeros((16, 66), np.float32), "x must have a contiguous extent .* of a multiple of 16 bytes; got 66 elem"),
        (np.asfortranarray(np.zeros((15, 64), np.float32)), "x must have a contiguous extent .* got 15 elements"),
        (np.zeros((16, 128), np.float32)[:, ::2], "x must have rows or columns of stride 1"),
        (np.broadcast_to(X[:1], (16, 64)), "x must have rows or columns of stride 1"),
    ],
    ids=["pitch", "extent", "extent of columns", "no unit stride", "broadcast"],
)
def test_other_strides_are_named_errors(x: Any, text: str) -> None:
    check(bound, text, x=x, scale=np.zeros((2, x.shape[0], 1), np.uint8))


def test_the_address_counts_on_a_gpu_only() -> None:
    from fe_runtime.contract.bind import Sample

    for device, fails in (("cpu", False), ("cuda:0", True)):
        samples = (
            Sample(TensorDesc.of("float32", (16, 64), device=device), "torch", 8),
            Sample(TensorDesc.of("uint8", (2, 16, 1), device=device), "torch", 16),
        )
        if fails:
            check(lambda s=samples: bind(CONTRACT, (*s, None), {}), "x must start at an address .* 16 bytes; got .* 8")
        else:
            bind(CONTRACT, (*samples, None), {})


def test_strides_of_single_rows_are_ignored() -> None:
    odd = np.lib.stride_tricks.as_strided(X, (1, 64), (4, 4))
    np.testing.assert_allclose(scale_blocks(odd, SCALE[:, :1].copy())["y"], WANT[:1], rtol=1e-6)


@pytest.mark.parametrize("container", [np.uint8, torch.uint8, torch.float4_e2m1fn_x2], ids=str)
def test_packed_pairs_have_the_extents_of_their_codes(container: Any) -> None:
    codes: Any = CODES if container is np.uint8 else torch.from_numpy(CODES).view(container)
    scale: Any = SCALE if container is np.uint8 else torch.from_numpy(SCALE)
    desc = bound(codes, scale).arrays["x"]
    assert (desc.dtype, desc.shape, desc.stride) == ("float4_e2m1fn", (16, 64), (64, 1))
    np.testing.assert_array_equal(to_numpy(scale_blocks(codes, scale)["y"]), unpacked(CODES) * spread(SCALE))


def test_pairs_lie_along_the_declared_dimension() -> None:
    check(bound, "x must have unit stride in dimension 1", x=np.asfortranarray(CODES))


def test_one_code_per_item_is_no_pair() -> None:
    check(bound, "x must hold FP4 codes in pairs", x=np.zeros((16, 64), ml_dtypes.float4_e2m1fn))


def test_descriptors_of_pairs_may_be_physical_or_logical() -> None:
    for desc in (TensorDesc.of("uint8", (16, 32)), TensorDesc.of("float4_e2m1fn", (16, 64))):
        assert bound(desc, TensorDesc.of("uint8", (2, 16, 1))).arrays["x"].shape == (16, 64)


def test_a_view_means_its_canonical_array() -> None:
    view = SCALE.transpose(VIEW)
    checked = bound(scale=view)
    assert checked.given["scale"] == (16, 1, 2)
    assert checked.arrays["scale"].shape == (2, 16, 1)
    np.testing.assert_array_equal(scale_blocks(X, view)["y"], scale_blocks(X, SCALE)["y"])


def test_a_copy_of_the_view_is_another_layout() -> None:
    text = r"scale must be contiguous .* got shape \(16, 1, 2\) with strides \(2, 2, 1\)"
    check(bound, text, scale=np.ascontiguousarray(SCALE.transpose(VIEW)))


@pytest.mark.parametrize("dtype", ["uint8", "int8", "float8_e8m0fnu"])
def test_aliases_of_a_dtype_mean_it(dtype: str) -> None:
    scale = SCALE.view(getattr(ml_dtypes, dtype, dtype))
    assert bound(scale=scale).dtype("scale") == "float8_e8m0fnu"
    np.testing.assert_allclose(scale_blocks(X, scale)["y"], WANT, rtol=1e-6)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_any_number_of_trailing_ones(rank: int) -> None:
    factor = np.full((1,) * rank, 2.0, np.float32)
    np.testing.assert_allclose(scale_blocks(X, SCALE, factor)["y"], 2 * WANT, rtol=1e-6)


def test_other_extents_are_no_trailing_ones() -> None:
    check(bound, r"factor must have shape \(1,\) or \(1, 1, ..., 1\)", factor=np.ones((1, 2), np.float32))
    check(bound, r"factor must have shape \(1,\) or", factor=np.ones((), np.float32))


def test_derived_extents_are_checked() -> None:
    check(bound, r"scale must have shape .*T = 2.* got shape \(3, 16, 1\)", scale=np.zeros((3, 16, 1), np.uint8))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"shape": "1", "also": (), "view": (1, 0)}, "view must be an order"),
        ({"shape": "1 1*"}, "only another form"),
        ({"mutated": True}, "must come in its canonical form"),
    ],
    ids=["view", "ones", "mutated"],
)
def test_a_declaration_that_makes_no_sense(changes: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        replace(Input("a", "R C", ("uint8",), pairs=1), **changes)


# --- generated calls ------------------------------------------------------------------------------------------------

EXAMPLE = Call((X, SCALE, np.ones(1, np.float32)), {"gain": 1.0, "inside": "columns", "dtype": "float32"})


@pytest.mark.parametrize("call", invalid_calls(CONTRACT, EXAMPLE), ids=lambda call: call.id)
def test_invalid_calls_are_rejected(call: Any) -> None:
    assert_rejected(lambda arrays, options: scale_blocks(*arrays, **options), "scale_blocks", call)


def bytes_of_scales(name: str, shape: Any, dtype: str, random: Any) -> Any:
    if name == "scale" and dtype != "float8_e8m0fnu":
        return random.integers(120, 127, shape)
    return np.exp2(random.integers(-3, 4, shape)) if name == "scale" else random.integers(0, 120, shape)


@settings(max_examples=80, deadline=None)
@given(valid_calls(CONTRACT, extents={"R": (1, 4, 16), "C": (32, 64, 96, 160)}, values=bytes_of_scales))
def test_valid_calls_give_what_the_contract_says(call: Call) -> None:
    result = scale_blocks(*call.arrays, **call.options)  # type: ignore[arg-type]
    for output, spec in zip(result, OPERATION.bind(*call).outputs, strict=True):
        assert spec is not None
        assert output.shape == spec.shape
        assert LAYOUTS[str(call.options["inside"])].holds(result["y"].shape, _stride(result["y"]))


def _stride(x: Any) -> tuple[int, ...]:
    return tuple(step // x.itemsize for step in x.strides) if isinstance(x, np.ndarray) else tuple(x.stride())


# --- results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", ["columns", "rows"])
def test_results_have_their_order_in_memory(inside: str) -> None:
    stride = (64, 1) if inside == "columns" else (1, 16)
    for x, scale in ((X, SCALE), (torch.from_numpy(X), torch.from_numpy(SCALE))):
        y = scale_blocks(x, scale, inside=inside)["y"]
        assert _stride(y) == stride
        np.testing.assert_allclose(to_numpy(y), WANT, rtol=1e-6)


def test_jax_has_row_major_results_only() -> None:
    x, scale = jnp.asarray(X), jnp.asarray(SCALE)
    options = {"gain": 1.0, "inside": "rows", "dtype": "float32"}
    check(lambda: OPERATION((x, scale, None), options), "y must have row-major results")


def test_a_viewed_result_is_a_view_in_torch_only() -> None:
    assert scale_blocks(X, SCALE)["scales"].shape == (2, 16, 1)
    assert entry(OPERATION, (jnp.asarray(X), jnp.asarray(SCALE), None), {})[1].shape == (2, 16, 1)
    scales = scale_blocks(torch.from_numpy(X), torch.from_numpy(SCALE))["scales"]
    assert scales.shape == (16, 1, 2)
    assert scales.stride() == (1, 1, 16)
    np.testing.assert_array_equal(to_numpy(scales).view(np.uint8), SCALE.transpose(VIEW))


def test_results_start_from_nothing() -> None:
    result = scale_blocks(X, SCALE, gain=-1.0)
    assert result["peak"] == pytest.approx(np.abs(WANT).max())
    np.testing.assert_allclose(result["total"], -WANT.sum(1), rtol=1e-4, atol=1e-5)
    assert scale_blocks(X[:0], SCALE[:, :0])["peak"] == -np.inf


@pytest.mark.parametrize("dtype", [torch.float4_e2m1fn_x2, torch.uint8], ids=str)
def test_packed_results(dtype: Any) -> None:
    codes, scale = torch.from_numpy(CODES), torch.full((2, 16, 1), 127, dtype=torch.uint8)
    y = scale_blocks(codes, scale, dtype=dtype)["y"]
    assert (y.dtype, tuple(y.shape)) == (dtype, (16, 32))
    np.testing.assert_array_equal(unpacked(to_numpy(y.view(torch.uint8))), unpacked(CODES))


# --- the class form -------------------------------------------------------------------------------------------------


def outputs(rows: int = 16, inside: str = "columns", pitch: int = 64) -> list[Any]:
    y = torch.full((rows, pitch) if inside == "columns" else (pitch, rows), -1.0)
    y = y[:, :64] if inside == "columns" else y[:64].T
    scales = torch.zeros((2, rows, 1), dtype=torch.uint8)
    return [y, scales, torch.full((1, 1, 1), -torch.inf), torch.zeros(rows)]


def compiled(*given: Any, **options: Any) -> ScaleBlocks:
    op = ScaleBlocks(torch.from_numpy(X), torch.from_numpy(SCALE), None, *(given or outputs()), **options)
    op.compile()
    return op


def test_the_class_accumulates_into_the_callers_outputs() -> None:
    made = outputs(pitch=68)
    made[2].fill_(1000.0)
    made[3].fill_(5.0)
    x, scale = torch.from_numpy(X), torch.from_numpy(SCALE)
    op = compiled()
    op.execute(x, scale, None, *made)
    np.testing.assert_allclose(made[0], WANT, rtol=1e-6)
    assert made[2].item() == 1000.0
    np.testing.assert_allclose(made[3], 5 + WANT.sum(1), rtol=1e-4, atol=1e-4)
    made[2].fill_(-torch.inf)
    op.execute(x, scale, None, *made)
    assert made[2].item() == pytest.approx(np.abs(WANT).max())
    x_nan = x.clone()
    x_nan[3, 5] = torch.nan
    op.execute(x_nan, scale, None, *made)
    assert made[2].isnan().all()


def test_the_class_takes_runtime_options_per_execution() -> None:
    op, made = compiled(), outputs()
    for gain in (1.0, 2.0, 1.0, -3):
        op.execute(torch.from_numpy(X), torch.from_numpy(SCALE), None, *made, gain=gain)
        np.testing.assert_allclose(made[0], gain * WANT, rtol=1e-6)
    with pytest.raises(TypeError, match="gain must be a Python float"):
        op.execute(torch.from_numpy(X), torch.from_numpy(SCALE), None, *made, gain=[1.0])  # type: ignore[arg-type]


def test_the_class_takes_outputs_in_either_form() -> None:
    made = outputs(inside="rows", pitch=64)
    made[1] = made[1].permute(VIEW)
    made[2] = made[2].reshape(1)
    op = compiled(*made, inside="rows")
    op.execute(torch.from_numpy(X), torch.from_numpy(SCALE), None, *made)
    np.testing.assert_allclose(made[0], WANT, rtol=1e-6)
    np.testing.assert_array_equal(made[1], SCALE.transpose(VIEW))


@pytest.mark.parametrize(
    ("number", "array", "text"),
    [
        (0, torch.zeros(64, 16).T, "y must have columns inside"),
        (0, torch.zeros(16, 66)[:, :64], "y must have strides of multiples of 16 bytes"),
        (1, torch.zeros(16, 1, 2, dtype=torch.uint8), "scales must be contiguous"),
        (
            1,
            torch.zeros(2, 15, 1, dtype=torch.uint8),
            r"scales must have shape \(2, 16, 1\) or, transposed, \(16, 1, 2\)",
        ),
        (1, torch.zeros(2, 16, 1, dtype=torch.int8), "scales must have dtype float8_e8m0fnu"),
        (2, torch.zeros(1, 2), r"peak must have shape \(1,\) \(trailing ones aside\)"),
        (2, torch.zeros(()), r"peak must have shape \(1,\)"),
    ],
    ids=["order", "pitch", "copy of the view", "extents", "alias", "ones", "scalar"],
)
def test_wrong_outputs(number: int, array: Any, text: str) -> None:
    made = outputs()
    made[number] = array
    check(lambda: compiled(*made), text)


def test_tight_results_must_be_tight() -> None:
    spec = OutputSpec((4, 8), "float32", order=(1, 0))
    contract = replace(CONTRACT, outputs=(replace(CONTRACT.outputs[0], spec=lambda _: spec),))
    call = bind(contract, (X, SCALE, None), {})
    check_outputs(contract, call, (np.zeros((8, 4), np.float32).T,))
    for wrong in (np.zeros((4, 8), np.float32), np.zeros((8, 8), np.float32).T[:4]):
        check(lambda y=wrong: check_outputs(contract, call, (y,)), r"y must have strides \(1, 4\)")


def test_live_operands_keep_the_order_of_the_samples() -> None:
    op, made = compiled(), outputs()
    x = torch.from_numpy(np.ascontiguousarray(X.T)).T
    check(lambda: op.execute(x, torch.from_numpy(SCALE), None, *made), r"x must have its dimensions .* order \(0, 1\)")


def test_packed_outputs_of_the_class() -> None:
    codes, scale = torch.from_numpy(CODES), torch.full((2, 16, 1), 127, dtype=torch.uint8)
    for dtype in (torch.uint8, torch.float4_e2m1fn_x2):
        made = outputs()
        made[0] = torch.zeros((16, 32), dtype=torch.uint8).view(dtype)
        op = ScaleBlocks(codes, scale, None, *made, dtype=dtype)
        op(codes, scale, None, *made)
        np.testing.assert_array_equal(unpacked(to_numpy(made[0].view(torch.uint8))), unpacked(CODES))


# --- kernels --------------------------------------------------------------------------------------------------------


def kernel(operands: list[tuple[Any, ...]]) -> Any:
    """A stand-in for a compiled kernel without ``factor``: writes what the arguments' order says it gets."""

    def run(x: Any, scale: Any, peak: Any, total: Any, y: Any, scales: Any, peak2: Any, total2: Any, gain: Any) -> None:
        operands.append((x, scale, peak, total, y, scales))
        assert peak is peak2 or peak.data_ptr() == peak2.data_ptr()
        value = x.to(torch.float64) * torch.from_numpy(spread(to_numpy(scale).reshape(2, -1, 1))) * gain
        y.copy_(value)
        scales.copy_(scale)
        peak2.copy_(torch.maximum(peak, value.abs().max().float().reshape(peak.shape)))
        total2.copy_(total + value.sum(1))

    return run


@pytest.fixture
def launched(pretended_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(cache, "load", lambda spec: kernel(found))
    OPERATION._prepared.clear()
    yield found
    OPERATION._prepared.clear()


@pytest.mark.parametrize("as_view", [False, True])
def test_a_kernel_gets_canonical_bytes_and_prepared_outputs(launched: Any, as_view: bool) -> None:
    scale = torch.from_numpy(SCALE)
    result = scale_blocks(torch.from_numpy(X), scale.permute(VIEW) if as_view else scale, inside="rows")
    ((x, given, peak, _, y, _),) = launched
    assert (given.dtype, given.shape, x.shape, peak.shape) == (torch.uint8, (32,), (16, 64), (1,))
    assert given.data_ptr() == scale.data_ptr()
    assert y.stride() == (1, 16)
    np.testing.assert_allclose(result["y"], WANT, rtol=1e-6)
    assert result["scales"].shape == (16, 1, 2)
    np.testing.assert_array_equal(to_numpy(result["scales"]).view(np.uint8), SCALE.transpose(VIEW))
    assert result["peak"].item() == pytest.approx(np.abs(WANT).max())
    np.testing.assert_allclose(result["total"], WANT.sum(1), rtol=1e-4, atol=1e-5)


def test_a_kernel_accumulates_into_the_callers_outputs(launched: Any) -> None:
    made = outputs(pitch=68)
    made[1] = made[1].permute(VIEW)
    made[2].fill_(1000.0)
    op = compiled(*made)
    for _ in range(2):
        op.execute(torch.from_numpy(X), torch.from_numpy(SCALE), None, *made, gain=2.0)
    assert made[2].item() == 1000.0
    np.testing.assert_allclose(made[3], 4 * WANT.sum(1), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(made[0], 2 * WANT, rtol=1e-6)
    np.testing.assert_array_equal(made[1], SCALE.transpose(VIEW))
    op.execute(torch.from_numpy(X[:0]), torch.from_numpy(SCALE[:, :0]), None, *outputs(0)[:2], made[2], made[3][:0])
    assert made[2].item() == 1000.0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float4_e2m1fn_x2], ids=str)
def test_a_kernel_gets_pairs_as_bytes(launched: Any, monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    monkeypatch.setattr(cache, "load", lambda spec: lambda *operands: launched.append(operands))
    codes = torch.from_numpy(CODES)
    scale_blocks(codes.view(dtype), torch.from_numpy(SCALE))
    (operands,) = launched
    assert (operands[0].dtype, operands[0].shape) == (torch.uint8, (16, 32))
    assert operands[0].data_ptr() == codes.data_ptr()


# --- frameworks -----------------------------------------------------------------------------------------------------


def test_fake_tensors_have_the_strides_of_the_results() -> None:
    meta = scale_blocks(torch.empty(16, 64, device="meta"), torch.empty(2, 16, 1, dtype=torch.uint8, device="meta"))
    assert meta["scales"].shape == (16, 1, 2)
    assert meta["scales"].stride() == (1, 1, 16)

    def run(x: Any, scale: Any) -> Any:
        return tuple(scale_blocks(x, scale, inside="rows"))

    torch.compiler.reset()
    x, scale = torch.from_numpy(X), torch.from_numpy(SCALE).permute(VIEW)
    made = torch.compile(run, fullgraph=True)(x, scale)
    for ours, want in zip(made, run(x, scale), strict=True):
        assert ours.stride() == want.stride()
        np.testing.assert_array_equal(to_numpy(ours), to_numpy(want))


def test_the_registered_op_passes_torchs_checks() -> None:
    x, scale = torch.from_numpy(X), torch.from_numpy(SCALE)
    for options in ({}, {"inside": "rows"}, {"dtype": "uint8"}):
        torch.library.opcheck(torch.ops.fe_storage.scale_blocks.default, (x, scale), options)


@pytest.mark.parametrize("x", [X, CODES], ids=["floats", "pairs"])
def test_jit_agrees_with_eager_calls(x: Any) -> None:
    arrays = jnp.asarray(x), jnp.asarray(SCALE)

    def run(x: Any, scale: Any) -> Any:
        return entry(OPERATION, (x, scale, None), {"gain": 2.0})

    shapes = jax.eval_shape(run, *arrays)
    assert [(s.shape, s.dtype.name) for s in shapes] == [
        ((16, 64), "float32"),
        ((2, 16, 1), "float8_e8m0fnu"),
        ((1,), "float32"),
        ((16,), "float32"),
    ]
    for eager, jitted, want in zip(run(*arrays), jax.jit(run)(*arrays), scale_blocks(x, SCALE, gain=2.0), strict=True):
        np.testing.assert_array_equal(np.asarray(eager), np.asarray(jitted))
        np.testing.assert_allclose(np.asarray(eager, np.float32), np.asarray(want, np.float32), rtol=1e-5, atol=1e-5)


def test_cuda_lowering_gives_accumulated_results_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from fe_runtime.jax import lowering

    monkeypatch.setattr(cache, "load", lambda spec: lambda *operands: None)
    monkeypatch.setattr(lowering, "ffi_target", lambda kernel, run: "scale_blocks_kernel")
    arrays = jax.ShapeDtypeStruct((16, 32), jnp.uint8), jax.ShapeDtypeStruct((2, 16, 1), jnp.int8)
    traced = jax.jit(lambda x, scale: entry(OPERATION, (x, scale, None), {"gain": 2.0})).trace(*arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (line,) = [line for line in text.splitlines() if "custom_call @scale_blocks_kernel" in line]
    operands = "(tensor<16x32xui8>, tensor<32xui8>, tensor<1xf32>, tensor<16xf32>)"
    assert f"{operands} -> (tensor<16x64xf32>, tensor<32xui8>, tensor<1xf32>, tensor<16xf32>)" in line
    assert "output_tuple_indices = [2], operand_index = 2" in line
    assert "output_tuple_indices = [3], operand_index = 3" in line
    assert "dense<0xFF800000>" in text


def test_a_kernel_on_jax_buffers_gets_accumulated_outputs_twice() -> None:
    from fe_runtime.jax.in_place import in_place_launch

    x, scale = jnp.asarray(X), jnp.asarray(SCALE)
    made = entry(OPERATION, (x, scale, None), {})
    live = bind(CONTRACT, (x, scale, None), {})
    check_outputs(CONTRACT, live, made)
    found: list[Any] = []
    plan = OPERATION.find_kernel(live, HOPPER)
    assert isinstance(plan, Kernel)
    launch = in_place_launch(OPERATION, live, plan, lambda *operands: found.extend(operands), wait=False)
    launch((x, scale, None), made)
    y, scales, peak, total = made
    wanted = [x, scale, peak, total, y, scales, peak, total]
    assert all(operand._array is array for operand, array in zip(found, wanted, strict=False))
    assert found[8:] == [1.0]
