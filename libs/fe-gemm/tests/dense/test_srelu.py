"""The front door of ``gemm_srelu`` on the CPU: contract, frameworks, class, registered op, JAX entry."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
from naive_gemm import E4M3, E5M2, FORMATS
from srelu_calls import FRAMEWORKS, assert_same, fresh_like, one, operands, strides_of

import fe_gemm.compat
from fe_gemm import GemmSrelu, gemm_srelu_jax, gemm_srelu_wrapper, reference
from fe_gemm.dense.srelu import CONTRACT, OPERATION
from fe_runtime import NotCompiledError, NotSupportedError, TensorDesc
from fe_runtime.plan import HOPPER, NoKernel
from fe_runtime.testing import Call, assert_rejected, invalid_calls, to_framework, to_numpy

KEYS = ["c_tensor", "d_tensor", "amax_tensor", "sfd_tensor"]
INPUTS = ("a_tensor", "b_tensor", "sfa_tensor", "sfb_tensor", "prob_tensor")


def call(name: str = "mxfp8_e4m3", framework: str = "numpy", **known: Any) -> Any:
    """Call the wrapper on operands of these extents with these options."""
    extents = {key: known.pop(key) for key in ("m", "n", "k", "batch", "major") if key in known}
    return gemm_srelu_wrapper(**{**operands(name, framework, **extents), **known})


def refused(match: str, error: type[Exception] = ValueError, **known: Any) -> None:
    with pytest.raises(error, match=f"gemm_srelu: {match}"):
        call(**known)


def by_reference(given: dict[str, Any], **options: Any) -> Any:
    arrays = [given[key] for key in INPUTS]
    return reference.gemm_srelu(*arrays, options.pop("norm_const", None), sf_vec_size=given["sf_vec_size"], **options)


# --- results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_framework_gives_the_reference(name: str, framework: str) -> None:
    given = operands(name, framework, m=37)
    result = gemm_srelu_wrapper(**given, alpha=0.5, c_dtype="float32", d_dtype="float16")
    assert list(result.keys()) == KEYS
    want = by_reference(operands(name, m=37), alpha=0.5, c_dtype="float32", d_dtype="float16")
    assert_same(result, want)
    assert (result["amax_tensor"] is not None) == (FORMATS[name][0] == "float4_e2m1fn")


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", ["mxfp8_e5m2", "mxfp4"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_fp8_d_has_scales(dtype: str, name: str, framework: str) -> None:
    given = operands(name, framework, m=130)
    result = gemm_srelu_wrapper(**given, d_dtype=dtype, norm_const_tensor=one(framework, 0.3))
    want = by_reference(operands(name, m=130), d_dtype=dtype, norm_const=one("numpy", 0.3))
    assert_same(result, want)
    assert result["amax_tensor"] is None
    assert tuple(result["sfd_tensor"].shape) == ((32, 4, 2, 4, 1, 1) if framework == "torch" else (1, 2, 1, 32, 4, 4))
    if framework == "torch":
        assert result["sfd_tensor"].dtype == torch.float8_e8m0fnu
        assert strides_of(result["sfd_tensor"])[:2] == (16, 4)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("c_major", ["n", "m"])
@pytest.mark.parametrize("c_dtype", ["float32", E4M3])
def test_layout_of_results(c_dtype: str, c_major: str, framework: str) -> None:
    result = call(framework=framework, m=32, batch=3, c_major=c_major, c_dtype=c_dtype)
    for key in ("c_tensor", "d_tensor"):
        assert strides_of(result[key]) == ((48, 1, 32 * 48) if c_major == "n" else (1, 32, 32 * 48))
    assert_same(result, call(m=32, batch=3, c_dtype=c_dtype))


@pytest.mark.parametrize("m", [1, 127, 300])
def test_tail_rows(m: int) -> None:
    assert_same(call(m=m, batch=2), by_reference(operands(m=m, batch=2)))


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_operands_by_columns(framework: str) -> None:
    assert_same(call(framework=framework, m=48, major="rows"), call(m=48))


def test_container_and_pairs_of_fp4() -> None:
    given = operands("nvfp4", "torch")
    want = gemm_srelu_wrapper(**given)
    for key in ("a_tensor", "b_tensor"):
        given[key] = given[key].view(torch.float4_e2m1fn_x2)
    assert_same(gemm_srelu_wrapper(**given), want)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_scales_as_bytes_and_in_the_physical_form(dtype: Any, framework: str) -> None:
    want = call(framework=framework, batch=2)
    given = operands(framework=framework, batch=2)
    for key in ("sfa_tensor", "sfb_tensor"):
        scales = to_numpy(given[key]).view(dtype).transpose(5, 2, 4, 0, 1, 3)
        given[key] = to_framework(np.ascontiguousarray(scales), framework)
    assert_same(gemm_srelu_wrapper(**given), want)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_rows_with_a_pitch(framework: str) -> None:
    given = operands(framework=framework)
    want = gemm_srelu_wrapper(**given)
    wide = np.full((32, 96, 1), 0x7F, np.uint8).view(to_numpy(given["a_tensor"]).dtype)
    wide[:, :64] = to_numpy(given["a_tensor"])
    given["a_tensor"] = to_framework(wide, framework)[:, :64]
    assert_same(gemm_srelu_wrapper(**given), want)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_factors_with_any_strides(framework: str) -> None:
    given = operands(framework=framework, batch=2)
    want = gemm_srelu_wrapper(**given)
    wide = np.full((32, 3, 2), np.nan, np.float32)
    wide[:, 1:2] = to_numpy(given["prob_tensor"])
    given["prob_tensor"] = to_framework(wide, framework)[:, 1:2]
    assert_same(gemm_srelu_wrapper(**given), want)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_rows_and_no_batches(framework: str) -> None:
    result = call("nvfp4", framework, m=0)
    assert tuple(result["d_tensor"].shape) == (0, 48, 1)
    assert (tuple(result["amax_tensor"].shape), result["amax_tensor"].item()) == ((1,), -np.inf)
    if framework != "jax":
        assert tuple(call("nvfp4", framework, batch=0)["c_tensor"].shape) == (32, 48, 0)


# --- one test for each row of the contract's table ------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    invalid_calls(
        CONTRACT,
        Call(
            (*(operands()[key] for key in INPUTS), one("numpy")),
            {"sf_vec_size": 32, "d_dtype": E4M3, "with_amax": False},
        ),
    ),
    ids=lambda bad: bad.id,
)
def test_invalid_call_is_rejected(bad: Any) -> None:
    assert_rejected(lambda arrays, options: OPERATION(arrays, options), "gemm_srelu", bad)


def test_fp8_operands_have_e8m0_scales_per_32() -> None:
    refused("sf_vec_size must be 32 for fp8 operands", sf_vec_size=16)
    scales = {key: np.zeros((32, 4, 1, 4, 1, 1), operands("nvfp4")[key].dtype) for key in ("sfa_tensor", "sfb_tensor")}
    refused("sfa_tensor must hold e8m0 scales for fp8 operands", **scales)


def test_fp4_operands_have_no_e4m3_scales_per_32() -> None:
    refused("sf_vec_size must be .*16 for e4m3 scales", name="nvfp4", sf_vec_size=32)


def test_operands_have_equal_dtypes() -> None:
    refused("b_tensor must have the dtype of a_tensor", b_tensor=operands("mxfp8_e5m2")["b_tensor"])
    refused("sfb_tensor must have the dtype of sfa_tensor", sfb_tensor=operands("nvfp4", k=64)["sfb_tensor"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_dtypes_of_operands(dtype: str) -> None:
    plain = np.zeros((32, 64, 1), "float32").astype("float32" if dtype == "bfloat16" else dtype)
    refused("a_tensor must have dtype", a_tensor=plain)
    if dtype != "float32":
        refused("prob_tensor must have dtype float32", prob_tensor=np.zeros((32, 1, 1), np.float16))


def test_results_have_one_major() -> None:
    given = operands()
    c, d = np.empty((32, 48, 1), np.float32), np.empty((48, 32, 1), np.float32).transpose(1, 0, 2)
    samples = [given[key] for key in INPUTS[:2]], [given[key] for key in INPUTS[2:]]
    with pytest.raises(ValueError, match="gemm_srelu: d_tensor must"):
        GemmSrelu(*samples[0], c, d, *samples[1], sf_vec_size=32).check_support()


def test_the_accumulator_is_float32() -> None:
    refused("acc_dtype must be", acc_dtype="float16")


@pytest.mark.parametrize("major", ["k", "N", ""])
def test_c_major_is_m_or_n(major: str) -> None:
    refused("c_major must be", c_major=major)
    refused("c_major must be", error=TypeError, c_major=0)


def test_fp8_d_needs_norm_const() -> None:
    refused("norm_const_tensor must be given for an fp8 D", d_dtype=E4M3)
    refused("norm_const_tensor must have shape", d_dtype=E4M3, norm_const_tensor=np.ones(2, np.float32))
    assert call(d_dtype=E4M3, norm_const_tensor=np.ones((1, 1, 1), np.float32))["sfd_tensor"] is not None


def test_fp8_d_needs_sfd_and_norm_const_in_the_class() -> None:
    given = operands()
    c, d = np.empty((32, 48, 1), np.float32), np.empty((32, 48, 1), operands()["a_tensor"].dtype)
    arrays = [*(given[key] for key in INPUTS[:2]), c, d, *(given[key] for key in INPUTS[2:])]
    with pytest.raises(ValueError, match="gemm_srelu: norm_const_tensor must be given"):
        GemmSrelu(*arrays, sample_sfd=given["sfa_tensor"], sf_vec_size=32).check_support()
    with pytest.raises(ValueError, match="gemm_srelu: sfd_tensor must be an array"):
        GemmSrelu(*arrays, sample_norm_const=one("numpy"), sf_vec_size=32).check_support()
    assert GemmSrelu(
        *arrays, sample_sfd=given["sfa_tensor"], sample_norm_const=one("numpy"), sf_vec_size=32
    ).check_support()


@pytest.mark.parametrize("name", ["nvfp4", "fp4_e8m0_16"])
def test_fp8_d_needs_a_format(name: str) -> None:
    refused("d_dtype must be fp8 only with e8m0 scales", name=name, d_dtype=E4M3, norm_const_tensor=one("numpy"))


@pytest.mark.parametrize("dtype", ["float64", "uint8", "float8_e8m0fnu", "float4_e2m1fn_x2", "nonsense"])
def test_dtypes_of_results(dtype: str) -> None:
    refused("c_dtype must be", c_dtype=dtype)
    refused("d_dtype must be", d_dtype=dtype)


def test_scale_tiles_are_those_of_the_operands() -> None:
    for key in ("sfa_tensor", "sfb_tensor"):
        for shape in [(1, 2, 1, 32, 4, 4), (1, 1, 2, 32, 4, 4), (2, 1, 1, 32, 4, 4), (1, 1, 1, 4, 32, 4), (512,)]:
            refused(f"{key} must have shape", **{key: np.zeros(shape, np.uint8)})


def test_scale_strides_are_those_of_the_layout() -> None:
    given = operands(m=130)
    copied = np.ascontiguousarray(given["sfa_tensor"])
    refused("sfa_tensor must", m=130, sfa_tensor=copied)


def test_rows_are_aligned() -> None:
    refused("a_tensor must have a contiguous extent .*multiple of 16 bytes", k=72)
    refused("b_tensor must have a contiguous extent .*multiple of 16 bytes", n=40, major="rows", m=48)
    wide = np.zeros((32, 72, 1), np.uint8).view(operands()["a_tensor"].dtype)
    refused("a_tensor must have strides of multiples of 16 bytes", a_tensor=wide[:, :64])


@pytest.mark.parametrize("dtype", ["bfloat16", E4M3])
def test_result_rows_are_aligned(dtype: str) -> None:
    given = operands()
    c = np.empty((32, 56 if dtype == E4M3 else 52, 1), to_numpy(call(c_dtype=dtype)["c_tensor"]).dtype)[:, :48]
    arrays = [*(given[key] for key in INPUTS[:2]), c, c.copy(), *(given[key] for key in INPUTS[2:])]
    with pytest.raises(ValueError, match="gemm_srelu: c_tensor must have strides of multiples of 16 bytes"):
        GemmSrelu(*arrays, sample_norm_const=one("numpy"), sf_vec_size=32).check_support()


def test_nothing_to_sum_or_to_compute() -> None:
    refused("a_tensor must have K > 0", k=0)
    refused("b_tensor must have N > 0", n=0)


@pytest.mark.parametrize(("hint", "value", "error"), [
    ("mma_tiler_mn", (64, 128), ValueError), ("mma_tiler_mn", (128, 96), ValueError), ("mma_tiler_mn", 128, TypeError),
    ("cluster_shape_mn", (3, 1), ValueError), ("cluster_shape_mn", (1, 8), ValueError),
    ("cluster_shape_mn", (1, 1), ValueError), ("vector_f32", 1, TypeError),
])  # fmt: skip
def test_hints_are_checked(hint: str, value: Any, error: type[Exception]) -> None:
    refused(f"{hint} must", error=error, **{hint: value})


def test_hints_change_nothing() -> None:
    want = call()
    assert_same(call(mma_tiler_mn=(128, 64), cluster_shape_mn=(4, 4), vector_f32=True), want)
    assert_same(call(mma_tiler_mn=(256, 192), cluster_shape_mn=(2, 1)), want)


def test_jax_arrays_have_one_batch_and_rows() -> None:
    refused("a_tensor must have .*JAX arrays.* L = 1", framework="jax", batch=2)
    refused('c_major must be "n" for JAX arrays', framework="jax", c_major="m")
    refused("stream must be None", framework="jax", stream=0)


def test_arrays_of_one_framework() -> None:
    refused("prob_tensor must come from the framework", prob_tensor=torch.ones(32, 1, 1))
    refused("a_tensor must be an array", error=TypeError, a_tensor=[[1.0]])


# --- the class ------------------------------------------------------------------------------------------------------


def an_object(given: dict[str, Any], result: Any, **options: Any) -> tuple[Any, list[Any]]:
    """Return an object for operands and results, and the outputs that it is to write."""
    c, d, amax, sfd = (fresh_like(x) for x in result)
    arrays = [given["a_tensor"], given["b_tensor"], c, d, *(given[key] for key in INPUTS[2:])]
    op = GemmSrelu(*arrays, sample_sfd=sfd, sample_amax=amax, sf_vec_size=given["sf_vec_size"], **options)
    return op, [c, d, amax, sfd]


def execute(op: Any, given: dict[str, Any], outputs: list[Any], **options: Any) -> None:
    c, d, amax, sfd = outputs
    arrays = [given["a_tensor"], given["b_tensor"], c, d, *(given[key] for key in INPUTS[2:])]
    op.execute(*arrays, sfd_tensor=sfd, amax_tensor=amax, **options)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize(("name", "options"), [
    ("mxfp8_e4m3", {}), ("nvfp4", {"c_dtype": "float32", "c_major": "m"}), ("mxfp4", {"d_dtype": E5M2}),
])  # fmt: skip
def test_class_writes_what_the_wrapper_returns(name: str, options: dict[str, Any], framework: str) -> None:
    given, n = operands(name, framework, batch=2), one(framework, 0.3) if "d_dtype" in options else None
    want = gemm_srelu_wrapper(**given, **options, norm_const_tensor=n, alpha=0.5)
    op, outputs = an_object(given, want, sample_norm_const=n, alpha=0.5)
    if outputs[2] is not None:
        outputs[2][...] = -np.inf
    with pytest.raises(NotCompiledError):
        execute(op, given, outputs, norm_const_tensor=n)
    assert op.check_support() is True
    op.compile()
    execute(op, given, outputs, norm_const_tensor=n)
    assert_same(outputs, want)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_class_raises_the_maximum(framework: str) -> None:
    given = operands("nvfp4", framework)
    want = gemm_srelu_wrapper(**given)
    op, outputs = an_object(given, want)
    largest = want["amax_tensor"].item()
    for before, after in [(-np.inf, largest), (0.0, largest), (2 * largest, 2 * largest), (np.nan, np.nan)]:
        outputs[2][...] = before
        op.compile()
        execute(op, given, outputs)
        np.testing.assert_equal(outputs[2].item(), after)


def test_the_maximum_may_have_trailing_ones_and_be_left_out() -> None:
    given = operands("nvfp4")
    want = gemm_srelu_wrapper(**given)
    for amax in (np.zeros((1, 1, 1), np.float32), np.zeros(1, np.float32)):
        op, outputs = an_object(given, [*[*want][:2], amax, None])
        outputs[2][...] = 0
        op(given["a_tensor"], given["b_tensor"], *outputs[:2], *(given[key] for key in INPUTS[2:]),
           amax_tensor=outputs[2])  # fmt: skip
        assert outputs[2].item() == want["amax_tensor"].item()
    op, outputs = an_object(given, [*[*want][:2], None, None])
    op.compile()
    execute(op, given, outputs)
    assert_same(outputs[:2], [*want][:2])


def test_the_maximum_of_fp8_operands_can_be_asked_for() -> None:
    given = operands()
    want = gemm_srelu_wrapper(**given, d_dtype="float32")
    op, outputs = an_object(given, [*[*want][:2], np.zeros(1, np.float32), None])
    outputs[2][...] = 0
    op.compile()
    execute(op, given, outputs)
    assert outputs[2].item() == want["d_tensor"].max()


def test_alpha_is_the_constructors_unless_given() -> None:
    given = operands()
    want = {alpha: gemm_srelu_wrapper(**given, alpha=alpha) for alpha in (2.0, -1.0)}
    op, outputs = an_object(given, want[2.0], alpha=2.0)
    op.compile()
    for alpha, expected in [(None, 2.0), (-1.0, -1.0), (None, 2.0)]:
        execute(op, given, outputs, alpha=alpha)
        assert_same(outputs, want[expected])


def test_rows_are_dynamic() -> None:
    given = operands(m=32)
    op, _ = an_object(given, gemm_srelu_wrapper(**given))
    op.compile()
    for m in (1, 300, 0):
        other = operands(m=m)
        want = gemm_srelu_wrapper(**other)
        outputs = [fresh_like(x) for x in want]
        execute(op, other, outputs)
        assert_same(outputs, want)


def test_no_rows_leave_the_maximum_alone() -> None:
    given = operands("nvfp4", m=0)
    op, outputs = an_object(given, gemm_srelu_wrapper(**given))
    outputs[2][...] = 3.0
    op.compile()
    execute(op, given, outputs)
    assert outputs[2].item() == 3.0


def test_execute_checks_against_the_samples() -> None:
    given = operands()
    op, outputs = an_object(given, gemm_srelu_wrapper(**given))
    op.compile()
    with pytest.raises(ValueError, match=r"gemm_srelu: .*compiled extent"):
        execute(op, {**given, **operands(k=96)}, outputs)
    with pytest.raises(ValueError, match=r"gemm_srelu: .*compiled dtype"):
        execute(op, operands("mxfp8_e5m2"), outputs)
    with pytest.raises(ValueError, match="gemm_srelu: d_tensor must have dtype"):
        execute(op, given, [outputs[0], outputs[1].astype(np.float32), None, None])
    with pytest.raises(ValueError, match=r"gemm_srelu: .*overlap"):
        execute(op, given, [outputs[0], outputs[0], None, None])


def test_class_takes_descriptors() -> None:
    shapes = {"a": (32, 64, 1), "b": (48, 64, 1), "c": (32, 48, 1), "d": (32, 48, 1)}
    a, b = (TensorDesc.of(E4M3, shapes[key], device="cuda:0") for key in "ab")
    c, d = (TensorDesc.of("bfloat16", shapes[key], device="cuda:0") for key in "cd")
    scales = TensorDesc.of("float8_e8m0fnu", (1, 1, 1, 32, 4, 4), device="cuda:0")
    prob = TensorDesc.of("float32", (32, 1, 1), device="cuda:0")
    op = GemmSrelu(a, b, c, d, scales, scales, prob, sf_vec_size=32, backend="reference")
    assert op.check_support()


# --- torch and JAX --------------------------------------------------------------------------------------------------


NO_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
"""torch's check of the schema cannot compare arrays of fp8."""


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "nvfp4"])
def test_opcheck(name: str) -> None:
    given = operands(name, "torch")
    options = {"sf_vec_size": given["sf_vec_size"]}
    arrays = (*(given[key] for key in INPUTS), None)
    torch.library.opcheck(torch.ops.fe_gemm.gemm_srelu.default, arrays, options, test_utils=NO_SCHEMA)


