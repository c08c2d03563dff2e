"""The front door of ``grouped_gemm_dglu`` on the CPU: families, forms, weight modes, contract, class, op, JAX entry."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
from grouped_arguments import FRAMEWORKS, Gated, assert_close
from naive_gemm import E4M3, E5M2, STORED, value_of
from naive_grouped import BF16, by_row, columns, forward, product, slopes

from fe_gemm import GroupedGemmDglu, compat, grouped_gemm_dglu_jax, grouped_gemm_dglu_wrapper
from fe_gemm.grouped import families
from fe_gemm.grouped.dglu import OPERATION
from fe_gemm.grouped.dglu_contract import CONTRACT
from fe_gemm.reference import grouped as reference
from fe_runtime import NotCompiledError, NotSupportedError
from fe_runtime.plan import HOPPER
from fe_runtime.testing import Call, assert_rejected, invalid_calls, to_framework, to_numpy

STRIDED = ("numpy", "torch")
MODES = ("dense", "discrete")
KEYS = list(CONTRACT.output_names[:7])
N, K = 64, 64


def problem(name: str = "bfloat16", **others: Any) -> Gated:
    return Gated(name, n=N, k=K, **others)


def arguments(
    p: Gated, framework: str = "numpy", mode: str = "dense", rank: int = 2, form: str = "canonical"
) -> dict[str, Any]:
    """Return the arguments of the wrapper; dprob starts at 1, JAX has none."""
    given = p.arguments(framework, mode, rank, form)
    given["c_tensor"] = p.rows_like(p.c, framework, rank)
    given["beta_tensor"] = to_framework(p.beta, framework)
    dprob = np.ones(p.rows, np.float32)
    given["dprob_tensor"] = None if framework == "jax" else p.rows_like(dprob, framework, rank)
    if p.name.startswith("mxfp8"):
        given["d_dtype"] = E4M3
        given["norm_const_tensor"] = to_framework(p.norm, framework)
    return given


def expected(p: Gated, in_jax: bool = False, **options: Any) -> Any:
    """Return what the reference makes of the canonical operands, in numpy."""
    sfa, sfb = (p.sfa, p.sfb) if p.scaled else (None, None)
    quantised = p.name.startswith("mxfp8") and options.get("d_dtype", E4M3) in (E4M3, E5M2)
    if p.name.startswith("mxfp8"):
        options = {"d_dtype": E4M3, **options}
    dprob = (np.zeros if in_jax else np.ones)(p.rows, np.float32)
    c = options.pop("c", p.c)
    arrays = (p.a, c, sfa, p.off, p.alpha, p.beta, p.prob, dprob, p.b, sfb, None, None, p.norm if quantised else None)
    return reference.grouped_gemm_dglu(*arrays, sf_vec_size=p.vec, **options)


def call(name: str = "bfloat16", framework: str = "numpy", **changed: Any) -> Any:
    return grouped_gemm_dglu_wrapper(**{**arguments(problem(name), framework), **changed})


def refused(match: str, name: str = "bfloat16", error: type[Exception] = ValueError, **changed: Any) -> None:
    framework = changed.pop("framework", "numpy")
    with pytest.raises(error, match=f"grouped_gemm_dglu: {match}"):
        call(name, framework, **changed)


def compare(p: Gated, result: Any, want: Any, keys: Any = KEYS) -> None:
    assert list(result.keys()) == list(keys)
    for key, y in zip(keys, want, strict=False):
        got = result[key]
        if key == "dprob_tensor" and got is not None:
            got, y = to_numpy(got).reshape(-1), np.asarray(y).reshape(-1)
        assert_close(got, y, int(p.off[-1]) if key.startswith("d_") else 10**9)


# --- results --------------------------------------------------------------------------------------------------------


def test_against_a_formula_in_float64() -> None:
    p = problem()
    result = call(d_dtype="float32", generate_dbias=True)
    r = by_row(p.alpha.astype(np.float64) ** 2, p.off, p.rows)[:, None] * product(value_of(p.a), value_of(p.b), p.off)
    h = by_row(p.beta, p.off, p.rows)[:, None] * value_of(p.c)
    gates, ups = columns(N)
    by_gate, by_up = slopes("swiglu", h[:, gates], h[:, ups])
    owned, prob = int(p.off[-1]), p.prob[:, None]
    d = result["d_row_tensor"]
    np.testing.assert_allclose(d[:owned][:, gates], (r * prob * by_gate)[:owned], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(d[:owned][:, ups], (r * prob * by_up)[:owned], rtol=1e-4, atol=1e-6)
    sums = 1 + (r * forward("swiglu", h[:, gates], h[:, ups])).sum(axis=1)
    np.testing.assert_allclose(result["dprob_tensor"][:owned], sums[:owned], rtol=1e-4, atol=1e-5)
    assert (result["dprob_tensor"][owned:] == 1).all()
    start = 0
    for e, stop in enumerate(p.off):
        want = d[start:stop].astype(np.float64).sum(axis=0)
        np.testing.assert_allclose(value_of(result["dbias_tensor"])[e, :, 0], want, rtol=2.0**-8, atol=1e-4)
        start = int(stop)


CALLS = [
    (name, rank, mode, framework)
    for name in ("bfloat16", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp4", "nvfp4", "fp4_e8m0_16")
    for rank in (2, 3)
    for mode in MODES
    for framework in FRAMEWORKS
    if framework != "jax" or (rank == 2 + (mode == "discrete") and name in ("bfloat16", "mxfp8_e4m3", "nvfp4"))
]


@pytest.mark.parametrize(("name", "rank", "mode", "framework"), CALLS)
def test_every_family_mode_form_and_framework(name: str, rank: int, mode: str, framework: str) -> None:
    p = problem(name)
    given = arguments(p, framework, mode, rank)
    result = grouped_gemm_dglu_wrapper(**given, generate_dbias=True)
    compare(p, result, expected(p, framework == "jax", generate_dbias=True, with_dprob=True))
    if framework != "jax":
        assert result["dprob_tensor"] is given["dprob_tensor"]
    assert result["d_row_tensor"].ndim == rank
    assert tuple(result["dbias_tensor"].shape) == (3, 2 * N, 1)
    assert (result["amax_tensor"] is not None) == (p.scaled and not name.startswith("mxfp8"))
    assert (result["d_col_tensor"] is not None) == name.startswith("mxfp8")


@pytest.mark.parametrize("framework", STRIDED)
@pytest.mark.parametrize("form", ["legacy", "by columns", "legacy by columns"])
@pytest.mark.parametrize("name", ["bfloat16", "mxfp8_e4m3"])
def test_forms_of_dense_weights(name: str, form: str, framework: str) -> None:
    p = problem(name)
    compare(p, grouped_gemm_dglu_wrapper(**arguments(p, framework, "dense", 3, form)), expected(p))


def test_weights_by_columns_in_jax() -> None:
    p = problem()
    given = arguments(p, "jax", "dense", 2, "by columns")
    compare(p, grouped_gemm_dglu_wrapper(**given), expected(p, True))


@pytest.mark.parametrize("d_dtype", [E4M3, E5M2, "bfloat16", "float16"])
@pytest.mark.parametrize("framework", STRIDED)
def test_dtypes_of_d_of_fp8_operands(framework: str, d_dtype: str) -> None:
    p = problem("mxfp8_e4m3")
    given = {**arguments(p, framework), "d_dtype": d_dtype}
    result = grouped_gemm_dglu_wrapper(**given)
    compare(p, result, expected(p, d_dtype=d_dtype))
    assert (result["sfd_row_tensor"] is None) == (d_dtype in ("bfloat16", "float16"))
    assert (result["amax_tensor"] is None) == d_dtype.startswith("float8")


@pytest.mark.parametrize("dtype", ["float32", "float16", E4M3, E5M2])
def test_dtypes_of_c(dtype: str) -> None:
    p = problem("mxfp4")
    c = p.c.astype(np.float32).astype(STORED.get(dtype, dtype))
    compare(p, call("mxfp4", c_tensor=c), expected(p, c=c))
    if dtype.startswith("float8"):
        refused("c_tensor must be bfloat16, float16 or float32 for bfloat16", c_tensor=c)
        refused("vector_f32 must be False for an fp8 C", "mxfp4", c_tensor=c, vector_f32=True)


@pytest.mark.parametrize("act_func", ["dswiglu", "dgeglu", "dsituglu"])
@pytest.mark.parametrize("name", ["bfloat16", "mxfp4"])
def test_activations_and_their_factors(name: str, act_func: str) -> None:
    p = problem(name)
    factors = {"linear_offset": 0.25, "geglu_alpha": 1.3, "glu_clamp_max": 1.5, "glu_clamp_min": -0.75,
               "situ_beta1": 1.5, "situ_beta2": 3.0}  # fmt: skip
    for given in ({}, factors):
        result = grouped_gemm_dglu_wrapper(**arguments(p), act_func=act_func, **given)
        compare(p, result, expected(p, act_func=act_func, **given))


def test_beta_has_no_effect_on_dgeglu_of_scaled_operands() -> None:
    for name in ("mxfp4", "bfloat16"):
        p = problem(name)
        want = grouped_gemm_dglu_wrapper(**arguments(p), act_func="dgeglu")[0].tobytes()
        p.beta *= 2
        same = grouped_gemm_dglu_wrapper(**arguments(p), act_func="dgeglu")[0].tobytes() == want
        assert same == (name == "mxfp4")


@pytest.mark.parametrize("framework", STRIDED)
@pytest.mark.parametrize("rank", [2, 3])
def test_activation_tensor(rank: int, framework: str) -> None:
    p = problem()
    kept = p.rows_like(np.zeros((p.rows, N), BF16), framework, rank)
    given = arguments(p, framework, rank=rank)
    result = grouped_gemm_dglu_wrapper(**given, act_func="dgeglu", activation_tensor=kept)
    assert result["activation_tensor"] is kept
    want = expected(p, act_func="dgeglu", with_activation=True)
    compare(p, result, want, [*KEYS, "activation_tensor"])
    assert_close(kept, want[7], int(p.off[-1]))


def test_rounded_product() -> None:
    p = problem()
    compare(p, call(round_dgrad_to_input_dtype=True), expected(p, round_dgrad_to_input_dtype=True))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_prob_and_dprob_of_scaled_operands_may_be_left_out(framework: str) -> None:
    p = problem("nvfp4")
    p.prob[:] = 1
    given = {**arguments(p, framework), "prob_tensor": None, "dprob_tensor": None}
    result = grouped_gemm_dglu_wrapper(**given)
    assert (result["dprob_tensor"] is None) == (framework != "jax")
    want = list(expected(p, framework == "jax"))
    if framework != "jax":
        want[2] = None
    compare(p, result, want)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", ["bfloat16", "mxfp8_e4m3"])
def test_no_rows(name: str, framework: str) -> None:
    p = Gated(name, (0, 0), 0, n=N, k=K)
    result = grouped_gemm_dglu_wrapper(**arguments(p, framework), generate_dbias=True)
    assert tuple(result["d_row_tensor"].shape) == (0, 2 * N)
    assert not value_of(to_numpy(result["dbias_tensor"])).any()
    if p.scaled:
        assert 0 in result["sfd_row_tensor"].shape


def test_ten_runs_have_the_same_bits() -> None:
    results = [call(generate_dbias=True) for _ in range(10)]
    assert len({b"".join(x.tobytes() for x in result if x is not None) for result in results}) == 1


# --- what is refused ------------------------------------------------------------------------------------------------


def example(name: str, mode: str) -> Call:
    p = problem(name)
    EXAMPLES.append(p)
    given = arguments(p, "numpy", mode)
    options = {key: given[key] for key in ("n", "b_dtype", "sf_vec_size", "d_dtype") if key in given}
    arrays = tuple(given.get(key) for key in CONTRACT.input_names)
    return Call(arrays, {**options, "generate_dbias": True, "with_dprob": True})


EXAMPLES: list[Gated] = []


@pytest.mark.parametrize(
    "bad",
    [
        bad
        for name, mode in (("bfloat16", "dense"), ("mxfp8_e4m3", "dense"), ("nvfp4", "discrete"))
        for bad in invalid_calls(CONTRACT, example(name, mode))
        if bad.argument not in ("a_tensor", "b_tensor") or "extent" in bad.id or "rank" in bad.id
        if not bad.id.startswith("c_tensor-extent1")
    ],
    ids=lambda bad: bad.id,
)
def test_invalid_call_is_rejected(bad: Any) -> None:
    assert_rejected(lambda arrays, options: OPERATION(arrays, options), "grouped_gemm_dglu", bad)


def test_c_has_twice_the_columns() -> None:
    refused("c_tensor must have 2 N columns", c_tensor=np.zeros((160, N), BF16))
    refused("c_tensor must have shape", c_tensor=np.zeros((159, 2 * N), BF16))


def test_bfloat16_operands_need_prob_and_dprob() -> None:
    refused("prob_tensor must be given for bfloat16", prob_tensor=None)
    refused("dprob_tensor must be given for bfloat16", dprob_tensor=None)
    refused("dprob_tensor must have dtype", dprob_tensor=np.zeros(160, np.float64))
    refused("dprob_tensor must have shape", dprob_tensor=np.zeros(159, np.float32))
    assert call(dprob_tensor=np.ones((160, 1, 1), np.float32)) is not None


@pytest.mark.parametrize("name", ["beta_tensor", "alpha_tensor", "c_tensor", "a_tensor", "padded_offsets"])
def test_missing_tensors(name: str) -> None:
    refused(f"{name} must be an array", **{name: None})


@pytest.mark.parametrize(("name", "value"), [
    ("sf_vec_size", 32), ("discrete_col_sfd", True), ("use_single_group_runtime_offsets", True),
    ("sf_fp8_dtype_override", "e5m3"), ("norm_const_tensor", np.ones(1, np.float32)), ("epilogue_op", "relu"),
])  # fmt: skip
def test_bfloat16_operands_have_no_scale_controls(name: str, value: Any) -> None:
    refused(f"{name} must be", **{name: value})


def test_extras_are_for_bfloat16() -> None:
    refused("round_dgrad_to_input_dtype must be False", "mxfp4", round_dgrad_to_input_dtype=True)
    kept = np.zeros((160, N), BF16)
    refused("activation_tensor must be left out for fp8 and FP4", "mxfp4", activation_tensor=kept, act_func="dgeglu")
    refused("activation_tensor must be left out but for dgeglu", activation_tensor=kept)
    refused("activation_tensor must be left out but for", activation_tensor=kept, act_func="dgeglu", d_dtype="float16")
    for wrong in (kept[:, :32], kept.astype(np.float32), kept[:, :, None]):
        refused("activation_tensor must have", activation_tensor=wrong, act_func="dgeglu")
    p = problem()
    given = arguments(p)
    with pytest.raises(ValueError, match="activation_tensor must not share memory with a_tensor"):
        grouped_gemm_dglu_wrapper(**given, act_func="dgeglu", activation_tensor=given["a_tensor"])


@pytest.mark.parametrize(("name", "value"), [
    ("geglu_alpha", 0.0), ("geglu_alpha", np.inf), ("glu_clamp_max", -8.0), ("glu_clamp_min", -np.inf),
    ("glu_clamp_max", np.nan),
])  # fmt: skip
def test_factors_of_dgeglu(name: str, value: float) -> None:
    refused("(geglu_alpha|glu_clamp_min) must be finite", act_func="dgeglu", **{name: value})
    assert call(**{name: value}) is not None


def test_dtypes_of_d() -> None:
    refused("d_dtype must be bfloat16, float16 or float32 for bfloat16 and FP4", d_dtype=E4M3)
    refused("d_dtype must be bfloat16, float16 or float32 for bfloat16 and FP4", "mxfp4", d_dtype=E5M2)
    refused("d_dtype must be fp8, bfloat16 or float16 for fp8", "mxfp8_e4m3", d_dtype="float32")
    refused("norm_const_tensor must be given for an fp8 D", "mxfp8_e4m3", norm_const_tensor=None)
    refused("norm_const_tensor must be left out for FP4", "mxfp4", norm_const_tensor=np.ones(1, np.float32))


def test_extents() -> None:
    with pytest.raises(ValueError, match="b_tensor must have N > 0, a multiple of 32"):
        grouped_gemm_dglu_wrapper(**arguments(Gated(n=48, k=K)))


def test_fp4_weights_lie_by_rows() -> None:
    p = problem("mxfp4")
    given = arguments(p)
    given["b_tensor"] = np.ascontiguousarray(given["b_tensor"].transpose(0, 2, 1))
    with pytest.raises(ValueError, match=r"grouped_gemm_dglu|packed FP4"):
        grouped_gemm_dglu_wrapper(**{**given, "b_major": "n"})


@pytest.mark.parametrize(("name", "hint", "value", "error"), [
    ("bfloat16", "mma_tiler_mn", (128, 48), ValueError), ("mxfp4", "mma_tiler_mn", (128, 128), ValueError),
    ("mxfp4", "cluster_shape_mn", (2, 8), ValueError), ("bfloat16", "deterministic", 1, TypeError),
    ("bfloat16", "cd_major", "m", ValueError), ("bfloat16", "generate_dbias", 1, TypeError),
])  # fmt: skip
def test_hints_are_checked(name: str, hint: str, value: Any, error: type[Exception]) -> None:
    refused(f"{hint} must", name, error, **{hint: value})


@pytest.mark.parametrize("deterministic", [None, False, True])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_deterministic_is_always_so(framework: str, deterministic: Any) -> None:
    p = problem()
    result = grouped_gemm_dglu_wrapper(**arguments(p, framework), deterministic=deterministic)
    assert_close(result[0], expected(p)[0], int(p.off[-1]))


def test_epilogues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "_warned", [])
    p = problem("mxfp4")
    want = expected(p)
    for name in (None, "none", "identity"):
        compare(p, call("mxfp4", epilogue_op=name), want)
    with pytest.warns(RuntimeWarning, match="epilogue_op='relu' is accepted and not applied"):
        compare(p, call("mxfp4", epilogue_op="relu"), want)
    compare(p, call("mxfp4", epilogue_op="srelu"), want)  # once per process
    refused("epilogue_op must be", "mxfp4", epilogue_op="gelu")


def test_what_jax_has_no_place_for() -> None:
    refused("dprob_tensor must be None for JAX", framework="jax", dprob_tensor=jax.numpy.zeros(160))
    refused("current_stream must be None", framework="jax", current_stream=0)
    kept = jax.numpy.zeros((160, N), "bfloat16")
    refused("activation_tensor must", framework="jax", activation_tensor=kept, act_func="dgeglu")


# --- the class ------------------------------------------------------------------------------------------------------


def an_object(p: Gated, given: dict[str, Any], outputs: Any, **options: Any) -> Any:
    d, d_col, dprob, dbias, amax, row, col = outputs
    weights = {"sample_b": given.get("b_tensor"), "sample_sfb": given.get("sfb_tensor")}
    if "b_tensor" not in given:
        weights = {"num_experts": 3, "b_shape": (N, K), "b_dtype": given["b_dtype"]}
    known = {
        "sample_dbias": dbias, "sample_sfd_row": row, "sample_sfd_col": col, "sample_amax": amax,
        "sample_norm_const": given.get("norm_const_tensor"), "b_major": given["b_major"], "sf_vec_size": p.vec,
    }  # fmt: skip
    return GroupedGemmDglu(
        given["a_tensor"], given["c_tensor"], d, d_col, given["sfa_tensor"], given["padded_offsets"],
        given["alpha_tensor"], given["beta_tensor"], given["prob_tensor"], dprob, **{**weights, **known, **options},
    )  # fmt: skip


def execute(op: Any, given: dict[str, Any], outputs: Any, **others: Any) -> None:
    d, d_col, dprob, dbias, amax, row, col = outputs
    names = ("b_tensor", "sfb_tensor", "b_ptrs", "sfb_ptrs", "norm_const_tensor")
    known = {"dbias_tensor": dbias, "sfd_row_tensor": row, "sfd_col_tensor": col, "amax_tensor": amax}
    op.execute(
        given["a_tensor"], given["c_tensor"], d, d_col, given["sfa_tensor"], given["padded_offsets"],
        given["alpha_tensor"], given["beta_tensor"], given["prob_tensor"], dprob,
        **{**{name: given.get(name) for name in names}, **known, **others},
    )  # fmt: skip


def fresh(result: Any) -> list[Any]:
    """Return buffers like the results: dprob 1, dbias 0, maxima -inf, others full of anything."""
    made = [None if x is None else x.clone() if isinstance(x, torch.Tensor) else x.copy() for x in result]
    for at, value in ((2, 1), (3, 0), (4, -np.inf)):
        if made[at] is not None:
            made[at][...] = value
    return made


@pytest.mark.parametrize("framework", STRIDED)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("name", ["bfloat16", "mxfp8_e4m3", "nvfp4"])
def test_class_writes_what_the_wrapper_returns(name: str, rank: int, mode: str, framework: str) -> None:
    p = problem(name)
    given = arguments(p, framework, mode, rank)
    want = [*grouped_gemm_dglu_wrapper(**given, generate_dbias=True)]
    outputs = fresh(want)
    op = an_object(p, given, outputs)
    with pytest.raises(NotCompiledError):
        execute(op, given, outputs)
    assert op.check_support() is True
    op.compile()
    execute(op, given, outputs)
    for got, y in zip(outputs, want, strict=True):
        assert (got is None) == (y is None)
        assert got is None or to_numpy(got).tobytes() == to_numpy(y).tobytes()


def test_dprob_and_dbias_are_added_to_and_maxima_raised() -> None:
    p = problem("nvfp4")
    given = arguments(p)
    want = [*grouped_gemm_dglu_wrapper(**given, generate_dbias=True)]
    outputs = fresh(want)
    op = an_object(p, given, outputs)
    op.compile()
    for _ in range(2):
        execute(op, given, outputs)
    np.testing.assert_allclose(outputs[2], 2 * want[2] - 1, rtol=1e-6)
    np.testing.assert_allclose(value_of(outputs[3]), 2 * value_of(want[3]), rtol=2.0**-7)
    np.testing.assert_array_equal(outputs[4], want[4])


def test_workspace() -> None:
    p = problem()
    given = arguments(p, "torch")
    outputs = fresh([*grouped_gemm_dglu_wrapper(**given)])
    op = an_object(p, given, outputs)
    op.compile()
    size = op.scratch_workspace_bytes()
    assert size > 0
    assert size % 128 == 0
    execute(op, given, outputs, workspace=torch.empty(size, dtype=torch.uint8))
    for wrong in (torch.empty(size - 1, dtype=torch.uint8), torch.empty(size), outputs[0].view(torch.uint8).view(-1)):
        with pytest.raises(ValueError, match="grouped_gemm_dglu: workspace must"):
            execute(op, given, outputs, workspace=wrong)


def test_scales_of_the_class_come_together() -> None:
    p = problem("mxfp8_e4m3")
    given = arguments(p)
    outputs = fresh([*grouped_gemm_dglu_wrapper(**given)])
    for at in (5, 6):
        missing = [None if number == at else x for number, x in enumerate(outputs)]
        with pytest.raises(ValueError, match="grouped_gemm_dglu: sample_sfd_row must be given with"):
            an_object(p, given, missing).check_support()
    plain = [np.zeros((160, 2 * N), BF16), None, outputs[2], None, None, outputs[5], outputs[6]]
    op = an_object(p, given, plain)
    with pytest.warns(UserWarning, match="have no effect"):
        op.compile()
    execute(op, given, plain)
    assert_close(plain[0], expected(p, d_dtype="bfloat16")[0], int(p.off[-1]))


def test_presence_is_that_of_the_samples() -> None:
    p = problem()
    given = arguments(p)
    outputs = fresh([*grouped_gemm_dglu_wrapper(**given, generate_dbias=True)])
    op = an_object(p, given, outputs)
    op.compile()
    with pytest.raises(ValueError, match="dbias_tensor must"):
        execute(op, given, [*outputs[:3], None, *outputs[4:]])
    with pytest.raises(ValueError, match="activation_tensor must"):
        execute(op, given, outputs, activation_tensor=np.zeros((160, N), BF16))
    for rows in (300, 0):
        other = Gated("bfloat16", (33, 0, 95) if rows else (0, 0, 0), rows, n=N, k=K)
        live = arguments(other)
        want = [*grouped_gemm_dglu_wrapper(**live, generate_dbias=True)]
        buffers = fresh(want)
        execute(op, arguments(other), buffers)
        assert buffers[0].tobytes() == want[0].tobytes()


# --- torch, JAX and names -------------------------------------------------------------------------------------------


def test_opcheck() -> None:
    p = problem(sizes=(33, 0, 127))
    given = arguments(p, "torch")
    arrays = tuple(given.get(key) for key in CONTRACT.input_names)
    options = {"with_dprob": True, "generate_dbias": True}
    utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.fe_gemm.grouped_gemm_dglu.default, arrays, options, test_utils=utils)


@pytest.mark.parametrize("name", ["bfloat16", "mxfp8_e4m3"])
def test_compiles_as_one_graph(name: str) -> None:
    p = problem(name)
    given = arguments(p, "torch")
    names = [key for key, x in given.items() if isinstance(x, torch.Tensor)]
    static = {key: x for key, x in given.items() if not isinstance(x, torch.Tensor)}

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(*arrays: Any) -> Any:
        return tuple(grouped_gemm_dglu_wrapper(**dict(zip(names, arrays, strict=True)), **static))

    got = model(*(given[key] for key in names))
    want = expected(p)
    assert_close(got[0], want[0], int(p.off[-1]))
    np.testing.assert_allclose(to_numpy(given["dprob_tensor"]), want[2], rtol=1e-4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["bfloat16", "mxfp8_e4m3", "nvfp4"])
def test_jax_entry_eager_and_jit(name: str, mode: str) -> None:
    p = problem(name)
    given = arguments(p, "jax", mode)
    static = {key: given.pop(key) for key in ("n", "sf_vec_size", "d_dtype") if key in given}
    for key in ("b_dtype", "b_major", "dprob_tensor"):
        given.pop(key, None)
    arrays = {key: x for key, x in given.items() if x is not None}
    run = lambda arrays: grouped_gemm_dglu_jax(**arrays, **static, generate_dbias=True)  # noqa: E731
    want = expected(p, True, generate_dbias=True)
    for function in (run, jax.jit(run)):
        result = function(arrays)
        if name == "bfloat16" and mode == "discrete":
            assert type(result) is tuple
            for got, y in zip(result, (want[0], want[2], want[3]), strict=True):
                assert_close(got, y, 10**9)
        else:
            compare(p, result, want)


def test_plan_and_names() -> None:
    plan = OPERATION.plan(OPERATION.bind(*example("bfloat16", "dense")), target=HOPPER)
    assert plan.kernel is not None or plan.missing is not None
    with pytest.raises(NotSupportedError, match="grouped_gemm_dglu: backend"):
        call(backend="sm90")
    for flag in ("canonical_layouts", "bf16_canonical_layouts"):
        assert getattr(grouped_gemm_dglu_wrapper, f"supports_{flag}") is True
    assert compat.grouped_gemm_dglu_wrapper_sm100 is grouped_gemm_dglu_wrapper
    assert compat.GroupedGemmDgluSm100 is GroupedGemmDglu
    assert compat.grouped_gemm_dglu_jax_sm100 is grouped_gemm_dglu_jax
