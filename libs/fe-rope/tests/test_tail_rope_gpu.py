"""``tail_rope`` on a GPU: the kernel against the naive loop and the reference, bit for bit, at every edge."""

from __future__ import annotations

from typing import Any

import naive_rope
import pytest
import torch
from rope_on_gpu import assert_same, bfloats, bits, compiles, produced_late, tables

from fe_rope import TailRoPEForward, launch, tail_rope, tail_rope_jax
from fe_rope.reference.tail_rope import tail_rope as reference
from fe_runtime import NotSupportedError, testing
from fe_runtime.compile import KernelSpec, load
from fe_runtime.testing import guarded, to_numpy

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def poisoned_memory() -> Any:
    """Fresh allocations hold NaN, so an output element that is never written shows."""
    with testing.poisoned_memory():
        yield


def run_and_check(x: Any, cosine: Any, sine: Any) -> Any:
    out = tail_rope(x, cosine, sine, backend="sm90")["out"]
    assert out.is_contiguous()
    assert_same(out, reference(x, cosine, sine)[0])
    first = x.shape[-1] - 64
    assert torch.equal(bits(out[..., :first]), bits(x[..., :first]))
    return out


@pytest.mark.parametrize("kind", ["normal", "bits"])
def test_the_reference_on_the_gpu_is_the_naive_loop(kind: str) -> None:
    x, (cosine, sine) = bfloats((5, 2, 96), kind), tables((5, 32), kind)
    want = naive_rope.tail_rope(*map(to_numpy, (x, cosine, sine)))
    assert naive_rope.same_bits(to_numpy(reference(x, cosine, sine)[0]), want)
    assert naive_rope.same_bits(to_numpy(tail_rope(x, cosine, sine, backend="sm90")["out"]), want)


SHAPES = [(64,), (66,), (68,), (96,), (128,), (512,), (1, 512), (2, 192), (3, 66), (4, 128), (7, 96), (10, 512)]
LARGER = [(17, 512), (32, 128), (48, 512), (64, 512), (100, 576), (2, 3, 128), (4096,), (2052,), (3, 20000)]


@pytest.mark.parametrize("shape", SHAPES + LARGER, ids=str)
def test_every_kind_of_shape(shape: tuple[int, ...]) -> None:
    for tokens in (1, 2, 77):
        for kind in ("normal", "bits"):
            run_and_check(bfloats((tokens, *shape), kind), *tables((tokens, 32), kind))


def test_cancelling_products() -> None:
    """``a * c`` close to ``RN(b * s)``: the choice of what is fused shows."""
    x, (cosine, _) = bfloats((500, 64)), tables((500, 32))
    a, b = (x[:, part::2].float() for part in (0, 1))
    off = torch.randint(-2, 3, a.shape, device="cuda") * 2.0**-23
    sine = (a * cosine / b * (1 + off)).contiguous()
    out = run_and_check(x, cosine, sine)
    assert not torch.equal((a * cosine - b * sine).bfloat16(), out[:, ::2])


def test_copied_channels_keep_every_bit_and_nan_stays_in_its_pair() -> None:
    every = torch.arange(-(1 << 15), 1 << 15, device="cuda", dtype=torch.int16).view(torch.bfloat16).view(-1, 64)
    x = torch.cat([every, bfloats((every.shape[0], 64))], dim=1)
    cosine, sine = tables((x.shape[0], 32))
    out = run_and_check(x, cosine, sine)
    clean = out.clone()
    x[3, 70], x[4, 127] = float("nan"), float("inf")
    out = run_and_check(x, cosine, sine)
    assert out[3, 70:72].isnan().all()
    out[3, 70:72], out[4, 126:128] = clean[3, 70:72], clean[4, 126:128]
    assert torch.equal(bits(out), bits(clean))


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", [(9, 96), (9, 3, 128)], ids=str)
def test_unaligned_bases(shape: tuple[int, ...], offset: int) -> None:
    size = torch.Size(shape).numel()
    x = bfloats((size + offset,))[offset:].view(shape)
    run_and_check(x, *tables((shape[0], 32)))
    cosine, sine = (table.reshape(-1)[1:].view(shape[0], 32) for table in tables((shape[0] * 32 + 1,)))
    run_and_check(x, cosine, sine)


