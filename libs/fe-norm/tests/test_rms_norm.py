"""The front door of ``rms_norm`` on the CPU: contract, frameworks, derivatives, registered ops, JAX entry, plan."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from fe_norm import rms_norm, rms_norm_backward, rms_norm_jax
from fe_norm.rms_norm import BACKWARD, BACKWARD_CONTRACT, CONTRACT, OPERATION
from fe_runtime import NotSupportedError, TensorDesc
from fe_runtime.plan import Target
from fe_runtime.testing import Call, assert_rejected, invalid_calls, to_framework, to_numpy, valid_calls

EPS = 1e-3


def run(arrays: Any, options: Any) -> Any:
    x, weight, bias, residual = arrays
    return rms_norm(x, weight, bias, residual=residual, **options)


def run_backward(arrays: Any, options: Any) -> Any:
    dout, dresidual_out, x, weight, bias, rstd = arrays
    return rms_norm_backward(dout, x, weight, bias, rstd=rstd, dresidual_out=dresidual_out, **options)


def values(*shapes: tuple[int, ...], seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def example() -> Call:
    return Call(tuple(values((2, 3, 32), (32,), (32,), (2, 3, 32))), {"eps": 1e-5, "out_dtype": None})


def backward_example() -> Call:
    dout, dresidual_out, x, weight, bias, rstd = values(*[(2, 3, 32)] * 3, (32,), (32,), (2, 3))
    return Call((dout, dresidual_out, x, weight, bias, rstd), {"eps": 1e-5})


def normed(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    v = np.asarray(x, np.float64)
    z = v / np.sqrt((v * v).mean(-1, keepdims=True) + eps)
    z = z * (1 if weight is None else np.asarray(weight, np.float64))
    return z + (0 if bias is None else np.asarray(bias, np.float64))


def exact_gradients(x: Any, weight: Any, bias: Any, dout: Any, dres: Any, eps: float) -> dict[str, Any]:
    """What torch's own operations give in float64."""
    leaves = {"x": x, "weight": weight, "bias": bias}
    wide = {n: None if a is None else torch.tensor(np.float64(a), requires_grad=True) for n, a in leaves.items()}
    out = torch.nn.functional.rms_norm(wide["x"], wide["x"].shape[-1:], wide["weight"], eps)
    out = out if bias is None else out + wide["bias"]
    loss = (out * torch.tensor(dout)).sum() + (0 if dres is None else (wide["x"] * torch.tensor(dres)).sum())
    loss.backward()
    return {n: None if a is None else a.grad.numpy() for n, a in wide.items()}


# --- contract ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", invalid_calls(CONTRACT, example()), ids=lambda call: call.id)
def test_invalid_call_is_rejected(call: Any) -> None:
    assert_rejected(run, "rms_norm", call)


@pytest.mark.parametrize("call", invalid_calls(BACKWARD_CONTRACT, backward_example()), ids=lambda call: call.id)
def test_invalid_call_of_the_gradient_is_rejected(call: Any) -> None:
    assert_rejected(run_backward, "rms_norm_backward", call)


@settings(max_examples=60, deadline=None)
@given(valid_calls(CONTRACT, extents={"N": (1, 7, 16, 33, 64)}))
def test_valid_calls_give_what_the_contract_says(call: Call) -> None:
    x, weight, bias, residual = call.arrays
    result = run(*call)
    out, h = (result, x) if residual is None else result
    bound = OPERATION.bind(call.arrays, call.options)
    assert (out.shape, out.dtype.name) == (bound.outputs[0].shape, bound.outputs[0].dtype)  # type: ignore[union-attr]
    if residual is not None:
        total = (x.astype(np.float32) + residual.astype(np.float32)).astype(x.dtype)  # type: ignore[union-attr]
        assert h.dtype == x.dtype  # type: ignore[union-attr]
        np.testing.assert_array_equal(h, total)
    want = normed(h, weight, bias, float(call.options["eps"]))  # type: ignore[arg-type]
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=2.0**-7, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(valid_calls(BACKWARD_CONTRACT, extents={"N": (1, 7, 16, 33)}))
def test_valid_gradients_give_what_the_contract_says(call: Call) -> None:
    dout, dres, x, weight, bias, rstd = call.arrays
    if rstd is not None:
        rstd[...] = 1 / np.sqrt((x.astype(np.float32) ** 2).mean(-1) + EPS)  # type: ignore[union-attr]
    result = run_backward(call.arrays, {"eps": EPS})
    assert list(result.keys()) == ["dx", "dweight", "dbias"]
    want = exact_gradients(
        *(None if a is None else a.astype(np.float64) for a in (x, weight, bias, dout, dres)),
        EPS,
    )
    for got, given_, exact in zip(result, (x, weight, bias), want.values(), strict=True):
        assert (got is None) == (given_ is None)
        if got is not None:
            assert (got.shape, got.dtype) == (given_.shape, given_.dtype)  # type: ignore[union-attr]
            scale = 1e-5 * (1 + float(np.abs(exact).max(initial=0.0)))
            np.testing.assert_allclose(got.astype(np.float64), exact, rtol=2.0**-7, atol=scale)


