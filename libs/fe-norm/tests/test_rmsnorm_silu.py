"""The front door of ``rmsnorm_silu`` on the CPU: contract, frameworks, class, registered op, JAX entry, plan."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from fe_norm import (
    RmsNormSilu,
    fused_rmsnorm_silu,
    rmsnorm_silu_backward,
    rmsnorm_silu_jax,
    rmsnorm_silu_wrapper,
)
from fe_norm.rmsnorm_silu import BACKWARD, BACKWARD_CONTRACT, CONTRACT, OPERATION
from fe_runtime import NotCompiledError, NotSupportedError, TensorDesc
from fe_runtime.plan import Target
from fe_runtime.testing import Call, assert_rejected, invalid_calls, to_framework, to_numpy, valid_calls

FP8 = "float8_e4m3fn"


def run(arrays: Any, options: Any) -> Any:
    x, w, bias, scale = arrays
    return rmsnorm_silu_wrapper(x, w, bias_tensor=bias, scale_tensor=scale, **options)


def example(framework: str = "numpy", out_dtype: str = FP8) -> Call:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3, 32), (32,), (32,), (1,))]
    if out_dtype != FP8:
        arrays[3] = None  # type: ignore[call-overload]
    converted = tuple(None if a is None else to_framework(a, framework) for a in arrays)
    return Call(converted, {"eps": 1e-5, "out_dtype": out_dtype})


def silu_of_norm(x: Any, w: Any, b: Any, eps: float) -> Any:
    v = np.asarray(x, np.float64)
    z = v / np.sqrt((v * v).mean(-1, keepdims=True) + eps)
    z = z * (1 if w is None else np.asarray(w, np.float64)) + (0 if b is None else np.asarray(b, np.float64))
    return z / (1 + np.exp(-z))


@pytest.mark.parametrize("call", invalid_calls(CONTRACT, example()), ids=lambda call: call.id)
def test_invalid_call_is_rejected(call: Any) -> None:
    assert_rejected(run, "rmsnorm_silu", call)


@settings(max_examples=60, deadline=None)
@given(valid_calls(CONTRACT, extents={"C": (1, 7, 16, 33, 64)}))
def test_valid_calls_give_what_the_contract_says(call: Call) -> None:
    result = run(*call)
    assert list(result.keys()) == ["o_tensor", "sf_tensor"]
    bound = OPERATION.bind(call.arrays, call.options)
    for output, spec in zip(result, bound.outputs, strict=True):
        assert (output is None) == (spec is None)
        if spec is not None:
            assert output.shape == spec.shape
            assert output.dtype.name == spec.dtype
    if bound.options["out_dtype"] in ("float32", "float16", "bfloat16"):
        x, w, bias, _ = call.arrays
        w = None if w is None else w.reshape(-1)  # given as (C,) or (1, C, 1, 1)
        want = silu_of_norm(x, w, bias, float(call.options["eps"]))  # type: ignore[arg-type]
        np.testing.assert_allclose(result["o_tensor"].astype(np.float64), want, rtol=2.0**-7, atol=1e-5)


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("out_dtype", [None, "bfloat16", FP8, "nvfp4"])
def test_frameworks_give_numpys_bytes(framework: str, out_dtype: Any) -> None:
    x, w, bias, _ = example().arrays
    want = rmsnorm_silu_wrapper(x, w, 1e-5, bias, out_dtype)
    x, w, bias = (to_framework(array, framework) for array in (x, w, bias))
    got = rmsnorm_silu_wrapper(x, w, 1e-5, bias, out_dtype)
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if b is None:
            continue
        assert tuple(a.shape) == b.shape
        if out_dtype is None:  # fp32: another library's sum and exp round another way
            np.testing.assert_allclose(to_numpy(a), b, rtol=2.0**-19, atol=2.0**-22)
            continue
        same = to_numpy(a).view(np.uint8) == b.view(np.uint8)
        assert same.mean() > 0.98  # a quantised value then lands one code further, rarely


def test_packed_pairs_have_torchs_own_dtype() -> None:
    x, w, _, _ = example("torch").arrays
    o, sf = rmsnorm_silu_wrapper(x, w, out_dtype="nvfp4")
    assert o.dtype == torch.float4_e2m1fn_x2
    assert sf.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(
    "dtype", ["bfloat16", ml_dtypes.bfloat16, np.dtype("bfloat16"), torch.bfloat16, jnp.bfloat16], ids=repr
)
def test_out_dtype_in_every_spelling(dtype: Any) -> None:
    x, w, _, _ = example().arrays
    assert rmsnorm_silu_wrapper(x, w, out_dtype=dtype)["o_tensor"].dtype == ml_dtypes.bfloat16


def test_no_rows_and_no_weight() -> None:
    o, sf = rmsnorm_silu_wrapper(np.empty((0, 3, 16), np.float32), None, out_dtype="nvfp4")
    assert o.shape == (0, 3, 8)
    assert sf.shape == (0, 3, 1)


def test_eps_of_any_real_kind() -> None:
    x, w, _, _ = example().arrays
    one = rmsnorm_silu_wrapper(x, w, eps=1)["o_tensor"]
    np.testing.assert_array_equal(one, rmsnorm_silu_wrapper(x, w, eps=np.float32(1.0))["o_tensor"])


@pytest.mark.parametrize("out_dtype", [FP8, torch.float8_e4m3fn, "nvfp4", torch.float4_e2m1fn_x2], ids=repr)
def test_required_gradient_of_quantised_output_is_refused(out_dtype: Any) -> None:
    x, w, bias, _ = example("torch").arrays
    with pytest.raises(RuntimeError, match=r"rmsnorm_silu: bias_tensor must not require a gradient.*inference"):
        rmsnorm_silu_wrapper(x, w, 1e-5, bias.requires_grad_(), out_dtype)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match=r"rmsnorm_silu: x_tensor .*inference"):
        rmsnorm_silu_wrapper(x.requires_grad_(), w, out_dtype=out_dtype)  # type: ignore[union-attr]
    with torch.no_grad():
        assert not rmsnorm_silu_wrapper(x, w, out_dtype=out_dtype)["o_tensor"].requires_grad


def test_an_unknown_dtype_is_an_error_also_where_a_gradient_is_required() -> None:
    x, w, _, _ = example("torch").arrays
    with pytest.raises(ValueError, match="out_dtype must be bfloat16"):
        rmsnorm_silu_wrapper(x.requires_grad_(), w, out_dtype="int8")  # type: ignore[union-attr]


def test_jax_has_no_gradient_of_quantised_output() -> None:
    x, w, _, _ = example("jax").arrays
    with pytest.raises(NotSupportedError, match="rmsnorm_silu_jax has no derivative"):
        jax.grad(lambda v: rmsnorm_silu_jax(v, w, out_dtype=FP8).astype(jnp.float32).sum())(x)


def test_fused_alias_refuses_a_gradient_of_what_it_writes_in_place() -> None:
    x, w, _, _ = example("torch").arrays
    w.requires_grad_()  # type: ignore[union-attr]
    out = torch.empty_like(x)  # type: ignore[call-overload]
    with pytest.raises(RuntimeError, match="fused_rmsnorm_silu: weight must not require a gradient where out is given"):
        fused_rmsnorm_silu(x, w, out=out)
    with torch.no_grad():
        assert fused_rmsnorm_silu(x, w, out=out) is out
    assert fused_rmsnorm_silu(x, w).requires_grad


# --- gradient ------------------------------------------------------------------------------------------------------


def slopes(x: Any, w: Any, b: Any, do: Any, eps: float) -> dict[str, Any]:
    """What torch's own operations give in float64."""
    wide = {n: torch.tensor(a, dtype=torch.float64, requires_grad=True) for n, a in {"x": x, "w": w, "b": b}.items()}
    z = torch.nn.functional.rms_norm(wide["x"], wide["x"].shape[-1:], wide["w"], eps) + wide["b"]
    (torch.nn.functional.silu(z) * torch.tensor(do)).sum().backward()
    return {name: leaf.grad.numpy() for name, leaf in wide.items()}  # type: ignore[union-attr]


