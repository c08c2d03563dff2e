"""The front door of ``grouped_gemm`` on the CPU: forms, weight modes, contract, class, registered op, JAX entry."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
from grouped_arguments import FORMS, FRAMEWORKS, MODES, Forward, address
from naive_grouped import BF16

import fe_gemm
from fe_gemm import GroupedGemm, compat, grouped_gemm_jax, grouped_gemm_wrapper
from fe_gemm.grouped.unfused import CONTRACT, OPERATION
from fe_runtime import NotCompiledError, NotSupportedError, TensorDesc
from fe_runtime.plan import HOPPER
from fe_runtime.testing import Call, assert_rejected, invalid_calls, to_framework, to_numpy

STRIDED = ("numpy", "torch")


def call(framework: str = "numpy", **changed: Any) -> Any:
    return grouped_gemm_wrapper(**{**Forward().arguments(framework), **changed})


def refused(match: str, error: type[Exception] = ValueError, framework: str = "numpy", **changed: Any) -> None:
    with pytest.raises(error, match=f"grouped_gemm: {match}"):
        call(framework, **changed)


# --- results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("with_bias", [False, True])
def test_every_framework_mode_and_form_of_a(with_bias: bool, rank: int, mode: str, framework: str) -> None:
    p = Forward()
    given = p.arguments(framework, mode, rank=rank)
    bias = p.bias_in(framework) if with_bias else None
    result = grouped_gemm_wrapper(**given, bias_tensor=bias, generate_c=True, c_dtype="float32", d_dtype="float16")
    assert list(result.keys()) == ["d_tensor", "c_tensor"]
    assert {str(x.dtype).removeprefix("torch.") for x in result} == {"float16", "float32"}
    for got, want in zip(result, p.expected(with_bias), strict=True):
        assert tuple(got.shape) == ((64, 32) if rank == 2 else (64, 32, 1))
        p.assert_is(got, want)


@pytest.mark.parametrize("framework", STRIDED)
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_dense_weights(form: str, framework: str) -> None:
    p = Forward()
    for rank in (2, 3):
        p.assert_is(grouped_gemm_wrapper(**p.arguments(framework, "dense", form, rank))["d_tensor"], p.expected()[0])


@pytest.mark.parametrize("framework", STRIDED)
def test_legacy_weights_by_columns_are_told_by_their_strides(framework: str) -> None:
    p = Forward()
    given = {**p.arguments(framework, "dense", "legacy by columns"), "b_major": "k"}
    p.assert_is(grouped_gemm_wrapper(**given)["d_tensor"], p.expected()[0])


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("form", ["canonical", "by columns"])
def test_forms_that_jax_has_too(form: str, framework: str) -> None:
    p = Forward()
    p.assert_is(grouped_gemm_wrapper(**p.arguments(framework, "dense", form))["d_tensor"], p.expected()[0])


@pytest.mark.parametrize("framework", STRIDED)
def test_cubes_are_no_ambiguity(framework: str) -> None:
    """E = N = K: only strides tell the forms apart."""
    p = Forward((3, 0, 5, 1, 0, 2, 4, 1), n=8, k=8)
    for form in FORMS:
        p.assert_is(grouped_gemm_wrapper(**p.arguments(framework, "dense", form))["d_tensor"], p.expected()[0])


@pytest.mark.parametrize("framework", STRIDED)
def test_one_expert_in_either_form(framework: str) -> None:
    p = Forward((60,))
    for form in FORMS:
        p.assert_is(grouped_gemm_wrapper(**p.arguments(framework, "dense", form))["d_tensor"], p.expected()[0])


def test_strides_of_legacy_results() -> None:
    p = Forward()
    d, c = grouped_gemm_wrapper(**p.arguments("torch", rank=3), generate_c=True)
    assert d.stride() == c.stride() == (32, 1, 64 * 32)
    d, _ = grouped_gemm_wrapper(**p.arguments("torch", rank=2))
    assert d.stride() == (32, 1)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    "sizes",
    [(0, 5, 0, 0), (0, 0, 0, 0), (64, 0, 0, 0), (0, 0, 0, 64), (1, 62, 0, 1), (17, 1, 30, 2)],
    ids=["empty around", "all empty", "first has all", "last has all", "one has nearly all", "none aligned"],
)
def test_groups_of_any_size(sizes: Any, framework: str) -> None:
    p = Forward(sizes)
    for mode in MODES[:2]:
        p.assert_is(grouped_gemm_wrapper(**p.arguments(framework, mode))["d_tensor"], p.expected()[0])


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes_of_the_bias(dtype: str, framework: str) -> None:
    p = Forward()
    bias = p.bias_in(framework, BF16 if dtype == "bfloat16" else dtype)
    p.assert_is(call(framework, bias_tensor=bias, d_dtype="float32")["d_tensor"], p.expected(True)[0])


def test_results_default_to_bfloat16_and_dtypes_come_in_any_spelling() -> None:
    assert call("torch")["d_tensor"].dtype == torch.bfloat16
    for dtype in (torch.float16, np.float16, "float16", np.dtype("float16")):
        assert call("torch", d_dtype=dtype)["d_tensor"].dtype == torch.float16


def test_float16_overflows_to_infinity() -> None:
    p = Forward()
    p.alpha[:] = 2.0**20
    d = grouped_gemm_wrapper(**p.arguments(), d_dtype="float16")[0][: p.off[-1]].astype(np.float64)
    exact = p.expected()[0][: p.off[-1]]
    assert (np.abs(exact[exact != 0]) > 65520).all()
    np.testing.assert_array_equal(d, np.where(exact == 0, 0, np.copysign(np.inf, exact)))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rows_that_nobody_owns_change_nothing(framework: str) -> None:
    p = Forward()
    want = to_numpy(grouped_gemm_wrapper(**p.arguments(framework))["d_tensor"])[: p.off[-1]]
    p.a[p.off[-1] :], p.prob[p.off[-1] :] = 1e30, np.inf
    got = to_numpy(grouped_gemm_wrapper(**p.arguments(framework))["d_tensor"])[: p.off[-1]]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("mode", MODES)
def test_no_rows(mode: str, framework: str) -> None:
    p = Forward((0, 0, 0, 0), rows=0)
    for rank in (2, 3):
        d, c = grouped_gemm_wrapper(**p.arguments(framework, mode, rank=rank), generate_c=True)
        assert tuple(d.shape) == tuple(c.shape) == ((0, 32) if rank == 2 else (0, 32, 1))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_addresses_repeat_and_come_in_any_order(framework: str) -> None:
    p = Forward()
    p.b[3] = p.b[0]
    given = p.arguments(framework, "discrete")
    order = [2, 1, 0]
    kept = [to_framework(np.ascontiguousarray(p.b[e]), framework) for e in order]
    table = np.array([address(kept[order.index(e)]) for e in (0, 1, 2, 0)], np.int64)
    given["b_ptrs"] = to_framework(table.view(np.uint8) if framework == "jax" else table, framework)
    p.assert_is(grouped_gemm_wrapper(**given)["d_tensor"], p.expected()[0])


def test_1024_experts() -> None:
    sizes = [0] * 1024
    sizes[3], sizes[500], sizes[1023] = 2, 5, 1
    p = Forward(tuple(sizes), rows=16, n=8, k=8)
    p.assert_is(grouped_gemm_wrapper(**p.arguments("torch"))["d_tensor"], p.expected()[0])


# --- buffers of the caller ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", STRIDED)
@pytest.mark.parametrize("rank", [2, 3])
def test_buffers_are_written_and_returned(rank: int, framework: str) -> None:
    p = Forward()
    given = p.arguments(framework, rank=rank)
    c, d = (fresh(framework, rank, dtype) for dtype in ("float32", "float16"))
    options = {"generate_c": True, "c_dtype": "float32", "d_dtype": "float16"}
    result = grouped_gemm_wrapper(**given, **options, c_tensor=c, d_tensor=d)
    assert list(result.keys()) == ["d_tensor", "c_tensor"]
    assert result["c_tensor"] is c
    assert result["d_tensor"] is d
    for got, want in zip(result, p.expected(), strict=True):
        p.assert_is(got, want)
    d, c = grouped_gemm_wrapper(**given, **options, d_tensor=d)
    p.assert_is(c, p.expected()[1])


def fresh(framework: str, rank: int = 2, dtype: str = "bfloat16", rows: int = 64, n: int = 32) -> Any:
    """Return a buffer full of 7 in the form of A."""
    made = np.full((rows, n), 7).astype(BF16 if dtype == "bfloat16" else dtype)
    array = to_framework(made, framework)
    return array[:, :, None] if rank == 3 else array


def test_c_is_left_alone_unless_asked_for() -> None:
    c = fresh("torch")
    result = call("torch", c_tensor=c)
    assert result["c_tensor"] is None
    assert bool((c == 7).all())
    refused("c_tensor must have dtype", framework="torch", c_tensor=fresh("torch", dtype="float32"))


@pytest.mark.parametrize("name", ["c_tensor", "d_tensor"])
def test_buffers_must_be_as_the_results(name: str) -> None:
    for wrong, text in [
        (fresh("numpy", rows=63), "have shape"),
        (fresh("numpy", 3), "have shape"),
        (fresh("numpy", dtype="float32"), "have dtype"),
        (fresh("numpy", rows=32, n=64).T, "be contiguous"),
        (fresh("torch"), "come from the framework"),
    ]:
        for generate_c in (False, True):
            refused(f"{name} must {text}", **{name: wrong}, generate_c=generate_c)


def test_buffers_must_not_overlap() -> None:
    p = Forward(n=48)
    given = p.arguments()
    with pytest.raises(ValueError, match="grouped_gemm: d_tensor must not share memory with a_tensor"):
        grouped_gemm_wrapper(**given, d_tensor=given["a_tensor"])
    d = fresh("numpy", n=48)
    with pytest.raises(ValueError, match=r"grouped_gemm: c_tensor must not share memory with d_tensor"):
        grouped_gemm_wrapper(**given, d_tensor=d, c_tensor=d, generate_c=True)


# --- what is refused: one test for each row of the contract ----------------------------------------------------------


OPTIONS = {"generate_c": True, "c_dtype": "float32", "d_dtype": "float32", "b_major": "k"}


def example(mode: str) -> Call:
    p = EXAMPLES[mode]
    given = p.arguments("numpy", mode)
    arrays = [given.get(name) for name in CONTRACT.input_names]
    arrays[CONTRACT.input_names.index("bias_tensor")] = np.ascontiguousarray(p.bias.T)
    named = {"n": p.n, "b_dtype": "bfloat16"} if mode == "discrete" else {}
    return Call(tuple(arrays), {**OPTIONS, **named})


EXAMPLES = {"dense": Forward(), "discrete": Forward()}


@pytest.mark.parametrize(
    "bad",
    [bad for mode in EXAMPLES for bad in invalid_calls(CONTRACT, example(mode))],
    ids=lambda bad: bad.id,
)
def test_invalid_call_is_rejected(bad: Any) -> None:
    assert_rejected(lambda arrays, options: OPERATION(arrays, options), "grouped_gemm", bad)


def test_both_or_neither_weight_mode() -> None:
    p = Forward()
    discrete = p.arguments("numpy", "discrete")
    refused("b_tensor must be given, or b_ptrs", b_tensor=None)
    refused("b_tensor must be given, or b_ptrs .*both", **{k: discrete[k] for k in ("b_ptrs", "n", "b_dtype")})


def test_dense_weights_forbid_n_and_b_dtype() -> None:
    refused("n must be given with b_ptrs, and only then", n=32)
    refused("b_dtype must be given with b_ptrs, and only then", b_dtype="bfloat16")


def test_discrete_weights_need_n_and_b_dtype() -> None:
    discrete = {"b_tensor": None, **Forward().arguments("numpy", "discrete")}
    refused("n must be given with b_ptrs", **{**discrete, "n": None})
    refused("b_dtype must be given with b_ptrs", **{**discrete, "b_dtype": None})
    refused("b_dtype must be the dtype of a_tensor", **{**discrete, "b_dtype": "float16"})
    refused("n must be positive", **{**discrete, "n": 0})


def test_tables_of_addresses() -> None:
    discrete = {"b_tensor": None, **Forward().arguments("numpy", "discrete")}
    addresses = discrete["b_ptrs"]
    refused("b_ptrs must have shape", **{**discrete, "b_ptrs": addresses[:3]})
    refused("b_ptrs must have shape", **{**discrete, "b_ptrs": addresses[:, None]})
    refused("b_ptrs must have dtype", **{**discrete, "b_ptrs": addresses.astype(np.int32)})
    refused("b_ptrs must hold int64", **{**discrete, "b_ptrs": addresses.view(np.uint8)})
    refused("b_ptrs must be contiguous", **{**discrete, "b_ptrs": np.repeat(addresses, 2)[::2]})
    in_jax = {"b_tensor": None, **Forward().arguments("jax", "discrete")}
    refused("b_ptrs must have shape", framework="jax", **{**in_jax, "b_ptrs": in_jax["b_ptrs"][:31]})


def test_depths_must_agree() -> None:
    refused("b_tensor must have shape", b_tensor=Forward(k=56).b)


@pytest.mark.parametrize("name", ["padded_offsets", "alpha_tensor", "b_tensor"])
def test_expert_counts_must_agree(name: str) -> None:
    other = Forward((5, 0, 40, 3, 1)).arguments()
    refused("(alpha_tensor|b_tensor) must have shape", **{name: other[name]})
    refused("bias_tensor must have shape", bias_tensor=Forward((5, 1, 1)).bias)


def test_more_than_1024_experts() -> None:
    p = Forward((0,) * 1025, n=8, k=8)
    refused("padded_offsets must have from 1 to 1024 entries", **p.arguments())
    none = {"padded_offsets": np.zeros(0, np.int32), "alpha_tensor": np.zeros(0, np.float32)}
    refused("padded_offsets must have from 1 to 1024", **none, b_tensor=np.zeros((0, 32, 48), BF16))


@pytest.mark.parametrize("dtype", ["float16", "float32", "int32"])
def test_operands_must_be_bfloat16(dtype: str) -> None:
    p = Forward((16, 16, 16, 16))
    refused("a_tensor must have dtype bfloat16", a_tensor=p.a.astype(np.float32).astype(dtype))
    refused("b_tensor must have dtype bfloat16", b_tensor=p.b.astype(dtype))
    wrong = np.float64 if dtype == "float32" else dtype
    refused("alpha_tensor must have dtype float32", alpha_tensor=p.alpha.astype(wrong))
    refused("prob_tensor must have dtype float32", prob_tensor=p.prob.astype(wrong))
    refused("padded_offsets must have dtype int32", padded_offsets=p.off.astype(np.int64))


def test_prob_is_required_despite_its_default() -> None:
    refused("prob_tensor must be given", prob_tensor=None)


@pytest.mark.parametrize("name", ["a_tensor", "padded_offsets", "alpha_tensor"])
def test_missing_tensors(name: str) -> None:
    refused(f"{name} must be an array", **{name: None})


def test_prob_must_have_one_number_for_each_row() -> None:
    for shape in [(63,), (64, 1), (1, 64, 1), ()]:
        refused("prob_tensor must have shape", prob_tensor=np.ones(shape, np.float32))


def test_strides() -> None:
    p = Forward()
    wide = np.zeros((64, 96), BF16)
    refused("a_tensor must be contiguous", a_tensor=wide[:, :48])
    refused("a_tensor must be contiguous", a_tensor=np.asfortranarray(p.a))
    refused("prob_tensor must be contiguous", prob_tensor=np.ones(128, np.float32)[::2])
    refused("b_tensor must be contiguous as", b_tensor=np.zeros((4, 32, 96), BF16)[:, :, :48])
    refused("b_tensor must be contiguous as", b_tensor=np.zeros((4, 64, 48), BF16)[:, :32])
    refused('b_tensor must be stored by columns for b_major="n"', b_tensor=p.b.transpose(1, 2, 0), b_major="n")
    refused(r"bias_tensor must have shape \(N, E\) and strides \(1, N\)", bias_tensor=np.ascontiguousarray(p.bias))


def test_shapes_of_the_bias() -> None:
    discrete = {"b_tensor": None, **Forward().arguments("numpy", "discrete")}
    refused("bias_tensor must have N rows", **discrete, bias_tensor=Forward(n=40).bias)
    refused("bias_tensor must have shape", bias_tensor=Forward(n=40).bias)
    refused("bias_tensor must have shape", bias_tensor=np.zeros(32, np.float32))


def test_extents() -> None:
    refused("a_tensor must have K > 0", **Forward(k=0).arguments())
    refused("a_tensor must have a contiguous extent .*multiple of 16 bytes", **Forward(k=44).arguments())
    refused("b_tensor must have N > 0, a multiple of 8", **Forward(n=36).arguments())
    refused("b_tensor must have N > 0, a multiple of 8", **Forward(n=0).arguments())
    discrete = {"b_tensor": None, **Forward(n=36).arguments("numpy", "discrete")}
    refused("b_tensor must have N > 0, a multiple of 8", **discrete)


@pytest.mark.parametrize("name", ["c_dtype", "d_dtype"])
@pytest.mark.parametrize("dtype", ["float64", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2", "int32", "nonsense"])
def test_dtypes_of_results(dtype: str, name: str) -> None:
    refused(f"{name} must be", **{name: dtype})


def test_the_accumulator_is_float32() -> None:
    refused("acc_dtype must be", acc_dtype="float16")
    assert call(acc_dtype="float32") is not None


def test_b_major_is_k_or_n() -> None:
    refused("b_major must be", b_major="m")


@pytest.mark.parametrize(("hint", "value", "error"), [
    ("mma_tiler_mn", (64, 128), ValueError), ("mma_tiler_mn", (128, 48), ValueError),
    ("mma_tiler_mn", (128, 288), ValueError), ("mma_tiler_mn", 128, TypeError), ("mma_tiler_mn", (128,), ValueError),
    ("cluster_shape_mn", (3, 1), ValueError), ("cluster_shape_mn", (2, 16), ValueError),
    ("cluster_shape_mn", (1, 1), ValueError), ("cluster_shape_mn", (4, 1), ValueError),
    ("cluster_shape_mn", (0, 1), ValueError), ("vector_f32", 1, TypeError), ("use_dynamic_sched", None, TypeError),
    ("m_aligned", 64, ValueError), ("m_aligned", True, TypeError), ("cd_major", "m", ValueError),
    ("cd_major", 1, TypeError), ("generate_c", 1, TypeError),
])  # fmt: skip
def test_hints_are_checked(hint: str, value: Any, error: type[Exception]) -> None:
    refused(f"{hint} must", error=error, **{hint: value})


def test_hints_change_nothing() -> None:
    want = call()["d_tensor"].tobytes()
    for hints in [
        {"mma_tiler_mn": (128, 32), "cluster_shape_mn": (2, 8), "vector_f32": True},
        {"mma_tiler_mn": [256, 224], "cluster_shape_mn": (2, 1), "use_dynamic_sched": True, "m_aligned": 128},
    ]:
        assert call(**hints)["d_tensor"].tobytes() == want


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_malformed_offsets_are_named(framework: str) -> None:
    for off, text in [([5, 4, 40, 48], "never decrease"), ([-1, 0, 1, 2], "start at 0"), ([5, 6, 7, 65], "end within")]:
        offsets = to_framework(np.array(off, np.int32), framework)
        refused(f"padded_offsets must .*{text}", framework=framework, padded_offsets=offsets)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_null_addresses_are_named(framework: str) -> None:
    p = Forward()
    given = p.arguments(framework, "discrete")
    addresses = np.array([address(x) for x in p.kept], np.int64)
    addresses[2] = 0
    given["b_ptrs"] = to_framework(addresses.view(np.uint8) if framework == "jax" else addresses, framework)
    refused("b_ptrs must hold addresses that are not null.*0 at entry 2", framework=framework, b_tensor=None, **given)


def test_frameworks_are_not_mixed() -> None:
    refused("prob_tensor must come from the framework", prob_tensor=torch.ones(64))
    refused("a_tensor must be an array", error=TypeError, a_tensor=[[1.0]])


def test_devices_are_not_mixed() -> None:
    refused(
        "b_tensor must be on the device", framework="torch", b_tensor=torch.zeros(4, 32, 48, device="meta").bfloat16()
    )


def test_what_jax_has_no_place_for() -> None:
    refused("current_stream must be None", framework="jax", current_stream=0)
    refused("d_tensor must be None for JAX", framework="jax", d_tensor=fresh("jax"))


# --- the class ------------------------------------------------------------------------------------------------------


def an_object(given: dict[str, Any], rank: int = 2, **options: Any) -> Any:
    """Return an object for the arguments of the wrapper, of canonical results in the form of A."""
    framework = "torch" if isinstance(given["a_tensor"], torch.Tensor) else "numpy"
    c, d = fresh(framework, rank, "float32"), fresh(framework, rank)
    weights = {"sample_b": given["b_tensor"]} if "b_tensor" in given else {}
    if not weights:
        weights = {"num_experts": 4, "b_shape": (given["n"], 48), "b_dtype": given["b_dtype"]}
    op = GroupedGemm(
        given["a_tensor"], c, d, given["padded_offsets"], given["alpha_tensor"], sample_prob=given["prob_tensor"],
        b_major=given["b_major"], **{**weights, **options},
    )  # fmt: skip
    return op, c, d


def execute(op: Any, given: dict[str, Any], c: Any, d: Any, **others: Any) -> None:
    known = {key: given.get(key) for key in ("b_tensor", "b_ptrs", "prob_tensor")}
    op.execute(given["a_tensor"], c, d, given["padded_offsets"], given["alpha_tensor"], **{**known, **others})


@pytest.mark.parametrize("framework", STRIDED)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rank", [2, 3])
def test_class_writes_what_the_wrapper_returns(rank: int, mode: str, framework: str) -> None:
    p = Forward()
    given = p.arguments(framework, mode, rank=rank)
    op, c, d = an_object(given, rank, generate_c=True)
    with pytest.raises(NotCompiledError):
        execute(op, given, c, d)
    assert op.check_support() is True
    op.compile()
    op.compile()
    assert execute(op, given, c, d) is None
    for got, want in zip((d, c), p.expected(), strict=True):
        p.assert_is(got, want)


@pytest.mark.parametrize("form", FORMS)
def test_class_fixes_the_form_of_weights(form: str) -> None:
    p = Forward()
    given = p.arguments("torch", "dense", form)
    op, c, d = an_object(given)
    op(given["a_tensor"], c, d, given["padded_offsets"], given["alpha_tensor"], given["b_tensor"],
       prob_tensor=given["prob_tensor"])  # fmt: skip
    p.assert_is(d, p.expected()[0])
    for other in FORMS:
        if other != form:
            weights = p.arguments("torch", "dense", other)["b_tensor"]
            with pytest.raises(ValueError, match="grouped_gemm: b_tensor must"):
                execute(op, {**given, "b_tensor": weights}, c, d)


def test_class_fixes_the_form_of_a() -> None:
    p = Forward()
    given, other = p.arguments("torch"), p.arguments("torch", rank=3)
    op, c, d = an_object(given)
    op.compile()
    with pytest.raises(ValueError, match="grouped_gemm: a_tensor must have the compiled rank 2"):
        execute(op, other, fresh("torch", 3, "float32"), fresh("torch", 3))
    with pytest.raises(ValueError, match="grouped_gemm: prob_tensor must have the compiled rank 1"):
        execute(op, {**given, "prob_tensor": other["prob_tensor"]}, c, d)
    with pytest.raises(ValueError, match="grouped_gemm: d_tensor must have shape"):
        execute(op, given, c, fresh("torch", 3))


def test_class_leaves_c_alone_and_needs_it() -> None:
    given = Forward().arguments("torch")
    op, c, d = an_object(given)
    op.compile()
    execute(op, given, c, d)
    assert bool((c == 7).all())
    assert op.check_support()
    for wrong in (None, fresh("torch", rows=63), fresh("torch", 3), fresh("numpy")):
        arrays = (given["a_tensor"], wrong, d, given["padded_offsets"], given["alpha_tensor"], given["b_tensor"])
        with pytest.raises(ValueError, match="grouped_gemm: c_tensor must"):
            GroupedGemm(*arrays, sample_prob=given["prob_tensor"]).check_support()


def test_bias_is_there_as_its_sample_was() -> None:
    p = Forward()
    given, bias = p.arguments("torch"), p.bias_in("torch")
    with_bias, c, d = an_object(given, sample_bias=bias)
    with_bias.compile()
    execute(with_bias, given, c, d, bias_tensor=bias)
    p.assert_is(d, p.expected(True)[0])
    without, *_ = an_object(given)
    without.compile()
    for op, live in [(with_bias, None), (without, bias)]:
        with pytest.raises(ValueError, match="grouped_gemm: bias_tensor must"):
            execute(op, given, c, d, bias_tensor=live)


def test_rows_are_dynamic_and_nothing_else() -> None:
    p = Forward()
    given = p.arguments()
    op, _, _ = an_object(given)
    op.compile()
    for rows in (48, 300, 0):
        other = Forward((5, 0, 40, 3) if rows else (0, 0, 0, 0), rows=rows)
        c, d = fresh("numpy", 2, "float32", rows), fresh("numpy", rows=rows)
        execute(op, other.arguments(), c, d)
        other.assert_is(d, other.expected()[0])
    with pytest.raises(ValueError, match="compiled extent"):
        execute(op, Forward(k=56).arguments(), *(fresh("numpy", dtype=dtype) for dtype in ("float32", "bfloat16")))
    with pytest.raises(ValueError, match="d_tensor must have dtype"):
        execute(op, given, fresh("numpy", dtype="float32"), fresh("numpy", dtype="float16"))


def test_class_needs_exactly_one_weight_mode() -> None:
    given = Forward().arguments()
    for weights in (
        {"sample_b": None},
        {"num_experts": 4},
        {"sample_b": None, "num_experts": 4, "b_shape": (32, 48)},
        {"sample_b": None, "b_shape": (32, 48), "b_dtype": "bfloat16"},
    ):
        op, *_ = an_object(given, **weights)
        with pytest.raises(ValueError, match="grouped_gemm: sample_b must be given, or num_experts"):
            op.check_support()


def test_shape_of_weights_behind_addresses() -> None:
    given = Forward().arguments("numpy", "discrete")
    for shape, text in [((32, 40), "K = 48"), ((32,), "be"), ((32, 48, 2), "be"), ((36, 48), "")]:
        op, *_ = an_object(given, b_shape=shape)
        with pytest.raises(ValueError, match=f"grouped_gemm: .*{text}"):
            op.check_support()
    assert an_object(given, b_shape=(32, 48, 1))[0].check_support()
    op, *_ = an_object(given, num_experts=5)
    with pytest.raises(ValueError, match="grouped_gemm: b_ptrs must have shape"):
        op.check_support()


def test_class_checks_hints() -> None:
    op, *_ = an_object(Forward().arguments(), mma_tiler_mn=(64, 64))
    with pytest.raises(ValueError, match="grouped_gemm: mma_tiler_mn must"):
        op.check_support()


def test_class_takes_descriptors() -> None:
    def desc(shape: Any, dtype: str = "bfloat16", stride: Any = None) -> TensorDesc:
        return TensorDesc.of(dtype, shape, stride, device="cuda:0")

    d, off, alpha = desc((64, 32, 1)), desc((4,), "int32"), desc((4,), "float32")
    for weights in (
        {"sample_b": desc((4, 32, 48))},
        {"sample_b": desc((32, 48, 4), stride=(48, 1, 32 * 48))},
        {"num_experts": 4, "b_shape": (32, 48), "b_dtype": "bfloat16"},
    ):
        samples = (desc((64, 48, 1)), d, d, off, alpha)
        op = GroupedGemm(*samples, sample_prob=desc((64, 1, 1), "float32"), **weights, backend="reference")
        assert op.check_support()


# --- torch and JAX --------------------------------------------------------------------------------------------------


def test_results_require_no_gradient() -> None:
    given = Forward().arguments("torch")
    given["a_tensor"] = given["a_tensor"].nan_to_num().requires_grad_()
    assert not grouped_gemm_wrapper(**given)["d_tensor"].requires_grad


@pytest.mark.parametrize("mode", MODES[:2])
@pytest.mark.parametrize("rank", [2, 3])
def test_opcheck(rank: int, mode: str) -> None:
    p = Forward((5, 0, 40, 19))
    given = p.arguments("torch", mode, rank=rank)
    arrays = [given.get(name) for name in CONTRACT.input_names]
    options = {"n": given.get("n"), "b_dtype": given.get("b_dtype"), "generate_c": True}
    torch.library.opcheck(torch.ops.fe_gemm.grouped_gemm.default, tuple(arrays), options)


@pytest.mark.parametrize("form", ["canonical", "legacy by columns"])
def test_compiles_as_one_graph(form: str) -> None:
    p = Forward()
    given = p.arguments("torch", "dense", form)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(a: Any, off: Any, alpha: Any, b: Any, prob: Any, bias: Any, d: Any = None) -> Any:
        options = {"b_major": given["b_major"], "prob_tensor": prob, "bias_tensor": bias, "d_tensor": d}
        return grouped_gemm_wrapper(a, off, alpha, b, **options)["d_tensor"]

    arrays = [given[key] for key in ("a_tensor", "padded_offsets", "alpha_tensor", "b_tensor", "prob_tensor")]
    p.assert_is(model(*arrays, p.bias_in("torch")), p.expected(True)[0])
    d = fresh("torch")
    model(*arrays, p.bias_in("torch"), d)
    p.assert_is(d, p.expected(True)[0])


@pytest.mark.parametrize(("rank", "mode"), [(2, "dense"), (3, "discrete"), (2, "discrete by columns")])
def test_jax_entry_eager_and_jit(rank: int, mode: str) -> None:
    p = Forward()
    given = p.arguments("jax", mode, rank=rank)
    names = [name for name in ("a_tensor", "padded_offsets", "alpha_tensor", "b_ptrs", "b_tensor", "prob_tensor")
             if name in given]  # fmt: skip

    def run(bias: Any, *arrays: Any) -> Any:
        static = {"n": given.get("n"), "b_major": given["b_major"], "generate_c": True, "c_dtype": "float32"}
        return grouped_gemm_jax(**dict(zip(names, arrays, strict=True)), **static, bias_tensor=bias)

    arrays = [given[name] for name in names]
    for bias in (None, p.bias_in("jax")):
        for function in (run, jax.jit(run)):
            result = function(bias, *arrays)
            assert type(result) is tuple
            for got, want in zip(result, p.expected(bias is not None), strict=True):
                p.assert_is(got, want)
        d, c = jax.eval_shape(run, bias, *arrays)
        assert d.shape == c.shape == ((64, 32) if rank == 2 else (64, 32, 1))
        assert (d.dtype, c.dtype) == ("bfloat16", "float32")


def test_jax_entry_returns_none_for_c() -> None:
    p = Forward()
    given = p.arguments("jax")
    d, c = grouped_gemm_jax(
        *(given[key] for key in ("a_tensor", "padded_offsets", "alpha_tensor")), None, None, given["prob_tensor"],
        b_tensor=given["b_tensor"],
    )  # fmt: skip
    assert c is None
    p.assert_is(d, p.expected()[0])


def test_jit_keeps_offsets_and_addresses_on_the_device() -> None:
    """One compiled program serves other offsets and other addresses."""
    p, q = Forward(), Forward((0, 30, 1, 33), seed=3)
    run = jax.jit(lambda a, off, alpha, at, prob: grouped_gemm_jax(a, off, alpha, at, 32, prob, d_dtype="float32")[0])
    for problem in (p, q):
        given = problem.arguments("jax", "discrete")
        names = ("a_tensor", "padded_offsets", "alpha_tensor", "b_ptrs", "prob_tensor")
        problem.assert_is(run(*(given[key] for key in names)), problem.expected()[0])
    assert run._cache_size() == 1


def test_addresses_as_64_bit_integers_in_jax() -> None:
    p = Forward()
    with jax.enable_x64(True):
        given = p.arguments("jax", "discrete")
        given["b_ptrs"] = jax.numpy.asarray(np.array([address(x) for x in p.kept], np.int64))
        assert given["b_ptrs"].dtype == "int64"
        p.assert_is(grouped_gemm_wrapper(**given)["d_tensor"], p.expected()[0])


# --- plan and names -------------------------------------------------------------------------------------------------


def test_explicit_kernel_on_the_cpu_is_not_supported() -> None:
    with pytest.raises(NotSupportedError, match="grouped_gemm: backend"):
        call(backend="sm90")


def test_plan_on_hopper_names_a_kernel_or_a_reason() -> None:
    plan = OPERATION.plan(OPERATION.bind(*example("dense")), target=HOPPER)
    assert plan.kernel is not None or plan.missing is not None


def test_names_of_the_peer() -> None:
    assert compat.grouped_gemm_wrapper_sm100 is grouped_gemm_wrapper
    assert compat.GroupedGemmSm100 is GroupedGemm
    assert compat.grouped_gemm_jax_sm100 is grouped_gemm_jax
    assert grouped_gemm_wrapper.supports_bf16_canonical_layouts is True
    assert "grouped_gemm_wrapper" in fe_gemm.__all__
