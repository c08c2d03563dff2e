"""Gradients of ``gemm_swiglu`` through the front door: torch autograd, torch.compile, ``jax.grad``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from dense_calls import scaled
from naive_gemm import operand

from fe_gemm import gemm_swiglu_jax, gemm_swiglu_wrapper
from fe_gemm.dense.swiglu import OPERATION as FORWARD
from fe_gemm.dense.swiglu_backward import CONTRACT, OPERATION
from fe_runtime.errors import NotSupportedError
from fe_runtime.testing import Call, assert_rejected, invalid_calls, to_numpy

M, N, K = 24, 128, 40
ALPHA = 0.5


def matrices(dtype: torch.dtype = torch.float32, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn((batch, rows, K), generator=generator).permute(1, 2, 0) for rows in (M, N))
    return (0.5 * a).to(dtype), (0.5 * b).to(dtype)


def plain(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula in float64, differentiable."""
    x = ALPHA * torch.einsum("mkl,nkl->mnl", a.double(), b.double())
    blocks = x.reshape(x.shape[0], -1, 2, 32, x.shape[2])
    c = blocks[:, :, 0] * torch.nn.functional.silu(blocks[:, :, 1])
    return x, c.reshape(x.shape[0], -1, x.shape[2])


def gradients(function: Any, a: torch.Tensor, b: torch.Tensor, through: str) -> list[torch.Tensor]:
    a, b = (x.detach().clone(memory_format=torch.preserve_format).requires_grad_(True) for x in (a, b))
    x, c = function(a, b)
    weights = torch.linspace(-1, 1, x.numel()).reshape(x.shape), torch.linspace(1, -2, c.numel()).reshape(c.shape)
    parts = {"ab12": x.double() * weights[0], "c": c.double() * weights[1]}
    sum(part.sum() for name, part in parts.items() if name in through).backward()  # type: ignore[union-attr]
    return [a.grad, b.grad]  # type: ignore[list-item]


def ours(**options: Any) -> Any:
    return lambda a, b: tuple(gemm_swiglu_wrapper(a, b, ALPHA, **options))[:2]


def assert_close(found: Any, wanted: Any, tolerance: float) -> None:
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(
            got.double(), want.double(), rtol=tolerance, atol=tolerance * float(want.abs().max())
        )


@pytest.mark.parametrize("through", ["c", "ab12", "c and ab12"])
@pytest.mark.parametrize(("dtype", "tolerance"), [
    (torch.float32, 2e-3), (torch.float16, 4e-3), (torch.bfloat16, 2e-2),
])  # fmt: skip
def test_torch_gradients(dtype: torch.dtype, tolerance: float, through: str) -> None:
    a, b = matrices(dtype)
    found = gradients(ours(c_dtype=torch.float16), a, b, through)
    assert [g.dtype for g in found] == [dtype, dtype]
    assert_close(found, gradients(plain, a, b, through), tolerance)


def test_gradients_of_other_majors() -> None:
    a, b = (x.permute(2, 1, 0).contiguous().permute(2, 1, 0) for x in matrices(torch.bfloat16))
    found = gradients(ours(c_major="m", c_dtype=torch.bfloat16), a, b, "c and ab12")
    assert [g.stride() for g in found] == [x.stride() for x in (a, b)]
    assert_close(found, gradients(plain, a, b, "c and ab12"), 2e-2)


def test_gradients_of_any_strides() -> None:
    a, b = (x.requires_grad_(True) for x in matrices(torch.bfloat16))
    c = gemm_swiglu_wrapper(a, b, ALPHA)["c_tensor"]
    c.sum().backward()  # a gradient of stride 0
    expected = a.grad.clone()  # type: ignore[union-attr]
    a.grad = None
    ones = torch.ones((2, 64, M + 3), dtype=c.dtype).permute(2, 1, 0)[3:]
    gemm_swiglu_wrapper(a, b, ALPHA)["c_tensor"].backward(ones)
    assert torch.equal(a.grad, expected)  # type: ignore[arg-type]


def test_torch_compile() -> None:
    a, b = matrices(torch.bfloat16)
    torch.compiler.reset()
    compiled = torch.compile(ours(), fullgraph=True)
    for got, want in zip(gradients(compiled, a, b, "c"), gradients(ours(), a, b, "c"), strict=True):
        assert torch.equal(got, want)


