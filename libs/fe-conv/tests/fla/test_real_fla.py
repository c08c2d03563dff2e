"""The replacements in the installed flash-linear-attention package; skipped where it cannot be imported.

On the CPU its own kernels do not run, so what is compared there is our side: which call goes where, and what the native
call gives to the package's own layers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any

import pytest
import torch

import fe_conv.fla as ours
from fe_conv.fla import gated_mlp, gates, routes, short_conv

modules: Any = pytest.importorskip("fla.modules", reason="flash-linear-attention is not installed")

EVERYTHING = ("gated_delta_rule", "kda", "gated_mlp", "short_conv")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for route in (routes.GATED_DELTA_RULE, routes.KDA, routes.GATED_MLP, routes.SHORT_CONV):
        monkeypatch.setattr(route, "last", None)
    yield
    ours.restore_fla()


def holders(name: str) -> dict[str, Any]:
    """What every module of the package holds under a name."""
    found = {m: vars(module).get(name) for m, module in list(sys.modules.items()) if m.partition(".")[0] == "fla"}
    return {module: value for module, value in found.items() if value is not None}


def test_the_version_is_known() -> None:
    assert gates.is_known_version()


def test_everything_is_replaced_and_put_back() -> None:
    import fla.modules.mlp as mlp
    from fla.modules.convolution import causal_conv1d_update  # noqa: F401 - a synthetic module in some releases
    from fla.ops import chunk_gated_delta_rule, chunk_gdn, chunk_kda  # noqa: F401

    names = ("chunk_gated_delta_rule", "chunk_gdn", "chunk_kda", "causal_conv1d_update")
    before = {name: holders(name) for name in names}
    forward = mlp.GatedMLP.forward
    ours.accelerate_fla(verbose=False, targets=EVERYTHING)
    for name in names:
        after = holders(name)
        assert set(after) == set(before[name])
        (replaced,) = set(after.values())
        (original,) = set(before[name].values())
        assert replaced is not original
        assert replaced.__wrapped__ is original
        assert inspect.signature(replaced) == inspect.signature(original)
    assert mlp.GatedMLP.forward.__wrapped__ is forward
    ours.restore_fla()
    assert {name: holders(name) for name in names} == before
    assert mlp.GatedMLP.forward is forward


def test_routes_of_calls_on_the_cpu() -> None:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as plain  # noqa: F401
    from fla.ops.kda import chunk_kda  # noqa: F401

    ours.accelerate_fla(verbose=False, targets=EVERYTHING)
    q = torch.zeros(1, 64, 2, 64)
    with suppress(Exception):  # the original's kernels want a GPU
        sys.modules["fla.ops"].chunk_gated_delta_rule(q, q, q, q[..., 0], q[..., 0])
    with suppress(Exception):
        sys.modules["fla.ops"].chunk_kda(q, q, q, q, q[..., 0])
    with suppress(Exception):
        modules.ShortConvolution(16, 4).to(BF16).step(torch.zeros(2, 1, 16, dtype=BF16), None, None)
    with suppress(Exception):
        modules.GatedMLP(16, intermediate_size=32).to(BF16)(torch.zeros(2, 16, dtype=BF16))
    assert ours.last_path() == ours.kda_last_path() == "fallback:unsupported-op"
    assert ours.short_conv_last_path() == ours.mlp_last_path() == "fallback:non-cuda"


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_short_convolution_steps(monkeypatch: pytest.MonkeyPatch, activation: str | None, bias: bool) -> None:
    monkeypatch.setattr(short_conv, "_misplaced", lambda x, tensors, weight, cache: None)
    monkeypatch.setattr(short_conv, "_backend", lambda device: "reference")
    ours.accelerate_fla(verbose=False, targets="short_conv")
    torch.manual_seed(0)
    layer = modules.ShortConvolution(16, 4, bias=bias, activation=activation).to(BF16).requires_grad_(False)
    cache, seen = torch.zeros(3, 16, 4, dtype=BF16), []
    for _ in range(6):
        x = torch.randn(3, 1, 16).to(BF16)
        seen.append(x)
        y, returned = layer.step(x, None, cache, output_final_state=True)
        assert ours.short_conv_last_path() == "native"
        assert returned is cache
        history = torch.cat(([torch.zeros_like(x)] * 3 + seen)[-4:], 1).double()
        z = (history * layer.weight[:, 0].double().t()).sum(1) + (layer.bias.double() if bias else 0)
        want = z * torch.sigmoid(z) if activation else z
        torch.testing.assert_close(y[:, 0].double(), want, rtol=2.0**-8, atol=1e-3)


def test_gated_mlp_is_handed_to_fe_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = torch.nn.functional.linear
    gemm = ModuleType("fe_gemm")
    gemm.swiglu_mlp = lambda x, gate, up, down: linear(  # type: ignore[attr-defined]
        torch.nn.functional.silu(linear(x, gate)) * linear(x, up), down
    )
    monkeypatch.setitem(sys.modules, "fe_gemm", gemm)
    monkeypatch.setattr(gated_mlp, "_tokens", lambda x: None)
    ours.accelerate_fla(verbose=False, targets="gated_mlp")
    layer = modules.GatedMLP(16, intermediate_size=32).to(BF16)
    x = torch.randn(4, 16).to(BF16)
    y = layer(x)
    assert ours.mlp_last_path() == "native"
    z = torch.nn.functional.silu(layer.gate_proj(x)) * layer.up_proj(x)
    torch.testing.assert_close(y, layer.down_proj(z))


@pytest.mark.parametrize("width", [64, 72], ids=["whole blocks", "padded"])
def test_gated_mlp_on_fe_gemm(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """The package's layer and the installed fe-gemm: values and gradients against float64."""
    pytest.importorskip("fe_gemm", reason="fe-gemm is not installed")
    monkeypatch.setattr(gated_mlp, "_tokens", lambda x: None)
    ours.accelerate_fla(verbose=False, targets="gated_mlp")
    torch.manual_seed(0)
    layer = modules.GatedMLP(16, intermediate_size=width).to(BF16)
    x = torch.randn(2, 5, 16).to(BF16).requires_grad_()
    y = layer(x, ignored="natively")
    assert ours.mlp_last_path() == "native"
    y.sum().backward()
    leaves = [x, layer.gate_proj.weight, layer.up_proj.weight, layer.down_proj.weight]
    exact, gate, up, down = (leaf.detach().double().requires_grad_() for leaf in leaves)
    want = (torch.nn.functional.silu(exact @ gate.t()) * (exact @ up.t())) @ down.t()
    torch.testing.assert_close(y.double(), want, rtol=2.0**-6, atol=2.0**-6 * float(want.detach().abs().max()))
    wanted = torch.autograd.grad(want.sum(), (exact, gate, up, down))
    for leaf, gradient in zip(leaves, wanted, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(
            leaf.grad.double(), gradient, rtol=2.0**-6, atol=2.0**-6 * float(gradient.abs().max())
        )


def test_gated_mlp_without_fe_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fe_gemm", None)  # type: ignore[arg-type]
    monkeypatch.setattr(gated_mlp, "_tokens", lambda x: None)
    ours.accelerate_fla(verbose=False, targets="gated_mlp")
    with suppress(Exception):  # the original's kernels want a GPU
        modules.GatedMLP(16, intermediate_size=32).to(BF16)(torch.zeros(2, 16, dtype=BF16))
    assert ours.mlp_last_path() == "fallback:ModuleNotFoundError"


# ---- on a GPU, against the package's own kernels


@pytest.mark.gpu
@pytest.mark.timeout(250)  # the package compiles its own kernels
def test_gated_mlp_gives_what_the_package_gives() -> None:
    pytest.importorskip("fe_gemm", reason="fe-gemm is not installed")
    torch.manual_seed(0)
    layer = modules.GatedMLP(512, intermediate_size=1000).to("cuda", BF16)
    x = torch.randn(3, 257, 512, device="cuda").to(BF16)
    weights = [layer.gate_proj.weight, layer.up_proj.weight, layer.down_proj.weight]

    def call() -> list[Any]:
        given = x.clone().requires_grad_()
        y = layer(given)
        return [y, *torch.autograd.grad(y.float().square().sum(), (given, *weights))]

    want = call()
    ours.accelerate_fla(verbose=False, targets="gated_mlp")
    got = call()
    expected = "native" if torch.cuda.get_device_capability() == (9, 0) else "fallback:unsupported-arch"
    assert ours.mlp_last_path() == expected
    for mine, theirs in zip(got, want, strict=True):
        # Both round their hidden activations and gradients to bf16, at different places.
        assert (mine.float() - theirs.float()).norm() <= 2.0**-6 * theirs.float().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("rows", "channels"), [(1, 2048), (64, 4096), (256, 8192)])
