"""The front door of the CSA compressor on the CPU: contract, edges, frameworks, classes, derivatives, plans."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import fe_attention
from fe_attention import (
    CSACompressorBackward,
    CSACompressorForward,
    csa_compressor,
    csa_compressor_backward_jax,
    csa_compressor_backward_wrapper,
    csa_compressor_forward_jax,
    csa_compressor_forward_wrapper,
    csa_compressor_jax,
)
from fe_attention.csa.compressor import ACCUMULATING, BACKWARD, COMPRESSOR, FORWARD
from fe_attention.csa.contract import BACKWARD as BACKWARD_CONTRACT
from fe_attention.csa.contract import FORWARD as FORWARD_CONTRACT
from fe_attention.reference import csa as reference
from fe_runtime import DeterminismError, NotCompiledError, TensorDesc, TupleDict
from fe_runtime.plan import HOPPER, Kernel, NoKernel
from fe_runtime.testing import Call, assert_rejected, invalid_calls, to_framework, to_numpy

BF16 = ml_dtypes.bfloat16
NAMES = ("kv", "score", "ape", "cu", "comp")


def case(
    lengths: tuple[int, ...] = (9, 0, 16, 3),
    ratio: int = 4,
    d: int = 8,
    coff: int = 2,
    extra: int = 0,
    spare: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    tokens = sum(lengths) + extra
    comp = np.concatenate([[0], np.cumsum([n // ratio for n in lengths])]).astype(np.int32)
    return {
        "kv": rng.standard_normal((tokens, coff * d)).astype(BF16),
        "score": rng.standard_normal((tokens, coff * d)).astype(BF16),
        "ape": rng.standard_normal((ratio, coff * d)).astype(np.float32),
        "cu": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        "comp": comp,
        "go": rng.standard_normal((int(comp[-1]) + spare, d)).astype(BF16),
        "options": {"ratio": ratio, "coff": coff},
    }


def inputs(c: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(c[name] for name in NAMES)


def forward(c: dict[str, Any], **more: Any) -> Any:
    return csa_compressor_forward_wrapper(*inputs(c), **{**c["options"], **more})["out"]


def backward(c: dict[str, Any], **more: Any) -> Any:
    return csa_compressor_backward_wrapper(*inputs(c), c["go"], **{**c["options"], **more})


def exact(c: dict[str, Any]) -> tuple[Any, ...]:
    wide = [c[name].astype(np.float64) for name in ("kv", "score", "ape")]
    options = {**c["options"], "head_dim": c["go"].shape[1], "compute": "float64"}
    (out,) = reference.csa_compressor_forward(*wide, c["cu"], c["comp"], **options, total_comp=c["go"].shape[0])
    go = c["go"].astype(np.float64)
    return out, *reference.csa_compressor_backward(go, *wide, c["cu"], c["comp"], **options)


# --- contract ------------------------------------------------------------------------------------------------------


def example() -> Call:
    c = case()
    return Call(inputs(c), {"ratio": 4, "head_dim": 8, "coff": 2, "total_comp": 6})


def backward_example() -> Call:
    c = case()
    return Call((c["go"], *inputs(c)), {"ratio": 4, "head_dim": 8, "coff": 2})


def run(arrays: Any, options: Any) -> Any:
    return FORWARD(arrays, options)


def run_wrapper(arrays: Any, options: Any) -> Any:
    return csa_compressor_forward_wrapper(*arrays, **options)


def run_backward(arrays: Any, options: Any) -> Any:
    go, *others = arrays
    return csa_compressor_backward_wrapper(*others, go, **options)


@pytest.mark.parametrize("call", invalid_calls(FORWARD_CONTRACT, example()), ids=lambda call: call.id)
def test_invalid_call_is_rejected(call: Any) -> None:
    """coff outside 1 and 2, ape's shape, width, shapes, dtypes, strides, T < ratio: one call each."""
    given_none = call.options.get("total_comp") is None and "total_comp" in call.options
    assert_rejected(run if given_none else run_wrapper, "csa_compressor_forward", call)


