"""The front door of ``gemm_proj_rope_mxfp8`` on the CPU: contract, frameworks, classes, registered op, JAX, plan."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import ml_dtypes
import naive_proj_rope as naive
import numpy as np
import pytest
import torch

from fe_gemm import (
    GemmProjRopeMxfp8Bf16In,
    GemmProjRopeMxfp8Mxfp8In,
    compat,
    gemm_proj_rope_mxfp8_jax,
    gemm_proj_rope_mxfp8_reference,
    gemm_proj_rope_mxfp8_wrapper,
)
from fe_gemm.dense.proj_rope_mxfp8 import CONTRACT, NAME, OPERATION, InputPrecisionError, UnsupportedDtypeError
from fe_gemm.planning.proj_rope import Problem, candidates, choose, config, is_valid, shared_bytes, split_config
from fe_runtime import NotCompiledError, NotSupportedError, TensorDesc
from fe_runtime.plan import HOPPER, Target
from fe_runtime.testing import Call, assert_rejected, invalid_calls, to_framework, to_numpy

FRAMEWORKS = ("numpy", "torch", "jax")
KEYS = ["out_fp8_row", "out_scales_row", "out_fp8_col", "out_scales_col"]
FP8 = ml_dtypes.float8_e4m3fn
every_framework = pytest.mark.parametrize("framework", FRAMEWORKS)
both_precisions = pytest.mark.parametrize("scaled", [False, True], ids=["bf16", "e4m3"])
both_orders = pytest.mark.parametrize("w_out_in", [True, False], ids=["out-in", "in-out"])


def given(scaled: bool, framework: str = "numpy", w_out_in: bool = True, tokens: int = 64) -> list[Any]:
    """Arrays whose sums are exact, so that every backend gives the same bytes."""
    case = naive.inputs(tokens, 64, 2, scaled, whole=True)
    arrays = case.arrays if w_out_in else case.turned()
    return [None if array is None else to_framework(array, framework) for array in arrays]


def expected(scaled: bool, tokens: int = 64) -> tuple[Any, ...]:
    return naive.outputs(*naive.inputs(tokens, 64, 2, scaled, whole=True).exact)


def assert_same(outputs: Any, want: Any) -> None:
    for got, output in zip(outputs, want, strict=True):
        np.testing.assert_array_equal(to_numpy(got).view(np.uint8), output)


def buffers(framework: str, tokens: int = 64) -> list[Any]:
    codes, scales, blocks = (tokens, 2, 192), (tokens, 2, 6), (tokens // 32, 2, 192)
    arrays = [np.zeros(shape, dtype) for shape, dtype in ((codes, FP8), (scales, np.uint8), (codes, FP8))]
    return [to_framework(array, framework) for array in (*arrays, np.zeros(blocks, np.uint8))]


def class_call(scaled: bool, w_out_in: bool = True) -> tuple[Any, Any]:
    """The class for a precision, its samples to be followed by the outputs; and the order of the wrapper's arrays."""
    if scaled:
        return GemmProjRopeMxfp8Mxfp8In, (0, 4, 1, 5, 2, 3)
    return lambda *samples: GemmProjRopeMxfp8Bf16In(*samples, w_out_in=w_out_in), (0, 1, 2, 3)


# ---- the contract's rows of errors


def run(arrays: Any, options: Any) -> Any:
    return gemm_proj_rope_mxfp8_wrapper(*arrays, **options)


CALLS = {
    f"{'e4m3' if scaled else 'bf16'}-{w_out_in}-{call.id}": call
    for scaled in (False, True)
    for w_out_in in (True, False)
    for call in invalid_calls(CONTRACT, Call(tuple(given(scaled, w_out_in=w_out_in)), {"w_out_in": w_out_in}))
}


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_invalid_call_is_rejected(call: Any) -> None:
    assert_rejected(run, NAME, call)


def rejected(arrays: Any, fragment: str, error: type[Exception] = ValueError, **options: Any) -> None:
    """The wrapper, and for the same arrays the JAX function, raise with this text."""
    with pytest.raises(error, match=fragment) as caught:
        gemm_proj_rope_mxfp8_wrapper(*arrays, **options)
    assert str(caught.value).startswith(f"{NAME}: ")
    if not options:
        with pytest.raises(ValueError, match=fragment):
            gemm_proj_rope_mxfp8_jax(*(None if a is None else to_framework(a, "jax") for a in arrays))


