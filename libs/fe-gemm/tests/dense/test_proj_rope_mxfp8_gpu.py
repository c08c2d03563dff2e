"""``gemm_proj_rope_mxfp8`` on a GPU: exact where sums are, within the contract's tolerance elsewhere, every edge."""

from __future__ import annotations

from typing import Any

import naive_proj_rope as naive
import numpy as np
import pytest
import torch

from fe_gemm import (
    GemmProjRopeMxfp8Bf16In,
    GemmProjRopeMxfp8Mxfp8In,
    gemm_proj_rope_mxfp8_jax,
    gemm_proj_rope_mxfp8_wrapper,
)
from fe_gemm.planning.proj_rope import Launch, Problem, candidates, config
from fe_runtime import testing
from fe_runtime.arrays import Device, capability
from fe_runtime.compile import KernelSpec, load

# A kernel that hangs cannot be stopped from inside the process, so the time limit ends the process.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]

FP8 = torch.float8_e4m3fn
both_precisions = pytest.mark.parametrize("scaled", [False, True], ids=["bf16", "e4m3"])
both_orders = pytest.mark.parametrize("w_out_in", [True, False], ids=["out-in", "in-out"])


@pytest.fixture(autouse=True)
def poisoned_memory() -> Any:
    """Fresh allocations hold NaN, so an output element that is never written shows."""
    if capability(Device("cuda", 0))[0] != 9:
        pytest.skip("needs a Hopper GPU")
    with testing.poisoned_memory():
        yield


class Case:
    """Arrays of one problem on the GPU; ``whole``: small integers, so that bf16 holds every sum."""

    def __init__(self, tokens: int, depth: int, heads: int, scaled: bool, whole: bool = False, seed: int = 0) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        known: Any = {"device": "cuda", "generator": generator}
        features = 192 * heads
        angle = 6.3 * torch.rand(tokens, 64, **known)
        self.cos, self.sin = angle.cos().bfloat16(), angle.sin().bfloat16()
        self.x_scale = self.w_scale = None
        if whole:
            x, w = (
                torch.randint(-1, 2, shape, **known) * (torch.rand(shape, **known) < 16 / depth)
                for shape in ((tokens, depth), (features, depth))
            )
        else:
            x, w = torch.randn(tokens, depth, **known), torch.randn(features, depth, **known)
            x *= (torch.randn(depth, **known) * 1.5).exp2()
            w *= depth**-0.5
        if scaled:
            blocks, low, high = depth // 32, *((127, 129) if whole else (123, 132))
            x, w = (x, w) if whole else (16 * x, 64 * w)
            self.x, self.w = (array.clamp(-448, 448).to(FP8) for array in (x.float(), w.float()))
            self.x_scale, self.w_scale = (
                torch.randint(low, high, (rows, blocks), dtype=torch.uint8, **known) for rows in (tokens, features)
            )
        else:
            self.x, self.w = x.bfloat16(), w.bfloat16()

    def arrays(self, w_out_in: bool = True) -> tuple[Any, ...]:
        turn = (lambda a: a) if w_out_in else (lambda a: None if a is None else a.view(torch.uint8).T.contiguous())
        w, w_scale = self.w, turn(self.w_scale)
        if not w_out_in:
            w = self.w.T.contiguous() if self.w_scale is None else turn(self.w).view(FP8)
        return self.x, w, self.cos, self.sin, self.x_scale, w_scale

    def exact(self) -> tuple[Any, Any]:
        """The values of x and w in float64."""
        pairs = ((self.x, self.x_scale), (self.w, self.w_scale))
        return tuple(
            a.double() if s is None else a.double() * torch.exp2(s.double() - 127).repeat_interleave(32, 1)
            for a, s in pairs
        )


def run(case: Case, w_out_in: bool = True, backend: str = "sm90") -> Any:
    return gemm_proj_rope_mxfp8_wrapper(*case.arrays(w_out_in), w_out_in=w_out_in, backend=backend)


def as_bytes(outputs: Any) -> list[Any]:
    return [output.view(torch.uint8) for output in outputs]


