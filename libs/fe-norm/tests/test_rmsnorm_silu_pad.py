"""The front door of ``rmsnorm_silu_pad`` on the CPU: contract, frameworks, class, registered op, JAX entry, plan."""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from fe_norm import RmsNormSiluPad, rmsnorm_silu_pad_jax, rmsnorm_silu_pad_wrapper
from fe_norm.rmsnorm_silu_pad import CONTRACT, OPERATION
from fe_runtime import NotCompiledError, NotSupportedError, TensorDesc
from fe_runtime.testing import Call, assert_rejected, invalid_calls, to_framework, to_numpy, valid_calls

BF16 = ml_dtypes.bfloat16
OPTIONAL = ("input_bias", "previous", "residual", "residual_bias")


def run(arrays: Any, options: Any) -> Any:
    return rmsnorm_silu_pad_wrapper(*arrays, **options)


def example(framework: str = "numpy", without: tuple[str, ...] = (), earlier: int = 2, **options: object) -> Call:
    rng = np.random.default_rng(0)
    pixels, channels = (2, 3, 4, 2, 16), (16,)
    shapes = (pixels, channels, channels, (2, earlier, 4, 2, 16), pixels, channels)
    arrays = [rng.standard_normal(shape).astype(BF16) for shape in shapes]
    there = [None if name in without else array for name, array in zip(CONTRACT.input_names, arrays, strict=True)]
    return Call(tuple(None if a is None else to_framework(a, framework) for a in there), {**options})


def activated(v: Any, gamma: Any) -> Any:
    """SiLU of the normalised values in float64, without the roundings between."""
    v = np.asarray(v, np.float64)
    norm = np.maximum(np.sqrt((v * v).sum(-1, keepdims=True)), 1e-12)
    g = v / norm * np.sqrt(v.shape[-1]) * np.asarray(gamma, np.float64)
    return g / (1 + np.exp(-g))


@pytest.mark.parametrize("call", invalid_calls(CONTRACT, example(save_input=False)), ids=lambda call: call.id)
def test_invalid_call_is_rejected(call: Any) -> None:
    assert_rejected(run, "rmsnorm_silu_pad", call)


@settings(max_examples=40, deadline=None)
@given(valid_calls(CONTRACT, extents=dict.fromkeys("NTHW", (1, 2, 3)) | {"P": (1, 2), "C": (1, 7, 16)}))
def test_valid_calls_give_what_the_contract_says(call: Call) -> None:
    result = run(*call)
    assert list(result.keys()) == ["padded_output", "cache_output", "residual_output"]
    bound = OPERATION.bind(call.arrays, call.options)
    for output, spec in zip(result, bound.outputs, strict=True):
        assert (output is None) == (spec is None)
        if spec is not None:
            assert output.shape == spec.shape
            assert output.dtype.name == spec.dtype
    padded = result["padded_output"].astype(np.float64)
    inner = padded[:, :, 1:-1, 1:-1]
    assert np.abs(padded).sum() == pytest.approx(np.abs(inner).sum())  # nothing on the border
    cache = result["cache_output"]
    np.testing.assert_array_equal(inner[:, -cache.shape[1] :], cache.astype(np.float64))
    x, gamma, *others = call.arrays
    if all(array is None for array in (others[0], *others[2:])):
        np.testing.assert_allclose(inner[:, 2:], activated(x, gamma), rtol=2.0**-5, atol=2.0**-6)


@pytest.mark.parametrize("earlier", [0, 1, 2])
def test_frames_before_the_first_are_right_aligned(earlier: int) -> None:
    without = ("input_bias", "residual", "residual_bias") + (() if earlier else ("previous",))
    call = example(without=without, earlier=earlier)
    padded = run(*call)["padded_output"]
    assert (padded[:, : 2 - earlier] == 0).all()
    if earlier:
        np.testing.assert_array_equal(padded[:, 2 - earlier : 2, 1:-1, 1:-1], call.arrays[3])


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("without", [(), ("previous",), ("residual", "residual_bias"), OPTIONAL], ids=len)
def test_frameworks_give_numpys_bytes(framework: str, without: tuple[str, ...]) -> None:
    want, got = run(*example(without=without)), run(*example(framework, without))
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            assert (to_numpy(a).view(np.uint16) == b.view(np.uint16)).mean() > 0.99