@pytest.mark.parametrize("error", [AssertionError, ValueError, InputPrecisionError], ids=lambda kind: kind.__name__)
def test_dtypes_of_x_and_w_differ(error: type[Exception]) -> None:
    x, w, *rest = given(False)
    rejected((x.astype(FP8), w, *rest), "must share a dtype", error)
    x, w, *rest = given(True)
    rejected((x, w.astype(ml_dtypes.bfloat16), *rest), "must share a dtype", error)


@pytest.mark.parametrize("which", [(4,), (5,), (4, 5)], ids=["x_scale", "w_scale", "both"])
def test_scales_given_for_bf16(which: tuple[int, ...]) -> None:
    arrays, scales = given(False), given(True)
    for number in which:
        arrays[number] = scales[number]
    rejected(arrays, "must not be given MXFP8 scales", AssertionError)
    rejected(arrays, "must not be given MXFP8 scales", ValueError)


@pytest.mark.parametrize("which", [(4,), (5,), (4, 5)], ids=["x_scale", "w_scale", "both"])
def test_scales_missing_for_e4m3(which: tuple[int, ...]) -> None:
    arrays = given(True)
    for number in which:
        arrays[number] = None
    rejected(arrays, "require x_scale and w_scale", AssertionError)
    rejected(arrays, "require x_scale and w_scale", ValueError)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint8, ml_dtypes.float8_e5m2], ids=lambda d: d.__name__)
def test_other_dtypes(dtype: Any) -> None:
    arrays = given(False)
    arrays[:2] = [array.astype(dtype) for array in arrays[:2]]
    rejected(arrays, "unsupported input dtype", AssertionError)
    rejected(arrays, "unsupported input dtype", ValueError)


def test_the_error_survives_copies() -> None:
    error = UnsupportedDtypeError(f"{NAME}: x must have dtype bfloat16; got float32.")
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert str(other) == str(error)
        assert str(other).count("unsupported input dtype") == 1


@both_precisions
@both_orders
@pytest.mark.parametrize("features", [0, 64, 191, 200, 352])
def test_output_features_are_whole_heads(features: int, w_out_in: bool, scaled: bool) -> None:
    x, w, cos, sin, x_scale, w_scale = given(scaled, w_out_in=w_out_in)
    part = slice(features) if w_out_in else (slice(None), slice(features))
    w_scale = None if w_scale is None else w_scale[part].copy()
    arrays = (x, w[part].copy(), cos, sin, x_scale, w_scale)
    with pytest.raises(ValueError, match=f"{NAME}: w must have a positive multiple of 192 output features"):
        gemm_proj_rope_mxfp8_wrapper(*arrays, w_out_in=w_out_in)


@both_precisions
@both_orders
def test_inner_extents_match(w_out_in: bool, scaled: bool) -> None:
    x, w, cos, sin, x_scale, w_scale = given(scaled, w_out_in=w_out_in)
    narrow = np.ascontiguousarray(w[:, :32] if w_out_in else w[:32])
    with pytest.raises(ValueError, match=f"{NAME}: w must have shape .* = 64"):
        gemm_proj_rope_mxfp8_wrapper(x, narrow, cos, sin, x_scale, w_scale, w_out_in=w_out_in)


def test_a_weight_in_the_other_order_is_noticed() -> None:
    x, w, cos, sin, *_ = given(False)
    with pytest.raises(ValueError, match=r"w must have a positive multiple of 192 output features; .*w_out_in=True"):
        gemm_proj_rope_mxfp8_wrapper(x, w.T.copy(), cos, sin)
    with pytest.raises(ValueError, match="w must be contiguous"):
        gemm_proj_rope_mxfp8_wrapper(x, w.T.copy().T, cos, sin)


@both_orders
@pytest.mark.parametrize("number", [4, 5], ids=["x_scale", "w_scale"])
def test_shapes_of_scales(number: int, w_out_in: bool) -> None:
    arrays = given(True, w_out_in=w_out_in)
    name = CONTRACT.input_names[number]
    for wrong in (np.repeat(arrays[number], 2, axis=1), arrays[number][:-1].copy(), arrays[number].T.copy()):
        bad = [*arrays]
        bad[number] = wrong
        with pytest.raises(ValueError, match=f"{NAME}: {name} must have shape"):
            gemm_proj_rope_mxfp8_wrapper(*bad, w_out_in=w_out_in)


