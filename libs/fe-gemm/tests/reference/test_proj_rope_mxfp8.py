"""The reference of ``gemm_proj_rope_mxfp8`` against plain loops with decoders of their own."""

from __future__ import annotations

import functools
from typing import Any

import jax
import naive_proj_rope as naive
import numpy as np
import pytest
from naive_gemm import E4M3, VALUES

from fe_gemm.reference.proj_rope_mxfp8 import gemm_proj_rope_mxfp8
from fe_runtime.testing import to_framework, to_numpy

FRAMEWORKS = ("numpy", "torch", "jax")
both_precisions = pytest.mark.parametrize("scaled", [False, True], ids=["bf16", "e4m3"])
every_framework = pytest.mark.parametrize("framework", FRAMEWORKS)


def run(arrays: Any, framework: str = "numpy", **options: Any) -> tuple[Any, ...]:
    """Bytes of the outputs."""
    given = [None if array is None else to_framework(array, framework) for array in arrays]
    return as_bytes(gemm_proj_rope_mxfp8(*given, **options))


def as_bytes(outputs: Any) -> tuple[Any, ...]:
    return tuple(to_numpy(output).view(np.uint8) for output in outputs)


def assert_same(got: Any, want: Any) -> None:
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@both_precisions
@every_framework
def test_small_integers_are_byte_exact(framework: str, scaled: bool) -> None:
    case = naive.inputs(64, 96, 2, scaled, whole=True)
    want = naive.outputs(*case.exact)
    assert len(np.unique(want[0])) > 60
    assert_same(run(case.arrays, framework), want)
    assert_same(run(case.turned(), framework, w_out_in=False), want)


@both_precisions
@pytest.mark.parametrize(("tokens", "depth", "heads"), [(160, 96, 3), (32, 1536, 1), (64, 32, 2)])
def test_values_within_the_tolerance(tokens: int, depth: int, heads: int, scaled: bool) -> None:
    case = naive.inputs(tokens, depth, heads, scaled, seed=depth)
    naive.check_within_tolerance(run(case.arrays), *case.exact)


@both_precisions
def test_what_is_allowed_leaves_no_room_for_mistakes(scaled: bool) -> None:
    case = naive.inputs(32, 64, 1, scaled, seed=3)
    x, w, cos, sin = case.exact
    for wrong in ((x, w, sin, cos), (x, w, cos, -sin), (x, np.roll(w, 1, axis=0), cos, sin), (1.2 * x, w, cos, sin)):
        with pytest.raises(AssertionError):
            naive.check_within_tolerance(run(case.arrays), *wrong)


@both_precisions
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_frameworks_agree_where_no_sum_is_rounded(framework: str, scaled: bool) -> None:
    case = naive.inputs(32, 64, 2, scaled, whole=True, seed=5)
    assert_same(run(case.arrays, framework), run(case.arrays))


@both_precisions
def test_frameworks_differ_by_the_order_of_the_sums_only(scaled: bool) -> None:
    """A sum near the middle of two bf16 numbers may be rounded either way: few codes move, and by one step."""
    case = naive.inputs(64, 256, 2, scaled, seed=6)
    want = run(case.arrays)
    for framework in ("torch", "jax"):
        got = run(case.arrays, framework)
        for at in (1, 3):
            assert (np.abs(got[at].astype(int) - want[at]) <= 1).all()
            assert (got[at] != want[at]).mean() < 0.002
        assert max((got[at] != want[at]).mean() for at in (0, 2)) < 0.002


@both_precisions
def test_jit_gives_the_same_bytes(scaled: bool) -> None:
    """Also the rounding to bf16, which a compiler could take for superfluous."""
    case = naive.inputs(64, 96, 2, scaled, seed=7)
    arrays = [None if array is None else to_framework(array, "jax") for array in case.arrays]
    assert_same(as_bytes(jax.jit(gemm_proj_rope_mxfp8)(*arrays)), run(case.arrays, "jax"))
    turned = [None if array is None else to_framework(array, "jax") for array in case.turned()]
    function = jax.jit(functools.partial(gemm_proj_rope_mxfp8, w_out_in=False))
    assert_same(as_bytes(function(*turned)), run(case.arrays, "jax"))


@both_precisions
@every_framework
def test_both_orders_of_the_weight_give_the_same_bytes(framework: str, scaled: bool) -> None:
    case = naive.inputs(32, 64, 1, scaled, whole=True, seed=8)
    assert_same(run(case.turned(), framework, w_out_in=False), run(case.arrays, framework))