def test_opcheck_of_bytes() -> None:
    given = operands("mxfp4", "torch")
    for key in ("sfa_tensor", "sfb_tensor"):
        given[key] = given[key].view(torch.uint8)
    arrays = (*(given[key] for key in INPUTS), None)
    torch.library.opcheck(torch.ops.fe_gemm.gemm_srelu.default, arrays, {"sf_vec_size": 32})


@pytest.mark.parametrize(("name", "d_dtype"), [("mxfp8_e4m3", torch.bfloat16), ("mxfp4", torch.float8_e4m3fn)])
def test_compiles_as_one_graph(name: str, d_dtype: Any) -> None:
    given = operands(name, "torch", m=37)
    n = one("torch", 0.3)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(a: Any, b: Any, sfa: Any, sfb: Any, prob: Any) -> Any:
        return tuple(gemm_srelu_wrapper(a, b, sfa, sfb, prob * 2, d_dtype=d_dtype, norm_const_tensor=n, sf_vec_size=32))

    want = gemm_srelu_wrapper(
        **{**given, "prob_tensor": given["prob_tensor"] * 2}, d_dtype=d_dtype, norm_const_tensor=n
    )
    assert_same(model(*(given[key] for key in INPUTS)), want)


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "nvfp4"])
def test_jax_entry_eager_and_jit(name: str) -> None:
    given = operands(name, "jax", whole=False)
    vec = given["sf_vec_size"]

    def run(*arrays: Any) -> Any:
        return gemm_srelu_jax(*arrays, alpha=0.7, sf_vec_size=vec)

    arrays = [given[key] for key in INPUTS]
    eager, jitted = run(*arrays), jax.jit(run)(*arrays)
    assert type(eager) is tuple
    assert len(eager) == 2
    assert_same(eager, jitted)
    assert_same(eager, [*gemm_srelu_wrapper(**given, alpha=0.7)][:2])
    c, d = jax.eval_shape(run, *arrays)
    assert (c.shape, c.dtype, d.shape, d.dtype) == ((32, 48, 1), "bfloat16", (32, 48, 1), "bfloat16")


