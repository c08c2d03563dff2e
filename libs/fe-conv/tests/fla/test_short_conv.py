"""The decode step of the short convolutions: which calls are served natively, and what the native call computes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fe_conv import fla
from fe_conv.fla import short_conv
from fe_runtime import NotSupportedError

BF16 = torch.bfloat16


def operands(rows: int = 3, channels: int = 16, width: int = 4, dtype: Any = BF16) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (rows, channels), "cache": (rows, channels, width), "weight": (channels, width)}
    made = {name: torch.randn(*shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return made | {"activation": "silu"}


def vector(*shape: int, dtype: Any = BF16) -> Any:
    return torch.linspace(-1, 1, 16 * max(1, len(shape)))[:16].expand(*shape).to(dtype).contiguous()


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let CPU tensors pass for tensors on a GPU with kernels, served by the reference."""
    monkeypatch.setattr(short_conv, "_misplaced", lambda x, tensors, weight, cache: None)
    monkeypatch.setattr(short_conv, "_backend", lambda device: "reference")


class Labelled(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weight": None}, "weight"),
        ({"activation": "relu"}, "activation"),
        ({"x": torch.zeros(3, 16, dtype=BF16).as_subclass(Labelled)}, "tensor-subclass"),
        ({"cache": None}, "tensor-subclass"),
        ({"x": torch.zeros(3, 16)}, "non-bf16"),
        ({"bias": torch.zeros(16)}, "non-bf16"),
        ({}, "non-cuda"),
    ],
)
def test_reasons_before_the_device(changes: dict[str, Any], reason: str) -> None:
    given = {name: value for name, value in (operands() | changes).items() if value is not None or name == "cache"}
    assert short_conv.decide(**given) == reason


def test_float32_is_left_to_the_original() -> None:
    assert short_conv.decide(**operands(dtype=torch.float32)) == "non-bf16"


@pytest.mark.usefixtures("placed")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"x": torch.zeros(3, 2, 16, dtype=BF16)}, "shape"),
        ({"x": torch.zeros(0, 16, dtype=BF16)}, "shape"),
        ({"x": torch.zeros(1, 1, 3, 16, dtype=BF16)}, "shape"),
        ({"x": torch.zeros(3, 32, dtype=BF16)[:, ::2]}, "noncontiguous"),
        ({"x": torch.zeros(1, 16, dtype=BF16).expand(3, 16)}, "noncontiguous"),
        ({"x": torch.zeros(3, 20, dtype=BF16)[:, :16]}, "alignment"),
        ({"bias": torch.zeros(15, dtype=BF16)}, "bias"),
        ({"residual": torch.zeros(3, 1, 16, dtype=BF16)}, "residual"),
        ({"weight": torch.zeros(15, 4, dtype=BF16)}, "shape"),
        ({"weight": torch.zeros(16, 1, dtype=BF16)}, "shape"),
        ({"cache": torch.zeros(3, 16, 3, dtype=BF16)}, "shape"),
        ({"cache": torch.zeros(4, 16, 4, dtype=BF16)}, "shape"),
        ({"x": torch.zeros(49, dtype=BF16)[1:].view(3, 16)}, "alignment"),
        ({"weight": torch.zeros(16, 4, dtype=BF16, requires_grad=True)}, "autograd"),
    ],
)
def test_reasons_after_the_device(changes: dict[str, Any], reason: str) -> None:
    assert short_conv.decide(**(operands() | changes)) == reason


@pytest.mark.usefixtures("placed")
def test_gradients_count_only_where_they_are_recorded() -> None:
    given = operands() | {"weight": torch.zeros(16, 4, dtype=BF16, requires_grad=True)}
    with torch.no_grad():
        assert callable(short_conv.decide(**given))


def test_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert short_conv.decide(**operands()) == "compile"


def formula(x: Any, cache: Any, weight: Any, bias: Any, activation: Any) -> Any:
    history = torch.cat([cache.double()[..., 1:], x.double().reshape(cache.shape[:2])[..., None]], -1)
    z = (history * weight.double()).sum(-1) + (0 if bias is None else bias.double())
    return z * torch.sigmoid(z) if activation in ("silu", "swish") else z


