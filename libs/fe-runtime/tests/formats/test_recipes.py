from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from fe_runtime import formats
from fe_runtime.errors import InvalidArgumentError

LIMITS = {"float8_e4m3fn": 448, "float8_e5m2": 57344, "float4_e2m1fn": 6}
FLT_MAX, FLT_MIN = Fraction(2) ** 128 - Fraction(2) ** 104, Fraction(2) ** -126
FORMATS = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")
E4M3, E5M2, E2M1 = FORMATS


def blocks(extent: int, vec: int) -> np.ndarray:
    """fp32 rows of ``extent`` whose blocks span every magnitude, subnormal to large, with zeros of both signs."""
    rng = np.random.default_rng(extent + vec)
    count = -(-extent // vec)
    exponents = np.repeat(rng.integers(-149, 118, (24, count)), vec, axis=1)[:, :extent]
    x = (rng.uniform(-2, 2, exponents.shape) * 2.0**exponents).astype(np.float32)
    x[rng.random(x.shape) < 0.1] = 0
    x[3] = 0
    x[4] = -0.0
    # The ends of e8m0: amax / limit around 2**-127 and 2**-126, where products are subnormal.
    for row, exponent in enumerate((-128, -127, -126, -125), start=5):
        x[row] = (rng.uniform(-1, 1, extent) * 2.0**exponent * (448 if row % 2 else 6)).astype(np.float32)
    return x


def quotients(block: np.ndarray, divisor: Fraction, model: Any) -> list[Fraction]:
    return [model.fp32(Fraction(float(v)) / divisor) for v in block]


def products(block: np.ndarray, factor: Fraction, model: Any) -> list[Fraction]:
    return [model.fp32(Fraction(float(v)) * factor) for v in block]


def codes_of(values: list[Fraction], block: np.ndarray, name: str, model: Any) -> np.ndarray:
    """CAST of exact fp32 values, which may pass the fp32 range; the sign of a zero is that of the element."""
    with np.errstate(over="ignore"):
        magnitude = np.array([float(abs(v)) for v in values]).astype(np.float32)
    return model.cast(np.copysign(magnitude, block), name)


def reciprocal(limit: int, model: Any) -> Fraction:
    return model.fp32(Fraction(1, limit))


def e4m3_code(p: Fraction, model: Any) -> int:
    return int(model.cast(np.array([float(min(p, FLT_MAX))], np.float32), E4M3)[0])


def expect(x: np.ndarray, vec: int, rule: Callable[[Fraction, np.ndarray], tuple[int, np.ndarray]]) -> Any:
    """Apply ``rule(amax, block) -> (scale code, codes)`` to each block of the last dimension of a matrix."""
    scales, codes = [], np.zeros(x.shape, np.uint8)
    for row in range(len(x)):
        for start in range(0, x.shape[1], vec):
            block = x[row, start : start + vec]
            scale, codes[row, start : start + vec] = rule(max(Fraction(float(abs(v))) for v in block), block)
            scales.append(scale)
    return codes, np.array(scales).reshape(len(x), -1)


def element_codes(elements: np.ndarray, name: str) -> np.ndarray:
    return formats.unpack_fp4(elements) if name == E2M1 else elements


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("extent", "vec"), [(64, 32), (70, 32), (6, 32), (40, 16)])
def test_mx_is_bit_exact(framework: Any, model: Any, name: str, extent: int, vec: int) -> None:
    def rule(amax: Fraction, block: np.ndarray) -> tuple[int, np.ndarray]:
        byte = model.e8m0_up(model.fp32(amax * reciprocal(LIMITS[name], model)))
        return byte, codes_of(products(block, Fraction(2) ** (127 - byte), model), block, name, model)

    x = blocks(extent, vec)
    elements, scales = framework.call(lambda v: formats.quantize_mx(v, name, vec=vec), x)
    codes, bytes_ = expect(x, vec, rule)
    np.testing.assert_array_equal(scales, bytes_)
    np.testing.assert_array_equal(element_codes(elements, name), codes)