def test_jax_entry_has_fp8_d_by_request_only() -> None:
    given = operands("mxfp8_e4m3", "jax")
    arrays = [given[key] for key in INPUTS]
    with pytest.raises(ValueError, match="gemm_srelu: norm_const_tensor must be given for an fp8 D"):
        gemm_srelu_jax(*arrays, d_dtype=E4M3, sf_vec_size=32)
    run = lambda *x: gemm_srelu_jax(  # noqa: E731
        *x, d_dtype=E4M3, sf_vec_size=32, norm_const_tensor=one("jax"), all_outputs=True
    )
    want = gemm_srelu_wrapper(**given, d_dtype=E4M3, norm_const_tensor=one("jax"))
    assert_same(run(*arrays), want)
    assert_same(jax.jit(run)(*arrays), want)


def test_fp4_dtypes_of_jax_are_refused() -> None:
    given = operands("nvfp4", "jax")
    with pytest.raises(ValueError, match="gemm_srelu: c_dtype must"):
        gemm_srelu_jax(*(given[key] for key in INPUTS), c_dtype="float4_e2m1fn")


# --- plan and names -------------------------------------------------------------------------------------------------


def test_explicit_kernel_on_the_cpu_is_not_supported() -> None:
    with pytest.raises(NotSupportedError, match="gemm_srelu: backend"):
        call(backend="sm90")


def test_plan_on_hopper_names_a_kernel_or_a_reason() -> None:
    given = [operands()[key] for key in INPUTS]
    plan = OPERATION.plan(OPERATION.bind((*given, None), {"sf_vec_size": 32}), target=HOPPER)
    assert plan.kernel is not None or isinstance(plan.missing, NoKernel)


def test_names_of_the_peer() -> None:
    assert fe_gemm.compat.gemm_srelu_wrapper_sm100 is gemm_srelu_wrapper
    assert fe_gemm.compat.GemmSreluSm100 is GemmSrelu
    assert fe_gemm.compat.gemm_srelu_jax_sm100 is gemm_srelu_jax
