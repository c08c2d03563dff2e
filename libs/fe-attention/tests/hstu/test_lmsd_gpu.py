"""LMSD and its gradient on a GPU: the kernels against fp64, masks bit for bit, and every edge."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from fe_attention import HSTULMSDBwd, HSTULMSDFwd, hstu_lmsd_backward, hstu_lmsd_forward
from fe_attention.reference.philox import keep, philox, threshold
from fe_runtime import testing

pytestmark = pytest.mark.gpu

EPS = 1e-6
UNIT = 2.0**-19  # 32 roundings of fp32, relative to the terms of a sum rather than to the sum
BF16 = 2.0**-8  # one rounding of a result
NORM, X, U = range(3)
FLAGS = {"apply_u_silu": True, "concat_u": True, "concat_x": True}
ALL_FLAGS = [dict(zip(FLAGS, values, strict=True)) for values in itertools.product([True, False], repeat=3)]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Any:
    """Fresh allocations, scratch included, hold NaN or 0xFF, so an element that is never written shows."""
    with testing.poisoned_memory():
        yield


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Any:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, device="cuda", generator=generator) * scale + 0.3).to(torch.bfloat16)


def operands(rows: int, columns: int, padding: int = 0) -> list[Any]:
    """x, u, weight and bias; with padding x and u lie in wider rows of NaN."""
    given = [normal(rows, columns, seed=1), normal(rows, columns, seed=2)]
    if padding:
        wide = [torch.full((rows, columns + padding), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in given]
        given = [w[:, 8 : 8 + columns].copy_(a) for w, a in zip(wide, given, strict=True)]
    return [*given, normal(columns, seed=3), normal(columns, seed=4)]


def planes(flags: dict[str, bool]) -> list[int]:
    return [*([U] if flags["concat_u"] else []), *([X] if flags["concat_x"] else []), NORM]


def within(got: Any, want: Any, terms: Any, what: str, rounding: float = BF16) -> None:
    """``terms``: the sum of the magnitudes that make up each element."""
    excess = (got.double() - want).abs() - rounding * want.abs() - UNIT * terms - 2.0**-126
    assert not excess.numel() or excess.max().item() <= 0, f"{what}: worst excess {excess.max().item():g}"
    assert torch.isfinite(got).all()


def check_forward(given: list[Any], p: float, seed: int, flags: dict[str, bool], eps: float = EPS) -> Any:
    result = hstu_lmsd_forward(*given, eps, p, seed, **flags, backend="sm90")
    y, mean, rstd, mask = result
    x, u, w, b = (array.double() for array in given)
    columns = x.shape[1]
    exact_mean, mean_square = x.mean(-1), x.square().mean(-1)
    exact_rstd = (x.var(-1, correction=0) + eps).rsqrt()
    loss = mean_square * exact_rstd.square()  # by which the variance is less exact than its terms
    within(mean, exact_mean, x.abs().mean(-1), "mean", 2.0**-23)
    within(rstd, exact_rstd, exact_rstd * loss, "rstd", 2.0**-21)
    kept = {plane: keep(x, plane, seed, p) for plane in planes(flags)} if np.float32(p) > 0 else None
    if kept is None:
        assert mask is None
    else:
        bits = sum(where.to(torch.int8) << plane for plane, where in kept.items())
        assert torch.equal(mask, bits)  # type: ignore[arg-type]
    factor = 1 / (1 - float(np.float32(p)))
    s = u.sigmoid() if flags["apply_u_silu"] else torch.ones_like(u)
    a, xh = u * s, (x - exact_mean[:, None]) * exact_rstd[:, None]
    shaky = (x.abs() + exact_mean.abs()[:, None]) * exact_rstd[:, None] + xh.abs() * loss[:, None]
    values = {U: a, X: x, NORM: (xh * w + b) * a}
    terms = {U: a.abs() * (1 + u.abs()), X: x.abs()}
    terms[NORM] = (shaky * w.abs() + b.abs()) * a.abs() * (1 + u.abs())
    for number, plane in enumerate(planes(flags)):
        part = y[:, number * columns : (number + 1) * columns]
        if kept is not None:
            assert (part[~kept[plane]] == 0).all()
            within(part[kept[plane]], (values[plane] * factor)[kept[plane]], (terms[plane] * factor)[kept[plane]], "y")
        else:
            within(part, values[plane], terms[plane], f"plane {plane}")
    return result


def check_backward(given: list[Any], saved: Any, p: float, flags: dict[str, bool], dy: Any, **more: Any) -> Any:
    mean, rstd, mask = saved
    found = hstu_lmsd_backward(dy, *given, mean, rstd, mask, dropout_ratio=p, **flags, **more, backend="sm90")
    x, u, w, b = (array.double() for array in given)
    parts = dict(zip(planes(flags), dy.double().chunk(len(planes(flags)), -1), strict=True))
    if mask is not None:
        factor = 1 / (1 - float(np.float32(p)))
        zero = torch.zeros_like(x)
        parts = {plane: torch.where(mask >> plane & 1 == 1, part * factor, zero) for plane, part in parts.items()}
    m, r = mean.double()[:, None], rstd.double()[:, None]
    xh, shaky = (x - m) * r, (x.abs() + m.abs()) * r
    s = u.sigmoid() if flags["apply_u_silu"] else torch.ones_like(u)
    a, slope = (u * s, s + u * s * (1 - s)) if flags["apply_u_silu"] else (u, torch.ones_like(u))
    gln = parts[NORM] * a
    wd = w * gln
    size = wd.abs() * (1 + u.abs())
    dx = (wd - xh * (xh * wd).mean(-1, keepdim=True) - wd.mean(-1, keepdim=True)) * r + parts.get(X, 0)
    off = (size + shaky * (shaky * size).mean(-1, keepdim=True) + size.mean(-1, keepdim=True)) * r
    within(found["dx_tensor"], dx, off + abs(parts.get(X, torch.zeros_like(x))), "dx")
    du = (parts[NORM] * (xh * w + b) + parts.get(U, 0)) * slope
    off = parts[NORM].abs() * (shaky * w.abs() + b.abs()) + abs(parts.get(U, torch.zeros_like(x)))
    within(found["du_tensor"], du, off * s * (1 + u.abs()).square(), "du")
    rows = 1 + x.shape[0] * 2.0**-5  # one more rounding for each row, whatever the order
    size = gln.abs() * (1 + u.abs())
    if more.get("compute_dweight", True):
        within(found["dweight_tensor"], (gln * xh).sum(0), rows * (size * shaky).sum(0), "dweight")
    else:
        assert found["dweight_tensor"] is None
    within(found["dbias_tensor"], gln.sum(0), rows * size.sum(0), "dbias")
    return found


def check(rows: int, columns: int, p: float = 0.1, seed: int = 0, padding: int = 0, **flags: bool) -> None:
    known = {**FLAGS, **flags}
    given = operands(rows, columns, padding)
    y, *saved = check_forward(given, p, seed, known)
    dy = normal(*y.shape, seed=5)
    if padding:
        wide = torch.full((rows, y.shape[1] + padding), float("nan"), dtype=torch.bfloat16, device="cuda")
        dy = wide[:, 8 : 8 + y.shape[1]].copy_(dy)
    check_backward(given, saved, p, known, dy)


@pytest.mark.parametrize("columns", [8, 16, 24, 64, 72, 128, 200, 256, 264, 512, 520, 1000, 1016, 1024, 2048, 4096])
def test_rows_of_every_length(columns: int) -> None:
    check(257, columns)
    check(77, columns, p=0.0, padding=24)


@pytest.mark.parametrize("columns", [1032, 3072, 4104, 5000, 6144, 8184, 8192])
def test_long_rows(columns: int) -> None:
    check(37, columns, p=0.3)
    check(5, columns, p=0.0, padding=8)


@pytest.mark.parametrize("flags", ALL_FLAGS, ids=str)
@pytest.mark.parametrize("columns", [256, 512, 1024])
def test_every_set_of_flags(columns: int, flags: dict[str, bool]) -> None:
    for p in (0.0, 0.2):
        check(131, columns, p, seed=-7, **flags)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 15, 16, 17, 527, 528, 529, 2111, 2112, 2113, 8192, 20_001])
@pytest.mark.parametrize("columns", [64, 512, 1016])
def test_any_number_of_rows(rows: int, columns: int) -> None:
    check(rows, columns)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**32, 2**63 - 1, -(2**63), 2**40 + 12345])
def test_masks_of_every_seed(seed: int) -> None:
    check(100, 512, 0.5, seed)


@pytest.mark.parametrize("p", [1e-40, 2.0**-32, 1e-9, 2.0**-9, 0.1, 0.2, 0.25, 0.5, 0.75, 0.999, 1 - 2.0**-24])
def test_masks_of_every_ratio(p: float) -> None:
    """The kernel finds the threshold itself."""
    given = operands(3000, 512)
    mask = hstu_lmsd_forward(*given, dropout_ratio=p, seed=9, backend="sm90")["mask_tensor"]
    want = sum(keep(given[0], plane, 9, p).to(torch.int8) << plane for plane in range(3))
    assert torch.equal(mask, want)


def test_mask_of_the_contracts_vectors() -> None:
    given = operands(8, 32)
    for seed, row, first, plane, words in (
        (2**40 + 12345, 3, 20, 1, (0x035341A2, 0x02F0A989, 0x323D65D0, 0xBCCA5BA9)),
        (-2, 7, 0, 0, (0x27F2F13D, 0x92A4FC55, 0xD0B800EB, 0x04020ACD)),
    ):
        for p, smallest in ((0.1, 0x199999B0), (0.2, 0x33333360), (0.5, 0x80000081)):
            mask = hstu_lmsd_forward(*given, dropout_ratio=p, seed=seed, backend="sm90")["mask_tensor"]
            assert (mask[row, first : first + 4] >> plane & 1).tolist() == [word >= smallest for word in words]


def test_kernel_and_reference_agree_on_the_gpu() -> None:
    given = operands(200, 512)
    kernel = hstu_lmsd_forward(*given, seed=3, backend="sm90")
    plain = hstu_lmsd_forward(*given, seed=3, backend="reference")
    assert torch.equal(kernel["mask_tensor"], plain["mask_tensor"])
    for got, want in zip(list(kernel)[:3], list(plain)[:3], strict=True):
        torch.testing.assert_close(got.float(), want.float(), rtol=2.0**-7, atol=1e-5)


def test_u_is_a_slice_of_the_fused_projection() -> None:
    x, _, w, b = operands(5000, 512)
    projection = normal(5000, 2048, seed=6)
    for first in (0, 512, 1536):
        check_forward([x, projection[:, first : first + 512], w, b], 0.1, 3, FLAGS)


def test_gradients_go_into_slices_of_a_buffer() -> None:
    given = operands(300, 512)
    y, *saved = hstu_lmsd_forward(*given)
    dy = normal(*y.shape, seed=5)
    buffer = torch.full((300, 2048), 7.0, dtype=torch.bfloat16, device="cuda")
    du = buffer[:, 512:1024]
    found = check_backward(given, saved, 0.1, FLAGS, dy, du_tensor=du)
    assert found["du_tensor"] is du
    assert (buffer[:, :512] == 7).all()
    assert (buffer[:, 1024:] == 7).all()


def test_without_the_gradient_of_the_weight() -> None:
    for columns in (64, 512, 8192):
        given = operands(300, columns)
        y, *saved = hstu_lmsd_forward(*given)
        check_backward(given, saved, 0.1, FLAGS, normal(*y.shape, seed=5), compute_dweight=False)


@pytest.mark.parametrize("columns", [64, 512, 1016, 8192])
def test_the_same_bits_in_every_run(columns: int) -> None:
    given = operands(3001, columns)
    y, *saved = hstu_lmsd_forward(*given)
    dy = normal(*y.shape, seed=5)
    testing.repeat_identical(lambda: hstu_lmsd_forward(*given, backend="sm90"), 20)
    testing.repeat_identical(
        lambda: hstu_lmsd_backward(dy, *given, *saved, dropout_ratio=0.1, **FLAGS, backend="sm90"), 20
    )


def test_no_rows() -> None:
    given = operands(0, 64)
    y, *saved = hstu_lmsd_forward(*given)
    assert y.shape == (0, 192)
    _, _, dweight, dbias = hstu_lmsd_backward(y, *given, *saved, dropout_ratio=0.1, **FLAGS)
    assert (dweight == 0).all()
    assert (dbias == 0).all()


@pytest.mark.parametrize("columns", [64, 512, 2048])
def test_nan_stays_in_its_row_and_does_not_pass_dropout(columns: int) -> None:
    given = operands(9, columns)
    clean = hstu_lmsd_forward(*given, dropout_ratio=0.5)
    given[0][2, 3], given[1][5, 7] = float("nan"), float("inf")
    y, mean, rstd, mask = hstu_lmsd_forward(*given, dropout_ratio=0.5)
    rest = [0, 1, 3, 4, 6, 7, 8]
    assert torch.equal(y[rest], clean["y_tensor"][rest])
    assert mean[2].isnan()
    assert rstd[2].isnan()
    for part, plane in enumerate((U, X, NORM)):
        dropped = mask >> plane & 1 == 0
        assert (y[:, part * columns : (part + 1) * columns][dropped] == 0).all()
    dy = normal(*y.shape, seed=5)
    dy[:, :columns][mask >> U & 1 == 0] = float("nan")
    clean_saved = list(clean)[1:]
    given = operands(9, columns)
    found = hstu_lmsd_backward(dy, *given, *clean_saved, dropout_ratio=0.5, **FLAGS)
    assert all(torch.isfinite(array).all() for array in found)


def test_rows_of_one_value_and_a_large_mean() -> None:
    given = operands(64, 512)
    given[0][:32] = 3.0
    given[0][32:] += 100.0
    y, mean, rstd, _ = hstu_lmsd_forward(*given, dropout_ratio=0.0, backend="sm90")
    assert torch.isfinite(y).all()
    torch.testing.assert_close(mean.double(), given[0].double().mean(-1), rtol=1e-5, atol=0)
    variance = given[0].double().var(-1, correction=0)
    got = rstd.double() ** -2 - EPS
    assert ((got - variance).abs() <= given[0].double().mean(-1).square() * 2.0**-20 + 1e-5 * variance).all()


@pytest.mark.gpu(exclusive=True)
@pytest.mark.parametrize(("rows", "columns", "stride"), [(2_739_421, 512, 2048), (2**18, 8192, 8192)])
def test_more_than_two_to_the_31_elements(rows: int, columns: int, stride: int) -> None:
    """Offsets beyond 2^31: in u for the first case, in y for both."""
    u = torch.empty(rows, stride, dtype=torch.bfloat16, device="cuda")
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
    for array in (u, x):
        for start in range(0, rows, 2**16):
            array[start : start + 2**16].normal_()
    w, b = normal(columns, seed=3), normal(columns, seed=4)
    u = u[:, stride - columns :]
    y, mean, rstd, mask = hstu_lmsd_forward(x, u, w, b, seed=5, backend="sm90")
    dx, du, *_ = hstu_lmsd_backward(y, x, u, w, b, mean, rstd, mask, dropout_ratio=0.1, **FLAGS, backend="sm90")
    last = slice(rows - 40, rows)
    bits = torch.zeros(40, columns, dtype=torch.int8)
    for plane in range(3):
        row = torch.arange(rows - 40, rows)[:, None].expand(-1, columns // 4)
        group = torch.arange(columns // 4)[None].expand(40, -1)
        zero = torch.zeros_like(group)
        words = torch.stack(philox((row, group, zero + plane, zero), (5, 0)), -1).reshape(40, columns)
        bits |= (words >= threshold(0.1)).to(torch.int8) << plane
    assert torch.equal(mask[last].cpu(), bits)
    part = hstu_lmsd_forward(x[last], u[last], w, b, dropout_ratio=0.0, backend="sm90")
    assert torch.equal(mean[last], part["mean_tensor"])
    for number, plane in enumerate((U, X, NORM)):
        kept = bits.cuda() >> plane & 1 == 1
        got = y[last, number * columns : (number + 1) * columns].float()
        want = part["y_tensor"][:, number * columns : (number + 1) * columns].float() / 0.9
        torch.testing.assert_close(got[kept], want[kept], rtol=2.0**-6, atol=1e-6)
    alone = hstu_lmsd_backward(
        y[last], x[last], u[last], w, b, mean[last].clone(), rstd[last].clone(), mask[last].clone(), 0.1, **FLAGS
    )
    assert torch.equal(dx[last], alone["dx_tensor"])
    assert torch.equal(du[last], alone["du_tensor"])


@pytest.mark.parametrize("columns", [128, 512, 1024])
def test_launches_worth_timing_agree(columns: int) -> None:
    from fe_attention.planning import lmsd, lmsd_backward
    from fe_runtime.compile import KernelSpec, load

    given = operands(1000, columns)
    y, mean, rstd, mask = want = list(check_forward(given, 0.1, 3, FLAGS))
    forward = lmsd.Problem(columns)
    for how in lmsd.candidates(forward, "sm_90a")[::7]:
        builder = "fe_attention.kernels.lmsd_forward:build"
        run = load(KernelSpec.of("fe_attention.candidate", builder, "sm_90a", **lmsd.config(forward, how)))
        found = [torch.empty_like(array) for array in want]
        run(*given, *found, EPS, 0.1, 3)
        for got, exact in zip(found[:3], want[:3], strict=True):
            torch.testing.assert_close(got.float(), exact.float(), rtol=2.0**-7, atol=2.0**-20)
        assert torch.equal(found[3], mask)
    dy = normal(*y.shape, seed=5)
    exact_found = check_backward(given, (mean, rstd, mask), 0.1, FLAGS, dy)
    backward = lmsd_backward.Problem(columns)
    for other in lmsd_backward.candidates(backward, "sm_90a", 132)[::11]:
        builder = "fe_attention.kernels.lmsd_backward:build"
        run = load(KernelSpec.of("fe_attention.candidate", builder, "sm_90a", **lmsd_backward.config(backward, other)))
        made = [torch.empty_like(array) for array in exact_found]
        sums = [torch.empty(lmsd_backward.partial_rows(other, 1000), columns, device="cuda") for _ in range(2)]
        run(dy, *given, mean, rstd, mask, *made, *sums, 0.1)
        for got, exact in zip(made, exact_found, strict=True):
            scale = exact.float().abs().max().item()
            torch.testing.assert_close(got.float(), exact.float(), rtol=2.0**-6, atol=2.0**-12 * scale)


# --- class, autograd, graphs, streams, JAX -------------------------------------------------------------------------


def test_class_forms_execute_without_allocation_for_any_rows_and_seed() -> None:
    given = operands(64, 512)
    outputs = [array.clone() for array in hstu_lmsd_forward(*given)]
    forward = HSTULMSDFwd(*given, *outputs, backend="sm90")
    dy = normal(64, 1536, seed=5)
    results = [torch.empty_like(array) for array in given]
    held = [torch.empty(132 * 64, 512, device="cuda") for _ in range(2)]
    backward = HSTULMSDBwd(dy, *given, *outputs[1:], *results, *held, backend="sm90")
    forward.compile()
    backward.compile()
    assert backward.workspace_rows <= 132 * 64
    for rows, seed in ((64, 1), (1, -5), (3000, 2**40)):
        given = operands(rows, 512, padding=8)
        want = hstu_lmsd_forward(*given, seed=seed)
        outputs = [torch.empty_like(array) for array in want]
        dy, results = normal(rows, 1536, seed=5), [torch.empty_like(array) for array in operands(rows, 512)]
        gradients = hstu_lmsd_backward(dy, *given, *list(want)[1:], dropout_ratio=0.1, **FLAGS)
        before = torch.cuda.memory_allocated()
        forward.execute(*given, *outputs, seed)
        backward.execute(dy, *given, *outputs[1:], *results, *held)
        assert torch.cuda.memory_allocated() == before
        for got, exact in zip([*outputs, *results], [*want, *gradients], strict=True):
            assert torch.equal(got, exact)


def test_misaligned_operands_are_refused() -> None:
    given = operands(16, 64)
    shifted = torch.zeros(16 * 64 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(16, 64)
    with pytest.raises(ValueError, match="x_tensor must start at an address that is a multiple of 16 bytes"):
        hstu_lmsd_forward(shifted, *given[1:])
    short = torch.zeros(65, dtype=torch.bfloat16, device="cuda")[1:]
    with pytest.raises(ValueError, match="bias_tensor must start at an address"):
        hstu_lmsd_forward(*given[:3], short)


def step(x: Any, u: Any, w: Any, b: Any, dy: Any, seed: int = 3) -> tuple[Any, ...]:
    y = hstu_lmsd_forward(x, u, w, b, seed=seed)["y_tensor"]
    return torch.autograd.grad(y, (x, u, w, b), dy)


def leaves(rows: int = 300, columns: int = 512) -> list[Any]:
    return [*(array.requires_grad_() for array in operands(rows, columns)), normal(rows, 3 * columns, seed=5)]


def test_autograd_gives_what_the_kernels_give() -> None:
    given = leaves()
    with torch.no_grad():
        _, *saved = hstu_lmsd_forward(*given[:4], seed=3)
        want = hstu_lmsd_backward(given[4], *given[:4], *saved, dropout_ratio=0.1, **FLAGS)
    for got, exact in zip(step(*given), want, strict=True):
        assert torch.equal(got, exact)


def test_compiled_training_step() -> None:
    given = leaves()

    def loss(x: Any, u: Any, w: Any, b: Any) -> Any:
        return (hstu_lmsd_forward(x, u, w, b, seed=3)["y_tensor"].float() * given[4].float()).sum()

    compiled = torch.compile(loss, fullgraph=True)
    for got, want in zip(torch.autograd.grad(compiled(*given[:4]), given[:4]), step(*given), strict=True):
        torch.testing.assert_close(got, want)


def test_graph_replays_a_training_step_with_changed_data() -> None:
    given = leaves()

    def change() -> None:
        with torch.no_grad():
            for number, array in enumerate(given):
                array.copy_(normal(*array.shape, seed=20 + number))

    replayed, eager = testing.cuda_graph_replay(lambda: step(*given), change)
    for got, want in zip(replayed, eager, strict=True):
        np.testing.assert_array_equal(got, want)


def test_streams_are_followed() -> None:
    given = operands(4096, 512)
    want = hstu_lmsd_forward(*given, seed=1)["y_tensor"]
    late = torch.full_like(given[0], float("nan"))

    def produce() -> None:
        late.copy_(given[0])

    for current in (True, False):
        late.fill_(float("nan"))
        got = testing.run_on_side_stream(
            lambda side, current=current: hstu_lmsd_forward(late, *given[1:], seed=1, stream=None if current else side)[
                "y_tensor"
            ],
            produce=produce,
            current=current,
        )
        np.testing.assert_array_equal(got.view(np.uint16), testing.to_numpy(want).view(np.uint16))


def test_a_hundred_row_counts_ratios_and_seeds_compile_once() -> None:
    from fe_runtime.compile import cache_info

    def compiles() -> int:
        return sum(entry.compiles + entry.disk_hits for entry in cache_info().values())

    step(*leaves(1, 256))
    before = compiles()
    for count in range(2, 102):
        given = operands(count, 256)
        y, *saved = hstu_lmsd_forward(*given, dropout_ratio=count / 200, seed=count)
        hstu_lmsd_backward(y, *given, *saved, dropout_ratio=count / 200, **FLAGS)
    assert compiles() == before


def test_jax_calls_the_same_kernels() -> None:
    import jax
    import jax.numpy as jnp

    from fe_attention import hstu_lmsd_forward_jax

    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    given = leaves()
    want = step(*given, seed=-(2**40))
    arrays = [jnp.asarray(a.detach().float().cpu().numpy()).astype(jnp.bfloat16) for a in given]

    def gradient(*inputs: Any) -> Any:
        _, pull = jax.vjp(lambda *a: hstu_lmsd_forward_jax(*a, seed=-(2**40))[0], *inputs)
        return pull(arrays[4])

    for function in (gradient, jax.jit(gradient)):
        for got, exact in zip(function(*arrays[:4]), want, strict=True):
            np.testing.assert_array_equal(np.asarray(got, np.float32), exact.float().cpu().numpy())
