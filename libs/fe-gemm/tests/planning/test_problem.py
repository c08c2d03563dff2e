"""What is static about a product and its epilogue: which combinations make sense, and in which pieces they leave."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from fe_gemm.planning.problem import Problem, Sheet
from fe_gemm.planning.tiles import CELL_BYTES, Launch, cells, is_valid, shared_bytes

STORED = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
AMAX = Problem(c_dtype="float32", amax=True)
SWIGLU = Problem(epilogue="swiglu", pre_dtype="bfloat16", alpha=True)
SRELU = Problem(epilogue="srelu", pre_dtype="bfloat16", alpha=True)
DSRELU = Problem(epilogue="dsrelu", upstream_dtype="bfloat16", alpha=True)
QUANTISED = replace(SRELU, c_dtype="float8_e4m3fn", scale_dtype="float8_e8m0fnu")
ALL = [Problem(), AMAX, SWIGLU, SRELU, DSRELU, QUANTISED]


@pytest.mark.parametrize("problem", ALL, ids=str)
def test_what_the_operations_need_is_valid(problem: Problem) -> None:
    assert problem.is_consistent
    assert is_valid(problem, Launch(128, 256, slots=3))


def test_only_a_rounded_product_is_plain() -> None:
    assert [problem.plain for problem in ALL] == [True] + [False] * (len(ALL) - 1)
    assert Problem("float16", "bfloat16", "m", "n", "m").plain
    assert not Problem(c_dtype="float32").plain
    assert not Problem(alpha=True).plain


INCONSISTENT = {
    "operands of another dtype": replace(SRELU, dtype="float64"),
    "a result of another dtype": replace(SRELU, c_dtype="float64"),
    "X in another dtype": replace(SRELU, pre_dtype="int32"),
    "upstream of 8 bits": replace(DSRELU, upstream_dtype="float8_e4m3fn"),
    "an unknown epilogue": replace(SRELU, epilogue="relu"),
    "no upstream": replace(DSRELU, upstream_dtype=None),
    "upstream for nothing": replace(SRELU, upstream_dtype="bfloat16"),
    "X stored beside X": replace(AMAX, pre_dtype="bfloat16"),
    "a gate without one": replace(SRELU, gate_first=True),
    "packed columns that are not contiguous": replace(AMAX, c_dtype="float4_e2m1fn", c_major="m"),
    "scales for values of 16 bits": replace(SRELU, scale_dtype="float8_e8m0fnu"),
    "scales of another dtype": replace(QUANTISED, scale_dtype="float32"),
    "blocks of another length": replace(QUANTISED, scale_vector=64),
    "nothing to accumulate": replace(SRELU, accumulates=True),
}


@pytest.mark.parametrize("problem", INCONSISTENT.values(), ids=list(INCONSISTENT))
def test_parts_that_do_not_fit_are_refused(problem: Problem) -> None:
    assert not problem.is_consistent
    assert not is_valid(problem, Launch(128, 128, slots=3))


def test_arrays_come_in_the_order_of_the_operations() -> None:
    scaled = {"c_dtype": "float8_e5m2", "scale_dtype": "float8_e8m0fnu", "amax": True}
    assert AMAX.results == ("c", "amax")
    assert replace(SWIGLU, **scaled).results == ("pre", "c", "scales", "amax")  # type: ignore[arg-type]
    assert replace(SRELU, **scaled).results == ("pre", "c", "amax", "scales")  # type: ignore[arg-type]
    assert replace(DSRELU, **scaled).results == ("c", "dprob", "amax", "scales")  # type: ignore[arg-type]
    assert replace(DSRELU, **scaled).inputs == ("upstream", "prob", "norm_const")  # type: ignore[arg-type]
    assert (SWIGLU.inputs, SRELU.inputs) == ((), ("prob",))
    assert (SRELU.scratch, DSRELU.scratch) == ((), ("partials",))
    assert (Problem().scalars, SRELU.scalars) == ((), ("alpha",))


@pytest.mark.parametrize("major", ["n", "m"])
@pytest.mark.parametrize("dtype", [*STORED, "float4_e2m1fn"])
def test_cells_fit_into_buffers(dtype: str, major: str) -> None:
    problem = Problem(c_dtype=dtype, c_major=major)
    (sheet,) = problem.outputs
    assert sheet.cell_bytes <= CELL_BYTES
    assert sheet.line_bytes in (32, 64, 128)
    assert sheet.cell_bytes % sheet.line_bytes == 0


@pytest.mark.parametrize(("pre", "c"), list(product((None, *STORED), STORED)))
def test_the_pieces_of_a_tile_are_all_its_values(pre: str | None, c: str) -> None:
    """In cells of its own, a tile of 64 x 256 is 16384 values of X and half as many of C."""
    problem, launch = replace(SWIGLU, pre_dtype=pre, c_dtype=c), Launch(128, 256)
    values = {"pre": 64 * 256, "c": 64 * 128}
    wanted = sum(values[sheet.name] // (64 * sheet.cell_columns) for sheet in problem.outputs)
    assert cells(problem, launch) == wanted
    assert problem.strip == (1 if c == "float32" else 2)


def test_two_cells_of_accumulators_make_one_of_a_gated_result() -> None:
    assert is_valid(SWIGLU, Launch(128, 128, slots=3))
    assert not is_valid(SWIGLU, Launch(128, 192, slots=3))
    assert is_valid(replace(SWIGLU, c_dtype="float32"), Launch(128, 192, slots=3))


@pytest.mark.parametrize(
    ("problem", "tile_n", "valid"),
    [
        (QUANTISED, 128, True),
        (QUANTISED, 192, False),
        (replace(QUANTISED, scale_vector=16), 192, True),
        (replace(QUANTISED, epilogue="swiglu"), 128, False),
        (replace(QUANTISED, epilogue="swiglu"), 256, True),
    ],
)
def test_tiles_cover_whole_atoms_of_scales(problem: Problem, tile_n: int, valid: bool) -> None:
    """Of four scales: 128 columns of the result if 32 share one, 64 if 16 do."""
    assert is_valid(problem, Launch(128, tile_n, slots=3)) == valid


def test_few_registers_are_left_beside_large_accumulators() -> None:
    assert is_valid(Problem(), Launch(256, 192, slots=3))
    assert not is_valid(SRELU, Launch(256, 192, slots=3))


def test_shared_memory_of_an_upstream_matrix() -> None:
    """Two cells of 64 x 64 and two barriers for each warp group."""
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        problem = replace(DSRELU, upstream_dtype=dtype)
        assert problem.upstream == Sheet("upstream", dtype, "n")
        more = shared_bytes(problem, Launch()) - shared_bytes(SRELU, Launch())
        assert more == 2 * 2 * (64 * 64 * size + 8)