@pytest.mark.parametrize("call", invalid_calls(BACKWARD_CONTRACT, backward_example()), ids=lambda call: call.id)
def test_invalid_call_of_the_gradient_is_rejected(call: Any) -> None:
    assert_rejected(run_backward, "csa_compressor_backward", call)


def test_width_not_coff_times_head_dim() -> None:
    c = case()
    with pytest.raises(ValueError, match=r"kv must have coff \* head_dim columns"):
        forward(c, head_dim=7)
    with pytest.raises(ValueError, match=r"kv must have coff \* head_dim columns"):
        forward({**c, **{name: c[name][:, :15].copy() for name in ("kv", "score", "ape")}})


def test_fewer_tokens_than_a_block_and_rows_all_the_same() -> None:
    c = case((3,))
    assert forward(c).shape == (0, 8)
    with pytest.raises(ValueError, match="kv must have at least ratio tokens"):
        forward(c, total_comp=1)


@pytest.mark.parametrize(
    ("name", "values", "what"),
    [
        ("cu", [0, 9, 8, 25, 28], "cu_seqlens must hold offsets"),
        ("cu", [0, 9, 9, 25, 29], "cu_seqlens must hold offsets"),
        ("cu", [-1, 9, 9, 25, 28], "cu_seqlens must hold offsets"),
        ("comp", [0, 2, 2, 5, 6], "cu_seqlens_comp must hold the cumulative numbers of whole blocks"),
        ("comp", [1, 3, 3, 7, 7], "cu_seqlens_comp must hold the cumulative numbers of whole blocks"),
    ],
)
def test_malformed_prefixes_on_the_cpu(name: str, values: list[int], what: str) -> None:
    c = case()
    c[name] = np.array(values, np.int32)
    with pytest.raises(ValueError, match=what):
        forward(c, total_comp=6)


def test_total_comp_below_the_blocks() -> None:
    with pytest.raises(ValueError, match="cu_seqlens_comp must end at most at the number of rows, 5"):
        forward(case(), total_comp=5)