# --- one test for each check of the contract -----------------------------------------------------------------------


@pytest.mark.parametrize("frames", [0, 3])
def test_previous_has_one_or_two_frames(frames: int) -> None:
    with pytest.raises(ValueError, match="rmsnorm_silu_pad: previous must have one or two frames"):
        run(*example(earlier=frames))


def test_residual_bias_needs_a_residual() -> None:
    with pytest.raises(ValueError, match="rmsnorm_silu_pad: residual_bias must come with a residual"):
        run(*example(without=("residual",)))


@pytest.mark.parametrize("axis", range(4))
def test_every_extent_is_positive(axis: int) -> None:
    shape = [2, 3, 4, 2, 16]
    shape[axis] = 0
    with pytest.raises(ValueError, match="rmsnorm_silu_pad: input must have positive extents"):
        rmsnorm_silu_pad_wrapper(np.zeros(shape, BF16), np.zeros(16, BF16))


def test_no_channels() -> None:
    with pytest.raises(ValueError, match="rmsnorm_silu_pad: input must have positive extents"):
        rmsnorm_silu_pad_wrapper(np.zeros((1, 1, 1, 1, 0), BF16), np.zeros(0, BF16))


def test_required_gradient_is_refused() -> None:
    x, gamma, *_ = example("torch").arrays
    with pytest.raises(RuntimeError, match=r"rmsnorm_silu_pad: gamma .*gradient"):
        rmsnorm_silu_pad_wrapper(x, gamma.requires_grad_())  # type: ignore[union-attr]
    with torch.no_grad():
        assert not rmsnorm_silu_pad_wrapper(x, gamma)["padded_output"].requires_grad


