from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from fe_runtime import formats
from fe_runtime.errors import InvalidArgumentError

SIGNED = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")
FP8 = SIGNED[:2]


def as_pattern(x: np.ndarray) -> np.ndarray:
    """Bits of fp32 numbers, with one pattern for all NaN."""
    return np.where(np.isnan(x), 0x7FC00000, x.view(np.int32))


@pytest.mark.parametrize(
    ("name", "max_finite", "min_normal", "min_subnormal", "max_code"),
    [
        ("float8_e4m3fn", 448.0, 2.0**-6, 2.0**-9, 0x7E),
        ("float8_e5m2", 57344.0, 2.0**-14, 2.0**-16, 0x7B),
        ("float4_e2m1fn", 6.0, 1.0, 0.5, 0x7),
        ("float8_e8m0fnu", 2.0**127, 2.0**-127, 2.0**-127, 0xFE),
    ],
)
def test_element_facts(name: str, max_finite: float, min_normal: float, min_subnormal: float, max_code: int) -> None:
    kind = formats.element_type(name)
    assert (kind.name, kind.max_finite, kind.max_code) == (name, max_finite, max_code)
    assert (kind.min_normal, kind.min_subnormal) == (min_normal, min_subnormal)
    assert kind.bits == kind.signed + kind.exponent_bits + kind.mantissa_bits
    assert formats.decode(np.array([max_code], np.uint8), name)[0] == max_finite


def test_element_type_rejects_a_wide_type() -> None:
    with pytest.raises(InvalidArgumentError, match=r"element_type: dtype must be one of .*; got bfloat16"):
        formats.element_type("bfloat16")


@pytest.mark.parametrize("name", SIGNED)
def test_decode_every_code(framework: Any, model: Any, name: str) -> None:
    magnitudes = model.magnitudes(name)
    sign_bit = 8 if name == "float4_e2m1fn" else 0x80
    codes = np.arange(len(magnitudes), dtype=np.uint8)
    for sign, bit in ((1.0, 0), (-1.0, sign_bit)):
        values = framework.call(lambda c: formats.decode(c, name), codes | np.uint8(bit))
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values.view(np.int32), (sign * magnitudes).astype(np.float32).view(np.int32))


@pytest.mark.parametrize(
    ("name", "codes", "values"),
    [
        ("float8_e4m3fn", [0x7F, 0xFF], [np.nan, np.nan]),
        ("float8_e5m2", [0x7C, 0xFC, 0x7D, 0x7F, 0xFF], [np.inf, -np.inf, np.nan, np.nan, np.nan]),
        ("float8_e8m0fnu", [0, 1, 127, 254, 255], [2.0**-127, 2.0**-126, 1.0, 2.0**127, np.nan]),
        ("float4_e2m1fn", [0xF8, 0x37], [-0.0, 6.0]),  # the high nibble is ignored
    ],
)
def test_decode_specials(framework: Any, name: str, codes: list[int], values: list[float]) -> None:
    got = framework.call(lambda c: formats.decode(c, name), np.array(codes, np.uint8))
    np.testing.assert_array_equal(as_pattern(got), as_pattern(np.array(values, np.float32)))


def test_decode_e8m0_is_a_power_of_two(framework: Any) -> None:
    got = framework.call(lambda b: formats.decode(b, "float8_e8m0fnu"), np.arange(255, dtype=np.uint8))
    np.testing.assert_array_equal(got.view(np.int32), np.ldexp(np.float32(1), np.arange(-127, 128)).view(np.int32))


@pytest.mark.parametrize("name", [*FP8, "float8_e8m0fnu", "float4_e2m1fn"])
def test_decode_takes_the_dtype_of_a_numpy_array(name: str) -> None:
    codes = np.arange(16, dtype=np.uint8)
    typed = codes.view(getattr(ml_dtypes, name))
    np.testing.assert_array_equal(formats.decode(typed), typed.astype(np.float32))
    np.testing.assert_array_equal(formats.decode(codes, name), typed.astype(np.float32))


