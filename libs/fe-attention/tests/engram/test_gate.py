"""The front door of the Engram gate on the CPU: contract, edges, frameworks, classes, derivatives, plans."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings

import fe_attention
from fe_attention import (
    EngramGateSavedBackward,
    EngramGateSavedForward,
    engram_gate,
    engram_gate_jax,
    engram_gate_saved_backward,
    engram_gate_saved_backward_jax,
    engram_gate_saved_forward,
    engram_gate_saved_forward_jax,
)
from fe_attention.engram.contract import BACKWARD, FORWARD
from fe_attention.engram.gate import BACKWARD as BACKWARD_OPERATION
from fe_attention.engram.gate import FORWARD as FORWARD_OPERATION
from fe_attention.engram.gate import GATE
from fe_attention.reference import engram as reference
from fe_runtime import NotCompiledError, NotSupportedError, TensorDesc, TupleDict
from fe_runtime.plan import HOPPER, Kernel, NoKernel, Target
from fe_runtime.testing import Call, assert_rejected, invalid_calls, to_framework, to_numpy, valid_calls

BF16 = ml_dtypes.bfloat16


def run(arrays: Any, options: Any) -> Any:
    return engram_gate_saved_forward(*arrays, **options)


def run_backward(arrays: Any, options: Any) -> Any:
    grad_out, x, kv, weight, saved = arrays
    return engram_gate_saved_backward(x, kv, weight, saved, grad_out, **options)


def arrays_of(tokens: int, streams: int = 4, width: int = 16, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((tokens, streams, width)).astype(BF16),
        "kv": rng.standard_normal((tokens, (streams + 1) * width)).astype(BF16),
        "weight": rng.standard_normal((streams, width)).astype(np.float32),
        "mask": rng.random(tokens) < 0.7,
        "g": rng.standard_normal((tokens, streams, width)).astype(BF16),
    }


def forward(c: dict[str, Any], **more: Any) -> Any:
    return engram_gate_saved_forward(c["x"], c["kv"], c["weight"], c["mask"], **more)


def backward(c: dict[str, Any], saved: Any, **more: Any) -> Any:
    return engram_gate_saved_backward(c["x"], c["kv"], c["weight"], saved, c["g"], **more)


def example() -> Call:
    c = arrays_of(3, 2, 8)
    return Call((c["x"], c["kv"], c["weight"], c["mask"]), {"eps": 1e-20})


def backward_example() -> Call:
    c = arrays_of(3, 2, 8)
    return Call((c["g"], c["x"], c["kv"], c["weight"], forward(c)["saved"]), {})


# --- contract ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", invalid_calls(FORWARD, example()), ids=lambda call: call.id)
def test_invalid_call_is_rejected(call: Any) -> None:
    """Shapes, dtypes, strides, kinds, eps, frameworks: one call each."""
    assert_rejected(run, "engram_gate_saved_forward", call)


@pytest.mark.parametrize("call", invalid_calls(BACKWARD, backward_example()), ids=lambda call: call.id)
def test_invalid_call_of_the_gradient_is_rejected(call: Any) -> None:
    assert_rejected(run_backward, "engram_gate_saved_backward", call)


@settings(max_examples=40, deadline=None)
@given(valid_calls(FORWARD, extents={"H": (1, 2, 4), "D": (1, 7, 16, 33)}))
def test_valid_calls_give_what_the_contract_says(call: Call) -> None:
    result = run(*call)
    assert list(result.keys()) == ["out", "saved"]
    bound = FORWARD_OPERATION.bind(call.arrays, call.options)
    for got, spec in zip(result, bound.outputs, strict=True):
        assert (got.shape, got.dtype.name) == (spec.shape, spec.dtype)  # type: ignore[union-attr]
    exact = reference.engram_gate_saved_forward(*_wide(call.arrays), eps=call.options["eps"], compute="float64")
    np.testing.assert_allclose(result["out"].astype(float), exact[0], rtol=2.0**-7, atol=1e-4)
    np.testing.assert_allclose(result["saved"], exact[1], rtol=1e-4, atol=1e-4)


@settings(max_examples=30, deadline=None)
@given(valid_calls(BACKWARD, extents={"H": (1, 2, 4), "D": (1, 7, 16, 33)}))
def test_valid_gradients_give_what_the_contract_says(call: Call) -> None:
    call.arrays[4][..., 0] = 0.25  # type: ignore[index]  # a gate is between 0 and 1
    result = run_backward(*call)
    assert list(result.keys()) == ["grad_x", "grad_kv", "grad_weight"]
    exact = reference.engram_gate_saved_backward(*_wide(call.arrays), compute="float64")
    for got, want, like in zip(result, exact, call.arrays[1:], strict=False):
        assert (got.shape, got.dtype) == (like.shape, like.dtype)  # type: ignore[union-attr]
        scale = 1e-5 * (1 + float(np.abs(want).max(initial=0.0)))
        np.testing.assert_allclose(got.astype(float), want, rtol=2.0**-7, atol=scale)


def _wide(arrays: Any) -> list[Any]:
    return [a if a.dtype == np.bool_ else a.astype(np.float64) for a in arrays]


def test_backend_other_than_ours_or_frost_is_rejected() -> None:
    c = arrays_of(2)
    want = forward(c)
    for backend in ("frost", "auto", "reference"):
        np.testing.assert_array_equal(forward(c, backend=backend)["out"], want["out"])
    with pytest.raises(ValueError, match="engram_gate_saved_forward: backend must be one of"):
        forward(c, backend="cutlass")
    with pytest.raises(ValueError, match="engram_gate_saved_backward: backend must be one of"):
        backward(c, want["saved"], backend="")
    with pytest.raises(TypeError, match="backend must be a string"):
        forward(c, backend=3)
    with pytest.raises(NotSupportedError):
        forward(c, backend="sm90")  # arrays on the CPU


def test_eps_is_keyword_only_and_a_number() -> None:
    c = arrays_of(2)
    with pytest.raises(TypeError):
        engram_gate_saved_forward(c["x"], c["kv"], c["weight"], c["mask"], 1e-5)  # type: ignore[misc]
    assert not np.array_equal(forward(c, eps=10)["saved"], forward(c)["saved"])


def test_no_tokens_and_one_token() -> None:
    c = arrays_of(0)
    out, saved = forward(c)
    assert (out.shape, saved.shape) == ((0, 4, 16), (0, 4, 4))
    dx, dkv, dw = backward(c, saved)
    assert (dx.shape, dkv.shape) == ((0, 4, 16), (0, 80))
    np.testing.assert_array_equal(dw, np.zeros((4, 16)))
    c = arrays_of(1)
    assert forward(c)["out"].shape == (1, 4, 16)


def test_masked_rows_with_nan_reach_nothing() -> None:
    c = arrays_of(5)
    c["mask"] = np.array([True, False, True, True, False])
    clean = forward(c)
    clean_gradients = backward(c, clean["saved"])
    for name in ("x", "kv"):
        c[name][~c["mask"]] = np.nan
    out, saved = forward(c)
    np.testing.assert_array_equal(out[c["mask"]], clean["out"][c["mask"]])
    assert (saved[~c["mask"], :, 0] == 0).all()
    for got, want in zip(backward(c, saved), clean_gradients, strict=True):
        np.testing.assert_array_equal(got, want)


def test_rows_of_zeros_stay_finite() -> None:
    c = arrays_of(3)
    c["mask"][:] = True
    c["x"][0], c["kv"][1], c["x"][2], c["kv"][2] = 0, 0, 0, 0
    out, saved = forward(c)
    for array in (out, saved, *backward(c, saved)):
        assert np.isfinite(array.astype(np.float32)).all()


def test_a_stream_with_jax_arrays_is_refused() -> None:
    c = {name: jnp.asarray(value) for name, value in arrays_of(2).items()}
    with pytest.raises(ValueError, match="engram_gate_saved_forward: current_stream must be None for JAX arrays"):
        forward(c, current_stream=0)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_frameworks_agree(framework: str) -> None:
    c = arrays_of(4)
    other = {name: to_framework(value, framework) for name, value in c.items()}
    want, got = forward(c), forward(other)
    assert isinstance(got, TupleDict)
    np.testing.assert_allclose(to_numpy(got["saved"]), want["saved"], rtol=2e-5, atol=1e-6)
    grads = backward(other, to_framework(want["saved"], framework))
    for a, b in zip((got["out"], *grads), (want["out"], *backward(c, want["saved"])), strict=True):
        np.testing.assert_allclose(to_numpy(a).astype(np.float32), b.astype(np.float32), rtol=2.0**-7, atol=1e-4)


# --- torch ---------------------------------------------------------------------------------------------------------


def tensors(tokens: int = 4) -> dict[str, Any]:
    return {name: to_framework(value, "torch") for name, value in arrays_of(tokens).items()}


def test_the_saved_state_functions_register_no_autograd() -> None:
    t = tensors()
    t["x"].requires_grad_()
    result = forward(t)
    assert not result["out"].requires_grad
    assert not result["saved"].requires_grad


def test_engram_gate_is_differentiable() -> None:
    t = tensors()
    leaves = {name: t[name].clone().requires_grad_() for name in ("x", "kv", "weight")}
    out = engram_gate(leaves["x"], leaves["kv"], leaves["weight"], t["mask"])
    want, saved = forward(t)
    assert torch.equal(out, want)
    out.backward(t["g"])
    for leaf, gradient in zip(leaves.values(), backward(t, saved), strict=True):
        assert torch.equal(leaf.grad, gradient)
    with torch.no_grad():
        assert not engram_gate(leaves["x"], leaves["kv"], leaves["weight"], t["mask"]).requires_grad


def test_gradients_against_torchs_own_in_float64() -> None:
    t = tensors()
    wide = {n: t[n].double().requires_grad_() for n in ("x", "kv", "weight")}
    x, w = wide["x"], wide["weight"]
    key, v = wide["kv"][:, :64].reshape(-1, 4, 16), wide["kv"][:, None, 64:]
    rx, rk = ((a.square().mean(-1) + 1e-20).rsqrt() for a in (x, key))
    dot = (x * w * key).sum(-1) * rx * rk / 4
    gate = torch.sigmoid(dot.abs().clamp_min(1e-6).sqrt() * dot.sign()) * t["mask"][:, None]
    (x + gate[..., None] * v).backward(t["g"].double())
    _, saved = forward(t)
    for got, leaf in zip(backward(t, saved), wide.values(), strict=True):
        error = (got.double() - leaf.grad).norm() / leaf.grad.norm()
        assert error < 3e-3


def test_registered_ops_pass_opcheck() -> None:
    t = tensors()
    args = (t["x"], t["kv"], t["weight"], t["mask"])
    torch.library.opcheck(torch.ops.fe_attention.engram_gate_saved_forward, args, {"eps": 1e-20})
    _, saved = forward(t)
    ops = torch.ops.fe_attention
    torch.library.opcheck(ops.engram_gate_saved_backward, (t["g"], t["x"], t["kv"], t["weight"], saved))
    leaves = tuple(a.requires_grad_() if a.is_floating_point() else a for a in args)
    torch.library.opcheck(ops.engram_gate, leaves, {"eps": 1e-20})


def test_torch_compile_without_graph_breaks() -> None:
    t = tensors()
    compiled = torch.compile(engram_gate, backend="eager", fullgraph=True)
    assert torch.equal(compiled(t["x"], t["kv"], t["weight"], t["mask"]), forward(t)["out"])


# --- JAX -----------------------------------------------------------------------------------------------------------


def test_jax_entries_jit_and_grad() -> None:
    c = arrays_of(4)
    j = {name: jnp.asarray(value) for name, value in c.items()}
    want, saved = forward(c)
    out, state = jax.jit(engram_gate_saved_forward_jax)(j["x"], j["kv"], j["weight"], j["mask"])
    np.testing.assert_allclose(np.asarray(out, np.float32), want.astype(np.float32), rtol=2.0**-7, atol=1e-4)
    np.testing.assert_allclose(state, saved, rtol=1e-4, atol=1e-5)
    found = engram_gate_saved_backward_jax(j["x"], j["kv"], j["weight"], jnp.asarray(saved), j["g"])
    exact = backward(c, saved)

    def loss(x: Any, kv: Any, w: Any) -> Any:
        return (engram_gate_jax(x, kv, w, j["mask"]).astype(jnp.float32) * j["g"].astype(jnp.float32)).sum()

    slopes = jax.jit(jax.grad(loss, (0, 1, 2)))(j["x"], j["kv"], j["weight"])
    for a, b, w in zip(found, slopes, exact, strict=True):
        scale = 2.0**-7 * float(np.abs(w.astype(np.float32)).max())
        for got in (a, b):
            np.testing.assert_allclose(np.asarray(got, np.float32), w.astype(np.float32), rtol=2.0**-7, atol=scale)


# --- classes -------------------------------------------------------------------------------------------------------


def test_classes_write_into_the_callers_arrays() -> None:
    c = arrays_of(4)
    want, want_saved = forward(c)
    inputs = (c["x"], c["kv"], c["weight"], c["mask"])
    op = EngramGateSavedForward(*inputs)
    assert op.check_support() is True
    assert op.scratch_workspace_bytes() == 0
    out, saved = np.empty_like(want), np.empty_like(want_saved)
    with pytest.raises(NotCompiledError):
        op.execute(*inputs, out, saved)
    op.compile()
    result = op.execute(*inputs, out, saved)
    assert isinstance(result, TupleDict)
    assert list(result.keys()) == ["out", "saved"]
    assert result["out"] is out
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(saved, want_saved)

    gradient = EngramGateSavedBackward(c["x"], c["kv"], c["weight"], saved, c["g"])
    workspace = gradient.allocate_workspace()
    assert workspace.nbytes == gradient.scratch_workspace_bytes() > 0
    grads = tuple(np.empty_like(c[n]) for n in ("x", "kv", "weight"))
    found = gradient(c["x"], c["kv"], c["weight"], saved, c["g"], *grads, workspace)
    assert list(found.keys()) == ["grad_x", "grad_kv", "grad_weight"]
    for got, exact in zip(grads, backward(c, saved), strict=True):
        np.testing.assert_array_equal(got, exact)


def test_descriptors_make_an_object_and_the_number_of_tokens_may_change() -> None:
    descs = (
        TensorDesc.of("bfloat16", (8, 4, 16)),
        TensorDesc.of("bfloat16", (8, 80)),
        TensorDesc.of("float32", (4, 16)),
        TensorDesc.of("bool", (8,)),
    )
    op = EngramGateSavedForward(*descs)
    op.compile()
    c = arrays_of(3)
    out, saved = np.empty((3, 4, 16), BF16), np.empty((3, 4, 4), np.float32)
    op.execute(c["x"], c["kv"], c["weight"], c["mask"], out, saved)
    np.testing.assert_array_equal(out, forward(c)["out"])


def backward_object(c: dict[str, Any], saved: Any) -> tuple[Any, Any]:
    op = EngramGateSavedBackward(c["x"], c["kv"], c["weight"], saved, c["g"])
    op.compile()
    grads = [np.empty_like(c[n]) for n in ("x", "kv", "weight")]

    def execute(workspace: Any, **changed: Any) -> None:
        given = {"grad_x": grads[0], "grad_kv": grads[1], "grad_weight": grads[2], **changed}
        op.execute(c["x"], c["kv"], c["weight"], saved, c["g"], **given, workspace=workspace)

    return op, execute


def test_workspace_missing_small_or_of_another_kind() -> None:
    c = arrays_of(4)
    op, execute = backward_object(c, forward(c)["saved"])
    size = op.scratch_workspace_bytes()
    wrong = (None, np.empty(size - 1, np.uint8), np.empty(size, np.int8), np.empty((1, size), np.uint8), "x")
    for workspace in (*wrong, np.empty(2 * size, np.uint8)[::2]):
        with pytest.raises(ValueError, match="engram_gate_saved_backward: workspace must"):
            execute(workspace)
    execute(np.empty(size + 1, np.uint8))


def test_overlap_of_outputs_and_workspace() -> None:
    c = arrays_of(4)
    op, execute = backward_object(c, forward(c)["saved"])
    workspace = op.allocate_workspace()
    with pytest.raises(ValueError, match="grad_x must not share memory with x"):
        execute(workspace, grad_x=c["x"])
    both = np.empty(c["x"].size + c["kv"].size, BF16)
    grad_x = both[: c["x"].size].reshape(c["x"].shape)
    with pytest.raises(ValueError, match="grad_kv must not share memory with grad_x"):
        execute(workspace, grad_x=grad_x, grad_kv=both[8 : 8 + c["kv"].size].reshape(c["kv"].shape))
    big = np.empty(op.scratch_workspace_bytes() + 4096, np.uint8)
    grad_x = big[64 : 64 + c["x"].nbytes].view(BF16).reshape(c["x"].shape)
    with pytest.raises(ValueError, match="workspace must not overlap"):
        execute(big, grad_x=grad_x)


def test_outputs_of_a_wrong_shape_or_dtype() -> None:
    c = arrays_of(4)
    op, execute = backward_object(c, forward(c)["saved"])
    workspace = op.allocate_workspace()
    with pytest.raises(ValueError, match="grad_weight must have dtype float32"):
        execute(workspace, grad_weight=np.empty((4, 16), np.float64))
    with pytest.raises(ValueError, match="grad_x must have shape"):
        execute(workspace, grad_x=np.empty((3, 4, 16), BF16))


def test_the_class_refuses_a_wrong_sample_when_checked() -> None:
    c = arrays_of(4)
    op = EngramGateSavedForward(c["x"], c["kv"][:, 1:], c["weight"], c["mask"])
    with pytest.raises(ValueError, match="engram_gate_saved_forward: kv must"):
        op.check_support()
    with pytest.raises(ValueError, match="eps must be a finite number"):
        EngramGateSavedForward(c["x"], c["kv"], c["weight"], c["mask"], eps=0.0).check_support()
    with pytest.raises(ValueError, match="backend must be one of"):
        EngramGateSavedForward(c["x"], c["kv"], c["weight"], c["mask"], backend="peer").check_support()


# --- plans and names -----------------------------------------------------------------------------------------------


def cuda(tokens: int, streams: int = 4, width: int = 5120) -> tuple[Any, ...]:
    return (
        TensorDesc.of("bfloat16", (tokens, streams, width), device="cuda:0"),
        TensorDesc.of("bfloat16", (tokens, (streams + 1) * width), device="cuda:0"),
        TensorDesc.of("float32", (streams, width), device="cuda:0"),
        TensorDesc.of("bool", (tokens,), device="cuda:0"),
    )


def test_one_kernel_for_any_number_of_tokens() -> None:
    specs = set()
    for tokens in (1, 4096, 5_000_000):
        for operation in (FORWARD_OPERATION, GATE):
            plan = operation.plan(operation.bind(cuda(tokens), {}), "auto", HOPPER)
            assert isinstance(plan.kernel, Kernel)
            specs.add(plan.kernel.spec)
    assert len(specs) == 1


def test_the_gradients_kernel_depends_on_the_gpu_not_on_the_tokens() -> None:
    def spec(tokens: int, target: Target) -> Any:
        x, kv, weight, _ = cuda(tokens)
        saved = TensorDesc.of("float32", (tokens, 4, 4), device="cuda:0")
        bound = BACKWARD_OPERATION.bind((x, x, kv, weight, saved), {})
        kernel = BACKWARD_OPERATION.plan(bound, "auto", target).kernel
        assert kernel is not None
        return kernel.spec

    assert spec(1, HOPPER) == spec(8192, HOPPER)
    assert spec(1, HOPPER) != spec(1, Target((9, 0), 66))


def test_more_streams_than_the_kernel_serves_run_the_reference() -> None:
    c = arrays_of(2, 17, 8)
    bound = BACKWARD_OPERATION.bind((c["g"], c["x"], c["kv"], c["weight"], forward(c)["saved"]), {})
    found = BACKWARD_OPERATION.find_kernel(bound, HOPPER)
    assert isinstance(found, NoKernel)
    assert "16 streams" in found.reason
    op = EngramGateSavedBackward(c["x"], c["kv"], c["weight"], forward(c)["saved"], c["g"])
    assert op.scratch_workspace_bytes() == 0
    grads = [np.empty_like(c[n]) for n in ("x", "kv", "weight")]
    op(c["x"], c["kv"], c["weight"], forward(c)["saved"], c["g"], *grads, None)
    np.testing.assert_array_equal(grads[0], backward(c, forward(c)["saved"])["grad_x"])


def test_compat_names_are_ours() -> None:
    from fe_attention import compat

    for name in (
        "EngramGateSavedBackward",
        "EngramGateSavedForward",
        "engram_gate_saved_backward",
        "engram_gate_saved_forward",
    ):
        assert getattr(compat, name) is getattr(fe_attention, name)


def test_the_names_of_the_peers_module() -> None:
    from fe_attention import engram

    assert engram.__all__ == [
        "EngramGateSavedBackward",
        "EngramGateSavedForward",
        "engram_gate_saved_backward",
        "engram_gate_saved_forward",
    ]
    assert all(getattr(engram, name) is getattr(fe_attention, name) for name in engram.__all__)