def test_deterministic_is_a_bool_and_changes_nothing() -> None:
    c = case()
    for a, b in zip(backward(c), backward(c, deterministic=True), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(TypeError, match="csa_compressor_backward: deterministic must be a Python bool"):
        backward(c, deterministic=None)


# --- results -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "coff", "d"), [(4, 2, 8), (2, 2, 3), (128, 1, 5), (4, 1, 8), (5, 2, 1), (1, 2, 2)])
def test_results_against_float64(ratio: int, coff: int, d: int) -> None:
    c = case((3 * ratio + 1, 0, ratio, ratio - 1, 2 * ratio), ratio, d, coff, extra=2)
    want, *gradients = exact(c)
    out = forward(c)
    assert (out.shape, out.dtype) == (want.shape, BF16)
    np.testing.assert_allclose(out.astype(float), want, rtol=1.01 * 2.0**-8, atol=1e-5)
    result = backward(c)
    assert isinstance(result, TupleDict)
    assert list(result.keys()) == ["grad_kv", "grad_score", "grad_ape"]
    for got, value, like in zip(result, gradients, inputs(c), strict=False):
        assert (got.shape, got.dtype) == (like.shape, like.dtype)
        np.testing.assert_allclose(got.astype(float), value, rtol=1.01 * 2.0**-8, atol=1e-5)


def test_total_comp_is_read_where_it_is_not_given() -> None:
    c = case(spare=3)
    assert forward(c).shape == (6, 8)
    larger = forward(c, total_comp=9)
    np.testing.assert_array_equal(larger[:6], forward(c))
    np.testing.assert_array_equal(larger[6:], larger[[0, 0, 0]])  # a first block from token cu_seqlens[0]


def test_rows_that_no_sequence_has_do_not_count() -> None:
    c = case(spare=2)
    few = {**c, "go": c["go"][:6]}
    c["go"][6:] = np.nan
    for got, want in zip(backward(c), backward(few), strict=True):
        np.testing.assert_array_equal(got, want)


def test_no_rows_give_gradients_of_zero() -> None:
    for lengths in ((), (0,), (3, 2)):
        c = case(lengths)
        assert forward(c).shape == (0, 8)
        for got, like in zip(backward(c), inputs(c), strict=False):
            np.testing.assert_array_equal(got, np.zeros_like(like))


def test_nan_in_unused_rows_reaches_nothing() -> None:
    c = case((9, 3), extra=2)
    want, gradients = forward(c), backward(c)
    c["kv"][8:], c["score"][8:] = np.nan, np.inf
    c["kv"][4:8, :8] = np.nan
    np.testing.assert_array_equal(forward(c), want)
    for got, value in zip(backward(c), gradients, strict=True):
        np.testing.assert_array_equal(got, value)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_frameworks_agree(framework: str) -> None:
    c = case()
    other = {n: to_framework(v, framework) if isinstance(v, np.ndarray) else v for n, v in c.items()}
    for a, b in zip((forward(other), *backward(other)), (forward(c), *backward(c)), strict=True):
        np.testing.assert_allclose(to_numpy(a).astype(np.float32), b.astype(np.float32), rtol=2.0**-7, atol=1e-4)


# --- torch and JAX -------------------------------------------------------------------------------------------------


def tensors() -> dict[str, Any]:
    return {n: to_framework(v, "torch") if isinstance(v, np.ndarray) else v for n, v in case().items()}


def test_csa_compressor_is_differentiable_and_the_wrapper_is_not() -> None:
    t = tensors()
    leaves = {name: t[name].clone().requires_grad_() for name in ("kv", "score", "ape")}
    assert not forward({**t, **leaves}).requires_grad
    out = csa_compressor(*leaves.values(), t["cu"], t["comp"])
    assert torch.equal(out, forward(t))
    out.backward(t["go"])
    for leaf, want in zip(leaves.values(), backward(t), strict=True):
        assert torch.equal(leaf.grad, want)


def test_registered_ops_pass_opcheck() -> None:
    t = tensors()
    options = {"ratio": 4, "head_dim": None, "coff": 2}
    ops = torch.ops.fe_attention
    torch.library.opcheck(ops.csa_compressor_forward, inputs(t), {**options, "total_comp": 6})
    torch.library.opcheck(ops.csa_compressor_backward, (t["go"], *inputs(t)), options)
    leaves = [a.requires_grad_() if a.is_floating_point() else a for a in inputs(t)]
    torch.library.opcheck(ops.csa_compressor, tuple(leaves), {**options, "total_comp": 6})


def test_torch_compile_without_graph_breaks() -> None:
    t = tensors()
    compiled = torch.compile(lambda *a: csa_compressor(*a, total_comp=6), backend="eager", fullgraph=True)
    assert torch.equal(compiled(*inputs(t)), forward(t))


def test_jax_entries_jit_and_grad() -> None:
    c = case()
    j = [jnp.asarray(a) for a in inputs(c)]
    want = forward(c)
    for function in (csa_compressor_forward_jax, csa_compressor_jax):
        out = jax.jit(lambda *a, f=function: f(*a, total_comp=6))(*j)
        np.testing.assert_allclose(np.asarray(out, np.float32), want.astype(np.float32), rtol=2.0**-7, atol=1e-4)
    with pytest.raises(TypeError, match="total_comp"):
        csa_compressor_forward_jax(*j)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="csa_compressor_forward: total_comp must be given while JAX traces"):
        jax.jit(csa_compressor_forward_wrapper)(*j)
    found = csa_compressor_backward_jax(*j, jnp.asarray(c["go"]))
    _, pull = jax.vjp(lambda *leaves: csa_compressor_jax(*leaves, *j[3:], total_comp=6), *j[:3])
    for a, b, exact_ in zip(found, pull(jnp.asarray(c["go"])), backward(c), strict=True):
        for got in (a, b):
            np.testing.assert_allclose(np.asarray(got, np.float32), exact_.astype(np.float32), rtol=2.0**-7, atol=1e-4)