GRADIENT_EPS = 1e-3


def test_gradients_in_torch() -> None:
    x, w, b, _ = example().arrays
    do = np.random.default_rng(1).standard_normal((2, 3, 32)).astype(np.float32)
    want = slopes(x, w, b, do, GRADIENT_EPS)
    leaves = [torch.tensor(a, requires_grad=True) for a in (x, w.reshape(1, 32, 1, 1), b)]  # type: ignore[union-attr]
    rmsnorm_silu_wrapper(*leaves[:2], GRADIENT_EPS, leaves[2])["o_tensor"].backward(torch.tensor(do))
    for leaf, exact in zip(leaves, want.values(), strict=True):
        np.testing.assert_allclose(leaf.grad.reshape(exact.shape), exact, rtol=1e-4, atol=1e-5)  # type: ignore[union-attr]


def test_gradients_in_jax() -> None:
    x, w, b, _ = example().arrays
    do = np.random.default_rng(1).standard_normal((2, 3, 32)).astype(np.float32)
    want = slopes(x, w, b, do, GRADIENT_EPS)
    gradient = jax.grad(lambda *a: (rmsnorm_silu_jax(*a, eps=GRADIENT_EPS) * do).sum(), (0, 1, 2))
    for function in (gradient, jax.jit(gradient)):
        for got, exact in zip(function(*map(jnp.asarray, (x, w, b))), want.values(), strict=True):
            np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-5)


