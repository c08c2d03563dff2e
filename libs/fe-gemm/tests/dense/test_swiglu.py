"""The front door of ``gemm_swiglu`` on the CPU: each row of its contract, frameworks, class, ``jit``, torch.compile."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from dense_calls import FRAMEWORKS, pairs, pitched, scaled, strides
from hypothesis import HealthCheck, given, settings
from naive_gemm import (
    E4M3,
    E5M2,
    FORMATS,
    STORED,
    accumulation_error,
    assert_quantised,
    in_order,
    product,
    value_of,
)
from swiglu_calls import KEYS, PLAIN, K, L, N, blocks, check, floats, run, to, vec, with_scales

from fe_gemm import GemmSwiglu, gemm_swiglu_jax, gemm_swiglu_wrapper
from fe_gemm.dense.plan import describe
from fe_gemm.dense.swiglu import OPERATION
from fe_gemm.dense.swiglu_contract import CONTRACT
from fe_runtime.testing import Call, assert_rejected, invalid_calls, to_framework, to_numpy, valid_calls

# --- what is accepted -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("dtype", PLAIN)
def test_without_scales(dtype: str, framework: str) -> None:
    arrays, x, error = floats(dtype, batch=1 if framework == "jax" else L)
    for alpha, ab12_dtype, c_dtype in (
        (1.0, "float32", "float16"),
        (0.7, "bfloat16", "bfloat16"),
        (-2, E4M3, "float16"),
    ):
        result = gemm_swiglu_wrapper(*to(framework, arrays), alpha, ab12_dtype=ab12_dtype, c_dtype=c_dtype)
        assert list(result.keys()) == KEYS
        assert result["sfc_tensor"] is result["amax_tensor"] is None
        check(result, np.float64(np.float32(alpha)) * x, abs(alpha) * error)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", FORMATS)
def test_with_scales(name: str, framework: str) -> None:
    a, b = blocks(name, batch=1 if framework == "jax" else L)
    x, error = 0.5 * product(a.exact(), b.exact()), 0.5 * accumulation_error(a.exact(), b.exact())
    for ab12_dtype, c_dtype in (("float32", "float32"), (E5M2, "bfloat16"), ("bfloat16", "float16")):
        result = run(scaled(a, b, framework), alpha=0.5, ab12_dtype=ab12_dtype, c_dtype=c_dtype, sf_vec_size=vec(name))
        assert list(result.keys()) == KEYS
        assert (result["amax_tensor"] is not None) == ("fp4" in name and c_dtype == "bfloat16")
        assert result["sfc_tensor"] is None
        check(result, x, error)


def test_frameworks_agree() -> None:
    arrays, *_ = floats(batch=1)
    a, b = blocks("nvfp4", batch=1)
    for results in (
        [gemm_swiglu_wrapper(*to(framework, arrays), 0.5) for framework in FRAMEWORKS],
        [run(scaled(a, b, framework), c_dtype="bfloat16") for framework in FRAMEWORKS],
    ):
        for result in results[1:]:
            for got, want in zip(result, results[0], strict=True):
                if want is not None:
                    want32 = want.astype(np.float32)
                    np.testing.assert_allclose(to_numpy(got).astype(np.float32), want32, rtol=1e-2, atol=1e-3)


def test_uint8_container_and_torchs_pairs_are_the_same() -> None:
    arrays = scaled(*blocks("mxfp4"), "torch")
    results = [run(given, c_dtype="bfloat16", sf_vec_size=32) for given in (arrays, pairs(arrays))]
    for x, y in zip(*results, strict=True):
        assert (x is None and y is None) or torch.equal(x, y)


@pytest.mark.parametrize(("name", "dtype"), [("mxfp8_e4m3", E4M3), ("mxfp8_e5m2", E5M2), ("mxfp4", E4M3)])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_fp8_c_is_quantised_in_blocks(name: str, dtype: str, framework: str) -> None:
    a, b = blocks(name, batch=1 if framework == "jax" else L)
    norm = to_framework(np.full((1, 1), 0.3, np.float32), framework)
    result = run(scaled(a, b, framework), norm, c_dtype=dtype, sf_vec_size=32)
    exact = run(scaled(a, b, framework), norm, c_dtype="float32", sf_vec_size=32)
    assert to_numpy(result["sfc_tensor"]).dtype == STORED["float8_e8m0fnu"]
    batch = 1 if framework == "jax" else L
    logical = framework == "torch"
    assert tuple(result["sfc_tensor"].shape) == ((32, 4, 1, 4, 1, batch) if logical else (batch, 1, 1, 32, 4, 4))
    if logical:
        assert result["sfc_tensor"].stride() == (16, 4, 512, 1, 512, 512)
    c, scales = to_numpy(result["c_tensor"]), to_numpy(result["sfc_tensor"])
    assert_quantised(c, scales, to_numpy(exact["c_tensor"]), dtype, 0.3)
    check(result, product(a.exact(), b.exact()), accumulation_error(a.exact(), b.exact()))


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("majors", ["km", "mk", "mm"])
@pytest.mark.parametrize("dtype", ["bfloat16", E4M3])
def test_majors_of_a_and_b(majors: str, framework: str, dtype: str) -> None:
    arrays, x, error = floats(dtype, m=48, majors=majors)
    check(gemm_swiglu_wrapper(*to(framework, arrays)), x, error)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_majors_of_the_results(framework: str) -> None:
    arrays, x, error = floats(m=48)
    for major, ab12, c in (("n", (N, 1, 48 * N), (N // 2, 1, 24 * N)), ("m", (1, 48, 48 * N), (1, 48, 24 * N))):
        result = gemm_swiglu_wrapper(*to(framework, arrays), c_major=major)
        assert (strides(result["ab12_tensor"]), strides(result["c_tensor"])) == (ab12, c)
        check(result, x, error)


def test_rows_of_an_aligned_pitch() -> None:
    (a, b), x, error = floats()
    for framework in ("numpy", "torch"):
        check(gemm_swiglu_wrapper(*to(framework, (pitched(a, 8), pitched(b, 24)))), x, error)


@pytest.mark.parametrize("m", [1, 7, 129])
def test_tails(m: int) -> None:
    arrays, x, error = floats(m=m, n=64, k=40)
    check(gemm_swiglu_wrapper(*arrays), x, error)
    a, b = blocks(m=m, n=192, k=112)
    check(run(scaled(a, b), sf_vec_size=32), product(a.exact(), b.exact()), accumulation_error(a.exact(), b.exact()))


@pytest.mark.parametrize("dtype", ["float16", E4M3, E5M2])
def test_half_precision_accumulator(dtype: str) -> None:
    arrays, x, error = floats(dtype)
    half = 2.0**-9 * product(np.abs(value_of(arrays[0])), np.abs(value_of(arrays[1])))
    for ab12_dtype in ("float16", "bfloat16"):
        result = gemm_swiglu_wrapper(*arrays, ab12_dtype=ab12_dtype, acc_dtype="float16")
        check(result, x, error + half)


@pytest.mark.parametrize("hints", [
    {"mma_tiler_mn": (256, 32)}, {"mma_tiler_mn": (128, 224), "cluster_shape_mn": (1, 16)}, {"vector_f32": True},
    {"ab12_stages": None}, {"ab12_stages": 7}, {"mma_tiler_mn": (256, 256), "cluster_shape_mn": (2, 8)},
])  # fmt: skip
def test_hints_change_nothing(hints: Any) -> None:
    arrays = to("torch", floats()[0])
    for x, y in zip(gemm_swiglu_wrapper(*arrays), gemm_swiglu_wrapper(*arrays, **hints), strict=True):
        assert (x is None and y is None) or torch.equal(x, y)


def test_alpha_prepares_no_other_contract() -> None:
    specs = [OPERATION.bind([*floats()[0], None, None, None], {"alpha": alpha}).outputs for alpha in (1, 2.5)]
    assert specs[0] == specs[1]
    assert [option.name for option in CONTRACT.runtime_options] == ["alpha"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nan_propagates(framework: str) -> None:
    (a, b), *_ = floats(batch=1)
    a[3, 5] = np.nan
    result = gemm_swiglu_wrapper(*to(framework, (a, b)))
    for name in KEYS[:2]:
        found = np.isnan(to_numpy(result[name]).astype(np.float32))
        assert found[3].all()
        assert found.sum() == found[3].size


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_empty_problems(framework: str) -> None:
    for m, batch in ((0, 1), (5, 0))[: 1 if framework == "jax" else 2]:
        result = gemm_swiglu_wrapper(*to(framework, floats(m=m, batch=batch)[0]))
        assert (tuple(result[0].shape), tuple(result[1].shape)) == ((m, N, batch), (m, N // 2, batch))
        result = run(scaled(*blocks("nvfp4", m=m, batch=batch), framework), c_dtype="bfloat16")
        assert to_numpy(result["amax_tensor"]).item() == -np.inf


# --- what is rejected: one test for each row ------------------------------------------------------------------------


def rejected(match: str, *arrays: Any, error: type[Exception] = ValueError, **options: Any) -> None:
    with pytest.raises(error, match=f"gemm_swiglu: {match}"):
        gemm_swiglu_wrapper(*arrays, **options)


def rejected_scaled(match: str, arrays: list[Any], norm_const: Any = None, **options: Any) -> None:
    matrices, named = with_scales(arrays, norm_const)
    rejected(match, *matrices, **named, **options)


def call(arrays: Any, options: dict[str, Any]) -> Any:
    return OPERATION(arrays, options)


OPTIONS = {
    "alpha": 1.0,
    "c_major": "n",
    "ab12_dtype": "float32",
    "c_dtype": "float16",
    "acc_dtype": "float32",
    "sf_vec_size": 32,
    "with_amax": None,
}


def example(with_blocks: bool) -> Call:
    if not with_blocks:
        return Call((*floats()[0], None, None, None), dict(OPTIONS))
    a, b = blocks()
    given = (a.elements(), b.elements(), a.blocked("physical"), b.blocked("physical"), np.ones(1, np.float32))
    return Call(given, dict(OPTIONS))


@pytest.mark.parametrize("wrong", invalid_calls(CONTRACT, example(True)), ids=lambda call: call.id)
def test_invalid_scaled_call_is_rejected(wrong: Any) -> None:
    assert_rejected(call, "gemm_swiglu", wrong)


@pytest.mark.parametrize("wrong", invalid_calls(CONTRACT, example(False)), ids=lambda call: call.id)
def test_invalid_plain_call_is_rejected(wrong: Any) -> None:
    assert_rejected(call, "gemm_swiglu", wrong)


def values(name: str, shape: Any, dtype: str, random: Any) -> Any:
    return (
        random.integers(120, 130, shape) if name.startswith("sf") and "int" in dtype else random.integers(0, 7, shape)
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    valid_calls(
        CONTRACT,
        extents={"M": (1, 16, 48), "N": (64, 128), "K": (32, 64, 96), "L": (1, 2)},
        options={"acc_dtype": ("float32",), "with_amax": (None,)},
        values=values,
    )
)
def test_valid_calls_give_what_the_contract_says(call: Call) -> None:
    result = OPERATION(call.arrays, call.options)
    for output, spec in zip(result, OPERATION.bind(*call).outputs, strict=True):
        assert (output is None) == (spec is None)
        if spec is not None:
            assert output.shape == spec.shape
            assert strides(output) == spec.stride


def test_columns_in_blocks_of_64() -> None:
    rejected("b_tensor must have a multiple of 64 as N; got N = 96", *floats(n=96)[0])


def test_scales_for_both_or_none() -> None:
    a, b, sfa, sfb = scaled(*blocks())
    rejected("sfa_tensor must be given if and only if sfb_tensor is", a, b, sfa_tensor=sfa, sf_vec_size=32)
    rejected("sfa_tensor must be given if and only if sfb_tensor is", a, b, sfb_tensor=sfb, sf_vec_size=32)


def test_norm_const_needs_scales() -> None:
    rejected("norm_const_tensor must be None without scales", *floats()[0], norm_const_tensor=np.ones(1, np.float32))


def test_amax_and_sfc_need_scales() -> None:
    arrays = to("torch", floats()[0])
    ab12, c, *_ = gemm_swiglu_wrapper(*arrays)
    amax, sfc = torch.zeros(1), torch.zeros((1, 1, 1, 32, 4, 4), dtype=torch.uint8)
    with pytest.raises(ValueError, match="amax_tensor must be None without scales"):
        GemmSwiglu(*arrays, ab12, c, sample_amax=amax).check_support()
    with pytest.raises(ValueError, match="sfc_tensor must be None"):
        GemmSwiglu(*arrays, ab12, c, sample_sfc=sfc).check_support()


def test_majors_of_ab12_and_c_are_equal() -> None:
    arrays = to("torch", floats(m=48)[0])
    ab12 = gemm_swiglu_wrapper(*arrays)["ab12_tensor"]
    c = gemm_swiglu_wrapper(*arrays, c_major="m")["c_tensor"]
    with pytest.raises(ValueError, match="ab12_tensor must have its rows of stride 1"):
        GemmSwiglu(*arrays, ab12, c).check_support()


@pytest.mark.parametrize(("dtype", "ab12_dtype"), [
    ("bfloat16", "float16"), ("float32", "float16"), ("float16", "float32"), (E4M3, E4M3),
])  # fmt: skip
def test_half_accumulator_only_for(dtype: str, ab12_dtype: str) -> None:
    rejected("acc_dtype must be float32 unless", *floats(dtype)[0], acc_dtype="float16", ab12_dtype=ab12_dtype)


def test_half_accumulator_is_unscaled() -> None:
    arrays = scaled(*blocks())
    rejected_scaled(
        "acc_dtype must be float32 with scales", arrays, acc_dtype="float16", ab12_dtype="float16", sf_vec_size=32
    )


def test_fp8_needs_e8m0_scales_of_32() -> None:
    rejected_scaled("sf_vec_size must be 32 for fp8", scaled(*blocks()))
    arrays = scaled(*blocks(), dtype=STORED[E4M3])
    rejected_scaled("sfa_tensor must hold e8m0 scales for fp8", arrays, sf_vec_size=32)


def test_fp4_with_e4m3_scales_of_32() -> None:
    rejected_scaled("sf_vec_size must be .* 16 for e4m3", scaled(*blocks("mxfp4"), dtype=STORED[E4M3]), sf_vec_size=32)


def test_fp4_is_k_major_and_its_results_n_major() -> None:
    a, b = blocks("mxfp4", m=64)
    arrays = scaled(a, b)
    rejected_scaled('c_major must be "n" for FP4', arrays, c_major="m", sf_vec_size=32)
    rejected_scaled("a_tensor must have unit stride", [in_order(arrays[0], "m"), *arrays[1:]], sf_vec_size=32)


def test_fp4_needs_scales_and_wide_operands_have_none() -> None:
    arrays = scaled(*blocks("mxfp4"))
    rejected("a_tensor must have scales if it is FP4", *arrays[:2])
    wide = [*floats()[0], *arrays[2:]]
    rejected_scaled("a_tensor must be fp8 or FP4 with scales", wide, sf_vec_size=32)


def test_fp8_c_needs_norm_const() -> None:
    rejected_scaled("norm_const_tensor must be given for an fp8 C", scaled(*blocks()), c_dtype=E4M3, sf_vec_size=32)


def test_fp8_c_has_a_format() -> None:
    norm = np.ones(1, np.float32)
    for name in ("nvfp4", "fp4_e8m0_16"):
        rejected_scaled("c_dtype must be fp8 only with e8m0 scales", scaled(*blocks(name)), norm, c_dtype=E4M3)


@pytest.mark.parametrize("dtype", ["float32", E4M3, E5M2])
def test_c_without_scales_has_16_bits(dtype: str) -> None:
    rejected("c_dtype must be float16 or bfloat16 without scales", *floats()[0], c_dtype=dtype)


def test_scale_tiles_and_strides() -> None:
    a, b = blocks(m=200, k=160)
    arrays = scaled(a, b)
    rejected_scaled(r"sfa_tensor must have shape .*TM = 2", [*arrays[:2], arrays[3], arrays[3]], sf_vec_size=32)
    copied = [*arrays[:2], np.ascontiguousarray(arrays[2]), arrays[3]]
    rejected_scaled("sfa_tensor must be contiguous", copied, sf_vec_size=32)


def test_extents_that_must_not_be_zero() -> None:
    rejected("a_tensor must have K > 0", *floats(k=0)[0])
    rejected("b_tensor must have N > 0", *floats(n=0)[0])


def test_sixteen_bytes() -> None:
    rejected("a_tensor must have a contiguous extent", *floats(k=44)[0])
    rejected("a_tensor must have a contiguous extent", *floats("float32", k=42)[0])
    (a, b), *_ = floats()
    rejected("b_tensor must have strides of multiples of 16 bytes", a, pitched(b, 4))
    rejected("ab12_tensor must have a contiguous extent", *floats(m=42)[0], c_major="m")


def test_dtypes() -> None:
    (a, b), *_ = floats()
    rejected("b_tensor must have the dtype of a_tensor", a, b.astype(np.float16))
    rejected("a_tensor must have dtype", a.astype(np.float64), b)
    rejected("ab12_dtype must be", a, b, ab12_dtype="uint8")
    rejected("c_dtype must be", a, b, c_dtype="float4_e2m1fn")
    arrays = scaled(*blocks())
    rejected_scaled("norm_const_tensor must have dtype float32", arrays, np.ones(1), sf_vec_size=32)
    rejected_scaled("norm_const_tensor must have shape", arrays, np.ones(2, np.float32), sf_vec_size=32)


@pytest.mark.parametrize(("hints", "match", "error"), [
    ({"mma_tiler_mn": (128, 48)}, "mma_tiler_mn must have 128 or 256 rows and 32, 64", ValueError),
    ({"mma_tiler_mn": (64, 64)}, "mma_tiler_mn must have", ValueError),
    ({"cluster_shape_mn": (3, 1)}, "cluster_shape_mn must have powers of two", ValueError),
    ({"cluster_shape_mn": (8, 4)}, "cluster_shape_mn must have powers of two", ValueError),
    ({"cluster_shape_mn": (1, 0)}, "cluster_shape_mn must have powers of two", ValueError),
    ({"mma_tiler_mn": (256, 64), "cluster_shape_mn": (1, 2)}, "cluster_shape_mn must have an even", ValueError),
    ({"ab12_stages": 0}, "ab12_stages must be positive", ValueError),
    ({"ab12_stages": 2.0}, "ab12_stages must be a Python int", TypeError),
    ({"vector_f32": 1}, "vector_f32 must be a Python bool", TypeError),
])  # fmt: skip
def test_illegal_hints(hints: Any, match: str, error: type[Exception]) -> None:
    arrays = floats()[0]
    rejected(match, *arrays, error=error, **hints)
    ab12, c, *_ = gemm_swiglu_wrapper(*arrays)
    with pytest.raises(error, match=match):
        GemmSwiglu(*arrays, ab12, c, **hints).check_support()


def test_tiles_of_32_columns_are_unscaled() -> None:
    gemm_swiglu_wrapper(*floats()[0], mma_tiler_mn=(128, 96))
    rejected_scaled("mma_tiler_mn must have .* 64, 128, 192, 256", scaled(*blocks()), mma_tiler_mn=(128, 96))


# --- JAX and torch.compile ------------------------------------------------------------------------------------------


def test_jax_entry_without_scales() -> None:
    arrays, x, error = floats(batch=1)
    given = to("jax", arrays)
    eager = gemm_swiglu_jax(*given, 0.5, "bfloat16")
    jitted = jax.jit(lambda a, b: gemm_swiglu_jax(a, b, 0.5, "bfloat16"))(*given)
    assert type(eager) is tuple
    assert len(eager) == 2
    check((*eager, None, None), 0.5 * x, 0.5 * error)
    for one, other in zip(eager, jitted, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "nvfp4"])
def test_jax_entry_with_scales(name: str) -> None:
    a, b = blocks(name, batch=1)
    arrays = scaled(a, b, "jax")

    def apply(a: Any, b: Any, sfa: Any, sfb: Any) -> Any:
        options = {"c_dtype": "bfloat16", "sf_vec_size": vec(name), "all_outputs": True}
        return gemm_swiglu_jax(a, b, sfa_tensor=sfa, sfb_tensor=sfb, **options)

    eager, jitted = apply(*arrays), jax.jit(apply)(*arrays)
    assert len(eager) == 4
    check(eager, product(a.exact(), b.exact()), accumulation_error(a.exact(), b.exact()))
    for one, other in zip(eager, jitted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_jax_entry_with_an_fp8_c() -> None:
    a, b = blocks(batch=1)
    arrays = scaled(a, b, "jax")
    scales = {"sfa_tensor": arrays[2], "sfb_tensor": arrays[3], "c_dtype": E4M3, "sf_vec_size": 32}
    with pytest.raises(ValueError, match="norm_const_tensor must be given"):
        gemm_swiglu_jax(*arrays[:2], **scales)
    result = gemm_swiglu_jax(*arrays[:2], **scales, norm_const_tensor=jnp.ones(1), all_outputs=True)
    want = run(arrays, jnp.ones(1), c_dtype=E4M3, sf_vec_size=32)
    np.testing.assert_array_equal(np.asarray(result[2]).view(np.uint8), np.asarray(want["sfc_tensor"]).view(np.uint8))


def test_jax_needs_both_scales_one_batch_and_n_major_results() -> None:
    arrays = scaled(*blocks(batch=1), "jax")
    with pytest.raises(ValueError, match="sfa_tensor must be given if and only if"):
        gemm_swiglu_jax(*arrays[:2], sfa_tensor=arrays[2], sf_vec_size=32)
    given = to("jax", floats(m=48, batch=1)[0])
    rejected('c_major must be "n" for JAX arrays', *given, c_major="m")
    rejected("stream must be None for JAX arrays", *given, stream=3)
    rejected("a_tensor must have", *to("jax", floats()[0]))
    with pytest.raises(TypeError, match="alpha must be a Python float"):
        jax.jit(lambda a, b, alpha: gemm_swiglu_jax(a, b, alpha))(*given, 2.0)


@pytest.mark.parametrize("major", ["n", "m"])
def test_torch_compile(major: str) -> None:
    arrays = to("torch", floats(m=48)[0])

    def apply(a: Any, b: Any) -> Any:
        return list(gemm_swiglu_wrapper(a, b, 0.5, c_major=major, ab12_dtype=torch.bfloat16))[:2]

    torch.compiler.reset()
    for ours, want in zip(torch.compile(apply, fullgraph=True)(*arrays), apply(*arrays), strict=True):
        assert ours.stride() == want.stride()
        assert torch.equal(ours, want)


def test_torch_compile_with_scales() -> None:
    arrays = scaled(*blocks(), "torch")

    def apply(*given: Any) -> Any:
        return list(run(list(given), torch.ones(1), c_dtype=torch.float8_e4m3fn, sf_vec_size=32))[:3]

    torch.compiler.reset()
    for ours, want in zip(torch.compile(apply, fullgraph=True)(*arrays), apply(*arrays), strict=True):
        assert (ours.shape, ours.stride()) == (want.shape, want.stride())
        np.testing.assert_array_equal(to_numpy(ours).view(np.uint8), to_numpy(want).view(np.uint8))


def test_registered_op() -> None:
    op = torch.ops.fe_gemm.gemm_swiglu.default
    arrays = tuple(to("torch", floats(m=48)[0]))
    for options in ({}, {"alpha": 0.5, "c_major": "m", "ab12_dtype": "bfloat16"}):
        torch.library.opcheck(op, arrays, options)
    packed = tuple(scaled(*blocks("mxfp4"), "torch", dtype=np.uint8))
    torch.library.opcheck(op, packed, {"c_dtype": "bfloat16", "sf_vec_size": 32})


def test_meta_tensors() -> None:
    arrays = [x.to("meta") for x in to("torch", floats(m=48)[0])]
    result = gemm_swiglu_wrapper(*arrays, c_major="m")
    assert result["c_tensor"].stride() == (1, 48, 24 * N)
    assert result["amax_tensor"] is None


# --- plan -----------------------------------------------------------------------------------------------------------


def test_what_a_kernel_has_to_compute() -> None:
    bound = OPERATION.bind([*floats(m=48, majors="mk")[0], None, None, None], {"ab12_dtype": "bfloat16"})
    found = describe(bound, CONTRACT.output_names)
    assert (found.epilogue, found.accumulator, found.scales) == ("gemm_swiglu", "float32", None)
    assert (found.a.dtype, found.a.major, found.a.pitch) == ("bfloat16", "m", 96)
    assert (found.b.dtype, found.b.major, found.b.pitch) == ("bfloat16", "k", 2 * K)
    assert {name: m.dtype for name, m in found.matrices.items()} == {"ab12_tensor": "bfloat16", "c_tensor": "float16"}
    assert found.vectors == {}
