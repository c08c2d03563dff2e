"""``gemm_swiglu``: the reference against loops in float64."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from naive_gemm import (
    E4M3,
    E5M2,
    FORMATS,
    STORED,
    VALUES,
    accumulation_error,
    assert_quantised,
    assert_within,
    cast,
    encode,
    gated,
    in_order,
    operand,
    product,
    sigmoid,
    storing_error,
    value_of,
)

from fe_gemm.reference import gemm_swiglu
from fe_runtime.testing import to_framework, to_numpy

FRAMEWORKS = ("numpy", "torch", "jax")
PLAIN = ("float16", "bfloat16", "float32", E4M3, E5M2)


def plain_array(rng: Any, rows: int, k: int, batch: int, dtype: str, size: float = 1.0) -> Any:
    """Return random elements (rows, K, L) of a dtype."""
    return (rng.standard_normal((rows, k, batch)) * size).astype(STORED[dtype])


def scaled_arrays(a: Any, b: Any, framework: str = "numpy", norm_const: float | None = None) -> list[Any]:
    form = "physical" if framework == "jax" else "logical"
    given = [a.elements(), b.elements(), a.blocked(form, 1), b.blocked(form, 2)]
    given += [] if norm_const is None else [np.array([norm_const], np.float32)]
    return [to_framework(x, framework) for x in given]


def activation(x: Any) -> Any:
    up, gate = gated(x)
    return up * (gate * sigmoid(gate))


def activation_error(x: Any, error: Any) -> Any:
    """Carry the error of x through the activation, and add that of exp and reciprocal."""
    (up, gate), (up_error, gate_error) = gated(x), gated(error)
    s = sigmoid(gate)
    slope = s * (1 + gate * (1 - s))
    through = np.abs(gate * s) * up_error + np.abs(up * slope) * gate_error
    return through + 2.0**-20 * np.abs(up * gate * s) + 2.0**-119 * np.abs(up)


def check(results: Any, x: Any, error: Any, ab12_dtype: str, c_dtype: str) -> None:
    ab12, c = to_numpy(results[0]), to_numpy(results[1])
    assert_within(value_of(ab12), x, storing_error(x, ab12_dtype) + error, ab12_dtype, "ab12")
    want = activation(x)
    assert_within(value_of(c), want, storing_error(want, c_dtype) + activation_error(x, error), c_dtype, "c")


@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize(("alpha", "size"), [(1.0, 1.0), (0.7, 2.0**-5), (-2.0, 0.125)])
def test_without_scales(dtype: str, alpha: float, size: float) -> None:
    rng = np.random.default_rng(0)
    a, b = plain_array(rng, 33, 72, 2, dtype, size), plain_array(rng, 128, 72, 2, dtype, size)
    exact = value_of(a), value_of(b)
    kind = {"float32": "float32", E4M3: "float8", E5M2: "float8"}.get(dtype, "bfloat16")
    x = np.float64(np.float32(alpha)) * product(*exact)
    error = abs(alpha) * accumulation_error(*exact, kind)
    for ab12_dtype, c_dtype in [("float32", "float16"), ("bfloat16", "bfloat16"), ("float16", "float16"), (E4M3,) * 2]:
        results = gemm_swiglu(a, b, alpha=alpha, ab12_dtype=ab12_dtype, c_dtype=c_dtype)
        assert results[2] is results[3] is None
        check(results, x, error, ab12_dtype, c_dtype)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [1.0, 2.0**-9])
def test_with_scales(name: str, size: float) -> None:
    rng = np.random.default_rng(1)
    a, b = operand(rng, 37, 100, 2, name, size), operand(rng, 64, 100, 2, name, size)
    x, error = 0.5 * product(a.exact(), b.exact()), 0.5 * accumulation_error(a.exact(), b.exact())
    for ab12_dtype, c_dtype in [("float32", "float32"), (E5M2, "bfloat16"), ("float16", "float16")]:
        results = gemm_swiglu(
            *scaled_arrays(a, b), alpha=0.5, ab12_dtype=ab12_dtype, c_dtype=c_dtype, sf_vec_size=a.vec, with_amax=True
        )
        check(results, x, error, ab12_dtype, c_dtype)
        want, amax_error = activation(x), activation_error(x, error)
        at = np.unravel_index(np.argmax(np.abs(want)), want.shape)
        assert results[2] is None
        assert results[3].shape == (1, 1, 1)
        assert abs(results[3].item() - abs(want[at])) <= 2.0**-16 * abs(want[at]) + amax_error[at]


def test_up_comes_before_its_gate_in_blocks_of_32() -> None:
    a, b = np.ones((1, 16, 1), np.float32), np.zeros((128, 16, 1), np.float32)
    b[:, 0, 0] = np.arange(128) + 1000  # of these the sigmoid is 1
    ab12, c, *_ = gemm_swiglu(a, b, c_dtype="float32")
    np.testing.assert_array_equal(ab12[0, :, 0], np.arange(128) + 1000)
    want = [(64 * (j // 32) + j % 32 + 1000) * (64 * (j // 32) + 32 + j % 32 + 1000) for j in range(64)]
    np.testing.assert_array_equal(c[0, :, 0], np.float32(want))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_gates_at_the_extremes(framework: str) -> None:
    gates = np.array([-3e38, -1e30, -200, -104, -88, -20, -0.0, 0, 20, 88, 1e30, 3e38], np.float32)
    a, b = np.zeros((len(gates), 16, 1), np.float32), np.zeros((64, 16, 1), np.float32)
    a[:, 0, 0], a[:, 1, 0] = 1, gates
    b[:32, 0, 0], b[32:, 1, 0] = 1, 1  # up is 1
    c = to_numpy(gemm_swiglu(to_framework(a, framework), to_framework(b, framework), c_dtype="float32")[1])[:, 0, 0]
    assert np.isfinite(c).all()
    want = gates.astype(np.float64) * sigmoid(gates)
    assert (np.abs(c - want) <= 2.0**-20 * np.abs(want) + 2.0**-110).all()
    assert (c[:3] == 0).all()
    assert np.signbit(c[:3]).all()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_half_precision_accumulator_is_rounded_before_alpha(framework: str) -> None:
    rng = np.random.default_rng(2)
    a, b = rng.integers(-9, 9, (8, 64, 1)).astype(np.float16), rng.integers(-9, 9, (64, 64, 1)).astype(np.float16)
    a[0], b[0] = 256, 256  # 64 * 2**16 overflows
    a[1, 0, 0], b[1, 0, 0] = 300, 301  # 90300 as well, or next to it
    exact = product(value_of(a), value_of(b))
    assert (np.abs(exact) > 65520).any()
    assert (cast(exact, "float16") != exact)[np.abs(exact) < 65520].any()
    arrays = (to_framework(x, framework) for x in (a, b))
    ab12, *_ = gemm_swiglu(*arrays, alpha=0.25, acc_dtype="float16", ab12_dtype="bfloat16")
    np.testing.assert_array_equal(value_of(to_numpy(ab12)), cast(cast(exact, "float16") * 0.25, "bfloat16"))


def whole_problem(seed: int = 4) -> tuple[Any, Any, Any]:
    """Return a problem whose gates are large, or 0: then sigmoid is 0 or 1 and the result exact."""
    rng = np.random.default_rng(seed)
    a, b = operand(rng, 40, 64, 2, "mxfp8_e4m3", whole=True), operand(rng, 128, 64, 2, "mxfp8_e4m3", whole=True)
    a.codes[:, 0], b.codes[:, 0] = encode(16.0, E4M3), 0
    a.scales[:, 0], b.scales[:, 0] = 127, 127
    gates = [n for n in range(128) if n % 64 >= 32]
    b.codes[gates, 0] = encode(rng.choice([-256.0, 256.0], (len(gates), 2)), E4M3)  # +-4096 and the small rest
    b.codes[32] = 0  # a gate of 0
    x = product(a.exact(), b.exact())
    up, gate = gated(x)
    assert ((np.abs(gate) > 200) | (gate == 0)).all()
    return a, b, (x, np.where(gate < 0, np.copysign(0.0, -np.where(up == 0, 1, up)), up * gate))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("dtype", "norm_const"), [(E4M3, 1.0), (E5M2, 1.0), (E4M3, 0.3), (E5M2, 2.0**20)])
def test_quantised_output_has_the_same_bytes(dtype: str, norm_const: float, framework: str) -> None:
    a, b, (x, exact) = whole_problem()
    ab12, c, sfc, amax = gemm_swiglu(
        *scaled_arrays(a, b, framework, norm_const), c_dtype=dtype, ab12_dtype=E5M2, sf_vec_size=32
    )
    assert amax is None
    np.testing.assert_array_equal(value_of(to_numpy(ab12)), cast(x, E5M2))
    codes = to_numpy(c).view(np.uint8)
    assert_quantised(np.where(codes == 0x80, 0, codes), to_numpy(sfc), exact + 0.0, dtype, norm_const)
    assert tuple(sfc.shape) == ((2, 1, 1, 32, 4, 4) if framework == "jax" else (32, 4, 1, 4, 1, 2))


def test_rows_of_zeros_and_tiny_rows_are_quantised() -> None:
    a, b, (_, exact) = whole_problem()
    a.scales[3], a.codes[4] = 61, 0  # 2**-66 is about 1e-20; but then no gate is large, and C is up * gate / 2
    _, c, sfc, _ = gemm_swiglu(*scaled_arrays(a, b, "numpy", 1.0), c_dtype=E4M3, sf_vec_size=32)
    got, scales = c.view(np.uint8), sfc.view(np.uint8)
    assert not (got[4] & 0x7F).any()
    assert not scales[4, 0, 0].any()  # byte 0 of all blocks of row 4
    up, gate = gated(product(a.exact()[3:4], b.exact()))
    dequantised = VALUES[E4M3][got[3]] * 2.0 ** (scales[3, 0, 0].repeat(32, axis=1).reshape(-1, 2)[:64] - 127.0)
    del exact
    np.testing.assert_allclose(dequantised, (up * gate / 2)[0], rtol=2.0**-4, atol=np.abs(up * gate).max() * 2.0**-16)


@pytest.mark.parametrize(("name", "c_dtype", "expected"), [
    ("nvfp4", "bfloat16", True), ("mxfp4", "bfloat16", True), ("mxfp4", "float16", False),
    ("mxfp8_e4m3", "bfloat16", False),
])  # fmt: skip
def test_amax_by_default(name: str, c_dtype: str, expected: bool) -> None:
    rng = np.random.default_rng(6)
    a, b = operand(rng, 4, 32, 1, name), operand(rng, 64, 32, 1, name)
    results = gemm_swiglu(*scaled_arrays(a, b), c_dtype=c_dtype, sf_vec_size=a.vec)
    assert (results[3] is not None) == expected


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nan_stays_in_its_row_and_wins_the_maximum(framework: str) -> None:
    rng = np.random.default_rng(7)
    a, b = operand(rng, 6, 32, 1, "nvfp4"), operand(rng, 64, 32, 1, "nvfp4")
    a.scales[2, 1, 0] = 0x7F
    ab12, c, _, amax = gemm_swiglu(*scaled_arrays(a, b, framework), c_dtype="bfloat16")
    for result in (ab12, c):
        spoiled = np.isnan(value_of(to_numpy(result)))
        assert spoiled[2].all()
        assert not np.delete(spoiled, 2, axis=0).any()
    assert np.isnan(amax.item())


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nothing_to_multiply(framework: str) -> None:
    rng = np.random.default_rng(8)
    a, b = operand(rng, 0, 32, 1, "mxfp8_e4m3"), operand(rng, 128, 32, 1, "mxfp8_e4m3")
    for with_amax in (False, True):
        ab12, c, sfc, amax = gemm_swiglu(
            *scaled_arrays(a, b, framework, 1.0), c_dtype=E4M3, sf_vec_size=32, with_amax=with_amax
        )
        assert (tuple(ab12.shape), tuple(c.shape)) == ((0, 128, 1), (0, 64, 1))
        assert 0 in sfc.shape
        assert amax is None or amax.item() == -np.inf


@pytest.mark.parametrize("major", ["k", "rows"])
def test_majors_of_operands_without_scales(major: str) -> None:
    rng = np.random.default_rng(9)
    a, b = (rng.integers(-4, 4, (rows, 40, 2)).astype(np.float32) for rows in (24, 64))
    given = (to_framework(in_order(x, major), "torch") for x in (a, b))
    ab12 = gemm_swiglu(*given)[0]
    np.testing.assert_array_equal(to_numpy(ab12), product(a, b))
    assert ab12.stride() == (64, 1, 24 * 64)


@pytest.mark.parametrize("quantised", [False, True])
def test_jit_and_eager_agree_bit_for_bit(quantised: bool) -> None:
    rng = np.random.default_rng(10)
    a, b = operand(rng, 40, 100, 1, "mxfp8_e4m3"), operand(rng, 128, 100, 1, "mxfp8_e4m3")
    given = scaled_arrays(a, b, "jax", 0.3 if quantised else None)

    def run(*x: Any) -> Any:
        c_dtype = E4M3 if quantised else "float16"
        return gemm_swiglu(*x, alpha=0.7, c_dtype=c_dtype, sf_vec_size=32, with_amax=True)

    for eager, jitted in zip(run(*given), jax.jit(run)(*given), strict=True):
        assert (eager is None) == (jitted is None)
        assert eager is None or to_numpy(eager).tobytes() == to_numpy(jitted).tobytes()


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("dtype", PLAIN)
def test_frameworks_agree(dtype: str, framework: str) -> None:
    rng = np.random.default_rng(11)
    a, b = plain_array(rng, 17, 64, 1, dtype, 0.25), plain_array(rng, 64, 64, 1, dtype, 0.25)
    want = gemm_swiglu(a, b, c_dtype="float32")
    got = gemm_swiglu(to_framework(a, framework), to_framework(b, framework), c_dtype="float32")
    for x, y in zip(got[:2], want[:2], strict=True):
        np.testing.assert_allclose(to_numpy(x), y, rtol=1e-4, atol=1e-5)