def test_short_convolution_gives_what_the_package_gives(rows: int, channels: int, bias: bool, residual: bool) -> None:
    torch.manual_seed(0)
    layer = modules.ShortConvolution(channels, 4, bias=bias, activation="silu", device="cuda", dtype=BF16)
    layer.requires_grad_(False)
    x = [torch.randn(rows, 1, channels, device="cuda").to(BF16) for _ in range(5)]
    extra = torch.randn(rows, 1, channels, device="cuda").to(BF16) if residual else None

    def steps() -> tuple[Any, Any]:
        cache = torch.zeros(rows, channels, 4, dtype=BF16, device="cuda")
        return [layer.step(token, extra, cache, output_final_state=True)[0] for token in x], cache

    want, want_cache = steps()
    ours.accelerate_fla(verbose=False, targets="short_conv")
    got, cache = steps()
    assert ours.short_conv_last_path() == "native"
    assert torch.equal(cache, want_cache)
    # One rounding each, or two where the residual is added to the rounded sum.
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2.0**-6, atol=2.0**-6)


@pytest.mark.gpu
@pytest.mark.timeout(250)  # the package compiles its own kernels
def test_everything_else_falls_back_on_a_gpu() -> None:
    ours.accelerate_fla(verbose=False, targets=EVERYTHING)
    q, k, v = (torch.randn(1, 128, 2, 64, device="cuda").to(BF16) for _ in range(3))
    g, beta = -torch.rand(1, 128, 2, device="cuda"), torch.rand(1, 128, 2, device="cuda").to(BF16)
    o, state = sys.modules["fla.ops"].chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
    assert o.shape == v.shape
    assert state is None
    assert ours.last_path() == "fallback:unsupported-op"
    layer = modules.GatedMLP(64, intermediate_size=128).to("cuda", BF16)
    assert layer(torch.randn(4, 64, device="cuda").to(BF16)).shape == (4, 64)
    assert ours.mlp_last_path() in ("native", "fallback:ModuleNotFoundError", "fallback:unsupported-arch")
    x = torch.randn(2, 1, 64, device="cuda").to(BF16)
    layer = modules.ShortConvolution(64, 4, activation="silu", device="cuda", dtype=BF16)
    layer.step(x, None, torch.zeros(2, 64, 4, device="cuda", dtype=BF16))
    assert ours.short_conv_last_path() == "fallback:autograd"
