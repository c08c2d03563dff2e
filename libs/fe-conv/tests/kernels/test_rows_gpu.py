"""The kernels for neighbouring channels on a GPU, with every kind of launch: where walks, chunks and stages end."""

from __future__ import annotations

from typing import Any

import conv_oracle_torch as oracle
import pytest
import torch
from conv_oracle_torch import Call

from fe_conv import tiles
from fe_conv.sequence import CHANNEL_LAST, CHANNEL_LAST_BACKWARD
from fe_conv.tiles import Launch
from fe_runtime import testing
from fe_runtime.compile import load
from fe_runtime.dtypes import framework_dtype
from fe_runtime.launch import kernel_launch
from fe_runtime.plan import Target

pytestmark = pytest.mark.gpu

D = 264
LAUNCHES = [
    Launch("rows", 4, 32, 2, 4, 16, 1, 0),
    Launch("rows", 4, 32, 2, 4, 16, 1, 2),
    Launch("rows", 8, 32, 1, 8, 32, 1, 3),
    Launch("rows", 2, 64, 2, 4, 32, 1, 4),
]
EXTENTS = [(1, 1), (2, 3), (1, 8), (3, 37), (2, 300), (1, 1031)]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Any:
    """Fresh allocations, workspaces too, hold NaN: an element that is never written shows."""
    with testing.poisoned_memory():
        yield


def make(batch: int, length: int, where: list[int] | None) -> Call:
    generator = torch.Generator("cuda").manual_seed(length)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, device="cuda", generator=generator).bfloat16()

    rows = batch if where is None else len(where) - 1
    offsets = None if where is None else torch.tensor(where, dtype=torch.int32, device="cuda")
    x, states = normal(batch, length, D).transpose(1, 2), normal(rows, 3, D).transpose(1, 2)
    return Call(x, normal(D, 4) * 0.5, normal(D), states, offsets)


def run(operation: Any, known: dict[str, Any], options: dict[str, object]) -> list[Any]:
    arrays = [known.get(name) for name in operation.contract.input_names]
    bound = operation.bind(arrays, options)
    kernel = operation.find_kernel(bound, Target.of(bound.device))
    launch = kernel_launch(operation, bound, kernel, load(kernel.spec))
    outputs = [torch.empty(o.shape, dtype=framework_dtype(o.dtype, "torch"), device="cuda") for o in bound.outputs if o]
    launch(arrays, outputs)
    return outputs


def close(got: Any, want: Any, size: Any, units: float) -> bool:
    return bool(((got.double() - want).abs() <= units * 2.0**-8 * want.abs() + 2.0**-18 * size).all())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_every_kind_of_launch(launch: Launch, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "choose", lambda *problem: launch)
    for batch, length in EXTENTS:
        if packed and batch > 1:
            continue
        call = make(batch, length, [0, length // 3, length // 3, length - length // 5, length] if packed else None)
        known = {"x": call.x.transpose(1, 2), "weight": call.weight, "bias": call.bias, "cu_seqlens": call.offsets}
        known["initial_states"] = call.states
        y, final = run(CHANNEL_LAST, known, {"activation": "silu", "return_final_states": True})
        _, want, ends = oracle.forward(call)
        assert close(y.transpose(1, 2), want, oracle.magnitude(call), 1), (batch, length)
        assert torch.equal(final.transpose(1, 2).double(), ends)
        known |= {"dy": torch.randn_like(known["x"]), "dfinal": torch.randn_like(final)}
        found = run(CHANNEL_LAST_BACKWARD, known, {"activation": "silu"})
        again = run(CHANNEL_LAST_BACKWARD, known, {"activation": "silu"})
        assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
        wants, sizes = oracle.gradients(call, known["dy"].transpose(1, 2), known["dfinal"].transpose(1, 2))
        for name, gradient in zip(("x", "weight", "bias", "states"), found, strict=True):
            gradient = gradient.transpose(1, 2) if name == "x" else gradient
            assert close(gradient, wants[name], sizes[name], 2), (name, batch, length)
