"""Distance of codes against the order of the numbers they stand for."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from fe_runtime.testing import code_distance
from fe_runtime.testing.codes import NAN_DISTANCE

FP8 = {name: np.dtype(getattr(ml_dtypes, name)) for name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")}
BYTES = np.arange(256, dtype=np.uint8)


@pytest.mark.parametrize("name", list(FP8))
def test_neighbouring_numbers_are_one_step_apart(name: str) -> None:
    values = BYTES.view(FP8[name]).astype(np.float64)
    ranked = np.unique(values[~np.isnan(values)])
    rank = {value: position for position, value in enumerate(ranked)}
    random = np.random.default_rng(0)
    for first, second in random.integers(0, 256, (500, 2)):
        found = code_distance(BYTES[[first]], BYTES[[second]], name).worst
        nan = np.isnan(values[[first, second]])
        if nan.any():
            assert found == (0 if nan.all() else NAN_DISTANCE)
        else:
            assert found == abs(rank[values[first]] - rank[values[second]])


def test_arrays_of_the_format_and_their_bytes_are_the_same() -> None:
    for name, kind in FP8.items():
        assert code_distance(BYTES.view(kind), BYTES, name).equal == 1.0


def test_share_worst_and_index() -> None:
    got = np.array([[0x10, 0x11], [0x12, 0x16]], np.uint8)
    want = np.array([[0x10, 0x11], [0x13, 0x13]], np.uint8)
    found = code_distance(got, want, "float8_e4m3fn")
    assert (found.equal, found.worst, found.index) == (0.5, 3, (1, 1))


def test_zeros_are_no_step_apart_but_not_equal() -> None:
    found = code_distance(np.array([0x80], np.uint8), np.array([0x00], np.uint8), "float8_e4m3fn")
    assert (found.equal, found.worst) == (0.0, 0)


def test_packed_fp4_low_half_first() -> None:
    got, want = np.array([[0x21, 0x43]], np.uint8), np.array([[0x21, 0x53]], np.uint8)
    found = code_distance(got, want, "float4_e2m1fn")
    assert (found.equal, found.worst, found.index) == (0.75, 1, (0, 3))
    assert code_distance(np.array([0x0F], np.uint8), np.array([0x07], np.uint8), "float4_e2m1fn").worst == 14


def test_packed_fp4_of_torch() -> None:
    torch = pytest.importorskip("torch")
    packed = torch.tensor([0x21, 0x43], dtype=torch.uint8)
    assert code_distance(packed.view(torch.float4_e2m1fn_x2), packed, "float4_e2m1fn").equal == 1.0


def test_what_is_no_code() -> None:
    with pytest.raises(ValueError, match="codes must be bytes"):
        code_distance(np.ones(2, np.float32), np.ones(2, np.float32), "float8_e4m3fn")
    with pytest.raises(AssertionError, match="shape"):
        code_distance(BYTES[:2], BYTES[:3], "float8_e4m3fn")
    assert code_distance(BYTES[:0], BYTES[:0], "float8_e4m3fn").equal == 1.0
