"""The kernels of ``causal_conv1d`` and its gradient on a GPU: against float64, at every edge of the contract."""

from __future__ import annotations

import itertools
from typing import Any

import conv_oracle_torch as oracle
import numpy as np
import pytest
import torch
from conv_oracle_torch import Call

import fe_conv
import fe_runtime
from fe_conv import causal_conv1d
from fe_runtime import InvalidArgumentError, testing

pytestmark = pytest.mark.gpu

BACKEND = f"sm{torch.cuda.get_device_capability()[0]}0" if torch.cuda.is_available() else "sm90"
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
RELATIVE = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 1e-5, FP64: 1e-12}
# Unit in the last place, relative to a number just above a power of two.
ULP = {BF16: 2.0**-7, FP16: 2.0**-10, FP32: 2.0**-23, FP64: 2.0**-52}
NARROW = {BF16: 2.0**-126, FP16: 2.0**-24, FP32: 2.0**-126, FP64: 2.0**-1022}
LAYOUTS = ("tokens inside", "channels inside")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Any:
    """Fresh allocations, workspaces too, hold NaN: an element that is never written shows."""
    with testing.poisoned_memory():
        yield


def normal(*shape: int, dtype: Any = BF16, seed: int = 0) -> Any:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).to(dtype)


def tokens(batch: int, channels: int, length: int, layout: str, dtype: Any = BF16, seed: int = 0) -> Any:
    """Return x (B, D, T) whose tokens or channels are neighbours in memory."""
    if layout == "tokens inside":
        return normal(batch, channels, length, dtype=dtype, seed=seed)
    return normal(batch, length, channels, dtype=dtype, seed=seed).transpose(1, 2)


def offsets(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def make(
    shape: tuple[int, int, int],
    width: int = 4,
    layout: str = "channels inside",
    dtype: Any = BF16,
    *,
    bias: bool = True,
    states: bool = False,
    where: Any = None,
    labels: Any = None,
    activation: str = "silu",
    weight_dtype: Any = None,
) -> Call:
    batch, channels, length = shape
    rows = batch if where is None else len(where) - 1
    return Call(
        tokens(batch, channels, length, layout, dtype),
        normal(channels, width, dtype=weight_dtype or dtype, seed=1) * 0.5,
        normal(channels, dtype=dtype, seed=2) if bias else None,
        normal(rows, width - 1, channels, dtype=dtype, seed=3).transpose(1, 2) if states else None,
        where,
        labels,
        activation,
    )


def run(call: Call, **more: Any) -> tuple[Any, Any]:
    result = causal_conv1d(**call.arguments, backend=BACKEND, **more)
    return result if isinstance(result, tuple) else (result, None)


def steps(x: Any) -> list[int]:
    """Return the strides that mean something."""
    return [step for extent, step in zip(x.shape, x.stride(), strict=True) if extent > 1]


def check_forward(call: Call) -> None:
    y, final = run(call)
    _, want, ends = oracle.forward(call)
    dtype = call.x.dtype
    slack = 2.0**-48 if dtype == FP64 else 2.0**-20
    allowed = RELATIVE[dtype] * want.abs() + slack * oracle.magnitude(call) + NARROW[dtype]
    excess = ((y.double() - want).abs() - allowed).max().item() if y.numel() else 0.0
    assert excess <= 0, f"{tuple(call.x.shape)} {call.weight.shape[1]} {dtype}: off by {excess:g} too much"
    assert steps(y) == steps(torch.empty_like(call.x)) or not y.numel()
    if final is not None:
        assert torch.equal(final.double(), ends)


def run_backward(call: Call, dy: Any, dfinal: Any) -> dict[str, Any]:
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in call.leaves.items()}
    y, final = run(oracle._with(call, leaves))
    outputs, grads = ([y], [dy]) if dfinal is None else ([y, final], [dy, dfinal])
    found = torch.autograd.grad(outputs, list(leaves.values()), grads)
    return dict(zip(leaves, found, strict=True))


