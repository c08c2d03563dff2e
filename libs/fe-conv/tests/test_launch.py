"""The plans of ``causal_conv1d``: which kernel a call gets, what its configuration depends on, and its workspaces."""

from __future__ import annotations

from typing import Any

import pytest

from fe_conv.launch import CHANNEL_FIRST, CHANNEL_LAST, backward_kernel, forward_kernel
from fe_conv.sequence_contract import backward_contract, forward_contract
from fe_conv.tiles import split_config, tiles_of
from fe_runtime.contract import Bound, bind
from fe_runtime.plan import HOPPER, Kernel, NoKernel, Target
from fe_runtime.tensor_desc import TensorDesc

B, T, D, W, N = 2, 40, 64, 4, 3


def call(
    layout: str, backward: bool = False, extents: tuple[int, int, int] = (B, T, D), width: int = W, **given: Any
) -> Bound:
    """Bind a call with the named optional operands (``given`` may replace any)."""
    batch, tokens, channels = extents
    dtype = given.pop("dtype", "bfloat16")
    shape = (batch, tokens, channels) if layout == CHANNEL_LAST else (batch, channels, tokens)
    sequences = N if "cu_seqlens" in given else batch
    known = {
        "dy": TensorDesc.of(dtype, shape),
        "dfinal": TensorDesc.of(dtype, (sequences, width - 1, channels)),
        "x": TensorDesc.of(dtype, shape),
        "weight": TensorDesc.of(dtype, (channels, width)),
        "bias": TensorDesc.of(dtype, (channels,)),
        "seq_idx": TensorDesc.of("int32", (batch, tokens)),
        "cu_seqlens": TensorDesc.of("int32", (N + 1,)),
        "initial_states": TensorDesc.of(dtype, (sequences, channels, width - 1)),
    }
    options = {"activation": given.pop("activation", "silu")}
    if not backward:
        options["return_final_states"] = given.pop("states", False)
    contract = (backward_contract if backward else forward_contract)(layout == CHANNEL_LAST)
    present = {"x", "weight", *given} | ({"dy"} if backward else set())
    arrays = [
        given[name] if given.get(name, True) is not True else known[name] if name in present else None
        for name in contract.input_names
    ]
    return bind(contract, arrays, options)


def planned(layout: str, backward: bool = False, target: Target = HOPPER, **given: Any) -> Kernel:
    find = backward_kernel if backward else forward_kernel
    kernel = find(call(layout, backward, **given), layout, target)
    assert isinstance(kernel, Kernel)
    return kernel


def config(kernel: Kernel) -> dict[str, Any]:
    return dict(kernel.spec.config)


@pytest.mark.parametrize("layout", [CHANNEL_FIRST, CHANNEL_LAST])
@pytest.mark.parametrize("backward", [False, True])
def test_a_new_number_of_tokens_rows_or_sequences_is_the_same_kernel(layout: str, backward: bool) -> None:
    first = planned(layout, backward, extents=(2, 64, 64))
    for batch, tokens in ((1, 64), (5, 8), (2, 65536)):
        assert planned(layout, backward, extents=(batch, tokens, 64)).spec == first.spec


def test_channels_that_fit_the_same_launch_share_a_kernel() -> None:
    kernels = {planned(CHANNEL_LAST, extents=(1, 8, d)).spec for d in (1024, 2048, 4096, 8192)}
    assert len(kernels) == 1


def test_config_follows_the_operands() -> None:
    plain = config(planned(CHANNEL_LAST))
    full = config(
        planned(CHANNEL_LAST, extents=(1, T, D), bias=True, cu_seqlens=True, initial_states=True, states=True)
    )
    flags = ("has_bias", "has_initial", "has_final", "has_labels", "offsets")
    assert [plain[name] for name in flags] == [False, False, False, False, None]
    assert [full[name] for name in flags] == [True, True, True, False, "int32"]
    assert config(planned(CHANNEL_LAST, seq_idx=True))["has_labels"]
    assert config(planned(CHANNEL_LAST, activation=None))["activation"] == "identity"
    assert config(planned(CHANNEL_LAST, True, dfinal=True))["has_final"]