@pytest.mark.parametrize("number", [2, 3], ids=["cos", "sin"])
def test_shapes_and_dtypes_of_tables(number: int) -> None:
    arrays = given(False)
    table, name = arrays[number], CONTRACT.input_names[number]
    for wrong in (table[:, :32].copy(), table[:32].copy(), table.astype(np.float32), table[:, ::-1]):
        bad = [*arrays]
        bad[number] = wrong
        with pytest.raises(ValueError, match=f"{NAME}: {name} must"):
            gemm_proj_rope_mxfp8_wrapper(*bad)


@both_precisions
@pytest.mark.parametrize("number", range(4), ids=KEYS)
def test_outputs_of_the_class(number: int, scaled: bool) -> None:
    make, order = class_call(scaled)
    arrays = given(scaled)
    for change in (
        lambda a: a[:-1].copy(),
        lambda a: a.astype(np.float32),
        lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    ):
        outputs = buffers("numpy")
        outputs[number] = change(outputs[number])
        with pytest.raises(ValueError, match=f"{NAME}: {KEYS[number]} must"):
            make(*(arrays[i] for i in order), *outputs).check_support()


@both_precisions
@pytest.mark.parametrize("tokens", [1, 16, 31, 33, 100])
def test_tokens_in_blocks_of_32(tokens: int, scaled: bool) -> None:
    x, w, cos, sin, x_scale, w_scale = given(scaled, tokens=128)
    x_scale = None if x_scale is None else x_scale[:tokens]
    with pytest.raises(ValueError, match=f"{NAME}: x must have a multiple of 32 rows"):
        gemm_proj_rope_mxfp8_wrapper(x[:tokens], w, cos[:tokens], sin[:tokens], x_scale, w_scale)


@both_precisions
@pytest.mark.parametrize("tokens", [32, 96, 128, 160])
def test_tokens_need_not_be_a_multiple_of_128(tokens: int, scaled: bool) -> None:
    assert_same(gemm_proj_rope_mxfp8_wrapper(*given(scaled, tokens=tokens)), expected(scaled, tokens))


@both_precisions
@pytest.mark.parametrize("heads", [1, 2, 3])
def test_any_number_of_heads(heads: int, scaled: bool) -> None:
    case = naive.inputs(32, 32, heads, scaled, whole=True, seed=heads)
    assert_same(gemm_proj_rope_mxfp8_wrapper(*case.arrays), naive.outputs(*case.exact))


