"""The gated MLP: which calls go to fe-gemm, and what becomes of the others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrize

from fe_conv import fla
from fe_conv.fla import gated_mlp

BF16 = torch.bfloat16


@pytest.fixture
def mlp(fake_fla: SimpleNamespace) -> Any:
    """An instance, its class replaced."""
    fla.accelerate_fla(verbose=False, targets="gated_mlp")
    return fake_fla.module("fla.modules.mlp").GatedMLP().to(BF16)


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let CPU tensors pass for tensors on a GPU with kernels."""
    monkeypatch.setattr(gated_mlp, "_tokens", lambda x: None)


@pytest.fixture
def gemm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for fe-gemm that has the operation."""

    def swiglu_mlp(x: Any, gate: Any, up: Any, down: Any) -> Any:
        linear = torch.nn.functional.linear
        return linear(torch.nn.functional.silu(linear(x, gate)) * linear(x, up), down)

    module = ModuleType("fe_gemm")
    module.swiglu_mlp = swiglu_mlp  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fe_gemm", module)
    return module


def tokens(*shape: int, dtype: Any = BF16) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_native_with_gradients(mlp: Any, placed: None, gemm: ModuleType) -> None:
    x = tokens(3, 16).requires_grad_()
    y = mlp(x, ignored="natively")
    assert fla.mlp_last_path() == "native"
    assert not hasattr(mlp, "seen")
    want = mlp.down_proj(torch.nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    torch.testing.assert_close(y, want)
    y.sum().backward()
    assert all(t.grad is not None for t in (x, *mlp.parameters()))


def test_without_fe_gemm(mlp: Any, placed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fe_gemm", None)  # type: ignore[arg-type]
    mlp(tokens(3, 16), extra=1)
    assert fla.mlp_last_path() == "fallback:ModuleNotFoundError"
    assert mlp.seen == {"extra": 1}


def test_with_an_fe_gemm_that_lacks_it(mlp: Any, placed: None, gemm: ModuleType) -> None:
    del gemm.swiglu_mlp
    mlp(tokens(3, 16))
    assert fla.mlp_last_path() == "fallback:NotSupportedError"


class Stop(Exception):  # noqa: N818 - control flow, as activation checkpointing raises it
    pass


@pytest.mark.parametrize(
    ("error", "route"),
    [(RuntimeError("CUDA"), "error:RuntimeError"), (ValueError("bad"), "error:ValueError"), (Stop(), "native")],
    ids=["RuntimeError", "ValueError", "control flow"],
)
def test_what_the_native_call_raises(mlp: Any, placed: None, gemm: ModuleType, error: Exception, route: str) -> None:
    def swiglu_mlp(*arguments: Any) -> Any:
        raise error

    gemm.swiglu_mlp = swiglu_mlp  # type: ignore[attr-defined]
    with pytest.raises(type(error)):
        mlp(tokens(3, 16))
    assert fla.mlp_last_path() == route


def route_of(mlp: Any, x: Any = None) -> str:
    path = None
    try:
        type(mlp).forward(mlp, tokens(3, 16) if x is None else x)
    finally:
        path = fla.mlp_last_path()
    assert path is not None
    return path.removeprefix("fallback:")


def with_child(mlp: Any) -> None:
    mlp.adapter = torch.nn.Identity()


def with_parameter(mlp: Any) -> None:
    mlp.gain = torch.nn.Parameter(torch.ones(1))


def with_buffer(mlp: Any) -> None:
    mlp.register_buffer("count", torch.zeros(1))


def with_forward(mlp: Any) -> None:
    mlp.forward = lambda x: x


class Identity(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x


class Sub(torch.nn.Linear):
    pass


def in_place_of(name: str, make: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda mlp: setattr(mlp, name, make(getattr(mlp, name)))


def at(name: str, change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def apply(mlp: Any) -> None:
        change(getattr(mlp, name))

    return apply


CHANGES = {
    "child": (with_child, "custom-gated-mlp"),
    "parameter": (with_parameter, "custom-gated-mlp"),
    "buffer": (with_buffer, "custom-gated-mlp"),
    "own forward": (with_forward, "custom-gated-mlp"),
    "hook": (lambda mlp: mlp.register_forward_hook(lambda *a: None), "hooks-or-parametrization"),
    "backward hook": (lambda mlp: mlp.register_full_backward_pre_hook(lambda *a: None), "hooks-or-parametrization"),
    "activation": (lambda mlp: setattr(mlp, "hidden_act", "powlu"), "variant"),
    "not fused": (lambda mlp: setattr(mlp, "fuse_swiglu", False), "variant"),
    "parametrized projection": (
        at("up_proj", lambda m: parametrize.register_parametrization(m, "weight", Identity())),
        "parametrized",
    ),
    "projection of another class": (
        in_place_of("gate_proj", lambda m: Sub(16, 32, bias=False).to(BF16)),
        "custom-module",
    ),
    "projection with a forward": (at("down_proj", lambda m: setattr(m, "forward", m.forward)), "custom-forward"),
    "projection with a child": (at("down_proj", with_child), "custom-module"),
    "projection with a buffer": (at("down_proj", with_buffer), "custom-module"),
    "projection with a hook": (at("gate_proj", lambda m: m.register_forward_pre_hook(lambda *a: None)), "hooks"),
    "projection with a bias": (
        in_place_of("up_proj", lambda m: torch.nn.Linear(16, 32).to(BF16)),
        "bias",
    ),
    "activation of another class": (in_place_of("swiglu_linear", lambda m: Identity()), "custom-module"),
    "activation with a forward": (at("swiglu_linear", lambda m: setattr(m, "forward", m.forward)), "custom-forward"),
    "activation with a hook": (at("swiglu_linear", lambda m: m.register_forward_hook(lambda *a: None)), "hooks"),
}


@pytest.mark.parametrize(("change", "reason"), CHANGES.values(), ids=list(CHANGES))
def test_modules_that_mean_more_than_their_weights(
    mlp: Any, gemm: ModuleType, change: Callable[[Any], object], reason: str
) -> None:
    change(mlp)
    assert route_of(mlp) == reason


def test_subclass(mlp: Any) -> None:
    kind = type(mlp)

    class Mine(kind):  # type: ignore[misc,valid-type]
        pass

    assert route_of(Mine().to(BF16)) == "custom-gated-mlp"


def test_global_hooks(mlp: Any) -> None:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *arguments: None)
    try:
        assert route_of(mlp) == "hooks-or-parametrization"
    finally:
        handle.remove()
    assert route_of(mlp) == "non-cuda"


class Labelled(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (tokens(3, 16).as_subclass(Labelled), "tensor-subclass"),
        (tokens(3, 16, dtype=torch.float16), "non-bf16"),
        (tokens(3, 16), "non-cuda"),
    ],
)
def test_tokens(mlp: Any, x: Any, reason: str) -> None:
    assert route_of(mlp.to(x.dtype), x) == reason


def test_contexts(mlp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.float16)
    assert route_of(mlp) == "autocast"
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: BF16)
    assert route_of(mlp) == "non-cuda"
    monkeypatch.setattr(gated_mlp, "is_known_version", lambda: False)
    assert route_of(mlp) == "fla-version"
    monkeypatch.setattr(gated_mlp, "is_tracing", lambda: True)
    assert route_of(mlp) == "compile"


def change_weight(name: str, make: Callable[[Any], Any]) -> Callable[[Any], None]:
    def apply(mlp: Any) -> None:
        projection = getattr(mlp, name)
        projection._parameters["weight"] = make(projection.weight)

    return apply


def freed(weight: Any) -> Any:
    weight = torch.nn.Parameter(weight.detach().clone())
    weight.untyped_storage().resize_(0)
    return weight


def hooked(weight: Any) -> Any:
    weight.register_hook(lambda gradient: None)
    return weight


WEIGHTS = {
    "subclass": (change_weight("up_proj", lambda w: w.detach().as_subclass(Labelled)), "tensor-subclass"),
    "dtype": (change_weight("up_proj", lambda w: torch.nn.Parameter(w.detach().half())), "non-bf16"),
    "device": (change_weight("down_proj", lambda w: torch.nn.Parameter(w.detach().to("meta"))), "nonlocal-device"),
    "rank": (change_weight("down_proj", lambda w: torch.nn.Parameter(w.detach().flatten())), "shape"),
    "transposed": (
        change_weight("gate_proj", lambda w: torch.nn.Parameter(w.detach().t().contiguous().t())),
        "noncontiguous",
    ),
    "freed": (change_weight("gate_proj", freed), "nonlocal-parameter"),
    "hook": (change_weight("gate_proj", hooked), "hooks"),
    "shape": (change_weight("up_proj", lambda w: torch.nn.Parameter(w.detach()[:8].clone())), "shape"),
    "sizes": (lambda mlp: setattr(mlp.gate_proj, "out_features", 33), "shape"),
}


@pytest.mark.parametrize(("change", "reason"), WEIGHTS.values(), ids=list(WEIGHTS))
def test_weights(mlp: Any, placed: None, gemm: ModuleType, change: Callable[[Any], object], reason: str) -> None:
    change(mlp)
    decided = gated_mlp.decide(type(mlp), mlp, tokens(3, 16))
    assert decided == reason


def test_width_of_the_tokens(mlp: Any, placed: None) -> None:
    assert gated_mlp.decide(type(mlp), mlp, tokens(3, 24)) == "shape"