def test_weight_and_bias_of_different_dtypes_are_refused() -> None:
    x, weight, bias, _ = example().arrays
    with pytest.raises(ValueError, match="rms_norm: bias must have the dtype of weight"):
        rms_norm(x, weight, bias.astype(np.float16))  # type: ignore[union-attr]
    assert rms_norm(x, None, bias.astype(np.float16)).shape == x.shape  # type: ignore[union-attr]


def test_a_residual_of_another_dtype_is_refused() -> None:
    x, weight, _, residual = example().arrays
    with pytest.raises(ValueError, match="rms_norm: residual must have the dtype of x"):
        rms_norm(x, weight, residual=residual.astype(np.float16))  # type: ignore[union-attr]


def test_a_residual_of_another_shape_is_refused() -> None:
    x, weight, _, residual = example().arrays
    with pytest.raises(ValueError, match=r"rms_norm: residual must have shape .*32"):
        rms_norm(x, weight, residual=residual[:1])  # type: ignore[index]


@pytest.mark.parametrize("dtype", ["float16", torch.float16, jnp.float16, np.float16], ids=repr)
def test_out_dtype_in_every_spelling(dtype: Any) -> None:
    x, weight, _, _ = example().arrays
    assert rms_norm(x, weight, out_dtype=dtype).dtype == np.float16


def test_no_rows_one_row_and_one_column() -> None:
    assert rms_norm(np.empty((0, 3, 16), np.float32)).shape == (0, 3, 16)
    out, h = rms_norm(np.empty((0, 16), np.float32), residual=np.empty((0, 16), np.float32))
    assert (out.shape, h.shape) == ((0, 16), (0, 16))
    np.testing.assert_allclose(rms_norm(np.float32([3, 4]), eps=0.0), np.float32([3, 4]) / 12.5**0.5, rtol=1e-6)
    np.testing.assert_allclose(rms_norm(np.float32([[-2]]), eps=0.0), [[-1]], rtol=1e-6)


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("with_residual", [False, True], ids=["plain", "residual"])
def test_frameworks_agree(framework: str, with_residual: bool) -> None:
    x, weight, bias, residual = example().arrays
    residual = residual if with_residual else None
    want = rms_norm(x, weight, bias, residual=residual, out_dtype="bfloat16")
    x, weight, bias, residual = (None if a is None else to_framework(a, framework) for a in (x, weight, bias, residual))
    got = rms_norm(x, weight, bias, residual=residual, out_dtype="bfloat16")
    pairs = zip(got, want, strict=True) if with_residual else [(got, want)]
    for a, b in pairs:
        np.testing.assert_allclose(to_numpy(a).astype(np.float32), b.astype(np.float32), rtol=2.0**-7)


# --- derivatives in torch ------------------------------------------------------------------------------------------


def leaves(*arrays: Any) -> list[Any]:
    return [torch.tensor(array, requires_grad=True) for array in arrays]


def test_gradients_with_a_residual() -> None:
    x, residual, weight, bias, dout, dres = values(*[(2, 3, 16)] * 2, (16,), (16,), *[(2, 3, 16)] * 2)
    t = leaves(x, residual, weight, bias)
    out, h = rms_norm(t[0], t[2], t[3], EPS, residual=t[1])
    torch.autograd.backward([out, h], [torch.tensor(dout), torch.tensor(dres)])
    want = exact_gradients(x + residual, weight, bias, dout, dres, EPS)
    for leaf, name in zip(t, ("x", "x", "weight", "bias"), strict=True):
        np.testing.assert_allclose(leaf.grad, want[name], rtol=1e-4, atol=1e-5)
    assert t[0].grad.data_ptr() != t[1].grad.data_ptr()  # accumulating into one must not change the other