# --- classes -------------------------------------------------------------------------------------------------------


def test_the_forward_class_writes_into_the_callers_array() -> None:
    c = case()
    want = forward(c)
    op = CSACompressorForward(*inputs(c), np.empty_like(want))
    assert op.check_support() is True
    out = np.empty_like(want)
    with pytest.raises(NotCompiledError):
        op.execute(*inputs(c), out)
    op.compile()
    op.execute(*inputs(c), out)
    np.testing.assert_array_equal(out, want)
    longer = case((40, 4), spare=2)  # other tokens, sequences and rows
    out = np.empty((13, 8), BF16)
    op.execute(*inputs(longer), out)
    np.testing.assert_array_equal(out, forward(longer, total_comp=13))


def test_samples_may_be_metadata_only() -> None:
    descs = (
        TensorDesc.of("bfloat16", (28, 16)),
        TensorDesc.of("bfloat16", (28, 16)),
        TensorDesc.of("float32", (4, 16)),
        TensorDesc.of("int32", (5,)),
        TensorDesc.of("int32", (5,)),
        TensorDesc.of("bfloat16", (6, 8)),
    )
    assert CSACompressorForward(*descs).check_support()
    for deterministic in (False, True):
        op = CSACompressorBackward(*descs, deterministic=deterministic)
        assert op.check_support()
        assert (op.scratch_workspace_bytes() > 0) == deterministic


def gradients_like(c: dict[str, Any], fill: float = 0.0) -> list[Any]:
    return [np.full_like(c[name], fill) for name in ("kv", "score", "ape")]


def test_deterministic_class_overwrites_and_needs_a_workspace() -> None:
    c = case()
    op = CSACompressorBackward(*inputs(c), c["go"], deterministic=True)
    op.compile()
    grads = gradients_like(c, 7.0)
    with pytest.raises(ValueError, match="csa_compressor_backward: workspace must"):
        op.execute(*inputs(c), c["go"], *grads)
    size = op.scratch_workspace_bytes()
    with pytest.raises(ValueError, match="workspace must"):
        op.execute(*inputs(c), c["go"], *grads, workspace=np.empty(size - 1, np.uint8))
    op.execute(*inputs(c), c["go"], *grads, workspace=np.empty(size, np.uint8))
    for got, want in zip(grads, backward(c), strict=True):
        np.testing.assert_array_equal(got, want)


def test_atomic_class_adds_to_grad_ape_and_takes_no_workspace() -> None:
    c = case()
    op = CSACompressorBackward(*inputs(c), c["go"])
    op.compile()
    grads = gradients_like(c)
    op.execute(*inputs(c), c["go"], *grads)
    op.execute(*inputs(c), c["go"], *grads)
    want = backward(c)
    np.testing.assert_array_equal(grads[0], want["grad_kv"])
    np.testing.assert_allclose(grads[2], 2 * want["grad_ape"], rtol=1e-6)
    with pytest.raises(ValueError, match="csa_compressor_backward: workspace must be None"):
        op.execute(*inputs(c), c["go"], *grads, workspace=np.empty(10**6, np.uint8))


