"""What the references share: exact operands, the accumulator, and the largest magnitude."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from naive_gemm import E2M1, E4M3, E5M2, FORMATS, VALUES, U, accumulation_error, operand, product

from fe_gemm.reference.operands import accumulator, dequantised, largest_magnitude, relu, stored
from fe_runtime.testing import to_framework, to_numpy

FRAMEWORKS = ("numpy", "torch", "jax")


def random_pair(name: str, m: int, n: int, k: int, batch: int, seed: int = 0, **known: Any) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return operand(rng, m, k, batch, name, **known), operand(rng, n, k, batch, name, **known)


def run(a: Any, b: Any, framework: str = "numpy", form: str = "physical", **options: Any) -> Any:
    arrays = (a.elements(), b.elements(), a.blocked(form, 1), b.blocked(form, 2))
    acc = accumulator(*(to_framework(x, framework) for x in arrays), vec=a.vec, **options)
    return to_numpy(acc).transpose(1, 2, 0)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("k", [32, 100, 260])
@pytest.mark.parametrize("size", [1.0, 2.0**-9])
def test_the_accumulator_is_within_its_bound(name: str, k: int, size: float) -> None:
    a, b = random_pair(name, 37, 21, k, 2, size=size)
    want, allowed = product(a.exact(), b.exact()), accumulation_error(a.exact(), b.exact())
    assert np.abs(want).max() > size * size
    for accumulate in ("float32", "float64"):
        got = run(a, b, accumulate=accumulate)
        assert got.dtype == np.float32
        assert (np.abs(got - want) <= allowed + U["float32"] * np.abs(want)).all()


@pytest.mark.parametrize("name", FORMATS)
def test_summed_in_float64_it_is_rounded_once(name: str) -> None:
    a, b = random_pair(name, 9, 11, 96, 1)
    with_many_bits = product(a.exact(), b.exact())
    np.testing.assert_allclose(run(a, b, accumulate="float64"), with_many_bits, rtol=2.0**-24, atol=1e-12)


def test_jax_without_64_bits_refuses_to_sum_in_them() -> None:
    a, b = random_pair("mxfp4", 4, 4, 32, 1)
    with pytest.raises(ValueError, match="jax_enable_x64"):
        run(a, b, "jax", accumulate="float64")


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("k", [64, 70])
def test_integers_are_exact_in_every_framework(name: str, framework: str, k: int) -> None:
    a, b = random_pair(name, 130, 35, k, 2, whole=True)
    np.testing.assert_array_equal(run(a, b, framework), product(a.exact(), b.exact()))


@pytest.mark.parametrize("name", FORMATS)
def test_padding_of_the_scales_never_matters(name: str) -> None:
    a, b = random_pair(name, 130, 35, 70, 2)
    arrays = a.elements(), b.elements()
    first = accumulator(*arrays, a.blocked(seed=1), b.blocked(seed=2), vec=a.vec)
    second = accumulator(*arrays, a.blocked(seed=3), b.blocked(seed=4), vec=a.vec)
    assert np.isfinite(first).all()
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, None])
def test_both_forms_and_every_spelling_of_the_scales_are_the_same(dtype: Any, framework: str) -> None:
    a, b = random_pair("mxfp8_e4m3", 130, 35, 70, 2)
    want = run(a, b)
    for form in ("logical", "physical"):
        arrays = (a.elements(), b.elements(), a.blocked(form, 5, dtype), b.blocked(form, 6, dtype))
        got = to_numpy(accumulator(*(to_framework(x, framework) for x in arrays), vec=32))
        np.testing.assert_allclose(got.transpose(1, 2, 0), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("major", ["k", "rows"])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_both_majors_give_the_same(major: str, framework: str) -> None:
    a, b = random_pair("mxfp8_e5m2", 48, 32, 70, 2, whole=True)
    arrays = (a.elements(major), b.elements(major), a.blocked(), b.blocked())
    got = to_numpy(accumulator(*(to_framework(x, framework) for x in arrays), vec=32))
    np.testing.assert_array_equal(got.transpose(1, 2, 0), product(a.exact(), b.exact()))


def test_packed_pairs_of_torch_and_their_container_are_the_same() -> None:
    a, b = random_pair("nvfp4", 8, 12, 48, 2)
    arrays = [to_framework(x, "torch") for x in (a.elements(), b.elements(), a.blocked(), b.blocked())]
    pairs = [x.view(torch.float4_e2m1fn_x2) for x in arrays[:2]]
    want, got = accumulator(*arrays, vec=16), accumulator(*pairs, *arrays[2:], vec=16)
    assert torch.equal(want, got)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "nvfp4", "mxfp4"])
def test_a_nan_scale_spoils_its_row_only(name: str, framework: str) -> None:
    a, b = random_pair(name, 20, 16, 100, 2, whole=True)
    clean = product(a.exact(), b.exact())
    a.scales[7, 1, 1] = b.scales[3, -1, 0] = 0x7F if a.scale == E4M3 else 0xFF
    got = run(a, b, framework)
    spoiled = np.zeros(got.shape, bool)
    spoiled[7, :, 1] = spoiled[:, 3, 0] = True
    assert np.isnan(got[spoiled]).all()
    np.testing.assert_array_equal(got[~spoiled], clean[~spoiled])


def test_a_nan_scale_stays_in_its_block() -> None:
    a, _ = random_pair("mxfp8_e4m3", 4, 4, 96, 1, whole=True)
    a.scales[2, 1, 0] = 0xFF
    values = dequantised(a.elements(), a.blocked(), 32)[0]
    assert np.isnan(values[2, 32:64]).all()
    assert np.isfinite(np.delete(values, 2, axis=0)).all()
    assert np.isfinite(values[2, :32]).all()
    assert np.isfinite(values[2, 64:]).all()


@pytest.mark.parametrize("byte", [0, 1, 126, 252])
def test_extreme_scales(byte: int) -> None:
    a, b = random_pair("mxfp8_e4m3", 4, 4, 32, 1, whole=True)
    a.scales[:] = byte
    b.scales[:] = 252 - byte  # 4 * 2**125 is still finite
    np.testing.assert_array_equal(run(a, b), product(a.exact(), b.exact()))


def test_infinities_of_e5m2_go_through() -> None:
    a, b = random_pair("mxfp8_e5m2", 4, 4, 32, 1)
    a.codes[1, 3, 0], b.codes[:, 3, 0] = 0x7C, [0x3C, 0xBC, 0x00, 0x3C]
    got = run(a, b)[1, :, 0]
    assert got[0] == np.inf
    assert got[1] == -np.inf
    assert np.isnan(got[2])
    assert np.isfinite(run(a, b)[[0, 2, 3]]).all()


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", [E4M3, E5M2, E2M1, "float16", "bfloat16", "float32"])
def test_results_are_stored_by_columns(name: str, framework: str) -> None:
    x = np.random.default_rng(3).standard_normal((2, 5, 6)).astype(np.float32) * 400
    c = stored(to_framework(x, framework), name)
    assert tuple(c.shape) == (5, 3 if name == E2M1 else 6, 2)
    if framework == "torch":
        assert c.stride() == ((3, 1, 15) if name == E2M1 else (6, 1, 30))
    if name in (E4M3, E5M2):
        values = VALUES[name][to_numpy(c).view(np.uint8)]
        limit = {E4M3: 448.0, E5M2: 57344.0}[name]
        exact = np.clip(x.transpose(1, 2, 0), -limit, limit)
        assert (np.abs(values - exact) <= U[name] * np.abs(exact) + 1e-3).all()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_largest_magnitude(framework: str) -> None:
    x = np.array([[[0.5, -3.0], [2.0, -0.0]]], np.float32)
    assert largest_magnitude(to_framework(x, framework), (1, 1, 1)).item() == 3.0
    assert largest_magnitude(to_framework(np.zeros((1, 2, 2), np.float32), framework), (1,)).item() == 0.0
    tiny = largest_magnitude(to_framework(np.full((1, 1, 2), 1e-40, np.float32), framework), (1,))
    assert to_numpy(tiny).view(np.int32).item() == np.float32(1e-40).view(np.int32)
    x[0, 0, 0] = np.nan
    assert np.isnan(largest_magnitude(to_framework(x, framework), (1,)).item())
    nothing = largest_magnitude(to_framework(np.zeros((1, 0, 4), np.float32), framework), (1, 1, 1))
    assert (tuple(nothing.shape), nothing.item()) == ((1, 1, 1), -np.inf)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_relu_is_strict_and_keeps_nan(framework: str) -> None:
    x = np.array([-np.inf, -1, -0.0, 0.0, 1e-40, 2, np.inf, np.nan], np.float32)
    got = np.array(to_numpy(relu(to_framework(x, framework))))
    want = np.array([0, 0, 0, 0, 1e-40, 2, np.inf, np.nan], np.float32)
    if framework == "jax":  # XLA takes subnormal numbers for zero
        got[4] = want[4]
    np.testing.assert_array_equal(got, want)
    assert not np.signbit(got[:4]).any()