def test_strides_between_tokens_and_heads() -> None:
    """Slices of a packed projection, heads stored first, a padded row; what lies between is NaN."""
    cosine, sine = tables((20, 32))
    for shape, stride in [
        ((20, 4, 128), (12 * 128, 128, 1)),
        ((20, 4, 128), (128, 20 * 128, 1)),
        ((20, 4, 128), (4 * 136, 136, 1)),
        ((20, 4, 96), (401, 97, 1)),
        ((20, 128), (576, 1)),
        ((20, 1, 128), (577, 3, 1)),
        ((20, 2, 3, 128), (6 * 128, 3 * 128, 128, 1)),
        ((20, 2, 3, 128), (4096, 1024, 256, 1)),
    ]:
        extent = sum((e - 1) * s for e, s in zip(shape, stride, strict=True)) + 1
        buffer = torch.full((extent,), float("nan"), dtype=torch.bfloat16, device="cuda")
        x = buffer.as_strided(shape, stride)
        x.copy_(bfloats(shape))
        run_and_check(x, cosine, sine)


def test_nothing_beside_the_output_is_written() -> None:
    for shape in ((3, 5, 96), (17, 1, 512), (2, 66), (5, 17, 512)):
        for alignment in (16, 2):
            out = guarded(shape, "bfloat16", framework="torch", device="cuda", alignment=alignment, name="out")
            x, (cosine, sine) = bfloats(shape), tables((shape[0], 32))
            TailRoPEForward(x, cosine, sine, out.array, backend="sm90")(x, cosine, sine, out.array)
            assert_same(out.array, reference(x, cosine, sine)[0])
            out.check_surroundings()


def test_a_hundred_token_counts_compile_once() -> None:
    for shape in ((4, 128), (576,)):
        run_and_check(bfloats((3, *shape)), *tables((3, 32)))
        before = compiles()
        for tokens in (1, 2, 4, *range(5, 100, 13), 4097):
            run_and_check(bfloats((tokens, *shape)), *tables((tokens, 32)))
        assert compiles() == before


def test_no_tokens() -> None:
    x, (cosine, sine) = bfloats((0, 4, 128)), tables((0, 32))
    assert tail_rope(x, cosine, sine)["out"].shape == (0, 4, 128)


@pytest.mark.parametrize("shape", [(64, 512), (32, 128), (1, 512), (3, 66)], ids=str)
def test_every_candidate_gives_the_same_bits(shape: tuple[int, int]) -> None:
    heads, columns = shape
    x, (cosine, sine) = bfloats((131, *shape)), tables((131, 32))
    want = reference(x, cosine, sine)[0]
    alignment = min(16, 2 * columns & -2 * columns)
    problem = launch.Problem(heads, columns, x_alignment=alignment, out_alignment=alignment)
    for chosen in launch.candidates(problem, "sm_90a")[:12]:
        place = "fe_rope.kernels.tail_rope:build"
        kernel = load(KernelSpec.of("fe_rope.tail_rope", place, "sm_90a", **launch.config(problem, chosen)))
        out = torch.empty_like(x)
        kernel(x, cosine, sine, out)
        assert_same(out, want)


