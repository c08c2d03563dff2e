"""``rope_qdq_inplace`` on a GPU: the kernel against the naive loop and the reference, bit for bit, at every edge."""

from __future__ import annotations

import functools
from typing import Any

import naive_rope
import pytest
import torch
from rope_on_gpu import assert_same, bfloats, bits, compiles, produced_late, tables

import fe_runtime
from fe_rope import RopeQDQInplace, launch, rope_qdq_inplace, rope_qdq_jax
from fe_rope.reference.rope_qdq import rope_qdq_inplace as reference
from fe_rope.rope_qdq import MODES
from fe_runtime.compile import KernelSpec, load
from fe_runtime.testing import guarded, to_numpy

pytestmark = pytest.mark.gpu

NAMES = ("quantization", "group_size", "scale_format")
OPTIONS = [dict(zip(NAMES, mode, strict=True)) for mode in MODES]
FP4, FP8, FP4_16 = OPTIONS
each_mode = pytest.mark.parametrize("options", OPTIONS, ids=lambda mode: "/".join(map(str, mode.values())))
ROWS = 50


def operands(options: Any, shape: tuple[int, ...], kind: str = "normal", dtype: Any = torch.int32) -> tuple[Any, ...]:
    count = shape[0] if options is FP4 else torch.Size(shape[:-1]).numel()
    cache = torch.cat(tables((ROWS, 32), kind), dim=1)
    generator = torch.Generator("cuda").manual_seed(3)
    positions = torch.randint(0, ROWS, (count,), device="cuda", generator=generator, dtype=dtype)
    return bfloats(shape, kind), cache, positions


def run_and_check(x: Any, cache: Any, positions: Any, options: Any) -> None:
    want = reference(x, cache, positions, **options)[0]
    result = rope_qdq_inplace(x, cache, positions, backend="sm90", **options)
    assert result["out"] is x
    assert_same(x, want)


@each_mode
@pytest.mark.parametrize("kind", ["normal", "bits"])
def test_reference_and_kernel_on_the_gpu_are_the_naive_loop(options: Any, kind: str) -> None:
    arrays = operands(options, (5, 2, 96), kind)
    want = naive_rope.rope_qdq(*map(to_numpy, arrays), **options)
    assert naive_rope.same_bits(to_numpy(reference(*arrays, **options)[0]), want)
    rope_qdq_inplace(*arrays, backend="sm90", **options)
    assert naive_rope.same_bits(to_numpy(arrays[0]), want)


@each_mode
@pytest.mark.parametrize("heads", [1, 3, 4, 32])
@pytest.mark.parametrize("columns", [64, 96, 128, 192, 512, 576])
def test_every_kind_of_shape(options: Any, heads: int, columns: int) -> None:
    for tokens in (1, 2, 77):
        for kind in ("normal", "bits"):
            run_and_check(*operands(options, (tokens, heads, columns), kind), options)


@each_mode
def test_groups_of_every_size(options: Any) -> None:
    """From the smallest subnormal to the largest number, and every magnitude under one scale."""
    exponents = torch.arange(-133, 128, device="cuda", dtype=torch.float64)
    values = torch.rand(exponents.numel(), 16, 64, device="cuda", dtype=torch.float64) + 0.99
    sign = torch.randint(-1, 2, values.shape, device="cuda")
    x = (values * sign * torch.exp2(exponents)[:, None, None]).bfloat16()
    cache = torch.cat([torch.ones(1, 32), torch.zeros(1, 32)], dim=1).cuda()
    count = x.shape[0] if options is FP4 else x.shape[0] * 16
    run_and_check(x, cache, torch.zeros(count, device="cuda", dtype=torch.int64), options)