def incoming(call: Call) -> tuple[Any, Any]:
    dy = torch.empty_like(call.x).copy_(normal(*call.x.shape, dtype=call.x.dtype, seed=7))
    if call.labels is not None:
        return dy, None
    rows = call.x.shape[0] if call.offsets is None else len(call.offsets) - 1
    return dy, normal(rows, call.x.shape[1], call.weight.shape[1] - 1, dtype=call.x.dtype, seed=8)


def check_backward(call: Call, with_final: bool = True) -> None:
    dy, dfinal = incoming(call)
    dfinal = dfinal if with_final else None
    got = run_backward(call, dy, dfinal)
    want, sizes = oracle.gradients(call, dy, dfinal)
    for name, gradient in got.items():
        dtype = gradient.dtype
        assert dtype == call.leaves[name].dtype
        # x and states: two units in the last place; parameters: a sum good to 1e-5, then one rounding. Where terms
        # cancel, a few roundings to fp32 of the terms themselves (fp64: to fp64).
        units = 2 * ULP[dtype] if name in ("x", "states") else 1e-5 * (dtype != FP64) + ULP[dtype]
        small = 2.0**-46 if dtype == FP64 else 2.0**-18
        allowed = units * want[name].abs() + small * sizes[name] + NARROW[dtype]
        excess = ((gradient.double() - want[name]).abs() - allowed).max().item() if gradient.numel() else 0.0
        what = f"d{name} of {tuple(call.x.shape)}, W {call.weight.shape[1]}, {dtype}"
        assert excess <= 0, f"{what}: off by {excess:g} too much"


def check(call: Call) -> None:
    check_forward(call)
    check_backward(call)


# --- every mode ------------------------------------------------------------------------------------------------------

LENGTHS = (1, 2, 3, 4, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 513, 1000)
PACKED = {
    "two": (0, 100, 257),
    "one": (0, 257),
    "1, 2, 3 beside long ones": (0, 1, 130, 132, 135, 136, 138, 250, 251, 257),
    "empty members": (0, 0, 64, 64, 64, 65, 192, 192, 257, 257),
    "ends at tiles": (0, 32, 64, 128, 192, 256, 257),
    "tokens outside": (3, 70, 71, 200),
    "single tokens": tuple(range(258)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [2, 3, 4])
def test_every_length(width: int, layout: str) -> None:
    for length in LENGTHS:
        check(make((2, 64, length), width, layout))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("members", PACKED.values(), ids=list(PACKED))
def test_packed(members: tuple[int, ...], layout: str) -> None:
    for states in (False, True):
        check(make((1, 96, 257), 4, layout, where=offsets(*members), states=states))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [2, 3, 5, 7])
def test_packed_with_states_of_every_width(width: int, layout: str) -> None:
    check(make((1, 64, 257), width, layout, where=offsets(*PACKED["1, 2, 3 beside long ones"]), states=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [2, 4, 7])
def test_states(width: int, layout: str) -> None:
    for length in (1, 2, 3, 5, 64, 129):
        check(make((3, 64, length), width, layout, states=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [2, 4, 5])
def test_labels(width: int, layout: str) -> None:
    """Runs, labels that come back after W tokens or fewer, padding at both ends and between."""
    generator = torch.Generator().manual_seed(0)
    for length in (1, 64, 300):
        mixed = torch.randint(-1, 2, (2, length), generator=generator)
        runs = torch.arange(length).expand(2, length) // 7 - 3
        for labels in (mixed, runs, torch.full((2, length), -1)):
            check(make((2, 64, length), width, layout, labels=labels.int().cuda()))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64], ids=str)