def test_atomic_class_under_torchs_deterministic_mode() -> None:
    t = tensors()
    op = CSACompressorBackward(*inputs(t), t["go"])
    op.compile()
    grads = [torch.zeros_like(t[name]) for name in ("kv", "score", "ape")]
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(DeterminismError, match="grad_ape is not deterministic"):
            op.execute(*inputs(t), t["go"], *grads)
        backward(t)  # the wrapper takes the deterministic plan
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(RuntimeWarning, match="grad_ape is not deterministic"):
            op.execute(*inputs(t), t["go"], *grads)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_class_leaves_its_buffers_untouched_without_rows(deterministic: bool) -> None:
    c = case((3,))
    op = CSACompressorBackward(*inputs(c), c["go"], deterministic=deterministic)
    op.compile()
    grads = gradients_like(c, 7.0)
    op.execute(*inputs(c), c["go"], *grads, workspace=np.empty(10**5, np.uint8) if deterministic else None)
    for got in grads:
        assert (got == 7).all()


def test_overlap_is_refused() -> None:
    c = case()
    op = CSACompressorBackward(*inputs(c), c["go"])
    op.compile()
    grads = gradients_like(c)
    with pytest.raises(ValueError, match="grad_kv must not share memory with kv"):
        op.execute(*inputs(c), c["go"], c["kv"], *grads[1:])
    with pytest.raises(ValueError, match="grad_score must not share memory with grad_kv"):
        op.execute(*inputs(c), c["go"], grads[0], grads[0], grads[2])


# --- plans and names -----------------------------------------------------------------------------------------------


def described(tokens: int, sequences: int, rows: int, ratio: int = 4, d: int = 512, coff: int = 2) -> list[Any]:
    return [
        TensorDesc.of("bfloat16", (rows, d), device="cuda:0"),
        *[TensorDesc.of("bfloat16", (tokens, coff * d), device="cuda:0") for _ in range(2)],
        TensorDesc.of("float32", (ratio, coff * d), device="cuda:0"),
        *[TensorDesc.of("int32", (sequences + 1,), device="cuda:0") for _ in range(2)],
    ]


def test_one_kernel_for_any_tokens_and_sequences() -> None:
    forwards, backwards = set(), set()
    for tokens, sequences, rows in ((4, 1, 1), (8192, 16, 2048), (10**6, 3, 250_000)):
        _, *arrays = go_and_arrays = described(tokens, sequences, rows)
        options: dict[str, object] = {"ratio": 4, "coff": 2}
        for operation in (FORWARD, COMPRESSOR):
            bound = operation.bind(arrays, {**options, "total_comp": rows})
            forwards.add(operation.plan(bound, "auto", HOPPER).kernel.spec)  # type: ignore[union-attr]
        bound = BACKWARD.bind(go_and_arrays, options)
        backwards.add(BACKWARD.plan(bound, "auto", HOPPER).kernel.spec)  # type: ignore[union-attr]
    assert len(forwards) == len(backwards) == 1


def test_windows_longer_than_the_kernel_serves_run_the_reference() -> None:
    options: dict[str, object] = {"ratio": 257, "coff": 1}
    go_and_arrays = described(1000, 1, 3, 257, 8, 1)
    for operation, arrays, more in (
        (FORWARD, go_and_arrays[1:], {"total_comp": 3}),
        (BACKWARD, go_and_arrays, {}),
        (ACCUMULATING, go_and_arrays, {}),
    ):
        found = operation.find_kernel(operation.bind(arrays, {**options, **more}), HOPPER)
        assert isinstance(found, NoKernel)
        assert "256 tokens" in found.reason
    assert isinstance(BACKWARD.find_kernel(BACKWARD.bind(described(9, 1, 2), {"ratio": 4, "coff": 2}), HOPPER), Kernel)


def test_names_of_the_namespace_and_of_compat() -> None:
    from fe_attention import compat

    names = [
        "CSACompressorBackward",
        "CSACompressorForward",
        "csa_compressor_backward_wrapper",
        "csa_compressor_forward_wrapper",
    ]
    assert sorted(fe_attention.CSA.__all__) == names
    assert compat.CSA is fe_attention.CSA
    for name in names:
        ours = getattr(fe_attention, name)
        assert getattr(compat, name) is getattr(compat.CSA, name) is ours
    with pytest.raises(AttributeError):
        _ = fe_attention.CSA.sparse_attention
