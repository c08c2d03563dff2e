"""Gradients of experts' weights on a GPU: against a float64 loop, with NaN around, behind and in between."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from gpu_wgrad import DEVICE, Call, Case, assert_close, bits, check, compute, expected, stacked
from naive_gemm import FORMATS, U, operand
from naive_grouped import expert_scales

from fe_gemm.planning.dense import Operands
from fe_gemm.planning.grouped_wgrad import Problem
from fe_gemm.planning.tiles import Launch
from fe_runtime import testing

# A kernel that hangs cannot be stopped from inside the process, so the time limit ends the process.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]

SIZES = {
    "uneven": [162, 0, 2577, 446, 0, 83],
    "empty first, middle, last": [0, 64, 0, 0, 200, 1, 0],
    "all empty": [0, 0, 0],
    "one expert": [300],
    "one empty expert": [0],
    "multiples of a tile": [256, 512, 0, 256],
    "one token each": [1] * 9,
}
MANY = [0, 3, 70, 0, 0, 129, 1, 64] * 32
LAUNCHES = {
    "128x256, two rows": Launch(128, 256, 2, 1, slots=4),
    "128x256": Launch(128, 256, slots=4),
    "128x256, two columns": Launch(128, 256, 1, 2, slots=4),
    "256x128, two rows": Launch(256, 128, 2, 1, slots=4),
    "128x128, two by two": Launch(128, 128, 2, 2, slots=6),
    "128x64": Launch(128, 64, slots=8, store_buffers=1),
    "64x128, odd band": Launch(64, 128, slots=3, band=3),
}
every_launch = pytest.mark.parametrize("launch", LAUNCHES.values(), ids=list(LAUNCHES))
every_distribution = pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))


# ---- token by token, tiles by a plan


@every_distribution
def test_sizes(sizes: list[int]) -> None:
    check(Case(Problem(), sizes))
    check(Case(Problem(), sizes, m=520, n=776, tail=0, pad=8))


def test_many_experts() -> None:
    check(Case(Problem(), MANY, m=136, n=264))


@pytest.mark.parametrize(("m", "n"), [(8, 8), (8, 1000), (1000, 8), (128, 256), (136, 264), (64, 72)])
def test_extents(m: int, n: int) -> None:
    check(Case(Problem(), SIZES["uneven"], m=m, n=n))


@every_distribution
def test_whole_numbers_are_exact(sizes: list[int]) -> None:
    """Sums of small whole numbers are exact in float32, so only the rounding of W is left."""
    case = Case(Problem(), sizes, m=264, n=520, whole=True)
    want, _ = expected(case, *case.values())
    assert torch.equal(compute(case), want.to(torch.bfloat16))


def test_a_large_call() -> None:
    check(Case(Problem(), [900, 0, 4096, 1], m=2048, n=2816))


def test_nan_stays_with_its_expert_row_and_column() -> None:
    case = Case(Problem(), [65, 40, 100], m=136, n=264)
    a, b = (x.copy() for x in case.values())
    a[129, 64] = np.nan  # the last token of the first expert
    b[65, 263] = np.nan  # the first token of the second
    found = Call(case, a, np.ascontiguousarray(b.T)).result().isnan()
    want = torch.zeros_like(found)
    want[0, 129], want[1, :, 263] = True, True
    assert torch.equal(found, want)


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float16", "float16"), ("float16", "bfloat16")], ids=str)
def test_dtypes(dtypes: tuple[str, str]) -> None:
    for turned, pad in ((False, 0), (True, 8)):
        check(Case(Problem(*dtypes, b_turned=turned), SIZES["uneven"], pad=pad))
        check(Case(Problem(*dtypes, b_turned=turned), SIZES["empty first, middle, last"], m=136, n=520, pad=pad))


@every_launch
def test_launches(launch: Launch) -> None:
    check(Case(Problem(), SIZES["uneven"], launch=launch))
    check(Case(Problem(), SIZES["empty first, middle, last"], m=1000, n=1000, launch=launch))


@every_launch
def test_one_cluster_computes_everything(launch: Launch) -> None:
    check(Case(Problem(), [100, 0, 700, 3], m=600, n=800, launch=launch, multiprocessors=launch.cluster))


# ---- results: behind addresses, added


@pytest.mark.parametrize("c_dtype", ["bfloat16", "float32"])
@every_distribution
def test_results_behind_addresses(sizes: list[int], c_dtype: str) -> None:
    check(Case(Problem(c_dtype=c_dtype, discrete=True), sizes))


def test_results_behind_many_addresses() -> None:
    check(Case(Problem(discrete=True), MANY[:64], m=136, n=264))


def test_addresses_of_the_time_it_runs() -> None:
    """The same kernel writes to other matrices when the list of addresses changes."""
    case = Case(Problem(discrete=True), [100, 0, 65])
    a, b = case.values()
    call = Call(case, a, np.ascontiguousarray(b.T))
    first = call.result()
    fresh = torch.full_like(first, torch.nan)
    call.arrays["addresses"].copy_(torch.tensor([w.data_ptr() for w in fresh]))
    for w in call.w:
        w.array.fill_(3)
    call.run()
    torch.cuda.synchronize()
    assert torch.equal(bits(fresh), bits(first))
    assert all((w.array == 3).all() for w in call.w)


@pytest.mark.parametrize("c_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("discrete", [False, True])
@every_distribution
def test_accumulation(sizes: list[int], discrete: bool, c_dtype: str) -> None:
    case = Case(Problem(c_dtype=c_dtype, accumulates=True, discrete=discrete), sizes)
    old = 8 * np.random.default_rng(7).standard_normal((len(sizes), case.m, case.n))
    old[:, 0, 0], old[:, 1, 1] = -0.0, 0.0
    dtype = getattr(torch, c_dtype)
    before = torch.from_numpy(old).to(DEVICE).to(dtype)
    found = compute(case, old=before.double().cpu().numpy())
    want, terms = expected(case, *case.values())
    assert_close(case, found, before.double() + want, terms, roundings=U[c_dtype] * want.abs())
    empty = [e for e, size in enumerate(sizes) if not size]
    assert torch.equal(bits(found[empty]), bits(before[empty])), "an expert without tokens changed something"


def test_accumulation_rounds_the_addend_or_nothing_and_adds_once() -> None:
    """Whole numbers: W is exact, so is what is added to it, and one rounding is left, to the nearest even."""
    case = Case(Problem(accumulates=True), [100, 30], m=136, n=264, whole=True)
    old = np.random.default_rng(8).integers(-1000, 1001, (2, 136, 264)).astype(np.float64)
    before = torch.from_numpy(old).to(DEVICE).to(torch.bfloat16)
    want, _ = expected(case, *case.values())
    addend = want.to(torch.bfloat16).double()
    found = compute(case, old=before.double().cpu().numpy())
    right = (found == (before.double() + addend).to(torch.bfloat16)) | (
        found == (before.double() + want).to(torch.bfloat16)
    )
    assert right.all(), f"{(~right).sum()} values"


# ---- what the device knows and the host does not


def records(call: Call) -> Any:
    """Return what the kernel noted of the experts in their order, and how many have tokens."""
    call.run()
    torch.cuda.synchronize()
    experts = len(call.case.sizes)
    words = call.arrays["groups"].cpu().numpy()[experts * 384 :].view(np.int32).reshape(experts + 2, 4)
    return words[:-2, :3], words[-2, 0]


@pytest.mark.parametrize("sizes", [*SIZES.values(), MANY], ids=[*SIZES, "many"])
def test_experts_are_treated_by_descending_tokens(sizes: list[int]) -> None:
    case = Case(Problem(), sizes, m=64, n=64)
    a, b = case.values()
    found, occupied = records(Call(case, a, np.ascontiguousarray(b.T)))
    order = sorted(range(len(sizes)), key=lambda e: (-sizes[e], e))
    starts = case.ends - np.array(sizes)
    assert found.tolist() == [[e, starts[e], sizes[e]] for e in order]
    assert occupied == sum(size > 0 for size in sizes)


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_graph_reads_the_offsets_of_the_time_it_runs(accumulates: bool) -> None:
    problem = Problem(accumulates=accumulates, c_dtype="float32")
    case = Case(problem, SIZES["uneven"], tail=0)
    other = replace(case, sizes=[0, 1000, 3, 0, 2200, 65])
    assert other.tokens == case.tokens
    a, b = case.values()
    call = Call(case, a, np.ascontiguousarray(b.T), old=np.ones((6, case.m, case.n)))

    def run() -> Any:
        call.w[0].array.fill_(1)
        call.run()
        return call.w[0].array.clone()

    replayed, eager = testing.cuda_graph_replay(run, lambda: call.arrays["offsets"].copy_(torch.from_numpy(other.ends)))
    assert replayed.tobytes() == eager.tobytes()
    want, terms = expected(other, a, b)
    total = want + 1 if accumulates else want
    assert_close(other, torch.from_numpy(replayed).to(DEVICE), total, terms, roundings=U["float32"] * want.abs())


MALFORMED = {
    "decreasing": [300, 100, 400, 50],
    "negative": [-5, 100, -(2**31), 300],
    "beyond the tokens": [100, 5000, 2**31 - 1, 400],
    "all beyond": [2**31 - 1] * 4,
}


@pytest.mark.parametrize("offsets", MALFORMED.values(), ids=list(MALFORMED))
def test_malformed_offsets_touch_nothing_outside(offsets: list[int]) -> None:
    assert not malformed(Problem(), offsets).isnan().any(), "something outside was read, or a value not written"


def malformed(problem: Problem, offsets: list[int]) -> Any:
    """Return W for offsets that make no sense, after looking at what surrounds the arrays."""
    case = Case(problem, [100, 100, 100, 108], tail=0)
    a, b = case.values()
    call = Call(case, a, np.ascontiguousarray(b.T))
    call.arrays["offsets"].copy_(torch.tensor(offsets, dtype=torch.int32))
    call.run()
    call.check_memory()
    return stacked(call.w)


# ---- contiguous tokens


ALIGNED = {
    "uneven": [160, 0, 2576, 448, 0, 83],
    "empty first, middle, last": [0, 64, 0, 0, 200, 1, 0],
    "all empty": [0, 0, 0],
    "one expert": [300],
}
"""Sizes of groups that begin at multiples of 16 bytes where tokens are contiguous."""


@pytest.mark.parametrize("majors", ["kn", "mk", "kk"])
@pytest.mark.parametrize("sizes", ALIGNED.values(), ids=list(ALIGNED))
def test_contiguous_tokens(sizes: list[int], majors: str) -> None:
    for turned, pad in ((False, 0), (True, 8)):
        check(Case(Problem(a_major=majors[0], b_major=majors[1], b_turned=turned), sizes, pad=pad))
        check(Case(Problem("bfloat16", "float32", *majors, b_turned=turned), sizes, m=264, n=520, pad=pad))


def test_rows_of_any_number_where_tokens_are_contiguous() -> None:
    for m in (1, 63, 129):
        check(Case(Problem(a_major="k", b_major="k"), ALIGNED["uneven"], m=m))


# ---- block-scaled operands


def scaled_case(name: str, sizes: list[int], majors: tuple[str, str], **how: Any) -> tuple[Case, Any, Any, list[Any]]:
    """Return a case, its two operands, and the bytes of their scales, NaN in the tail and in the padding."""
    element, scale, vec = FORMATS[name]
    problem = Problem(a_major=majors[0], b_major=majors[1], operands=Operands("blocks", element, scale, vec), **how)
    case = Case(problem, sizes, m=208, n=336, tail=64)
    rng = np.random.default_rng([5, *sizes])
    sides = [operand(rng, rows, case.tokens, 1, name) for rows in (case.m, case.n)]
    scales = []
    for side in sides:
        side.scales[:, -(-case.ends[-1] // vec) :] = 0x7F if scale == "float8_e4m3fn" else 0xFF
        scales.append(expert_scales(side.scales[..., 0], case.ends, case.tokens, vec, rng))
    return case, *sides, scales


def check_scaled(name: str, sizes: list[int], majors: tuple[str, str], **how: Any) -> None:
    case, a, b, scales = scaled_case(name, sizes, majors, **how)
    factors = np.random.default_rng(1).uniform(0.5, 2, (2, len(sizes))).astype(np.float32)
    factors[0, [size == 0 for size in sizes]] = np.nan
    more = tuple(factors) if case.problem.factors else ()
    given = [x.elements()[..., 0].view(np.uint8) for x in (a, b)]
    found, again = (Call(case, *given, scales=(*scales, *more)).result() for _ in range(2))
    assert torch.equal(bits(found), bits(again)), "two runs differ"
    want, terms = expected(case, *(np.nan_to_num(x) for x in (a.exact()[..., 0], b.exact()[..., 0].T)))
    if case.problem.factors:
        both = torch.from_numpy(np.nan_to_num(factors.prod(axis=0)).astype(np.float64)).to(DEVICE)[:, None, None]
        want, terms = want * both, terms * both
    assert_close(case, found, want, terms, roundings=2.0**-22 * want.abs())


SCALED = {"uneven": [128, 0, 640, 256, 0, 128], "all empty": [0, 0], "one expert": [384], "first empty": [0, 0, 128]}


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("sizes", SCALED.values(), ids=list(SCALED))
def test_block_scaled_operands(sizes: list[int], name: str) -> None:
    majors = [("k", "k")] if FORMATS[name][0] == "float4_e2m1fn" else [("k", "k"), ("m", "n"), ("k", "n")]
    for pair in majors:
        check_scaled(name, sizes, pair)
    check_scaled(name, sizes, ("k", "k"), factors=True, c_dtype="float32", b_turned=True)


def test_many_block_scaled_experts() -> None:
    check_scaled("mxfp8_e4m3", [0, 128, 256, 0] * 40, ("m", "n"))


def test_block_scaled_results_are_added() -> None:
    sizes = SCALED["uneven"]
    case, a, b, scales = scaled_case("mxfp8_e4m3", sizes, ("k", "k"), accumulates=True, c_dtype="float32")
    old = np.random.default_rng(3).standard_normal((len(sizes), case.m, case.n)).astype(np.float32)
    found = Call(case, *(x.elements()[..., 0].view(np.uint8) for x in (a, b)), scales=tuple(scales), old=old).result()
    want, terms = expected(case, *(np.nan_to_num(x) for x in (a.exact()[..., 0], b.exact()[..., 0].T)))
    before = torch.from_numpy(old).to(DEVICE).double()
    assert_close(case, found, before + want, terms, roundings=U["float32"] * want.abs())


# ---- tiles from a counter


@every_distribution
def test_tiles_from_a_counter(sizes: list[int]) -> None:
    check(Case(Problem(), sizes, dynamic=True))
    case = Case(Problem(), sizes, m=1000, n=1000)
    assert torch.equal(bits(compute(case)), bits(compute(replace(case, dynamic=True)))), "the schedule changes bits"


@every_launch
def test_tiles_from_a_counter_with_every_launch(launch: Launch) -> None:
    check(Case(Problem(), SIZES["uneven"], m=600, n=800, launch=launch, dynamic=True))
    check(Case(Problem(), MANY, m=136, n=264, launch=launch, dynamic=True))
    check(Case(Problem(), [100, 0, 700, 3], 600, 800, launch=launch, multiprocessors=launch.cluster, dynamic=True))


@every_distribution
def test_tiles_from_a_counter_where_experts_without_tokens_have_none(sizes: list[int]) -> None:
    case = Case(Problem(accumulates=True, discrete=True, c_dtype="float32"), sizes, dynamic=True)
    old = np.ones((len(sizes), case.m, case.n))
    planned, dynamic = (compute(replace(case, dynamic=kind), old=old) for kind in (False, True))
    assert torch.equal(bits(planned), bits(dynamic))


# ---- ragged operands


RAGGED = {
    "uneven": [160, 0, 2576, 448, 0, 88],
    "empty first, middle, last": [0, 64, 0, 0, 200, 8, 0],
    "all empty": [0, 0, 0],
    "one expert": [304],
}


@pytest.mark.parametrize("majors", list(product("km", "kn")), ids="".join)
@pytest.mark.parametrize("sizes", RAGGED.values(), ids=list(RAGGED))
def test_ragged_operands(sizes: list[int], majors: tuple[str, str]) -> None:
    for tail in (0, 72):
        problem = Problem(a_major=majors[0], b_major=majors[1], ragged=True)
        check(Case(problem, sizes, tail=tail + 8 * (sum(sizes) + tail == 0)))
        check(Case(replace(problem, c_dtype="float32", accumulates=False), sizes, m=264, n=136, tail=tail + 8))


@pytest.mark.parametrize("name", list(FORMATS))
def test_ragged_block_scaled_operands(name: str) -> None:
    for sizes in SCALED.values():
        check_scaled(name, sizes, ("k", "k"), ragged=True)


# ---- groups that TMA cannot read: a trap would spoil all that follows, so they come last


@pytest.mark.parametrize("majors", ["kn", "mk", "kk"])
def test_groups_that_tma_cannot_read_are_nan_and_the_others_right(majors: str) -> None:
    """Groups begin at 0, 64, 77, 77 and 128: at 77 there is one without tokens, and one with some."""
    case = Case(Problem(a_major=majors[0], b_major=majors[1]), [64, 13, 0, 51, 128], m=136, n=264)
    check_with_unreadable(case, [3])


def test_ragged_sizes_that_tma_cannot_read_are_nan_and_the_others_right() -> None:
    check_with_unreadable(Case(Problem(a_major="k", b_major="k", ragged=True), [64, 13, 3, 128], m=136, n=264), [1, 2])


def check_with_unreadable(case: Case, unreadable: list[int]) -> None:
    found = compute(case)
    want, terms = expected(case, *case.values())
    assert found[unreadable].isnan().all()
    rest = [e for e in range(len(case.sizes)) if e not in unreadable]
    part = replace(case, sizes=[case.sizes[e] for e in rest])
    assert_close(part, found[rest], want[rest], terms[rest])


@pytest.mark.parametrize("offsets", MALFORMED.values(), ids=list(MALFORMED))
@pytest.mark.parametrize("ragged", [False, True])
def test_malformed_offsets_of_contiguous_tokens_touch_nothing_outside(ragged: bool, offsets: list[int]) -> None:
    malformed(Problem(a_major="k", b_major="k", ragged=ragged), offsets)
