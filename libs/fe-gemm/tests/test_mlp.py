"""The gated MLP: values and gradients against float64, frameworks, compilers, weights in one array, errors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import fe_gemm
from fe_gemm import interleave_gate_up, split_gate_up, swiglu_mlp, swiglu_mlp_interleaved
from fe_runtime.arrays import Device, capability
from fe_runtime.errors import InvalidArgumentError
from fe_runtime.testing import to_framework, to_numpy

K, F, O = 48, 96, 40  # noqa: E741 - as in the docstring
U = {"float32": 2.0**-20, "float16": 2.0**-10, "bfloat16": 2.0**-7}
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
NAMES = ("x", "w_gate", "w_up", "w_down")


def arrays(dtype: str = "bfloat16", lead: tuple[int, ...] = (3, 5), features: int = F) -> list[Any]:
    """x, w_gate, w_up, w_down in numpy."""
    rng = np.random.default_rng(0)
    shapes = ((*lead, K), (features, K), (features, K), (O, features))
    return [(0.3 * rng.standard_normal(shape)).astype(DTYPES[dtype]) for shape in shapes]


def exact(x: Any, gate: Any, up: Any, down: Any) -> Any:
    x, gate, up, down = (np.asarray(one, np.float64) for one in (x, gate, up, down))
    z = x @ gate.T
    return (z / (1 + np.exp(-z)) * (x @ up.T)) @ down.T


def assert_near(got: Any, want: Any, dtype: str) -> None:
    got, want = np.asarray(to_numpy(got), np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=4 * U[dtype], atol=4 * U[dtype] * np.abs(want).max(initial=0))


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values(dtype: str, framework: str) -> None:
    given = arrays(dtype)
    x, gate, up, down = (to_framework(one, framework) for one in given)
    result = swiglu_mlp(x, gate, up, down)
    assert result.dtype == x.dtype
    assert_near(result, exact(*given), dtype)
    assert_near(swiglu_mlp_interleaved(x, interleave_gate_up(gate, up), down), exact(*given), dtype)


@pytest.mark.parametrize("lead", [(), (1,), (0,), (2, 0), (7,), (2, 3, 4)], ids=str)
def test_leading_dimensions(lead: tuple[int, ...]) -> None:
    for dtype in ("float32", "bfloat16"):
        given = arrays(dtype, lead)
        result = swiglu_mlp(*(to_framework(one, "torch") for one in given))
        assert result.shape == (*lead, O)
        assert_near(result, exact(*given), dtype)


@pytest.mark.parametrize("features", [1, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_any_number_of_features(dtype: str, features: int) -> None:
    given = arrays(dtype, features=features)
    x, gate, up, down = (to_framework(one, "torch").requires_grad_() for one in given)
    both = interleave_gate_up(gate, up)
    assert both.shape[0] == -(-features // 32) * 64
    for result in (swiglu_mlp(x, gate, up, down), swiglu_mlp_interleaved(x, both, down)):
        assert_near(result.detach(), exact(*given), dtype)
        found = torch.autograd.grad(result.float().sum(), (x, gate, up, down), retain_graph=True)
        assert [g.shape for g in found] == [(3, 5, K), (features, K), (features, K), (O, features)]


def plain(x: Any, gate: Any, up: Any, down: Any) -> Any:
    linear = torch.nn.functional.linear
    return linear(torch.nn.functional.silu(linear(x, gate)) * linear(x, up), down)


def gradients(function: Any, given: list[Any], double: bool = False) -> list[Any]:
    leaves = [(one.double() if double else one).detach().clone().requires_grad_() for one in given]
    result = function(*leaves)
    weights = torch.linspace(-1, 2, result.numel(), dtype=torch.float64).reshape(result.shape)
    return list(torch.autograd.grad((result.double() * weights).sum(), leaves))


@pytest.mark.parametrize("features", [F, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dtype: str, features: int) -> None:
    given = [to_framework(one, "torch") for one in arrays(dtype, features=features)]
    for got, want in zip(gradients(swiglu_mlp, given), gradients(plain, given, double=True), strict=True):
        assert_near(got, want, dtype)


def test_gradients_of_some_arrays() -> None:
    x, gate, up, down = (to_framework(one, "torch") for one in arrays())
    for leaf in (x, gate, up, down):
        leaf.requires_grad_()
        swiglu_mlp(x, gate, up, down).float().sum().backward()
        assert leaf.grad is not None
        leaf.requires_grad_(False)


@pytest.mark.parametrize("features", [F, 40])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_compile(dtype: str, features: int) -> None:
    given = [to_framework(one, "torch") for one in arrays(dtype, features=features)]
    torch.compiler.reset()
    compiled = torch.compile(swiglu_mlp, fullgraph=True)
    assert_near(compiled(*given), to_numpy(swiglu_mlp(*given)), dtype)
    for got, want in zip(gradients(compiled, given), gradients(swiglu_mlp, given), strict=True):
        assert_near(got, to_numpy(want), dtype)


def test_any_number_of_rows_under_torch_compile() -> None:
    _, gate, up, down = (to_framework(one, "torch") for one in arrays())
    torch.compiler.reset()
    compiled = torch.compile(swiglu_mlp_interleaved, fullgraph=True, dynamic=True)
    both = interleave_gate_up(gate, up)
    for rows in (3, 8, 17):
        x = to_framework(arrays(lead=(rows,))[0], "torch")
        assert_near(compiled(x, both, down), to_numpy(swiglu_mlp(x, gate, up, down)), "bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jax_transforms(dtype: str) -> None:
    given = arrays(dtype, features=40)
    leaves = [jnp.asarray(one) for one in given]

    def loss(*leaves: Any) -> Any:
        result = swiglu_mlp(*leaves).astype(jnp.float32)
        return (result * jnp.linspace(-1, 2, result.size).reshape(result.shape)).sum()

    want = gradients(plain, [to_framework(one, "torch") for one in given], double=True)
    for transform in (jax.grad(loss, (0, 1, 2, 3)), jax.jit(jax.grad(loss, (0, 1, 2, 3)))):
        for got, wanted in zip(transform(*leaves), want, strict=True):
            assert_near(got, wanted, dtype)


def test_strided_operands() -> None:
    x, gate, up, down = (to_framework(one, "torch") for one in arrays(lead=(4, 8)))
    want = swiglu_mlp(x, gate, up, down)
    turned = [one.t().contiguous().t() for one in (gate, up, down)]
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(swiglu_mlp(strided, *turned), want)
    wide = torch.full((4, 8, K + 3), float("nan"), dtype=x.dtype)
    wide[..., :K] = x
    assert torch.equal(swiglu_mlp(wide[..., :K], gate, up, down), want)


def test_a_changed_weight_counts() -> None:
    """However it was written: nothing is kept from one call to the next."""
    x, gate, up, down = (to_framework(one, "torch") for one in arrays())
    swiglu_mlp(x, gate, up, down)
    gate.data.mul_(2)  # which no version counter shows
    assert torch.equal(swiglu_mlp(x, gate, up, down), swiglu_mlp(x, gate.clone(), up, down))


# ---- the weights


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("shape", [(64, 5), (32,), (33, 2, 3), (1, 4)], ids=str)
def test_interleaved_rows(shape: tuple[int, ...], framework: str) -> None:
    rng = np.random.default_rng(0)
    given = [rng.standard_normal(shape).astype(np.float32) for _ in range(2)]
    gate, up = (to_framework(one, framework) for one in given)
    both = to_numpy(interleave_gate_up(gate, up))
    for row in range(both.shape[0]):
        block, place = divmod(row, 64)
        feature = block * 32 + place % 32
        source = given[0] if place >= 32 else given[1]
        want = source[feature] if feature < shape[0] else np.zeros(shape[1:])
        np.testing.assert_array_equal(both[row], want)
    for found, want in zip(split_gate_up(to_framework(both, framework), shape[0]), given, strict=True):
        np.testing.assert_array_equal(to_numpy(found), want)
    assert split_gate_up(to_framework(both, framework))[0].shape == (both.shape[0] // 2, *shape[1:])


def test_interleaving_is_differentiable() -> None:
    gate, up = (torch.randn(40, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(interleave_gate_up, (gate, up))
    both = interleave_gate_up(gate, up).detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda w: split_gate_up(w, 40), both)


# ---- errors


def wrong(name: str, array: Any) -> dict[str, Any]:
    return {**dict(zip(NAMES, arrays(), strict=True)), name: array}


ERRORS = {
    "rank of a weight": (wrong("w_up", arrays()[2][0]), "w_up must be a matrix"),
    "scalar x": (wrong("x", arrays()[0][0, 0, 0:1].reshape(())), "x must have a last dimension"),
    "no features": (wrong("w_down", arrays()[3][:, :0]), "w_down must be a matrix"),
    "width": (wrong("w_gate", arrays()[1][:, :40]), r"w_gate must have shape \(96, 48\); got \(96, 40\)"),
    "features": (wrong("w_down", arrays()[3][:, :64]), r"w_gate must have shape \(64, 48\)"),
    "dtype": (wrong("w_up", arrays("float16")[2]), "w_up must be of bfloat16, like x; got float16. Convert it."),
}


@pytest.mark.parametrize(("given", "text"), ERRORS.values(), ids=list(ERRORS))
def test_operands_that_do_not_fit(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        swiglu_mlp(**given)


def test_other_errors() -> None:
    x, gate, up, down = arrays()
    with pytest.raises(InvalidArgumentError, match="x must have a multiple of 8 as last dimension; got 44"):
        swiglu_mlp(x[..., :44], gate[:, :44], up[:, :44], down)
    with pytest.raises(InvalidArgumentError, match="x must be bfloat16, float16 or float32; got float64"):
        swiglu_mlp(*(one.astype(np.float64) for one in (x, gate, up, down)))
    with pytest.raises(InvalidArgumentError, match=r"w_gate_up must have shape \(192, 48\)"):
        swiglu_mlp_interleaved(x, np.concatenate([gate, up])[:128], down)
    with pytest.raises(InvalidArgumentError, match=r"w_up must be .* like w_gate"):
        interleave_gate_up(gate, up[:64])
    with pytest.raises(InvalidArgumentError, match="w_gate must have rows"):
        interleave_gate_up(gate[:0], up[:0])
    with pytest.raises(InvalidArgumentError, match="w_gate_up must have a multiple of 64 rows"):
        split_gate_up(gate[:32])
    for features in (0, 33):
        with pytest.raises(InvalidArgumentError, match="features must lie between 1 and 32"):
            split_gate_up(gate[:64], features)


def test_the_names_are_public() -> None:
    assert {"interleave_gate_up", "split_gate_up", "swiglu_mlp", "swiglu_mlp_interleaved"} <= set(fe_gemm.__all__)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kernels_serve_it(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    if capability(Device("cuda", 0)) != (9, 0):
        pytest.skip("needs a Hopper GPU")
    monkeypatch.setenv("FE_STRICT", "1")
    given = [to_framework(one, "torch", "cuda") for one in arrays(dtype, lead=(3, 50), features=200)]
    assert_near(swiglu_mlp(*given), exact(*(to_numpy(one) for one in given)), dtype)
    on_host = [one.cpu() for one in given]
    want = gradients(plain, on_host, double=True)
    leaves = [one.clone().requires_grad_() for one in given]
    result = swiglu_mlp(*leaves)
    weights = torch.linspace(-1, 2, result.numel(), dtype=torch.float64, device="cuda").reshape(result.shape)
    for got, wanted in zip(torch.autograd.grad((result.double() * weights).sum(), leaves), want, strict=True):
        assert_near(got.cpu(), wanted, dtype)