@pytest.mark.usefixtures("placed")
@pytest.mark.parametrize("activation", [None, "identity", "silu", "swish"])
@pytest.mark.parametrize("width", [2, 4, 7])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_native_results(fake_fla: SimpleNamespace, dtype: Any, width: int, activation: Any) -> None:
    given = operands(width=width, dtype=dtype) | {"activation": activation}
    fla.accelerate_fla(verbose=False, targets="short_conv")
    update = fake_fla.module("fla.modules.conv.triton.ops").causal_conv1d_update
    for shape in ((3, 16), (3, 1, 16), (1, 3, 16)):
        for extra in ({}, {"bias": vector(16, dtype=dtype)}, {"residual": vector(3, 16, dtype=dtype).view(shape)}):
            cache, x = given["cache"].clone(), given["x"].view(shape)
            want = formula(x, cache, given["weight"], extra.get("bias"), activation).view(shape)
            want = want + (extra["residual"].double() if "residual" in extra else 0)
            y, returned = update(**(given | extra | {"x": x, "cache": cache}))
            assert fla.short_conv_last_path() == "native"
            assert returned is cache
            assert (y.shape, y.dtype) == (x.shape, dtype)
            torch.testing.assert_close(y.double(), want, rtol=2.0**-7, atol=2.0**-7)
            assert torch.equal(cache, torch.cat([given["cache"][..., 1:], given["x"][..., None]], -1))


@pytest.mark.usefixtures("placed")
def test_one_row_of_one_token_and_padded_rows(fake_fla: SimpleNamespace) -> None:
    fla.accelerate_fla(verbose=False, targets="short_conv")
    update = fake_fla.module("fla.modules.conv.triton.ops").causal_conv1d_update
    one = operands(rows=1)
    y, _ = update(one["x"].view(1, 1, 16), one["cache"], weight=one["weight"])
    assert fla.short_conv_last_path() == "native"
    assert y.shape == (1, 1, 16)
    padded = operands()
    fused = torch.zeros(3, 48, dtype=BF16)
    fused[:, 16:32] = padded["x"]
    want = formula(padded["x"], padded["cache"], padded["weight"], None, "silu")
    y, _ = update(fused[:, 16:32], padded["cache"], None, padded["weight"], None, "silu")
    assert fla.short_conv_last_path() == "native"
    torch.testing.assert_close(y.double(), want, rtol=2.0**-8, atol=2.0**-8)


def test_fallback_gets_the_callers_arguments(fake_fla: SimpleNamespace) -> None:
    fla.accelerate_fla(verbose=False, targets="short_conv")
    update = fake_fla.module("fla.modules.conv.triton.ops").causal_conv1d_update
    cache = object()
    result, returned = update("x", cache, "residual", activation="silu")
    assert result == ("conv", "x", cache, "residual", None, None, "silu")
    assert returned is cache
    assert fla.short_conv_last_path() == "fallback:weight"
    with pytest.raises(TypeError):
        update("x", no_such_argument=1)
    assert fla.short_conv_last_path() == "fallback:arguments"


def raising(error: Exception) -> Callable[..., Any]:
    def function(*arguments: Any, **keywords: Any) -> Any:
        raise error

    return function


@pytest.mark.usefixtures("placed")
@pytest.mark.parametrize(
    ("error", "route"),
    [
        (NotSupportedError("no"), "fallback:NotSupportedError"),
        (NotImplementedError("no"), "fallback:NotImplementedError"),
        (ImportError("no"), "fallback:ImportError"),
        (ValueError("bad"), "error:ValueError"),
        (RuntimeError("CUDA"), "error:RuntimeError"),
    ],
)
def test_what_the_native_call_raises(
    fake_fla: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, error: Exception, route: str
) -> None:
    fla.accelerate_fla(verbose=False, targets="short_conv")
    monkeypatch.setattr(short_conv, "native_update", raising(error))
    update = fake_fla.module("fla.modules.conv.triton.ops").causal_conv1d_update
    if route.startswith("error"):
        with pytest.raises(type(error)):
            update(**operands())
    else:
        assert update(**operands())[0][0] == "conv"
    assert fla.short_conv_last_path() == route
