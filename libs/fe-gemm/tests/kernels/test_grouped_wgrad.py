"""Gradients of experts' weights compile, without spills; what their maps and records say."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs the kernel language (nvidia-cutlass-dsl)")

from cutlass import Int32, Int64

import fe_runtime
from fe_gemm.kernels.sm90.wgrad_groups import Group
from fe_gemm.kernels.sm90.wgrad_maps import ExpertMap
from fe_gemm.planning.dense import Operands
from fe_gemm.planning.expand import FORMATS
from fe_gemm.planning.grouped_wgrad import Plan, Problem, candidates, choose, config, is_valid
from fe_gemm.planning.tiles import Launch
from fe_runtime.compile import KernelSpec, resource_usage

ARCH = "sm_90a"
THREADS = 384
REGISTERS = 65536  # of a multiprocessor; a block takes one
MXFP8 = Operands("blocks", "float8_e4m3fn", "float8_e8m0fnu", 32)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    fe_runtime.configure(cache_dir=tmp_path)
    yield
    fe_runtime.configure(cache_dir=None)


def arguments(problem: Problem) -> tuple[str, ...]:
    scaled = list(problem.workspaces)
    inputs = ["a", "b", *(f"sf{name}" for name in scaled), "offsets"]
    inputs += ["addresses"] if problem.discrete else ["old_c"] if problem.accumulates else []
    inputs += ["scale_a", "scale_b"] if problem.factors else []
    return (*inputs, *([] if problem.discrete else ["c"]), "groups", *(f"{name}_values" for name in scaled))


def check(problem: Problem, launch: Launch | None = None, dynamic: bool = False) -> None:
    launch = launch or choose(problem, 4096, 4096, ARCH)
    assert is_valid(problem, launch)
    flat = config(Plan(problem, launch, 132, arguments(problem), dynamic))
    builder = "fe_gemm.kernels.sm90.grouped_wgrad:build"
    usage = resource_usage(KernelSpec.of("fe_gemm.grouped_gemm_wgrad", builder, ARCH, **flat))
    expansions = [f"fe_gemm_expand_{number}" for number in range(len(problem.workspaces))]
    count = len(expansions)
    assert list(usage) == [*expansions, f"fe_gemm_wgrad_groups_{count}", f"fe_gemm_wgrad_{count + 1}"]
    assert all(entry.frame_bytes == 0 for entry in usage.values()), f"{problem} {launch} spills: {usage}"
    assert usage[f"fe_gemm_wgrad_{count + 1}"].registers * THREADS <= REGISTERS


SAMPLE = {
    "plain": Problem(),
    "ragged, addresses": Problem(c_dtype="float16", a_major="k", b_major="k", ragged=True, discrete=True),
    "added": Problem(c_dtype="float32", accumulates=True),
    "mxfp8": Problem(operands=MXFP8, factors=True, b_turned=True),
}


@pytest.mark.parametrize("problem", SAMPLE.values(), ids=list(SAMPLE))
def test_sample(problem: Problem) -> None:
    check(problem)


def test_tiles_from_a_counter() -> None:
    check(Problem(accumulates=True, discrete=True), dynamic=True)
    check(Problem(), Launch(128, 128), dynamic=True)


@pytest.mark.compile
@pytest.mark.parametrize("majors", list(product("km", "kn")), ids="".join)
@pytest.mark.parametrize("c_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("accumulates", [False, True])
def test_every_layout(accumulates: bool, c_dtype: str, majors: tuple[str, str]) -> None:
    for discrete, ragged, turned in ((False, False, False), (True, True, True)):
        a, b = majors
        check(Problem("bfloat16", c_dtype, a, b, accumulates, discrete, ragged, b_turned=turned))


@pytest.mark.compile
@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("ragged", [False, True])
def test_every_format(ragged: bool, form: tuple[str, str, int]) -> None:
    majors = [("k", "k")] if form[0] == "float4_e2m1fn" else [("k", "k"), ("m", "n"), ("k", "n")]
    for a, b in majors:
        check(Problem(a_major=a, b_major=b, ragged=ragged, factors=True, operands=Operands("blocks", *form)))


@pytest.mark.compile
def test_every_candidate() -> None:
    problem = Problem("float16", "float32", accumulates=True)
    for launch in candidates(problem, 4096, 4096, ARCH):
        check(Problem(), launch)
        check(problem, launch, dynamic=True)


# ---- records and maps, evaluated on the host


def value(x: Any) -> int:
    return int(x.value if hasattr(x, "value") else x)


def test_an_expert_without_tokens_takes_a_slot_that_begins_behind_all_it_may_read() -> None:
    for first, tokens, steps in ((0, 0, 1), (5, 0, 1), (0, 1, 1), (7, 64, 1), (7, 65, 2), (640, 4096, 64)):
        group = Group(Int32(3), Int32(first), Int32(tokens), 1.0)
        assert value(group.steps(64)) == steps
        extent = max(first + tokens, 1)
        start = value(group.start(contiguous=False, ragged=False))
        assert start == first if tokens else start >= extent


@pytest.mark.parametrize("tokens", [0, 1, 64])
@pytest.mark.parametrize("first", [0, 1, 7, 8, 9, 64, 1001, 2**31 - 200])
def test_contiguous_tokens_begin_at_multiples_of_16_bytes_wherever_groups_do(first: int, tokens: int) -> None:
    """TMA traps at other places: also for an expert without tokens, which begins behind all it may read."""
    group = Group(Int32(3), Int32(first), Int32(tokens), 1.0)
    start, ragged = (value(group.start(contiguous=True, ragged=kind)) for kind in (False, True))
    assert 2 * start % 16 == 2 * ragged % 16 == 0
    if tokens:
        assert start == first // 8 * 8
        assert ragged == 0
    else:
        assert start >= max(first, 1)
        assert ragged >= 1


def array(rows: int, contiguous: bool = True) -> Any:
    """An operand (rows, T, 1) with contiguous tokens or rows, as far as maps look at it."""
    row, token = SimpleNamespace(mode=[int(contiguous)]), SimpleNamespace(mode=[int(not contiguous)])
    return SimpleNamespace(shape=(Int32(rows), Int32(1000), 1), stride=(row, token, None))


def fields(kind: str, rows: int, first: int, tokens: int, given: Any = None) -> dict[str, int]:
    made = ExpertMap(kind, None, array(rows), given).fields(0, Int32(first), Int32(tokens))
    return {name: value(found) for name, found in made.items()}


def test_maps_of_operands_end_with_the_experts_tokens_and_are_never_empty() -> None:
    assert fields("tokens", 64, 100, 28) == {"global_dim 0": 128}
    assert fields("tokens", 64, 0, 0) == {"global_dim 0": 1}


def test_maps_of_ragged_operands_describe_a_matrix_of_their_own() -> None:
    found = fields("ragged", 24, 40, 16, Int64(1 << 40))
    assert found == {
        "global_address": (1 << 40) + 24 * 40 * 2,
        "global_dim 0": 16,
        "global_dim 1": 24,
        "global_stride 0": 32,
    }


@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 9, 15, 17, 100])
@pytest.mark.parametrize("first", [0, 3, 8, 1001])
@pytest.mark.parametrize("rows", [8, 24, 136])
def test_maps_of_ragged_operands_stay_inside_where_sizes_are_not_multiples_of_8(
    rows: int, first: int, tokens: int
) -> None:
    base = 1 << 40
    found = fields("ragged", rows, first, tokens, Int64(base))
    address, stride = found["global_address"], found["global_stride 0"]
    assert address % 16 == stride % 16 == 0 < stride
    assert base <= address <= base + 2 * rows * first
    assert 1 <= found["global_dim 1"] <= rows
    reach = address + (found["global_dim 1"] - 1) * stride + 2 * tokens
    assert reach <= base + 2 * rows * (first + tokens)


def test_experts_that_tma_cannot_read_are_known() -> None:
    def readable(kind: str, first: int, tokens: int, contiguous: bool = True, rows: int = 24) -> bool:
        made = ExpertMap(kind, None, array(rows, contiguous))
        return bool(value(made.is_readable(Int32(first), Int32(tokens))))

    assert all(readable("tokens", first, 13, contiguous=False) for first in (0, 1, 7, 8))
    assert [readable("tokens", first, 13) for first in (0, 1, 8, 12, 64)] == [True, False, True, False, True]
    assert [readable("ragged", 8, tokens) for tokens in (0, 8, 9, 64)] == [True, True, False, True]
    assert [readable("ragged", first, 8, rows=3) for first in (0, 1, 8)] == [True, False, True]
    assert readable("addressed", 3, 3)


def test_maps_of_results_have_the_experts_addresses() -> None:
    made = ExpertMap("addressed", None, array(8), [Int64(4096), Int64(64)]).fields(1, Int32(0), Int32(0))
    assert {name: value(found) for name, found in made.items()} == {"global_address": 64}
