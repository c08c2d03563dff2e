"""How the product of a few block-scaled rows is spread over a Hopper GPU, and which launches are valid."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fe_gemm.planning.scaled_few_rows import (
    Launch,
    Problem,
    candidates,
    choose,
    config,
    is_valid,
    shared_bytes,
    split_config,
)

MXFP8 = Problem()
NVFP4 = Problem("float4_e2m1fn", "float8_e4m3fn", 16)
SHAPES = [(28672, 8192), (8192, 8192), (4096, 4096), (8192, 28672), (1024, 8192), (128, 128), (24576, 1536)]


@pytest.mark.parametrize("tokens", [16, 32, 48, 64])
@pytest.mark.parametrize("problem", [MXFP8, NVFP4], ids=str)
def test_candidates_are_valid(problem: Problem, tokens: int) -> None:
    problem = replace(problem, tokens=tokens)
    for n, k in SHAPES:
        found = candidates(problem, n, k, 132)
        assert found
        assert found[0] == choose(problem, n, k, 132)
        assert len(found) == len(set(found))
        assert all(is_valid(problem, launch) for launch in found)
        assert all(shared_bytes(problem, launch) <= 227 * 1024 for launch in found)


@pytest.mark.parametrize("problem", [MXFP8, NVFP4], ids=str)
@pytest.mark.parametrize(
    ("n", "k", "rows", "slices"),
    [
        pytest.param(28672, 8192, 224, 1, id="128 blocks, each once"),
        pytest.param(8192, 8192, 64, 1, id="narrow tiles"),
        pytest.param(4096, 4096, 32, 1, id="the narrowest"),
    ],
)
def test_every_multiprocessor_reads(problem: Problem, n: int, k: int, rows: int, slices: int) -> None:
    launch = choose(problem, n, k, 132)
    assert (launch.rows, launch.slices) == (rows, slices)


@pytest.mark.parametrize(
    ("rows", "atoms"), [(32, 1), (64, 1), (96, 2), (128, 1), (160, 2), (192, 2), (224, 3), (256, 2)]
)
def test_atoms_of_scales_that_rows_touch(rows: int, atoms: int) -> None:
    most = max((start % 128 + rows + 127) // 128 for start in range(0, 128 * rows, rows))
    assert Launch(rows).atoms == atoms == most


@pytest.mark.parametrize(
    ("problem", "launch"),
    [
        pytest.param(replace(MXFP8, tokens=24), Launch(), id="tokens in half a pair of blocks"),
        pytest.param(replace(MXFP8, tokens=80), Launch(), id="many tokens"),
        pytest.param(replace(NVFP4, vec=32), Launch(), id="unknown format"),
        pytest.param(replace(MXFP8, out_dtype="float8_e4m3fn"), Launch(), id="narrow product"),
        pytest.param(MXFP8, Launch(rows=208, row_warps=13), id="rows that are no quarters of an atom"),
        pytest.param(MXFP8, Launch(row_warps=8), id="rows that no warp has"),
        pytest.param(MXFP8, Launch(depth_warps=2), id="too many warps"),
        pytest.param(MXFP8, Launch(slots=8), id="too much shared memory"),
        pytest.param(MXFP8, Launch(slots=2), id="fewer slots than converters"),
        pytest.param(replace(MXFP8, tokens=64), Launch(slots=4), id="too few registers"),
    ],
)
def test_others_are_refused(problem: Problem, launch: Launch) -> None:
    assert is_valid(MXFP8, Launch())
    assert not is_valid(problem, launch)


def test_configuration_is_reversible() -> None:
    launch = Launch(64, 4, 2)
    assert split_config(dict(config(NVFP4, launch))) == (NVFP4, launch)