def test_registered_ops() -> None:
    a, b = (x.requires_grad_(True) for x in matrices(torch.float16))
    torch.library.opcheck(torch.ops.fe_gemm.gemm_swiglu.default, (a, b), {"alpha": ALPHA})
    x, c = (t.detach() for t in ours()(a, b))
    given = (c, None, a.detach(), b.detach(), x)
    torch.library.opcheck(torch.ops.fe_gemm.gemm_swiglu_backward.default, given, {"alpha": ALPHA})


def test_other_operands_run_on_detached_data() -> None:
    a, b = matrices()
    a8, b8 = (x.to(torch.float8_e4m3fn) for x in (torch.nn.functional.pad(m.permute(2, 0, 1), (0, 8)) for m in (a, b)))
    a8, b8 = a8.permute(1, 2, 0).requires_grad_(True), b8.permute(1, 2, 0)
    assert not gemm_swiglu_wrapper(a8, b8)["c_tensor"].requires_grad
    rng = np.random.default_rng(0)
    given = scaled(operand(rng, 32, 64, 1, "mxfp8_e4m3"), operand(rng, 64, 64, 1, "mxfp8_e4m3"), "torch")
    given[0].requires_grad_(True)
    result = gemm_swiglu_wrapper(*given[:2], sfa_tensor=given[2], sfb_tensor=given[3], sf_vec_size=32)
    assert not result["c_tensor"].requires_grad
    compiled = torch.compile(lambda x: gemm_swiglu_wrapper(x, b8)["c_tensor"], fullgraph=True)
    assert not compiled(a8).requires_grad


def test_only_one_derivative() -> None:
    a, b = (x.requires_grad_(True) for x in matrices())
    (da,) = torch.autograd.grad(gemm_swiglu_wrapper(a, b)["c_tensor"].sum(), a, create_graph=True)
    with pytest.raises(NotSupportedError, match="double backward"):
        da.sum().backward()


def test_jax_gradients_agree_with_torchs() -> None:
    a, b = matrices(torch.bfloat16, batch=1)
    arrays = [jnp.asarray(to_numpy(x)) for x in (a, b)]

    def loss(a: Any, b: Any) -> Any:
        ab12, c = gemm_swiglu_jax(a, b, ALPHA)
        weights = jnp.linspace(-1, 1, ab12.size).reshape(ab12.shape), jnp.linspace(1, -2, c.size).reshape(c.shape)
        return (ab12 * weights[0]).sum() + (c.astype(jnp.float32) * weights[1]).sum()

    wanted = gradients(ours(), a, b, "c and ab12")
    for transform in (jax.grad(loss, (0, 1)), jax.jit(jax.grad(loss, (0, 1)))):
        for got, want in zip(transform(*arrays), wanted, strict=True):
            assert got.dtype == jnp.bfloat16
            want32, got32 = want.float().numpy(), np.asarray(got, np.float32)
            np.testing.assert_allclose(got32, want32, rtol=2e-2, atol=2e-2 * np.abs(want32).max())


def test_jax_has_no_derivative_with_scales() -> None:
    rng = np.random.default_rng(0)
    given = scaled(operand(rng, 32, 64, 1, "mxfp8_e4m3"), operand(rng, 64, 64, 1, "mxfp8_e4m3"), "jax")

    def loss(a: Any) -> Any:
        scales = {"sfa_tensor": given[2], "sfb_tensor": given[3], "sf_vec_size": 32}
        return gemm_swiglu_jax(a, given[1], **scales)[0].sum()

    with pytest.raises(NotSupportedError, match="gemm_swiglu_jax has no derivative"):
        jax.grad(loss)(given[0])


def example() -> Call:
    rng = np.random.default_rng(0)
    shapes = {"dc": (8, 64, 1), "dab12": (8, 128, 1), "a": (8, 16, 1), "b": (128, 16, 1), "ab12": (8, 128, 1)}
    arrays = [rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in shapes.values()]
    return Call(tuple(arrays), {"alpha": 1.0})


@pytest.mark.parametrize("wrong", invalid_calls(CONTRACT, example()), ids=lambda call: call.id)
def test_invalid_call_of_the_backward(wrong: Any) -> None:
    assert_rejected(lambda arrays, options: OPERATION(arrays, options), "gemm_swiglu_backward", wrong)


def test_the_forward_declares_it() -> None:
    assert FORWARD.gradient is not None
    assert FORWARD.gradient.operation is OPERATION