def test_every_value_over_every_scale() -> None:
    """The e4m3 scale needs true quotients: each bf16 magnitude beside a maximum that gives each scale."""
    codes = torch.arange(1, 127, device="cuda", dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    magnitudes = torch.arange(0, 1 << 15, device="cuda", dtype=torch.int16).view(torch.bfloat16)
    for scale in codes.tolist():
        largest = 6 * scale
        inside = magnitudes[(magnitudes.float() <= largest) & (magnitudes.float() > largest * 2.0**-9)]
        usable = inside[: inside.numel() // 15 * 15].view(-1, 15)
        if usable.shape[0] < 4:
            continue
        top = torch.full((usable.shape[0], 1), largest, device="cuda").bfloat16()
        x = torch.cat([top, usable], dim=1)[: usable.shape[0] // 4 * 4].reshape(-1, 64)
        cache = torch.cat([torch.ones(1, 32), torch.zeros(1, 32)], dim=1).cuda()
        run_and_check(x, cache, torch.zeros(x.shape[0], device="cuda", dtype=torch.int32), FP4_16)


@each_mode
def test_values_that_are_not_finite(options: Any) -> None:
    x, cache, positions = operands(options, (9, 2, 128))
    x[1, 0, 5], x[2, 1, 70], x[3, 0, 9] = float("nan"), float("nan"), float("inf")
    run_and_check(x, cache, positions, options)
    assert x[1, 0, 5].isnan()


@each_mode
@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_unaligned_bases(options: Any, offset: int) -> None:
    x, cache, positions = operands(options, (9, 2, 96))
    unaligned = torch.empty(x.numel() + offset, dtype=x.dtype, device="cuda")[offset:].view(x.shape).copy_(x)
    moved = torch.empty(cache.numel() + 1, device="cuda")[1:].view(cache.shape).copy_(cache)
    run_and_check(unaligned, moved, positions, options)


@each_mode
def test_rows_of_other_strides(options: Any) -> None:
    x, cache, positions = operands(options, (9, 2, 128))
    for width in (136, 200, 129):
        buffer = torch.full((9, 2, width), 3.0, dtype=torch.bfloat16, device="cuda")
        buffer[..., :128] = x
        run_and_check(buffer[..., :128], cache, positions, options)
        assert (buffer[..., 128:] == 3).all()
    if options is FP4:
        first = torch.empty(2, 9, 128, dtype=torch.bfloat16, device="cuda").transpose(0, 1).copy_(x)
        run_and_check(first, cache, positions, options)


@each_mode
def test_nothing_beside_x_is_written(options: Any) -> None:
    for shape, alignment in (((3, 5, 96), 16), ((2, 1, 512), 2), ((131, 4, 128), 16)):
        values, cache, positions = operands(options, shape)
        x = guarded(shape, "bfloat16", framework="torch", device="cuda", alignment=alignment, values=to_numpy(values))
        kept = cache.clone(), positions.clone()
        run_and_check(x.array, cache, positions, options)
        x.check_surroundings()
        assert torch.equal(cache, kept[0])
        assert torch.equal(positions, kept[1])


@each_mode
def test_positions_outside_the_cache(options: Any) -> None:
    """Clamped, so that nothing faults; an error in checked mode."""
    x, cache, positions = operands(options, (40, 2, 128), dtype=torch.int64)
    positions[3], positions[7], positions[11] = -1, ROWS, 2**40
    run_and_check(x, cache, positions, options)
    fe_runtime.configure(check_device_values=True)
    try:
        with pytest.raises(ValueError, match=r"positions must hold values in \[0, P\)"):
            rope_qdq_inplace(x, cache, positions, **options)
    finally:
        fe_runtime.configure(check_device_values=None)


@each_mode
def test_row_counts_compile_once(options: Any) -> None:
    run_and_check(*operands(options, (3, 4, 128)), options)
    before = compiles()
    for tokens in (1, 2, 64, 1000):
        run_and_check(*operands(options, (tokens, 4, 128)), options)
    assert compiles() == before
    x, cache, positions = operands(options, (0, 4, 128))
    assert rope_qdq_inplace(x, cache, positions, **options)["out"].shape == (0, 4, 128)


def test_leading_dimensions_and_positions_of_a_stride() -> None:
    x, cache, positions = operands(FP8, (2, 3, 5, 512))
    run_and_check(x, cache, positions, FP8)
    keys = bfloats((8192, 1, 128))
    big = torch.cat(tables((16384, 32)), dim=1)
    run_and_check(keys, big, torch.arange(0, 16384, 2, device="cuda"), FP4)


def test_rows_that_do_not_merge_run_the_reference() -> None:
    x, cache, positions = operands(FP8, (4, 3, 512))
    apart = torch.empty(4, 5, 512, dtype=torch.bfloat16, device="cuda")[:, :3].copy_(x)
    with pytest.warns(fe_runtime.FallbackWarning, match="do not merge"):
        rope_qdq_inplace(apart, cache, positions, **FP8)
    assert_same(apart, reference(x, cache, positions, **FP8)[0])


@pytest.mark.parametrize("mode", ["fp4/32/ue8m0", "fp4/16/e4m3"])
def test_every_candidate_gives_the_same_bits(mode: str) -> None:
    options = OPTIONS[["/".join(map(str, known)) for known in MODES].index(mode)]
    x, cache, positions = operands(options, (131, 128) if options is FP4_16 else (131, 32, 128))
    want = reference(x, cache, positions, **options)[0]
    problem = launch.Problem(1 if options is FP4_16 else 32, 128, rank=x.ndim, mode=mode)
    for chosen in launch.candidates(problem, "sm_90a")[:12]:
        config = {**launch.config(problem, chosen), "position_dtype": "int32"}
        kernel = load(KernelSpec.of("fe_rope.rope_qdq_inplace", "fe_rope.kernels.rope_qdq:build", "sm_90a", **config))
        out = x.clone()
        kernel(out, cache, positions, out)
        assert_same(out, want)


@pytest.mark.gpu(exclusive=True)
def test_more_than_two_to_the_31_elements() -> None:
    rows = 2**31 // 512 + 5
    x = torch.empty(rows, 512, dtype=torch.bfloat16, device="cuda")
    for start in range(0, rows, 1 << 18):
        x[start : start + (1 << 18)].normal_()
    cache = torch.cat(tables((ROWS, 32)), dim=1)
    positions = torch.arange(rows, device="cuda", dtype=torch.int32) % ROWS
    parts = [slice(0, 5), slice(rows // 2, rows // 2 + 5), slice(rows - 9, rows)]
    wanted = [reference(x[part], cache, positions[part], **FP8)[0] for part in parts]
    rope_qdq_inplace(x, cache, positions, backend="sm90", **FP8)
    for part, want in zip(parts, wanted, strict=True):
        assert_same(x[part], want)


# ---- streams, graphs, class, frameworks


@pytest.mark.parametrize("form", ["current", "stream", "handle"])
def test_streams(form: str) -> None:
    x, cache, positions = operands(FP4, (4096, 32, 128))
    want = reference(x, cache, positions, **FP4)[0]
    rope_qdq_inplace(x.clone(), cache, positions, **FP4)
    side, late = produced_late(x)
    if form == "current":
        with torch.cuda.stream(side):
            rope_qdq_inplace(late, cache, positions, **FP4)
    else:
        stream = side if form == "stream" else side.cuda_stream
        rope_qdq_inplace(late, cache, positions, stream=stream, **FP4)
    side.synchronize()
    assert_same(late, want)


@each_mode
def test_graph_replays_with_changed_data(options: Any) -> None:
    x, cache, positions = operands(options, (64, 4, 128))
    op = RopeQDQInplace(x, cache, positions, **options)
    op(x, cache, positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.execute(x, cache, positions)
    for seed in (7, 8):
        fresh = bfloats((64, 4, 128), seed=seed)
        x.copy_(fresh)
        graph.replay()
        assert_same(x, reference(fresh, cache, positions, **options)[0])


def test_class_takes_any_alignment_and_checks_every_call() -> None:
    x, cache, positions = operands(FP4, (64, 4, 128))
    op = RopeQDQInplace(x, cache, positions, **FP4)
    op.compile()
    version = x._version
    for _ in range(3):
        fresh = bfloats((64, 4, 128))
        x.copy_(fresh)
        assert op.execute(x, cache, positions)["out"] is x
        assert_same(x, reference(fresh, cache, positions, **FP4)[0])
    assert x._version > version
    before = compiles()
    for offset in (1, 2, 4):
        moved = torch.empty(x.numel() + offset, dtype=x.dtype, device="cuda")[offset:].view(x.shape).copy_(fresh)
        op.execute(moved, cache, positions)
        assert_same(moved, reference(fresh, cache, positions, **FP4)[0])
    assert compiles() == before
    more = operands(FP4, (100, 4, 128))
    want = reference(*more, **FP4)[0]
    op.execute(*more)
    assert_same(more[0], want)
    for wrong, text in (
        ((x[:, :3].contiguous(), cache, positions), "compiled number of heads"),
        ((x, cache, positions.long()), "compiled dtype int32"),
        ((x, cache.cpu(), positions), "must be on the device"),
        ((x, cache, positions[:63]), "one position for each"),
        ((x, x.view(torch.float32).view(-1, 64), positions), "must not share memory"),
    ):
        with pytest.raises(ValueError, match=text):
            op.execute(*wrong)


def test_torch_compile_and_repeated_runs() -> None:
    x, cache, positions = operands(FP4, (300, 32, 128))
    want = reference(x, cache, positions, **FP4)[0]
    for _ in range(20):
        again = x.clone()
        rope_qdq_inplace(again, cache, positions, **FP4)
        assert torch.equal(bits(again), bits(want))

    @torch.compile(fullgraph=True)
    def model(x: Any, cache: Any, positions: Any) -> Any:
        return rope_qdq_inplace(x, cache, positions, quantization="fp4")["out"] * 1

    again = x.clone()
    assert torch.equal(model(again, cache, positions), want)
    assert torch.equal(bits(again), bits(want))


@each_mode
def test_jax_calls_the_same_kernel(options: Any) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    x, cache, positions = operands(options, (100, 4, 128), "bits")
    want = to_numpy(reference(x, cache, positions, **options)[0])
    arrays = [jnp.asarray(to_numpy(array)) for array in (x, cache, positions)]
    function = functools.partial(rope_qdq_jax, **options)
    assert naive_rope.same_bits(np.asarray(function(*arrays)), want)
    assert naive_rope.same_bits(np.asarray(arrays[0]), to_numpy(x))
    assert naive_rope.same_bits(np.asarray(jax.jit(function, donate_argnums=0)(*arrays)), want)
