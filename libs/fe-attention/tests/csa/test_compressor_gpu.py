"""The CSA compressor on a GPU: the kernels against fp64, packed sequences of every kind, graphs, classes, JAX."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fe_attention import (
    CSACompressorBackward,
    CSACompressorForward,
    csa_compressor,
    csa_compressor_backward_wrapper,
    csa_compressor_forward_wrapper,
)
from fe_attention.reference import csa as reference
from fe_runtime import DeterminismError, testing

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
NAMES = ("kv", "score", "ape", "cu", "comp")
STEP = 2.0**-8
"""Half a unit in the last place of bf16, relative to the value, at most."""


@pytest.fixture(autouse=True)
def poisoned_memory() -> Any:
    """Fresh allocations, scratch included, hold NaN or 0xFF, so an element that is never written shows."""
    with testing.poisoned_memory():
        yield


def case(
    lengths: Any, ratio: int = 4, d: int = 512, coff: int = 2, extra: int = 0, spare: int = 0, seed: int = 0
) -> dict[str, Any]:
    """Sequences of these lengths; ``extra`` tokens after them; ``spare`` rows of the result that none has."""
    generator = torch.Generator("cuda").manual_seed(seed)
    tokens = sum(lengths) + extra

    def normal(*shape: int) -> Any:
        return torch.randn(shape, device="cuda", generator=generator)

    blocks = [length // ratio for length in lengths]
    cu, comp = (torch.tensor([0, *values]).cumsum(0).to("cuda", torch.int32) for values in (list(lengths), blocks))
    return {
        "kv": normal(tokens, coff * d).to(BF16),
        "score": normal(tokens, coff * d).to(BF16),
        "ape": normal(ratio, coff * d),
        "cu": cu,
        "comp": comp,
        "go": normal(sum(blocks) + spare, d).to(BF16),
        "options": {"ratio": ratio, "coff": coff},
        "blocks": sum(blocks),
    }


def inputs(c: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(c[name] for name in NAMES)


def forward(c: dict[str, Any], **more: Any) -> Any:
    rows = c["go"].shape[0]
    options = {**c["options"], "total_comp": rows, "backend": "sm90", **more}
    return csa_compressor_forward_wrapper(*inputs(c), **options)["out"]


def backward(c: dict[str, Any], **more: Any) -> Any:
    return csa_compressor_backward_wrapper(*inputs(c), c["go"], **{**c["options"], "backend": "sm90", **more})


def exact(c: dict[str, Any]) -> tuple[Any, ...]:
    wide = [c[name].double() for name in ("kv", "score", "ape")]
    options = {**c["options"], "head_dim": c["go"].shape[1], "compute": "float64"}
    (out,) = reference.csa_compressor_forward(*wide, c["cu"], c["comp"], **options, total_comp=c["go"].shape[0])
    gradients = reference.csa_compressor_backward(c["go"].double(), *wide, c["cu"], c["comp"], **options)
    return (out, *gradients)


def assert_rounded_once(got: Any, want: Any, size: Any, what: str) -> None:
    """One rounding to bf16, and fp32 arithmetic on terms of this size."""
    error = (got.double() - want).abs()
    allowed = 1.01 * STEP * want.abs() + 1e-5 * (1 + size)
    worst = (error - allowed).max().item() if error.numel() else 0.0
    assert worst <= 0, f"{what}: worst excess {worst:g}"  # NaN fails too


def check(c: dict[str, Any], what: str) -> None:
    out, grad_kv, grad_score, grad_ape = exact(c)
    got, blocks = forward(c), c["blocks"]
    assert_rounded_once(got[:blocks], out[:blocks], c["kv"].abs().max(), f"{what}: out")
    assert not got.isnan().any(), f"{what}: a row that was not written"
    found = backward(c)
    size = c["kv"].abs().max() * c["go"].abs().max() if c["go"].numel() else 1.0
    assert_rounded_once(found["grad_kv"], grad_kv, size, f"{what}: grad_kv")
    assert_rounded_once(found["grad_score"], grad_score, size, f"{what}: grad_score")
    # exact zeros where no window is
    assert torch.equal(found["grad_kv"] == 0, grad_kv == 0) or not blocks, f"{what}: zeros"
    error = (found["grad_ape"].double() - grad_ape).abs().max().item() if blocks else 0.0
    assert error <= 1e-3 * max(1.0, blocks / 1024), f"{what}: grad_ape {error:g}"


FORMS = [(4, 512, 2), (4, 128, 2), (128, 512, 1), (2, 128, 2)]
OTHERS = [
    (1, 64, 1),
    (1, 64, 2),
    (3, 40, 2),
    (4, 33, 2),
    (5, 64, 2),
    (8, 96, 2),
    (16, 7, 2),
    (64, 100, 1),
    (128, 24, 2),
    (256, 64, 1),
]
LENGTHS = {
    "one": (512,),
    "four": (256, 1, 300, 129),
    "tails and empty ones": (259, 0, 3, 0, 130, 127, 128, 1),
    "forty": tuple(range(90, 130)),
}


@pytest.mark.parametrize("name", list(LENGTHS))
@pytest.mark.parametrize(("ratio", "d", "coff"), FORMS + OTHERS)
def test_packed_sequences(ratio: int, d: int, coff: int, name: str) -> None:
    check(case(LENGTHS[name], ratio, d, coff), name)
    check(case(LENGTHS[name], ratio, d, coff, extra=5, spare=3), f"{name}, tokens and rows beyond")


@pytest.mark.parametrize("sequences", [1, 2, 15, 16, 17, 33, 100, 1000])
def test_any_number_of_sequences(sequences: int) -> None:
    check(case([4 + number % 9 for number in range(sequences)], 4, 64, 2), f"{sequences} sequences")


@pytest.mark.parametrize("tokens", [4, 5, 8, 400, 1000, 2113, 8192, 20_000])
def test_any_number_of_tokens(tokens: int) -> None:
    for ratio, d, coff in FORMS:
        check(case((tokens,), ratio, d, coff), f"{tokens} tokens, ratio {ratio}")


@pytest.mark.parametrize("lengths", [(), (0,), (3, 2), (0, 0, 1)])
def test_no_rows(lengths: tuple[int, ...]) -> None:
    c = case(lengths, extra=4)
    assert forward(c).shape == (0, 512)
    for got, name in zip(backward(c), ("kv", "score", "ape"), strict=True):
        assert torch.equal(got, torch.zeros_like(c[name]))


def test_total_comp_is_read_where_it_is_not_given() -> None:
    c = case((40, 9))
    assert torch.equal(forward(c, total_comp=None), forward(c))


def test_nan_in_unused_places_reaches_nothing() -> None:
    for ratio, d, coff in FORMS:
        c = case((3 * ratio + 1, ratio - 1, 2 * ratio), ratio, d, coff, extra=3, spare=2)
        out, gradients = forward(c).clone(), [a.clone() for a in backward(c)]
        blocks = c["blocks"]
        for name, bad in (("kv", float("nan")), ("score", float("inf"))):
            c[name][3 * ratio : 4 * ratio] = bad  # a tail, and a sequence shorter than a block
            c[name][6 * ratio :] = bad
            if coff == 2:
                c[name][2 * ratio : 3 * ratio, :d] = bad  # the first half of a last block
                c[name][5 * ratio : 6 * ratio, :d] = bad
        c["go"][blocks:] = float("nan")
        assert torch.equal(forward(c)[:blocks], out[:blocks])
        for a, b in zip(backward(c), gradients, strict=True):
            assert torch.equal(a, b)


def test_nan_and_inf_of_a_window_propagate_and_stay_in_it() -> None:
    for ratio, d, coff in FORMS:
        c = case((8 * ratio,), ratio, d, coff)
        clean = forward(c).clone()
        c["score"][5 * ratio, -1] = float("nan")  # the own column of block 5
        c["kv"][2 * ratio, -2] = float("inf")
        out = forward(c)
        assert out[5, -1].isnan()
        assert out[2, -2].isinf()
        clean[5, -1], clean[2, -2] = out[5, -1], out[2, -2]
        assert torch.equal(out.nan_to_num(7.0), clean.nan_to_num(7.0))


def test_malformed_prefixes_stay_inside() -> None:
    """Values mean nothing; a read outside would show as an error of the GPU."""
    for ratio, d, coff in FORMS:
        c = case((3 * ratio, 3 * ratio), ratio, d, coff)
        for cu, comp in (([-7, 2**31 - 1, 3], [2, 2**31 - 1, -1]), ([9**9, -(9**9), 0], [-5, -6, 9**9])):
            c["cu"], c["comp"] = (torch.tensor(a, dtype=torch.int32, device="cuda") for a in (cu, comp))
            forward(c)
            backward(c)
            torch.cuda.synchronize()


def test_results_are_the_same_in_every_run() -> None:
    for ratio, d, coff in FORMS:
        c = case((5000, 300, 2000), ratio, d, coff)
        out, gradients = forward(c).clone(), [a.clone() for a in backward(c)]
        for _ in range(20):
            assert torch.equal(forward(c), out)
            assert all(torch.equal(a, b) for a, b in zip(backward(c), gradients, strict=True))


@pytest.mark.gpu(exclusive=True)
def test_more_than_two_to_the_31_elements() -> None:
    tokens, d = 2**21 + 8, 512
    kv, score = (torch.empty(tokens, 2 * d, dtype=BF16, device="cuda") for _ in range(2))
    for array in (kv, score):
        for start in range(0, tokens, 2**17):
            array[start : start + 2**17].normal_()
    rows = tokens // 4
    cu, comp = (torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (tokens, rows))
    go = torch.randn(rows, d, device="cuda").to(BF16)
    c: dict[str, Any] = {
        "kv": kv,
        "score": score,
        "ape": torch.randn(4, 2 * d, device="cuda"),
        "cu": cu,
        "comp": comp,
        "go": go,
    }
    c["options"] = {"ratio": 4, "coff": 2}
    out, grads = forward(c), backward(c)
    # The last blocks alone, as a sequence; its first row lacks the block before.
    few = {**c, "kv": kv[-64:].clone(), "score": score[-64:].clone(), "go": go[-16:].clone()}
    few["cu"], few["comp"] = (torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (64, 16))
    assert torch.equal(out[-15:], forward(few)[1:])
    again = backward(few)
    for name in ("grad_kv", "grad_score"):
        assert torch.equal(grads[name][-60:], again[name][4:])


def test_launches_worth_timing_agree() -> None:
    from fe_attention.planning import csa as planning
    from fe_runtime.compile import KernelSpec, load

    for ratio, d, coff in FORMS[:3]:
        c, problem = case((3000, 259), ratio, d, coff), planning.Problem(d, ratio, coff)
        want, *gradients = exact(c)
        for how in planning.forward_candidates(problem)[::9]:
            config = planning.config(problem, how)
            run = load(KernelSpec.of("fe_attention.csa", "fe_attention.kernels.csa_forward:build", "sm_90a", **config))
            out = torch.empty_like(c["go"])
            run(*inputs(c), out)
            assert_rounded_once(out, want, 5.0, f"{how}")
        for how in planning.backward_candidates(problem, 132)[::9]:
            config = {**planning.config(problem, how), "atomic": False}
            builder = "fe_attention.kernels.csa_backward:build"
            run = load(KernelSpec.of("fe_attention.csa", builder, "sm_90a", **config))
            grads = [torch.empty_like(c[name]) for name in ("kv", "score", "ape")]
            sums = torch.empty(planning.partial_rows(how, c["go"].shape[0]), c["ape"].numel(), device="cuda")
            run(c["go"], *inputs(c), *grads, sums)
            for got, value in zip(grads[:2], gradients, strict=False):
                assert_rounded_once(got, value, 20.0, f"{how}")
            torch.testing.assert_close(grads[2].double(), gradients[2], rtol=0, atol=1e-3)


# --- autograd, classes, graphs, streams, JAX -----------------------------------------------------------------------


def test_autograd_gives_what_the_kernel_gives() -> None:
    c = case((300, 77))
    leaves = [c[name].clone().requires_grad_() for name in ("kv", "score", "ape")]
    rows = c["go"].shape[0]

    def run(*given: Any) -> Any:
        return csa_compressor(*given, c["cu"], c["comp"], total_comp=rows)

    grads = torch.autograd.grad(run(*leaves), leaves, c["go"])
    for got, want in zip(grads, backward(c), strict=True):
        assert torch.equal(got, want)
    compiled = torch.compile(run, fullgraph=True)
    for got, want in zip(torch.autograd.grad(compiled(*leaves), leaves, c["go"]), grads, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("deterministic", [False, True])
def test_classes_allocate_nothing_and_replay_in_a_graph(deterministic: bool) -> None:
    c = case((300, 77, 2, 128), spare=2)
    out, grads = torch.empty_like(c["go"]), [torch.zeros_like(c[name]) for name in ("kv", "score", "ape")]
    first = CSACompressorForward(*inputs(c), out)
    second = CSACompressorBackward(*inputs(c), c["go"], deterministic=deterministic)
    first.compile()
    second.compile()
    assert (second.scratch_workspace_bytes() > 0) == deterministic
    workspace = second.allocate_workspace() if deterministic else None

    def step() -> None:
        first.execute(*inputs(c), out)
        grads[2].zero_()
        second.execute(*inputs(c), c["go"], *grads, workspace=workspace)

    step()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for name, value in case((300, 77, 2, 128), spare=2, seed=5).items():
        if name not in ("options", "blocks"):
            c[name].copy_(value)
    graph.replay()
    blocks = c["blocks"]
    assert torch.equal(out[:blocks], forward(c)[:blocks])
    want = backward(c)
    assert torch.equal(grads[0], want["grad_kv"])
    assert torch.equal(grads[1], want["grad_score"])
    torch.testing.assert_close(grads[2], want["grad_ape"], rtol=1e-4, atol=1e-4)
    if deterministic:
        assert torch.equal(grads[2], want["grad_ape"])


def test_the_atomic_class_adds_and_torchs_switch_refuses_it() -> None:
    for ratio, d, coff in FORMS:
        c = case((900, 77), ratio, d, coff)
        op = CSACompressorBackward(*inputs(c), c["go"], ratio=ratio, coff=coff)
        op.compile()
        grads = [torch.zeros_like(c[name]) for name in ("kv", "score", "ape")]
        op.execute(*inputs(c), c["go"], *grads)
        op.execute(*inputs(c), c["go"], *grads)
        torch.testing.assert_close(grads[2], 2 * backward(c)["grad_ape"], rtol=1e-4, atol=1e-3)
        torch.use_deterministic_algorithms(True)
        try:
            with pytest.raises(DeterminismError):
                op.execute(*inputs(c), c["go"], *grads)
            backward(c)
        finally:
            torch.use_deterministic_algorithms(False)


def test_misaligned_arrays_are_refused() -> None:
    c = case((40,), d=64)
    buffer = torch.zeros(c["kv"].numel() + 4, dtype=BF16, device="cuda")
    with pytest.raises(ValueError, match="kv must start at an address that is a multiple of 16 bytes"):
        forward({**c, "kv": buffer[4:].view(c["kv"].shape)})
    assert forward({**c, "cu": torch.cat([c["cu"][:1], c["cu"]])[1:]}).shape == (10, 64)  # 4 bytes do for offsets


def test_streams() -> None:
    c = case((4000,))
    want = [a.clone() for a in backward(c)]
    side, late = torch.cuda.Stream(), torch.full_like(c["go"], float("nan"))
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(c["go"])
    got = backward({**c, "go": late}, stream=side)
    side.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_hundred_lengths_compile_once() -> None:
    from fe_runtime.compile import cache_info

    def compiles() -> int:
        return sum(entry.compiles + entry.disk_hits for entry in cache_info().values())

    def step(tokens: int) -> None:
        c = case((tokens, 5), d=96)
        forward(c)
        backward(c)

    step(4)
    before = compiles()
    for tokens in range(5, 105):
        step(tokens)
    assert compiles() == before


def test_jax_calls_the_same_kernels() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from fe_attention import csa_compressor_backward_jax, csa_compressor_forward_jax, csa_compressor_jax

    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    c = case((300, 77))
    rows = c["go"].shape[0]
    kv, score, go = (jnp.asarray(c[n].float().cpu().numpy()).astype(jnp.bfloat16) for n in ("kv", "score", "go"))
    ape, cu, comp = (jnp.asarray(c[n].cpu().numpy()) for n in ("ape", "cu", "comp"))
    want = forward(c)
    for function in (csa_compressor_forward_jax, csa_compressor_jax):
        out = jax.jit(lambda *a, f=function: f(*a, total_comp=rows))(kv, score, ape, cu, comp)
        np.testing.assert_array_equal(np.asarray(out, np.float32), want.float().cpu().numpy())
    _, pull = jax.vjp(lambda *leaves: csa_compressor_jax(*leaves, cu, comp, total_comp=rows), kv, score, ape)
    found = csa_compressor_backward_jax(kv, score, ape, cu, comp, go)
    for a, b, wanted in zip(found, pull(go), backward(c), strict=True):
        for got in (a, b):
            np.testing.assert_array_equal(np.asarray(got, np.float32), wanted.float().cpu().numpy())
