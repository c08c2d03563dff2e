"""``rms_norm`` and the gradients of the row operations on a GPU: the kernels against fp64, and every edge."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fe_norm import rms_norm, rms_norm_backward, rmsnorm_silu_backward, rmsnorm_silu_wrapper
from fe_runtime import testing

pytestmark = pytest.mark.gpu

FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# One unit in the last place of the result; fp32 keeps the errors of the approximate root and of the sums over a row.
RELATIVE = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-18}
EPS = 1e-5
ROUNDINGS = 2.0**-20  # 16 roundings of fp32, relative to the terms of a sum rather than to the sum
TINY = 2.0**-24  # the smallest step of float16


@pytest.fixture(autouse=True)
def poisoned_memory() -> Any:
    """Fresh allocations, scratch included, hold NaN or 0xFF, so an element that is never written shows."""
    with testing.poisoned_memory():
        yield


def rows(count: int, columns: int, dtype: str = "bfloat16", seed: int = 0, loud: bool = True) -> Any:
    """Rows with a few loud channels, as activations have; gradients have none."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(count, columns, device="cuda", generator=generator)
    if loud:
        x *= torch.randn(columns, device="cuda", generator=generator).exp()
    return x.to(FLOATS[dtype])


def vector(columns: int, dtype: str | None, seed: int) -> Any:
    if dtype is None:
        return None
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(columns, device="cuda", generator=generator).to(FLOATS[dtype])


def assert_within(got: Any, want: Any, terms: Any, what: str) -> None:
    """``terms`` is the sum of the absolute values that make up each element, times the roundings of their sum."""
    error = (got.double() - want).abs()
    allowed = RELATIVE[got.dtype] * want.abs() + terms + TINY
    worst = (error - allowed).max().item() if error.numel() else 0.0
    assert worst <= 0, f"{what}: worst excess {worst:g}"  # NaN fails too


# --- forward -------------------------------------------------------------------------------------------------------


def check_forward(x: Any, w: Any, b: Any, residual: Any, out_dtype: Any = None, eps: float = EPS) -> None:
    result = rms_norm(x, w, b, eps, residual=residual, out_dtype=out_dtype, backend="sm90")
    out, h = (result, x) if residual is None else result
    if residual is not None:
        assert torch.equal(h, (x.float() + residual.float()).to(x.dtype))
    v = h.double()
    scaled = v * (v.square().mean(-1, keepdim=True) + eps).rsqrt()
    scaled = scaled if w is None else scaled * w.double()
    want = scaled if b is None else scaled + b.double()
    assert out.dtype == (x.dtype if out_dtype is None else FLOATS[out_dtype])
    assert_within(out, want, ROUNDINGS * (scaled.abs() + want.abs()), "out")


COLUMNS = [1, 2, 7, 16, 33, 48, 64, 96, 128, 160, 255, 256, 320, 512, 1000, 1024, 2048, 2880, 4096, 5120]
LARGE = [7168, 8192, 12345, 16384, 32768, 65535, 65536, 100_000]


@pytest.mark.parametrize("columns", COLUMNS + LARGE)
def test_rows_of_every_length(columns: int) -> None:
    count = 3 if columns > 4096 else 77
    x, w, b = rows(count, columns), vector(columns, "bfloat16", 1), vector(columns, "bfloat16", 2)
    check_forward(x, w, None, None)
    check_forward(x, w, b, rows(count, columns, seed=3))


@pytest.mark.parametrize("out", [None, *FLOATS])
@pytest.mark.parametrize("weight", [None, *FLOATS])
@pytest.mark.parametrize("dtype", list(FLOATS))
def test_every_dtype_combination(dtype: str, weight: str | None, out: str | None) -> None:
    w, b = vector(320, weight, 1), vector(320, weight or "float16", 2)
    check_forward(rows(50, 320, dtype), w, b, rows(50, 320, dtype, 3), out)


def test_rstd_of_the_registered_op() -> None:
    for shape in ((77, 33), (77, 128), (3, 5, 1024), (9, 8192), (2, 100_000)):
        x = rows(77, 1).new_empty(shape).normal_()
        _, _, rstd = torch.ops.fe_norm.rms_norm(x, eps=EPS)
        want = (x.double().square().mean(-1) + EPS).rsqrt()
        assert rstd.shape == x.shape[:-1]
        torch.testing.assert_close(rstd.double(), want, rtol=2.0**-20, atol=0)