def test_gradient_op_and_compiled_gradient() -> None:
    x, w, b, _ = example("torch").arrays
    torch.library.opcheck(torch.ops.fe_norm.rmsnorm_silu_backward.default, (x, x, w, b))
    x.requires_grad_()  # type: ignore[union-attr]

    def model(x: Any) -> Any:
        return rmsnorm_silu_wrapper(x * 2, w, 1e-5, b)["o_tensor"].square().sum()

    torch._dynamo.reset()
    (want,) = torch.autograd.grad(model(x), x)
    (got,) = torch.autograd.grad(torch.compile(model, fullgraph=True, backend="aot_eager")(x), x)
    torch.testing.assert_close(got, want)


def backward_example() -> Call:
    rng = np.random.default_rng(0)
    shapes = ((2, 3, 32), (2, 3, 32), (32,), (32,))
    return Call(tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes), {"eps": 1e-5})


def run_backward(arrays: Any, options: Any) -> Any:
    return rmsnorm_silu_backward(*arrays, **options)


@pytest.mark.parametrize("call", invalid_calls(BACKWARD_CONTRACT, backward_example()), ids=lambda call: call.id)
def test_invalid_call_of_the_gradient_is_rejected(call: Any) -> None:
    assert_rejected(run_backward, "rmsnorm_silu_backward", call)


def test_one_kernel_of_the_gradient_for_any_rows() -> None:
    w = on_gpu((512,))
    plans = [BACKWARD.plan(BACKWARD.bind((x, x, w, None), {})).kernel for x in (on_gpu((m, 512)) for m in (1, 99))]
    assert plans[0] is not None
    assert plans[1] is not None
    assert plans[0].spec == plans[1].spec
    assert plans[0].form.scalars == ("eps",)
    assert len(plans[1].form.scratch) == 1


