"""The building blocks of device code, value by value on a GPU, against exact references on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fe_runtime import compile as kernels
from fe_runtime.arrays import Device, capability
from fe_runtime.compile import KernelSpec, ToolchainError, resource_usage

BLOCKS = ["e4m3_hardware", "e4m3_software", "e2m1", "nvfp4_scale", "quotient", "sigmoid", "silu", "tanh"]
WIDENING = {
    "e4m3_hardware": ml_dtypes.float8_e4m3fn,
    "e4m3_software": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def builders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def spec(block: str, arch: str) -> KernelSpec:
    return KernelSpec.of("fe_test.blocks", "block_kernels_for_tests:build", arch, block=block)


def apply(block: str, x: np.ndarray[Any, Any], dtype: type[np.generic]) -> np.ndarray[Any, Any]:
    """Run a block over the rows of ``x``."""
    torch = pytest.importorskip("torch")
    try:
        run = kernels.load(spec(block, kernels.arch_for(capability(Device("cuda", 0)))))
    except ToolchainError as error:
        pytest.skip(f"the kernel is not stored, and {error}")
    out = torch.empty(len(x), dtype=torch.float32 if dtype is np.float32 else torch.int32, device="cuda")
    run(torch.from_numpy(np.ascontiguousarray(x.reshape(len(x), -1))).cuda(), out)
    return np.asarray(out.cpu().numpy())


def widen(block: str, codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return what a block makes of words of codes, as bits of bf16: a row for each word."""
    torch = pytest.importorskip("torch")
    arch = kernels.arch_for(capability(Device("cuda", 0)))
    try:
        run = kernels.load(widening_spec(block, arch))
    except ToolchainError as error:
        pytest.skip(f"the kernel is not stored, and {error}")
    out = torch.empty((len(codes), 4 if block == "e2m1" else 2), dtype=torch.int32, device="cuda")
    run(torch.from_numpy(codes.view(np.int32)).cuda(), out)
    return np.asarray(out.cpu().numpy()).view(np.uint16)


def widening_spec(block: str, arch: str) -> KernelSpec:
    return KernelSpec.of("fe_test.widening", "block_kernels_for_tests:build_widening", arch, block=block)


def patterns(count: int) -> np.ndarray[Any, Any]:
    """Every kind of float32: random bit patterns, of both signs, NaN, infinities and subnormals among them."""
    bits = RNG.integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32)
    special = np.array([0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 1, 0x807FFFFF], np.uint32)
    return np.concatenate([bits, special]).view(np.float32)