def test_alignment_of_rows() -> None:
    assert config(planned(CHANNEL_LAST))["load_alignment"] == 16
    strided = TensorDesc.of("bfloat16", (B, T, D), (T * (D + 4), D + 4, 1))
    shifted = config(planned(CHANNEL_LAST, x=strided))
    assert (shifted["load_alignment"], shifted["store_alignment"]) == (8, 16)
    assert config(planned(CHANNEL_FIRST, extents=(B, 42, D)))["load_alignment"] == 4
    assert config(planned(CHANNEL_LAST, True, dy=strided))["load_alignment"] == 8


@pytest.mark.parametrize("layout", [CHANNEL_FIRST, CHANNEL_LAST])
def test_forms(layout: str) -> None:
    kernel = planned(layout, True, extents=(1, T, D), bias=True, cu_seqlens=True, initial_states=True, dfinal=True)
    x = (1, T, D) if layout == CHANNEL_LAST else (1, D, T)
    states, transposed = (N, W - 1, D), (N, D, W - 1)
    assert kernel.form.inputs == (x, states, x, (D, W), (D,), None, (N + 1,), transposed)
    assert kernel.form.outputs == (x, (D, W), (D,), transposed)
    assert kernel.form.scalars == ()


@pytest.mark.parametrize("bias", [False, True])
def test_workspace_of_the_fast_gradient_is_a_row_per_tile(bias: bool) -> None:
    kernel = planned(CHANNEL_LAST, True, extents=(2, 1000, D), **({"bias": True} if bias else {}))
    _, how = split_config(config(kernel))
    assert kernel.form.scratch == (((2 * tiles_of(how, 2, 1000, D), D * (W + bias)), "float32"),)


def test_workspace_of_the_general_gradient_holds_dz_too() -> None:
    kernel = planned(CHANNEL_FIRST, True, dtype="float64")
    (partials, dz) = kernel.form.scratch
    assert partials[1] == "float64"
    assert dz == ((B, D, T), "float64")


def test_forward_needs_no_workspace() -> None:
    assert planned(CHANNEL_LAST, width=9, states=True).form.scratch == ()


@pytest.mark.parametrize("extents", [(1, 1 << 31, 8), (1 << 31, 1, 8)])
def test_dimensions_of_more_than_32_bits_have_no_kernel(extents: tuple[int, int, int]) -> None:
    bound = call(CHANNEL_LAST, extents=extents)
    missing = forward_kernel(bound, CHANNEL_LAST, HOPPER)
    assert isinstance(missing, NoKernel)
    assert "2^31" in missing.reason


def test_tensors_of_more_than_32_bits_have_one() -> None:
    planned(CHANNEL_LAST, extents=(64, 1 << 20, 4096))
    planned(CHANNEL_LAST, True, extents=(64, 1 << 20, 4096))


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_every_architecture(capability: tuple[int, int]) -> None:
    for backward in (False, True):
        assert planned(CHANNEL_LAST, backward, Target(capability, 100)).spec.arch.startswith("sm_")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param({"x": (65536, 131072, 2)}, id="a block for two tokens of four channels"),
        pytest.param({"x": (8192, 8192, 32), "width": 128}, id="a block for each tap"),
    ],
)
def test_more_blocks_than_a_launch_can_have(case: dict[str, Any]) -> None:
    rows, channels, tokens = case["x"]
    x = TensorDesc.of("bfloat16", (rows, channels, tokens), device="cuda:0")
    weight = TensorDesc.of("bfloat16", (channels, case.get("width", 4)), device="cuda:0")
    bound = bind(forward_contract(False), (x, weight, None, None, None, None), {})
    found = forward_kernel(bound, CHANNEL_FIRST, HOPPER)
    assert isinstance(found, NoKernel)
    assert "number of blocks" in found.reason