# --- class ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("out_dtype", ["float32", FP8, "nvfp4"])
def test_class_writes_what_the_wrapper_returns(framework: str, out_dtype: str) -> None:
    x, w, bias, scale = example(framework, out_dtype).arrays
    want, want_sf = rmsnorm_silu_wrapper(x, w, 1e-5, bias, out_dtype, scale)
    o = np.empty_like(want) if framework == "numpy" else torch.empty_like(want)
    sf = None if want_sf is None else (np.empty_like(want_sf) if framework == "numpy" else torch.empty_like(want_sf))
    op = RmsNormSilu(x, w, o, sf, 1e-5, bias, scale)
    with pytest.raises(NotCompiledError):
        op.execute(x, w, o, sf, bias, scale)
    assert op.check_support() is True
    op(x, w, o, sf, bias, scale)
    np.testing.assert_array_equal(to_numpy(o).view(np.uint8), to_numpy(want).view(np.uint8))
    if sf is not None:
        np.testing.assert_array_equal(to_numpy(sf).view(np.uint8), to_numpy(want_sf).view(np.uint8))


def test_class_takes_descriptors_and_any_number_of_rows() -> None:
    x, w, o = (TensorDesc.of("float32", shape) for shape in ((4, 32), (32,), (4, 32)))
    op = RmsNormSilu(x, w, o)
    op.compile()
    for rows in (1, 9):
        data, out = np.ones((rows, 32), np.float32), np.zeros((rows, 32), np.float32)
        op.execute(data, np.ones(32, np.float32), out)
        np.testing.assert_allclose(out, silu_of_norm(data, None, None, 1e-5), rtol=1e-5)


def test_class_refuses_on_the_cpu_what_it_refuses_on_a_gpu() -> None:
    x = np.ones((4, 6, 64), np.float32)[:, :3, :32]
    with pytest.raises(ValueError, match="x_tensor must have leading dimensions that merge"):
        RmsNormSilu(x, None, np.empty((4, 3, 32), np.float32)).check_support()
    whole = np.ones((4, 3, 32), np.float32)
    op = RmsNormSilu(whole, None, np.empty_like(whole))
    op.compile()
    with pytest.raises(ValueError, match="x_tensor must have leading dimensions that merge"):
        op.execute(x, None, np.empty((4, 3, 32), np.float32))


def test_class_refuses_jax_arrays_on_the_cpu() -> None:
    x, w, _, _ = example("jax").arrays
    op = RmsNormSilu(x, w, jnp.zeros_like(x))
    op.compile()
    with pytest.raises(ValueError, match="rmsnorm_silu_jax"):
        op.execute(x, w, jnp.zeros_like(x))


@pytest.mark.parametrize(
    ("o", "kind", "text"),
    [
        (None, ValueError, r"o_tensor must be an array of shape \(2, 3, 32\) and dtype float32; got None"),
        ([1.0], TypeError, "o_tensor must be an array"),
        (np.empty((2, 3, 32), np.float64), ValueError, "o_tensor must have dtype float32; got float64"),
    ],
    ids=["None", "list", "dtype"],
)
def test_class_names_the_output_that_is_wrong(o: Any, kind: type[Exception], text: str) -> None:
    x, w, _, _ = example().arrays
    with pytest.raises(kind, match=f"rmsnorm_silu: {text}"):
        RmsNormSilu(x, w, o).check_support()


def test_class_names_scales_that_nobody_writes() -> None:
    x, w, _, _ = example().arrays
    with pytest.raises(
        ValueError, match=r"sf_tensor must be None: these options produce no such output; got an array\."
    ):
        RmsNormSilu(
            x, w, np.empty((2, 3, 32), np.float32), np.empty((2, 3, 2), ml_dtypes.float8_e4m3fn)
        ).check_support()


def test_class_checks_its_arguments_in_order() -> None:
    with pytest.raises(TypeError, match="rmsnorm_silu: x_tensor must be an array"):
        RmsNormSilu([1.0], None, [1.0])


def test_errors_name_the_stream_as_the_signature_does() -> None:
    for framework in ("numpy", "jax"):
        x, w, _, _ = example(framework).arrays
        with pytest.raises((TypeError, ValueError), match="rmsnorm_silu: current_stream must be None"):
            rmsnorm_silu_wrapper(x, w, current_stream="0")


