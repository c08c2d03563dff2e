"""The Engram gate on a GPU: the kernels against fp64, every edge, graphs, streams, classes, JAX."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fe_attention import (
    EngramGateSavedBackward,
    EngramGateSavedForward,
    engram_gate,
    engram_gate_saved_backward,
    engram_gate_saved_forward,
)
from fe_attention.reference import engram as reference
from fe_runtime import testing

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
RELATIVE = 2e-5  # of gate and dot: approximate roots, sums in fp32
GRADIENT, WEIGHT = 3e-3, 1e-4  # 2-norms: one rounding to bf16; sums in fp32


@pytest.fixture(autouse=True)
def poisoned_memory() -> Any:
    """Fresh allocations, scratch included, hold NaN or 0xFF, so an element that is never written shows."""
    with testing.poisoned_memory():
        yield


def operands(tokens: int, width: int = 5120, streams: int = 4, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int, dtype: Any = BF16) -> Any:
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    return {
        "x": normal(tokens, streams, width),
        "kv": normal(tokens, (streams + 1) * width),
        "weight": normal(streams, width, dtype=torch.float32),
        "mask": torch.rand(tokens, device="cuda", generator=generator) < 0.8,
        "g": normal(tokens, streams, width),
    }


def forward(c: dict[str, Any], **more: Any) -> Any:
    return engram_gate_saved_forward(c["x"], c["kv"], c["weight"], c["mask"], **{"backend": "sm90", **more})


def backward(c: dict[str, Any], saved: Any, **more: Any) -> Any:
    return engram_gate_saved_backward(c["x"], c["kv"], c["weight"], saved, c["g"], **{"backend": "sm90", **more})


def exact_forward(c: dict[str, Any], eps: float = 1e-20) -> Any:
    wide = [c[name].double() for name in ("x", "kv", "weight")]
    return reference.engram_gate_saved_forward(*wide, c["mask"], eps=eps, compute="float64")


def exact_backward(c: dict[str, Any], saved: Any) -> Any:
    wide = [c[name].double() for name in ("g", "x", "kv", "weight")]
    return reference.engram_gate_saved_backward(*wide, saved.double(), compute="float64")


def check(c: dict[str, Any], what: str) -> None:
    """Forward and backward, the latter from the state that the forward saved."""
    out, saved = forward(c)
    want, state = exact_forward(c)
    # Terms that cancel in dot leave their own errors; so does a root of almost nothing.
    x, width = c["x"].double(), c["x"].shape[-1]
    keys = c["kv"].double()[:, : -width or None].reshape(x.shape)
    size = (x * c["weight"].double() * keys).abs().sum(-1) * state[..., 2] * state[..., 3] * width**-0.5
    off = RELATIVE * (state[..., 1].abs() + 2**-6 * size)
    assert ((saved[..., 1].double() - state[..., 1]).abs() <= off).all(), f"{what}: dot"
    torch.testing.assert_close(saved[..., 2:].double(), state[..., 2:], rtol=RELATIVE, atol=0, msg=f"{what}: rx, rk")
    clear = state[..., 1].abs() > 1e-2
    torch.testing.assert_close(saved[..., 0].double()[clear], state[..., 0][clear], rtol=5e-5, atol=5e-6)
    # out from the gate that was saved, so that only its own rounding counts
    value = c["kv"].double()[:, None, -width:]
    again = x + saved[..., :1].double() * value
    assert ((out.double() - again).abs() <= 2.0**-8 * again.abs() + 1e-6 * (x.abs() + value.abs())).all(), what
    assert ((out.double() - want).abs() <= 2.0**-7 * want.abs() + 2e-3 * value.abs()).all(), what
    assert torch.equal(out[~c["mask"]], c["x"][~c["mask"]])
    assert (saved[~c["mask"], :, 0] == 0).all()
    for name, got, exact in zip(("dx", "dkv", "dw"), backward(c, saved), exact_backward(c, saved), strict=True):
        error = (got.double() - exact).norm() / exact.norm().clamp_min(1e-30)
        # The roundings of few values do not average out.
        one_rounding = 2.0**-8 if got.numel() < 100 and got.dtype == BF16 else 0.0
        assert error <= (WEIGHT if name == "dw" else max(GRADIENT, one_rounding)), f"{what}: {name} {error:g}"


# Up to 5120, whole tokens lie in shared memory if their streams start at multiples of 16 bytes; others take two passes.
WIDTHS = [1, 2, 7, 8, 12, 33, 96, 128, 250, 256, 1000, 1024, 2048, 4096, 5120, 7168, 8192, 16384, 20001, 65536, 100_000]


@pytest.mark.parametrize("width", WIDTHS)
def test_streams_of_every_width(width: int) -> None:
    for tokens in (1, 3) if width > 8192 else (1, 37, 301):
        check(operands(tokens, width), f"{tokens} tokens of {width}")


@pytest.mark.parametrize("streams", [1, 2, 3, 5, 8, 16])
def test_any_number_of_streams(streams: int) -> None:
    for width in (33, 96, 1024):
        check(operands(53, width, streams), f"{streams} streams of {width}")


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 78, 79, 80, 157, 159, 1000, 4096])
def test_any_number_of_tokens(tokens: int) -> None:
    check(operands(tokens), f"{tokens} tokens")


def test_no_tokens() -> None:
    c = operands(0)
    out, saved = forward(c)
    assert (out.shape, saved.shape) == ((0, 4, 5120), (0, 4, 4))
    dx, dkv, dw = backward(c, saved)
    assert (dx.shape, dkv.shape) == ((0, 4, 5120), (0, 25600))
    assert torch.equal(dw, torch.zeros_like(dw))


def test_masked_rows_with_nan_reach_nothing() -> None:
    for width in (33, 5120):
        c = operands(50, width)
        out, saved = (a.clone() for a in forward(c))
        gradients = [a.clone() for a in backward(c, saved)]
        for bad in (float("nan"), float("inf")):
            for name in ("x", "kv"):
                c[name][~c["mask"]] = bad
            got, state = forward(c)
            assert torch.equal(got[c["mask"]], out[c["mask"]])
            assert (state[~c["mask"], :, 0] == 0).all()
            for a, b in zip(backward(c, state), gradients, strict=True):
                assert torch.equal(a, b)


def test_nan_in_a_token_that_counts_propagates() -> None:
    c = operands(5)
    c["mask"][:] = True
    c["kv"][2, 7] = float("nan")  # the key of stream 0
    out, saved = forward(c)
    assert out[2, 0].isnan().all()
    assert not out[2, 1:].isnan().any()
    assert not out[[0, 1, 3, 4]].isnan().any()
    dx, dkv, dw = backward(c, saved)
    assert dx[2, 0].isnan().all()
    assert dkv[2, -5120:].isnan().all()
    assert not dx[[0, 1, 3, 4]].isnan().any()
    assert not dw[1:].isnan().any()


def test_rows_of_zeros_stay_finite() -> None:
    c = operands(4)
    c["mask"][:] = True
    c["x"][0], c["kv"][1], c["x"][2], c["kv"][2] = 0, 0, 0, 0
    out, saved = forward(c)
    torch.testing.assert_close(saved[0, :, 2], torch.full((4,), 1e10, device="cuda"))
    for array in (out, saved, *backward(c, saved)):
        assert array.isfinite().all()
    check(c, "zeros")


def test_the_sign_bit_of_dot_counts() -> None:
    """A product below all numbers of float32 is -0.0, whose gate is ``sigmoid(-1e-3)``."""
    c = operands(2, 8, 1)
    c["mask"][:] = True
    c["x"].fill_(1.0)
    c["weight"].fill_(1.0)
    c["kv"][:, :8] = torch.tensor([[1e-30], [-1e-30]], device="cuda")
    _, saved = forward(c, eps=1e35)
    assert torch.equal(saved[:, 0, 1], torch.tensor([0.0, -0.0], device="cuda"))
    assert saved[:, 0, 1].signbit().tolist() == [False, True]
    want = torch.sigmoid(torch.tensor([1e-3, -1e-3], device="cuda"))
    torch.testing.assert_close(saved[:, 0, 0], want, rtol=1e-6, atol=0)


def test_large_dot_products_open_and_close_the_gate() -> None:
    c = operands(8, 64)
    c["weight"] *= 1e6
    check(c, "large")


def test_results_are_the_same_in_every_run() -> None:
    for tokens, width in ((3000, 5120), (777, 33)):
        c = operands(tokens, width)
        out, saved = (a.clone() for a in forward(c))
        gradients = [a.clone() for a in backward(c, saved)]
        for _ in range(20):
            assert all(torch.equal(a, b) for a, b in zip(forward(c), (out, saved), strict=True))
            assert all(torch.equal(a, b) for a, b in zip(backward(c, saved), gradients, strict=True))


@pytest.mark.gpu(exclusive=True)
def test_more_than_two_to_the_31_elements() -> None:
    tokens, width = 2**17 // 5 * 4 + 5, 5120  # x alone passes 2^31
    c: dict[str, Any] = {
        "weight": operands(1, width)["weight"],
        "mask": torch.ones(tokens, dtype=torch.bool, device="cuda"),
    }
    for name, columns in (("x", 4 * width), ("kv", 5 * width), ("g", 4 * width)):
        c[name] = torch.empty(tokens, columns, dtype=BF16, device="cuda")
        for start in range(0, tokens, 2**13):
            c[name][start : start + 2**13].normal_()
    c["x"], c["g"] = (c[name].view(tokens, 4, width) for name in ("x", "g"))
    out, saved = forward(c)
    dx, dkv, _ = backward(c, saved)
    for part in (slice(0, 3), slice(tokens - 3, tokens)):
        few = {name: value if name == "weight" else value[part] for name, value in c.items()}
        want, _ = exact_forward(few)
        assert ((out[part].double() - want).norm() / want.norm()) < 3e-3
        for got, exact in zip((dx[part], dkv[part]), exact_backward(few, saved[part]), strict=False):
            assert ((got.double() - exact).norm() / exact.norm()) < GRADIENT


def test_launches_worth_timing_agree() -> None:
    from fe_attention.planning import engram as planning
    from fe_runtime.compile import KernelSpec, load

    c, problem = operands(777), planning.Problem(4, 5120)
    want, state = (a.clone() for a in forward(c))
    exact = exact_backward(c, state)
    for how in planning.forward_candidates(problem)[::9]:
        config = planning.config(problem, how)
        run = load(KernelSpec.of("fe_attention.gate", "fe_attention.kernels.engram_forward:build", "sm_90a", **config))
        out, saved = torch.empty_like(want), torch.empty_like(state)
        run(c["x"], c["kv"], c["weight"], c["mask"], out, saved, 1e-20)
        torch.testing.assert_close(saved, state, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(out.float(), want.float(), rtol=2.0**-7, atol=1e-2)
    whole = planning.choose_whole(problem, "sm_90a", 132)
    assert whole is not None
    for how in [whole, *planning.backward_candidates(problem, 132)[::3]]:
        config, kind = planning.config(problem, how), "whole" if how is whole else "backward"
        run = load(KernelSpec.of("fe_attention.gate", f"fe_attention.kernels.engram_{kind}:build", "sm_90a", **config))
        grads = [torch.empty_like(c[name]) for name in ("x", "kv", "weight")]
        sums = torch.empty(planning.partial_rows(how, 777), 4 * 5120, device="cuda")
        scratch = (sums,) if how is whole else (torch.empty(777, 4, 4, device="cuda"), sums)
        run(c["g"], c["x"], c["kv"], c["weight"], state, *grads, *scratch)
        for name, got, value in zip(("dx", "dkv", "dw"), grads, exact, strict=True):
            error = (got.double() - value).norm() / value.norm()
            assert error < (WEIGHT if name == "dw" else GRADIENT), f"{name} of {how}"


# --- autograd, classes, graphs, streams, JAX -----------------------------------------------------------------------


def test_autograd_gives_what_the_kernel_gives() -> None:
    c = operands(64)
    leaves = [c[name].clone().requires_grad_() for name in ("x", "kv", "weight")]
    grads = torch.autograd.grad(engram_gate(*leaves, c["mask"]), leaves, c["g"])
    _, saved = forward(c)
    for got, want in zip(grads, backward(c, saved), strict=True):
        assert torch.equal(got, want)
    compiled = torch.compile(engram_gate, fullgraph=True)
    for got, want in zip(torch.autograd.grad(compiled(*leaves, c["mask"]), leaves, c["g"]), grads, strict=True):
        assert torch.equal(got, want)


def class_forms(c: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    inputs = (c["x"], c["kv"], c["weight"], c["mask"])
    first = EngramGateSavedForward(*inputs)
    saved = torch.empty(*c["x"].shape[:2], 4, device="cuda")
    second = EngramGateSavedBackward(c["x"], c["kv"], c["weight"], saved, c["g"])
    first.compile()
    second.compile()
    return first, second, saved, second.allocate_workspace()


def test_classes_write_every_element_and_allocate_nothing() -> None:
    c = operands(100)
    first, second, saved, workspace = class_forms(c)
    assert "sm90" in first.explain()
    out, grads = torch.empty_like(c["x"]), [torch.empty_like(c[name]) for name in ("x", "kv", "weight")]

    def step() -> None:
        first.execute(c["x"], c["kv"], c["weight"], c["mask"], out, saved)
        second.execute(c["x"], c["kv"], c["weight"], saved, c["g"], *grads, workspace)

    step()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    want = forward(c)
    assert torch.equal(out, want["out"])
    for got, exact in zip(grads, backward(c, want["saved"]), strict=True):
        assert torch.equal(got, exact)
    with pytest.raises(ValueError, match="workspace must"):
        second.execute(c["x"], c["kv"], c["weight"], saved, c["g"], *grads, workspace[16:])
    larger = torch.empty(workspace.numel() + 8, dtype=torch.uint8, device="cuda")
    with pytest.raises(ValueError, match="start at a multiple of 16 bytes"):
        second.execute(c["x"], c["kv"], c["weight"], saved, c["g"], *grads, larger[8:])


def test_misaligned_arrays_are_refused() -> None:
    c = operands(4, 64)
    buffer = torch.empty(c["x"].numel() + 4, dtype=BF16, device="cuda")
    with pytest.raises(ValueError, match="x must start at an address that is a multiple of 16 bytes"):
        forward({**c, "x": buffer[4:].view(c["x"].shape)})


def test_graph_replays_with_changed_data() -> None:
    c = operands(200)
    first, second, saved, workspace = class_forms(c)
    out, grads = torch.empty_like(c["x"]), [torch.empty_like(c[name]) for name in ("x", "kv", "weight")]

    def step() -> tuple[Any, ...]:
        first.execute(c["x"], c["kv"], c["weight"], c["mask"], out, saved)
        second.execute(c["x"], c["kv"], c["weight"], saved, c["g"], *grads, workspace)
        return (out, saved, *grads)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for name, value in operands(200, seed=9).items():
        c[name].copy_(value)
    graph.replay()
    replayed = [a.clone() for a in captured]
    for a, b in zip(replayed, step(), strict=True):
        assert torch.equal(a, b)


def test_streams() -> None:
    c = operands(2000)
    _, saved = forward(c)
    want = [a.clone() for a in backward(c, saved)]
    side, late = torch.cuda.Stream(), torch.full_like(c["g"], float("nan"))
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(c["g"])
    got = backward({**c, "g": late}, saved, current_stream=side)
    side.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with pytest.raises(ValueError, match="current_stream"):
        forward(c, current_stream=2)


def test_a_hundred_numbers_of_tokens_compile_once() -> None:
    from fe_runtime.compile import cache_info

    def compiles() -> int:
        return sum(entry.compiles + entry.disk_hits for entry in cache_info().values())

    c = operands(1, 768)
    backward(c, forward(c)["saved"])
    before = compiles()
    for tokens in range(2, 102):
        c = operands(tokens, 768)
        backward(c, forward(c, eps=1e-20 * tokens)["saved"])
    assert compiles() == before


def test_jax_calls_the_same_kernels() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from fe_attention import engram_gate_jax, engram_gate_saved_backward_jax, engram_gate_saved_forward_jax

    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    c = operands(100, 512)
    want = forward(c)
    exact = backward(c, want["saved"])
    j = {name: jnp.asarray(value.float().cpu().numpy()) for name, value in c.items()}
    x, kv, g = (j[name].astype(jnp.bfloat16) for name in ("x", "kv", "g"))
    mask = j["mask"] != 0

    def same(got: Any, wanted: Any) -> None:
        np.testing.assert_array_equal(np.asarray(got, np.float32), wanted.float().cpu().numpy())

    for function in (engram_gate_saved_forward_jax, jax.jit(engram_gate_saved_forward_jax)):
        out, saved = function(x, kv, j["weight"], mask)
        same(out, want["out"])
        same(saved, want["saved"])
    for got, wanted in zip(engram_gate_saved_backward_jax(x, kv, j["weight"], saved, g), exact, strict=True):
        same(got, wanted)
    _, pull = jax.vjp(lambda *leaves: engram_gate_jax(*leaves, mask), x, kv, j["weight"])
    for got, wanted in zip(pull(g), exact, strict=True):
        same(got, wanted)