def assert_same(outputs: Any, want: Any) -> None:
    names = ("row codes", "row scales", "column codes", "column scales")
    pairs = zip(as_bytes(outputs), as_bytes(want), strict=True)
    for name, (got, expected) in zip(names, pairs, strict=False):
        where = (got != expected).nonzero()
        if len(where):
            first, last = (ends.tolist() for ends in (where.amin(0), where.amax(0)))
            raise AssertionError(f"{len(where)} of {got.numel()} {name} differ, between {first} and {last}")


def rotated(q: Any, cos: Any, sin: Any, absolute: bool = False) -> Any:
    """Values (T, H, 192) of sums (T, N), in float64; ``absolute``: sums of magnitudes."""
    q = q.unflatten(1, (-1, 192))
    a, b = q[..., 128::2], q[..., 129::2]
    (c, c2), (s, s2) = (table.double()[:, None].split(32, dim=-1) for table in (cos, sin))
    terms = ((a * c, -b * s), (b * c2, a * s2))
    parts = [p.abs() + m.abs() if absolute else p + m for p, m in terms]
    return torch.cat([q[..., :128].abs() if absolute else q[..., :128], *parts], dim=-1)


def check_within_tolerance(outputs: Any, case: Case) -> None:
    """Half a step of e4m3 (2^-4, or 2^-10 of the scale), 2^-8 for the rounding of Y, and the sums."""
    x, w = case.exact()
    acc, terms = x @ w.T, x.abs() @ w.abs().T
    v, magnitude = (rotated(acc, case.cos, case.sin, absolute) for absolute in (False, True))
    lost = (2.0**-18 + x.shape[1] * 2.0**-28) * rotated(terms, case.cos.abs(), case.sin.abs(), absolute=True)
    row, row_scales, column, column_scales = outputs
    powers = (torch.exp2(scales.double() - 127) for scales in (row_scales, column_scales))
    scales = [power.repeat_interleave(32, axis) for power, axis in zip(powers, (2, 0), strict=True)]
    for direction, codes, scale in zip(("row", "column"), (row, column), scales, strict=True):
        allowed = 1.02 * torch.maximum(2.0**-4 * v.abs(), 2.0**-10 * scale) + 2.0**-8 * magnitude + lost
        worst = ((codes.double() * scale - v).abs() / allowed).nan_to_num(torch.inf).max().item()
        assert worst <= 1, f"{direction}: {worst} of the allowed error"
    for scale, axis in zip((row_scales, column_scales), (2, 0), strict=True):
        largest = v.abs().unflatten(axis, (-1, 32)).amax(axis + 1)
        want = torch.ceil(torch.log2(largest / 448)).clamp(-127) + 127
        off = (scale.double() - want).abs()
        assert off.max() <= 1
        assert (off == 0).double().mean() >= 0.99 or off.numel() < 1000


def check_close_to_reference(outputs: Any, want: Any) -> None:
    for at in (1, 3):
        off = (outputs[at].int() - want[at].int()).abs()
        assert off.max() <= 1
        assert (off == 0).double().mean() >= 0.998 or off.numel() < 2000


# Tails of a tile, one tile, several; parts of a k step, one step, more than the ring holds; odd numbers of heads.
SHAPES = [
    (32, 32, 1),
    (64, 96, 1),
    (96, 64, 2),
    (128, 192, 1),
    (160, 96, 3),
    (256, 320, 2),
    (288, 1536, 5),
    (1056, 160, 4),
    (2048, 512, 16),
]


@both_precisions
@both_orders
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_whole_numbers_are_byte_exact(shape: tuple[int, int, int], w_out_in: bool, scaled: bool) -> None:
    case = Case(*shape, scaled, whole=True)
    assert_same(run(case, w_out_in), run(case, backend="reference"))


@both_precisions
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_within_the_tolerance(shape: tuple[int, int, int], scaled: bool) -> None:
    case = Case(*shape, scaled, seed=1)
    outputs = run(case)
    check_within_tolerance(outputs, case)
    check_close_to_reference(outputs, run(case, backend="reference"))
    assert_same(run(case, w_out_in=False), outputs)


@pytest.mark.parametrize("depth", [8, 16, 24, 40, 72, 136, 1000])
def test_depths_that_are_no_whole_blocks(depth: int) -> None:
    case = Case(96, depth, 2, scaled=False, seed=2)
    outputs = run(case)
    check_within_tolerance(outputs, case)
    assert_same(run(case, w_out_in=False), outputs)