@pytest.mark.parametrize("which", ["out", "residual_out"])
def test_gradient_of_one_result_only(which: str) -> None:
    x, residual, weight, dout = values((3, 8), (3, 8), (8,), (3, 8))
    t = leaves(x, residual, weight)
    out, h = rms_norm(t[0], t[2], eps=EPS, residual=t[1])
    ((out if which == "out" else h) * torch.tensor(dout)).sum().backward()
    zero = np.zeros_like(dout)
    pair = (dout, zero) if which == "out" else (zero, dout)
    want = exact_gradients(x + residual, weight, None, *pair, EPS)
    for leaf, name in zip(t, ("x", "x", "weight"), strict=True):
        np.testing.assert_allclose(leaf.grad, want[name], rtol=1e-4, atol=1e-5)


def test_gradients_of_16_bit_inputs_have_their_dtypes() -> None:
    x, weight, dout = values((4, 32), (32,), (4, 32))
    x = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    tx = torch.tensor(x).bfloat16().requires_grad_()
    tw = torch.tensor(weight, requires_grad=True)
    rms_norm(tx, tw, eps=EPS).backward(torch.tensor(dout).bfloat16())
    want = exact_gradients(x, weight, None, torch.tensor(dout).bfloat16().double().numpy(), None, EPS)
    assert (tx.grad.dtype, tw.grad.dtype) == (torch.bfloat16, torch.float32)
    np.testing.assert_allclose(tx.grad.float(), want["x"], rtol=2.0**-8, atol=1e-5)
    np.testing.assert_allclose(tw.grad, want["weight"], rtol=1e-5, atol=1e-5)


def test_what_the_forward_keeps() -> None:
    """The sum and rstd, not x beside the sum: what x was is free to go."""
    x, residual, weight = values((3, 8), (3, 8), (8,))
    t = leaves(x, residual, weight)
    out, h = rms_norm(t[0], t[2], residual=t[1])
    kept = [tensor for tensor in out.grad_fn.saved_tensors if tensor is not None]
    assert [tuple(tensor.shape) for tensor in kept] == [(3, 8), (8,), (3,)]
    assert kept[0].data_ptr() == h.data_ptr()
    plain = rms_norm(t[0], t[2])
    assert plain.grad_fn.saved_tensors[0].data_ptr() == t[0].data_ptr()


def test_frozen_weight_and_no_grad() -> None:
    x, weight = values((3, 8), (8,))
    (leaf,) = leaves(x)
    rms_norm(leaf, torch.tensor(weight)).sum().backward()
    assert leaf.grad is not None
    with torch.no_grad():
        assert not rms_norm(leaf, torch.tensor(weight)).requires_grad


def test_expanded_and_strided_gradients() -> None:
    x, weight, dout = values((4, 6, 8), (8,), (8, 4))
    t = leaves(x, weight)
    rms_norm(t[0], t[1], eps=EPS)[:, 1].backward(torch.tensor(dout).T)
    grad = np.zeros_like(x)
    grad[:, 1] = dout.T
    want = exact_gradients(x, weight, None, grad, None, EPS)
    np.testing.assert_allclose(t[0].grad, want["x"], rtol=1e-4, atol=1e-5)
    t = leaves(x, weight)
    rms_norm(t[0], t[1], eps=EPS).sum().backward()
    want = exact_gradients(x, weight, None, np.ones_like(x), None, EPS)
    np.testing.assert_allclose(t[1].grad, want["weight"], rtol=1e-4, atol=1e-5)


