"""A stand-in for the flash-linear-attention package, laid out like each of the releases that are supported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

import fe_conv.fla
from fe_conv.fla import routes

GDN = """
import torch
def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, **kwargs):
    "Original."
    return ("gdn", q, k, v, g, beta, scale, kwargs), None
chunk_gated_delta_rule = torch.compiler.disable(chunk_gated_delta_rule)
chunk_gdn = chunk_gated_delta_rule
"""
KDA = """
def chunk_kda(q, k, v, g, beta, **kwargs):
    return ("kda", q, kwargs), None
"""
CONV = """
import torch
@torch.compiler.disable
def causal_conv1d_update(x, cache, residual=None, weight=None, bias=None, activation=None):
    "Original."
    return ("conv", x, cache, residual, weight, bias, activation), cache
"""
MLP = """
import torch
class SwiGLULinear(torch.nn.Module):
    def forward(self, x, y, weight, bias):
        return torch.nn.functional.linear(torch.nn.functional.silu(x) * y, weight, bias)
class GatedMLP(torch.nn.Module):
    def __init__(self, hidden_size=16, intermediate_size=32, hidden_act="swish", fuse_swiglu=True):
        super().__init__()
        self.hidden_act, self.fuse_swiglu = hidden_act, fuse_swiglu
        for name, size in (("gate_proj", (16, 32)), ("up_proj", (16, 32)), ("down_proj", (32, 16))):
            setattr(self, name, torch.nn.Linear(*size, bias=False))
        if fuse_swiglu and hidden_act == "swish":
            self.swiglu_linear = SwiGLULinear()
    def forward(self, x, **kwargs):
        "Original."
        self.seen = kwargs
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(torch.nn.functional.silu(gate) * up)
"""
OPS = {
    "ops/__init__.py": "from .gated_delta_rule import chunk_gated_delta_rule, chunk_gdn\nfrom .kda import chunk_kda",
    "ops/gated_delta_rule/__init__.py": "from .chunk import chunk_gated_delta_rule, chunk_gdn",
    "ops/gated_delta_rule/chunk.py": GDN,
    "ops/kda/__init__.py": "from .chunk import chunk_kda",
    "ops/kda/chunk.py": KDA,
    "modules/mlp.py": MLP,
}
LAYOUTS = {
    "0.5.2": {
        "modules/__init__.py": "",
        "modules/conv/__init__.py": "",
        "modules/conv/triton/__init__.py": "from .ops import causal_conv1d_update",
        "modules/conv/triton/ops.py": CONV,
        "modules/convolution.py": "from .conv.triton import causal_conv1d_update",
    },
    "0.6.0": {
        "modules/__init__.py": """
import sys, types
from . import causal_conv1d
from .causal_conv1d import ops
for name in ("conv", "convolution"):
    made = types.ModuleType(f"fla.modules.{name}")
    made.causal_conv1d_update = ops.causal_conv1d_update
    sys.modules[made.__name__] = made
sys.modules["fla.modules.conv.triton"] = sys.modules["fla.modules.conv.triton.ops"] = ops
""",
        "modules/causal_conv1d/__init__.py": "from .ops import causal_conv1d_update",
        "modules/causal_conv1d/ops.py": CONV,
    },
}


@pytest.fixture(params=["0.5.2", "0.6.0"])
def fake_fla(request: pytest.FixtureRequest, make_fla: Callable[..., SimpleNamespace]) -> SimpleNamespace:
    """The package, imported, in the layout of each release."""
    return make_fla(request.param)


@pytest.fixture
def make_fla(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SimpleNamespace]]:
    """``make_fla(layout, version=layout, changes={})`` installs the package; ``changes`` replaces files by name.

    It returns a namespace: ``module(name)`` imports a module of it.
    """
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "fla"}
    for route in (routes.GATED_DELTA_RULE, routes.KDA, routes.GATED_MLP, routes.SHORT_CONV):
        monkeypatch.setattr(route, "last", None)

    def make(
        layout: str,
        version: str | None = None,
        distribution: str = "flash_linear_attention",
        changes: Mapping[str, str] | None = None,
    ) -> SimpleNamespace:
        files = {"__init__.py": ""} | OPS | LAYOUTS[layout] | dict(changes or {})
        for name, text in files.items():
            path = tmp_path / "fla" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        version = version or layout
        info = tmp_path / f"{distribution}-{version}.dist-info"
        info.mkdir()
        name = distribution.replace("_", "-")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()
        return SimpleNamespace(module=importlib.import_module)

    yield make
    fe_conv.fla.restore_fla()
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        del sys.modules[name]
    sys.modules.update(hidden)