@pytest.mark.parametrize("stride", [257, 258, 260, 264, 1024])
@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8])
def test_strided_and_unaligned_rows(stride: int, offset: int) -> None:
    """Rows inside a buffer whose rest is NaN: what lies outside a row never matters. Forward and backward."""

    def inside(seed: int, loud: bool = True) -> Any:
        buffer = torch.full((21 * stride + offset,), float("nan"), dtype=torch.bfloat16, device="cuda")
        return buffer.as_strided((20, 256), (stride, 1), offset).copy_(rows(20, 256, seed=seed, loud=loud))

    w = vector(257, "bfloat16", 1)[offset % 2 :][:256]
    check_forward(inside(0), w, None, inside(1))
    check_gradients(rows(20, 256, seed=3, loud=False), inside(0), w, None, inside(4, loud=False))
    check_gradients(inside(3, loud=False), rows(20, 256), w, None, None)


@pytest.mark.parametrize("columns", [12, 100, 258])
def test_rows_better_aligned_than_the_sum(columns: int) -> None:
    """The sum is contiguous, so that its rows may start where no wide access is possible, whatever those of x do."""
    x, residual = (rows(20, 1024, seed=seed)[:, :columns] for seed in (0, 1))
    check_forward(x, vector(columns, "bfloat16", 1), None, residual)


def test_dimensions_that_do_not_merge() -> None:
    x = rows(40, 512).view(5, 8, 512)[:, ::2, :256].transpose(0, 1)
    residual = rows(20, 256).view(4, 5, 256)
    w = vector(256, "bfloat16", 1)
    check_forward(x, w, None, residual)
    check_gradients(residual, x, w, None, None)
    check_gradients(x, residual, w, None, x)


def test_expanded_rows() -> None:
    x, w = rows(1, 256).expand(50, 256), vector(256, "bfloat16", 1)
    check_forward(x, w, None, rows(50, 256, seed=2))
    check_gradients(rows(1, 256, seed=3).expand(50, 256), x, w, None, None)


# --- gradients -----------------------------------------------------------------------------------------------------


