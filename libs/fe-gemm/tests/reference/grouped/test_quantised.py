"""Results quantised in both directions, and the order of column scales, against loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from naive_gemm import E4M3, E5M2
from naive_grouped import call, each_on_host, ends, expert_scales, quantised, row_scales

from fe_gemm.reference.grouped.quantised import both_ways, by_expert, of_all_experts

SIZES = [([0, 128, 0, 256, 128], 512), ([256, 128, 0, 40], 768), ([0, 0], 256), ([384], 384), ([1], 1)]


def blocked(scales: Any) -> Any:
    """Return scales (R, S) in the blocked layout (1, RT, CT, 32, 4, 4)."""
    rows, count = scales.shape
    return row_scales(scales).reshape(1, -(-rows // 128), -(-count // 4), 32, 4, 4)


@pytest.mark.parametrize(("sizes", "extent"), SIZES)
@pytest.mark.parametrize(("rows", "framework"), [*each_on_host([32, 300]), (300, "jit")])
def test_one_layout_for_each_expert_and_back(rows: int, sizes: list[int], extent: int, framework: str) -> None:
    off = ends(sizes)
    scales = np.random.default_rng(0).integers(1, 256, (rows, -(-extent // 32)), np.uint8)
    scales[:, -(-int(off[-1]) // 32) :] = 0
    (packed,) = call(_packed, framework, [blocked(scales), off], extent=extent)
    np.testing.assert_array_equal(packed.reshape(-1), expert_scales(scales, off, extent, 32))
    (back,) = call(_unpacked, framework, [packed.reshape(-1), off], extent=extent, rows=rows)
    np.testing.assert_array_equal(back, blocked(scales))


def _packed(scales: Any, off: Any, extent: int) -> list[Any]:
    return [by_expert(scales, off, extent)]


def _unpacked(packed: Any, off: Any, extent: int, rows: int) -> list[Any]:
    return [of_all_experts(packed, off, rows, extent)]


def _both_ways(x: Any, norm: Any, off: Any, dtype: str, norm_first: bool) -> list[Any]:
    found = both_ways(x, dtype, norm, off, x, norm_first=norm_first, discrete_col_sfd=False)
    return [found.d, found.d_col, found.sfd_row, found.sfd_col]


def sensitive() -> tuple[Any, float]:
    """Return numbers and a constant for which the order of the factors decides about a scale, by row and by column."""
    reciprocal = np.float32(1) / np.float32(448)
    for amax in np.arange(1, 2000, dtype=np.float32):
        n = np.float32(448) / amax
        if (np.float32(amax * reciprocal) * n <= 1) != (amax * np.float32(reciprocal * n) <= 1):
            x = np.random.default_rng(0).uniform(-amax, amax, (96, 64)).astype(np.float32)
            x[np.arange(96), np.arange(96) % 64] = amax  # in most blocks of either direction
            return x, float(n)
    raise AssertionError("no such constant")


@pytest.mark.parametrize(("dtype", "framework"), [*each_on_host([E4M3, E5M2, "bfloat16"]), (E4M3, "jit")])
def test_order_of_the_factors(dtype: str, framework: str) -> None:
    x, norm = sensitive()
    off = np.array([96], np.int32)
    for norm_first in (False, True):
        arrays = [x, np.array([norm], np.float32), off]
        d, d_col, row, col = call(_both_ways, framework, arrays, dtype=dtype, norm_first=norm_first)
        for got, scales, axis in ((d, row, 1), (d_col, col, 0)):
            codes, want = quantised(x, dtype, norm, axis, norm_first=norm_first and axis == 0)
            assert got.tobytes() == codes.tobytes()
            np.testing.assert_array_equal(scales.view(np.uint8).reshape(-1), row_scales(want if axis else want.T))
    one, other = (quantised(x, E4M3, norm, 0, norm_first=first)[1] for first in (False, True))
    assert (one != other).any()
