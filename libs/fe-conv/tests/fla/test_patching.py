"""Replacing functions of a stand-in for flash-linear-attention, and putting them back."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fe_conv import fla
from fe_conv.fla import gates

GDN, KDA = "fla.ops.gated_delta_rule", "fla.ops.kda"
CONV, MLP = "fla.modules.conv.triton.ops", "fla.modules.mlp"
EVERYTHING = ("gated_delta_rule", "kda", "gated_mlp", "short_conv")


def test_importing_it_loads_nothing() -> None:
    code = (
        "import sys, fe_conv.fla; assert callable(fe_conv.fla.accelerate_fla); assert fe_conv.fla.last_path() is None;"
        "print([n for n in ('fla', 'torch', 'jax', 'cutlass', 'triton') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_public_names() -> None:
    names = ["accelerate_fla", "is_accelerated", "kda_last_path", "last_path", "mlp_last_path", "restore_fla"]
    assert fla.__all__ == [*names, "short_conv_last_path"]


def test_default_pair(fake_fla: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    gdn, kda, conv = (fake_fla.module(name) for name in (GDN, KDA, CONV))
    originals = gdn.chunk_gated_delta_rule, kda.chunk_kda, conv.causal_conv1d_update
    assert not fla.is_accelerated()
    assert fla.accelerate_fla() is None  # type: ignore[func-returns-value]
    assert capsys.readouterr().out == "accelerate_fla: replaced gated_delta_rule, kda\n"
    assert gdn.chunk_gated_delta_rule is not originals[0]
    assert kda.chunk_kda is not originals[1]
    assert conv.causal_conv1d_update is originals[2]
    assert [fla.is_accelerated(name) for name in EVERYTHING] == [True, True, False, False]
    assert [fla.is_accelerated(name) for name in ("gdn", "mlp", "shortconv", None)] == [True, False, False, True]
    fla.restore_fla()
    assert (gdn.chunk_gated_delta_rule, kda.chunk_kda) == originals[:2]
    assert not fla.is_accelerated()


def test_calls_reach_the_originals_as_they_were_made(fake_fla: SimpleNamespace) -> None:
    gdn, kda = fake_fla.module(GDN), fake_fla.module(KDA)
    assert (fla.last_path(), fla.kda_last_path()) == (None, None)
    fla.accelerate_fla(verbose=False)
    result, state = gdn.chunk_gated_delta_rule(1, 2, 3, 4, 5, 0.5, cp_context="here")
    assert result == ("gdn", 1, 2, 3, 4, 5, 0.5, {"cp_context": "here"})
    assert state is None
    assert kda.chunk_kda(1, 2, 3, g=4, beta=5, use_graph=True)[0] == ("kda", 1, {"use_graph": True})
    assert (fla.last_path(), fla.kda_last_path()) == ("fallback:unsupported-op", "fallback:unsupported-op")
    with pytest.raises(TypeError):
        gdn.chunk_gated_delta_rule(1)


def test_names_in_other_modules_are_rebound(fake_fla: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    original = fake_fla.module(GDN).chunk_gated_delta_rule
    user = ModuleType("user_of_fla")
    user.chunk_gated_delta_rule = user.chunk_gdn = user.renamed = original  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "user_of_fla", user)
    fla.accelerate_fla(verbose=False)
    ours = fake_fla.module(GDN).chunk_gated_delta_rule
    for place in ("fla.ops", GDN, f"{GDN}.chunk", "user_of_fla"):
        assert sys.modules[place].chunk_gated_delta_rule is ours
        assert sys.modules[place].chunk_gdn is ours
    assert user.renamed is original  # type: ignore[attr-defined]
    fla.restore_fla()
    for place in ("fla.ops", GDN, f"{GDN}.chunk", "user_of_fla"):
        assert sys.modules[place].chunk_gated_delta_rule is original
        assert sys.modules[place].chunk_gdn is original


def test_short_conv_is_rebound_everywhere(fake_fla: SimpleNamespace) -> None:
    fake_fla.module("fla.modules.convolution")
    original = fake_fla.module(CONV).causal_conv1d_update
    fla.accelerate_fla(verbose=False, targets="short_conv")
    holders = [m for m in sys.modules.values() if getattr(m, "__name__", "").startswith("fla.modules")]
    found = {m.__name__: m.causal_conv1d_update for m in holders if hasattr(m, "causal_conv1d_update")}
    assert len(found) >= 3
    assert original not in found.values()
    fla.restore_fla()
    assert all(m.causal_conv1d_update is original for m in holders if hasattr(m, "causal_conv1d_update"))


def test_replacements_look_like_the_originals(fake_fla: SimpleNamespace) -> None:
    places = {GDN: "chunk_gated_delta_rule", KDA: "chunk_kda", CONV: "causal_conv1d_update"}
    originals = {place: getattr(fake_fla.module(place), name) for place, name in places.items()}
    forward = fake_fla.module(MLP).GatedMLP.forward
    fla.accelerate_fla(verbose=False, targets=EVERYTHING)
    for place, name in places.items():
        ours = getattr(fake_fla.module(place), name)
        assert ours.__wrapped__ is originals[place]
        assert (ours.__name__, ours.__module__) == (name, originals[place].__module__)
        assert ours.__doc__ == originals[place].__doc__
        assert inspect.signature(ours) == inspect.signature(originals[place])
        assert ours._torchdynamo_disable
    ours = fake_fla.module(MLP).GatedMLP.forward
    assert ours.__wrapped__ is forward
    assert ours.__qualname__ == "GatedMLP.forward"


def test_torch_compile_calls_them_without_looking_inside(fake_fla: SimpleNamespace) -> None:
    import torch

    gdn = fake_fla.module(GDN)
    fla.accelerate_fla(verbose=False)

    @torch.compile(backend="eager")
    def model(x: Any) -> Any:
        return gdn.chunk_gated_delta_rule(x + 1, 2, 3, 4, 5)[0][1] * 2

    assert model(torch.ones(2)).tolist() == [4, 4]
    assert fla.last_path() == "fallback:unsupported-op"


@pytest.mark.parametrize(
    ("targets", "replaced"),
    [
        ("gdn", ["gated_delta_rule"]),
        (["shortconv", "kda", "short_conv"], ["kda", "short_conv"]),
        (dict.fromkeys(["mlp", "gated_delta_rule"]).keys(), ["gated_delta_rule", "gated_mlp"]),
        (("short_conv", "gated_mlp", "kda", "gdn"), list(EVERYTHING)),
    ],
    ids=["alias", "duplicates", "iterable", "registry order"],
)
def test_targets(
    fake_fla: SimpleNamespace, capsys: pytest.CaptureFixture[str], targets: Any, replaced: list[str]
) -> None:
    fla.accelerate_fla(targets=targets)
    assert capsys.readouterr().out == f"accelerate_fla: replaced {', '.join(replaced)}\n"
    assert [name for name in EVERYTHING if fla.is_accelerated(name)] == replaced
    fla.restore_fla(targets=replaced[0])
    assert [name for name in EVERYTHING if fla.is_accelerated(name)] == replaced[1:]


@pytest.mark.parametrize(
    ("targets", "error", "text"),
    [
        (3, TypeError, "targets must be a string or an iterable of strings; got 3"),
        (["kda", 3], TypeError, "got 3 among them"),
        ("chunk_kda", ValueError, "targets must be among gated_delta_rule, gdn, kda, .*; got 'chunk_kda'"),
        ([], ValueError, "targets must name at least one"),
    ],
)
@pytest.mark.parametrize("function", [fla.accelerate_fla, fla.restore_fla], ids=["accelerate", "restore"])
def test_wrong_targets(
    fake_fla: SimpleNamespace, function: Callable[..., None], targets: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        function(targets=targets)
    assert not fla.is_accelerated()
    with pytest.raises(ValueError, match="targets must be among"):
        fla.is_accelerated("nothing")


def test_default_takes_what_there_is(make_fla: Callable[..., SimpleNamespace]) -> None:
    make_fla("0.6.0", changes={"ops/kda/__init__.py": "raise RuntimeError('no GPU')", "ops/__init__.py": ""})
    fla.accelerate_fla(verbose=False)
    assert (fla.is_accelerated("gdn"), fla.is_accelerated("kda")) == (True, False)
    with pytest.raises(ImportError, match=r"kda: fla.ops.kda cannot be imported: RuntimeError: no GPU"):
        fla.accelerate_fla(targets=["gdn", "kda"])
    assert fla.is_accelerated("gdn")


def test_nothing_to_replace(make_fla: Callable[..., SimpleNamespace]) -> None:
    empty = ("ops/__init__.py", "ops/kda/__init__.py", "ops/gated_delta_rule/__init__.py")
    make_fla("0.6.0", changes=dict.fromkeys(empty, ""))
    with pytest.raises(
        ImportError, match=r"gated_delta_rule: fla.ops.gated_delta_rule has no .*; kda: fla.ops.kda has"
    ):
        fla.accelerate_fla()
    assert not fla.is_accelerated()


def test_without_the_package(make_fla: Callable[..., SimpleNamespace], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(ImportError, match="Install flash-linear-attention"):
        fla.accelerate_fla()


def test_an_explicit_selection_is_all_or_nothing(make_fla: Callable[..., SimpleNamespace]) -> None:
    package = make_fla("0.6.0", "0.7.0")
    original = package.module(KDA).chunk_kda
    with pytest.raises(ImportError) as caught:
        fla.accelerate_fla(targets=EVERYTHING)
    assert "gated_mlp: it is made for flash-linear-attention >= 0.5.2, < 0.7; 0.7.0 is installed" in str(caught.value)
    assert "short_conv: it is made for" in str(caught.value)
    assert package.module(KDA).chunk_kda is original
    assert not fla.is_accelerated()
    fla.accelerate_fla(verbose=False)  # no version is asked of these two


def test_twice_is_once(fake_fla: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    gdn = fake_fla.module(GDN)
    original = gdn.chunk_gated_delta_rule
    fla.accelerate_fla(verbose=False)
    ours = gdn.chunk_gated_delta_rule
    fla.accelerate_fla()
    assert gdn.chunk_gated_delta_rule is ours
    assert capsys.readouterr().out == ""
    fla.restore_fla()
    assert gdn.chunk_gated_delta_rule is original
    fla.restore_fla()


def test_somebody_elses_patch_is_kept(fake_fla: SimpleNamespace) -> None:
    gdn, ops = fake_fla.module(GDN), fake_fla.module("fla.ops")
    original = gdn.chunk_gated_delta_rule
    fla.accelerate_fla(verbose=False)

    def third(*arguments: Any, **keywords: Any) -> Any:
        return ("third", *arguments), None

    gdn.chunk_gated_delta_rule = third
    assert not fla.is_accelerated("gdn")
    fla.restore_fla()
    assert gdn.chunk_gated_delta_rule is third
    assert ops.chunk_gated_delta_rule is original


def test_somebody_elses_patch_is_patched_afresh(fake_fla: SimpleNamespace) -> None:
    gdn, ops = fake_fla.module(GDN), fake_fla.module("fla.ops")
    original = gdn.chunk_gated_delta_rule
    fla.accelerate_fla(verbose=False)

    def third(*arguments: Any, **keywords: Any) -> Any:
        return ("third", *arguments), None

    gdn.chunk_gated_delta_rule = third
    fla.accelerate_fla(verbose=False)
    assert fla.is_accelerated("gdn")
    assert gdn.chunk_gated_delta_rule(1)[0] == ("third", 1)
    assert ops.chunk_gated_delta_rule is original  # it was no reference to what is replaced now
    fla.restore_fla()
    assert gdn.chunk_gated_delta_rule is third


def test_modules_that_cannot_be_probed(fake_fla: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise OSError("broken")

    monkeypatch.setitem(sys.modules, "broken_module", Broken())  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "no_module", None)  # type: ignore[arg-type]
    fake_fla.module(KDA)
    fla.accelerate_fla(verbose=False)
    assert fla.is_accelerated("kda")


def test_existing_instances_take_the_replaced_method(fake_fla: SimpleNamespace) -> None:
    import torch

    mlp = fake_fla.module(MLP).GatedMLP()
    x = torch.ones(2, 16)
    want = mlp(x)
    fla.accelerate_fla(verbose=False, targets="mlp")
    assert torch.equal(mlp(x, extra=1), want)
    assert mlp.seen == {"extra": 1}
    assert fla.mlp_last_path() == "fallback:non-bf16"
    fla.restore_fla()
    mlp(x)
    assert not hasattr(type(mlp).forward, "__wrapped__")


# ---- gates


@pytest.mark.parametrize(
    ("version", "known"),
    [("0.5.1", False), ("0.5.2", True), ("0.5.10", True), ("0.6.0", True), ("0.6.3+local", True), ("0.7.0rc1", False)],
)
@pytest.mark.parametrize("distribution", ["flash_linear_attention", "fla_core"])
def test_versions(
    make_fla: Callable[..., SimpleNamespace],
    monkeypatch: pytest.MonkeyPatch,
    distribution: str,
    version: str,
    known: bool,
) -> None:
    if distribution == "fla_core":  # counts only where the other one is not installed, which it may be here
        monkeypatch.setattr(gates, "DISTRIBUTIONS", ("no-such-distribution", "fla-core"))
    make_fla("0.6.0", version, distribution)
    assert gates.installed_version() == version
    assert gates.is_known_version() == known


@pytest.mark.parametrize("layout", ["0.5.2", "0.6.0"])
def test_gate_of_short_conv(make_fla: Callable[..., SimpleNamespace], layout: str) -> None:
    conv = make_fla(layout).module(CONV)
    original = conv.causal_conv1d_update
    conv.causal_conv1d_update = original.__wrapped__  # without FLA's dispatch there is no such wrapper
    with pytest.raises(ImportError, match=r"short_conv: causal_conv1d_update is not hidden from torch.compile"):
        fla.accelerate_fla(targets="short_conv")
    conv.causal_conv1d_update = lambda *arguments: None
    with pytest.raises(ImportError, match="short_conv: causal_conv1d_update is not defined there"):
        fla.accelerate_fla(targets="short_conv")
    del conv.causal_conv1d_update
    with pytest.raises(ImportError, match="has no causal_conv1d_update"):
        fla.accelerate_fla(targets="short_conv")


def test_gate_of_gated_mlp(fake_fla: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp = fake_fla.module(MLP)
    own = mlp.GatedMLP.forward

    def check(text: str) -> None:
        with pytest.raises(ImportError, match=f"gated_mlp: {text}"):
            fla.accelerate_fla(targets="gated_mlp")

    with monkeypatch.context() as changed:
        changed.setattr(mlp.GatedMLP, "forward", lambda self, x: x)
        check("GatedMLP.forward is not its own")
    with monkeypatch.context() as changed:
        changed.setattr(own, "__wrapped__", own, raising=False)
        check("GatedMLP.forward is wrapped already")
    with monkeypatch.context() as changed:
        changed.delattr(mlp, "SwiGLULinear")
        check("it has no class SwiGLULinear")
    with monkeypatch.context() as changed:
        changed.setattr(mlp.GatedMLP, "__module__", "elsewhere")
        check("GatedMLP is not defined there")
    fla.accelerate_fla(verbose=False, targets="gated_mlp")