def around(points: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The points, their float32 neighbours, and all of them negative."""
    points = points.astype(np.float32)
    near = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))])
    return np.concatenate([near, -near])


def midpoints(dtype: Any, codes: int) -> np.ndarray[Any, Any]:
    """The finite values of a format and the midpoints between them."""
    values = np.arange(codes, dtype=np.uint8).view(dtype).astype(np.float32)
    return np.concatenate([values, (values[1:] + values[:-1]) / 2])


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("block", ["e4m3_software", "e2m1", "quotient"])
def test_blocks_compile_without_a_gpu(block: str, arch: str) -> None:
    (usage,) = resource_usage(spec(block, arch)).values()
    assert usage.frame_bytes == 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("block", ["e4m3_software", "e5m2", "e2m1", "e8m0", "product"])
def test_widening_compiles_without_a_gpu(block: str, arch: str) -> None:
    (usage,) = resource_usage(widening_spec(block, arch)).values()
    assert usage.frame_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("block", list(WIDENING))
def test_every_code_becomes_bf16_exactly(block: str) -> None:
    """In every position of a word, beside every other code."""
    words = RNG.integers(0, 2**32, 100_000, np.uint64).astype(np.uint32)
    codes = words.view(np.uint8)
    if block == "e2m1":
        codes = np.stack([codes & 15, codes >> 4], axis=1).reshape(-1)
    with np.errstate(invalid="ignore"):
        want = codes.view(WIDENING[block]).astype(np.float32).astype(ml_dtypes.bfloat16)
    got = widen(block, words).reshape(-1)
    right = np.where(np.isnan(want), (got & 0x7FFF) > 0x7F80, got == want.view(np.uint16))
    assert right.all(), np.unique(codes[~right])


@pytest.mark.gpu
def test_products_of_powers_of_two() -> None:
    """Exact while normal, infinite above, NaN with NaN; below, rounded or flushed."""
    low, high = (x.reshape(-1).astype(np.uint8) for x in np.meshgrid(np.arange(256), np.arange(256)))
    words = np.stack([low, low, high, high], axis=1).reshape(-1).view(np.uint32)
    e8m0 = ml_dtypes.float8_e8m0fnu
    with np.errstate(invalid="ignore", over="ignore"):
        want = low.view(e8m0).astype(np.float32) * high.view(e8m0).astype(np.float32)
        bits = want.astype(ml_dtypes.bfloat16).view(np.uint16)
    got = widen("product", words)[:, 0]
    right = np.where(np.isnan(want), (got & 0x7FFF) > 0x7F80, got == bits)
    right |= (want < 2.0**-126) & (got == 0)
    assert right.all(), np.unique(low[~right])


@pytest.mark.gpu
@pytest.mark.parametrize("block", ["e4m3_hardware", "e4m3_software"])
def test_e4m3(block: str) -> None:
    x = np.concatenate([patterns(1_000_000), around(midpoints(ml_dtypes.float8_e4m3fn, 127)), np.float32([464, 1e9])])
    with np.errstate(invalid="ignore"):
        want = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8).astype(np.int32)
    want[np.isnan(x)] = 0x7F
    if block == "e4m3_hardware":
        got = apply(block, np.stack([x, x[::-1]], 1), np.int32)
        assert (got >> 8 == want[::-1]).all()
        got = got & 0xFF
    else:
        got = apply(block, x, np.int32)
    assert (got == want).all()


@pytest.mark.gpu
def test_e2m1() -> None:
    points = np.array([0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 1e-30, 1e9])
    x = np.concatenate([around(points), RNG.normal(0, 3, 100_000).astype(np.float32)])
    x = x[: len(x) // 8 * 8]
    got = apply("e2m1", x.reshape(-1, 8), np.int32).view(np.uint32)
    codes = (got[:, None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
    thresholds, closed = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], [False, True, False, True, False, True, False]
    want = np.zeros(x.shape, np.uint32)
    for threshold, include in zip(thresholds, closed, strict=True):
        want += (np.abs(x) >= threshold) if include else (np.abs(x) > threshold)
    want |= np.signbit(x).astype(np.uint32) << 3
    assert (codes.reshape(-1) == want).all()


@pytest.mark.gpu
def test_nan_is_the_largest_e2m1_code() -> None:
    got = apply("e2m1", np.full((1, 8), np.nan, np.float32), np.int32).view(np.uint32)
    assert got[0] == 0x77777777


@pytest.mark.gpu
def test_nvfp4_scale_divides_exactly() -> None:
    a = np.concatenate([np.abs(patterns(1_000_000)), np.float32([0, 6, 6 * 2.0**-126, 1e-45, np.inf])])
    a = a[~np.isnan(a)]
    with np.errstate(under="ignore"):
        want = np.maximum(a / np.float32(6), np.float32(2.0**-126))
    got = apply("nvfp4_scale", a, np.float32)
    normal = a >= 2.0**-100
    assert (got[normal] == want[normal]).all()
    assert np.allclose(got[~normal], want[~normal], rtol=2.0**-22, atol=0)


@pytest.mark.gpu
def test_block_quotients() -> None:
    scale = np.exp2(RNG.uniform(-90, 90, 1_000_000)).astype(np.float32)
    y = (scale * RNG.uniform(-6, 6, scale.shape)).astype(np.float32)
    got = apply("quotient", np.stack([y, scale], 1), np.float32)
    assert (got == y / scale).mean() > 1 - 1e-6
    assert (np.abs(got - y / scale) <= np.spacing(np.abs(y / scale))).all()


@pytest.mark.gpu
def test_quotients_by_an_infinite_scale() -> None:
    y = np.float32([1, -1, 0, np.inf])
    got = apply("quotient", np.stack([y, np.full(4, np.inf, np.float32)], 1), np.float32)
    assert (got[:3] == 0).all()
    assert np.isnan(got[3])


@pytest.mark.gpu
@pytest.mark.parametrize("block", ["sigmoid", "silu"])
def test_activation_error_bound(block: str) -> None:
    z = np.concatenate([np.linspace(-86, 86, 1_000_001), RNG.normal(size=100_000)]).astype(np.float32)
    exact = 1 / (1 + np.exp(-z.astype(np.float64)))
    want = exact if block == "sigmoid" else z * exact
    error = np.abs(apply(block, z, np.float32) - want)
    # The stated bound, and half an ulp for the product.
    assert (error <= np.abs(want) * (2.0**-21 + np.abs(z) * 2.0**-23 + 2.0**-24)).all()


@pytest.mark.gpu
def test_tanh_error_bound() -> None:
    z = np.concatenate([np.linspace(-20, 20, 1_000_001), np.geomspace(1e-30, 1, 100_000), [0.25]]).astype(np.float32)
    want = np.tanh(z.astype(np.float64))
    assert (np.abs(apply("tanh", z, np.float32) - want) <= 2.0**-20 * np.abs(want)).all()
    got = apply("tanh", np.float32([-np.inf, np.inf, np.nan, -0.0]), np.float32)
    assert got[:2].tolist() == [-1, 1]
    assert np.isnan(got[2])
    assert np.signbit(got[3])


@pytest.mark.gpu
def test_silu_far_out() -> None:
    got = apply("silu", np.float32([-200, -np.inf, np.inf, 200, -0.0, np.nan]), np.float32)
    assert abs(got[0]) < 1e-35
    assert np.isnan(got[[1, 5]]).all()
    assert got[2] == np.inf
    assert got[3] == 200
    assert np.signbit(got[4])