@pytest.mark.parametrize(
    ("name", "scale_name", "vec"),
    [(E4M3, "float8_e8m0fnu", 32), (E5M2, "float8_e8m0fnu", 32), (E2M1, "float8_e8m0fnu", 16), (E2M1, E4M3, 16)],
)
@pytest.mark.parametrize(("norm", "norm_first"), [(1.0, False), (0.0123, False), (3.3e7, False), (0.0123, True)])
def test_nc_is_bit_exact(
    framework: Any, model: Any, name: str, scale_name: str, vec: int, norm: float, norm_first: bool
) -> None:
    n = Fraction(float(np.float32(norm)))
    rcp = reciprocal(128 if name == E5M2 else LIMITS[name], model)

    def rule(amax: Fraction, block: np.ndarray) -> tuple[int, np.ndarray]:
        p = model.fp32(amax * model.fp32(rcp * n)) if norm_first else model.fp32(model.fp32(amax * rcp) * n)
        if scale_name == E4M3:
            code = e4m3_code(p, model)
            scale = Fraction(float(model.magnitudes(E4M3)[code]))
        else:
            code = model.e8m0_up(p)
            scale = Fraction(2) ** (code - 127)
        factor = min(model.fp32(n * model.fp32(1 / scale)), FLT_MAX) if scale else FLT_MAX
        return code, codes_of(products(block, factor, model), block, name, model)

    def quantize(v: Any, norm_const: Any) -> Any:
        return formats.quantize_nc(v, name, norm_const, scale_dtype=scale_name, vec=vec, norm_first=norm_first)

    x = blocks(38, vec)
    elements, scales = framework.call(quantize, x, np.array([norm], np.float32))
    codes, bytes_ = expect(x, vec, rule)
    np.testing.assert_array_equal(scales, bytes_)
    np.testing.assert_array_equal(element_codes(elements, name), codes)


def test_nc_takes_the_factor_as_a_number_or_an_array(framework: Any) -> None:
    x = np.random.default_rng(9).standard_normal((4, 64), dtype=np.float32)
    number = framework.call(lambda v: formats.quantize_nc(v, E4M3, 0.37), x)
    array = framework.call(lambda v, n: formats.quantize_nc(v, E4M3, n), x, np.array([0.37], np.float32))
    np.testing.assert_array_equal(number[0], array[0])
    np.testing.assert_array_equal(number[1], array[1])


def test_nv_is_bit_exact(framework: Any, model: Any) -> None:
    def rule(amax: Fraction, block: np.ndarray) -> tuple[int, np.ndarray]:
        code = e4m3_code(max(model.fp32(amax * reciprocal(6, model)), Fraction(1, 512)), model)
        scale = Fraction(float(model.magnitudes(E4M3)[code]))
        return code, codes_of(quotients(block, scale, model), block, E2M1, model)

    rng = np.random.default_rng(5)
    grid = rng.integers(-7, 8, (40, 38)) * 2.0 ** rng.integers(-6, 3, (40, 1))  # many exact midpoints
    x = np.concatenate([blocks(38, 16), grid.astype(np.float32)])
    elements, scales = framework.call(formats.quantize_nv, x)
    codes, bytes_ = expect(x, 16, rule)
    np.testing.assert_array_equal(scales, bytes_)
    np.testing.assert_array_equal(element_codes(elements, E2M1), codes)


