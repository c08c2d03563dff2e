"""``vision_rope_backward`` on a GPU: the kernel against the naive loop and the reference, bit for bit."""

from __future__ import annotations

from typing import Any

import naive_rope
import pytest
import torch
from rope_on_gpu import assert_same, bfloats, bits, compiles, produced_late, tables

from fe_rope import VisionRoPEBackward, launch_vision, vision_rope_backward_jax, vision_rope_backward_wrapper
from fe_rope.reference.vision_rope_backward import vision_rope_backward
from fe_runtime import testing
from fe_runtime.compile import KernelSpec, load
from fe_runtime.testing import guarded, to_numpy

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def poisoned_memory() -> Any:
    """Fresh allocations hold NaN, so an output element that is never written shows."""
    with testing.poisoned_memory():
        yield


def stored(tokens: int, heads: int = 16, channels: int = 64, kind: str = "normal") -> tuple[Any, ...]:
    """The arrays as attention leaves them."""
    shapes = (heads, tokens, channels), (heads, channels, tokens), (heads, tokens, channels)
    gradients = [bfloats(shape, kind, seed) for seed, shape in enumerate(shapes)]
    return (*gradients, *tables((tokens, 1, channels // 2), kind))


def native(tokens: int, heads: int = 16, channels: int = 64, kind: str = "normal") -> tuple[Any, ...]:
    """The same, seen as (T, H, D)."""
    q, k, v, cosine, sine = stored(tokens, heads, channels, kind)
    return q.permute(1, 0, 2), k.permute(2, 0, 1), v.permute(1, 0, 2), cosine, sine


def reference(q: Any, k: Any, v: Any, cosine: Any, sine: Any) -> Any:
    shape = q.shape[0], q.shape[2] // 2
    return vision_rope_backward(q, k, v, cosine.reshape(shape), sine.reshape(shape))[0]


def run_and_check(*arrays: Any) -> Any:
    out = vision_rope_backward_wrapper(*arrays, backend="sm90")["grad_qkv"]
    assert_same(out, reference(*arrays))
    v = arrays[2].reshape(out.shape[0], -1)
    assert torch.equal(bits(out[:, 2 * v.shape[1] :]), bits(v))
    return out


@pytest.mark.parametrize("kind", ["normal", "bits"])
def test_reference_and_kernel_on_the_gpu_are_the_naive_loop(kind: str) -> None:
    arrays = native(5, 2, 64, kind)
    q, k, v, cosine, sine = map(to_numpy, arrays)
    want = naive_rope.vision_rope_backward(q, k, v, cosine[:, 0], sine[:, 0])
    assert naive_rope.same_bits(to_numpy(reference(*arrays)), want)
    assert naive_rope.same_bits(to_numpy(vision_rope_backward_wrapper(*arrays, backend="sm90")["grad_qkv"]), want)


TOKENS = [1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 72, 127, 128, 200, 1000, 1024, 4096, 4097]


@pytest.mark.parametrize("tokens", TOKENS)
def test_native_layout_with_any_number_of_tokens(tokens: int) -> None:
    for kind in ("normal", "bits"):
        run_and_check(*native(tokens, kind=kind))


def test_token_counts_compile_once() -> None:
    run_and_check(*native(8))
    before = compiles()
    for tokens in (1, 3, 64, 65, 1001):
        run_and_check(*native(tokens))
    assert compiles() == before


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("channels", [2, 4, 6, 24, 64, 72, 128, 250, 256])
def test_other_heads_and_channels(heads: int, channels: int) -> None:
    for tokens in (1, 40, 97):
        run_and_check(*native(tokens, heads, channels))


def test_very_long_heads() -> None:
    for channels in (1024, 2048, 8192):
        run_and_check(*native(24, 2, channels))


def layouts(tokens: int, heads: int, channels: int) -> list[tuple[int, ...]]:
    """Strides of (T, H, D) in every order of storage, padded, and with gaps between values."""
    return [
        (heads * channels, channels, 1),
        (3 * heads * channels, channels, 1),
        (channels, tokens * channels, 1),
        (channels + 3, tokens * (channels + 3), 1),
        (1, channels * tokens, tokens),
        (1, channels * (tokens + 5), tokens + 5),
        (1, channels * (tokens + 8), tokens + 8),
        (2, 2 * channels * tokens, 2 * tokens),
        (2 * heads * channels, 2 * channels, 2),
    ]


@pytest.mark.parametrize("tokens", [40, 41, 64])
def test_every_layout_of_every_gradient(tokens: int) -> None:
    shape = (tokens, 3, 24)
    base = native(tokens, 3, 24)
    for part in range(3):
        for stride in layouts(*shape):
            extent = sum((e - 1) * s for e, s in zip(shape, stride, strict=True)) + 1
            buffer = torch.full((extent,), float("nan"), dtype=torch.bfloat16, device="cuda")
            gradient = buffer.as_strided(shape, stride).copy_(base[part])
            run_and_check(*base[:part], gradient, *base[part + 1 :])


@pytest.mark.parametrize("offset", [1, 2, 4])
def test_unaligned_bases(offset: int) -> None:
    for tokens in (64, 65):
        arrays = list(native(tokens))
        for part in range(3):
            old = arrays[part]
            buffer = torch.empty(old.numel() + offset, dtype=torch.bfloat16, device="cuda")
            moved = buffer[offset:].as_strided(old.shape, old.stride(), offset).copy_(old)
            run_and_check(*arrays[:part], moved, *arrays[part + 1 :])
        moved = torch.empty(arrays[3].numel() + 1, device="cuda")[1:].view(arrays[3].shape).copy_(arrays[3])
        run_and_check(*arrays[:3], moved, arrays[4])


def test_tables_of_either_rank() -> None:
    q, k, v, cosine, sine = native(40)
    run_and_check(q, k, v, cosine[:, 0], sine[:, 0])
    run_and_check(q, k, v, cosine, sine[:, 0])


def test_nothing_beside_the_output_is_written() -> None:
    for tokens, heads, channels, alignment in ((33, 16, 64, 16), (65, 3, 6, 4), (40, 5, 72, 16), (1, 16, 64, 16)):
        arrays = native(tokens, heads, channels)
        shape = (tokens, 3 * heads * channels)
        out = guarded(shape, "bfloat16", framework="torch", device="cuda", alignment=alignment, name="grad_qkv")
        op = VisionRoPEBackward(*arrays, backend="sm90")
        op.compile()
        assert op.execute(*arrays, out.array) is out.array
        assert_same(out.array, reference(*arrays))
        out.check_surroundings()


def test_class_refuses_an_output_that_is_less_aligned() -> None:
    arrays = native(64)
    op = VisionRoPEBackward(*arrays)
    op.compile()
    out = torch.empty(64 * 3072 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(64, 3072)
    with pytest.raises(ValueError, match="grad_qkv must be as the compiled signature: rows aligned to 16 bytes"):
        op.execute(*arrays, out)


def test_v_keeps_every_bit_and_no_nan_spreads() -> None:
    every = torch.arange(-(1 << 15), 1 << 15, device="cuda", dtype=torch.int16).view(torch.bfloat16).view(16, 64, 64)
    q, k, _, cosine, sine = native(64)
    run_and_check(q, k, every.permute(1, 0, 2), cosine, sine)
    clean = run_and_check(*native(64))
    q, k, v, cosine, sine = native(64)
    q[5, 3, 7], k[6, 2, 40] = float("nan"), float("nan")
    out = run_and_check(q, k, v, cosine, sine)
    where = out.isnan().nonzero().tolist()
    assert where == [[5, 3 * 64 + 7], [5, 3 * 64 + 39], [6, 1024 + 2 * 64 + 8], [6, 1024 + 2 * 64 + 40]]
    out[out.isnan()] = clean[out.isnan()]
    assert torch.equal(bits(out), bits(clean))


def test_no_tokens() -> None:
    assert vision_rope_backward_wrapper(*native(0))["grad_qkv"].shape == (0, 3072)


@pytest.mark.parametrize("tokens", [72, 1001])
def test_every_candidate_gives_the_same_bits(tokens: int) -> None:
    arrays = native(tokens)
    want = reference(*arrays)
    problem = launch_vision.Problem(16, 64)
    for chosen in launch_vision.candidates(problem, "sm_90a"):
        config, place = launch_vision.config(problem, chosen), "fe_rope.kernels.vision_rope_backward:build"
        kernel = load(KernelSpec.of("fe_rope.vision_rope_backward", place, "sm_90a", **config))
        out = torch.empty_like(want)
        kernel(*arrays, out)
        assert_same(out, want)


@pytest.mark.gpu(exclusive=True)
def test_more_than_two_to_the_31_elements() -> None:
    tokens = 2**31 // 3072 + 9
    gradients = [
        torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in ((16, tokens, 64), (16, 64, tokens))
    ]
    for gradient in gradients:
        for head in gradient:
            head.normal_()
    q, k, v = gradients[0].permute(1, 0, 2), gradients[1].permute(2, 0, 1), gradients[0].permute(1, 0, 2)
    cosine, sine = tables((tokens, 1, 32))
    out = vision_rope_backward_wrapper(q, k, v, cosine, sine, backend="sm90")["grad_qkv"]
    for part in (slice(0, 3), slice(tokens // 2, tokens // 2 + 3), slice(tokens - 6, tokens)):
        assert_same(out[part], reference(q[part], k[part], v[part], cosine[part], sine[part]))


# ---- streams, graphs, class, frameworks


@pytest.mark.parametrize("form", ["current", "stream", "handle"])
def test_streams(form: str) -> None:
    q, *rest = native(4096)
    want = vision_rope_backward_wrapper(q, *rest)["grad_qkv"].clone()
    side, late = produced_late(q)
    if form == "current":
        with torch.cuda.stream(side):
            out = vision_rope_backward_wrapper(late, *rest)["grad_qkv"]
    else:
        stream = side if form == "stream" else side.cuda_stream
        out = vision_rope_backward_wrapper(late, *rest, current_stream=stream)["grad_qkv"]
    side.synchronize()
    assert torch.equal(out, want)


@pytest.mark.parametrize("api", ["wrapper", "class"])
def test_graph_replays_with_changed_data(api: str) -> None:
    arrays = native(65)
    out = vision_rope_backward_wrapper(*arrays)["grad_qkv"]
    op = VisionRoPEBackward(*arrays)
    op.compile()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if api == "wrapper":
            out = vision_rope_backward_wrapper(*arrays)["grad_qkv"]
        else:
            op.execute(*arrays, out)
    for kind in ("bits", "normal"):
        arrays[0].copy_(native(65, kind=kind)[0])
        graph.replay()
        assert_same(out, reference(*arrays))


def test_class_for_any_number_of_tokens() -> None:
    for sample in (1, 64, 33):
        op = VisionRoPEBackward(*native(sample))
        op.compile()
        assert "sm90" in op.explain()
        for tokens in (0, 1, 8, 31, 64, 1000, 64):
            arrays = native(tokens)
            out = torch.empty(tokens, 3072, dtype=torch.bfloat16, device="cuda")
            op.execute(*arrays, out)
            assert_same(out, reference(*arrays))
    inside = out.view(-1)[: 16 * 64 * 64].view(16, 64, 64).permute(1, 0, 2)
    with pytest.raises(ValueError, match="grad_qkv must not share memory with grad_q"):
        op.execute(inside, *arrays[1:], out)


def test_one_object_meets_another_layout_of_k() -> None:
    arrays = native(64)
    out = torch.empty(64, 3072, dtype=torch.bfloat16, device="cuda")
    op = VisionRoPEBackward(*arrays)
    op.compile()
    op.execute(*arrays, out)
    with pytest.raises(ValueError, match="as the compiled signature"):
        op.execute(*[array.contiguous() for array in arrays], out)


def test_repeated_runs_and_the_reference() -> None:
    arrays = native(1000)
    first = vision_rope_backward_wrapper(*arrays)["grad_qkv"]
    assert_same(vision_rope_backward_wrapper(*arrays, backend="reference")["grad_qkv"], first)
    assert all(torch.equal(vision_rope_backward_wrapper(*arrays)["grad_qkv"], first) for _ in range(20))


def test_torch_compile() -> None:
    arrays = native(64)

    @torch.compile(fullgraph=True)
    def model(q: Any, *rest: Any) -> Any:
        return vision_rope_backward_wrapper(q * 1, *rest)["grad_qkv"] + 0

    assert torch.equal(model(*arrays), vision_rope_backward_wrapper(*arrays)["grad_qkv"] + 0)


@pytest.mark.parametrize("tokens", [64, 65])
def test_jax_calls_the_same_kernel(tokens: int) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    want = to_numpy(reference(*native(tokens, kind="bits")))
    arrays = [jnp.asarray(to_numpy(array)) for array in stored(tokens, kind="bits")]
    for call in (vision_rope_backward_jax, jax.jit(vision_rope_backward_jax)):
        assert naive_rope.same_bits(np.asarray(call(*arrays)), want)
    logical = [jnp.asarray(to_numpy(array)) for array in native(tokens, kind="bits")]
    assert naive_rope.same_bits(np.asarray(vision_rope_backward_wrapper(*logical)["grad_qkv"]), want)
