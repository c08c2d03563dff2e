"""The front door of ``gemm_dsrelu`` on the CPU: contract, frameworks, class, workspace, registered op, JAX entry."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from naive_gemm import E4M3, E5M2, FORMATS
from srelu_calls import FRAMEWORKS, assert_same, fresh_like, one, strides_of, upstream
from srelu_calls import operands as factors

import fe_gemm.compat
from fe_gemm import GemmDsrelu, gemm_dsrelu_jax, gemm_dsrelu_wrapper, gemm_srelu_wrapper, reference
from fe_gemm.dense.dsrelu import CONTRACT, OPERATION
from fe_runtime import KernelSpec, NotCompiledError, NotSupportedError
from fe_runtime.device import Device
from fe_runtime.plan import HOPPER, Form, Kernel, NoKernel
from fe_runtime.testing import Call, assert_rejected, invalid_calls, to_framework, to_numpy

KEYS = ["d_tensor", "dprob_tensor", "amax_tensor", "sfd_tensor"]
INPUTS = ("a_tensor", "b_tensor", "c_tensor", "sfa_tensor", "sfb_tensor", "prob_tensor")


def operands(name: str = "mxfp8_e4m3", framework: str = "numpy", c_dtype: str = "bfloat16", **extents: Any) -> Any:
    """Return the inputs by name; ``c_major`` among the extents is the major of C."""
    c_major = extents.pop("c_major", "n")
    given = factors(name, framework, **extents)
    shape = {"m": 32, "n": 48, "batch": 1, **extents}
    return {**given, "c_tensor": upstream(framework, shape["m"], shape["n"], shape["batch"], c_dtype, c_major)}


def call(name: str = "mxfp8_e4m3", framework: str = "numpy", **known: Any) -> Any:
    """Call the wrapper on operands of these extents with these options."""
    extents = {key: known.pop(key) for key in ("m", "n", "k", "batch", "major", "c_major", "c_dtype") if key in known}
    return gemm_dsrelu_wrapper(**{**operands(name, framework, **extents), **known})


def refused(match: str, error: type[Exception] = ValueError, **known: Any) -> None:
    with pytest.raises(error, match=f"gemm_dsrelu: {match}"):
        call(**known)


def by_reference(given: dict[str, Any], **options: Any) -> Any:
    arrays = [given[key] for key in INPUTS]
    return reference.gemm_dsrelu(*arrays, options.pop("norm_const", None), sf_vec_size=given["sf_vec_size"], **options)


# --- results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_framework_gives_the_reference(name: str, framework: str) -> None:
    result = gemm_dsrelu_wrapper(**operands(name, framework, m=37), alpha=0.5, d_dtype="float16")
    assert list(result.keys()) == KEYS
    assert_same(result, by_reference(operands(name, m=37), alpha=0.5, d_dtype="float16"))
    assert (result["amax_tensor"] is not None) == (FORMATS[name][0] == "float4_e2m1fn")
    assert tuple(result["dprob_tensor"].shape) == (37, 1, 1)


@pytest.mark.parametrize("c_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("d_dtype", ["float32", "float16", "bfloat16", E4M3, E5M2])
def test_every_dtype_of_c_and_d(c_dtype: str, d_dtype: str) -> None:
    n = one("torch", 0.3)
    result = call(framework="torch", c_dtype=c_dtype, d_dtype=d_dtype, norm_const_tensor=n)
    want = by_reference(operands(c_dtype=c_dtype), d_dtype=d_dtype, norm_const=one("numpy", 0.3))
    assert_same(result, want)
    assert (result["sfd_tensor"] is not None) == (d_dtype in (E4M3, E5M2))


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("d_major", ["n", "m"])
def test_layout_of_results(d_major: str, framework: str) -> None:
    result = call(framework=framework, batch=3, c_major=d_major, d_major=d_major)
    assert strides_of(result["d_tensor"]) == ((48, 1, 32 * 48) if d_major == "n" else (1, 32, 32 * 48))
    assert to_numpy(result["dprob_tensor"]).flags.c_contiguous
    assert_same(result, call(batch=3))


@pytest.mark.parametrize("m", [1, 127, 300])
def test_tail_rows(m: int) -> None:
    assert_same(call(m=m, batch=2), by_reference(operands(m=m, batch=2)))


def test_container_and_pairs_of_fp4() -> None:
    given = operands("nvfp4", "torch")
    want = gemm_dsrelu_wrapper(**given)
    for key in ("a_tensor", "b_tensor"):
        given[key] = given[key].view(torch.float4_e2m1fn_x2)
    assert_same(gemm_dsrelu_wrapper(**given), want)


def test_gradient_with_a_pitch() -> None:
    given = operands(framework="torch")
    want = gemm_dsrelu_wrapper(**given)
    wide = torch.full((32, 64, 1), torch.nan, dtype=torch.bfloat16)
    wide[:, :48] = given["c_tensor"]
    assert_same(gemm_dsrelu_wrapper(**{**given, "c_tensor": wide[:, :48]}), want)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_rows(framework: str) -> None:
    result = call("nvfp4", framework, m=0)
    assert tuple(result["d_tensor"].shape) == (0, 48, 1)
    assert tuple(result["dprob_tensor"].shape) == (0, 1, 1)
    assert result["amax_tensor"].item() == -np.inf


def test_it_is_the_gradient_of_the_forward() -> None:
    given = operands(c_dtype="float32", whole=False, seed=4)
    c = to_numpy(given["c_tensor"]).astype(np.float64)
    d, dprob, *_ = gemm_dsrelu_wrapper(**given, d_dtype="float32")
    product = {key: value for key, value in given.items() if key != "c_tensor"}
    forward = gemm_srelu_wrapper(**product, c_dtype="float32", d_dtype="float32")
    np.testing.assert_allclose(
        dprob * given["prob_tensor"], (forward["d_tensor"] * c).sum(1, keepdims=True), rtol=1e-5, atol=1e-3
    )
    x, step = forward["c_tensor"].astype(np.float64), 1e-4
    slope = (np.maximum(x + step, 0) ** 2 - np.maximum(x - step, 0) ** 2) / (2 * step) * given["prob_tensor"] * c
    np.testing.assert_allclose(d, slope, rtol=1e-4, atol=1e-2)


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
    assert_rejected(lambda arrays, options: OPERATION(arrays, options), "gemm_dsrelu", bad)


def test_fp8_operands_have_e8m0_scales_per_32() -> None:
    refused("sf_vec_size must be 32 for fp8 operands", sf_vec_size=16)
    scales = {key: np.zeros((1, 1, 1, 32, 4, 4), operands("nvfp4")[key].dtype) for key in ("sfa_tensor", "sfb_tensor")}
    refused("sfa_tensor must hold e8m0 scales for fp8 operands", **scales)


def test_fp4_operands_have_no_e4m3_scales_per_32() -> None:
    refused("sf_vec_size must be .*16 for e4m3 scales", name="nvfp4", sf_vec_size=32)


def test_c_has_the_major_of_d() -> None:
    refused("c_tensor must be contiguous along the dimension that d_major names", c_major="m")
    refused("c_tensor must be contiguous along the dimension that d_major names", d_major="m")


@pytest.mark.parametrize("dtype", [E4M3, "uint8", "float64"])
def test_c_is_wider_than_fp8(dtype: str) -> None:
    dtypes = {"uint8": np.uint8, "float64": np.float64, E4M3: operands()["a_tensor"].dtype}
    refused("c_tensor must have dtype", c_tensor=np.zeros((32, 48, 1), dtypes[dtype]))


def test_c_has_the_shape_of_d() -> None:
    refused("c_tensor must have shape", c_tensor=np.zeros((32, 64, 1), np.float32))
    refused("c_tensor must have a contiguous extent", n=20, c_dtype="bfloat16")


def test_the_accumulator_is_float32() -> None:
    refused("acc_dtype must be", acc_dtype="float16")


@pytest.mark.parametrize("major", ["k", "N", ""])
def test_d_major_is_m_or_n(major: str) -> None:
    refused("d_major must be", d_major=major)


def test_fp8_d_needs_norm_const() -> None:
    refused("norm_const_tensor must be given for an fp8 D", d_dtype=E4M3)


@pytest.mark.parametrize("name", ["nvfp4", "fp4_e8m0_16"])
def test_fp8_d_needs_a_format(name: str) -> None:
    refused("d_dtype must be fp8 only with e8m0 scales", name=name, d_dtype=E4M3, norm_const_tensor=one("numpy"))


@pytest.mark.parametrize("dtype", ["float64", "uint8", "float4_e2m1fn_x2", "nonsense"])
def test_dtypes_of_d(dtype: str) -> None:
    refused("d_dtype must be", d_dtype=dtype)


@pytest.mark.parametrize(("hint", "value", "error"), [
    ("mma_tiler_mn", (64, 128), ValueError), ("cluster_shape_mn", (3, 1), ValueError), ("vector_f32", 1, TypeError),
])  # fmt: skip
def test_hints_are_checked(hint: str, value: Any, error: type[Exception]) -> None:
    refused(f"{hint} must", error=error, **{hint: value})


def test_jax_arrays_have_one_batch_and_rows() -> None:
    refused("a_tensor must have .*JAX arrays.* L = 1", framework="jax", batch=2)
    refused('d_major must be "n" for JAX arrays', framework="jax", d_major="m")
    refused("stream must be None", framework="jax", stream=0)


# --- the class ------------------------------------------------------------------------------------------------------


def an_object(given: dict[str, Any], result: Any, **options: Any) -> tuple[Any, list[Any]]:
    """Return an object for operands and results, and the outputs that it is to write."""
    d, dprob, amax, sfd = (fresh_like(x, 0.0 if number == 1 else None) for number, x in enumerate(result))
    arrays = [*(given[key] for key in INPUTS[:3]), d, dprob, *(given[key] for key in INPUTS[3:])]
    op = GemmDsrelu(*arrays, sample_sfd=sfd, sample_amax=amax, sf_vec_size=given["sf_vec_size"], **options)
    return op, [d, dprob, amax, sfd]


def execute(op: Any, given: dict[str, Any], outputs: list[Any], **options: Any) -> None:
    d, dprob, amax, sfd = outputs
    arrays = [*(given[key] for key in INPUTS[:3]), d, dprob, *(given[key] for key in INPUTS[3:])]
    op.execute(*arrays, sfd_tensor=sfd, amax_tensor=amax, **options)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize(("name", "options"), [
    ("mxfp8_e4m3", {}), ("nvfp4", {"d_dtype": "float32", "d_major": "m"}), ("mxfp4", {"d_dtype": E5M2}),
])  # fmt: skip
def test_class_writes_what_the_wrapper_returns(name: str, options: dict[str, Any], framework: str) -> None:
    given = operands(name, framework, batch=2, c_major=options.get("d_major", "n"))
    n = one(framework, 0.3) if options.get("d_dtype") == E5M2 else None
    want = gemm_dsrelu_wrapper(**given, **options, norm_const_tensor=n, alpha=0.5)
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
def test_class_adds_to_dprob_and_raises_the_maximum(framework: str) -> None:
    given = operands("nvfp4", framework)
    want = gemm_dsrelu_wrapper(**given)
    op, outputs = an_object(given, want)
    outputs[1][...], outputs[2][...] = 8.0, 0.0
    op.compile()
    for times in (1, 2):
        execute(op, given, outputs)
        np.testing.assert_array_equal(to_numpy(outputs[1]), 8 + times * to_numpy(want["dprob_tensor"]))
        assert outputs[2].item() == want["amax_tensor"].item()


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_dprob_of_any_strides_without_overlap(framework: str) -> None:
    given = operands(framework=framework, batch=2)
    want = gemm_dsrelu_wrapper(**given)
    op, outputs = an_object(given, want)
    op.compile()
    memory = to_framework(np.full((2, 3, 32, 2), 7.0, np.float32), framework)
    wide = memory.permute(2, 1, 0, 3) if framework == "torch" else memory.transpose(2, 1, 0, 3)
    outputs[1] = wide[:, 1:2, :, 0]
    outputs[1][...] = 0
    execute(op, given, outputs)
    assert_same(outputs, want)
    assert (to_numpy(memory)[:, [0, 2]] == 7).all()
    outputs[1] = outputs[1][:1].expand(32, 1, 2) if framework == "torch" else np.zeros((33, 1, 2), np.float32)
    with pytest.raises(ValueError, match="gemm_dsrelu: dprob_tensor must have"):
        execute(op, given, outputs)


def test_alpha_is_the_constructors_unless_given() -> None:
    given = operands()
    want = {alpha: gemm_dsrelu_wrapper(**given, alpha=alpha) for alpha in (2.0, -1.0)}
    op, outputs = an_object(given, want[2.0], alpha=2.0)
    op.compile()
    for alpha, expected in [(None, 2.0), (-1.0, -1.0), (None, 2.0)]:
        outputs[1][...] = 0
        execute(op, given, outputs, alpha=alpha)
        assert_same(outputs, want[expected])


def test_fewer_rows_than_the_sample_need_no_workspace_and_more_do() -> None:
    given = operands(framework="torch", m=32)
    op, _ = an_object(given, gemm_dsrelu_wrapper(**given))
    op.compile()
    for m in (1, 32, 0, 300):
        other = operands(framework="torch", m=m)
        want = gemm_dsrelu_wrapper(**other)
        outputs = [fresh_like(x, 0.0) for x in want]
        if m > 32:
            with pytest.raises(ValueError, match=r"gemm_dsrelu: a_tensor must have at most the sample's 32 rows"):
                execute(op, other, outputs)
        size = an_object(other, want)[0].scratch_workspace_bytes()
        workspace = torch.empty(size, dtype=torch.uint8) if m > 32 else None
        execute(op, other, outputs, workspace=workspace)
        assert_same(outputs, want)


@pytest.mark.parametrize(
    "bad", [torch.empty(64, dtype=torch.float32), torch.empty(4096, 4096, dtype=torch.uint8), [0] * 100, "x"]
)
def test_a_workspace_is_a_vector_of_bytes(bad: Any) -> None:
    given = operands(framework="torch")
    op, outputs = an_object(given, gemm_dsrelu_wrapper(**given))
    op.compile()
    with pytest.raises(ValueError, match="gemm_dsrelu: workspace must be a contiguous uint8 vector"):
        execute(op, given, outputs, workspace=bad)
    assert not outputs[1].any()
    execute(op, given, outputs)  # the object is as good as before


def recorded_launch(given: dict[str, Any], m: int | None = None) -> tuple[Any, Any, Any]:
    """Return an object, a launch of it with a kernel that only records, and the list that it records into."""
    op, outputs = an_object(given, gemm_dsrelu_wrapper(**given), alpha=2.0)
    op.compile()
    bound, _ = op._check()
    shapes = [tuple(given[key].shape) for key in INPUTS]
    results = (tuple(outputs[0].shape), tuple(outputs[1].shape), None, None)
    form = Form((*shapes, None), results, ("alpha",), (((3, 1, m or 32), "float32"), ((40,), "bfloat16")))
    seen: list[Any] = []
    kernel = Kernel(KernelSpec.of("fe_gemm.gemm_dsrelu", "nowhere:build", "sm_90a"), form)
    op._call.workspace, op._call.on_stream = None, False
    launch = op._launch(bound, kernel, lambda *operands: seen.extend(operands), None)
    return op, lambda: launch([*(given[key] for key in INPUTS), None], outputs), seen


def test_a_kernel_gets_its_scratch_from_the_buffer_of_the_object() -> None:
    given = operands(framework="torch")
    op, launch, seen = recorded_launch(given)
    launch()
    # The inputs, what dprob holds, D and dprob, the scratch, alpha.
    assert [tuple(x.shape) for x in seen[6:-1]] == [(32, 1, 1), (32, 48, 1), (32, 1, 1), (3, 1, 32), (40,)]
    assert seen[6].data_ptr() == seen[8].data_ptr()
    assert seen[-1] == 2.0
    assert [x.dtype for x in seen[9:11]] == [torch.float32, torch.bfloat16]
    buffer = op._buffers["cpu"]
    assert [x.data_ptr() - buffer.data_ptr() for x in seen[9:11]] == [0, 384]
    first = list(seen)
    seen.clear()
    launch()
    assert op._buffers["cpu"] is buffer  # allocated once
    assert [x.data_ptr() for x in seen[9:11]] == [x.data_ptr() for x in first[9:11]]


def test_a_kernel_gets_its_scratch_from_the_callers_workspace() -> None:
    op, launch, seen = recorded_launch(operands(framework="torch"))
    op._call.workspace = workspace = torch.empty(512, dtype=torch.uint8)
    launch()
    assert [x.data_ptr() - workspace.data_ptr() for x in seen[9:11]] == [0, 384]
    op._call.workspace = workspace[:511]
    with pytest.raises(ValueError, match="workspace must be a contiguous uint8 vector of at least 512 bytes"):
        launch()


def test_a_workspace_may_not_overlap_an_operand() -> None:
    given = operands(framework="torch")
    op, outputs = an_object(given, gemm_dsrelu_wrapper(**given))
    op.compile()
    outputs[0].zero_()
    with pytest.raises(ValueError, match=r"gemm_dsrelu: workspace must not overlap .* got overlap with d_tensor"):
        execute(op, given, outputs, workspace=outputs[0].permute(2, 0, 1).reshape(-1).view(torch.uint8))
    assert not outputs[0].any()


def test_a_workspace_is_not_kept() -> None:
    given = operands(framework="torch")
    op, outputs = an_object(given, gemm_dsrelu_wrapper(**given))
    op.compile()
    workspace = torch.empty(1 << 16, dtype=torch.uint8)
    alive = weakref.ref(workspace)
    execute(op, given, outputs, workspace=workspace)
    del workspace
    assert alive() is None


def test_each_device_has_its_own_buffer() -> None:
    given = operands(framework="torch")
    op, _ = an_object(given, gemm_dsrelu_wrapper(**given))
    bound, _ = op._check()
    here, there = op._provide(64, bound), op._provide(64, replace(bound, device=Device("meta")))
    assert (here.device.type, there.device.type) == ("cpu", "meta")
    assert op._provide(64, bound) is here


def test_execute_checks_against_the_samples() -> None:
    given = operands()
    op, outputs = an_object(given, gemm_dsrelu_wrapper(**given))
    op.compile()
    with pytest.raises(ValueError, match="gemm_dsrelu: c_tensor must have the compiled dtype"):
        execute(op, operands(c_dtype="float32"), outputs)
    with pytest.raises(ValueError, match="gemm_dsrelu: dprob_tensor must have shape"):
        execute(op, given, [outputs[0], np.zeros((32, 2, 1), np.float32), None, None])
    with pytest.raises(ValueError, match=r"gemm_dsrelu: .*overlap"):
        execute(op, given, [given["c_tensor"], *outputs[1:]])


# --- torch and JAX --------------------------------------------------------------------------------------------------


def test_opcheck() -> None:
    given = operands("mxfp4", "torch")
    for key in ("sfa_tensor", "sfb_tensor"):  # bytes: torch's check of the schema cannot compare arrays of fp8
        given[key] = given[key].view(torch.uint8)
    arrays = (*(given[key] for key in INPUTS), None)
    torch.library.opcheck(torch.ops.fe_gemm.gemm_dsrelu.default, arrays, {"sf_vec_size": 32})


@pytest.mark.parametrize(("name", "d_dtype"), [("mxfp8_e4m3", torch.bfloat16), ("mxfp4", torch.float8_e4m3fn)])
def test_compiles_as_one_graph(name: str, d_dtype: Any) -> None:
    given = operands(name, "torch", m=37)
    n = one("torch", 0.3)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(a: Any, b: Any, c: Any, sfa: Any, sfb: Any, prob: Any) -> Any:
        return tuple(
            gemm_dsrelu_wrapper(a, b, c * 2, sfa, sfb, prob, d_dtype=d_dtype, norm_const_tensor=n, sf_vec_size=32)
        )

    want = gemm_dsrelu_wrapper(**{**given, "c_tensor": given["c_tensor"] * 2}, d_dtype=d_dtype, norm_const_tensor=n)
    assert_same(model(*(given[key] for key in INPUTS)), want)


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "nvfp4"])
def test_jax_entry_eager_and_jit(name: str) -> None:
    given = operands(name, "jax", whole=False)
    vec = given["sf_vec_size"]

    def run(*arrays: Any) -> Any:
        return gemm_dsrelu_jax(*arrays, alpha=0.7, sf_vec_size=vec)

    arrays = [given[key] for key in INPUTS]
    eager, jitted = run(*arrays), jax.jit(run)(*arrays)
    assert type(eager) is tuple
    assert len(eager) == 2
    assert_same(eager, jitted)
    assert_same(eager, [*gemm_dsrelu_wrapper(**given, alpha=0.7)][:2])
    d, dprob = jax.eval_shape(run, *arrays)
    assert (d.shape, d.dtype, dprob.shape, dprob.dtype) == ((32, 48, 1), "bfloat16", (32, 1, 1), "float32")


def test_jax_entry_has_fp8_d_by_request_only() -> None:
    given = operands("mxfp8_e4m3", "jax")
    arrays = [given[key] for key in INPUTS]
    with pytest.raises(ValueError, match="gemm_dsrelu: norm_const_tensor must be given for an fp8 D"):
        gemm_dsrelu_jax(*arrays, d_dtype=E4M3, sf_vec_size=32)
    run = lambda *x: gemm_dsrelu_jax(  # noqa: E731
        *x, d_dtype=E4M3, sf_vec_size=32, norm_const_tensor=one("jax"), all_outputs=True
    )
    assert_same(run(*arrays), gemm_dsrelu_wrapper(**given, d_dtype=E4M3, norm_const_tensor=one("jax")))


# --- plan and names -------------------------------------------------------------------------------------------------


def test_explicit_kernel_on_the_cpu_is_not_supported() -> None:
    with pytest.raises(NotSupportedError, match="gemm_dsrelu: backend"):
        call(backend="sm90")


def test_plan_on_hopper_names_a_kernel_or_a_reason() -> None:
    given = [operands()[key] for key in INPUTS]
    plan = OPERATION.plan(OPERATION.bind((*given, None), {"sf_vec_size": 32}), target=HOPPER)
    assert plan.kernel is not None or isinstance(plan.missing, NoKernel)


def test_names_of_the_peer() -> None:
    assert fe_gemm.compat.gemm_dsrelu_wrapper_sm100 is gemm_dsrelu_wrapper
    assert fe_gemm.compat.GemmDsreluSm100 is GemmDsrelu
    assert fe_gemm.compat.gemm_dsrelu_jax_sm100 is gemm_dsrelu_jax