def test_fused_alias_does_not_drop_its_block_scale() -> None:
    x, w, _, _ = example().arrays
    with pytest.raises(ValueError, match="fused_rmsnorm_silu: block_scale must be None without out"):
        fused_rmsnorm_silu(x, w, block_scale=np.empty((2, 3, 2), ml_dtypes.float8_e4m3fn))


def test_fused_alias_selects_the_format_by_the_output() -> None:
    x, w, _, _ = example().arrays
    out, scales = np.empty((2, 3, 16), np.uint8), np.empty((2, 3, 2), ml_dtypes.float8_e4m3fn)
    returned = fused_rmsnorm_silu(x, w, 1e-5, out, scales)
    assert returned[0] is out
    assert returned[1] is scales
    want, want_sf = rmsnorm_silu_wrapper(x, w, 1e-5, out_dtype="nvfp4")
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(scales.view(np.uint8), want_sf.view(np.uint8))
    np.testing.assert_array_equal(fused_rmsnorm_silu(x, w), rmsnorm_silu_wrapper(x, w, 1e-6)["o_tensor"])


# --- torch and JAX -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out_dtype", [None, FP8, "nvfp4"])
def test_opcheck(out_dtype: str | None) -> None:
    x, w, bias, _ = example("torch").arrays
    rmsnorm_silu_wrapper(x, w)
    options = {"eps": 1e-5, "out_dtype": out_dtype}
    torch.library.opcheck(torch.ops.fe_norm.rmsnorm_silu.default, (x, w, bias, None), options)


@pytest.mark.parametrize("out_dtype", [None, FP8])
def test_compiles_as_one_graph(out_dtype: str | None) -> None:
    x, w, _, _ = example("torch").arrays

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(x: Any, w: Any) -> Any:
        return rmsnorm_silu_wrapper(x * 2, w, out_dtype=out_dtype)["o_tensor"]

    want = rmsnorm_silu_wrapper(x * 2, w, out_dtype=out_dtype)["o_tensor"]  # type: ignore[operator]
    assert torch.equal(model(x, w).view(torch.uint8), want.view(torch.uint8))