def test_sums_in_float64_are_rounded_once() -> None:
    case = naive.inputs(32, 320, 1, seed=9)
    assert_same(run(case.arrays, accumulate="float64"), naive.outputs(*case.exact))


@every_framework
def test_y_is_rounded_to_bf16(framework: str) -> None:
    """257 becomes 256, 259 becomes 260, 449 becomes 448: ties to even. 449 itself would need a larger scale."""
    x = np.zeros((32, 8), naive.BF16)
    w = np.zeros((192, 8), naive.BF16)
    x[:, 0], x[:, 1] = 1, 1
    w[:, 0], w[0, 1], w[1, 1], w[2, 0], w[2, 1] = 256, 1, 3, 448, 1
    ones, zeros = np.ones((32, 64), naive.BF16), np.zeros((32, 64), naive.BF16)
    row, row_scales, _, column_scales = run((x, w, ones, zeros, None, None), framework)
    assert row[0, 0, :3].tolist() == [0x78, 0x78, 0x7E]  # 256, 260 -> 256, 449 -> 448
    assert row_scales[0, 0, 0] == 127
    assert column_scales[0, 0, 2] == 127


@every_framework
def test_rotated_values_are_not_rounded_to_bf16(framework: str) -> None:
    """17 + 2^-6 lies just above the middle of two e4m3 numbers; bf16 would bring it back to the middle."""
    x = np.zeros((32, 8), naive.BF16)
    w = np.zeros((192, 8), naive.BF16)
    x[:, 0] = 1
    w[128, 0], w[129, 0], w[130, 0] = 17, 2.0**-6, 448
    cos, sin = np.ones((32, 64), naive.BF16), np.full((32, 64), -1, naive.BF16)
    row, row_scales, column, column_scales = run((x, w, cos, sin, None, None), framework)
    assert row_scales[0, 0, 4] == 127
    assert VALUES[E4M3][row[0, 0, 128]] == 18  # 17 is the middle of 16 and 18: alone it goes to 16
    assert column_scales[0, 0, 128] == 127 - 4
    assert VALUES[E4M3][column[0, 0, 128]] * 2.0**-4 == 18


@both_precisions
@every_framework
def test_blocks_of_zeros_have_byte_zero(framework: str, scaled: bool) -> None:
    case = naive.inputs(64, 32, 2, scaled, whole=True, seed=10)
    case.x[:32] = 0
    case.w[192 + 64 : 192 + 96] = 0
    row, row_scales, column, column_scales = run(case.arrays, framework)
    assert (row_scales[:32] == 0).all()
    assert (row_scales[:, 1, 2] == 0).all()
    assert (column_scales[0] == 0).all()
    assert (column_scales[:, 1, 64:96] == 0).all()
    assert (row[:32] & 0x7F == 0).all()
    assert (column[:, 1, 64:96] & 0x7F == 0).all()


@every_framework
def test_nan_stays_in_its_token_and_leaves_its_blocks_their_scales(framework: str) -> None:
    case = naive.inputs(64, 32, 1, whole=True, seed=11)
    clean = run(case.arrays, framework)
    case.x[40, 3] = np.nan
    row, row_scales, column, column_scales = run(case.arrays, framework)
    others = np.arange(64) != 40
    assert (row[40] == 0x7F).all()
    assert (column[40] == 0x7F).all()
    assert (row_scales[40] == 0).all()
    assert_same((row[others], row_scales[others]), (clean[0][others], clean[1][others]))
    assert_same((column[:32], column_scales[0]), (clean[2][:32], clean[3][0]))


@every_framework
def test_a_nan_scale_makes_its_feature_nan(framework: str) -> None:
    case = naive.inputs(32, 64, 1, scaled=True, whole=True, seed=12)
    case.w_scale[5, 1] = 255
    row, _, column, _ = run(case.arrays, framework)
    assert (row[:, 0, 5] == 0x7F).all()
    assert (column[:, 0, 5] == 0x7F).all()
    assert (np.delete(row, 5, axis=2) != 0x7F).all()


@both_precisions
@every_framework
def test_no_tokens(framework: str, scaled: bool) -> None:
    case = naive.inputs(0, 32, 2, scaled)
    shapes = [output.shape for output in run(case.arrays, framework)]
    assert shapes == [(0, 2, 192), (0, 2, 6), (0, 2, 192), (0, 2, 192)]
