"""``causal_conv1d_update`` on a GPU: the kernels against an fp64 oracle, bit-exact states, and every edge."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fe_runtime
from fe_conv import causal_conv1d_update, causal_conv1d_update_jax
from fe_conv.update import CONTRACT, OPERATION
from fe_runtime import testing

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
FLOATS = {"bfloat16": BF16, "float16": torch.float16, "float32": torch.float32}
# One unit in the last place; fp32 keeps the error of the approximate exp and reciprocal (2^-21 each) and of the sum.
RELATIVE = {BF16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-19}


@pytest.fixture(autouse=True)
def poisoned_memory() -> Any:
    """Fresh allocations hold NaN or 0xFF, so an output element that is never written shows."""
    with testing.poisoned_memory():
        yield


def random(*shape: int, dtype: Any = BF16, seed: int = 0) -> Any:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


def strided(values: Any, stride: tuple[int, ...]) -> Any:
    """A copy of an array with these strides, NaN between its elements."""
    size = 1 + sum((extent - 1) * step for extent, step in zip(values.shape, stride, strict=True))
    buffer = torch.full((max(size, 1),), float("nan"), dtype=values.dtype, device="cuda")
    view = buffer.as_strided(values.shape, stride)
    return view.copy_(values)


def planes(state: Any) -> Any:
    return state.transpose(1, 2).contiguous().transpose(1, 2)


def oracle(
    x: Any, state: Any, weight: Any, bias: Any, activation: Any, lengths: Any, indices: Any
) -> tuple[Any, Any, Any]:
    """Token by token in float64; returns the output, the new state, and the magnitude of the sum."""
    tokens = x[..., None] if x.ndim == 2 else x
    slots, _, length = state.shape
    index = torch.arange(x.shape[0], device="cuda") if indices is None else indices.long()
    valid = (index >= 0) & (index < slots)
    rows, new = index[valid], state.clone()
    out = torch.zeros(tokens.shape, dtype=torch.float64, device="cuda")
    scale = torch.zeros_like(out)
    for k in range(tokens.shape[2]):
        token, old = tokens[valid, :, k], new[rows]
        if lengths is not None:
            at = (lengths[valid].long() + k) % length
            turn = (torch.arange(length, device="cuda") + at[:, None]) % length
            old = old.gather(2, turn[:, None, :].expand_as(old))
        terms = torch.cat([old, token[..., None]], -1)[..., -weight.shape[1] :].double() * weight.double()
        z = terms.sum(-1) + (0 if bias is None else bias.double())
        out[valid, :, k] = z * torch.sigmoid(z) if activation == "silu" else z
        scale[valid, :, k] = terms.abs().sum(-1) + (0 if bias is None else bias.double().abs())
        if lengths is None:
            new[rows] = torch.cat([old, token[..., None]], -1)[..., 1:]
        else:
            new[rows, :, at] = token
    return out.view(x.shape), new, scale.view(x.shape)


def check(
    x: Any,
    state: Any,
    weight: Any,
    bias: Any = None,
    activation: Any = "silu",
    lengths: Any = None,
    indices: Any = None,
) -> None:
    want, want_state, scale = oracle(x, state, weight, bias, activation, lengths, indices)
    out = causal_conv1d_update(
        x, state, weight, bias, activation, cache_seqlens=lengths, conv_state_indices=indices, backend="sm90"
    )
    assert out.is_contiguous()
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    error = (out.double() - want).abs() - RELATIVE[x.dtype] * want.abs() - 2.0**-21 * scale - 2.0**-120
    assert error.max().item() <= 0, f"worst excess {error.max().item():g}"
    assert torch.equal(bits(state), bits(want_state))


def bits(values: Any) -> Any:
    return values.contiguous().view(torch.int16 if values.element_size() == 2 else torch.int32)


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=list(FLOATS))
@pytest.mark.parametrize("width", [2, 3, 4, 5, 8])
def test_widths_lengths_and_layouts(width: int, dtype: Any) -> None:
    for rows, channels in ((1, 2048), (7, 96), (5, 33), (130, 8)):
        x, weight = random(rows, channels, dtype=dtype), random(channels, width, dtype=dtype, seed=1)
        bias = random(channels, dtype=dtype, seed=2)
        for length in {max(1, width - 1), width, 9}:
            state = random(rows + 2, channels, length, dtype=dtype, seed=3)
            check(x, state.clone(), weight)
            check(x, planes(state), weight, bias, "identity")
            check(x, strided(state, (channels * 2 * length + 3, 2 * length, 2)), weight, bias)


@pytest.mark.parametrize("channels", [2048, 6144, 8192, 24576])
@pytest.mark.parametrize("rows", [1, 8, 64, 256])
def test_shapes_of_models(rows: int, channels: int) -> None:
    weight = random(channels, 4, seed=1)
    fused = random(rows, 3 * channels)
    indices = torch.randperm(512, device="cuda")[:rows].int()
    for length in (3, 4):
        state = random(512, channels, length, seed=2)
        check(fused[:, channels : 2 * channels], state.clone(), weight, indices=indices)
        check(fused[:, :channels], planes(state), weight, indices=indices)


def test_width_one_and_wide_filters() -> None:
    for width, length in ((1, 0), (1, 3), (16, 15), (32, 40)):
        check(random(5, 64), random(6, 64, length, seed=1), random(64, width, seed=2), random(64, seed=3))


@pytest.mark.parametrize("layout", ["contiguous", "channel-last"])
@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_several_tokens(count: int, layout: str) -> None:
    for length in (3, 4, 6, 20):
        x = random(9, 96, count)
        x = planes(x) if layout == "channel-last" else x
        indices = torch.tensor([3, 11, -1, 0, 5, 8, -1, 2, 9], dtype=torch.int32, device="cuda")
        check(x, random(12, 96, length, seed=1), random(96, 4, seed=2), random(96, seed=3), indices=indices)


@pytest.mark.parametrize("count", [None, 1, 3, 10])
def test_rings(count: int | None) -> None:
    for width, length in ((4, 3), (4, 4), (4, 9), (2, 1), (8, 7)):
        x = random(6, 160) if count is None else random(6, 160, count)
        lengths = torch.tensor([0, length - 1, 7 * length + 2, -1, 2**31 - 1, -(2**31)], dtype=torch.int32).cuda()
        indices = torch.tensor([7, 1, -1, 0, 4, 2], dtype=torch.int32, device="cuda")
        state = random(8, 160, length, seed=1)
        check(x, state.clone(), random(160, width, seed=2), lengths=lengths)
        check(x, planes(state), random(160, width, seed=2), random(160, seed=3), "identity", lengths, indices)


@pytest.mark.parametrize("weight_dtype", [BF16, torch.float32])
def test_float32_parameters(weight_dtype: Any) -> None:
    weight, bias = random(640, 4, dtype=weight_dtype), random(640, dtype=weight_dtype)
    check(random(5, 640), random(5, 640, 4, seed=1), weight, bias)
    check(random(5, 640, 3), random(5, 640, 4, seed=1), weight, bias)


def test_strided_operands() -> None:
    x, state, weight, bias = random(5, 72), random(6, 72, 4, seed=1), random(72, 4, seed=2), random(72, seed=3)
    indices = torch.tensor([5, 9, 0, 9, -1, 9, 3, 9, 1, 9], dtype=torch.int32, device="cuda")[::2]
    check(strided(x, (77, 1)), state.clone(), weight, indices=indices)
    check(strided(x, (200, 2)), state.clone(), weight)
    check(x[:1].expand(5, 72), state.clone(), weight)
    check(x, state.clone(), strided(weight, (1, 80)), bias)
    check(x, state.clone(), weight, strided(bias, (3,)))
    check(x, strided(state, (1, 6 * 4, 6)), weight)
    check(x, strided(state, (72 * 4 + 8, 4, 1)), weight)
    check(x, strided(state, (72 * 4 + 1, 4, 1)), weight)


@pytest.mark.parametrize("alignment", [2, 4, 8])
def test_addresses_that_suit_no_wide_access(alignment: int) -> None:
    names = {"x": (6, 64), "conv_state": (7, 64, 4), "weight": (64, 4), "bias": (64,)}
    values = {name: np.random.default_rng(1).standard_normal(shape) for name, shape in names.items()}
    for name in names:
        made = {
            other: testing.guarded(
                shape,
                "bfloat16",
                values=values[other],
                alignment=alignment if other == name else 16,
                framework="torch",
                device="cuda",
                name=other,
            )
            for other, shape in names.items()
        }
        check(*(made[other].array for other in names))
        for other in names:
            made[other].check_surroundings()
            if other != "conv_state":
                made[other].check_unchanged()


def test_padding_rows_are_zero_and_touch_nothing() -> None:
    for state in (random(5, 256, 4, seed=1), planes(random(5, 256, 3, seed=1)), random(5, 256, 12, seed=1)):
        before = state.clone()
        indices = torch.full((9,), -1, dtype=torch.int32, device="cuda")
        out = causal_conv1d_update(random(9, 256), state, random(256, 4), conv_state_indices=indices)
        assert not bits(out).any()  # +0 in every element
        assert torch.equal(state, before)


def test_malformed_indices_neither_fault_nor_poison() -> None:
    wrong = [5, -2, 2**31 - 1, -(2**31), 3]
    indices = torch.tensor(wrong, dtype=torch.int32, device="cuda")
    for length, x in ((4, random(5, 128)), (12, random(5, 128)), (4, random(5, 128, 2))):
        guard = testing.guarded(
            (5, 128, length), "bfloat16", values=np.ones((5, 128, length)), framework="torch", device="cuda"
        )
        out = causal_conv1d_update(x, guard.array, random(128, 4), conv_state_indices=indices)
        torch.cuda.synchronize()
        assert not out[:4].any()
        assert out[4].any()
        assert (guard.array[[0, 1, 2, 4]] == 1).all()
        guard.check_surroundings()
        state = guard.array.clone()
        with fe_runtime_checked(), pytest.raises(ValueError, match="conv_state_indices must name slots 0 to 4"):
            causal_conv1d_update(x, state, random(128, 4), conv_state_indices=indices)
        assert torch.equal(state, guard.array)


def test_duplicates_leave_one_of_the_candidates() -> None:
    indices = torch.tensor([2, 2, 2, 2], dtype=torch.int32, device="cuda")
    x, state, weight = random(4, 512), random(3, 512, 4, seed=1), random(512, 4, seed=2)
    before = state.clone()
    causal_conv1d_update(x, state, weight, conv_state_indices=indices)
    assert torch.equal(state[:2], before[:2])
    # Rows may read what another one has written already, so the last token is what is certain.
    assert (state[2, :, -1, None] == x.t()).any(-1).all()
    with fe_runtime_checked(), pytest.raises(ValueError, match="conv_state_indices must name no slot twice"):
        causal_conv1d_update(x, state, weight, conv_state_indices=indices)


class fe_runtime_checked:  # noqa: N801 - a context manager
    """Checked mode: the values of indices are read on the host."""

    def __enter__(self) -> None:
        fe_runtime.configure(check_device_values=True)

    def __exit__(self, *_: object) -> None:
        fe_runtime.configure(check_device_values=None)


def test_payloads_move_bit_by_bit() -> None:
    for length in (3, 4, 12):
        words = torch.randint(-(2**15), 2**15, (2, 64, length), dtype=torch.int16, device="cuda")
        tokens = torch.randint(-(2**15), 2**15, (2, 64), dtype=torch.int16, device="cuda")
        want = torch.cat([words, tokens[..., None]], -1)[..., 1:]
        state = words.clone()
        causal_conv1d_update(tokens.view(BF16), state.view(BF16), random(64, 4))
        assert torch.equal(state, want)


def test_no_rows_launch_nothing() -> None:
    state = random(3, 64, 4)
    before = state.clone()
    assert causal_conv1d_update(random(0, 64), state, random(64, 4)).shape == (0, 64)
    assert causal_conv1d_update(random(3, 64, 0), state, random(64, 4)).shape == (3, 64, 0)
    assert torch.equal(state, before)


def test_overlap_gradients_and_devices_are_rejected() -> None:
    state, weight = random(4, 64, 4), random(64, 4)
    for _ in range(2):  # also on a warm call
        with pytest.raises(ValueError, match="conv_state must not share memory with x"):
            causal_conv1d_update(state.view(-1)[:256].view(4, 64), state, weight)
    x = random(4, 64)
    causal_conv1d_update(x, state, weight)
    with pytest.raises(RuntimeError, match="must not require a gradient"):
        causal_conv1d_update(x, state, weight.requires_grad_())
    with torch.no_grad():
        causal_conv1d_update(x, state, weight)
    with pytest.raises(ValueError, match="weight must be on the device of x"):
        causal_conv1d_update(x, state, weight.detach().cpu())


def test_version_counts_on_every_call() -> None:
    x, state, weight = random(4, 64), random(4, 64, 4), random(64, 4)
    versions = []
    for _ in range(3):
        causal_conv1d_update(x, state, weight)
        versions.append(state._version)
    assert len(set(versions)) == 3


def test_graph_replays_with_new_tokens() -> None:
    x, state, weight = random(8, 2048), random(8, 2048, 4, seed=1), random(2048, 4, seed=2)
    indices = torch.arange(8, dtype=torch.int32, device="cuda")
    causal_conv1d_update(x, state, weight, conv_state_indices=indices)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = causal_conv1d_update(x, state, weight, activation="silu", conv_state_indices=indices)
    for step in range(4):
        x.copy_(random(8, 2048, seed=10 + step))
        if step == 2:
            indices.copy_(indices.flip(0))
        want, want_state, _ = oracle(x, state, weight, None, "silu", None, indices)
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(out.double(), want, rtol=2.0**-7, atol=1e-4)
        assert torch.equal(state, want_state)


def test_side_stream() -> None:
    x, state, weight = torch.zeros(16, 1024, dtype=BF16, device="cuda"), random(16, 1024, 4), random(1024, 4, seed=1)
    fresh = random(16, 1024, seed=5)

    def call(_stream: Any) -> Any:
        return causal_conv1d_update(x, state.clone(), weight)

    got = testing.run_on_side_stream(call, produce=lambda: x.copy_(fresh))
    want = causal_conv1d_update(fresh, state.clone(), weight)
    np.testing.assert_array_equal(got, testing.to_numpy(want))


def test_repeated_runs_are_identical() -> None:
    x, state, weight = random(64, 8192), random(64, 8192, 4), random(8192, 4, seed=1)

    def run() -> Any:
        moved = state.clone()
        return causal_conv1d_update(x, moved, weight, activation="silu"), moved

    testing.repeat_identical(run)


@pytest.mark.gpu(exclusive=True)
def test_more_elements_than_32_bits_count() -> None:
    rows, channels = 5, 65536
    weight = random(channels, 4, seed=1)
    slots = 2**31 // (channels * 4) + 3
    state = torch.zeros(slots, channels, 4, dtype=BF16, device="cuda")
    indices = torch.tensor([slots - 1, 0, slots - 2, -1, slots // 2], dtype=torch.int32, device="cuda")
    state[indices[indices >= 0].long()] = random(4, channels, 4, seed=2)
    for x in (random(rows, channels), random(rows, channels, 2)):
        check_slots(x, state, weight, indices)
    for length in (4, 9):  # more groups of rows than a grid's second dimension holds
        check(random(140_000, 8), random(140_000, 8, length), random(8, 4))


def check_slots(x: Any, state: Any, weight: Any, indices: Any) -> None:
    kept = indices >= 0
    used = indices[kept].long()
    want, want_state, _ = oracle(x[kept], state[used].clone(), weight, None, None, None, None)
    out = causal_conv1d_update(x, state, weight, conv_state_indices=indices)
    torch.testing.assert_close(out[kept].double(), want, rtol=2.0**-7, atol=1e-3)
    assert not out[~kept].any()
    assert torch.equal(state[used], want_state)


def test_reference_on_the_gpu() -> None:
    x, state, weight = random(6, 64), random(8, 64, 5), random(64, 4, seed=1)
    indices = torch.tensor([7, -1, 3, 0, 99, 5], dtype=torch.int32, device="cuda")
    lengths = torch.arange(6, dtype=torch.int32, device="cuda")
    for ring in (None, lengths):
        a, b = state.clone(), state.clone()
        got = causal_conv1d_update(x, a, weight, cache_seqlens=ring, conv_state_indices=indices, backend="reference")
        want = causal_conv1d_update(x, b, weight, cache_seqlens=ring, conv_state_indices=indices)
        torch.testing.assert_close(got, want, rtol=2.0**-7, atol=1e-3)
        assert torch.equal(a, b)


def test_torch_compile() -> None:
    x, weight = random(8, 256), random(256, 4, seed=1)

    @torch.compile(fullgraph=True)
    def steps(x: Any, state: Any) -> Any:
        return causal_conv1d_update(x * 1, state, weight) + causal_conv1d_update(x * 2, state, weight)

    a, b = random(8, 256, 4, seed=2), random(8, 256, 4, seed=2)
    want = causal_conv1d_update(x, a, weight) + causal_conv1d_update(x * 2, a, weight)
    assert torch.equal(steps(x, b), want)
    assert torch.equal(a, b)


def kernels_loaded() -> int:
    """How many kernels this process has taken from the compiler or the disk."""
    return sum(entry.compiles + entry.disk_hits for entry in fe_runtime.cache_info().values())


def test_extents_do_not_compile_again() -> None:
    causal_conv1d_update(random(3, 64), random(3, 64, 4), random(64, 4))
    before = kernels_loaded()
    for rows, channels in ((1, 64), (17, 128), (300, 64)):
        causal_conv1d_update(random(rows, channels), random(rows, channels, 4), random(channels, 4))
    assert kernels_loaded() == before


def test_jax_calls_the_same_kernel() -> None:
    import jax
    import jax.numpy as jnp

    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    indices = torch.tensor([4, -1, 0, 7], dtype=torch.int32, device="cuda")
    for length, ring in ((4, None), (3, None), (5, torch.tensor([0, 1, 7, 3], dtype=torch.int32, device="cuda"))):
        x, state, weight, bias = random(4, 512), random(8, 512, length), random(512, 4, seed=1), random(512, seed=2)
        arrays = [x, state, weight, bias]
        jx, js, jw, jb = (jnp.asarray(a.float().cpu().numpy()).astype(jnp.bfloat16) for a in arrays)
        extra = {"cache_seqlens": ring, "conv_state_indices": indices}
        jextra = {name: None if a is None else jnp.asarray(a.cpu().numpy()) for name, a in extra.items()}
        want = causal_conv1d_update(x, state, weight, bias, "silu", **extra).float().cpu().numpy()
        want_state = state.float().cpu().numpy()

        def step(x: Any, state: Any, weight: Any = jw, bias: Any = jb, extra: Any = jextra) -> Any:
            return causal_conv1d_update_jax(x, state, weight, bias, "silu", **extra)

        for call in (step, jax.jit(step), jax.jit(step, donate_argnums=1)):
            given = jnp.array(js)
            out, new = call(jx, given)
            np.testing.assert_array_equal(np.asarray(out).astype(np.float32), want)
            np.testing.assert_array_equal(np.asarray(new).astype(np.float32), want_state)
        np.testing.assert_array_equal(np.asarray(js), np.asarray(jnp.array(js)))


def test_every_input_is_named() -> None:
    assert OPERATION.contract is CONTRACT
    schema = torch.ops.fe_conv.causal_conv1d_update.default._schema
    assert [argument.name for argument in schema.arguments][:6] == list(CONTRACT.input_names)