def test_no_rows_have_gradients_of_zero() -> None:
    x, weight = torch.empty(0, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    rms_norm(x, weight).sum().backward()
    assert x.grad.shape == (0, 8)  # type: ignore[union-attr]
    assert torch.equal(weight.grad, torch.zeros(8))  # type: ignore[arg-type]


def test_double_backward_and_forward_mode_raise() -> None:
    (x,) = leaves(*values((3, 8)))
    (first,) = torch.autograd.grad(rms_norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotSupportedError, match="rms_norm_backward has no derivative"):
        first.sum().backward()
    with pytest.raises(NotSupportedError, match="rms_norm has no forward-mode derivative"):
        torch.func.jvp(rms_norm, (x.detach(),), (x.detach(),))


def test_func_grad_and_vmap() -> None:
    x, weight, dout = (torch.tensor(a) for a in values((3, 4, 8), (8,), (3, 4, 8)))
    want = exact_gradients(x.numpy(), weight.numpy(), None, dout.numpy(), None, EPS)
    got = torch.func.grad(lambda v: (rms_norm(v, weight, eps=EPS) * dout).sum())(x)
    np.testing.assert_allclose(got, want["x"], rtol=1e-4, atol=1e-5)
    each = torch.vmap(lambda v, r: rms_norm(v, weight, eps=EPS, residual=r))(x, dout)
    whole = rms_norm(x, weight, eps=EPS, residual=dout)
    for a, b in zip(each, whole, strict=True):
        torch.testing.assert_close(a, b)


# --- registered ops and JAX ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_residual", [False, True], ids=["plain", "residual"])
def test_opcheck(with_residual: bool) -> None:
    x, weight, bias, residual = leaves(*example().arrays)
    rms_norm(x, weight)
    arrays = (x, weight, bias, residual if with_residual else None)
    torch.library.opcheck(torch.ops.fe_norm.rms_norm.default, arrays, {"eps": EPS})
    dout, dres, _, _, _, rstd = (torch.tensor(a) for a in backward_example().arrays)
    arrays = (dout, dres if with_residual else None, x.detach(), weight.detach(), bias.detach(), rstd)
    torch.library.opcheck(torch.ops.fe_norm.rms_norm_backward.default, arrays)


@pytest.mark.parametrize("with_residual", [False, True], ids=["plain", "residual"])
def test_compiles_as_one_graph_with_its_gradient(with_residual: bool) -> None:
    x, weight, bias, residual = leaves(*example().arrays)

    def model(x: Any, weight: Any, bias: Any, residual: Any) -> Any:
        if not with_residual:
            return rms_norm(x * 2, weight, bias).square().sum()
        out, h = rms_norm(x * 2, weight, bias, residual=residual)
        return (out.square() + h).sum()

    given_ = (x, weight, bias, residual) if with_residual else (x, weight, bias)
    want = torch.autograd.grad(model(x, weight, bias, residual), given_)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(x, weight, bias, residual), given_)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_export() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8))

        def forward(self, x: Any, stream: Any) -> Any:
            out, stream = rms_norm(x, self.weight, residual=stream)
            return out + stream

    x = torch.randn(4, 8)
    with torch.no_grad():
        exported = torch.export.export(Block(), (x, x)).module()
        torch.testing.assert_close(exported(x, x), Block()(x, x))


