"""``rmsnorm_rht_amax`` on a GPU: the kernel against an fp64 oracle, and every edge of the contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fe_norm import RmsNormRhtAmax, pick_rows_per_cta, rmsnorm_rht_amax_wrapper
from fe_runtime import testing

pytestmark = pytest.mark.gpu

FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
RELATIVE = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
"""Half a unit in the last place of the output is at most this, relative to the value."""
CANCELLATION = 2.0**-16
"""What the sums of 16 may lose, relative to the largest of their terms: the contract's tolerance."""
SUBNORMAL = {"bfloat16": 0.0, "float16": 2.0**-25, "float32": 0.0}


@pytest.fixture(autouse=True)
def poisoned_memory() -> Any:
    """Fresh allocations hold NaN, so an output element that is never written shows."""
    with testing.poisoned_memory():
        yield


def rows(count: int, columns: int, dtype: str = "bfloat16", seed: int = 0) -> Any:
    """Rows with a few loud channels, as activations have."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(count, columns, device="cuda", generator=generator)
    loud = torch.randn(columns, device="cuda", generator=generator).exp()
    return (x * loud).to(FLOATS[dtype])


def vector(columns: int, dtype: str = "bfloat16", seed: int = 1) -> Any:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (1 + torch.randn(columns, device="cuda", generator=generator) / 4).to(FLOATS[dtype])


def hadamard() -> Any:
    signs = [[(-1) ** (i & j).bit_count() for j in range(16)] for i in range(16)]
    return torch.tensor(signs, dtype=torch.float64, device="cuda")


def oracle(x: Any, w: Any, eps: float) -> tuple[Any, Any]:
    """The formula in fp64 with an explicit matrix; also the largest term of each sum."""
    v = x.double()
    y = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps) * w.double()
    blocks = y.view(y.shape[0], -1, 16)
    largest = blocks.abs().amax(-1, keepdim=True).expand_as(blocks).reshape_as(y)
    return (blocks @ hadamard() / 4).reshape_as(y), largest


def check(result: Any, x: Any, w: Any, group: int, eps: float = 1e-5) -> None:
    o, amax = result
    want, largest = oracle(x, w, eps)
    name = str(o.dtype).removeprefix("torch.")
    assert tuple(o.shape) == tuple(x.shape)
    assert o.is_contiguous()
    error = (o.double() - want).abs()
    worst = (error - RELATIVE[name] * want.abs() - CANCELLATION * largest - SUBNORMAL[name]).max().item()
    assert worst <= 0, f"worst excess {worst:g}"
    assert error.norm() <= RELATIVE[name] * want.norm() + 2.0**-20 * largest.norm()
    wanted = want.abs().amax(-1).view(-1, group).amax(-1)
    assert amax.dtype == torch.float32
    torch.testing.assert_close(amax.double(), wanted, rtol=1e-5, atol=0)


def run_and_check(x: Any, w: Any, group: int, eps: float = 1e-5) -> None:
    check(rmsnorm_rht_amax_wrapper(x, w, eps, rows_per_cta=group, backend="sm90"), x, w, group, eps)


# Parts of a warp, a warp, blocks, tails of a row, two passes.
COLUMNS = [16, 32, 48, 64, 96, 128, 240, 256, 528, 768, 1024, 1040, 2048, 2880, 4096, 5120, 7168, 8192, 12288, 16384]
LONG = [16400, 32768, 65536, 116_000, 131_072]


@pytest.mark.parametrize("columns", COLUMNS + LONG)
def test_rows_of_every_length_in_groups_of_every_kind(columns: int) -> None:
    w = vector(columns)
    for group in (1, 2, 8) if columns > 4096 else (1, 2, 3, 4, 7, 8, 16):
        count = 2 if columns > 16384 else 5
        run_and_check(rows(group * count, columns, seed=group), w, group)


@pytest.mark.parametrize("weight", list(FLOATS))
@pytest.mark.parametrize("x_dtype", list(FLOATS))
def test_every_dtype_combination(x_dtype: str, weight: str) -> None:
    for columns in (320, 2048, 8192, 32768):
        run_and_check(rows(16, columns, x_dtype), vector(columns, weight), 8)


@pytest.mark.parametrize("group", [17, 24, 32, 100, 509, 1024, 4096])
def test_many_rows_per_entry(group: int) -> None:
    for entries in (1, 3):
        run_and_check(rows(entries * group, 128), vector(128), group)
    run_and_check(rows(group, 4096), vector(4096), group)


@pytest.mark.parametrize("count", [1, 2, 7, 8, 296, 592, 1001, 1184, 1056 * 8 + 8, 20_000])
def test_default_groups(count: int) -> None:
    x, w = rows(count, 256), vector(256)
    group = pick_rows_per_cta(count)
    group = group if count % group == 0 else 1
    result = rmsnorm_rht_amax_wrapper(x, w, backend="sm90")
    assert result["amax_tensor"].numel() == count // group
    check(result, x, w, group)


def test_the_named_workloads() -> None:
    for count, columns in ((8192, 4096), (1001, 5120), (8192, 2880), (2048, 7168), (1184, 16384), (8192, 2048)):
        x, w = rows(count, columns), vector(columns)
        group = pick_rows_per_cta(count) if count % 2 == 0 else 1
        check(rmsnorm_rht_amax_wrapper(x, w, backend="sm90"), x, w, group)


def test_a_hundred_row_counts_and_any_eps_compile_once() -> None:
    from fe_runtime.compile import cache_info

    def compiles() -> int:
        return sum(entry.compiles + entry.disk_hits for entry in cache_info().values())

    w = vector(736)
    rmsnorm_rht_amax_wrapper(rows(8, 736), w, rows_per_cta=8)
    before = compiles()
    for count in range(2, 102):
        rmsnorm_rht_amax_wrapper(rows(8 * count, 736), w, eps=1e-6 * count, rows_per_cta=8)
    assert compiles() == before


def test_every_kind_of_launch_computes_the_same() -> None:
    from fe_norm.launch_rht import Launch, Problem, config, is_valid
    from fe_runtime.compile import KernelSpec, load

    name, problem = "rmsnorm_rht_amax", Problem(1040, 8)
    x, w = rows(24, 1040), vector(1040)
    for launch in (
        Launch(threads_per_row=32, teams=1, groups=4, chunk=5),
        Launch(threads_per_row=32, teams=4, groups=2, chunk=5, ahead=1, prefetch=1),
        Launch(threads_per_row=64, teams=2, groups=4, chunk=3, ahead=1),
        Launch(threads_per_row=64, teams=8, groups=1, chunk=3, prefetch=1, lead=1),
        Launch(threads_per_row=160, teams=1, groups=1, chunk=1, ahead=1, prefetch=2, lead=2),
        Launch(threads_per_row=32, teams=1, groups=1, chunk=2),
    ):
        assert is_valid(problem, launch, "sm_90a"), launch
        run = load(
            KernelSpec.of(f"fe_norm.{name}", f"fe_norm.kernels.{name}:build", "sm_90a", **config(problem, launch))
        )
        o, amax = torch.empty_like(x), torch.empty(3, device="cuda")
        run(x, w, o, amax, 1e-5)
        check((o, amax), x, w, 8)


def test_rotating_twice_gives_the_values_back() -> None:
    x = rows(64, 512, "float32")
    ones = torch.ones(512, device="cuda")
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True))
    once = rmsnorm_rht_amax_wrapper(y, ones, eps=0.0)["o_tensor"]
    twice = rmsnorm_rht_amax_wrapper(once, ones, eps=0.0)["o_tensor"]
    torch.testing.assert_close(twice, y, rtol=1e-5, atol=1e-5)


# --- layouts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [257, 258, 260, 264, 300, 1024])
@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8])
def test_strided_and_unaligned_rows(stride: int, offset: int) -> None:
    """Rows inside a buffer whose rest is NaN: what lies outside a row never matters."""
    buffer = torch.full((24 * stride + offset,), float("nan"), dtype=torch.bfloat16, device="cuda")
    x = buffer.as_strided((24, 256), (stride, 1), offset)
    x.copy_(rows(24, 256))
    run_and_check(x, vector(256), 8)


@pytest.mark.parametrize("columns", [96, 1040, 4096])
@pytest.mark.parametrize("offset", [1, 2, 4])
def test_unaligned_weight_and_outputs(columns: int, offset: int) -> None:
    w = torch.cat([vector(columns)[:offset], vector(columns)])[offset:]
    x = rows(16, columns)
    run_and_check(x, w, 4)
    o = torch.full((16 * columns + offset,), float("nan"), dtype=x.dtype, device="cuda")[offset:].view(16, columns)
    amax = torch.full((4 + offset,), float("nan"), device="cuda")[offset:]
    RmsNormRhtAmax(x, w, o, amax, rows_per_cta=4)(x, w, o, amax)
    check((o, amax), x, w, 4)


def test_nothing_outside_the_outputs_is_written() -> None:
    for count, columns, group in ((24, 48, 3), (8, 4096, 8), (5, 1040, 1), (64, 128, 32)):
        x, w = rows(count, columns), vector(columns)
        o, amax = (
            torch.full((count + 2, columns), 7.0, dtype=x.dtype, device="cuda"),
            torch.full((count + 8,), 7.0).cuda(),
        )
        inner_o, inner_amax = o[1:-1], amax[4 : 4 + count // group]
        RmsNormRhtAmax(x, w, inner_o, inner_amax, rows_per_cta=group)(x, w, inner_o, inner_amax)
        check((inner_o, inner_amax), x, w, group)
        assert (o[0] == 7).all()
        assert (o[-1] == 7).all()
        assert (amax[:4] == 7).all()
        assert (amax[4 + count // group :] == 7).all()


def test_trailing_unit_dimensions_and_expanded_rows() -> None:
    x, w = rows(16, 256), vector(256)
    o, amax = rmsnorm_rht_amax_wrapper(x[:, :, None], w[:, None], backend="sm90")
    check((o, amax), x, w, 2)
    run_and_check(rows(1, 256).expand(24, 256), w, 8)


def test_no_rows() -> None:
    o, amax = rmsnorm_rht_amax_wrapper(torch.empty(0, 64, dtype=torch.bfloat16, device="cuda"), vector(64))
    assert (tuple(o.shape), tuple(amax.shape)) == ((0, 64), (0,))


# --- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [48, 256, 1024, 8192, 65536])
def test_the_maximum_ignores_nan_and_other_rows_are_untouched(columns: int) -> None:
    x, w = rows(16, columns), vector(columns)
    clean = rmsnorm_rht_amax_wrapper(x, w, rows_per_cta=4)["o_tensor"].clone()
    x[1, columns // 2], x[4:8] = float("nan"), float("nan")
    o, amax = rmsnorm_rht_amax_wrapper(x, w, rows_per_cta=4)
    whole = [0, 2, 3, *range(8, 16)]
    assert torch.equal(o[whole], clean[whole])
    assert o[[1, 4, 5, 6, 7]].isnan().all()
    wanted = oracle(x[[0, 2, 3]], w, 1e-5)[0].abs().max().float()
    torch.testing.assert_close(amax[0], wanted, rtol=1e-5, atol=0)
    assert amax[1] == 0
    assert amax.isfinite().all()


def test_infinity_spoils_its_block_and_silences_its_row() -> None:
    x, w = rows(8, 64), vector(64)
    x[3, 20] = float("inf")
    o, amax = rmsnorm_rht_amax_wrapper(x, w, rows_per_cta=1)
    assert o[3, 16:32].isnan().all()
    assert (torch.cat([o[3, :16], o[3, 32:]]) == 0).all()
    assert amax[3] == 0


def test_zero_rows() -> None:
    o, amax = rmsnorm_rht_amax_wrapper(torch.zeros(8, 64, dtype=torch.bfloat16, device="cuda"), vector(64))
    assert (o == 0).all()
    assert (amax == 0).all()


def test_results_are_bit_identical() -> None:
    for count, columns, group in ((1184, 5120, 8), (512, 128, 2), (640, 1024, 64)):
        x, w = rows(count, columns), vector(columns)
        testing.repeat_identical(lambda x=x, w=w, group=group: rmsnorm_rht_amax_wrapper(x, w, rows_per_cta=group))


@pytest.mark.gpu(exclusive=True)
def test_more_than_two_to_the_31_elements() -> None:
    """The last rows lie beyond 2^31 elements; compare the two ends with the oracle."""
    columns, count = 8192, 2**18 + 8
    x = torch.empty(count, columns, dtype=torch.bfloat16, device="cuda")
    for start in range(0, count, 2**14):
        x[start : start + 2**14].normal_()
    w = vector(columns)
    o, amax = rmsnorm_rht_amax_wrapper(x, w, backend="sm90")
    for start in (0, 2**18 - 8, 2**18):
        part = slice(start, start + 8)
        check((o[part], amax[start // 8 : start // 8 + 1]), x[part], w, 8)


def test_row_stride_beyond_two_to_the_31_elements() -> None:
    buffer = torch.empty(2**31 + 2**10, dtype=torch.bfloat16, device="cuda")
    x = buffer.as_strided((2, 256), (2**31 + 8, 1))
    x.copy_(rows(2, 256))
    run_and_check(x, vector(256), 2)


# --- streams, graphs, class, frameworks ----------------------------------------------------------------------------


@pytest.mark.parametrize("group", [8, 64], ids=["one kernel", "two kernels"])
def test_current_and_explicit_streams_are_followed(group: int) -> None:
    x, w = rows(4096, 2048), vector(2048)
    want = [a.clone() for a in rmsnorm_rht_amax_wrapper(x, w, rows_per_cta=group)]
    late = torch.full_like(x, float("nan"))
    for current in (True, False):
        got = testing.run_on_side_stream(
            lambda stream, given=not current: rmsnorm_rht_amax_wrapper(
                late, w, rows_per_cta=group, current_stream=stream if given else None
            ),
            produce=lambda: late.copy_(x),
            current=current,
        )
        for a, b in zip(got.values(), want, strict=True):
            assert a.tobytes() == testing.to_numpy(b).tobytes()


@pytest.mark.parametrize("group", [8, 64], ids=["one kernel", "two kernels"])
def test_graph_replays_with_changed_data(group: int) -> None:
    x, w = rows(256, 512), vector(512)
    replayed, eager = testing.cuda_graph_replay(
        lambda: rmsnorm_rht_amax_wrapper(x, w, rows_per_cta=group), lambda: x.copy_(rows(256, 512, seed=9))
    )
    for a, b in zip(replayed.values(), eager.values(), strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("group", [8, 64])
def test_class_writes_into_the_callers_outputs(group: int) -> None:
    x, w = rows(128, 512), vector(512)
    want = rmsnorm_rht_amax_wrapper(x, w, rows_per_cta=group)
    o, amax = torch.empty_like(x), torch.full_like(want["amax_tensor"], float("-inf"))
    op = RmsNormRhtAmax(x, w, o, amax, rows_per_cta=group)
    assert op.check_support() is True
    op.compile()
    assert op.execute(x, w, o, amax) is None
    assert torch.equal(o, want["o_tensor"])
    assert torch.equal(amax, want["amax_tensor"])
    more = rows(5 * group, 512)
    o, amax = torch.empty_like(more), torch.empty(5, device="cuda")
    op.execute(more, w, o, amax)
    check((o, amax), more, w, group)
    with pytest.raises(ValueError, match="amax_tensor must have shape"):
        op.execute(more, w, o, torch.empty(6, device="cuda"))
    with pytest.raises(ValueError, match="rows_per_cta must divide"):
        op.execute(rows(group + 1, 512), w, torch.empty(group + 1, 512, dtype=x.dtype, device="cuda"), amax)
    with pytest.raises(ValueError, match="o_tensor must not share memory with x_tensor"):
        op.execute(more, w, more, amax)


def test_gradient_is_neither_recorded_nor_refused() -> None:
    x, w = rows(16, 256).requires_grad_(), vector(256).requires_grad_()
    o, amax = rmsnorm_rht_amax_wrapper(x, w)
    assert not o.requires_grad
    assert not amax.requires_grad


def test_reference_on_the_gpu() -> None:
    x, w = rows(16, 256), vector(256)
    check(rmsnorm_rht_amax_wrapper(x, w, rows_per_cta=2, backend="reference"), x, w, 2)


def test_torch_compile() -> None:
    x, w = rows(64, 256), vector(256)

    @torch.compile(fullgraph=True)
    def model(x: Any, w: Any) -> Any:
        o, amax = rmsnorm_rht_amax_wrapper(x * 1, w, rows_per_cta=4)
        return o + 0, amax + 0

    for values in (x, rows(128, 256)):
        for got, want in zip(model(values, w), rmsnorm_rht_amax_wrapper(values, w, rows_per_cta=4), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("group", [8, 64])
def test_jax_calls_the_same_kernel(group: int) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from fe_norm import rmsnorm_rht_amax_jax

    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    x, w = rows(128, 512), vector(512)
    want = [a.float().cpu().numpy() for a in rmsnorm_rht_amax_wrapper(x, w, rows_per_cta=group)]
    jx, jw = (jnp.asarray(a.float().cpu().numpy()).astype(jnp.bfloat16) for a in (x, w))

    def call(x: Any, w: Any) -> Any:
        return rmsnorm_rht_amax_jax(x, w, rows_per_cta=group)

    for result in (call(jx, jw), jax.jit(call)(jx, jw), tuple(rmsnorm_rht_amax_wrapper(jx, jw, rows_per_cta=group))):
        for got, expected in zip(result, want, strict=True):
            np.testing.assert_array_equal(np.asarray(got).astype(np.float32), expected)