def test_every_dtype(dtype: Any, layout: str) -> None:
    for width, activation in ((4, "silu"), (4, "identity"), (3, "silu")):
        check(make((2, 64, 130), width, layout, dtype, activation=activation))
        check(make((2, 64, 130), width, layout, dtype, activation=activation, bias=False))
    check(make((1, 64, 257), 4, layout, dtype, where=offsets(0, 1, 130, 257), states=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp32_weight_with_bf16_input(layout: str) -> None:
    for bias in (False, True):
        check(make((2, 64, 130), 4, layout, bias=bias, weight_dtype=FP32))
    check(make((1, 64, 130), 3, layout, where=offsets(0, 7, 130), states=True, weight_dtype=FP32))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [5, 7, 16, 64, 127, 128])
def test_wide_filters(width: int, layout: str) -> None:
    for dtype in (BF16, FP32):
        check(make((2, 48, 200), width, layout, dtype, activation="identity"))
    check(make((1, 48, 200), width, layout, where=offsets(0, 3, 100, 200), states=True))
    check(make((2, 48, 20), width, layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_number_of_channels(layout: str) -> None:
    """Vectors of every width, rows that no vector divides, more channels than a block has threads."""
    for channels in (1, 2, 3, 7, 8, 33, 100, 256, 1000, 1032, 4096, 5376):
        check(make((1, channels, 67), 4, layout))


def test_gradient_of_one_output_only() -> None:
    call = make((1, 64, 257), where=offsets(0, 1, 130, 257), states=True)
    check_backward(call, with_final=False)
    dy, dfinal = incoming(call)
    want, _ = oracle.gradients(call, torch.zeros_like(dy), dfinal)
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in call.leaves.items()}
    _, final = run(oracle._with(call, leaves))
    found = torch.autograd.grad(final, list(leaves.values()), dfinal)
    for name, gradient in zip(leaves, found, strict=True):
        assert torch.equal(gradient.double(), want[name]), name


def test_empty_extents() -> None:
    for shape in ((0, 8, 5), (2, 0, 5), (2, 8, 0)):
        for layout in LAYOUTS:
            call = make(shape, layout=layout, states=True)
            y, final = causal_conv1d(**call.arguments)
            assert tuple(y.shape) == shape
            assert torch.equal(final, call.states) or shape[2]


# --- strides and alignments ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [1, 2, 4, 8, 64])
@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_slices_of_a_wider_buffer(layout: str, offset: int, extra: int) -> None:
    """What lies between the rows is NaN; addresses of every alignment."""
    inner, outer = (64, 130) if layout == "channels inside" else (130, 64)
    buffer = torch.full((2 * outer * (inner + extra) + offset,), float("nan"), dtype=BF16, device="cuda")
    stride = (outer * (inner + extra), inner + extra, 1)
    x = buffer.as_strided((2, outer, inner), stride, offset)
    call = make((2, 64, 130), layout=layout)
    call.x = (x.transpose(1, 2) if layout == "channels inside" else x).copy_(call.x)
    check(call)


def test_expanded_and_permuted_inputs() -> None:
    base = make((3, 64, 50))
    views = {
        "batch inside": normal(50, 3, 64).permute(1, 2, 0),
        "one row for all": normal(1, 50, 64).expand(3, 50, 64).transpose(1, 2),
        "one token for all": normal(3, 1, 64).expand(3, 50, 64).transpose(1, 2),
        "every other": normal(3, 128, 100)[:, ::2, ::2],
    }
    for x in views.values():
        call = Call(x, base.weight, base.bias)
        y, final = run(call)
        want = run(Call(x.contiguous(), base.weight, base.bias))
        assert torch.equal(y.contiguous(), want[0].contiguous()) or (y - want[0]).abs().max() <= 2**-6
        assert torch.equal(final, want[1])


def test_extents_of_one_with_any_stride() -> None:
    """Also of the incoming gradient: that of a sum has strides 0."""
    views = {
        "one token": normal(3, 64, 50)[:, :, :1],
        "one token, batch inside": normal(50, 64, 3).permute(2, 1, 0)[:, :, :1],
        "one channel": normal(3, 64, 50)[:, :1],
        "one channel, tokens apart": normal(3, 50, 64)[:, :, :1].transpose(1, 2),
        "one row": normal(3, 50, 67)[1:2, :, :64].transpose(1, 2),
        "one of each": normal(3, 50, 67)[1:2, 2:3, 3:4],
    }
    for x in views.values():
        call = Call(x, normal(x.shape[1], 4, seed=1), normal(x.shape[1], seed=2))
        check(call)
        leaf = x.detach().requires_grad_()
        run(Call(leaf, call.weight, call.bias))[0].sum().backward()
        dy = torch.ones_like(x)
        want, sizes = oracle.gradients(call, dy, torch.zeros(x.shape[0], x.shape[1], 3, device="cuda"))
        error = (leaf.grad.double() - want["x"]).abs()
        assert (error <= 2 * ULP[BF16] * want["x"].abs() + 2.0**-18 * sizes["x"]).all()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_states_of_any_strides(order: tuple[int, ...]) -> None:
    call = make((3, 64, 20), states=True)
    moved = call.states.permute(order).contiguous()
    call.states = moved.permute(tuple(order.index(n) for n in range(3)))
    check(call)
    out = torch.empty_like(call.states)
    _, returned = run(call, final_states_out=out)
    assert returned is out
    assert torch.equal(out, call.x[:, :, 17:])


def test_incoming_gradients_of_any_strides() -> None:
    call = make((2, 64, 70), states=True)
    dy, dfinal = incoming(call)
    want = run_backward(call, dy, dfinal)
    wide = torch.zeros(2, 70, 128, dtype=BF16, device="cuda")
    for strided in (dy.contiguous(), wide[:, :, ::2].transpose(1, 2).copy_(dy)):
        got = run_backward(call, strided, dfinal.transpose(1, 2).contiguous().transpose(1, 2))
        for name, gradient in got.items():
            assert torch.equal(gradient, want[name])


def test_every_order_of_layouts_gets_its_own_kernel() -> None:
    calls = [
        make((2, 64, 40)),
        make((2, 64, 40), layout="tokens inside"),
        make((2, 33, 40)),
        make((2, 64, 40), dtype=FP32),
        make((1, 64, 40), where=offsets(0, 40)),
    ]
    for order in itertools.permutations(calls, 3):
        for call in order:
            check_forward(call)


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_stays_in_its_sequence_and_channel(layout: str) -> None:
    call = make((1, 64, 257), layout=layout, where=offsets(0, 100, 130, 257), states=True)
    clean, clean_final = run(call)
    clean_gradients = run_backward(call, *incoming(call))
    call.x[0, 5, 100:130] = float("nan")
    y, final = run(call)
    spoiled = torch.zeros_like(y, dtype=torch.bool)
    spoiled[0, 5, 100:130] = True
    assert y[spoiled].isnan().all()
    assert torch.equal(y[~spoiled], clean[~spoiled])
    assert torch.equal(final[[0, 2]], clean_final[[0, 2]])
    got = run_backward(call, *incoming(call))
    assert torch.equal(got["x"][~spoiled], clean_gradients["x"][~spoiled])
    others = [n for n in range(64) if n != 5]
    assert torch.equal(got["weight"][others], clean_gradients["weight"][others])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_holds_anything(layout: str) -> None:
    labels = (torch.arange(200).expand(2, 200) % 11 - 4).int().cuda()
    call = make((2, 64, 200), layout=layout, labels=labels)
    want, want_gradients = run(call)[0], run_backward(call, *incoming(call))
    padding = (labels < 0)[:, None, :].expand_as(call.x)
    call.x = torch.where(padding, float("nan"), call.x)
    assert torch.equal(run(call)[0], want)
    assert (run(call)[0][padding] == 0).all()
    for name, gradient in run_backward(call, *incoming(call)).items():
        assert torch.equal(gradient, want_gradients[name])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [4, 7])
def test_tokens_of_no_sequence_hold_anything(layout: str, width: int) -> None:
    call = make((1, 64, 300), width, layout, where=offsets(20, 21, 150, 280), states=True)
    want, want_gradients = run(call)[0], run_backward(call, *incoming(call))
    outside = torch.ones(300, dtype=torch.bool, device="cuda")
    outside[20:280] = False
    call.x = torch.where(outside.expand_as(call.x), float("nan"), call.x)
    assert torch.equal(run(call)[0], want)
    assert (run(call)[0][..., outside] == 0).all()
    for name, gradient in run_backward(call, *incoming(call)).items():
        assert torch.equal(gradient, want_gradients[name])


def test_final_states_are_copied_bit_for_bit() -> None:
    bits = torch.randint(0, 1 << 15, (2, 30, 64), device="cuda", dtype=torch.int16)
    for layout in LAYOUTS:
        x = bits.view(BF16).transpose(1, 2)
        x = x if layout == "channels inside" else x.contiguous()
        final = run(Call(x, normal(64, 4)))[1]
        assert torch.equal(final.contiguous().view(torch.int16), x[:, :, 27:].contiguous().view(torch.int16))


MALFORMED = {
    "decreasing": (0, 200, 100, 257),
    "reversed": (257, 128, 0),
    "negative": (-(2**31), -5, 257),
    "beyond": (0, 1000, 2**31 - 1),
    "all beyond": (300, 400, 500),
    "extreme": (2**31 - 1, -(2**31), 2**31 - 1, -(2**31)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("values", MALFORMED.values(), ids=list(MALFORMED))
def test_malformed_offsets_touch_nothing_outside(values: tuple[int, ...], layout: str) -> None:
    """Around x there are NaN, around the outputs canaries; the context lives on."""
    inner, outer = (64, 257) if layout == "channels inside" else (257, 64)
    shape = (1, outer, inner)
    guarded = testing.guarded(shape, "bfloat16", values=np.ones(shape), framework="torch", device="cuda")
    call = make((1, 64, 257), layout=layout, where=offsets(*values), states=True)
    call.x = guarded.array.transpose(1, 2) if layout == "channels inside" else guarded.array
    y, final = run(call)
    assert y.isfinite().all()
    assert final.isfinite().all()
    for gradient in run_backward(call, *incoming(call)).values():
        assert gradient.isfinite().all()
    torch.cuda.synchronize()
    guarded.check_unchanged()
    check_forward(make((1, 64, 257), layout=layout))


def test_checked_mode_names_malformed_offsets() -> None:
    call = make((1, 64, 257), where=offsets(0, 200, 100, 257))
    fe_runtime.configure(check_device_values=True)
    try:
        with pytest.raises(InvalidArgumentError, match="cu_seqlens must hold offsets from 0 to T = 257"):
            run(call)
        call.offsets = offsets(0, 100, 256)
        with pytest.raises(InvalidArgumentError, match="cu_seqlens must begin with 0 and end with T = 257"):
            run(call)
        call.offsets = offsets(0, 100, 100, 257)
        check(call)
    finally:
        fe_runtime.configure(check_device_values=None)


def test_int64_offsets() -> None:
    call = make((1, 64, 257), where=offsets(0, 1, 130, 257).long(), states=True)
    check(call)


# --- determinism, size, streams, graphs ------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_bits_twenty_times(layout: str) -> None:
    calls = [
        make((4, 1024, 1000), layout=layout),
        make((1, 1024, 2000), layout=layout, where=offsets(0, 3, 3, 700, 1999, 2000), states=True),
        make((2, 64, 300), 7, layout, FP32),
    ]
    for call in calls:
        first = testing.repeat_identical(lambda call=call: run_backward(call, *incoming(call)), 20)
        testing.repeat_identical(lambda call=call: run(call), 20)
        torch.use_deterministic_algorithms(True)
        try:
            again = run_backward(call, *incoming(call))
        finally:
            torch.use_deterministic_algorithms(False)
        for name, gradient in again.items():
            np.testing.assert_array_equal(testing.to_numpy(gradient).view(np.uint8), first[name].view(np.uint8))


@pytest.mark.gpu(exclusive=True)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_than_two_to_the_31_elements(layout: str) -> None:
    """The end lies beyond 2^31 elements: there it must be as near to float64 as anywhere."""
    channels, length, width = 4096, 2**19 + 131, 4
    inner = (channels, length) if layout == "tokens inside" else (length, channels)
    x = torch.empty(1, *inner, dtype=BF16, device="cuda")
    dy = torch.empty_like(x)
    for array in (x, dy):
        for part in array[0].split(4096):
            part.normal_()
    x, dy = (a if layout == "tokens inside" else a.transpose(1, 2) for a in (x, dy))
    weight = (normal(channels, width, seed=1) * 0.5).requires_grad_()
    leaf = x.detach().requires_grad_()
    y = causal_conv1d(leaf, weight, activation="silu", backend=BACKEND)
    for part in (slice(0, 64), slice(length - 200, length)):
        before = slice(max(0, part.start - width), part.stop)
        end = Call(x[:, :, before], weight.detach())
        _, want, _ = oracle.forward(end)
        found, skip = y.detach()[:, :, before].double(), part.start - before.start
        allowed = RELATIVE[BF16] * want.abs() + 2.0**-20 * oracle.magnitude(end)
        assert ((found - want).abs() <= allowed)[:, :, skip:].all()
    dx, dweight = torch.autograd.grad(y, (leaf, weight), dy)
    del y
    tail = Call(x[:, :, length - 300 :], weight.detach())
    want_gradients, sizes = oracle.gradients(tail, dy[:, :, length - 300 :], None)
    error = (dx[:, :, length - 200 :].double() - want_gradients["x"][:, :, 100:]).abs()
    bound = 2 * ULP[BF16] * want_gradients["x"].abs() + 2.0**-18 * sizes["x"]
    assert (error <= bound[:, :, 100:]).all()
    total, scale = torch.zeros_like(weight, dtype=FP64), torch.zeros_like(weight, dtype=FP64)
    for start in range(0, length, 2**15):
        stop, first = min(length, start + 2**15), max(0, start - width + 1)
        masked = dy[:, :, first:stop].double()
        masked[:, :, : start - first] = 0
        part_gradients, part_sizes = oracle.gradients(Call(x[:, :, first:stop], weight.detach()), masked, None)
        total, scale = total + part_gradients["weight"], scale + part_sizes["weight"]
    assert ((dweight.double() - total).abs() <= ULP[BF16] * total.abs() + 1e-5 * total.abs() + 2.0**-18 * scale).all()


@pytest.mark.gpu(exclusive=True)
def test_rows_further_apart_than_two_to_the_31_elements() -> None:
    buffer = torch.empty(2**31 + 2**14, dtype=BF16, device="cuda")
    x = buffer.as_strided((2, 60, 64), (2**31 + 8, 64, 1)).transpose(1, 2)
    call = make((2, 64, 60))
    call.x = x.copy_(call.x)
    check(call)


def test_many_sequences() -> None:
    lengths = torch.randint(0, 5, (20_000,), generator=torch.Generator().manual_seed(1))
    where = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    labels = torch.repeat_interleave(torch.arange(20_000), lengths)[None].int().cuda()
    call = make((1, 64, int(where[-1])), where=where.cuda())
    y, _ = run(call)
    same = run(Call(call.x, call.weight, call.bias, labels=labels))[0]
    assert torch.allclose(y.float(), same.float(), rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("current", [True, False], ids=["as the current stream", "under a stream context"])
def test_the_current_stream_is_followed(current: bool) -> None:
    call = make((4, 1024, 4096), states=True)
    want, late = run(call)[0].clone(), torch.full_like(call.x, float("nan"))
    source = call.x
    call.x = late

    def work(stream: Any) -> Any:
        with torch.cuda.stream(stream):
            return run(call)[0]

    got = testing.run_on_side_stream(work, produce=lambda: late.copy_(source), current=current)
    np.testing.assert_array_equal(got.view(np.uint16), testing.to_numpy(want).view(np.uint16))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_graph_replays_with_changed_data_and_offsets(layout: str) -> None:
    call = make((1, 64, 257), layout=layout, where=offsets(0, 1, 130, 257), states=True)
    dy, dfinal = incoming(call)
    last = layout == "channels inside"
    name = "causal_conv1d_channel_last_backward" if last else "causal_conv1d_backward"
    backward = getattr(torch.ops.fe_conv, name)

    def both() -> Any:
        turned = [a.transpose(1, 2) if last else a for a in (dy, call.x)]
        operands = (turned[0], dfinal.transpose(1, 2).contiguous(), turned[1], call.weight, call.bias)
        gradients = backward(*operands, None, call.offsets, call.states, activation="silu", backend=BACKEND)
        return (*run(call), *gradients)

    def change() -> None:
        for array in (call.x, dy, dfinal, call.weight, call.states):
            array.mul_(-0.7)
        call.offsets.copy_(offsets(0, 60, 61, 257))

    replayed, eager = testing.cuda_graph_replay(both, change)
    for a, b in zip(replayed, eager, strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def test_lengths_batches_and_offsets_share_one_kernel() -> None:
    from fe_runtime.compile import cache_info

    def compiled() -> int:
        return sum(entry.compiles + entry.disk_hits for entry in cache_info().values())

    check(make((2, 64, 50), states=True))
    check(make((1, 64, 50), where=offsets(0, 20, 50)))
    before = compiled()
    for length in range(1, 60):
        causal_conv1d(**make((1 + length % 3, 64, length), states=True).arguments)
        causal_conv1d(**make((1, 64, length), where=offsets(*range(length), length)).arguments)
    assert compiled() == before


# --- the frameworks --------------------------------------------------------------------------------------------------


def test_the_route() -> None:
    call = make((2, 64, 50))
    run(call)
    assert fe_conv.causal_conv1d_last_route() == "native-inference"
    run_backward(call, *incoming(call))
    assert fe_conv.causal_conv1d_last_route() == "native-autograd"
    causal_conv1d(**call.arguments, backend="reference")
    assert fe_conv.causal_conv1d_last_route() == "generic"


def test_reference_on_the_gpu_agrees() -> None:
    call = make((1, 64, 257), where=offsets(0, 1, 130, 257), states=True)
    y, final = causal_conv1d(**call.arguments, backend="reference")
    want = run(call)
    assert torch.allclose(y.float(), want[0].float(), rtol=2**-7, atol=1e-5)
    assert torch.equal(final, want[1])


@pytest.mark.parametrize("packed", [False, True])
def test_torch_compile_with_gradient(packed: bool) -> None:
    where = offsets(0, 1, 130, 257) if packed else None
    call = make((1, 64, 257), where=where, states=True)
    dy, dfinal = incoming(call)

    @torch.compile(fullgraph=True)
    def model(x: Any, weight: Any, bias: Any, states: Any) -> Any:
        known = {**call.arguments, "weight": weight, "bias": bias, "initial_states": states}
        y, final = causal_conv1d(**{**known, "x": x * 1})
        return y + 0, final

    leaves = {name: leaf.detach().requires_grad_() for name, leaf in call.leaves.items()}
    outputs = model(*leaves.values())
    found = torch.autograd.grad(outputs, list(leaves.values()), (dy, dfinal))
    want = run_backward(call, dy, dfinal)
    assert torch.equal(outputs[0], run(call)[0])
    for name, gradient in zip(leaves, found, strict=True):
        assert torch.equal(gradient, want[name]), name


def test_jax_calls_the_same_kernels() -> None:
    import jax
    import jax.numpy as jnp

    from fe_conv import causal_conv1d_jax

    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    call = make((1, 64, 257), where=offsets(0, 1, 130, 257), states=True)
    dy, dfinal = incoming(call)
    y, final = run(call)
    gradients = run_backward(call, dy, dfinal)

    def to_jax(tensor: Any) -> Any:
        return jnp.asarray(testing.to_numpy(tensor))

    x, weight, bias, states = (to_jax(leaf) for leaf in call.leaves.values())

    def convolve(x: Any, weight: Any, bias: Any, states: Any) -> Any:
        return causal_conv1d_jax(
            x.swapaxes(1, 2),
            weight,
            bias,
            "silu",
            cu_seqlens=to_jax(call.offsets),
            initial_states=states,
            return_final_states=True,
            channel_last=True,
            backend=BACKEND,
        )

    for function in (convolve, jax.jit(convolve)):
        got, ends = function(x, weight, bias, states)
        np.testing.assert_array_equal(np.asarray(got.swapaxes(1, 2)).view(np.uint16), _bits(y))
        np.testing.assert_array_equal(np.asarray(ends).view(np.uint16), _bits(final))
    _, pull = jax.vjp(jax.jit(convolve), x, weight, bias, states)
    found = pull((to_jax(dy).swapaxes(1, 2), to_jax(dfinal)))
    for gradient, name in zip(found, gradients, strict=True):
        np.testing.assert_array_equal(np.asarray(gradient).view(np.uint16), _bits(gradients[name]))


def _bits(tensor: Any) -> Any:
    return testing.to_numpy(tensor).view(np.uint16)
