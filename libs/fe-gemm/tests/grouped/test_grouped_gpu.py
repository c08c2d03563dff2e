"""The front doors of the grouped products on a GPU: modes and forms against float64 or the reference, edges, graphs.

Kernels are compiled for few combinations: rows, offsets and addresses select none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from grouped_arguments import Forward, Gated, assert_close
from naive_grouped import BF16, ends, members

from fe_gemm import (
    GroupedGemm,
    GroupedGemmGlu,
    grouped_gemm_dglu_wrapper,
    grouped_gemm_glu_wrapper,
    grouped_gemm_jax,
    grouped_gemm_wgrad_wrapper,
    grouped_gemm_wrapper,
)
from fe_gemm.reference import grouped as reference
from fe_runtime import testing
from fe_runtime.arrays import Device, capability
from fe_runtime.testing import to_framework, to_numpy

# A kernel that hangs cannot be stopped from inside the process, so the time limit ends the process.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]

BACKEND = {"backend": "sm90"}
MODES = ("dense", "discrete")
SIZES = {
    "empty first, middle, last": (0, 5, 0, 40, 0),
    "all empty": (0, 0, 0, 0, 0),
    "one has all": (0, 0, 300, 0, 0),
    "one has nearly all": (1, 296, 0, 2, 1),
    "around tiles": (64, 127, 128, 129, 1),
    "large": (162, 0, 2577, 446, 83),
}


@pytest.fixture(autouse=True)
def poisoned_memory() -> Any:
    """Fresh allocations hold NaN, so an output element that is never written shows."""
    if capability(Device("cuda", 0))[0] != 9:
        pytest.skip("needs a Hopper GPU")
    with testing.poisoned_memory():
        yield


def on_gpu(given: dict[str, Any], kept: list[Any] | None = None) -> dict[str, Any]:
    """Return arguments on the GPU, with strides as they are; tables of addresses point to copies of ``kept``."""
    found = {key: _to_gpu(x) if isinstance(x, torch.Tensor) else x for key, x in given.items()}
    if "b_ptrs" in found and kept is not None:
        found["kept"] = [x.cuda() for x in kept]
        found["b_ptrs"] = torch.tensor([x.data_ptr() for x in found["kept"]], device="cuda")
    return found


def _to_gpu(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
    return made.copy_(x)


def call(function: Any, given: dict[str, Any], **options: Any) -> Any:
    return function(**{key: x for key, x in given.items() if key != "kept"}, **options, **BACKEND)


# --- unfused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_unfused_is_exact_for_whole_numbers(with_bias: bool, name: str, mode: str) -> None:
    rows = sum(SIZES[name]) + 37
    p = Forward(SIZES[name], rows=rows, n=192, k=128)
    given = on_gpu(p.arguments("torch", mode), getattr(p, "kept", None))
    bias = _to_gpu(p.bias_in("torch")) if with_bias else None
    result = call(grouped_gemm_wrapper, given, bias_tensor=bias, generate_c=True, c_dtype="float32", d_dtype="float32")
    for got, want in zip(result, p.expected(with_bias), strict=True):
        p.assert_is(got.cpu(), want)


@pytest.mark.parametrize("form", ["legacy", "canonical", "by columns", "legacy by columns"])
def test_forms_of_weights(form: str) -> None:
    p = Forward((17, 0, 190, 33), rows=256, n=136, k=72)
    for rank in (2, 3):
        d = call(grouped_gemm_wrapper, on_gpu(p.arguments("torch", "dense", form, rank)), d_dtype="float32")[0]
        assert d.ndim == rank
        p.assert_is(d.cpu(), p.expected()[0])


def test_rows_behind_the_last_group_of_a_buffer_are_left_alone() -> None:
    p = Forward((17, 0, 190, 33), rows=300, n=128, k=128)
    d = torch.full((300, 128), 7.0, device="cuda")
    assert call(grouped_gemm_wrapper, on_gpu(p.arguments("torch")), d_tensor=d, d_dtype="float32")[0] is d
    p.assert_is(d.cpu(), p.expected()[0])
    assert bool((d[240:] == 7).all())


@pytest.mark.parametrize("experts", [1, 256, 1024])
def test_numbers_of_experts(experts: int) -> None:
    sizes = [0] * experts
    for e in range(0, experts, 97):
        sizes[e] = 1 + e % 61
    p = Forward(tuple(sizes), rows=sum(sizes) + 5, n=64, k=64)
    d = call(grouped_gemm_wrapper, on_gpu(p.arguments("torch")), d_dtype="float32")[0]
    p.assert_is(d.cpu(), p.expected()[0])


def test_graphs_replay_other_offsets_and_other_addresses() -> None:
    p, q = Forward((40, 0, 20, 4), rows=64, n=128, k=128), Forward((0, 1, 60, 3), rows=64, n=128, k=128, seed=3)
    given = on_gpu(p.arguments("torch", "discrete"), p.kept)
    other = on_gpu(q.arguments("torch", "discrete"), q.kept)
    d = torch.zeros(64, 128, device="cuda")
    arrays = (given["a_tensor"], d, d, given["padded_offsets"], given["alpha_tensor"])
    live = {"b_ptrs": given["b_ptrs"], "prob_tensor": given["prob_tensor"]}
    samples = {"sample_prob": given["prob_tensor"], "num_experts": 4, "b_shape": (128, 128), "b_dtype": "bfloat16"}
    op = GroupedGemm(*arrays, **samples, **BACKEND)
    op(*arrays, **live)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.execute(*arrays, **live)
    for problem, source in ((p, given), (q, other), (p, on_gpu(p.arguments("torch", "discrete"), p.kept))):
        for name in ("a_tensor", "padded_offsets", "alpha_tensor", "b_ptrs", "prob_tensor"):
            given[name].copy_(source[name].clone())
        graph.replay()
        torch.cuda.synchronize()
        problem.assert_is(d.cpu(), problem.expected()[0])
        if problem is p:
            kept = source["kept"]
    assert len(kept) == 4


def test_unfused_in_jax() -> None:
    import jax

    p = Forward((17, 0, 190, 33), rows=256, n=128, k=128)
    given = {key: jax.device_put(x) if hasattr(x, "shape") else x for key, x in p.arguments("numpy").items()}
    names = ("a_tensor", "padded_offsets", "alpha_tensor", "b_tensor", "prob_tensor")
    run = jax.jit(lambda *x: grouped_gemm_jax(**dict(zip(names, x, strict=True)), d_dtype="float32", **BACKEND)[0])
    p.assert_is(np.asarray(run(*(given[name] for name in names))), p.expected()[0])
    kept = [jax.device_put(x) for x in p.b]
    table = np.array([x.unsafe_buffer_pointer() for x in kept], np.int64).view(np.uint8)
    arrays = [given[name] for name in names if name != "b_tensor"]
    by_address = jax.jit(
        lambda a, off, alpha, prob, at: grouped_gemm_jax(a, off, alpha, at, 128, prob, d_dtype="float32", **BACKEND)[0]
    )
    p.assert_is(np.asarray(by_address(*arrays, jax.device_put(table))), p.expected()[0])


# --- gated ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("act_func", ["swiglu", "geglu", "situglu"])
@pytest.mark.parametrize("name", ["empty first, middle, last", "around tiles", "large"])
def test_glu(name: str, act_func: str, mode: str) -> None:
    sizes = SIZES[name]
    p = Gated(sizes=sizes, rows=sum(sizes) + 19, n=192, k=128)
    given = on_gpu(p.arguments("torch", mode), getattr(p, "kept", None))
    bias = _to_gpu(to_framework(p.bias, "torch"))
    options: dict[str, Any] = {"act_func": act_func, "generate_c": True, "c_dtype": "float32", "d_dtype": "float32"}
    result = call(grouped_gemm_glu_wrapper, given, bias_tensor=bias, **options)
    want = reference.grouped_gemm_glu(p.a, None, p.off, p.alpha, p.b, None, p.bias, None, None, None, p.prob, **options)
    for got, y in zip(result, want, strict=True):
        assert_close(None if got is None else got.cpu(), y, int(p.off[-1]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("act_func", ["dswiglu", "dgeglu", "dsituglu"])
@pytest.mark.parametrize("name", ["empty first, middle, last", "around tiles", "large"])
def test_dglu(name: str, act_func: str, mode: str) -> None:
    sizes = SIZES[name]
    p = Gated(sizes=sizes, rows=sum(sizes) + 19, n=96, k=128)
    given = on_gpu(p.arguments("torch", mode), getattr(p, "kept", None))
    given |= {"c_tensor": to_framework(p.c, "torch").cuda(), "beta_tensor": torch.from_numpy(p.beta).cuda()}
    dprob = torch.ones(p.rows, device="cuda")
    options: dict[str, Any] = {"act_func": act_func, "generate_dbias": True, "d_dtype": "float32"}
    results = []
    for _ in range(3):
        dprob.fill_(1)
        result = call(grouped_gemm_dglu_wrapper, given, dprob_tensor=dprob, **options)
        results.append([to_numpy(x.cpu()).copy() for x in (result["d_row_tensor"], dprob, result["dbias_tensor"])])
    want = reference.grouped_gemm_dglu(
        p.a, p.c, None, p.off, p.alpha, p.beta, p.prob, np.ones(p.rows, np.float32), p.b, **options
    )
    owned = int(p.off[-1])
    assert_close(results[0][0], want[0], owned)
    size = np.abs(np.asarray(want[2], np.float64)).max() + 1
    np.testing.assert_allclose(results[0][1], want[2], rtol=1e-4, atol=2.0**-14 * size)
    dbias = np.asarray(want[3]).astype(np.float64)
    np.testing.assert_allclose(results[0][2].astype(np.float64), dbias, rtol=2.0**-6, atol=2.0**-8 * abs(dbias).max())
    for others in results[1:]:
        assert others[0][:owned].tobytes() == results[0][0][:owned].tobytes()
        assert others[1].tobytes() == results[0][1].tobytes()
        assert others[2].tobytes() == results[0][2].tobytes()


def test_glu_class_takes_factors_per_execution() -> None:
    p = Gated(sizes=(33, 0, 95), n=128, k=64)
    given = on_gpu(p.arguments("torch"))
    c, d = torch.zeros(160, 128, device="cuda"), torch.zeros(160, 64, device="cuda")
    arrays = (given["a_tensor"], c, d, None, given["padded_offsets"], given["alpha_tensor"])
    weights = {"sample_b": given["b_tensor"], "sample_prob": given["prob_tensor"], "act_func": "geglu"}
    op = GroupedGemmGlu(*arrays, None, **weights, **BACKEND)
    op.compile()
    for factors in ({}, {"geglu_alpha": 1.3, "glu_clamp_max": 1.5, "glu_clamp_min": -0.75, "linear_offset": 0.25}):
        live = {"b_tensor": given["b_tensor"], "prob_tensor": given["prob_tensor"]}
        op.execute(*arrays, **live, **factors)
        want = reference.grouped_gemm_glu(
            p.a, None, p.off, p.alpha, p.b, None, None, None, None, None, p.prob, act_func="geglu", d_dtype="float32",
            **factors,
        )  # fmt: skip
        assert_close(d.cpu(), want[1], int(p.off[-1]))


# --- gradients of weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("majors", ["mn", "kn", "mk", "kk"])
@pytest.mark.parametrize("name", ["empty first, middle, last", "all empty", "around tiles", "large"])
def test_wgrad(name: str, majors: str) -> None:
    step = 1 if majors == "mn" else 8  # along contiguous tokens groups begin at multiples of 16 bytes
    sizes = [-(-size // step) * step for size in SIZES[name]]
    rng, off, tokens = np.random.default_rng(0), ends(list(sizes)), -(-(sum(sizes) + 19) // 8) * 8
    a, b = (rng.integers(-2, 3, shape).astype(BF16) for shape in ((72, tokens), (tokens, 136)))
    a[:, off[-1] :], b[off[-1] :] = np.nan, np.nan
    want = np.stack([
        a[:, list(members(off, e))].astype(np.float64) @ b[list(members(off, e))].astype(np.float64)
        for e in range(len(off))
    ])  # fmt: skip
    first, second = to_framework(a, "torch").cuda(), to_framework(b, "torch").cuda()
    first = first.T.contiguous().T if majors[0] == "m" else first
    second = second.T.contiguous().T if majors[1] == "k" else second
    given = (first, second, None, None, torch.from_numpy(off).cuda())
    w = grouped_gemm_wgrad_wrapper(*given, wgrad_dtype="float32", **BACKEND)[0]
    np.testing.assert_array_equal(w.cpu().numpy(), want)
    memory = torch.full((len(off), 72, 136), 2.0, device="cuda")
    grouped_gemm_wgrad_wrapper(*given, wgrad_tensor=memory, accumulate_on_output=True, **BACKEND)
    np.testing.assert_array_equal(memory.cpu().numpy(), want + 2)
    table = torch.tensor([x.data_ptr() for x in memory], device="cuda")
    options = {"output_mode": "discrete", "wgrad_ptrs": table, "wgrad_dtype": "float32"}
    grouped_gemm_wgrad_wrapper(*given, **options, **BACKEND)
    np.testing.assert_array_equal(memory.cpu().numpy(), want)


# --- checks on the device -------------------------------------------------------------------------------------------


def test_malformed_values_are_named_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    p = Forward((17, 0, 190, 33), rows=256, n=128, k=128)
    given = on_gpu(p.arguments("torch"))
    given["padded_offsets"] = torch.tensor([17, 3, 9999, -5], dtype=torch.int32, device="cuda")
    d = call(grouped_gemm_wrapper, given)[0]  # wrong numbers, no wrong address
    torch.cuda.synchronize()
    assert d.shape == (256, 128)
    for variable in ("FE_CHECK_DEVICE_VALUES", "CUDNN_FE_GROUPED_GEMM_VALIDATE_DEVICE_VALUES"):
        with monkeypatch.context() as context:
            context.setenv(variable, "1")
            with pytest.raises(ValueError, match="padded_offsets must start at 0 or more and never decrease"):
                call(grouped_gemm_wrapper, given)