def test_decode_widens_bf16(framework: Any) -> None:
    # Every bf16 number, subnormals and NaN included.
    x = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    got = framework.call(formats.decode, x)
    np.testing.assert_array_equal(as_pattern(got), as_pattern(x.astype(np.float32)))


@pytest.mark.parametrize(
    ("dtype", "argument", "message"),
    [
        ("uint8", None, "dtype must be a floating-point type; got uint8"),
        ("float32", "float8_e4m3fn", "x must be float8_e4m3fn or its bytes; got dtype float32"),
    ],
)
def test_decode_rejects(dtype: str, argument: str | None, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        formats.decode(np.zeros(2, dtype), argument)


def neighbourhood(points: np.ndarray) -> np.ndarray:
    """Each fp32 point, the fp32 numbers just beside it, and all of that negated."""
    points = points.astype(np.float32)
    near = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))])
    return np.concatenate([near, -near])


@pytest.mark.parametrize("name", SIGNED)
def test_cast_at_every_value_and_midpoint(framework: Any, model: Any, name: str) -> None:
    values = model.magnitudes(name)
    middles = (values[:-1] + values[1:]) / 2
    assert (middles == middles.astype(np.float32)).all(), "the midpoints must be fp32 numbers for this test to bite"
    beyond = np.array([values[-1] * f for f in (1.01, 1.03125, 1.0625, 1.07142857, 2.0, 1e30)])
    x = neighbourhood(np.concatenate([values, middles, beyond]))
    np.testing.assert_array_equal(framework.call(lambda v: formats.cast(v, name), x), model.cast(x, name))


@pytest.mark.parametrize("name", SIGNED)
def test_cast_of_random_bits(framework: Any, model: Any, random_bits: np.ndarray, name: str) -> None:
    np.testing.assert_array_equal(
        framework.call(lambda v: formats.cast(v, name), random_bits), model.cast(random_bits, name)
    )


@pytest.mark.parametrize("name", SIGNED)
def test_cast_of_numbers_inside_the_range(framework: Any, model: Any, name: str) -> None:
    # Random bits seldom fall where the codes are dense.
    rng = np.random.default_rng(3)
    scale = np.float32(model.magnitudes(name)[-1])
    x = (rng.standard_normal(100_000, dtype=np.float32) * scale * 2.0 ** rng.integers(-12, 1, 100_000)).astype("f4")
    np.testing.assert_array_equal(framework.call(lambda v: formats.cast(v, name), x), model.cast(x, name))


@pytest.mark.parametrize("name", SIGNED)
def test_cast_specials(framework: Any, name: str) -> None:
    x = np.array([0.0, -0.0, 1e-45, -1e-45, np.inf, -np.inf, np.nan, -np.nan, 3.4e38], np.float32)
    top, sign, nan = {
        "float8_e4m3fn": (0x7E, 0x80, 0x7F),
        "float8_e5m2": (0x7B, 0x80, 0x7F),
        "float4_e2m1fn": (7, 8, 7),
    }[name]
    want = [0, sign, 0, sign, top, sign | top, nan, nan, top]
    assert framework.call(lambda v: formats.cast(v, name), x).tolist() == want