@pytest.mark.parametrize("depth", [8, 16, 48, 72])
def test_e4m3_needs_a_depth_of_whole_blocks(depth: int) -> None:
    x, w, cos, sin, x_scale, w_scale = given(True)
    x, w = (np.resize(array, (array.shape[0], depth)) for array in (x, w))
    x_scale, w_scale = (np.resize(array, (array.shape[0], depth // 32)) for array in (x_scale, w_scale))
    with pytest.raises(ValueError, match=f"{NAME}: x must have a positive multiple of 8 columns in bfloat16, of 32 in"):
        gemm_proj_rope_mxfp8_wrapper(x, w, cos, sin, x_scale, w_scale)


@pytest.mark.parametrize("depth", [32, 96, 160, 224])
def test_e4m3_depth_need_not_be_a_multiple_of_128(depth: int) -> None:
    case = naive.inputs(32, depth, 1, scaled=True, whole=True, seed=depth)
    assert_same(gemm_proj_rope_mxfp8_wrapper(*case.arrays), naive.outputs(*case.exact))


@both_orders
@pytest.mark.parametrize("depth", [0, 4, 12, 63])
def test_bf16_needs_a_depth_in_steps_of_8(depth: int, w_out_in: bool) -> None:
    x, w, cos, sin, *_ = given(False, w_out_in=w_out_in)
    x, w = x[:, :depth].copy(), (w[:, :depth] if w_out_in else w[:depth]).copy()
    with pytest.raises(ValueError, match=f"{NAME}: x must have a positive multiple of 8 columns in bfloat16"):
        gemm_proj_rope_mxfp8_wrapper(x, w, cos, sin, w_out_in=w_out_in)


@both_precisions
def test_jax_arrays_with_a_weight_in_out(scaled: bool) -> None:
    outputs = gemm_proj_rope_mxfp8_wrapper(*given(scaled, "jax", False), w_out_in=False)
    assert_same(outputs, expected(scaled))


@both_precisions
@every_framework
def test_no_tokens(framework: str, scaled: bool) -> None:
    outputs = gemm_proj_rope_mxfp8_wrapper(*given(scaled, framework, tokens=0))
    assert [tuple(output.shape) for output in outputs] == [(0, 2, 192), (0, 2, 6), (0, 2, 192), (0, 2, 192)]


def test_devices_and_frameworks_are_not_mixed() -> None:
    x, w, cos, sin, *_ = given(False)
    with pytest.raises(ValueError, match=f"{NAME}: w must come from the framework of x"):
        gemm_proj_rope_mxfp8_wrapper(x, to_framework(w, "torch"), cos, sin)
    x, w, cos, sin = (
        TensorDesc.of("bfloat16", shape, device="cuda:0") for shape in ((64, 64), (384, 64), *((64, 64),) * 2)
    )
    with pytest.raises(ValueError, match=f"{NAME}: sin must be on the device of x"):
        OPERATION.bind((x, w, cos, TensorDesc.of("bfloat16", (64, 64), device="cuda:1"), None, None), {})


def test_arrays_on_a_gpu_start_at_multiples_of_16_bytes() -> None:
    """Descriptors count as aligned, so a GPU test has the arrays that are not; here is what is declared."""
    assert {declared.name: declared.alignment for declared in CONTRACT.inputs} == {
        "x": 16,
        "w": 16,
        "cos": 16,
        "sin": 16,
        "x_scale": 1,
        "w_scale": 1,
    }


# ---- values and frameworks


@both_precisions
@both_orders
@every_framework
def test_wrapper_gives_what_plain_loops_give(framework: str, w_out_in: bool, scaled: bool) -> None:
    result = gemm_proj_rope_mxfp8_wrapper(*given(scaled, framework, w_out_in), w_out_in=w_out_in)
    assert list(result.keys()) == KEYS
    assert_same(result, expected(scaled))
    assert [to_numpy(output).dtype.name for output in result] == ["float8_e4m3fn", "uint8"] * 2
    if framework == "torch":
        assert all(output.is_contiguous() for output in result)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, ml_dtypes.float8_e8m0fnu], ids=lambda d: d.__name__)
@every_framework
def test_spellings_of_the_scales(framework: str, dtype: Any) -> None:
    x, w, cos, sin, x_scale, w_scale = given(True)
    arrays = (x, w, cos, sin, x_scale.view(dtype), w_scale.view(dtype))
    assert_same(gemm_proj_rope_mxfp8_wrapper(*(to_framework(a, framework) for a in arrays)), expected(True))


@both_precisions
def test_within_the_tolerance(scaled: bool) -> None:
    case = naive.inputs(64, 192, 2, scaled, seed=4)
    outputs = [to_numpy(output).view(np.uint8) for output in gemm_proj_rope_mxfp8_wrapper(*case.arrays)]
    naive.check_within_tolerance(outputs, *case.exact)


@both_orders
@every_framework
def test_public_reference(framework: str, w_out_in: bool) -> None:
    outputs = gemm_proj_rope_mxfp8_reference(*given(False, framework, w_out_in)[:4], w_out_in=w_out_in)
    assert type(outputs) is tuple
    assert_same(outputs, expected(False))


def test_the_references_default_is_in_out() -> None:
    assert_same(gemm_proj_rope_mxfp8_reference(*given(False, w_out_in=False)[:4]), expected(False))


def test_the_public_reference_keeps_bytes_of_zero_blocks_and_runs_in_jit() -> None:
    x, w, cos, sin, *_ = given(False, "jax", w_out_in=False)
    eager = gemm_proj_rope_mxfp8_reference(x * 0, w, cos, sin)
    assert (np.asarray(eager[1]) == 0).all()
    assert (np.asarray(eager[3]) == 0).all()
    assert_same(jax.jit(gemm_proj_rope_mxfp8_reference)(x, w, cos, sin), expected(False))


@both_precisions
@both_orders
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_class_writes_what_the_wrapper_returns(framework: str, w_out_in: bool, scaled: bool) -> None:
    if scaled and not w_out_in:
        with pytest.raises(TypeError, match="w_out_in"):
            GemmProjRopeMxfp8Mxfp8In(*[None] * 10, w_out_in=False)  # type: ignore[call-arg]
        return
    make, order = class_call(scaled, w_out_in)
    arrays, outputs = given(scaled, framework, w_out_in), buffers(framework)
    op = make(*(arrays[i] for i in order), *outputs)
    with pytest.raises(NotCompiledError):
        op.execute(*(arrays[i] for i in order), *outputs)
    assert op.check_support() is True
    op.compile()
    assert op.execute(*(arrays[i] for i in order), *outputs) is None
    assert_same(outputs, expected(scaled))


def test_the_bf16_class_takes_in_out_by_default() -> None:
    arrays, outputs = given(False, w_out_in=False)[:4], buffers("numpy")
    GemmProjRopeMxfp8Bf16In(*arrays, *outputs)(*arrays, *outputs)
    assert_same(outputs, expected(False))


def test_jax_arrays_and_the_bf16_class() -> None:
    arrays = given(False, "jax", w_out_in=False)[:4]
    GemmProjRopeMxfp8Bf16In(*arrays, *buffers("jax")).check_support()


def test_a_class_for_the_other_precision_says_so() -> None:
    x, w, cos, sin, x_scale, w_scale = given(True)
    with pytest.raises(ValueError, match=r"require x_scale and w_scale; .*GemmProjRopeMxfp8Mxfp8In"):
        GemmProjRopeMxfp8Bf16In(x, w, cos, sin, *buffers("numpy"), w_out_in=True).check_support()
    x, w, cos, sin, *_ = given(False)
    with pytest.raises(ValueError, match="must not be given MXFP8 scales"):
        GemmProjRopeMxfp8Mxfp8In(x, x_scale, w, w_scale, cos, sin, *buffers("numpy")).check_support()


@both_precisions
def test_class_for_any_number_of_tokens(scaled: bool) -> None:
    make, order = class_call(scaled)
    inputs, outputs = given(scaled), buffers("numpy")
    samples = [TensorDesc.of(a.dtype.name, a.shape) for a in (*(inputs[i] for i in order), *outputs)]
    op = make(*samples)
    op.compile()
    for tokens in (0, 32, 96):
        arrays, outputs = given(scaled, tokens=tokens), buffers("numpy", tokens)
        op.execute(*(arrays[i] for i in order), *outputs)
        assert_same(outputs, expected(scaled, tokens))


@pytest.mark.parametrize("change", ["depth", "heads", "outputs", "dtype"])
def test_operands_that_differ_from_the_compiled_ones(change: str) -> None:
    arrays, outputs = given(False)[:4], buffers("numpy")
    op = GemmProjRopeMxfp8Bf16In(*arrays, *outputs, w_out_in=True)
    op.compile()
    x, w, cos, sin = arrays
    if change == "depth":
        x, w = x[:, :32].copy(), w[:, :32].copy()
    elif change == "heads":
        w = w[:192].copy()
    elif change == "outputs":
        outputs = buffers("numpy", 32)
    else:
        x, w = x.astype(FP8), w.astype(FP8)
    with pytest.raises(ValueError, match=f"{NAME}: "):
        op.execute(x, w, cos, sin, *outputs)


def test_outputs_do_not_share_memory() -> None:
    arrays, outputs = given(False)[:4], buffers("numpy")
    op = GemmProjRopeMxfp8Bf16In(*arrays, *outputs, w_out_in=True)
    op.compile()
    outputs[2] = outputs[0]
    with pytest.raises(ValueError, match="must not share memory"):
        op.execute(*arrays, *outputs)


@both_precisions
@both_orders
def test_opcheck_and_one_graph(w_out_in: bool, scaled: bool) -> None:
    arrays = tuple(given(scaled, "torch", w_out_in))
    gemm_proj_rope_mxfp8_wrapper(*arrays, w_out_in=w_out_in)
    # The check of the schema multiplies the inputs by a number, which torch cannot do with e4m3.
    known = ("test_schema",) if not scaled else ()
    checks = (*known, "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    op = torch.ops.fe_gemm.gemm_proj_rope_mxfp8.default
    torch.library.opcheck(op, arrays, {"w_out_in": w_out_in}, test_utils=checks)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(*arrays: Any) -> Any:
        return tuple(gemm_proj_rope_mxfp8_wrapper(*arrays, w_out_in=w_out_in).values())

    assert_same(model(*arrays), expected(scaled))


@both_precisions
def test_jax_entry_eager_jit_and_shapes(scaled: bool) -> None:
    arrays = given(scaled, "jax")
    eager = gemm_proj_rope_mxfp8_jax(*arrays)
    assert type(eager) is tuple
    assert_same(eager, expected(scaled))
    jitted = jax.jit(gemm_proj_rope_mxfp8_jax)(*arrays)
    assert_same(jitted, expected(scaled))
    shapes = jax.eval_shape(gemm_proj_rope_mxfp8_jax, *arrays)
    assert [(s.shape, s.dtype.name) for s in shapes] == [(o.shape, o.dtype.name) for o in eager]


def test_jit_and_eager_agree_where_sums_are_rounded() -> None:
    case = naive.inputs(64, 192, 2, seed=5)
    arrays = [to_framework(array, "jax") for array in case.arrays[:4]]
    eager = [np.asarray(output).view(np.uint8) for output in gemm_proj_rope_mxfp8_jax(*arrays)]
    assert_same(jax.jit(gemm_proj_rope_mxfp8_jax)(*arrays), eager)


def test_jax_has_no_stream() -> None:
    with pytest.raises(ValueError, match=f"{NAME}: stream must be None"):
        gemm_proj_rope_mxfp8_wrapper(*given(False, "jax"), stream=1)


def test_the_peers_names_are_ours() -> None:
    assert compat.gemm_proj_rope_mxfp8_wrapper_sm100 is gemm_proj_rope_mxfp8_wrapper
    assert compat.gemm_proj_rope_mxfp8_jax_sm100 is gemm_proj_rope_mxfp8_jax
    assert compat.gemm_proj_rope_mxfp8_reference is gemm_proj_rope_mxfp8_reference
    assert compat.GemmProjRopeMxfp8Bf16InSm100 is GemmProjRopeMxfp8Bf16In
    assert compat.GemmProjRopeMxfp8Mxfp8InSm100 is GemmProjRopeMxfp8Mxfp8In


# ---- plan


def plan_of(tokens: int = 2048, depth: int = 1536, heads: int = 128, scaled: bool = False, **options: Any) -> Any:
    out_in = options.get("w_out_in", True)
    turn = (lambda a, b: (a, b)) if out_in else (lambda a, b: (b, a))
    dtype = "float8_e4m3fn" if scaled else "bfloat16"
    shapes = {
        "x": ((tokens, depth), dtype),
        "w": (turn(192 * heads, depth), dtype),
        "cos": ((tokens, 64), "bfloat16"),
        "sin": ((tokens, 64), "bfloat16"),
        "x_scale": ((tokens, depth // 32), "uint8"),
        "w_scale": (turn(192 * heads, depth // 32), "uint8"),
    }
    arrays = [TensorDesc.of(name, shape, device="cuda:0") for shape, name in shapes.values()]
    return OPERATION.plan(
        OPERATION.bind((*arrays[:4], *(arrays[4:] if scaled else (None, None))), options), target=HOPPER
    )


def test_no_extent_is_in_the_kernel_key() -> None:
    plans = [plan_of(), plan_of(32, 96, 3), plan_of(8192, 1536, 64), plan_of(160, 8, 1)]
    assert {plan.backend for plan in plans} == {"sm90"}
    assert len({plan.kernel.spec for plan in plans}) == 1


def test_what_changes_the_code_is_in_the_kernel_key() -> None:
    plans = [plan_of(scaled=scaled, w_out_in=order) for scaled in (False, True) for order in (False, True)]
    assert len({plan.kernel.spec for plan in plans}) == len(plans)


def test_workspaces_are_for_mxfp8_only() -> None:
    assert plan_of().kernel.form.scratch == ()
    scratch = plan_of(scaled=True, w_out_in=False).kernel.form.scratch
    assert scratch == (((2048, 1536), "bfloat16"), ((1536, 24576), "bfloat16"))


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_other_architectures_run_the_reference(capability: tuple[int, int]) -> None:
    arrays = [TensorDesc.of("bfloat16", shape, device="cuda:0") for shape in ((32, 64), (192, 64), (32, 64), (32, 64))]
    plan = OPERATION.plan(OPERATION.bind((*arrays, None, None), {}), target=Target(capability, 100))
    assert plan.backend == "reference"
    assert "compute capability 9.0" in plan.explain()


def test_a_kernel_by_name_needs_a_gpu() -> None:
    with pytest.raises(NotSupportedError, match=f"{NAME}: backend must have a kernel"):
        gemm_proj_rope_mxfp8_wrapper(*given(False), backend="sm90")


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("w_major", ["k", "n"])
def test_launches_are_valid_and_keep_everything(w_major: str, scaled: bool) -> None:
    problem = Problem(w_major, scaled)
    found = candidates(problem, 128, 1536, "sm_90a")
    assert found[0] == choose(problem, 128, 1536, "sm_90a")
    assert len(set(found)) == len(found) > 1
    for launch in found:
        assert is_valid(problem, launch)
        assert shared_bytes(launch) <= 227 * 1024
        assert split_config(config(problem, launch, 132)) == (problem, launch, 132)