@both_precisions
def test_plain_loops_agree(scaled: bool) -> None:
    inputs = naive.inputs(160, 96, 3, scaled, whole=True)
    arrays = [None if a is None else testing.to_framework(a, "torch", "cuda") for a in inputs.arrays]
    outputs = gemm_proj_rope_mxfp8_wrapper(*arrays, backend="sm90")
    for got, want in zip(outputs, naive.outputs(*inputs.exact), strict=True):
        np.testing.assert_array_equal(testing.to_numpy(got).view(np.uint8), want)


@pytest.mark.parametrize("tokens", [2048, 8192])
def test_the_named_workloads(tokens: int) -> None:
    for heads in (16, 128):
        case = Case(tokens, 1536, heads, scaled=False, whole=True, seed=3)
        assert_same(run(case), run(case, backend="reference"))


# ---- launches


def kernel(problem: Problem, launch: Launch, multiprocessors: int = 132) -> Any:
    flat = config(problem, launch, multiprocessors)
    place = "fe_gemm.kernels.sm90.proj_rope_mxfp8:build"
    return load(KernelSpec.of("fe_gemm.gemm_proj_rope_mxfp8", place, "sm_90a", **flat))


def launch_and_check(problem: Problem, launch: Launch, shape: tuple[int, int, int], multiprocessors: int = 132) -> None:
    tokens, _, heads = shape
    case = Case(*shape, problem.scaled, whole=True, seed=4)
    shapes = ((tokens, 192 * heads), (tokens, 6 * heads), (tokens, 192 * heads), (tokens // 32, 192 * heads))
    results = [torch.full(shape, 0xEE, dtype=torch.uint8, device="cuda") for shape in shapes]
    arrays = [a for a in case.arrays(problem.w_major == "k") if a is not None]
    arrays = [a.view(torch.uint8) if a.dtype == FP8 else a for a in arrays]
    scratch = [torch.empty(a.shape, dtype=torch.bfloat16, device="cuda") for a in arrays[:2]] if problem.scaled else []
    kernel(problem, launch, multiprocessors)(*arrays, *results, *scratch)
    want = run(case, backend="reference")
    assert_same([r.view(w.shape) for r, w in zip(results, as_bytes(want), strict=True)], as_bytes(want))


@pytest.mark.parametrize("cluster", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("w_major", ["k", "n"])
def test_every_cluster(w_major: str, cluster: tuple[int, int]) -> None:
    for shape in ((160, 96, 3), (1056, 320, 5)):
        launch_and_check(Problem(w_major), Launch(128, 192, *cluster, slots=3, store_buffers=1, band=3), shape)


@pytest.mark.parametrize("scaled", [False, True])
def test_every_candidate(scaled: bool) -> None:
    problem = Problem(scaled=scaled)
    for launch in candidates(problem, 128, 1536, "sm_90a"):
        launch_and_check(problem, launch, (416, 256, 7))


def test_few_multiprocessors_compute_everything() -> None:
    for cluster in ((1, 1), (2, 1)):
        launch = Launch(128, 192, *cluster, slots=4, store_buffers=1)
        launch_and_check(Problem(), launch, (736, 128, 6), multiprocessors=cluster[0] * cluster[1])


# ---- edges


@both_precisions
def test_blocks_of_zeros_have_byte_zero(scaled: bool) -> None:
    case = Case(160, 96, 3, scaled, whole=True, seed=5)
    case.x.view(torch.uint8)[32:64] = 0
    case.w.view(torch.uint8)[192 + 64 : 192 + 96] = 0
    outputs = run(case)
    assert (outputs["out_scales_row"][32:64] == 0).all()
    assert (outputs["out_scales_row"][:, 1, 2] == 0).all()
    assert (outputs["out_scales_col"][1] == 0).all()
    assert (outputs["out_scales_col"][:, 1, 64:96] == 0).all()
    assert (outputs["out_fp8_row"].view(torch.uint8)[32:64] & 0x7F == 0).all()
    assert_same(outputs, run(case, backend="reference"))


def test_nan_stays_in_its_token_and_feature() -> None:
    case = Case(160, 96, 3, scaled=False, whole=True, seed=6)
    clean = run(case)
    case.x[70, 5] = torch.nan
    outputs = run(case)
    others = [t for t in range(160) if t != 70]
    assert_same([outputs[i][others] for i in (0, 1)], [clean[i][others] for i in (0, 1)])
    assert (outputs["out_fp8_row"].view(torch.uint8)[70] == 0x7F).all()
    assert (outputs["out_fp8_col"].view(torch.uint8)[70] == 0x7F).all()
    assert (outputs["out_scales_row"][70] == 0).all()
    assert_same(outputs, run(case, backend="reference"))


def test_a_nan_scale_makes_its_feature_nan() -> None:
    case = Case(64, 64, 1, scaled=True, whole=True, seed=7)
    case.w_scale[5, 1] = 255
    outputs = run(case)
    assert (outputs["out_fp8_row"].view(torch.uint8)[:, 0, 5] == 0x7F).all()
    assert_same(outputs, run(case, backend="reference"))


def test_small_and_large_values() -> None:
    """Scales from 2^-127 on, also where the maximum over 448 is subnormal."""
    for exponent in (-120, -100, -60, 60, 100):
        case = Case(96, 64, 2, scaled=False, whole=True, seed=8)
        case.x *= 2.0**exponent
        assert_same(run(case), run(case, backend="reference"))


@both_precisions
def test_no_tokens(scaled: bool) -> None:
    outputs = run(Case(0, 64, 2, scaled))
    assert [tuple(output.shape) for output in outputs] == [(0, 2, 192), (0, 2, 6), (0, 2, 192), (0, 2, 192)]


@pytest.mark.parametrize("which", [0, 1, 2, 3], ids=["x", "w", "cos", "sin"])
def test_arrays_that_start_at_odd_addresses_are_named(which: int) -> None:
    arrays = list(Case(64, 64, 1, scaled=False).arrays())
    flat = torch.empty(arrays[which].numel() + 1, dtype=torch.bfloat16, device="cuda")[1:]
    arrays[which] = flat.view(arrays[which].shape).copy_(arrays[which])
    name = ("x", "w", "cos", "sin")[which]
    with pytest.raises(ValueError, match=f"gemm_proj_rope_mxfp8: {name} must start at an address"):
        gemm_proj_rope_mxfp8_wrapper(*arrays)


def test_scales_may_start_anywhere() -> None:
    case = Case(96, 96, 2, scaled=True, whole=True, seed=9)
    want = run(case)
    for w_out_in in (True, False):
        arrays = list(case.arrays(w_out_in))
        for which in (4, 5):
            flat = torch.empty(arrays[which].numel() + 3, dtype=torch.uint8, device="cuda")[3:]
            arrays[which] = flat.view(arrays[which].shape).copy_(arrays[which])
        assert_same(gemm_proj_rope_mxfp8_wrapper(*arrays, w_out_in=w_out_in, backend="sm90"), want)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e8m0fnu], ids=str)
def test_spellings_of_the_scales(dtype: Any) -> None:
    case = Case(96, 96, 2, scaled=True, whole=True, seed=10)
    want = run(case)
    case.x_scale, case.w_scale = case.x_scale.view(dtype), case.w_scale.view(dtype)
    assert_same(gemm_proj_rope_mxfp8_wrapper(*case.arrays(), backend="sm90"), want)


# ---- class, streams, graphs, frameworks


@both_precisions
def test_class_writes_into_the_callers_outputs_and_nowhere_else(scaled: bool) -> None:
    op = None
    for tokens in (160, 32, 288):
        case = Case(tokens, 96, 3, scaled, whole=True, seed=tokens)
        shapes = (
            ((tokens, 3, 192), "float8_e4m3fn"),
            ((tokens, 3, 6), "uint8"),
            ((tokens, 3, 192), "float8_e4m3fn"),
            ((tokens // 32, 3, 192), "uint8"),
        )
        place: Any = {"framework": "torch", "device": "cuda"}
        guards = [testing.guarded(shape, dtype, name=str(shape), **place) for shape, dtype in shapes]
        outputs = [guard.array for guard in guards]
        x, w, cos, sin, x_scale, w_scale = case.arrays()
        arrays = (x, x_scale, w, w_scale, cos, sin) if scaled else (x, w, cos, sin)
        if op is None:
            kind = GemmProjRopeMxfp8Mxfp8In if scaled else GemmProjRopeMxfp8Bf16In
            op = kind(*arrays, *outputs, **({} if scaled else {"w_out_in": True}), backend="sm90")
            op.compile()
        assert op.execute(*arrays, *outputs) is None
        torch.cuda.synchronize()
        assert_same(outputs, run(case, backend="reference"))
        for guard in guards:
            guard.check_surroundings()


def test_any_extents_compile_once() -> None:
    from fe_runtime.compile import cache_info

    def compiles() -> int:
        return sum(entry.compiles + entry.disk_hits for entry in cache_info().values())

    run(Case(32, 32, 1, scaled=False))
    before = compiles()
    for tokens in range(32, 32 * 40, 32):
        run(Case(tokens, 64 + 8 * (tokens % 5), 1 + tokens % 3, scaled=False))
    assert compiles() == before


@both_precisions
def test_results_are_bit_identical(scaled: bool) -> None:
    for shape in ((2048, 512, 16), (160, 1536, 3)):
        case = Case(*shape, scaled, seed=11)
        testing.repeat_identical(lambda case=case: run(case))


@both_precisions
def test_current_and_explicit_streams_are_followed(scaled: bool) -> None:
    case = Case(2048, 512, 16, scaled, seed=12)
    want = [testing.to_numpy(output).tobytes() for output in run(case)]
    late = torch.zeros_like(case.x.view(torch.uint8)).view(case.x.dtype)
    arrays = (late, *case.arrays()[1:])
    for current in (True, False):
        got = testing.run_on_side_stream(
            lambda stream, given=not current: gemm_proj_rope_mxfp8_wrapper(*arrays, stream=stream if given else None),
            produce=lambda: late.view(torch.uint8).copy_(case.x.view(torch.uint8)),
            current=current,
        )
        assert [output.tobytes() for output in got.values()] == want


@both_precisions
def test_graph_replays_with_changed_data(scaled: bool) -> None:
    case, other = (Case(288, 192, 3, scaled, seed=seed) for seed in (13, 14))
    replayed, eager = testing.cuda_graph_replay(
        lambda: run(case), lambda: case.x.view(torch.uint8).copy_(other.x.view(torch.uint8))
    )
    for a, b in zip(replayed.values(), eager.values(), strict=True):
        assert a.tobytes() == b.tobytes()


@both_precisions
def test_torch_compile(scaled: bool) -> None:
    case = Case(160, 96, 3, scaled, seed=15)

    @torch.compile(fullgraph=True)
    def model(*arrays: Any) -> Any:
        return tuple(gemm_proj_rope_mxfp8_wrapper(*arrays).values())

    assert_same(model(*case.arrays()), run(case))


@both_precisions
@both_orders
def test_jax_calls_the_same_kernel(w_out_in: bool, scaled: bool) -> None:
    import jax

    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    case = Case(160, 96, 3, scaled, seed=16)
    want = [testing.to_numpy(output).view(np.uint8) for output in run(case)]
    host = [None if a is None else testing.to_numpy(a) for a in case.arrays(w_out_in)]
    arrays = [None if a is None else testing.to_framework(a, "jax", "cuda") for a in host]
    results = [gemm_proj_rope_mxfp8_wrapper(*arrays, w_out_in=w_out_in).values()]
    if w_out_in:
        results += [gemm_proj_rope_mxfp8_jax(*arrays), jax.jit(gemm_proj_rope_mxfp8_jax)(*arrays)]
    for result in results:
        for got, expected in zip(result, want, strict=True):
            np.testing.assert_array_equal(np.asarray(got).view(np.uint8), expected)


@pytest.mark.gpu(exclusive=True)
def test_more_than_two_to_the_31_codes() -> None:
    """The last tokens' codes lie beyond 2^31 bytes; the two ends are compared with the reference."""
    case = Case(90_112, 64, 128, scaled=False, whole=True, seed=17)
    outputs = run(case)
    for start in (0, 45_056, 90_080):
        part = Case(0, 64, 0, scaled=False)
        part.w = case.w
        part.x, part.cos, part.sin = (array[start : start + 32] for array in (case.x, case.cos, case.sin))
        want = run(part, backend="reference")
        got = [*(outputs[i][start : start + 32] for i in range(3)), outputs[3][start // 32 : start // 32 + 1]]
        assert_same(got, want)