def exact(dout: Any, x: Any, w: Any, b: Any, dres: Any, silu: bool, eps: float) -> tuple[list[Any], list[Any]]:
    """The gradients in fp64, and the terms that make them up, written independently of the reference."""
    v, d = x.double(), dout.double()
    gain = torch.ones_like(v[0]) if w is None else w.double()
    rstd = (v.square().mean(-1, keepdim=True) + eps).rsqrt()
    xh = v * rstd
    size = d.abs()
    if silu:
        z = xh * gain + (0 if b is None else b.double())
        s = torch.sigmoid(z)
        slope = s * (1 + z * (1 - s))
        size = d.abs() * (slope.abs() + s * (1 + z.abs()) + (xh * gain).abs() + z.abs())
        d = d * slope
    u, du = d * gain, size * gain.abs()
    other = 0 if dres is None else dres.double()
    dx = rstd * (u - xh * (u * xh).mean(-1, keepdim=True)) + other
    terms = rstd * (du + xh.abs() * (du * xh.abs()).mean(-1, keepdim=True)) + abs(other)
    additions = 64 + -(-x.shape[0] // 132)  # of a thread over rows, then of the blocks in trees
    sums = [(d * xh).sum(0), d.sum(0)]
    sizes = [(size * xh.abs()).sum(0), size.sum(0)]
    return [dx, *sums], [ROUNDINGS * terms, *(additions * 2.0**-24 * part for part in sizes)]


def check_gradients(
    dout: Any, x: Any, w: Any, b: Any, dres: Any, silu: bool = False, given: bool = True, eps: float = EPS
) -> None:
    if silu:
        found = rmsnorm_silu_backward(dout, x, w, b, eps, backend="sm90")
    else:
        rstd = torch.ops.fe_norm.rms_norm(x, eps=eps)[2] if given else None
        found = rms_norm_backward(dout, x, w, b, eps, rstd=rstd, dresidual_out=dres, backend="sm90")
    flat = [None if a is None else a.reshape(-1, x.shape[-1]) for a in (dout, x, dres)]
    want, terms = exact(flat[0], flat[1], w, b, flat[2], silu, eps)
    for name, got, value, size, of in zip(("dx", "dw", "db"), found, want, terms, (x, w, b), strict=True):
        assert (got is None) == (of is None)
        if got is not None:
            assert (got.shape, got.dtype) == (of.shape, of.dtype)
            assert_within(got.reshape(value.shape), value, size, name)


@pytest.mark.parametrize("columns", COLUMNS + LARGE)
def test_gradients_of_rows_of_every_length(columns: int) -> None:
    for count in (3,) if columns > 16384 else (3, 300):
        x, dout = rows(count, columns), rows(count, columns, seed=3, loud=False)
        w, b = vector(columns, "bfloat16", 1), vector(columns, "bfloat16", 2)
        check_gradients(dout, x, w, None, None)
        check_gradients(dout, x, w, b, rows(count, columns, seed=4, loud=False))
        check_gradients(dout, x, None, None, None)
        check_gradients(dout, x, w, None, None, given=False)


@pytest.mark.parametrize("columns", [1, 33, 64, 128, 320, 1024, 4096, 8192, 16384, 100_000])
def test_silu_gradients_of_rows_of_every_length(columns: int) -> None:
    for count in (3,) if columns > 16384 else (3, 300):
        x, dout = rows(count, columns), rows(count, columns, seed=3, loud=False)
        w, b = vector(columns, "bfloat16", 1), vector(columns, "bfloat16", 2)
        check_gradients(dout, x, w, b, None, silu=True)
        check_gradients(dout, x, w, None, None, silu=True)
        check_gradients(dout, x, None, None, None, silu=True)


@pytest.mark.parametrize("weight", [None, *FLOATS])
@pytest.mark.parametrize("dout", list(FLOATS))
@pytest.mark.parametrize("dtype", list(FLOATS))
def test_gradients_of_every_dtype_combination(dtype: str, dout: str, weight: str | None) -> None:
    x, d, dres = rows(50, 320, dtype), rows(50, 320, dout, 3, False), rows(50, 320, dtype, 4, False)
    w, b = vector(320, weight, 1), vector(320, weight or "float16", 2)
    check_gradients(d, x, w, b, dres)
    check_gradients(d, x, w, b, None, silu=True)


@pytest.mark.parametrize("count", [1, 2, 3, 131, 132, 133, 395, 396, 397, 1000, 20_000])
@pytest.mark.parametrize("columns", [128, 512, 4096])
def test_gradients_of_any_number_of_rows(count: int, columns: int) -> None:
    x, dout = rows(count, columns), rows(count, columns, seed=3, loud=False)
    check_gradients(dout, x, vector(columns, "float32", 1), vector(columns, "float32", 2), None)


@pytest.mark.parametrize("columns", [33, 128, 1024, 4096, 8192, 100_000])
def test_gradients_are_the_same_in_every_run(columns: int) -> None:
    count = 30 if columns > 16384 else 3000
    x, dout, dres = rows(count, columns), rows(count, columns, seed=3), rows(count, columns, seed=4)
    w, b = vector(columns, "bfloat16", 1), vector(columns, "bfloat16", 2)
    first = [a.clone() for a in rms_norm_backward(dout, x, w, b, dresidual_out=dres).values()]
    silu = [a.clone() for a in rmsnorm_silu_backward(dout, x, w, b).values()]
    for _ in range(20):
        for a, again in zip(first, rms_norm_backward(dout, x, w, b, dresidual_out=dres).values(), strict=True):
            assert torch.equal(a, again)
        for a, again in zip(silu, rmsnorm_silu_backward(dout, x, w, b).values(), strict=True):
            assert torch.equal(a, again)


@pytest.mark.parametrize("columns", [128, 1024, 4096, 8192])
def test_launches_worth_timing_agree(columns: int) -> None:
    from fe_norm.launch_backward import BackwardProblem, candidates, config, partial_rows
    from fe_runtime.compile import KernelSpec, load

    problem = BackwardProblem(columns, *["bfloat16"] * 3)
    x, dout, w = rows(1000, columns), rows(1000, columns, seed=3, loud=False), vector(columns, "bfloat16", 1)
    rstd = torch.ops.fe_norm.rms_norm(x, eps=EPS)[2]
    want, terms = exact(dout, x, w, None, None, False, EPS)
    found = candidates(problem, "sm_90a", 132)
    for launch in [*found[:2], *found[2::9]]:
        for overlap in {launch.overlap, True}:
            how = replace(launch, overlap=overlap)
            builder = "fe_norm.kernels.rms_rows_backward:build"
            run = load(KernelSpec.of("fe_norm.candidate", builder, "sm_90a", **config(problem, how)))
            dx, dw = torch.empty_like(x), torch.empty_like(w)
            sums = torch.empty(partial_rows(how, 1000), columns, device="cuda")
            run(dout, x, w, rstd, dx, dw, sums)
            assert_within(dx, want[0], terms[0], f"dx of {how}")
            assert_within(dw, want[1], terms[1], f"dw of {how}")


def test_no_rows() -> None:
    x = torch.empty(0, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    w = torch.ones(64, device="cuda", requires_grad=True)
    out, h = rms_norm(x, w, residual=x)
    (out.sum() + h.sum()).backward()
    assert (out.shape, h.shape, x.grad.shape) == ((0, 64), (0, 64), (0, 64))  # type: ignore[union-attr]
    assert torch.equal(w.grad, torch.zeros_like(w))  # type: ignore[arg-type]


@pytest.mark.parametrize("columns", [33, 256, 8192])
def test_nan_and_inf_stay_in_their_row_of_dx(columns: int) -> None:
    x, dout, w = rows(9, columns), rows(9, columns, seed=3), vector(columns, "bfloat16", 1)
    clean = rms_norm_backward(dout, x, w)["dx"].clone()
    x[2, columns // 2], dout[5, 3] = float("nan"), float("inf")
    dx = rms_norm_backward(dout, x, w)["dx"]
    whole = [0, 1, 3, 4, 6, 7, 8]
    assert torch.equal(dx[whole], clean[whole])
    assert dx[2].isnan().all()
    assert not dx[5].isfinite().any()


@pytest.mark.gpu(exclusive=True)
def test_more_than_two_to_the_31_elements() -> None:
    columns, count = 8192, 2**18 + 3
    x, dout = (torch.empty(count, columns, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for array in (x, dout):
        for start in range(0, count, 2**14):
            array[start : start + 2**14].normal_()
    w = vector(columns, "bfloat16", 1)
    dx = rms_norm_backward(dout, x, w, backend="sm90")["dx"]
    for part in (slice(0, 4), slice(2**18 - 2, count)):
        want, terms = exact(dout[part], x[part], w, None, None, False, EPS)
        assert_within(dx[part], want[0], terms[0], "dx")


# --- autograd, graphs, streams, JAX --------------------------------------------------------------------------------


def training_step(x: Any, residual: Any, w: Any, dout: Any, dres: Any) -> tuple[Any, ...]:
    out, h = rms_norm(x, w, residual=residual)
    return torch.autograd.grad((out, h), (x, residual, w), (dout, dres))


def operands(count: int = 256, columns: int = 1024) -> list[Any]:
    x, residual = (rows(count, columns, seed=seed).requires_grad_() for seed in (0, 1))
    w = vector(columns, "float32", 2).requires_grad_()
    return [x, residual, w, *(rows(count, columns, seed=seed, loud=False) for seed in (3, 4))]


def test_autograd_gives_what_the_kernel_gives() -> None:
    x, residual, w, dout, dres = operands()
    dx, dresidual, dw = training_step(x, residual, w, dout, dres)
    with torch.no_grad():
        _, h, rstd = torch.ops.fe_norm.rms_norm(x, w, None, residual)
        want = rms_norm_backward(dout, h, w, rstd=rstd, dresidual_out=dres)
    assert torch.equal(dx, want["dx"])
    assert torch.equal(dresidual, want["dx"])
    assert torch.equal(dw, want["dweight"])
    y = rmsnorm_silu_wrapper(x, w)["o_tensor"]
    grads = torch.autograd.grad(y, (x, w), dout)
    for got, exact_ in zip(grads, rmsnorm_silu_backward(dout, x.detach(), w.detach()).values(), strict=False):
        assert torch.equal(got, exact_)


def test_compiled_training_step() -> None:
    given = operands()
    want = training_step(*given)

    def loss(x: Any, residual: Any, w: Any, dout: Any, dres: Any) -> Any:
        out, h = rms_norm(x, w, residual=residual)
        return (out * dout).float().sum() + (h * dres).float().sum()

    compiled = torch.compile(loss, fullgraph=True)
    got = torch.autograd.grad(compiled(*given), given[:3])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_graph_replays_a_training_step_with_changed_data() -> None:
    given = operands()
    training_step(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = training_step(*given)
    for seed in (7, 8):
        with torch.no_grad():
            for number, array in enumerate(given):
                array.copy_(
                    torch.randn(
                        array.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed + number)
                    )
                )
        graph.replay()
        for got, want in zip(captured, training_step(*given), strict=True):
            assert torch.equal(got, want)


def test_current_stream_is_followed() -> None:
    given = operands(4096, 4096)
    want = training_step(*given)
    side, late = torch.cuda.Stream(), torch.full_like(given[3], float("nan"))
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(given[3])
        got = training_step(*given[:3], late, given[4])
    side.synchronize()
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_a_hundred_row_counts_compile_once() -> None:
    from fe_runtime.compile import cache_info

    def compiles() -> int:
        return sum(entry.compiles + entry.disk_hits for entry in cache_info().values())

    training_step(*operands(1, 768))
    before = compiles()
    for count in range(2, 102):
        training_step(*operands(count, 768))
    assert compiles() == before


def test_jax_calls_the_same_kernels() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from fe_norm import rms_norm_jax

    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    given = operands(100, 512)
    want = training_step(*given)
    x, residual, w, dout, dres = (jnp.asarray(a.detach().float().cpu().numpy()) for a in given)
    x, residual, dout, dres = (a.astype(jnp.bfloat16) for a in (x, residual, dout, dres))

    def step(x: Any, residual: Any, w: Any) -> Any:
        _, pull = jax.vjp(lambda x, r, w: rms_norm_jax(x, w, residual=r), x, residual, w)
        return pull((dout, dres))

    for function in (step, jax.jit(step)):
        for got, exact_ in zip(function(x, residual, w), want, strict=True):
            np.testing.assert_array_equal(np.asarray(got, np.float32), exact_.float().cpu().numpy())