def test_cast_e2m1_ties(framework: Any) -> None:
    x = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    codes = framework.call(lambda v: formats.cast(v, "float4_e2m1fn"), x)
    assert formats.decode(codes, "float4_e2m1fn").tolist() == [0, 1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize("name", FP8)
def test_cast_agrees_with_ml_dtypes_after_clamping(random_bits: np.ndarray, name: str) -> None:
    limit = float(ml_dtypes.finfo(name).max)
    x = random_bits[np.isfinite(random_bits)]
    want = np.clip(x, -limit, limit).astype(getattr(ml_dtypes, name)).view(np.uint8)
    np.testing.assert_array_equal(formats.byte_view(formats.cast(x, name)), want)


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("wide", ["float16", "bfloat16"])
def test_cast_from_sixteen_bits(framework: Any, model: Any, name: str, wide: str) -> None:
    x = np.arange(2**16, dtype=np.uint16).view(np.float16 if wide == "float16" else ml_dtypes.bfloat16)
    with np.errstate(all="ignore"):
        want = model.cast(x.astype(np.float32), name)
    np.testing.assert_array_equal(framework.call(lambda v: formats.cast(v, name), x), want)


def test_cast_returns_the_frameworks_dtype(framework: Any) -> None:
    x = framework.array(np.ones((2, 3), np.float32))
    for name in (*FP8, "bfloat16", "float16", "float32"):
        assert framework.is_array(formats.cast(x, name), name)
    assert framework.is_array(formats.cast(x, "float4_e2m1fn"), "uint8")
    assert framework.is_array(formats.cast_fp8(x), "float8_e4m3fn")


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7)])
@pytest.mark.parametrize("name", SIGNED)
def test_cast_keeps_the_shape(framework: Any, shape: tuple[int, ...], name: str) -> None:
    x = np.full(shape, np.nan, np.float32)
    codes = framework.call(lambda v: formats.cast(v, name), x)
    assert codes.shape == shape
    assert framework.call(lambda c: formats.decode(c, name), codes).shape == shape


@pytest.mark.parametrize("name", SIGNED)
def test_cast_of_a_strided_view(name: str) -> None:
    x = np.random.default_rng(0).standard_normal((6, 8), dtype=np.float32)
    want = formats.byte_view(formats.cast(x.T[::2].copy(), name))
    np.testing.assert_array_equal(formats.byte_view(formats.cast(x.T[::2], name)), want)
    view = torch.from_numpy(x).T[::2]
    np.testing.assert_array_equal(formats.byte_view(formats.cast(view, name)).numpy(), want)


def test_cast_to_sixteen_bits_overflows_to_infinity(framework: Any) -> None:
    x = np.array([65519.0, 65520.0, -1e5, np.inf, -0.0, 1 + 2**-11], np.float32)
    half = framework.call(lambda v: formats.cast(v, "float16"), x)
    assert half.tolist() == [65504.0, np.inf, -np.inf, np.inf, -0.0, 1.0]
    x = np.array([3.4e38, -3.4e38, 1 + 2**-8, 1 + 3 * 2**-8], np.float32)
    brain = framework.call(lambda v: formats.cast(v, "bfloat16"), x)
    assert brain.astype(np.float32).tolist() == [np.inf, -np.inf, 1.0, 1 + 2**-6]


@pytest.mark.parametrize("make", [np.asarray, torch.asarray], ids=["numpy", "torch"])
def test_cast_rounds_fp64_to_fp32_first(make: Any) -> None:
    x = make(np.array([17 + 2**-40, -(17 + 2**-40)]))  # 17 is a midpoint of e4m3, and the nearest fp32 number
    assert np.asarray(formats.byte_view(formats.cast(x, "float8_e4m3fn"))).tolist() == [0x58, 0xD8]


def test_cast_detaches_from_autograd() -> None:
    x = torch.ones(4, requires_grad=True)
    for name in SIGNED:
        assert not formats.cast(x, name).requires_grad


@pytest.mark.parametrize("name", ["float8_e8m0fnu", "int8", "float64"])
def test_cast_rejects(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"formats.cast: dtype must be .* got {name}"):
        formats.cast(np.zeros(2, np.float32), name)


def test_cast_fp8_rejects_fp4() -> None:
    with pytest.raises(InvalidArgumentError, match="cast_fp8: dtype must be"):
        formats.cast_fp8(np.zeros(2, np.float32), "float4_e2m1fn")


def test_lists_are_not_arrays() -> None:
    with pytest.raises(TypeError, match="must be a numpy, torch or JAX array; got list"):
        formats.cast([1.0], "float8_e4m3fn")
