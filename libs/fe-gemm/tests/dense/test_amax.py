"""The front door of ``gemm_amax`` on the CPU: each row of its contract, frameworks, class, ``jit``, torch.compile."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from dense_calls import FRAMEWORKS, pairs, pitched, scaled, strides
from hypothesis import HealthCheck, given, settings
from naive_gemm import (
    E2M1,
    E4M3,
    E5M2,
    FORMATS,
    STORED,
    VALUES,
    Operand,
    accumulation_error,
    assert_within,
    in_order,
    operand,
    product,
    storing_error,
    unpack,
    value_of,
)

from fe_gemm import GemmAmax, gemm_amax_jax, gemm_amax_wrapper
from fe_gemm.dense.amax import CONTRACT, OPERATION
from fe_gemm.dense.plan import describe
from fe_runtime import NotCompiledError, TensorDesc
from fe_runtime.testing import Call, assert_rejected, invalid_calls, to_framework, to_numpy, valid_calls

M, N, K, L = 40, 64, 96, 2


def problem(name: str = "mxfp8_e4m3", batch: int = L, m: int = M, n: int = N, k: int = K) -> tuple[Operand, Operand]:
    rng = np.random.default_rng(0)
    return operand(rng, m, k, batch, name), operand(rng, n, k, batch, name)


def vec(name: str) -> int:
    return FORMATS[name][2]


def check(result: Any, a: Operand, b: Operand, dtype: str = "float32") -> None:
    """Compare C and the maximum with float64."""
    exact, error = product(a.exact(), b.exact()), accumulation_error(a.exact(), b.exact())
    c = to_numpy(result["c_tensor"])
    got = VALUES[E2M1][unpack(c.view(np.uint8), 1)] if dtype == E2M1 else value_of(c)
    assert_within(got, exact, storing_error(exact, dtype) + error, dtype, "c")
    at = np.unravel_index(np.argmax(np.abs(exact)), exact.shape)
    amax = to_numpy(result["amax_tensor"])
    assert (amax.shape, amax.dtype) == ((1, 1, 1), np.float32)
    assert abs(amax.item() - abs(exact[at])) <= 2.0**-16 * abs(exact[at]) + error[at]


# --- what is accepted -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_in_every_framework(name: str, framework: str) -> None:
    a, b = problem(name, batch=1 if framework == "jax" else L)
    result = gemm_amax_wrapper(*scaled(a, b, framework), sf_vec_size=vec(name))
    assert list(result.keys()) == ["c_tensor", "amax_tensor"]
    check(result, a, b)


def test_frameworks_agree() -> None:
    a, b = problem("nvfp4", batch=1)
    results = [gemm_amax_wrapper(*scaled(a, b, framework), sf_vec_size=16) for framework in FRAMEWORKS]
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            np.testing.assert_allclose(to_numpy(got), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", E4M3, E5M2])
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp4"])
def test_every_dtype_of_c_also_fp8_for_fp8(dtype: str, name: str) -> None:
    a, b = problem(name)
    result = gemm_amax_wrapper(*scaled(a, b), c_dtype=dtype)
    assert result["c_tensor"].dtype == STORED[dtype]
    check(result, a, b, dtype)


@pytest.mark.parametrize("spelling", [torch.bfloat16, jnp.bfloat16, ml_dtypes.bfloat16, "bfloat16"], ids=repr)
def test_dtype_arguments_in_any_spelling(spelling: Any) -> None:
    result = gemm_amax_wrapper(*scaled(*problem(), "torch"), c_dtype=spelling)
    assert result["c_tensor"].dtype == torch.bfloat16


def test_fp4_c_is_allocated_packed() -> None:
    a, b = problem("mxfp4")
    want = {"numpy": [("uint8", np.uint8), ("float4_e2m1fn_x2", np.uint8)]}
    want["torch"] = [("uint8", torch.uint8), ("float4_e2m1fn_x2", torch.float4_e2m1fn_x2)]
    for framework, cases in want.items():
        for name, dtype in cases:
            result = gemm_amax_wrapper(*scaled(a, b, framework), c_dtype=name)
            assert result["c_tensor"].dtype == dtype
            assert tuple(result["c_tensor"].shape) == (M, N // 2, L)
            assert strides(result["c_tensor"]) == (N // 2, 1, M * N // 2)
            check(result, a, b, E2M1)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "fp4_e8m0_16"])
def test_uint8_container_and_torchs_pairs_are_the_same(name: str) -> None:
    arrays = scaled(*problem(name), "torch")
    results = [gemm_amax_wrapper(*given, sf_vec_size=vec(name)) for given in (arrays, pairs(arrays))]
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, ml_dtypes.float8_e8m0fnu])
def test_byte_aliases_of_e8m0(dtype: Any) -> None:
    a, b = problem()
    check(gemm_amax_wrapper(*scaled(a, b, dtype=dtype)), a, b)
    mixed = [*scaled(a, b)[:3], b.blocked("logical", 2, np.uint8)]
    check(gemm_amax_wrapper(*mixed), a, b)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_scales_in_either_form(framework: str) -> None:
    a, b = problem(m=300, k=160)
    given = [a.elements(), b.elements(), a.blocked("physical", 1), b.blocked("logical", 2)]
    check(gemm_amax_wrapper(*[to_framework(x, framework) for x in given]), a, b)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("majors", ["km", "mk", "mm"])
def test_majors_of_a_and_b(majors: str, framework: str) -> None:
    a, b = problem(m=48)
    given = [a.elements(majors[0]), b.elements(majors[1]), a.blocked(), b.blocked()]
    check(gemm_amax_wrapper(*[to_framework(x, framework) for x in given]), a, b)


@pytest.mark.parametrize(("major", "stride"), [("n", (N, 1, 48 * N)), ("m", (1, 48, 48 * N))])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_majors_of_c(major: str, stride: tuple[int, ...], framework: str) -> None:
    a, b = problem(m=48)
    for dtype in ("float32", "bfloat16", E4M3):
        result = gemm_amax_wrapper(*scaled(a, b, framework), major, dtype)
        assert strides(result["c_tensor"]) == stride
        check(result, a, b, dtype)


def test_rows_of_an_aligned_pitch() -> None:
    for name, extra in (("mxfp8_e4m3", 16), ("mxfp4", 32)):
        a, b = problem(name)
        given = [pitched(a.elements(), extra), pitched(b.elements(), 2 * extra), a.blocked(), b.blocked()]
        check(gemm_amax_wrapper(*given), a, b)
        check(gemm_amax_wrapper(*[to_framework(x, "torch") for x in given]), a, b)


def test_strides_of_extent_one_are_ignored() -> None:
    a, b = problem(batch=1)
    given = [np.ascontiguousarray(a.elements()), np.ascontiguousarray(b.elements()), a.blocked(), b.blocked()]
    assert given[0].strides == (K, 1, 1)
    check(gemm_amax_wrapper(*given), a, b)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 16), (129, 36, 48), (7, 132, 272)])
def test_tails(m: int, n: int, k: int) -> None:
    a, b = problem(m=m, n=n, k=k)
    check(gemm_amax_wrapper(*scaled(a, b)), a, b)


@pytest.mark.parametrize("hints", [
    {"mma_tiler_mn": (256, 128), "cluster_shape_mn": (2, 1)}, {"mma_tiler_mn": (128, 256)},
    {"mma_tiler_mn": (256, 256), "cluster_shape_mn": (4, 4)}, {"cluster_shape_mn": None},
    {"mma_tiler_mn": [128, 128]},
])  # fmt: skip
def test_hints_change_nothing(hints: Any) -> None:
    arrays = scaled(*problem("nvfp4", k=128), "torch")
    plain, hinted = (gemm_amax_wrapper(*arrays, "n", torch.float16, sf_vec_size=16, **h) for h in ({}, hints))
    assert all(torch.equal(x, y) for x, y in zip(plain, hinted, strict=True))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nan_wins_the_maximum(framework: str) -> None:
    a, b = problem(batch=1)
    a.codes[3, 5, 0] = 0x7F
    result = gemm_amax_wrapper(*scaled(a, b, framework), c_dtype=E4M3)
    assert np.isnan(to_numpy(result["amax_tensor"])).all()
    assert np.isnan(value_of(to_numpy(result["c_tensor"]))[3]).all()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_empty_problems(framework: str) -> None:
    for m, batch in ((0, 1), (5, 0))[: 1 if framework == "jax" else 2]:
        a, b = problem(m=m, batch=batch)
        result = gemm_amax_wrapper(*scaled(a, b, framework))
        assert tuple(result["c_tensor"].shape) == (m, N, batch)
        assert to_numpy(result["amax_tensor"]).item() == -np.inf


# --- what is rejected: one test for each row ------------------------------------------------------------------------


def rejected(match: str, *arrays: Any, error: type[Exception] = ValueError, **options: Any) -> None:
    with pytest.raises(error, match=f"gemm_amax: {match}"):
        gemm_amax_wrapper(*arrays, **options)


def example() -> Call:
    a, b = problem()
    options = {"c_major": "n", "c_dtype": "float32", "acc_dtype": "float32", "sf_vec_size": 32}
    given = [a.elements(), b.elements(), a.blocked("physical"), b.blocked("physical")]
    return Call(tuple(given), options)


@pytest.mark.parametrize("call", invalid_calls(CONTRACT, example()), ids=lambda call: call.id)
def test_invalid_call_is_rejected(call: Any) -> None:
    assert_rejected(lambda arrays, options: gemm_amax_wrapper(*arrays, **options), "gemm_amax", call)


def values(name: str, shape: Any, dtype: str, random: Any) -> Any:
    return (
        random.integers(120, 130, shape) if name.startswith("sf") and "int" in dtype else random.integers(0, 7, shape)
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    valid_calls(CONTRACT, extents={"M": (1, 16, 48), "N": (16, 32, 64), "K": (32, 64, 96), "L": (1, 2)}, values=values)
)
def test_valid_calls_give_what_the_contract_says(call: Call) -> None:
    result = gemm_amax_wrapper(*call.arrays, **call.options)  # type: ignore[arg-type]
    for output, spec in zip(result, OPERATION.bind(*call).outputs, strict=True):
        assert spec is not None
        assert output.shape == spec.shape
        assert strides(output) == spec.stride


def test_dtypes_of_a_and_b_are_equal() -> None:
    a, b, sfa, sfb = scaled(*problem())
    rejected("b_tensor must have the dtype of a_tensor", a, b.view(np.uint8).view(STORED[E5M2]), sfa, sfb)


@pytest.mark.parametrize(("name", "scale", "length"), [
    (E4M3, E4M3, 32), (E4M3, E4M3, 16), (E5M2, ml_dtypes.float8_e8m0fnu, 16), (E2M1, E4M3, 32),
])  # fmt: skip
def test_formats_outside_of_the_table(name: str, scale: Any, length: int) -> None:
    a, b = problem({E4M3: "mxfp8_e4m3", E5M2: "mxfp8_e5m2", E2M1: "mxfp4"}[name])
    a.vec = b.vec = length
    arrays = scaled(a, b, dtype=STORED.get(scale, scale))
    argument = "sfa_tensor" if scale == E4M3 and name == E4M3 else "sf_vec_size"
    rejected(f"{argument} must", *arrays, sf_vec_size=length)


def test_dtypes_of_scales_are_equal() -> None:
    a, b, sfa, sfb = scaled(*problem("mxfp4"))
    rejected("sfb_tensor must have the dtype of sfa_tensor", a, b, sfa, sfb.view(STORED[E4M3]))


def test_scale_tiles() -> None:
    a, b, sfa, sfb = scaled(*problem(m=200))
    rejected(r"sfa_tensor must have shape .*TM = 2", a, b, sfb, sfb)
    rejected(r"sfb_tensor must have shape .*TN = 1", a, b, sfa, sfa)
    wide = problem(m=200, k=160)
    rejected(r"sfa_tensor must have shape .*TA = 1", a, b, *scaled(*wide)[2:])
    rejected(r"sfa_tensor must have shape", a, b, sfa[..., 0], sfb)


def test_scale_strides() -> None:
    a, b = problem(m=200, k=160)
    given = scaled(a, b)
    rejected("sfa_tensor must be contiguous", *given[:2], np.ascontiguousarray(given[2]), given[3])


def test_a_single_tile_of_scales_lies_alike_in_both_forms() -> None:
    a, b = problem(batch=1)
    given = scaled(a, b)
    check(gemm_amax_wrapper(*given[:2], *[np.ascontiguousarray(x) for x in given[2:]]), a, b)


def test_fp4_c_needs_fp4_operands() -> None:
    for dtype in ("uint8", "float4_e2m1fn_x2", "float4_e2m1fn"):
        rejected("c_dtype must be packed FP4 for FP4 operands only", *scaled(*problem()), c_dtype=dtype)


def test_fp4_c_is_n_major() -> None:
    rejected('c_major must be "n" for packed FP4', *scaled(*problem("mxfp4")), c_major="m", c_dtype="uint8")


def test_fp4_operands_are_k_major() -> None:
    a, b = problem("mxfp4")
    given = [in_order(a.elements(), "m"), b.elements(), a.blocked(), b.blocked()]
    rejected("a_tensor must have unit stride in dimension 1", *given)
    rejected("b_tensor must have unit stride", b.elements(), in_order(b.elements(), "m"), b.blocked(), b.blocked())


def test_accumulator_is_float32() -> None:
    rejected("acc_dtype must be float32", *scaled(*problem()), acc_dtype="float16")


def test_majors_are_letters() -> None:
    rejected("c_major must be n or m; got 'k'", *scaled(*problem()), c_major="k")


def test_extents_are_multiples_of_sixteen_bytes() -> None:
    rejected("a_tensor must have a contiguous extent", *scaled(*problem(k=88)))
    rejected("a_tensor must have a contiguous extent", *scaled(*problem("mxfp4", k=48)))
    a, b = problem(m=40)
    rejected("a_tensor must have a contiguous extent", a.elements("m"), b.elements(), a.blocked(), b.blocked())
    rejected("c_tensor must have a contiguous extent", *scaled(*problem(n=66)))
    rejected("c_tensor must have a contiguous extent", *scaled(*problem(n=72)), c_dtype=E4M3)
    rejected("c_tensor must have a contiguous extent", *scaled(*problem(m=42)), c_major="m")
    rejected("c_tensor must have a contiguous extent", *scaled(*problem("mxfp4", n=48)), c_dtype="uint8")
    rejected("b_tensor must have an even N", *scaled(*problem("mxfp4", n=65)), c_dtype="uint8")


def test_pitches_are_multiples_of_sixteen_bytes() -> None:
    a, b = problem()
    rejected(
        "a_tensor must have strides of multiples", pitched(a.elements(), 8), b.elements(), a.blocked(), b.blocked()
    )


def test_addresses_are_multiples_of_sixteen_bytes_on_a_gpu() -> None:
    from fe_runtime.contract import Sample

    a, b, sfa, sfb = (TensorDesc.of(x.dtype, x.shape, strides(x), "cuda:0") for x in scaled(*problem()))
    for at, name in enumerate(("a_tensor", "b_tensor", "sfa_tensor", "sfb_tensor")):
        samples = [Sample(desc, "torch", 8 if n == at else 16) for n, desc in enumerate((a, b, sfa, sfb))]
        with pytest.raises(ValueError, match=f"{name} must start at an address that is a multiple of 16 bytes"):
            OPERATION.bind(samples, {})


def test_batch_is_outermost_and_nothing_overlaps() -> None:
    a, b, sfa, sfb = scaled(*problem())
    rejected("a_tensor must have K .* batch outermost", np.ascontiguousarray(a), b, sfa, sfb)
    rejected("a_tensor must have K", np.broadcast_to(a[:, :, :1], a.shape), b, sfa, sfb)
    rejected("a_tensor must have K", np.zeros((M, 2 * K, L), np.uint8).view(a.dtype)[:, ::2], b, sfa, sfb)


def test_extents_that_must_not_be_zero() -> None:
    rejected("a_tensor must have K > 0", *scaled(*problem(k=0)))
    rejected("b_tensor must have N > 0", *scaled(*problem(n=0)))


@pytest.mark.parametrize(("hints", "match", "error"), [
    ({"mma_tiler_mn": (64, 128)}, "mma_tiler_mn must have 128 or 256 rows and 128, 256 columns", ValueError),
    ({"mma_tiler_mn": (128, 192)}, "mma_tiler_mn must have", ValueError),
    ({"mma_tiler_mn": (256, 128)}, "cluster_shape_mn must have an even number of rows", ValueError),
    ({"cluster_shape_mn": (3, 1)}, "cluster_shape_mn must have extents of 1, 2 or 4", ValueError),
    ({"cluster_shape_mn": (1, 8)}, "cluster_shape_mn must have extents", ValueError),
    ({"cluster_shape_mn": (1, 1, 1)}, "cluster_shape_mn must have two entries", ValueError),
    ({"mma_tiler_mn": 128}, "mma_tiler_mn must be a pair", TypeError),
    ({"mma_tiler_mn": (128.0, 128)}, "mma_tiler_mn must be a pair", TypeError),
])  # fmt: skip
def test_illegal_hints(hints: Any, match: str, error: type[Exception]) -> None:
    arrays = scaled(*problem())
    rejected(match, *arrays, error=error, **hints)
    made = gemm_amax_wrapper(*arrays)
    op = GemmAmax(*arrays, *made, **hints)
    with pytest.raises(error, match=match):
        op.check_support()
    with pytest.raises(error, match=match):
        gemm_amax_jax(*map(jnp.asarray, scaled(*problem(batch=1), "jax")), **hints)


def test_arguments_of_the_wrong_kind() -> None:
    arrays = scaled(*problem())
    rejected("a_tensor must be an array", [1.0], *arrays[1:], error=TypeError)
    rejected("sfb_tensor must be an array", *arrays[:3], None, error=TypeError)
    rejected("sf_vec_size must be a Python int", *arrays, sf_vec_size=32.0, error=TypeError)
    rejected("c_dtype must be", *arrays, c_dtype="int32")
    rejected("a_tensor must have dtype", arrays[0].astype(np.float32), *arrays[1:])


def test_one_code_per_item_is_refused() -> None:
    a, b = problem("mxfp4")
    rejected("a_tensor must hold FP4 codes in pairs", a.codes.view(ml_dtypes.float4_e2m1fn), *scaled(a, b)[1:])


# --- the class ------------------------------------------------------------------------------------------------------


def outputs(m: int = M, dtype: Any = torch.float32, major: str = "n", preset: float = -np.inf) -> tuple[Any, Any]:
    c = torch.full((L, m, N) if major == "n" else (L, N, m), 77, dtype=torch.float32).to(dtype)
    return c.permute((1, 2, 0) if major == "n" else (2, 1, 0)), torch.full((1, 1, 1), preset)


def made(arrays: Any, results: Any, **options: Any) -> GemmAmax:
    op = GemmAmax(*arrays, *results, **options)
    assert op.check_support() is True
    op.compile()
    return op


@pytest.mark.parametrize("major", ["n", "m"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_class_writes_into_the_callers_outputs(dtype: Any, major: str) -> None:
    a, b = problem(m=48)
    arrays, results = scaled(a, b, "torch"), outputs(48, dtype, major)
    assert made(arrays, results).execute(*arrays, *results) is None
    check(dict(zip(("c_tensor", "amax_tensor"), results, strict=True)), a, b, str(dtype).removeprefix("torch."))


def test_class_with_numpy() -> None:
    a, b = problem()
    arrays, results = scaled(a, b), (in_order(np.zeros((M, N, L), np.float32), "k"), np.full((1, 1, 1), -np.inf, "f4"))
    GemmAmax(*arrays, *results)(*arrays, *results)
    check(dict(zip(("c_tensor", "amax_tensor"), results, strict=True)), a, b)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float4_e2m1fn_x2], ids=str)
def test_class_with_a_packed_output(dtype: Any) -> None:
    a, b = problem("nvfp4")
    arrays, (_, amax) = pairs(scaled(a, b, "torch")), outputs()
    c = torch.zeros((L, M, N // 2), dtype=torch.uint8).permute(1, 2, 0).view(dtype)
    GemmAmax(*arrays, c, amax, sf_vec_size=16)(*arrays, c, amax)
    check({"c_tensor": c.view(torch.uint8), "amax_tensor": amax}, a, b, E2M1)


def test_class_raises_what_amax_holds() -> None:
    a, b = problem()
    arrays = scaled(a, b, "torch")
    want = np.abs(product(a.exact(), b.exact())).max()
    for preset, expected in ((-np.inf, want), (0.0, want), (2 * want, 2 * want)):
        results = outputs(preset=preset)
        made(arrays, results).execute(*arrays, *results)
        assert results[1].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_class_takes_amax_of_any_rank(rank: int) -> None:
    arrays, (c, _) = scaled(*problem(), "torch"), outputs()
    amax = torch.zeros((1,) * rank)
    GemmAmax(*arrays, c, amax)(*arrays, c, amax)
    assert amax.item() == gemm_amax_wrapper(*arrays)["amax_tensor"].item()


def test_class_takes_a_pitched_output() -> None:
    a, b = problem()
    arrays, (_, amax) = scaled(a, b, "torch"), outputs()
    c = torch.full((L, M, N + 4), torch.nan).permute(1, 2, 0)[:, :N]
    GemmAmax(*arrays, c, amax)(*arrays, c, amax)
    check({"c_tensor": c, "amax_tensor": amax}, a, b)


def test_class_accepts_any_number_of_rows() -> None:
    op = made(scaled(*problem(m=48), "torch"), outputs(48))
    for m in (16, 300, 1, 0):
        a, b = problem(m=m)
        arrays, results = scaled(a, b, "torch"), outputs(m, preset=5.0 if m == 0 else -np.inf)
        op.execute(*arrays, *results)
        if m:
            check(dict(zip(("c_tensor", "amax_tensor"), results, strict=True)), a, b)
        else:
            assert results[1].item() == 5.0


def test_class_checks_the_live_operands() -> None:
    a, b = problem(m=48)
    arrays, results = scaled(a, b, "torch"), outputs(48)
    op = made(arrays, results)
    other = [to_framework(x, "torch") for x in (a.elements("m"), b.elements(), a.blocked(), b.blocked())]
    wrong = [
        ([other[0], *arrays[1:]], results, "a_tensor must have its dimensions in memory in the compiled order"),
        (scaled(*problem(m=48, n=80), "torch"), results, "b_tensor must have the compiled extent N = 64"),
        (scaled(*problem(m=48, k=112), "torch"), results, "a_tensor must have the compiled extent K = 96"),
        (scaled(*problem("mxfp8_e5m2", m=48), "torch"), results, "a_tensor must have the compiled dtype"),
        (arrays, outputs(32), "c_tensor must have shape"),
        (arrays, outputs(48, torch.bfloat16), "c_tensor must have dtype float32"),
        (arrays, outputs(48, major="m"), "c_tensor must have its columns of stride 1"),
        (arrays, (results[0], torch.zeros(2)), "amax_tensor must have shape"),
        (arrays, (results[0], None), "amax_tensor must be an array"),
    ]
    for live, out, match in wrong:
        with pytest.raises(ValueError, match=f"gemm_amax: {match}"):
            op.execute(*live, *out)


def test_class_checks_its_samples() -> None:
    arrays, results = scaled(*problem(), "torch"), outputs()
    with pytest.raises(ValueError, match="c_dtype must be"):
        GemmAmax(*arrays, results[0].to(torch.int32), results[1]).check_support()
    with pytest.raises(ValueError, match="amax_tensor must have dtype float32"):
        GemmAmax(*arrays, results[0], results[1].double()).check_support()
    with pytest.raises(ValueError, match="c_tensor must have shape"):
        GemmAmax(*arrays, results[0][:, :32], results[1]).check_support()


def test_class_lives_as_every_other() -> None:
    arrays, results = scaled(*problem(), "torch"), outputs()
    op = GemmAmax(*arrays, *results)
    with pytest.raises(NotCompiledError):
        op.execute(*arrays, *results)
    descs = [TensorDesc.of(x.dtype, x.shape, x.stride()) for x in (*arrays, *results)]
    from_descs = GemmAmax(*descs)
    from_descs(*arrays, *results)
    assert results[1].item() > 0
    assert "reference" in from_descs.explain()


def test_outputs_must_not_overlap() -> None:
    arrays, results = scaled(*problem(), "torch"), outputs()
    with pytest.raises(ValueError, match="amax_tensor must not share memory with c_tensor"):
        GemmAmax(*arrays, *results)(*arrays, results[0], results[0][:1, :1, :1])


# --- JAX and torch.compile ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mxfp8_e5m2", "nvfp4"])
def test_jax_entry_eagerly_and_under_jit(name: str) -> None:
    a, b = problem(name, batch=1)
    arrays = scaled(a, b, "jax")

    def run(*given: Any) -> Any:
        return gemm_amax_jax(*given, c_dtype="bfloat16", sf_vec_size=vec(name))

    eager, jitted = run(*arrays), jax.jit(run)(*arrays)
    assert isinstance(eager, tuple)
    check(dict(zip(("c_tensor", "amax_tensor"), eager, strict=True)), a, b, "bfloat16")
    for x, y in zip(eager, jitted, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    shapes = jax.eval_shape(run, *arrays)
    assert [(s.shape, s.dtype.name) for s in shapes] == [((M, N, 1), "bfloat16"), ((1, 1, 1), "float32")]


def test_jax_packed_output_is_uint8() -> None:
    a, b = problem("mxfp4", batch=1)
    c, amax = jax.jit(lambda *given: gemm_amax_jax(*given, c_dtype="uint8"))(*scaled(a, b, "jax"))
    assert (c.shape, c.dtype) == ((M, N // 2, 1), jnp.uint8)
    check({"c_tensor": c, "amax_tensor": amax}, a, b, E2M1)
    for dtype in ("float4_e2m1fn_x2", "float4_e2m1fn"):
        with pytest.raises(ValueError, match="c_dtype must name no FP4 dtype for JAX arrays"):
            gemm_amax_jax(*scaled(a, b, "jax"), c_dtype=dtype)


def test_jax_has_one_batch_and_n_major_results() -> None:
    a, b = problem()
    given = [jnp.asarray(x) for x in (a.elements(), b.elements(), a.blocked("physical"), b.blocked("physical"))]
    rejected("a_tensor must have", *given)
    arrays = scaled(*problem(m=48, batch=1), "jax")
    rejected('c_major must be "n" for JAX arrays', *arrays, c_major="m")
    rejected("stream must be None for JAX arrays", *arrays, stream=3)
    rejected("sfa_tensor must have shape", *arrays[:2], arrays[2].reshape(-1), arrays[3])


def test_jax_class_names_the_entry() -> None:
    arrays = scaled(*problem(batch=1), "jax")
    results = gemm_amax_wrapper(*arrays)
    op = GemmAmax(*arrays, *results)
    with pytest.raises(ValueError, match="gemm_amax_jax"):
        op(*arrays, *results)


@pytest.mark.parametrize("major", ["n", "m"])
def test_torch_compile(major: str) -> None:
    arrays = scaled(*problem(m=48), "torch")

    def run(*given: Any) -> Any:
        return tuple(gemm_amax_wrapper(*given, c_major=major, c_dtype=torch.float16, cluster_shape_mn=(2, 1)))

    torch.compiler.reset()
    for ours, want in zip(torch.compile(run, fullgraph=True)(*arrays), run(*arrays), strict=True):
        assert ours.stride() == want.stride()
        assert torch.equal(ours, want)


def test_registered_op() -> None:
    op = torch.ops.fe_gemm.gemm_amax.default
    packed = tuple(scaled(*problem("mxfp4"), "torch", dtype=np.uint8))
    for options in ({"c_dtype": "bfloat16"}, {"c_dtype": "uint8"}):
        torch.library.opcheck(op, packed, options)
    # One of torch's checks compares operands in a way that fp8 has not.
    utilities = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op, tuple(scaled(*problem(m=48), "torch")), {"c_major": "m"}, test_utils=utilities)


def test_meta_tensors() -> None:
    arrays = [x.to("meta") for x in scaled(*problem(m=48), "torch")]
    result = gemm_amax_wrapper(*arrays, c_major="m", c_dtype=torch.bfloat16)
    assert result["c_tensor"].stride() == (1, 48, 48 * N)
    assert result["amax_tensor"].shape == (1, 1, 1)


def test_no_gradient_is_recorded() -> None:
    a, b = problem()
    arrays = scaled(a, b, "torch")
    arrays[0].requires_grad_(True)
    assert not gemm_amax_wrapper(*arrays)["c_tensor"].requires_grad


# --- plan -----------------------------------------------------------------------------------------------------------


def test_calls_on_the_cpu_run_the_reference_silently() -> None:
    arrays = scaled(*problem(), "torch")
    assert OPERATION.plan(OPERATION.bind(arrays, {})).backend == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gemm_amax_wrapper(*arrays)


def test_what_a_kernel_has_to_compute() -> None:
    a, b = problem("nvfp4", m=48)
    given = [pitched(a.elements(), 16), b.elements(), a.blocked(), b.blocked()]
    bound = OPERATION.bind(given, {"sf_vec_size": 16, "c_dtype": "bfloat16", "c_major": "m"})
    found = describe(bound, CONTRACT.output_names)
    assert found.extents == (48, N, K, L)
    assert (found.a.dtype, found.a.major, found.a.pitch) == ("float4_e2m1fn", "k", K // 2 + 16)
    assert (found.b.major, found.b.pitch, found.b.batch_pitch) == ("k", K // 2, N * K // 2)
    assert found.scales is not None
    assert (found.scales.name, found.scales.dtype, found.scales.vec) == ("nvfp4", E4M3, 16)
    c = found.matrices["c_tensor"]
    assert (c.dtype, c.major, c.pitch, c.batch_pitch) == ("bfloat16", "m", 96, 48 * N * 2)
    assert found.vectors == {"amax_tensor": "float32"}
