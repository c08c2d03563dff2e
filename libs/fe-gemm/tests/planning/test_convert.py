"""How a conversion is launched: every vector has one thread, invalid launches are refused; what the split parts add up
to."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from split_floats import HARD, hard_floats, parts

from fe_gemm.planning.convert import (
    DTYPES,
    PARTS,
    Problem,
    candidates,
    choose,
    config,
    is_valid,
    split_config,
    workspace_shape,
)

PROBLEMS = [Problem(dtype, major, side) for dtype in DTYPES for major in "km" for side in "ab"]
FP8, FP32 = Problem(), Problem("float32")


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_choice_and_candidates_are_valid(problem: Problem) -> None:
    found = candidates(problem)
    assert found[0] == choose(problem)
    assert len(found) == len(set(found)) > 10
    assert all(is_valid(problem, launch) for launch in found)


@pytest.mark.parametrize("problem", [FP8, FP32], ids=str)
def test_each_line_of_a_block_has_one_owner(problem: Problem) -> None:
    for launch in candidates(problem):
        owners = Counter(
            repeat * launch.groups + group for repeat in range(launch.repeats) for group in range(launch.groups)
        )
        assert owners == dict.fromkeys(range(launch.lines), 1), launch
        assert launch.span * launch.groups == launch.threads * launch.vector


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(replace(FP8, dtype="bfloat16"), id="what needs no conversion"),
        pytest.param(replace(FP8, dtype="float4_e2m1fn"), id="what has scales"),
        pytest.param(replace(FP8, major="n"), id="unknown major"),
        pytest.param(replace(FP32, side="c"), id="unknown side"),
    ],
)
def test_other_operands_are_refused(problem: Problem) -> None:
    assert not is_valid(problem, choose(problem))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        pytest.param({"vector": 4}, FP8, id="vector narrower than a store"),
        pytest.param({"vector": 32}, FP8, id="vector that a line may end in"),
        pytest.param({"vector": 8}, FP32, id="vector of float32 that a line may end in"),
        pytest.param({"across": 24}, FP8, id="threads that no line has"),
        pytest.param({"threads": 48, "across": 16}, FP8, id="part of a warp"),
        pytest.param({"threads": 32, "across": 64}, FP8, id="less than a line"),
        pytest.param({"threads": 2048}, FP8, id="block too large"),
        pytest.param({"repeats": 0}, FP8, id="nothing to do"),
        pytest.param({"repeats": 9}, FP8, id="too much at once"),
    ],
)
def test_other_launches_are_refused(change: dict[str, int], problem: Problem) -> None:
    assert is_valid(problem, choose(problem))
    assert not is_valid(problem, replace(choose(problem), **change))


def test_workspace_keeps_the_major_and_rounds_the_pitch() -> None:
    assert workspace_shape(FP8, 300, 528, 2) == (600, 528)
    assert workspace_shape(replace(FP8, major="m"), 528, 300, 2) == (600, 528)
    assert workspace_shape(FP32, 3, 12, 2) == (6, 40)
    assert workspace_shape(replace(FP32, major="m"), 12, 5, 2) == (30, 16)


def test_configuration_is_reversible() -> None:
    for problem in PROBLEMS:
        assert split_config(dict(config(problem, choose(problem)))) == (problem, choose(problem))


# --- what the parts of float32 numbers are good for -----------------------------------------------------------------


def split_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return what the parts of each pair of numbers add up to, in float64."""
    left, right = (np.stack(parts(x, PARTS[side])).astype(np.float64) for x, side in ((a, "a"), (b, "b")))
    with np.errstate(all="ignore"):
        return (left[:, :, None] * right[:, None, :]).sum(0)


def test_products_of_parts_are_close() -> None:
    rng = np.random.default_rng(0)
    a, b = (x[np.isfinite(x) & (np.abs(x) > 2.0**-116)] for x in (hard_floats(rng, (600,)) for _ in range(2)))
    want = a.astype(np.float64)[:, None] * b.astype(np.float64)
    assert (np.abs(split_product(a, b) - want) <= 2.0**-15 * np.abs(want)).all()


def test_small_numbers_are_multiples_of_the_smallest_bf16() -> None:
    x = np.float32([2.0**-126, 1.1 * 2.0**-120, -5e-40, 2.0**-149, 2.0**-133, 2.0**-134])
    head, tail = (part.astype(np.float64) for part in parts(x, ("head", "tail")))
    assert (np.abs(head + tail - x) <= 2.0**-134).all()


def test_products_of_what_is_infinite_or_no_number_are_exact() -> None:
    values = np.concatenate([HARD, -HARD])
    with np.errstate(all="ignore"):
        want = values.astype(np.float64)[:, None] * values.astype(np.float64)
    got = split_product(values, values)
    special = ~np.isfinite(want)
    assert special.sum() > 200
    np.testing.assert_array_equal(got[special], want[special])
    assert np.isfinite(got[~special]).all()