def test_jax_entry_eager_jit_and_shapes() -> None:
    x, w, bias, scale = example("jax").arrays
    want = to_numpy(rmsnorm_silu_wrapper(x, w, 1e-5, bias)["o_tensor"])
    np.testing.assert_allclose(rmsnorm_silu_jax(x, w, bias), want, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(rmsnorm_silu_jax)(x, w, bias), want, rtol=1e-5, atol=1e-7)
    fp8 = jax.jit(lambda *a: rmsnorm_silu_jax(*a, out_dtype=FP8))
    assert fp8(x, w, bias, scale).dtype == ml_dtypes.float8_e4m3fn
    o, sf = jax.eval_shape(lambda a, b: rmsnorm_silu_jax(a, b, out_dtype="nvfp4"), x, w)
    assert (o.shape, o.dtype, sf.shape, sf.dtype) == ((2, 3, 16), np.uint8, (2, 3, 2), ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize(
    "dtype",
    [jnp.float4_e2m1fn, torch.float4_e2m1fn_x2, "float4_e2m1fn", "float4_e2m1fn_x2"],
    ids=["jax", "torch", "name", "name of pairs"],
)
@pytest.mark.parametrize("function", [rmsnorm_silu_jax, rmsnorm_silu_wrapper])
def test_jax_has_no_packed_fp4_dtype(function: Any, dtype: Any) -> None:
    x, w, _, _ = example("jax").arrays
    with pytest.raises(ValueError, match=r"rmsnorm_silu: out_dtype must name no FP4 dtype .*'nvfp4'"):
        function(x, w, out_dtype=dtype)


def test_jax_out_dtype_that_is_none() -> None:
    x, w, _, _ = example("jax").arrays
    with pytest.raises(ValueError, match="rmsnorm_silu: out_dtype must be bfloat16"):
        rmsnorm_silu_jax(x, w, out_dtype=3)
    with pytest.raises(TypeError, match="rmsnorm_silu: x_tensor must be an array"):
        rmsnorm_silu_jax([1.0], w, out_dtype=jnp.float4_e2m1fn)


# --- plan ----------------------------------------------------------------------------------------------------------


def on_gpu(shape: tuple[int, ...], dtype: str = "bfloat16", stride: Any = None) -> TensorDesc:
    return TensorDesc.of(dtype, shape, stride, device="cuda:0")


def spec_of(x: TensorDesc, w: TensorDesc | None = None, **options: Any) -> Any:
    plan = OPERATION.plan(OPERATION.bind((x, w, None, None), options))
    assert plan.kernel is not None
    return plan.kernel.spec


def test_rows_and_eps_are_not_in_the_kernel_key() -> None:
    for columns in (1, 33, 512):
        w = on_gpu((columns,))
        specs = {spec_of(on_gpu((rows, columns)), w, eps=eps) for rows in (1, 2, 77, 2**22) for eps in (0.0, 1e-5)}
        assert len(specs) == 1


def test_what_changes_the_code_is_in_the_kernel_key() -> None:
    x, w = on_gpu((4, 512)), on_gpu((512,))
    specs = [
        spec_of(x, w),
        spec_of(x),
        spec_of(on_gpu((4, 511)), on_gpu((511,))),
        spec_of(on_gpu((4, 512), stride=(513, 1)), w),
        spec_of(on_gpu((4, 512), "float32"), w),
        spec_of(x, on_gpu((512,), "float32")),
        *(spec_of(x, w, out_dtype=out) for out in ("float16", "float32", FP8, "nvfp4")),
    ]
    assert len(set(specs)) == len(specs)


def test_a_view_of_leading_dimensions_needs_no_copy_if_it_merges() -> None:
    merged = OPERATION.plan(OPERATION.bind((on_gpu((2, 3, 64), stride=(384, 128, 1)), None, None, None), {}))
    assert merged.kernel is not None
    assert merged.kernel.copies == ()
    split = OPERATION.plan(OPERATION.bind((on_gpu((2, 3, 64), stride=(1000, 128, 1)), None, None, None), {}))
    assert split.kernel is not None
    assert split.kernel.copies == ("x_tensor",)
    assert "copies x_tensor" in split.explain()


@pytest.mark.parametrize(("capability", "backend"), [((8, 0), "sm80"), ((9, 0), "sm90"), ((12, 0), "sm120")])
def test_architectures_with_a_kernel(capability: tuple[int, int], backend: str) -> None:
    bound = OPERATION.bind((on_gpu((4, 512)), on_gpu((512,)), None, None), {})
    assert OPERATION.plan(bound, target=Target(capability, 100)).backend == backend


@pytest.mark.parametrize("capability", [(7, 5), (11, 0), (13, 0)], ids=str)
def test_gpus_without_kernels_run_the_reference(capability: tuple[int, int]) -> None:
    bound = OPERATION.bind((on_gpu((4, 512)), on_gpu((512,)), None, None), {})
    plan = OPERATION.plan(bound, target=Target(capability, 40))
    assert plan.backend == "reference"
    assert plan.missing is not None
    assert plan.missing.supported == ((8, 0), (9, 0), (10, 0), (12, 0))


def test_class_takes_a_descriptor_of_packed_pairs() -> None:
    o = TensorDesc.of("float4_e2m1fn_x2", (4, 256), device="cuda:0")
    sf = TensorDesc.of("float8_e4m3fn", (4, 32), device="cuda:0")
    assert RmsNormSilu(on_gpu((4, 512)), on_gpu((512,)), o, sf).check_support()


def test_explicit_kernel_on_the_cpu_is_not_supported() -> None:
    x, w, _, _ = example().arrays
    with pytest.raises(NotSupportedError, match="rmsnorm_silu: backend"):
        rmsnorm_silu_wrapper(x, w, backend="sm90")
