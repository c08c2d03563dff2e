"""The front door of ``grouped_gemm_glu`` on the CPU: families, forms, weight modes, contract, class, op, JAX entry."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import pytest
import torch
from grouped_arguments import FRAMEWORKS, Gated, assert_close
from naive_gemm import E4M3, E5M2, FORMATS, STORED, value_of
from naive_grouped import BF16, by_row, columns, forward, product

from fe_gemm import GroupedGemmGlu, compat, grouped_gemm_glu_jax, grouped_gemm_glu_wrapper
from fe_gemm.grouped.glu import OPERATION
from fe_gemm.grouped.glu_contract import CONTRACT
from fe_gemm.reference import grouped as reference
from fe_runtime import NotCompiledError, NotSupportedError, TensorDesc
from fe_runtime.plan import HOPPER
from fe_runtime.testing import Call, assert_rejected, invalid_calls, to_framework, to_numpy

STRIDED = ("numpy", "torch")
KEYS = ["c_tensor", "d_tensor", "d_col_tensor", "amax_tensor", "sfd_row_tensor", "sfd_col_tensor"]
MODES = ("dense", "discrete")
FAMILIES = ("bfloat16", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp4", "nvfp4", "fp4_e8m0_16")
REFERENCE = reference.grouped_gemm_glu


def expected(p: Gated, bias: bool = False, norm: bool = False, **options: Any) -> Any:
    """Return what the reference makes of the canonical operands, in numpy."""
    sfa, sfb = (p.sfa, p.sfb) if p.scaled else (None, None)
    arrays = (
        p.a,
        sfa,
        p.off,
        p.alpha,
        p.b,
        sfb,
        p.bias if bias else None,
        None,
        None,
        p.norm if norm else None,
        p.prob,
    )
    return REFERENCE(*arrays, sf_vec_size=p.vec, **options)


def call(name: str = "bfloat16", framework: str = "numpy", **changed: Any) -> Any:
    return grouped_gemm_glu_wrapper(**{**Gated(name).arguments(framework), **changed})


def refused(match: str, name: str = "bfloat16", error: type[Exception] = ValueError, **changed: Any) -> None:
    framework = changed.pop("framework", "numpy")
    with pytest.raises(error, match=f"grouped_gemm_glu: {match}"):
        call(name, framework, **changed)


def compare(p: Gated, result: Any, want: Any) -> None:
    assert list(result.keys()) == KEYS
    for got, y in zip(result, want, strict=True):
        assert_close(got, y, int(p.off[-1]) if got is not None and got.shape[0] == p.rows else 10**9)


def norm_in(framework: str, value: float = 0.3) -> Any:
    return to_framework(np.array([value], np.float32), framework)


# --- results --------------------------------------------------------------------------------------------------------


def test_against_a_formula_in_float64() -> None:
    p = Gated()
    result = call(bias_tensor=p.bias, generate_c=True, c_dtype="float32", d_dtype="float32")
    h = by_row(p.alpha, p.off, p.rows)[:, None] * product(value_of(p.a), value_of(p.b), p.off)
    h += by_row(p.bias.T, p.off, p.rows)
    gates, ups = columns(p.n // 2)
    x = forward("swiglu", h[:, gates], h[:, ups]) * p.prob[:, None]
    owned = p.off[-1]
    np.testing.assert_array_equal(result["c_tensor"][:owned], h[:owned].astype(np.float32))
    np.testing.assert_allclose(result["d_tensor"][:owned], x[:owned], rtol=1e-5, atol=1e-6)


CALLS = [
    (name, rank, mode, framework)
    for name in FAMILIES
    for rank in (2, 3)
    for mode in MODES
    for framework in FRAMEWORKS
    if framework != "jax" or (rank == 2 + (mode == "discrete") and name in ("bfloat16", "mxfp8_e4m3", "nvfp4"))
]
"""JAX compiles each of them, which takes long."""


@pytest.mark.parametrize(("name", "rank", "mode", "framework"), CALLS)
def test_every_family_mode_form_and_framework(name: str, rank: int, mode: str, framework: str) -> None:
    p = Gated(name)
    result = grouped_gemm_glu_wrapper(**p.arguments(framework, mode, rank), generate_c=True)
    compare(p, result, expected(p, generate_c=True))
    assert result["c_tensor"].ndim == result["d_tensor"].ndim == rank
    assert (result["amax_tensor"] is not None) == p.scaled


@pytest.mark.parametrize(
    ("rank", "d_dtype", "mode", "framework"),
    [
        *itertools.product((2, 3), (E4M3, E5M2, "bfloat16"), MODES, STRIDED),
        (3, "bfloat16", "discrete", "jax"),
    ],
)
def test_quantised_results(rank: int, d_dtype: str, mode: str, framework: str) -> None:
    p = Gated("mxfp8_e4m3")
    given = p.arguments(framework, mode, rank)
    result = grouped_gemm_glu_wrapper(**given, d_dtype=d_dtype, norm_const_tensor=norm_in(framework))
    want = expected(p, norm=True, d_dtype=d_dtype)
    if framework == "jax":
        assert result["c_tensor"] is None
        want = (None, *want[1:])
    compare(p, result, want)
    is_view = framework == "torch" and rank == 3
    row = (32, 4, 2, 4, 1, 1) if is_view else (1, 2, 1, 32, 4, 4)
    col = (32, 4, 1, 4, 2, 1) if is_view else (1, 1, 2, 32, 4, 4)
    assert (tuple(result["sfd_row_tensor"].shape), tuple(result["sfd_col_tensor"].shape)) == (row, col)
    assert str(result["sfd_row_tensor"].dtype).endswith("float8_e8m0fnu")


@pytest.mark.parametrize("framework", STRIDED)
def test_column_scales_of_each_expert(framework: str) -> None:
    p = Gated("mxfp8_e4m3", (128, 0, 256), 400, n=512)
    options = {"d_dtype": E4M3, "discrete_col_sfd": True}
    result = grouped_gemm_glu_wrapper(**p.arguments(framework), **options, norm_const_tensor=norm_in(framework))
    want = expected(p, norm=True, **options)
    assert_close(result["sfd_col_tensor"], want[5], 400)
    assert want[5].tobytes() != expected(p, norm=True, d_dtype=E4M3)[5].tobytes()


@pytest.mark.parametrize("act_func", ["swiglu", "geglu", "situglu"])
@pytest.mark.parametrize("name", ["bfloat16", "mxfp4"])
def test_activations_and_their_factors(name: str, act_func: str) -> None:
    p = Gated(name)
    for factors in (
        {},
        {"linear_offset": 0.25, "geglu_alpha": 1.3, "glu_clamp_max": 1.5, "glu_clamp_min": -0.75,
         "situ_beta1": 1.5, "situ_beta2": 3.0},
    ):  # fmt: skip
        result = grouped_gemm_glu_wrapper(**p.arguments(), act_func=act_func, generate_c=True, **factors)
        if act_func != "geglu":
            factors = {key: value for key, value in factors.items() if key.startswith("situ")}
        compare(p, result, expected(p, act_func=act_func, generate_c=True, **factors))


def test_linear_offset_of_other_activations_is_ignored() -> None:
    for act_func in ("swiglu", "situglu"):
        want = call(act_func=act_func)["d_tensor"].tobytes()
        assert call(act_func=act_func, linear_offset=3.0, geglu_alpha=9.0)["d_tensor"].tobytes() == want


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", ["bfloat16", "nvfp4"])
def test_bias(name: str, framework: str) -> None:
    p = Gated(name)
    result = grouped_gemm_glu_wrapper(
        **p.arguments(framework), bias_tensor=to_framework(p.bias, framework), generate_c=True
    )
    compare(p, result, expected(p, bias=True, generate_c=True))


@pytest.mark.parametrize("framework", STRIDED)
@pytest.mark.parametrize("name", ["bfloat16", "mxfp8_e4m3", "nvfp4"])
def test_legacy_weights(name: str, framework: str) -> None:
    p = Gated(name)
    compare(p, grouped_gemm_glu_wrapper(**p.arguments(framework, "dense", 3, "legacy"), generate_c=True),
            expected(p, generate_c=True))  # fmt: skip


@pytest.mark.parametrize("framework", STRIDED)
@pytest.mark.parametrize("name", ["bfloat16", "mxfp8_e4m3"])
def test_discrete_weights_by_columns(name: str, framework: str) -> None:
    p = Gated(name)
    result = grouped_gemm_glu_wrapper(**p.arguments(framework, "discrete by columns"), generate_c=True)
    compare(p, result, expected(p, generate_c=True))


@pytest.mark.parametrize("framework", STRIDED)
def test_containers_of_scales(framework: str) -> None:
    p = Gated("mxfp8_e4m3")
    want = expected(p)
    for key in ("sfa_tensor", "sfb_tensor"):
        for shape in ((-1,), (-1, 16)):
            given = p.arguments(framework)
            given[key] = given[key].reshape(shape)
            compare(p, grouped_gemm_glu_wrapper(**given, generate_c=True), want)
        given = p.arguments(framework)
        given[key] = to_framework(to_numpy(given[key]).view(np.uint8), framework)
        compare(p, grouped_gemm_glu_wrapper(**given, generate_c=True), want)


def test_fp4_in_torchs_own_dtype() -> None:
    p = Gated("mxfp4")
    for rank in (2, 3):
        given = p.arguments("torch", rank=rank)
        for key in ("a_tensor", "b_tensor"):
            given[key] = given[key].view(torch.float4_e2m1fn_x2)
        compare(p, grouped_gemm_glu_wrapper(**given), expected(p))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_c_is_returned_for_scaled_operands_but_in_jax(framework: str) -> None:
    assert (call("mxfp8_e4m3", framework)["c_tensor"] is None) == (framework == "jax")
    assert call("bfloat16", framework)["c_tensor"] is None


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_prob_of_scaled_operands_may_be_bfloat16_or_left_out(framework: str) -> None:
    p = Gated("mxfp8_e4m3")
    given = p.arguments(framework)
    given["prob_tensor"] = to_framework(p.prob.astype(BF16), framework)
    compare(p, grouped_gemm_glu_wrapper(**given, generate_c=True), expected(p))
    p.prob[:] = 1
    given["prob_tensor"] = None
    compare(p, grouped_gemm_glu_wrapper(**given, generate_c=True), expected(p))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_one_group_takes_all_rows(framework: str) -> None:
    p = Gated("mxfp8_e4m3", (160,))
    given = p.arguments(framework)
    given["padded_offsets"] = to_framework(np.array([-7], np.int32), framework)
    result = grouped_gemm_glu_wrapper(**given, use_single_group_runtime_offsets=True, generate_c=True)
    compare(p, result, expected(p))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", ["bfloat16", "mxfp8_e4m3", "nvfp4"])
def test_no_rows(name: str, framework: str) -> None:
    p = Gated(name, (0, 0), 0)
    norm = norm_in(framework) if name == "mxfp8_e4m3" else None
    for rank in (2, 3):
        result = grouped_gemm_glu_wrapper(**p.arguments(framework, rank=rank), norm_const_tensor=norm)
        assert tuple(result["d_tensor"].shape) == ((0, 64) if rank == 2 else (0, 64, 1))
        if p.scaled:
            assert to_numpy(result["amax_tensor"]).tolist() == [[-np.inf], [-np.inf]]
        if norm is not None:
            assert 0 in result["sfd_row_tensor"].shape
            assert 0 in result["sfd_col_tensor"].shape


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_amax_of_experts_without_rows_and_with_nan(framework: str) -> None:
    p = Gated("mxfp8_e4m3")
    p.prob[3] = np.nan
    amax = to_numpy(grouped_gemm_glu_wrapper(**p.arguments(framework))["amax_tensor"])
    assert np.isnan(amax[0, 0])
    assert amax[1, 0] == -np.inf
    assert amax[2, 0] > 0


# --- what is refused ------------------------------------------------------------------------------------------------


def example(name: str, mode: str) -> Call:
    p = Gated(name)
    EXAMPLES.append(p)  # the addresses of its weights count
    given = p.arguments("numpy", mode)
    given["bias_tensor"] = np.ascontiguousarray(p.bias.T)
    given["norm_const_tensor"] = p.norm if name.startswith("mxfp8") else None
    options = {key: given[key] for key in ("n", "b_dtype", "sf_vec_size") if key in given}
    return Call(tuple(given.get(key) for key in CONTRACT.input_names), {**options, "generate_c": True})


EXAMPLES: list[Gated] = []


@pytest.mark.parametrize(
    "bad",
    [
        bad
        for name, mode in (("bfloat16", "dense"), ("mxfp8_e4m3", "dense"), ("nvfp4", "discrete"))
        for bad in invalid_calls(CONTRACT, example(name, mode))
        if bad.argument not in ("a_tensor", "b_tensor") or "extent" in bad.id or "rank" in bad.id
    ],
    ids=lambda bad: bad.id,
)
def test_invalid_call_is_rejected(bad: Any) -> None:
    assert_rejected(lambda arrays, options: OPERATION(arrays, options), "grouped_gemm_glu", bad)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float8_e8m0fnu", "int32"])
def test_dtypes_of_operands(dtype: str) -> None:
    refused("a_tensor must have dtype", a_tensor=np.zeros((160, 64), STORED.get(dtype, dtype)))
    refused("b_tensor must have", b_tensor=np.zeros((3, 128, 64), STORED.get(dtype, dtype)))


def test_families_are_not_mixed() -> None:
    refused("b_tensor must have the dtype of a_tensor", b_tensor=Gated("mxfp8_e4m3").b)
    refused("b_tensor must have the dtype of a_tensor", "mxfp8_e4m3", b_tensor=Gated().b)
    refused("b_tensor must have the dtype of a_tensor", "mxfp8_e4m3", b_tensor=Gated("mxfp8_e5m2").b)


@pytest.mark.parametrize(("name", "value"), [
    ("sf_vec_size", 32), ("discrete_col_sfd", True), ("use_single_group_runtime_offsets", True),
    ("sf_fp8_dtype_override", "e5m3"), ("norm_const_tensor", np.ones(1, np.float32)),
    ("sfa_tensor", np.zeros((1, 2, 1, 32, 4, 4), np.uint8)), ("sfb_tensor", np.zeros((3, 1, 1, 32, 4, 4), np.uint8)),
    ("sfb_ptrs", np.ones(3, np.int64)),
])  # fmt: skip
def test_bfloat16_operands_have_no_scale_controls(name: str, value: Any) -> None:
    refused(f"{name} must be", **{name: value})


def test_scaled_operands_need_their_scales() -> None:
    refused("sfa_tensor must be given", "mxfp8_e4m3", sfa_tensor=None)
    refused("sfb_tensor must be given with b_tensor", "mxfp8_e4m3", sfb_tensor=None)
    p = Gated("mxfp8_e4m3")
    given = {"b_tensor": None, "sfb_tensor": None, **p.arguments("numpy", "discrete")}
    refused("sfb_ptrs must be given with b_ptrs", "mxfp8_e4m3", **{**given, "sfb_ptrs": None})
    refused("sfb_ptrs must have shape", "mxfp8_e4m3", **{**given, "sfb_ptrs": given["sfb_ptrs"][:2]})
    refused("sfb_ptrs must be given with b_ptrs of fp8 or FP4, and only", "mxfp8_e4m3", sfb_ptrs=given["sfb_ptrs"])
    refused("sfb_ptrs must hold addresses", "mxfp8_e4m3", **{**given, "sfb_ptrs": 0 * given["sfb_ptrs"]})


def test_formats() -> None:
    refused("sf_vec_size must be 32 for fp8", "mxfp8_e4m3", sf_vec_size=16, sfa_tensor=np.zeros(1024, np.uint8),
            sfb_tensor=np.zeros(1536, np.uint8))  # fmt: skip
    e4m3 = Gated("nvfp4").sfa.dtype
    p = Gated("mxfp8_e4m3")
    scales = {key: getattr(p, key[:3]).view(np.uint8).view(e4m3) for key in ("sfa_tensor", "sfb_tensor")}
    refused("sfa_tensor must hold e8m0 scales for fp8", "mxfp8_e4m3", **scales)
    refused("sfb_tensor must have the dtype of sfa_tensor", "mxfp8_e4m3", sfa_tensor=scales["sfa_tensor"])
    refused("sf_vec_size must be", "mxfp8_e4m3", sf_vec_size=64)
    p = Gated("mxfp4")
    scales = {key: getattr(p, key[:3]).view(np.uint8).view(e4m3) for key in ("sfa_tensor", "sfb_tensor")}
    refused("sf_vec_size must be .*16 for e4m3", "mxfp4", **scales)
    refused("sf_fp8_dtype_override must be None", "mxfp8_e4m3", sf_fp8_dtype_override="e5m3")


def test_weight_modes() -> None:
    p = Gated()
    given = {"b_tensor": None, **p.arguments("numpy", "discrete")}
    refused("b_tensor must be given, or b_ptrs", b_tensor=None)
    refused("b_tensor must be given, or b_ptrs", **{k: given[k] for k in ("b_ptrs", "n", "b_dtype")})
    refused("n must be given with b_ptrs", n=128)
    refused("b_dtype must be given with b_ptrs", **{**given, "b_dtype": None})
    refused("b_dtype must be the dtype of a_tensor", **{**given, "b_dtype": E4M3})


def test_dense_weights_lie_by_rows() -> None:
    p = Gated()
    refused('b_major must be "k" for dense', **p.arguments("numpy", "dense", 2, "by columns"))
    given = {**p.arguments("numpy", "dense", 2, "legacy by columns"), "b_major": "k"}
    refused("b_tensor must be stored by rows", **given)


def test_fp4_weights_behind_addresses_lie_by_rows() -> None:
    given = {"b_tensor": None, "sfb_tensor": None, **Gated("mxfp4").arguments("numpy", "discrete")}
    refused('b_major must be "k" for FP4', "mxfp4", **{**given, "b_major": "n"})


def test_extents() -> None:
    with pytest.raises(ValueError, match="b_tensor must have N > 0, a multiple of 64"):
        grouped_gemm_glu_wrapper(**Gated(n=96).arguments())
    with pytest.raises(ValueError, match="b_tensor must have N > 0, a multiple of 64"):
        grouped_gemm_glu_wrapper(**Gated(n=96).arguments("numpy", "discrete"))
    with pytest.raises(ValueError, match="a_tensor must have a contiguous extent"):
        grouped_gemm_glu_wrapper(**Gated(k=60).arguments())
    with pytest.raises(ValueError, match="a_tensor must have a contiguous extent"):
        grouped_gemm_glu_wrapper(**Gated("mxfp4", k=48).arguments())
    refused("bias_tensor must have shape", bias_tensor=Gated(n=64).bias)
    refused("bias_tensor must have shape", bias_tensor=np.ascontiguousarray(Gated().bias))


@pytest.mark.parametrize("option", ["c_dtype", "d_dtype"])
def test_dtypes_of_results_of_bfloat16(option: str) -> None:
    for dtype in (E4M3, E5M2):
        refused(f"{option} must be bfloat16, float16 or float32 for bfloat16", **{option: dtype})
    for dtype in ("float64", "float4_e2m1fn_x2", "nonsense"):
        refused(f"{option} must be", **{option: dtype})


def test_dtypes_of_results_of_fp4() -> None:
    for dtype in ("float32", E4M3):
        refused("c_dtype must be bfloat16 or float16 for FP4", "mxfp4", NotImplementedError, c_dtype=dtype)
    refused("d_dtype must be .* for FP4", "mxfp4", d_dtype=E4M3)
    assert call("nvfp4", d_dtype="float32")["amax_tensor"] is None


def test_dtypes_of_results_of_fp8() -> None:
    refused("d_dtype must be fp8, bfloat16 or float16 for fp8", "mxfp8_e4m3", d_dtype="float32")
    for dtype in ("float32", "float16", E4M3, E5M2):
        p = Gated("mxfp8_e4m3")
        compare(p, call("mxfp8_e4m3", c_dtype=dtype), expected(p, c_dtype=dtype))


def test_norm_const() -> None:
    refused("norm_const_tensor must be given for an fp8 D", "mxfp8_e4m3", d_dtype=E4M3)
    refused("norm_const_tensor must be left out for FP4", "mxfp4", norm_const_tensor=np.ones(1, np.float32))
    refused("norm_const_tensor must have shape", "mxfp8_e4m3", norm_const_tensor=np.ones(2, np.float32))
    assert call("mxfp8_e4m3", norm_const_tensor=np.ones((1, 1), np.float32))["sfd_row_tensor"] is not None


def test_prob() -> None:
    refused("prob_tensor must be given for bfloat16 operands, in float32", prob_tensor=None)
    refused("prob_tensor must be given for bfloat16 operands, in float32", prob_tensor=np.ones(160, BF16))
    refused("prob_tensor must have dtype", "mxfp8_e4m3", prob_tensor=np.ones(160, np.float16))


@pytest.mark.parametrize("name", ["situ_beta1", "situ_beta2"])
@pytest.mark.parametrize("value", [0.0, -1.0, np.inf, np.nan])
def test_factors_of_situglu(value: float, name: str) -> None:
    refused(f"{name} must be finite and positive", act_func="situglu", **{name: value})
    assert call(**{name: value}) is not None


def test_activations_are_named() -> None:
    refused("act_func must be", act_func="dswiglu")
    refused("linear_offset must be", error=TypeError, act_func="geglu", linear_offset="1")


def test_several_experts_have_offsets() -> None:
    refused("use_single_group_runtime_offsets must be False", "mxfp8_e4m3", use_single_group_runtime_offsets=True)


def test_column_scales_of_each_expert_need_whole_tiles() -> None:
    given = {"d_dtype": E4M3, "norm_const_tensor": np.ones(1, np.float32)}
    refused("padded_offsets must be multiples of 128", "mxfp8_e4m3", discrete_col_sfd=True, **given)


def test_column_layout_without_scales_is_said_to_have_no_effect() -> None:
    p = Gated("mxfp8_e4m3")
    with pytest.warns(UserWarning, match="discrete_col_sfd has no effect"):
        result = grouped_gemm_glu_wrapper(**p.arguments(), discrete_col_sfd=True)
    compare(p, result, expected(p))


@pytest.mark.parametrize(("name", "hint", "value", "error"), [
    ("bfloat16", "mma_tiler_mn", (128, 96), ValueError), ("bfloat16", "mma_tiler_mn", (64, 64), ValueError),
    ("mxfp8_e4m3", "mma_tiler_mn", (128, 64), ValueError), ("mxfp8_e4m3", "cluster_shape_mn", (2, 8), ValueError),
    ("bfloat16", "cluster_shape_mn", (4, 1), ValueError), ("bfloat16", "vector_f32", 0, TypeError),
    ("bfloat16", "m_aligned", 100, ValueError), ("bfloat16", "cd_major", "m", ValueError),
])  # fmt: skip
def test_hints_are_checked(name: str, hint: str, value: Any, error: type[Exception]) -> None:
    refused(f"{hint} must", name, error, **{hint: value})


def test_tiles_of_128_columns() -> None:
    p = Gated("mxfp8_e4m3")
    assert call("mxfp8_e4m3", mma_tiler_mn=(128, 128)) is not None
    fp8 = {"d_dtype": E4M3, "norm_const_tensor": p.norm}
    for others in (fp8, {"bias_tensor": p.bias}):
        refused("mma_tiler_mn must", "mxfp8_e4m3", NotImplementedError, mma_tiler_mn=(128, 128), **others)
    given = p.arguments("numpy", "discrete")
    with pytest.raises(ValueError, match="mma_tiler_mn must"):
        grouped_gemm_glu_wrapper(**given, mma_tiler_mn=(128, 128))


def test_scheduler_counter() -> None:
    counter = np.zeros(1, np.int32)
    assert call("mxfp8_e4m3", scheduler_counter_tensor=counter, use_dynamic_sched=True) is not None
    refused("scheduler_counter_tensor must be None", "mxfp8_e4m3", scheduler_counter_tensor=counter)
    refused("scheduler_counter_tensor must be None", scheduler_counter_tensor=counter, use_dynamic_sched=True)
    for wrong in (counter[:0], counter[:, None], counter.astype(np.int64), np.zeros(4, np.int32)[::2]):
        refused("scheduler_counter_tensor must be a contiguous int32", "mxfp8_e4m3", use_dynamic_sched=True,
                scheduler_counter_tensor=wrong)  # fmt: skip


def test_what_jax_has_no_place_for() -> None:
    refused("current_stream must be None", framework="jax", current_stream=0)


# --- the class ------------------------------------------------------------------------------------------------------


def fresh_like(x: Any) -> Any:
    if x is None:
        return None
    made = x.clone() if isinstance(x, torch.Tensor) else x.copy()
    if made.ndim == 2 and made.shape[1] == 1:  # amax
        made[...] = -np.inf
    return made


def an_object(given: dict[str, Any], result: Any, **options: Any) -> Any:
    c, d, d_col, amax, row, col = result
    dense = "b_tensor" in given
    weights = {"sample_b": given.get("b_tensor"), "sample_sfb": given.get("sfb_tensor")}
    if not dense:
        weights = {"num_experts": 3, "b_shape": (given["n"], 64), "b_dtype": given["b_dtype"]}
    norm = options.pop("norm", None)
    return GroupedGemmGlu(
        given["a_tensor"], d if c is None else c, d, given["sfa_tensor"], given["padded_offsets"],
        given["alpha_tensor"], d if d_col is None else d_col, **weights, sample_sfd_row=row, sample_sfd_col=col,
        sample_amax=amax, sample_norm_const=norm, sample_prob=given["prob_tensor"], b_major=given["b_major"],
        sf_vec_size=given.get("sf_vec_size", 16), **options,
    )  # fmt: skip


def execute(op: Any, given: dict[str, Any], outputs: Any, norm: Any = None, **others: Any) -> None:
    c, d, d_col, amax, row, col = outputs
    weights = {key: given.get(key) for key in ("b_tensor", "sfb_tensor", "b_ptrs", "sfb_ptrs", "prob_tensor")}
    op.execute(
        given["a_tensor"], c, d, given["sfa_tensor"], given["padded_offsets"], given["alpha_tensor"],
        d_col_tensor=d_col, sfd_row_tensor=row, sfd_col_tensor=col, amax_tensor=amax, norm_const_tensor=norm,
        **{**weights, **others},
    )  # fmt: skip


@pytest.mark.parametrize("framework", STRIDED)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize(("name", "d_dtype"), [("bfloat16", "bfloat16"), ("mxfp8_e4m3", E4M3), ("nvfp4", "float16")])
def test_class_writes_what_the_wrapper_returns(name: str, d_dtype: str, rank: int, mode: str, framework: str) -> None:
    p = Gated(name)
    given = p.arguments(framework, mode, rank)
    norm = norm_in(framework) if d_dtype == E4M3 else None
    want = grouped_gemm_glu_wrapper(**given, d_dtype=d_dtype, norm_const_tensor=norm, generate_c=True)
    outputs = [fresh_like(x) for x in want]
    op = an_object(given, outputs, norm=norm, generate_c=True)
    with pytest.raises(NotCompiledError):
        execute(op, given, outputs, norm)
    assert op.check_support() is True
    op.compile()
    execute(op, given, outputs, norm)
    for got, y in zip(outputs, want, strict=True):
        assert (got is None) == (y is None)
        assert got is None or to_numpy(got).tobytes() == to_numpy(y).tobytes()


def test_maxima_are_raised_and_never_reset() -> None:
    p = Gated("mxfp8_e4m3")
    given = p.arguments()
    want = grouped_gemm_glu_wrapper(**given)
    outputs = [fresh_like(x) for x in want]
    op = an_object(given, outputs)
    op.compile()
    outputs[3][...] = [[0], [1], [1e9]]
    execute(op, given, outputs)
    np.testing.assert_array_equal(outputs[3], [want["amax_tensor"][0], [1], [1e9]])


def test_c_of_bfloat16_is_left_alone_unless_asked_for() -> None:
    given = Gated().arguments()
    c, d = np.full((160, 128), 7, np.float32), np.zeros((160, 64), BF16)
    op = an_object(given, (c, d, None, None, None, None))
    op.compile()
    execute(op, given, (c, d, None, None, None, None))
    assert (c == 7).all()
    for wrong in (None, c[:, :64]):
        with pytest.raises(ValueError, match="c_tensor must"):
            GroupedGemmGlu(given["a_tensor"], wrong, d, None, given["padded_offsets"], given["alpha_tensor"], None,
                           given["b_tensor"], sample_prob=given["prob_tensor"]).check_support()  # fmt: skip


def test_factors_are_given_at_execution_and_beta1_at_construction() -> None:
    p = Gated()
    given = p.arguments()
    d = np.zeros((160, 64), np.float32)
    outputs = (np.zeros((160, 128), BF16), d, None, None, None, None)
    op = an_object(given, outputs, act_func="geglu")
    op.compile()
    for factors in ({}, {"linear_offset": 0.25, "geglu_alpha": 1.3, "glu_clamp_max": 1.5, "glu_clamp_min": -0.75}):
        execute(op, given, outputs, **factors)
        assert_close(d, expected(p, act_func="geglu", d_dtype="float32", **factors)[1], int(p.off[-1]))
    op = an_object(given, outputs, act_func="situglu", situ_beta1=2.0)
    op.compile()
    with pytest.raises(ValueError, match=r"situ_beta1 must be the constructor's \(2.0\)"):
        execute(op, given, outputs)
    execute(op, given, outputs, situ_beta1=2.0, situ_beta2=3.0)
    want = expected(p, act_func="situglu", d_dtype="float32", situ_beta1=2.0, situ_beta2=3.0)
    assert_close(d, want[1], int(p.off[-1]))


def test_scales_come_with_norm_const() -> None:
    p = Gated("mxfp8_e4m3")
    given = p.arguments()
    want = grouped_gemm_glu_wrapper(**given, norm_const_tensor=p.norm)
    c, d, d_col, amax, row, col = (fresh_like(x) for x in want)
    complete = {"norm": p.norm}
    assert an_object(given, (c, d, d_col, amax, row, col), **complete).check_support()
    for outputs, norm in [((c, d, d_col, amax, None, col), p.norm), ((c, d, d_col, amax, row, None), p.norm),
                          ((c, d, d_col, amax, row, col), None)]:  # fmt: skip
        with pytest.raises(ValueError, match=r"grouped_gemm_glu: (sfd|norm)"):
            an_object(given, outputs, norm=norm).check_support()


def test_presence_is_that_of_the_samples() -> None:
    p = Gated()
    given = p.arguments()
    outputs = (np.zeros((160, 128), BF16), np.zeros((160, 64), BF16), None, None, None, None)
    op = an_object(given, outputs, sample_bias=p.bias)
    op.compile()
    with pytest.raises(ValueError, match="bias_tensor must"):
        execute(op, given, outputs)
    op = an_object(given, outputs)
    op.compile()
    with pytest.raises(ValueError, match="bias_tensor must"):
        execute(op, given, outputs, bias_tensor=p.bias)
    with pytest.raises(ValueError, match="scheduler_counter_tensor must be None"):
        execute(op, given, outputs, scheduler_counter_tensor=np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="compiled rank"):
        execute(op, Gated().arguments("numpy", rank=3), outputs)
    op = an_object(given, outputs, sample_scheduler_counter=np.zeros(1, np.int32), use_dynamic_sched=True)
    with pytest.raises(ValueError, match="scheduler_counter_tensor must be None but for dense scaled"):
        op.check_support()


def test_rows_are_dynamic() -> None:
    given = Gated("mxfp8_e4m3").arguments()
    op = an_object(given, [fresh_like(x) for x in grouped_gemm_glu_wrapper(**given)])
    op.compile()
    for rows, sizes in ((300, (33, 0, 95)), (0, (0, 0, 0))):
        other = Gated("mxfp8_e4m3", sizes, rows).arguments()
        want = grouped_gemm_glu_wrapper(**other)
        outputs = [fresh_like(x) for x in want]
        execute(op, other, outputs)
        assert all(x is None or x.tobytes() == y.tobytes() for x, y in zip(outputs, want, strict=True))


def test_class_takes_descriptors() -> None:
    desc = lambda dtype, *shape: TensorDesc.of(dtype, shape, device="cuda:0")  # noqa: E731
    scales = [desc("float8_e8m0fnu", *shape) for shape in ((1, 2, 1, 32, 4, 4), (3, 1, 1, 32, 4, 4))]
    op = GroupedGemmGlu(
        desc(E4M3, 160, 64), desc("bfloat16", 160, 128), desc("bfloat16", 160, 64), scales[0], desc("int32", 3),
        desc("float32", 3), None, desc(E4M3, 3, 128, 64), scales[1], sf_vec_size=32, backend="reference",
    )  # fmt: skip
    assert op.check_support()


# --- torch, JAX and names -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bfloat16", "mxfp8_e4m3"])
def test_opcheck(name: str) -> None:
    p = Gated(name, (33, 0, 127))
    given = p.arguments("torch")
    arrays = tuple(given.get(key) for key in CONTRACT.input_names)
    options = {"sf_vec_size": p.vec, "generate_c": True, "d_dtype": "float16"}
    utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.fe_gemm.grouped_gemm_glu.default, arrays, options, test_utils=utils)


@pytest.mark.parametrize("name", ["bfloat16", "mxfp8_e4m3", "nvfp4"])
def test_compiles_as_one_graph(name: str) -> None:
    p = Gated(name)
    given = p.arguments("torch")
    names = [key for key, x in given.items() if isinstance(x, torch.Tensor)]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(*arrays: Any) -> Any:
        known = dict(zip(names, arrays, strict=True))
        return tuple(grouped_gemm_glu_wrapper(**{"sfa_tensor": None, **known}, sf_vec_size=p.vec, generate_c=True))

    for got, want in zip(model(*(given[key] for key in names)), expected(p, generate_c=True), strict=True):
        assert_close(got, want, int(p.off[-1]) if got is not None and got.shape[0] == 160 else 10**9)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["bfloat16", "mxfp8_e4m3", "nvfp4"])
def test_jax_entry_eager_and_jit(name: str, mode: str) -> None:
    p = Gated(name)
    given = p.arguments("jax", mode)
    static = {key: given.pop(key) for key in ("n", "sf_vec_size") if key in given}
    given.pop("b_dtype", None), given.pop("b_major")
    quantised = name == "mxfp8_e4m3"
    options = {"generate_c": True, "d_dtype": E4M3 if quantised else "bfloat16"}
    if quantised:
        given["norm_const_tensor"] = norm_in("jax")
    arrays = {key: x for key, x in given.items() if x is not None}
    run = lambda arrays: grouped_gemm_glu_jax(**arrays, **static, **options)  # noqa: E731
    want = expected(p, norm=quantised, **options)
    for function in (run, jax.jit(run)):
        result = function(arrays)
        if name == "bfloat16" and mode == "discrete":
            assert type(result) is tuple
            for got, y in zip(result, (want[1], want[0]), strict=True):
                assert_close(got, y, int(p.off[-1]))
        else:
            compare(p, result, want)


def test_plan_and_names() -> None:
    plan = OPERATION.plan(OPERATION.bind(*example("bfloat16", "dense")), target=HOPPER)
    assert plan.kernel is not None or plan.missing is not None
    with pytest.raises(NotSupportedError, match="grouped_gemm_glu: backend"):
        call(backend="sm90")
    for flag in ("canonical_layouts", "bf16_canonical_layouts", "external_scheduler_counter"):
        assert getattr(grouped_gemm_glu_wrapper, f"supports_{flag}") is True
    assert compat.grouped_gemm_glu_wrapper_sm100 is grouped_gemm_glu_wrapper
    assert compat.GroupedGemmGluSm100 is GroupedGemmGlu
    assert compat.grouped_gemm_glu_jax_sm100 is grouped_gemm_glu_jax
    assert set(FORMATS) <= set(FAMILIES)