@pytest.mark.gpu(exclusive=True)
def test_more_than_two_to_the_31_elements() -> None:
    tokens = 2**31 // (64 * 512) + 5
    x = torch.empty(tokens, 64, 512, dtype=torch.bfloat16, device="cuda")
    for start in range(0, tokens, 4096):
        x[start : start + 4096].normal_()
    cosine, sine = tables((tokens, 32))
    out = tail_rope(x, cosine, sine, backend="sm90")["out"]
    for part in (slice(0, 3), slice(tokens // 2, tokens // 2 + 3), slice(tokens - 6, tokens)):
        assert_same(out[part], reference(x[part], cosine[part], sine[part])[0])


# ---- streams, graphs, class, frameworks


@pytest.mark.parametrize("form", ["current", "stream", "handle"])
def test_streams(form: str) -> None:
    x, (cosine, sine) = bfloats((2048, 16, 512)), tables((2048, 32))
    want = tail_rope(x, cosine, sine)["out"].clone()
    side, late = produced_late(x)
    if form == "current":
        with torch.cuda.stream(side):
            out = tail_rope(late, cosine, sine)["out"]
    else:
        out = tail_rope(late, cosine, sine, stream=side if form == "stream" else side.cuda_stream)["out"]
    side.synchronize()
    assert torch.equal(out, want)


@pytest.mark.parametrize("api", ["wrapper", "class"])
def test_graph_replays_with_changed_data(api: str) -> None:
    x, (cosine, sine) = bfloats((64, 4, 128)), tables((64, 32))
    out = tail_rope(x, cosine, sine)["out"]
    op = TailRoPEForward(x, cosine, sine, out)
    op.compile()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if api == "wrapper":
            out = tail_rope(x, cosine, sine)["out"]
        else:
            op.execute(x, cosine, sine, out)
    for seed in (7, 8):
        x.copy_(bfloats((64, 4, 128), seed=seed))
        graph.replay()
        assert_same(out, reference(x, cosine, sine)[0])


def test_class_checks_every_call_however_warm() -> None:
    x, (cosine, sine) = bfloats((64, 4, 128)), tables((64, 32))
    out = torch.empty_like(x)
    op = TailRoPEForward(x, cosine, sine, out)
    op.compile()
    assert "sm90" in op.explain()
    for _ in range(3):
        assert op.execute(x, cosine, sine, out)["out"] is out
    assert_same(out, reference(x, cosine, sine)[0])
    with pytest.raises(ValueError, match="out must have shape"):
        op.execute(x, cosine, sine, out[:63])
    with pytest.raises(ValueError, match="out must not share memory with x"):
        op.execute(x, cosine, sine, x)
    with pytest.raises(ValueError, match="must be on the device"):
        op.execute(x, cosine.cpu(), sine, out)
    with pytest.raises(ValueError, match="aligned to 16 bytes"):
        op.execute(bfloats((64 * 4 * 128 + 1,))[1:].view(64, 4, 128), cosine, sine, out)
    with pytest.raises(ValueError, match="sine must not require a gradient"):
        op.execute(x, cosine, sine.clone().requires_grad_(), out)
    for tokens in (0, 1, 100):
        more, two = bfloats((tokens, 4, 128)), tables((tokens, 32))
        target = torch.empty_like(more)
        op.execute(more, *two, target)
        assert_same(target, reference(more, *two)[0])


def test_backends_and_repeated_runs() -> None:
    x, (cosine, sine) = bfloats((300, 16, 512)), tables((300, 32))
    first = tail_rope(x, cosine, sine, backend="frost")["out"]
    assert_same(tail_rope(x, cosine, sine, backend="reference")["out"], first)
    assert all(torch.equal(tail_rope(x, cosine, sine)["out"], first) for _ in range(20))
    with pytest.raises(NotSupportedError, match="tail_rope: backend"):
        tail_rope(x, cosine, sine, backend="sm100")


def test_torch_compile() -> None:
    x, (cosine, sine) = bfloats((16, 4, 128)), tables((16, 32))

    @torch.compile(fullgraph=True)
    def model(x: Any, cosine: Any, sine: Any) -> Any:
        return tail_rope(x * 1, cosine, sine)["out"] + 0

    assert torch.equal(model(x, cosine, sine), tail_rope(x, cosine, sine)["out"] + 0)


def test_jax_calls_the_same_kernel() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    for shape in ((100, 4, 128), (100, 1, 512), (100, 96)):
        x, (cosine, sine) = bfloats(shape, "bits"), tables((100, 32), "bits")
        want = to_numpy(tail_rope(x, cosine, sine)["out"])
        arrays = [jnp.asarray(to_numpy(array)) for array in (x, cosine, sine)]
        for call in (tail_rope_jax, jax.jit(tail_rope_jax), lambda *given: tail_rope(*given)["out"]):
            assert naive_rope.same_bits(np.asarray(call(*arrays)), want)