def test_jax_entry_and_its_gradient() -> None:
    x, residual, weight, bias, dout, dres = values(*[(2, 3, 16)] * 2, (16,), (16,), *[(2, 3, 16)] * 2)

    def loss(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
        out, h = rms_norm_jax(x, weight, bias, eps=EPS, residual=residual)
        return (out * dout).sum() + (h * dres).sum()

    want = exact_gradients(x + residual, weight, bias, dout, dres, EPS)
    given_ = [jnp.asarray(a) for a in (x, residual, weight, bias)]
    for gradient in (jax.grad(loss, (0, 1, 2, 3)), jax.jit(jax.grad(loss, (0, 1, 2, 3)))):
        for got, name in zip(gradient(*given_), ("x", "x", "weight", "bias"), strict=True):
            np.testing.assert_allclose(got, want[name], rtol=1e-4, atol=1e-5)


def test_jax_without_residual_and_with_other_dtypes() -> None:
    x, weight, dout = values((3, 16), (16,), (3, 16))
    half = jnp.asarray(x).astype(jnp.bfloat16)
    want = exact_gradients(np.asarray(half, np.float64), weight, None, dout, None, EPS)

    def loss(x: Any, weight: Any) -> Any:
        return (rms_norm_jax(x, weight, eps=EPS, out_dtype="float32") * dout).sum()

    dx, dweight = jax.grad(loss, (0, 1))(half, jnp.asarray(weight))
    assert (dx.dtype, dweight.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(np.asarray(dx, np.float64), want["x"], rtol=2.0**-8, atol=1e-5)
    np.testing.assert_allclose(dweight, want["weight"], rtol=1e-4, atol=1e-5)
    assert jax.eval_shape(rms_norm_jax, half, weight).dtype == jnp.bfloat16
    with pytest.raises(NotSupportedError, match=r"rms_norm_jax has no (second )?derivative"):
        jax.grad(lambda v: jax.grad(loss)(v, weight).astype(jnp.float32).sum())(half)


# --- plan ----------------------------------------------------------------------------------------------------------


def on_gpu(shape: tuple[int, ...], dtype: str = "bfloat16", stride: Any = None) -> TensorDesc:
    return TensorDesc.of(dtype, shape, stride, device="cuda:0")


def kernel_of(operation: Any, *arrays: Any, target: Target | None = None, **options: Any) -> Any:
    found = operation.plan(operation.bind(arrays, options), target=target).kernel
    assert found is not None
    return found


def test_rows_and_eps_are_not_in_the_kernel_key() -> None:
    for n in (1, 33, 4096):
        w = on_gpu((n,))
        rows = [on_gpu((m, n)) for m in (1, 2, 77, 2**22)]
        assert len({kernel_of(OPERATION, x, w, None, x, eps=e).spec for x in rows for e in (0.0, 1e-5)}) == 1
        scales = [on_gpu((x.shape[0],), "float32") for x in rows]
        assert len({kernel_of(BACKWARD, x, None, x, w, None, r).spec for x, r in zip(rows, scales, strict=True)}) == 1


def test_what_changes_the_code_is_in_the_kernel_key() -> None:
    x, w, r = on_gpu((4, 512)), on_gpu((512,)), on_gpu((4,), "float32")
    wide, odd = on_gpu((4, 512), "float32"), on_gpu((4, 512), stride=(513, 1))
    forward = [
        kernel_of(OPERATION, *arrays, **options).spec
        for arrays, options in [
            ((x, w, None, None), {}),
            ((x, None, None, None), {}),
            ((x, w, w, None), {}),
            ((x, w, None, x), {}),
            ((x, w, None, odd), {}),
            ((wide, w, None, None), {}),
            ((x, on_gpu((512,), "float32"), None, None), {}),
            ((x, w, None, None), {"out_dtype": "float32"}),
        ]
    ]
    assert len(set(forward)) == len(forward)
    backward = [
        kernel_of(BACKWARD, *arrays).spec
        for arrays in [
            (x, None, x, w, None, r),
            (x, None, x, w, None, None),
            (x, x, x, w, None, r),
            (x, None, x, w, w, r),
            (x, None, x, None, None, r),
            (x, None, x, None, w, r),
            (wide, None, x, w, None, r),
            (x, None, wide, w, None, r),
            (odd, None, x, w, None, r),
            (x, None, odd, w, None, r),
        ]
    ]
    assert len(set(backward)) == len(backward)


def test_scratch_holds_one_row_of_sums_for_each_block() -> None:
    w = on_gpu((4096,))
    for m in (1, 100, 100_000):
        x, r = on_gpu((m, 4096)), on_gpu((m,), "float32")
        kernel = kernel_of(BACKWARD, x, None, x, w, None, r, target=Target((9, 0), 132))
        config = dict(kernel.spec.config)
        assert config["blocks"] == config["blocks_per_sm"] * 132
        assert kernel.form.scratch == (((min(m, config["blocks"]), 4096), "float32"),)
    x, r = on_gpu((7, 4096)), on_gpu((7,), "float32")
    assert kernel_of(BACKWARD, x, None, x, None, None, r).form.scratch == ()
    assert len(kernel_of(BACKWARD, x, None, x, w, w, r).form.scratch) == 2


def test_only_dimensions_that_do_not_merge_are_copied() -> None:
    apart, whole = on_gpu((2, 3, 64), stride=(1000, 128, 1)), on_gpu((2, 3, 64), stride=(384, 128, 1))
    assert kernel_of(OPERATION, whole, None, None, whole).copies == ()
    assert kernel_of(OPERATION, whole, None, None, apart).copies == ("residual",)
    assert kernel_of(OPERATION, apart, None, None, None).copies == ("x",)
    assert kernel_of(BACKWARD, apart, None, whole, None, None, None).copies == ("dout",)
    assert kernel_of(BACKWARD, whole, apart, apart, None, None, None).copies == ("dresidual_out", "x")


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)], ids=str)
def test_every_architecture_has_both_kernels(capability: tuple[int, int]) -> None:
    x, w, target = on_gpu((4, 8192)), on_gpu((8192,)), Target(capability, 100)
    kernel_of(OPERATION, x, w, None, x, target=target)
    kernel_of(BACKWARD, x, x, x, w, w, None, target=target)