def test_nvfp4_norm_is_bit_exact(framework: Any, model: Any) -> None:
    def rule(amax: Fraction, block: np.ndarray) -> tuple[int, np.ndarray]:
        q = max(model.fp32(amax / 6), FLT_MIN)
        return e4m3_code(q, model), codes_of(quotients(block, q, model), block, E2M1, model)

    # Random maxima with members beside the seven decision points, where one ulp of q flips a code.
    rng = np.random.default_rng(6)
    amax = rng.uniform(1, 2, (60, 1)) * 2.0 ** rng.integers(-140, 9, (60, 1))
    points = np.array([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    near = (amax * points / 6).astype(np.float32)
    near[:, 1:] = np.nextafter(near[:, 1:], rng.choice([-1e9, 0, 1e9], near[:, 1:].shape).astype(np.float32))
    middles = near.copy()
    middles[:, 1:] = (amax * points / 6)[:, 1:]
    x = np.concatenate([blocks(16, 16), np.concatenate([near, -middles], axis=1)])
    elements, scales = framework.call(formats.quantize_nvfp4_norm, x)
    codes, bytes_ = expect(x, 16, rule)
    np.testing.assert_array_equal(scales, bytes_)
    np.testing.assert_array_equal(element_codes(elements, E2M1), codes)


QUANTIZERS: dict[str, Callable[[Any], Any]] = {
    "mx-e4m3": lambda v: formats.quantize_mx(v, E4M3),
    "mx-e5m2": lambda v: formats.quantize_mx(v, E5M2),
    "mx-e2m1": lambda v: formats.quantize_mx(v, E2M1),
    "nc-e4m3": lambda v: formats.quantize_nc(v, E4M3, 0.37),
    "nc-nan": lambda v: formats.quantize_nc(v, E5M2, 0.37, propagate_nan=True),
    "nc-nvfp4": lambda v: formats.quantize_nc(v, E2M1, 0.37, scale_dtype=E4M3, vec=16),
    "nv": formats.quantize_nv,
    "nvfp4-norm": formats.quantize_nvfp4_norm,
    "columns": lambda v: formats.quantize_mx(v, E4M3, axis=0),
}


def assert_like_numpy(framework: Any, quantizer: Callable[[Any], Any], x: np.ndarray) -> None:
    elements, scales = quantizer(x)
    got = framework.call(quantizer, x)
    np.testing.assert_array_equal(got[0], formats.byte_view(elements))
    np.testing.assert_array_equal(got[1], formats.byte_view(scales))


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_frameworks_agree_on_any_bits(framework: Any, random_bits: np.ndarray, quantizer: str) -> None:
    assert_like_numpy(framework, QUANTIZERS[quantizer], random_bits.reshape(-1, 80))


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_frameworks_agree_on_normal_data(framework: Any, quantizer: str) -> None:
    x = np.random.default_rng(11).standard_normal((500, 264), dtype=np.float32)
    assert_like_numpy(framework, QUANTIZERS[quantizer], x)
    assert_like_numpy(framework, QUANTIZERS[quantizer], x.astype(ml_dtypes.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_cuda_agrees_with_numpy(torch_cuda: Any, random_bits: np.ndarray, quantizer: str) -> None:
    assert_like_numpy(torch_cuda, QUANTIZERS[quantizer], random_bits.reshape(-1, 80))
    x = np.random.default_rng(11).standard_normal((500, 264), dtype=np.float32)
    assert_like_numpy(torch_cuda, QUANTIZERS[quantizer], x)


MX_CHECK_VALUES = {
    E4M3: {0.0: 0, 1.0: 119, 447.99997: 127, 448.0: 127, 448.00003: 128, 896.0: 128, 1e30: 218, 3.4028235e38: 247},
    E2M1: {3.0: 126, 6.0: 127, 6.0000005: 128, 13.0: 129},
}


@pytest.mark.parametrize("name", MX_CHECK_VALUES)
def test_mx_check_values(framework: Any, name: str) -> None:
    values = {**MX_CHECK_VALUES[name], np.inf: 254}
    x = np.zeros((len(values), 32), np.float32)
    x[:, 5] = [-amax for amax in values]
    _, scales = framework.call(lambda v: formats.quantize_mx(v, name), x)
    assert scales[:, 0].tolist() == list(values.values())


@pytest.mark.parametrize(
    ("factor", "byte", "start"),
    [
        (1.0, 127, "00 38 b8 45 d0 6c f5 7e 00 05 0a 0f 12 15 17 19"),
        (1.01, 128, "00 30 b0 3d c8 65 ed 76 00 03 05 08"),
    ],
)
def test_mx_check_row(framework: Any, factor: float, byte: int, start: str) -> None:
    row = np.array([0, 1, -1, 3.3, -7.9, 100, -200.5, 447, *(0.01 * i for i in range(24))], np.float32)
    elements, scales = framework.call(lambda v: formats.quantize_mx(v, E4M3), row * np.float32(factor))
    assert scales.tolist() == [byte]
    assert elements.tobytes().hex(" ").startswith(start)


def test_nv_check_values(framework: Any) -> None:
    values = {0: 0x01, 0.02: 0x02, 0.5: 0x1B, 1: 0x23, 6: 0x38, 2688: 0x7E, 2700: 0x7E, 3000: 0x7E}
    x = np.zeros((len(values), 16), np.float32)
    x[:, -1] = list(values)
    assert framework.call(formats.quantize_nv, x)[1][:, 0].tolist() == list(values.values())


def test_nv_divides(framework: Any) -> None:
    # 0.5859375 / 0.46875 is the midpoint 1.25, which goes to 1; a product with the reciprocal lies beside it.
    x = np.zeros(16, np.float32)
    x[:2] = 2.8, 0.5859375
    elements, scales = framework.call(formats.quantize_nv, x)
    assert formats.decode(scales, E4M3).tolist() == [0.46875]
    assert elements[0] == 0x27


def test_zero_blocks(framework: Any) -> None:
    x = np.array([0.0, -0.0] * 16, np.float32)
    elements, scales = framework.call(lambda v: formats.quantize_mx(v, E4M3), x)
    assert (elements[:2].tolist(), scales.tolist()) == ([0, 0x80], [0])
    elements, scales = framework.call(formats.quantize_nv, x)
    assert (elements[0], scales.tolist()) == (0x80, [1, 1])
    elements, scales = framework.call(lambda v: formats.quantize_nc(v, E2M1, 1.0, scale_dtype=E4M3, vec=16), x)
    assert (elements[0], scales.tolist()) == (0x80, [0, 0])


def test_nc_with_a_scale_that_rounds_to_zero(framework: Any) -> None:
    x = np.array([2.0**-9, -(2.0**-9)] * 8, np.float32)  # p = 2**-9 / 6 < 2**-10
    elements, scales = framework.call(lambda v: formats.quantize_nc(v, E2M1, 1.0, scale_dtype=E4M3, vec=16), x)
    assert (set(elements.tolist()), scales.tolist()) == ({0xF7}, [0])
    values = framework.call(formats.dequantize, elements, scales.view(ml_dtypes.float8_e4m3fn))
    assert (values == 0).all()


def test_nc_to_sixteen_bits_has_no_limit(framework: Any) -> None:
    x = np.array([3.0, -1.0, 0.1, 0.0] * 8, np.float32)
    elements, scales = framework.call(lambda v: formats.quantize_nc(v, "bfloat16", 2.0), x)
    assert scales.tolist() == [130]  # 3 * 2 goes up to 8
    np.testing.assert_array_equal(elements, (x / 4).astype(ml_dtypes.bfloat16))


def test_nan_is_left_out_of_the_maximum(framework: Any) -> None:
    x = np.ones((1, 64), np.float32)
    x[0, 3] = np.nan
    x[0, 32:] = np.nan
    for quantizer in (lambda v: formats.quantize_mx(v, E4M3), lambda v: formats.quantize_nc(v, E4M3, 1.0)):
        elements, scales = framework.call(quantizer, x)
        assert scales.tolist() == [[119, 0]]
        assert elements[0, :4].tolist() == [0x78, 0x78, 0x78, 0x7F]
        assert (elements[0, 32:] == 0x7F).all()


def test_nan_wins_on_request(framework: Any) -> None:
    x = np.ones((2, 64), np.float32)
    x[0, 3] = -np.nan
    elements, scales = framework.call(lambda v: formats.quantize_nc(v, E4M3, 1.0, propagate_nan=True), x)
    assert scales.tolist() == [[255, 119], [119, 119]]
    assert (elements[0, :32] == 0x7F).all()
    assert (elements[0, 32:] == 0x78).all()


def test_norm_quantizer_specials(framework: Any) -> None:
    x = np.zeros((6, 16), np.float32)
    x[0, :3] = np.nan, 6.0, -0.1  # NaN gets code 7 and does not count; -0.1 rounds to code 8
    x[1, :3] = np.inf, 5.0, -np.inf
    x[2, 0] = 6 * 2.0**-10  # a tie to even: scale 0
    x[3, 0] = np.nextafter(np.float32(6 * 2.0**-10), np.float32(1))
    x[4, 0] = 2.0**-127  # the floor FLT_MIN: quotient 0.5
    x[5, :2] = 2688.0, 3000.0
    elements, scales = framework.call(formats.quantize_nvfp4_norm, x)
    codes = formats.unpack_fp4(elements)
    assert scales[:, 0].tolist() == [0x38, 0x7E, 0, 1, 0, 0x7E]
    assert codes[0, :4].tolist() == [7, 7, 8, 0]
    assert codes[1, :4].tolist() == [7, 0, 7, 0]
    assert codes[2:, 0].tolist() == [7, 7, 1, 7]


def test_blocks_along_columns(framework: Any) -> None:
    x = np.random.default_rng(1).standard_normal((70, 6), dtype=np.float32)
    elements, scales = framework.call(lambda v: formats.quantize_mx(v, E5M2, axis=0), x)
    rows, row_scales = formats.quantize_mx(np.ascontiguousarray(x.T), E5M2)
    assert scales.shape == (3, 6)
    np.testing.assert_array_equal(elements, formats.byte_view(rows).T)
    np.testing.assert_array_equal(scales, formats.byte_view(row_scales).T)
    # FP4 stays packed along the last dimension.
    packed, _ = framework.call(lambda v: formats.quantize_mx(v, E2M1, axis=-2), x)
    wanted = formats.unpack_fp4(formats.byte_view(formats.quantize_mx(np.ascontiguousarray(x.T), E2M1)[0]))
    np.testing.assert_array_equal(formats.unpack_fp4(packed), wanted.T)


def test_the_padding_of_a_partial_block_has_no_influence(framework: Any) -> None:
    x = np.random.default_rng(2).standard_normal((3, 40), dtype=np.float32)
    whole, whole_scales = framework.call(lambda v: formats.quantize_mx(v, E4M3), np.pad(x, ((0, 0), (0, 24))))
    part, part_scales = framework.call(lambda v: formats.quantize_mx(v, E4M3), x)
    np.testing.assert_array_equal(part, whole[:, :40])
    np.testing.assert_array_equal(part_scales, whole_scales)


@pytest.mark.parametrize("shape", [(0,), (0, 32), (3, 0), (2, 0, 4)])
@pytest.mark.parametrize("quantizer", [q for q in QUANTIZERS if q != "columns"])
def test_empty(framework: Any, shape: tuple[int, ...], quantizer: str) -> None:
    elements, scales = framework.call(QUANTIZERS[quantizer], np.zeros(shape, np.float32))
    assert elements.size == 0
    assert scales.shape[:-1] == shape[:-1]


def test_returned_dtypes(framework: Any) -> None:
    x = framework.array(np.ones((2, 64), np.float32))
    pairs = "float4_e2m1fn_x2" if framework.name == "torch" else "uint8"
    for elements, element_dtype, scales, scale_dtype in (
        (*formats.quantize_mx(x, E4M3)[:1], E4M3, formats.quantize_mx(x, E4M3)[1], "float8_e8m0fnu"),
        (*formats.quantize_mx(x, E2M1)[:1], pairs, formats.quantize_mx(x, E2M1)[1], "float8_e8m0fnu"),
        (*formats.quantize_nv(x)[:1], pairs, formats.quantize_nv(x)[1], E4M3),
        (*formats.quantize_nvfp4_norm(x)[:1], pairs, formats.quantize_nvfp4_norm(x)[1], E4M3),
    ):
        assert framework.is_array(elements, element_dtype)
        assert framework.is_array(scales, scale_dtype)


def test_results_are_contiguous() -> None:
    x = torch.randn(6, 70)
    for view in (x, x.T, x[:, :38], torch.randn(6, 140)[:, ::2]):
        for elements, scales in (formats.quantize_mx(view, E4M3), formats.quantize_mx(view, E4M3, axis=0)):
            assert elements.is_contiguous()
            assert scales.is_contiguous()
        assert formats.dequantize(*formats.quantize_mx(view, E4M3)).is_contiguous()


@pytest.mark.parametrize(
    ("quantizer", "vec"), [("mx-e4m3", 32), ("mx-e5m2", 32), ("mx-e2m1", 32), ("nv", 16), ("columns", 32)]
)
def test_dequantize_is_value_times_scale(framework: Any, model: Any, quantizer: str, vec: int) -> None:
    axis = 0 if quantizer == "columns" else -1
    x = blocks(70, vec)
    elements, scales = QUANTIZERS[quantizer](framework.array(x))
    got = framework.numpy(formats.dequantize(elements, scales, axis=axis))
    name = {"mx-e5m2": E5M2, "mx-e2m1": E2M1, "nv": E2M1}.get(quantizer, E4M3)
    codes = element_codes(framework.numpy(elements), name).astype(int)
    top = 8 if name == E2M1 else 0x80
    values = np.where(codes & top, -1.0, 1.0) * model.magnitudes(name)[codes & (top - 1)]
    if quantizer == "nv":
        factors = model.magnitudes(E4M3)[framework.numpy(scales)]
    else:
        factors = 2.0 ** (framework.numpy(scales).astype(int) - 127)
    want = (values * np.repeat(factors, vec, axis=axis)[: len(x), :70]).astype(np.float32)
    np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32))


@pytest.mark.parametrize(
    ("quantizer", "mantissa_bits", "half_step"),
    [
        ("mx-e4m3", 3, 2.0**-10),
        ("mx-e5m2", 2, 2.0**-17),
        ("mx-e2m1", 1, 0.25),
        ("nv", 1, 0.25),
        ("nvfp4-norm", 1, 0.25),
    ],
)
def test_dequantized_values_are_near_the_original(quantizer: str, mantissa_bits: int, half_step: float) -> None:
    x = np.random.default_rng(8).standard_normal((50, 96), dtype=np.float32)
    elements, scales = QUANTIZERS[quantizer](x)
    steps = np.repeat(formats.decode(scales), x.shape[1] // scales.shape[1], axis=1) * half_step
    # Half a unit of a normal code, or half a subnormal step. The rounding of an e4m3 scale (1/16) comes on top where
    # the codes are not scaled by the stored number, or saturate.
    slack = 1.0625 if quantizer.startswith("nv") else 1.0
    bound = (np.abs(x) * 2.0 ** -(mantissa_bits + 1) + steps) * slack
    if quantizer == "nvfp4-norm":
        bound += np.abs(x) / 16
    assert (np.abs(formats.dequantize(elements, scales) - x) <= bound).all()


def test_dequantize_takes_e8m0_in_every_form(framework: Any) -> None:
    elements = formats.typed_view(framework.array(np.full((1, 64), 0x38, np.uint8)), E4M3)  # ones
    byte = np.array([[0, 255]], np.uint8)
    for scales in (
        framework.array(byte),
        framework.array(byte.view(np.int8)),
        formats.typed_view(framework.array(byte), "float8_e8m0fnu"),
    ):
        values = framework.numpy(formats.dequantize(elements, scales))
        assert values.view(np.int32)[0, 0] == 0x00400000  # 2**-127
        assert np.isnan(values[0, 32:]).all()


def test_a_nan_scale_makes_zeros_nan(framework: Any) -> None:
    scales = formats.typed_view(framework.array(np.array([0x7F], np.uint8)), E4M3)
    assert np.isnan(framework.numpy(formats.dequantize(framework.array(np.zeros(8, np.uint8)), scales))).all()


def test_dequantize_undoes_norm_const(framework: Any) -> None:
    x = np.random.default_rng(4).standard_normal((4, 64), dtype=np.float32)
    elements, scales = formats.quantize_nc(framework.array(x), E4M3, 12.5)
    got = framework.numpy(formats.dequantize(elements, scales, norm_const=12.5))
    np.testing.assert_allclose(got, x, rtol=1 / 16, atol=2.0**-10 * np.abs(x).max())
    plain = framework.numpy(formats.dequantize(elements, scales))
    np.testing.assert_array_equal(got, plain / np.float32(12.5))


def test_dequantize_checks_the_scales(framework: Any) -> None:
    elements = formats.typed_view(framework.array(np.zeros((2, 64), np.uint8)), E4M3)
    with pytest.raises(InvalidArgumentError, match=r"scales must have shape \(2, 2\), one scale per block; got"):
        formats.dequantize(elements, framework.array(np.zeros((2, 4), np.uint8)))
    with pytest.raises(InvalidArgumentError, match=r"scale dtype must be .*; got float32"):
        formats.dequantize(elements, framework.array(np.zeros((2, 2), np.float32)))


def test_rejections(framework: Any) -> None:
    x = framework.array(np.zeros((2, 33), np.float32))
    with pytest.raises(InvalidArgumentError, match=r"quantize_mx: dtype must be one of .*; got bfloat16"):
        formats.quantize_mx(x, "bfloat16")
    with pytest.raises(InvalidArgumentError, match="even extent along axis 1"):
        formats.quantize_mx(x, E2M1)
    with pytest.raises(InvalidArgumentError, match="quantize_nv: axis must name one of the 2 dimensions; got 2"):
        formats.quantize_nv(x, axis=2)
    with pytest.raises(InvalidArgumentError, match="vec must be >= 1; got 0"):
        formats.quantize_mx(x, E4M3, vec=0)
    with pytest.raises(InvalidArgumentError, match="quantize_nc: the scale dtype must be"):
        formats.quantize_nc(x, E4M3, 1.0, scale_dtype=E5M2)


def test_fp4_times_e4m3_is_exact_in_sixteen_bits() -> None:
    # All 16 x 254 pairs.
    codes = np.arange(256, dtype=np.uint8)
    scales = formats.decode(codes[(codes & 0x7F) != 0x7F], E4M3)
    products_ = formats.decode(codes[:16], E2M1).astype(np.float64)[:, None] * scales.astype(np.float64)
    assert products_.size == 16 * 254
    for wide in (ml_dtypes.bfloat16, np.float16):
        np.testing.assert_array_equal(products_.astype(np.float32).astype(wide).astype(np.float64), products_)


@pytest.mark.parametrize("name", FORMATS)
def test_values_times_powers_of_two_are_exact_in_bf16(model: Any, name: str) -> None:
    values = model.magnitudes(name)[1:, None] * 2.0 ** np.arange(-127, 128)
    normal = (values >= 2.0**-126) & (values < 2.0**128)
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(rounded[normal], values[normal])