def outputs_of(call: Call) -> list[Any]:
    results = run(*call)
    return [None if a is None else torch.full_like(a, -7) if torch.is_tensor(a) else np.empty_like(a) for a in results]


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("without", [(), ("residual", "residual_bias"), OPTIONAL], ids=len)
@pytest.mark.parametrize("save_input", [False, True])
def test_class_writes_what_the_wrapper_returns(framework: str, without: tuple[str, ...], save_input: bool) -> None:
    call = example(framework, without, save_input=save_input)
    want = run(*call)
    padded, cache, total = outputs_of(call)
    x, gamma, *others = call.arrays
    op = RmsNormSiluPad(x, gamma, padded, cache, *others, total)
    with pytest.raises(NotCompiledError):
        op.execute(x, gamma, padded, cache, *others, total)
    assert op.check_support() is True
    returned = op(x, gamma, padded, cache, *others, total)
    assert all(a is b for a, b in zip(returned, (padded, cache, total), strict=True))
    for got, expected in zip(returned, want, strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            np.testing.assert_array_equal(to_numpy(got).view(np.uint16), to_numpy(expected).view(np.uint16))


def test_class_needs_the_output_of_its_residual() -> None:
    call = example()
    padded, cache, _ = outputs_of(call)
    x, gamma, *others = call.arrays
    with pytest.raises(ValueError, match="rmsnorm_silu_pad: residual_output must be an array"):
        RmsNormSiluPad(x, gamma, padded, cache, *others).check_support()


def test_class_wants_the_arrays_of_its_signature() -> None:
    call = example(without=OPTIONAL)
    padded, cache, _ = outputs_of(call)
    x, gamma, *_ = call.arrays
    op = RmsNormSiluPad(x, gamma, padded, cache)
    op.compile()
    with pytest.raises(ValueError, match="rmsnorm_silu_pad: input_bias must be absent"):
        op.execute(x, gamma, padded, cache, gamma)
    with pytest.raises(ValueError, match="rmsnorm_silu_pad: residual_output must be None"):
        op.execute(x, gamma, padded, cache, residual_output=np.empty_like(x))


def test_class_rejects_outputs_that_overlap() -> None:
    call = example(without=OPTIONAL, save_input=True)
    padded, cache, _ = outputs_of(call)
    x, gamma, *_ = call.arrays
    op = RmsNormSiluPad(x, gamma, padded, cache, sample_residual_output=np.empty_like(x))
    op.compile()
    with pytest.raises(ValueError, match="rmsnorm_silu_pad: residual_output must not share memory with input"):
        op.execute(x, gamma, padded, cache, residual_output=x)


def test_class_takes_other_extents() -> None:
    desc = [TensorDesc.of("bfloat16", s) for s in ((2, 3, 4, 2, 16), (16,), (2, 5, 6, 4, 16), (2, 2, 4, 2, 16))]
    op = RmsNormSiluPad(*desc)
    op.compile()
    x, gamma = np.ones((1, 1, 7, 5, 16), BF16), np.ones(16, BF16)
    padded, cache, _ = op.execute(x, gamma, np.empty((1, 3, 9, 7, 16), BF16), np.empty((1, 1, 7, 5, 16), BF16))
    for got, want in zip((padded, cache), rmsnorm_silu_pad_wrapper(x, gamma), strict=False):
        np.testing.assert_array_equal(got, want)


# --- torch and JAX -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("without", [(), OPTIONAL], ids=len)
def test_opcheck(without: tuple[str, ...]) -> None:
    call = example("torch", without)
    run(*call)
    torch.library.opcheck(torch.ops.fe_norm.rmsnorm_silu_pad.default, call.arrays, {"save_input": False})


def test_compiles_as_one_graph() -> None:
    x, gamma, *_ = example("torch").arrays

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(x: Any, gamma: Any) -> Any:
        padded, cache, _ = rmsnorm_silu_pad_wrapper(x * 2, gamma)
        return padded, cache

    want = rmsnorm_silu_pad_wrapper(x * 2, gamma)  # type: ignore[operator]
    for got, expected in zip(model(x, gamma), want, strict=False):
        assert torch.equal(got, expected)


def test_jax_entry_eager_jit_and_shapes() -> None:
    arrays = example("jax").arrays
    want = run(arrays, {})
    for result in (rmsnorm_silu_pad_jax(*arrays), jax.jit(rmsnorm_silu_pad_jax)(*arrays)):
        for got, expected in zip(result, want, strict=True):
            # a compiled expression may keep a step unrounded where an eager one rounds
            np.testing.assert_allclose(np.asarray(got, np.float32), to_numpy(expected), rtol=2.0**-5, atol=2.0**-7)
    padded, cache, total = jax.eval_shape(rmsnorm_silu_pad_jax, *arrays[:2])
    assert (padded.shape, cache.shape, total) == ((2, 5, 6, 4, 16), (2, 2, 4, 2, 16), None)


# --- plan ----------------------------------------------------------------------------------------------------------


def kernel_of(shape: tuple[int, ...], **options: Any) -> Any:
    x, gamma = (TensorDesc.of("bfloat16", s, device="cuda:0") for s in (shape, shape[-1:]))
    earlier = TensorDesc.of("bfloat16", (shape[0], 1, *shape[2:]), device="cuda:0") if options.pop("p", 0) else None
    return OPERATION.plan(OPERATION.bind((x, gamma, None, earlier, None, None), options))


def test_extents_are_not_in_the_kernel_key() -> None:
    specs = {kernel_of(shape).kernel.spec for shape in ((1, 1, 1, 1, 160), (2, 9, 30, 52, 160))}
    assert len(specs) == 1


def test_what_changes_the_code_is_in_the_kernel_key() -> None:
    shape = (1, 2, 3, 4, 160)
    plans = [kernel_of(shape), kernel_of(shape, save_input=True), kernel_of((*shape[:4], 161)), kernel_of(shape, p=1)]
    assert len({plan.kernel.spec for plan in plans}) == len(plans)


def test_very_many_channels_run_the_reference_and_say_why() -> None:
    plan = kernel_of((1, 1, 1, 1, 65536))
    assert plan.backend == "reference"
    assert plan.missing is not None
    assert "65536 channels" in plan.missing.reason


def test_explicit_kernel_on_the_cpu_is_not_supported() -> None:
    with pytest.raises(NotSupportedError, match="rmsnorm_silu_pad: backend"):
        run(*example(backend="sm90"))
